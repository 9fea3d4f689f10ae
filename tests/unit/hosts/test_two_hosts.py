"""Prefill on one host and decode on another, with nothing but a cable between them; and the cable may be taken out."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from attrs import evolve

from disagg_kv import Options
from disagg_kv.transports.nixl_library import MODULES
from tests.support.hosts import Host, Node, Setup, endpoints, refusal, two_hosts, wait

pytestmark = pytest.mark.slow

needs_nixl = pytest.mark.skipif(
    not any(find_spec(module) for module in MODULES), reason="NIXL is not installed: pip install nixl-cu13"
)
needs_mooncake = pytest.mark.skipif(
    find_spec("mooncake") is None,
    reason="Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda",
)
TRANSPORTS = [pytest.param("nixl", marks=needs_nixl), pytest.param("mooncake", marks=needs_mooncake)]

QUICK = Options(silence_s=8.0, heartbeat_s=0.1, retry_s=0.05)
"""A process that only waits for a core is not silent for so long."""

KEPT = {"mooncake": 3}
"""Connections that a library may keep towards one peer, where a small request needs one."""

TOKEN_BYTES = 16 << 10
SOON_S = 60.0
"""What is said to happen a few seconds after ``silence_s``, on a busy machine."""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Prefill's host and decode's."""
    reason = refusal()
    if reason:
        pytest.skip(reason)
    with two_hosts() as pair:
        yield pair


def setups(hosts: tuple[Host, Host], transport: str, ranks: int, times: Options, **options: object) -> list[Setup]:
    """So many prefill ranks on the first host, one decode rank on the second; and options of the transport."""
    a, b = hosts
    here, there = ({"host": host.address} | options if transport == "mooncake" else options for host in hosts)
    prefill = [Setup("prefill", rank, ranks, a, b, transport, here, times) for rank in range(ranks)]
    return [Setup("decode", 0, 1, b, b, transport, there, times), *prefill]


def begin(decode: Node, prefill: list[Node], room: bytes, tokens: int) -> None:
    """A whole request, not awaited."""
    decode.ask("expect", room, tokens)
    for node in prefill:
        node.ask("send", room, tokens)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_requests_cross_the_cable_byte_for_byte(hosts: tuple[Host, Host], transport: str) -> None:
    """Two ranks to one; the bytes go through the cable, and not through the kernel that both hosts share."""
    with endpoints(*setups(hosts, transport, 2, Options())) as (decode, *prefill):
        before = hosts[1].received()
        for room, tokens in ((b"first", 500), (b"second", 1000)):
            begin(decode, prefill, room, tokens)
        for node in (decode, *prefill):
            for room in (b"first", b"second"):
                look = node.until(room, lambda look: look.released)
                assert look.phase == "DONE", look
        assert decode.ask("wrong", {b"first": 500}) > 0, "the check of the bytes cannot fail"
        assert decode.ask("wrong", {b"first": 500, b"second": 1000}) == 0
        assert hosts[1].received() - before > 1500 * TOKEN_BYTES
        assert decode.ask("waiting") == 0


@needs_nixl
def test_one_decode_rank_takes_shared_memory_here_and_the_network_there(hosts: tuple[Host, Host]) -> None:
    """Both prefill ranks have both lanes. The end of the far one leaves the near one as it is."""
    a, b = hosts
    here = Setup("decode", 0, 1, b, b, "shm+nixl", times=QUICK, apart=False)
    near = evolve(here, role="prefill", instance="near")
    far = Setup("prefill", 0, 1, a, b, "shm+nixl", times=QUICK, instance="far")
    with endpoints(here, near, far) as (decode, *prefill):
        for node, room in zip(prefill, (b"one", b"two"), strict=True):
            decode.ask("expect", room, 500, node.setup.instance)
            node.ask("send", room, 500)
            assert node.until(room, lambda look: look.released).phase == "DONE"
            assert decode.until(room, lambda look: look.released).phase == "DONE"
        lanes = decode.ask("lanes")
        assert (lanes["near"], lanes["far"]) == ("shm", "nixl")
        assert [node.ask("lanes")["decode"] for node in prefill] == ["shm", "nixl"]
        assert prefill[0].ask("lanes")["room one"] == "shm"
        assert prefill[1].ask("lanes")["room two"] == "nixl"
        prefill[1].kill()
        decode.ask("expect", b"three", 500, "near")
        prefill[0].ask("send", b"three", 500)
        assert decode.until(b"three", lambda look: look.released).phase == "DONE"
        assert decode.ask("wrong", {b"one": 500, b"two": 500, b"three": 500}) == 0


