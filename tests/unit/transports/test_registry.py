"""Transports by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from disagg_kv.channels import Hub, InprocChannel, ZmqChannel
from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from disagg_kv.errors import ConfigurationError, MissingDependencyError, TransportError, UnknownNameError
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.ids import Ticket
from disagg_kv.memory import PagedPool
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.transports import (
    InprocTransport,
    ShmTransport,
    available,
    between_processes,
    register_transport,
    registry,
    transport,
)


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def entry_points(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, module: str = "") -> None:
    """Put an installed package with these entry points and this module on the path."""
    info = folder / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{text}\n")
    (folder / "third_party_transport.py").write_text(module)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "third_party_transport", raising=False)


def test_built_in_transports_have_names() -> None:
    """And work on this host."""
    assert isinstance(transport("inproc"), InprocTransport)
    assert isinstance(transport("shm"), ShmTransport)
    found = available()
    assert found["inproc"] is None
    assert found["shm"] is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    """Those registered by a call among them."""
    register_transport("mine", InprocTransport)
    with pytest.raises(UnknownNameError, match=r"unknown transport 'shn'; known: .*inproc, mine.*, shm") as caught:
        transport("shn")
    assert {"inproc", "mine", "shm"} <= set(caught.value.known)


def test_an_unknown_option_lists_the_known_ones() -> None:
    """The parameters of the factory are the options; one that takes any gets them all."""
    given = []

    def make(depth: int = 1, *, width: int = 2) -> InprocTransport:
        given.append((depth, width))
        return InprocTransport()

    def make_any(**options: object) -> InprocTransport:
        given.append((len(options), 0))
        return InprocTransport()

    register_transport("mine", make)
    register_transport("any", make_any)
    transport("mine", depth=3, width=4)
    transport("any", x=1, y=2)
    assert given == [(3, 4), (2, 0)]
    with pytest.raises(UnknownNameError, match="unknown option of transport 'mine' 'deep'; known: depth, width"):
        transport("mine", deep=3)
    with pytest.raises(UnknownNameError, match="known: none"):
        transport("inproc", depth=1)


def test_an_installed_package_names_its_transports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the entry-point group, loaded only when asked for."""
    module = "from disagg_kv.transports import InprocTransport as Made\n"
    entry_points(tmp_path, monkeypatch, "theirs = third_party_transport:Made", module)
    assert "third_party_transport" not in sys.modules
    assert isinstance(transport("theirs"), InprocTransport)
    assert available()["theirs"] is None


def test_a_package_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, and it does not hide the others."""
    entry_points(tmp_path, monkeypatch, "theirs = third_party_transport:Made", "raise OSError('no card')")
    with pytest.raises(ConfigurationError, match=r"transport 'theirs': third_party_transport:Made .*no card"):
        transport("theirs")
    found = available()
    assert found["shm"] is None
    assert "no card" in str(found["theirs"])


def test_a_host_that_lacks_something_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: a system without memfd_create."""
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(MissingDependencyError, match="memfd_create"):
        transport("shm")
    assert "Linux" in str(available()["shm"])


def not_here() -> InprocTransport:
    """A transport whose package is missing."""
    raise MissingDependencyError("transport 'absent'", "package absent is not installed", "pip install absent")


def wrong(size: int = 1) -> InprocTransport:
    """A transport that refuses how it is configured."""
    raise ConfigurationError(f"{size} is no size")


class Other(InprocTransport):
    """Another name."""

    name = "other"

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.depth = depth


def test_a_name_of_several_makes_them_in_order_with_options_for_each() -> None:
    """Those of a name that is joined by ``+``."""
    register_transport("other", Other)
    made = between_processes("other+shm", other={"depth": 3})
    other, shm = made
    assert isinstance(other, Other)
    assert isinstance(shm, ShmTransport)
    assert other.depth == 3
    assert made.name == "other+shm"
    with pytest.raises(ConfigurationError, match="none of them starts here for memory on 'cuda:0'"):
        between_processes("other+shm", "cuda:0")


@pytest.mark.parametrize("name", ["shm+", "+", "shm+shm", "auto+shm"])
def test_names_of_several_that_cannot_be_are_refused(name: str) -> None:
    """And no transport may be registered under such a name."""
    with pytest.raises(ConfigurationError):
        between_processes(name)
    with pytest.raises(ConfigurationError, match="means several transports"):
        register_transport(name, InprocTransport)


