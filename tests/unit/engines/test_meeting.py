"""The option ``rendezvous`` of the adapters: what it names, and what is wrong with it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import TCPStore

from disagg_kv.engines import meeting
from disagg_kv.engines.meeting import meet_at, meeting_place
from disagg_kv.errors import ConfigurationError, StoreUnreachableError
from disagg_kv.ids import Rank
from disagg_kv.rendezvous import EtcdRendezvous, Rendezvous, RequestRendezvous, Source
from tests.support.etcd import EtcdServer, free_port
from tests.support.needs import needs_etcd


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.kill()


def place(server: EtcdServer) -> str:
    """``HOST:PORT``."""
    return server.url.removeprefix("http://")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("tcp://host:1", ("tcp", ["host:1"], "")),
        ("tcp://[::1]:29500", ("tcp", ["[::1]:29500"], "")),
        ("tcp://host:1/", ("tcp", ["host:1"], "")),
        ("etcd://host:2379", ("etcd", ["host:2379"], "")),
        ("etcd://host:2379/", ("etcd", ["host:2379"], "")),
        ("etcd://10.0.0.1:2379,[fd00::1]:2379/prod/a", ("etcd", ["10.0.0.1:2379", "[fd00::1]:2379"], "prod/a")),
    ],
)
def test_an_address_has_a_kind_members_and_a_prefix(given: str, found: object) -> None:
    assert meeting_place(given) == found


@pytest.mark.parametrize(
    "given",
    [
        "tcp://", "tcp://host", "tcp://host:", "tcp://:7", "tcp://host:0", "tcp://a:1,b:1", "tcp://host:1/prefix",
        "etcd://", "etcd://host", "etcd://host/prefix", "etcd:///prefix", "etcd://a:1,/prefix", "etcd://a:1,b/prefix",
        "etcd://user:secret@host:2379/prefix", "http://host:2379", "https://host:2379", "host:2379", "static", "://a:1",
        "tcp://host:1?x", "etcd://host:1#x/prefix", "etcd://a:1, b:2/prefix", "etcd://a:1\n/prefix",
    ],
)  # fmt: skip
def test_what_names_no_place_is_refused_with_what_does(given: str) -> None:
    with pytest.raises(
        ConfigurationError,
        match=rf"rendezvous {re.escape(repr(given))}: not tcp://HOST:PORT of a torch TCPStore, "
        r"or etcd://HOST:PORT\[,HOST:PORT\]/PREFIX",
    ):
        meeting_place(given)


@pytest.mark.parametrize("given", ["tcp://host:port", "tcp://host:65536", "etcd://host:-1/a", "etcd://[::1:2379/a"])
def test_what_is_no_address_is_refused_with_the_reason(given: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"rendezvous {re.escape(repr(given))}: (Port|Invalid)"):
        meeting_place(given)


def test_without_the_option_addresses_travel_in_requests() -> None:
    assert isinstance(meet_at(""), RequestRendezvous)


def published(one: Rendezvous, other: Rendezvous) -> object:
    """What the second finds of what the first publishes."""
    one.publish("P", Rank(0), 1, "tcp://127.0.0.1:7")
    return other.lookup(Source("P"))


@needs_etcd
def test_etcd_keeps_deployments_of_different_prefixes_apart(server: EtcdServer) -> None:
    """Without a prefix it is that of the library. A member that is away does no harm."""
    gone = f"127.0.0.1:{free_port()}"
    for first, second, same in (("/a", "/a", True), ("/a", "/b", False), ("", "/disagg_kv", True)):
        one, other = meet_at(f"etcd://{gone},{place(server)}{first}"), meet_at(f"etcd://{place(server)}{second}")
        assert isinstance(one, EtcdRendezvous)
        assert isinstance(other, EtcdRendezvous)
        with one, other:
            assert (published(one, other) is not None) == same


def test_a_store_is_reached() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = f"tcp://127.0.0.1:{store.port}"
    assert published(meet_at(where), meet_at(where)) == ("tcp://127.0.0.1:7",)


@pytest.mark.parametrize("silent", [False, True], ids=["shut", "silent"])
def test_a_port_without_a_store_ends_in_a_sentence(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a server accepts and says nothing, for which torch waits without limit."""
    monkeypatch.setattr(meeting, "STORE_S", 0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silent:
            listener.listen()
        where = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(
            StoreUnreachableError, match=f"rendezvous '{where}': no torch TCPStore answers there; start one first: "
        ):
            meet_at(where)


@needs_etcd
def test_the_port_of_etcd_is_none_of_a_store(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "STORE_S", 2.0)
    with pytest.raises(StoreUnreachableError, match="no torch TCPStore answers there; start one first"):
        meet_at(f"tcp://{place(server)}")