@needs_nixl
def test_clocks_that_differ_change_nothing(hosts: tuple[Host, Host]) -> None:
    """Decode's host was booted a month before prefill's: no deadline or silence is measured with another's clock."""
    decode, prefill = setups(hosts, "nixl", 1, QUICK)
    month = 30 * 86400
    with endpoints(evolve(decode, clock_s=month), prefill) as (there, here):
        assert abs(there.ask("clock") - here.ask("clock") - month) < 3600
        begin(there, [here], b"room", 500)
        for node in (there, here):
            assert node.until(b"room", lambda look: look.released).phase == "DONE"
        assert there.ask("wrong", {b"room": 500}) == 0


def rests(node: Node) -> None:
    """Wait until nothing is owed to any room there, and all of its staging memory is free."""
    wait(lambda: node.ask("waiting") == node.ask("open_rooms") == 0, lambda: f"{node.setup.role}: {state(node)}")


def leaks(node: Node, before: tuple[int, int], connections: int) -> bool:
    """Whether a process has more threads, or file descriptors beside the connections of its library, than it had."""
    threads, descriptors = node.ask("held")
    return bool(threads > before[0] or descriptors > before[1] + connections)


def state(node: Node) -> str:
    """What is not at rest."""
    return f"{node.ask('waiting')} wait, {node.ask('open_rooms')} rooms, {node.ask('held')} threads and descriptors"


def broken(hosts: tuple[Host, Host], decode: Node, prefill: Node) -> list[tuple[int, int]]:
    """A small request has arrived; the cable is taken out in the middle of a large one, which fails on both sides.

    Returns:
        Threads and file descriptors of both before that.
    """
    begin(decode, [prefill], b"before", 64)
    for node in (decode, prefill):
        assert node.until(b"before", lambda look: look.released).phase == "DONE"
        assert node.ask("meet") == 1
        rests(node)
    held = [node.ask("held") for node in (decode, prefill)]
    hosts[0].limit(15)  # nine seconds: enough to see some of it, and to take the cable out before the rest
    begin(decode, [prefill], b"large", 1024)
    decode.until(b"large", lambda look: look.nbytes > 0)
    hosts[0].unplug()
    for node in (decode, prefill):
        look = node.until(b"large", lambda look: look.phase == "FAILED", SOON_S)
        assert look.error == "PeerLostError", look
        assert look.nbytes < 1024 * TOKEN_BYTES
        assert node.ask("waiting") > 0, "a write is still under way: silence is no evidence"
    assert decode.ask("look", b"large").released, "nobody else ever wrote to the pages of a staged room"
    assert decode.ask("open_rooms") == 1
    return held


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cable_out_fails_both_sides_and_back_in_it_brings_the_evidence(
    hosts: tuple[Host, Host], transport: str
) -> None:
    """Rooms fail in bounded time; leases wait until prefill can say that its writes are over."""
    with endpoints(*setups(hosts, transport, 1, QUICK)) as (decode, prefill):
        held = broken(hosts, decode, prefill)
        hosts[0].plug()
        for node in (decode, prefill):
            rests(node)
            assert node.ask("look", b"large").released
        begin(decode, [prefill], b"after", 128)
        for node in (decode, prefill):
            look = node.until(b"after", lambda look: look.released)
            assert look.phase == "DONE", look
        assert decode.ask("wrong", {b"before": 64, b"after": 128}, [b"large"]) == 0
        kept = KEPT.get(transport, 0)
        nodes = ((decode, held[0]), (prefill, held[1]))
        wait(lambda: not any(leaks(n, then, kept) for n, then in nodes), lambda: f"{held}; {state(decode)}")


@needs_nixl
def test_a_cable_that_stays_out_leaves_the_evidence_to_the_operator(hosts: tuple[Host, Host]) -> None:
    """The other host's process has ended, which nobody here can see; the operator's word frees the leases."""
    with endpoints(*setups(hosts, "nixl", 1, QUICK, drain_s=0.5)) as (decode, prefill):
        broken(hosts, decode, prefill)
        prefill.kill()
        decode.ask("confirm")
        rests(decode)
        assert decode.ask("wrong", {b"before": 64}, [b"large"]) == 0
