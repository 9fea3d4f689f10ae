"""Endpoints in real processes, over shared memory and ZeroMQ: the bytes arrive, and any process may die or freeze."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Literal

import attrs
import pytest

from disagg_kv import Options
from tests.support.channels import unused_port
from tests.support.leftovers import abandoned
from tests.support.needs import needs_mooncake, needs_nixl
from tests.support.processes import Cluster, Knobs, Look, Node, wait

pytestmark = pytest.mark.slow

QUICK = Options(silence_s=200.0, heartbeat_s=0.1, retry_s=0.1)
KEEN = Options(silence_s=30.0, heartbeat_s=0.5)
ROOM, TOKENS = b"room", 200
TRANSPORTS = ["shm", pytest.param("nixl", marks=needs_nixl), pytest.param("mooncake", marks=needs_mooncake)]
SOON_S = 60.0
"""What is said to happen within a few seconds, on a busy host: well before silence would tell."""


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Endpoints that all end with the test, and leave nothing in /dev/shm or in their folder."""
    before = abandoned()
    made = Cluster(tmp_path, getattr(request, "param", "ipc"))
    yield made
    made.stop()
    wait(lambda: abandoned() <= before, lambda: f"left in /dev/shm: {abandoned() - before}")


def deliver(prefill: Sequence[Node], decode: Sequence[Node], room: bytes = ROOM, tokens: int = TOKENS) -> None:
    """A whole request in two chunks, begun but not awaited."""
    for node in decode:
        node.ask("expect", room, prefill[0].setup.instance, tokens)
        assert node.ask("wrong", {room: tokens}) > 0, "the check of the bytes cannot fail"
    for node in prefill:
        node.ask("begin", room, tokens)
        node.ask("send", room, 0, tokens // 2, False)
        node.ask("send", room, tokens // 2, tokens, True)


def arrived(prefill: Sequence[Node], decode: Sequence[Node], rooms: dict[bytes, int] | None = None) -> None:
    """Every rank says that it is done, and the decode pools hold these rooms and nothing else."""
    rooms = rooms or {ROOM: TOKENS}
    for node in (*prefill, *decode):
        for room in rooms:
            look = node.until(room, lambda look: look.released)
            assert look.phase == "DONE", look
    for node in decode:
        assert node.ask("wrong", rooms) == 0
        assert node.ask("aux") in rooms
        assert node.ask("quarantined") == 0


def writing(node: Node) -> None:
    """Wait until a write is in flight there."""
    wait(lambda: node.ask("held") > 0, lambda: "a write in flight")


def forgotten(node: Node) -> None:
    """Wait until nothing is owed to any room there."""
    wait(lambda: node.ask("open_rooms") == 0, lambda: "the room to be forgotten", SOON_S)


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
@pytest.mark.parametrize(("ranks", "cluster"), [((2, 1), "ipc"), ((1, 2), "tcp")], indirect=["cluster"], ids=str)
def test_a_request_crosses_between_tensor_parallel_sizes(cluster: Cluster, ranks: tuple[int, int], path: str) -> None:
    """2 -> 1 and 1 -> 2 ranks, pages of 16 to pages of 32 in another order, byte for byte."""
    prefill = cluster.start("prefill", "P", ranks[0], Knobs(path=path))
    decode = cluster.start("decode", "D", ranks[1], Knobs(path=path, page_size=32, layout="HND"))
    deliver(prefill, decode)
    arrived(prefill, decode)
    assert {node.ask("look", ROOM).path for node in prefill} == {path}


def test_a_request_larger_than_the_ring_passes_through_it(cluster: Cluster) -> None:
    """1 MiB through a ring of 64 KiB, whose leases come back for the next request."""
    prefill = cluster.start("prefill", "P", 2, Knobs(slot_bytes=8 << 10))
    decode = cluster.start("decode", "D", knobs=Knobs(ring_bytes=64 << 10))
    rooms = {b"first": 1024, b"second": 1024}
    for room, tokens in rooms.items():
        deliver(prefill, decode, room, tokens)
    arrived(prefill, decode, rooms)


def test_a_killed_prefill_process_fails_its_rooms_and_its_leases_come_back(cluster: Cluster) -> None:
    """Its writes were in flight; its end is observed, which is evidence, so nothing stays in quarantine."""
    dying = cluster.start("prefill", "P", 2, Knobs(slot_bytes=8 << 10, held_from=3, options=QUICK))
    decode = cluster.start("decode", "D", knobs=Knobs(ring_bytes=64 << 10, options=QUICK))
    deliver(dying, decode, tokens=1024)
    for node in dying:
        writing(node)
    dying[1].kill()
    look = decode[0].until(ROOM, lambda look: look.released, SOON_S)
    assert (look.phase, look.error) == ("FAILED", "PeerLostError"), look
    dying[0].until(ROOM, lambda look: look.phase == "FAILED", SOON_S)
    dying[0].ask("release")
    dying[0].until(ROOM, lambda look: look.released, SOON_S)
    wait(lambda: decode[0].ask("quarantined") == 0, lambda: f"quarantine: {decode[0].ask('quarantined')}", SOON_S)
    forgotten(decode[0])
    others = cluster.start("prefill", "Q", 2, Knobs(slot_bytes=8 << 10, options=QUICK))
    deliver(others, decode, b"next", 1024)
    for node in (*others, *decode):
        assert node.until(b"next", lambda look: look.released).phase == "DONE"


def test_a_prefill_process_that_is_killed_while_it_copies_leaves_no_byte_in_pages_that_come_back(
    cluster: Cluster,
) -> None:
    """It writes into decode's pages until it ends. They come back after that, and the next room has them alone."""
    (dying,) = cluster.start("prefill", "P", 1, Knobs(path="mapped", copying=True, options=QUICK))
    decode = cluster.start("decode", "D", knobs=Knobs(path="mapped", pages=24, options=QUICK))
    deliver([dying], decode)
    writing(dying)
    assert not decode[0].ask("look", ROOM).released
    dying.kill()
    look = decode[0].until(ROOM, lambda look: look.released, SOON_S)
    assert (look.phase, look.error) == ("FAILED", "PeerLostError"), look
    forgotten(decode[0])
    decode[0].ask("free", ROOM)
    others = cluster.start("prefill", "Q", 1, Knobs(path="mapped", options=QUICK))
    deliver(others, decode, b"next")
    arrived(others, decode, {b"next": TOKENS})


@pytest.mark.parametrize("carrier", TRANSPORTS[1:])
def test_no_page_waits_for_a_killed_prefill_process_that_has_not_mapped_it(cluster: Cluster, carrier: str) -> None:
    """By default, a transport that maps nothing writes to the ring alone: that waits for the drain bound, pages do not.

    Writes are in flight when prefill is killed. A busy host may be late, but not each time.
    """
    (decode,) = cluster.start("decode", "D", knobs=Knobs("auto", transport=carrier, drain_s=3600.0))
    took = []
    for number in range(3):
        name, first, room = f"P{number}", b"first %d" % number, b"killed %d" % number
        (dying,) = cluster.start("prefill", name, knobs=Knobs("auto", transport=carrier, held_from=1))
        decode.ask("expect", first, name, 16)
        dying.ask("begin", first, 16)
        dying.ask("send", first, 0, 16, True)
        assert decode.until(first, lambda look: look.released).phase == "DONE"
        decode.ask("expect", room, name, TOKENS)
        dying.ask("begin", room, TOKENS)
        dying.ask("send", room, 0, TOKENS, True)
        writing(dying)
        dying.kill()
        began = time.monotonic()
        look = decode.until(room, lambda look: look.released)
        took.append(time.monotonic() - began)
        assert (look.phase, look.error) == ("FAILED", "PeerLostError"), look
        assert decode.ask("quarantined") > 0
    assert min(took) <= 0.5, took


def test_a_decode_process_that_is_killed_during_a_copy_frees_no_page_before_its_end(cluster: Cluster) -> None:
    """The mapping outlives its owner: prefill's pages are read until the copy ends, and nothing crashes."""
    (prefill,) = cluster.start("prefill", "P", 1, Knobs(path="mapped", copying=True, options=QUICK))
    (dying,) = cluster.start("decode", "D", knobs=Knobs(path="mapped", options=QUICK))
    deliver([prefill], [dying])
    writing(prefill)
    dying.kill()
    look = prefill.until(ROOM, lambda look: look.phase == "FAILED", SOON_S)
    assert look.error == "PeerLostError", look
    assert not prefill.ask("look", ROOM).released
    prefill.ask("release")
    prefill.until(ROOM, lambda look: look.released, SOON_S)
    forgotten(prefill)
    fresh = cluster.start("decode", "E", knobs=Knobs(path="mapped", options=QUICK))
    deliver([prefill], fresh, b"next")
    arrived([prefill], fresh, {b"next": TOKENS})


@pytest.mark.parametrize("carrier", TRANSPORTS)
def test_a_killed_decode_process_gives_prefill_its_pages_back(cluster: Cluster, carrier: str) -> None:
    """The delivery fails and is released on every prefill rank; the other decode rank's room fails too."""
    prefill = cluster.start("prefill", "P", 2, Knobs(transport=carrier, options=QUICK))
    decode = cluster.start("decode", "D", 2, Knobs(transport=carrier, options=QUICK))
    for node in decode:
        node.ask("expect", ROOM, "P", TOKENS)
    for node in prefill:
        node.ask("begin", ROOM, TOKENS)
        node.ask("send", ROOM, 0, TOKENS // 2, False)
    for node in decode:
        node.until(ROOM, lambda look: look.nbytes > 0)
    decode[1].kill()
    for node in (*prefill, decode[0]):
        look = node.until(ROOM, lambda look: look.released, SOON_S)
        assert look.phase == "FAILED", look
        forgotten(node)
    fresh = cluster.start("decode", "E", 2, Knobs(transport=carrier, options=QUICK))
    deliver(prefill, fresh, b"next")
    arrived(prefill, fresh, {b"next": TOKENS})


@pytest.mark.parametrize("carrier", TRANSPORTS)
def test_a_frozen_prefill_process_stops_nobody_and_its_leases_wait_for_its_word(cluster: Cluster, carrier: str) -> None:
    """Silence fails its room but frees nothing; when it wakes, its late writes land where they may."""
    # A process that only waits for a core is not silent for so long.
    options = Options(silence_s=15.0, heartbeat_s=0.1, retry_s=0.1)
    knobs = Knobs(transport=carrier, ring_bytes=64 << 10, options=options)
    rooms = {b"first": 64, b"meanwhile": 1024, b"afterwards": 512}
    (frozen,) = cluster.start("prefill", "P", knobs=attrs.evolve(knobs, slot_bytes=8 << 10, held_from=1))
    living = cluster.start("prefill", "Q", knobs=attrs.evolve(knobs, slot_bytes=8 << 10))
    (receiver,) = decode = cluster.start("decode", "D", knobs=knobs)
    deliver(living, decode, b"first", 64)
    assert receiver.until(b"first", lambda look: look.released).phase == "DONE"
    deliver([frozen], decode, b"stuck", 1024)
    writing(frozen)
    frozen.freeze()
    deliver(living, decode, b"meanwhile", 1024)
    look = receiver.until(b"stuck", lambda look: look.released)
    assert (look.phase, look.error) == ("FAILED", "PeerLostError"), look
    assert receiver.ask("quarantined") > 0
    assert receiver.until(b"meanwhile", lambda look: look.released).phase == "DONE"
    deliver(living, decode, b"afterwards", 512)
    assert receiver.until(b"afterwards", lambda look: look.released).phase == "DONE"
    assert receiver.ask("quarantined") > 0
    frozen.thaw()
    assert frozen.until(b"stuck", lambda look: look.phase == "FAILED").error
    assert receiver.ask("quarantined") > 0, "its writes are not quiet yet"
    before = receiver.ask("wrong", rooms)
    frozen.ask("release")
    wait(lambda: receiver.ask("quarantined") == 0, lambda: f"quarantine: {receiver.ask('quarantined')}")
    assert receiver.ask("wrong", rooms) == before
    frozen.until(b"stuck", lambda look: look.released)
    deliver([frozen], decode, b"again", 64)
    assert receiver.until(b"again", lambda look: look.released).phase == "DONE"


@pytest.mark.parametrize("cluster", ["ipc", "tcp", "unix"], indirect=True)
@pytest.mark.parametrize("killed", [1, 2])
def test_keys_of_killed_ranks_in_the_store_are_a_named_error_soon(cluster: Cluster, killed: int) -> None:
    """Nobody can take them out of the store. Who has never met the instance is told that no process listens there."""
    prefill = cluster.start("prefill", "P", 2, Knobs(options=QUICK))
    for node in prefill:
        node.ask("open_rooms")
    for node in prefill[:killed]:
        node.kill()
    (receiver,) = cluster.start("decode", "D", knobs=Knobs(options=QUICK))
    receiver.ask("expect", ROOM, "P", TOKENS)
    look = receiver.until(ROOM, lambda look: look.released, SOON_S)
    assert (look.phase, look.error) == ("FAILED", "PeerLostError"), look
    assert "no process listens there" in look.message


FOUND_S = 10.0
"""What a busy host may take for a second."""


@pytest.mark.parametrize("cluster", ["ipc", "tcp", "unix"], indirect=True)
def test_each_further_request_to_a_killed_instance_fails_at_once_until_it_is_back(cluster: Cluster) -> None:
    """The first request after the end tries to connect for ``closed_s``; then attempts go on beside the requests.

    Only a request that waits for no attempt gets the outcome of an earlier one: no clock is needed to show it.
    """
    (first,) = cluster.start("prefill", "P", knobs=Knobs(options=KEEN))
    (decode,) = cluster.start("decode", "D", knobs=Knobs(options=KEEN))
    deliver([first], [decode], b"before")
    decode.until(b"before", lambda look: look.released)
    first.kill()

    def request(room: bytes) -> Look:
        decode.ask("expect", room, "P", 16)
        look = decode.until(room, lambda look: look.released)
        assert (look.phase, look.error) == ("FAILED", "PeerLostError"), look
        return look

    request(b"first")
    for number in range(6):
        assert "still so" in request(b"later %d" % number).message
        time.sleep(0.4)
    again = cluster.again(first)
    again.ask("open_rooms")
    back, rooms = time.monotonic(), (b"again %d" % number for number in count())
    while True:
        room = next(rooms)
        deliver([again], [decode], room, 16)
        if decode.until(room, lambda look: look.released).phase == "DONE":
            break
        assert time.monotonic() - back < FOUND_S, "the restarted instance is not found"
        time.sleep(0.1)


def test_an_instance_that_was_closed_is_a_named_error_soon(cluster: Cluster) -> None:
    """It has withdrawn its keys, and comes back with others."""
    prefill = cluster.start("prefill", "P", 2, Knobs(options=QUICK))
    for node in prefill:
        node.ask("open_rooms")
    for node in prefill:
        node.stop()
    (receiver,) = cluster.start("decode", "D", knobs=Knobs(options=QUICK))
    receiver.ask("expect", ROOM, "P", TOKENS)
    look = receiver.until(ROOM, lambda look: look.released, SOON_S)
    assert (look.phase, look.error) == ("FAILED", "InstanceClosedError"), look
    assert "has closed" in look.message
    again = [cluster.again(node) for node in prefill]
    for node in again:
        node.ask("open_rooms")
    deliver(again, [receiver], b"next")
    arrived(again, [receiver], {b"next": TOKENS})


@pytest.mark.parametrize("wire", ["ipc", "tcp"])
def test_a_process_that_comes_back_under_its_address_serves_new_rooms(
    cluster: Cluster, wire: Literal["ipc", "tcp"], tmp_path: Path
) -> None:
    """The same instance, rank and address, another life."""
    bind = f"ipc://{tmp_path}/again" if wire == "ipc" else f"tcp://127.0.0.1:{unused_port()}"
    (first,) = cluster.start("prefill", "P", knobs=Knobs(bind=bind, options=QUICK))
    decode = cluster.start("decode", "D", knobs=Knobs(options=QUICK))
    deliver([first], decode, b"before")
    decode[0].until(b"before", lambda look: look.released)
    first.kill()
    second = cluster.start("prefill", "P", knobs=Knobs(bind=bind, options=QUICK))
    second[0].ask("open_rooms")
    deliver(second, decode, b"after")
    for node in (*second, *decode):
        look = node.until(b"after", lambda look: look.released)
        assert look.phase == "DONE", look
    assert decode[0].ask("wrong", {b"before": TOKENS, b"after": TOKENS}) == 0