def test_of_several_those_that_do_not_start_are_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """With a warning; if none starts, each is in the error. Options that are wrong are no reason to go without."""
    register_transport("absent", not_here)
    register_transport("wrong", wrong)
    made = between_processes("absent+shm+wrong")
    assert set(made.excluded) == {"absent", "wrong"}
    assert "goes without 'absent': transport 'absent': package absent is not installed" in caplog.text
    with pytest.raises(ConfigurationError, match=r"none of them starts .*: absent \(.*not installed.*wrong \(1 is no"):
        between_processes("absent+wrong")
    for name, options, why in (
        ("shm+wrong", {"wrong": {"size": 7}}, "7 is no size"),
        ("shm+wrong", {"wrong": {"depth": 7}}, "unknown option"),
        ("shm+wrong", {"inproc": {}}, "unknown transport with options 'inproc'"),
        ("shm+wrong", {"wrong": 7}, "options of transport 'wrong'"),
        ("shm+nothing", {}, "unknown transport 'nothing'"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            between_processes(name, **options)


def test_auto_takes_the_transport_of_the_host_and_the_first_network_that_starts() -> None:
    """And says why it goes without the others."""
    register_transport("nixl", not_here)
    register_transport("mooncake", Other)
    made = between_processes("auto", network=True)
    assert [one.name for one in made] == ["shm", "other"]
    assert "package absent is not installed" in made.excluded["nixl"]
    register_transport("nixl", Other)
    both = between_processes("auto", network=True, mooncake={"depth": 9}, nixl={"depth": 5})
    _, other = both
    assert isinstance(other, Other)
    assert other.depth == 5
    register_transport("nixl", not_here)
    register_transport("mooncake", not_here)
    alone = between_processes("auto", "cpu", "10.0.0.7")
    assert (alone.name, set(alone.excluded)) == ("shm", {"nixl", "mooncake"})


def test_auto_starts_no_network_for_peers_of_one_host_unless_the_one_within_it_does_not_start() -> None:
    """What is not started is left out by name."""
    register_transport("nixl", Other)
    register_transport("mooncake", not_here)
    for made in (between_processes("auto", "cpu", "10.0.0.7", network=False), between_processes("auto")):
        assert (made.name, set(made.excluded)) == ("shm", {"nixl", "mooncake"})
        assert "name it to have it" in made.excluded["nixl"]
    register_transport("shm", not_here)
    assert between_processes("auto").name == "other"
    with pytest.raises(ConfigurationError, match="network"):
        between_processes("auto", network="no")


@pytest.mark.parametrize(
    ("name", "device", "why", "closed"),
    [
        ("mine", "cuda:0", "transport 'mine' moves no memory on 'cuda:0': it moves memory of kind cpu", ["shm"]),
        ("mine+near", "cuda:0", r"transport 'mine\+near': .*'cuda:0': mine \(it moves .*near \(it", ["shm", "near"]),
        ("mine+twin", "cpu", r"transport 'mine\+twin': more than one 'shm'", ["shm", "shm"]),
        ("auto", "cpu", "transport 'auto': more than one 'near'", ["near", "near"]),
        ("lacks", "cpu", "transport 'lacks': a transport is needed", ["lacks"]),
        ("mine+lacks", "cuda", "mine .it moves.*, lacks .transport 'lacks': a tr", ["shm", "lacks"]),
    ],
)
def test_transports_that_are_refused_after_their_start_are_closed(
    name: str, device: str, why: str, closed: list[str]
) -> None:
    """The error names them as the caller does."""
    found: list[str] = []

    class Mine(ShmTransport):
        def close(self, drain_s: float) -> Sequence[Ticket]:
            found.append(self.name)
            return super().close(drain_s)

    class Near(InprocTransport):
        name = "near"

        def close(self, drain_s: float) -> Sequence[Ticket]:
            found.append(self.name)
            raise TransportError("a card that cannot be closed")

    class Lacks:
        name = "lacks"

        def close(self, drain_s: float) -> None:
            found.append(self.name)

    for of, make in (("mine", Mine), ("twin", Mine), ("near", Near), ("lacks", Lacks)):
        register_transport(of, make)  # type: ignore[arg-type]
    register_transport("shm", Near)
    register_transport("nixl", Near)
    with pytest.raises(ConfigurationError, match=why):
        between_processes(name, device, **({"network": True} if name == "auto" else {}))
    assert found == closed


def test_a_factory_that_makes_no_transport_is_named() -> None:
    """There is nothing to close."""
    register_transport("mine", lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigurationError, match="transport 'mine': a transport is needed"):
        transport("mine")


@pytest.mark.parametrize("bad", [5, None, b"cpu"])
def test_names_and_devices_are_text(bad: str) -> None:
    """The error names the argument."""
    for name in ("shm", "shm+inproc", "auto"):
        with pytest.raises(ConfigurationError, match="device: text is needed"):
            between_processes(name, bad)
        with pytest.raises(ConfigurationError, match="host: text is needed"):
            between_processes(name, "cpu", bad)
    with pytest.raises(ConfigurationError, match="name of transports: text is needed"):
        between_processes(bad)


class Wire(InprocTransport):
    """Other hosts reach it at an address of its host."""

    name = "wire"

    def __init__(self, host: str = "127.0.0.1", drain_s: float = 5.0) -> None:
        super().__init__()
        self.host, self.drain_s = host, drain_s


@pytest.mark.parametrize("name", ["auto", "shm+mooncake", "mooncake"])
def test_a_network_gets_the_address_at_which_other_hosts_reach_this_one(name: str) -> None:
    """If it has an option for that, and none is given."""
    register_transport("nixl", not_here)
    register_transport("mooncake", Wire)

    def host(**options: object) -> str:
        made = between_processes(name, "cpu", "10.0.0.7", **options)
        *_, wire = made
        assert isinstance(wire, Wire)
        return wire.host

    assert host() == "10.0.0.7"
    own: dict[str, object] = {"host": "10.0.0.8"}
    assert host(mooncake=own) == "10.0.0.8"
    register_transport("nixl", Other)
    assert between_processes("nixl", "cpu", "10.0.0.7").name == "other"


@pytest.mark.parametrize("name", ["auto", "shm+nixl", "nixl"])
def test_peers_of_other_hosts_have_longer_to_write_their_last_bytes_over_nixl(name: str) -> None:
    """Unless an option says otherwise."""
    register_transport("nixl", Wire)

    def drain_s(host: str, **options: object) -> float:
        made = between_processes(name, "cpu", host, **options)
        *_, wire = made
        assert isinstance(wire, Wire)
        return wire.drain_s

    own: dict[str, object] = {"drain_s": 7.0}
    assert drain_s("10.0.0.7") == registry.FAR_DRAIN_S
    assert drain_s("10.0.0.7", nixl=own) == 7.0
    if name != "auto":
        assert drain_s("") == 5.0


def test_an_endpoint_without_a_transport_is_reached_at_the_address_of_its_channel() -> None:
    """Its own choice has a network only if the channel leaves the host."""
    register_transport("nixl", not_here)
    register_transport("mooncake", Wire)
    spec = CacheSpec.kv(1, 1, 8, "int8")
    pool = PagedPool.allocate(spec, shard(spec), pages=2, page_size=2)
    found = []
    for advertise in ("10.0.0.7", None):
        channel = ZmqChannel(advertise=advertise, unencrypted_network=True)
        end = PrefillEndpoint(pool, channel=channel, rendezvous=StaticRendezvous({}), instance="p", slot_bytes=1 << 12)
        found.append(end.driver.loop.me.transports)
        end.close()
    assert [getattr(one, "host", "") for one in found[0]] == ["", "10.0.0.7"]
    assert found[1].name == "shm"


def test_auto_needs_something_that_moves_the_pools_memory() -> None:
    """Without it, every transport is named; so is a device of another kind."""
    for name in ("cuda_ipc", "nixl"):
        register_transport(name, not_here)
    register_transport("mooncake", Other)
    with pytest.raises(ConfigurationError, match=r"none starts .* 'cuda:1': cuda_ipc \(.*mooncake \(it moves"):
        between_processes("auto", "cuda:1")
    with pytest.raises(UnknownNameError, match="unknown device 'tpu'"):
        between_processes("auto", "tpu")


def test_what_was_started_is_closed_where_no_caller_gets_it() -> None:
    """A wrong option of a later transport, and an endpoint that is refused."""
    closed: list[str] = []

    class Near(InprocTransport):
        def close(self, drain_s: float) -> Sequence[Ticket]:
            closed.append(self.name)
            return super().close(drain_s)

    register_transport("shm", Near)
    register_transport("mooncake", not_here)
    register_transport("nixl", Other)
    with pytest.raises(ConfigurationError, match="unknown option"):
        between_processes("auto", network=True, nixl={"wrong": 1})
    assert closed == ["inproc"]
    register_transport("nixl", not_here)
    spec = CacheSpec.kv(1, 1, 8, "int8")
    pool = PagedPool.allocate(spec, shard(spec), pages=2, page_size=2)
    channel, found = InprocChannel(Hub(), "here"), StaticRendezvous()
    try:
        with pytest.raises(ConfigurationError, match="slots"):
            PrefillEndpoint(pool=pool, channel=channel, rendezvous=found, instance="p", slots=0)
        with pytest.raises(ConfigurationError, match="ring_bytes"):
            DecodeEndpoint(pool=pool, channel=channel, rendezvous=found, instance="d", ring_bytes=0)
        assert closed == ["inproc"] * 3
        with pytest.raises(ConfigurationError, match="instance"):
            PrefillEndpoint(pool=pool, channel=channel, rendezvous=found, instance="")
        assert closed == ["inproc"] * 3, "nothing was started"
    finally:
        channel.close()
