"""A real etcd that is killed, stands still, loses its data or its history, and processes that outlive their lease."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from disagg_kv.errors import DisaggKVError, PeerLostError, StoreUnreachableError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Rank
from disagg_kv.rendezvous import EtcdRendezvous, Source
from tests.support.etcd import EtcdServer, free_port
from tests.support.needs import needs_etcd
from tests.support.rig import Rig, tp_shards

pytestmark = [needs_etcd, pytest.mark.slow]

SPEC = CacheSpec.kv(2, 4, 8, "float16")
KEY = "disagg_kv/ranks/prefill/1/0"

CHILD = """
import sys, time
from disagg_kv.rendezvous import EtcdRendezvous
EtcdRendezvous(sys.argv[1:], lease_s=2).publish("prefill", 0, 1, "child")
print("published", flush=True)
time.sleep(60)
"""

Make = Callable[..., EtcdRendezvous]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server of this test alone."""
    server = EtcdServer(tmp_path / "etcd").start()
    yield server
    server.send(signal.SIGCONT)
    server.kill()


@pytest.fixture
def make(server: EtcdServer) -> Iterator[Make]:
    """Makes a rendezvous over it, as another process has it; closed in the end, while the server may be away."""
    with ExitStack() as stack:

        def make(lease_s: int = 180) -> EtcdRendezvous:
            return stack.enter_context(EtcdRendezvous([server.url], lease_s=lease_s, timeout_s=1.0))

        yield make


def within(seconds: float, ask: Callable[[], bool]) -> bool:
    """Whether something is so, some time until then; an error of the store means that it is not."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(DisaggKVError):
            if ask():
                return True
        time.sleep(0.02)
    return ask()


def found(one: EtcdRendezvous, instance: str = "prefill") -> tuple[str, ...] | None:
    return one.lookup(Source(instance))


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stands still", "is killed"])
def test_rooms_go_on_without_etcd(server: EtcdServer, make: Make, how: signal.Signals) -> None:
    """Rooms in flight and new ones, on several ranks of both sides, beyond the lease; so do those after its return."""
    rig = Rig(SPEC, threaded=True)
    rig.rendezvous = make(lease_s=2)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 2))
    rig.request("first", prefills, decodes, 8).start().landed()
    flying = rig.request("flying", prefills, decodes, 8).open_decode().expect().open_prefill()
    server.send(how)
    number, until, is_back = 0, time.monotonic() + 4.0, False
    while not is_back or time.monotonic() < until:
        if not is_back and time.monotonic() > until:
            if how is signal.SIGSTOP:
                server.send(signal.SIGCONT)
            else:
                server.kill()
                server.start()
            is_back, until = True, time.monotonic() + 3.0
        request = rig.request(f"new {number}", prefills, decodes, 8).start().landed()
        for decode, table in zip(decodes, request.taken, strict=True):
            decode.give(table)
        for prefill, tables in zip(prefills, request.given.values(), strict=True):
            prefill.give(tables[0])
        number += 1
    flying.send(8).finish().landed()
    assert number > 1
    # A rank that comes now finds the others: a lease that was lost is replaced.
    reader = make()
    assert within(15.0, lambda: found(reader, "P") == ("inproc://P0", "inproc://P1"))
    for member in rig.members:
        member.close()


def test_what_is_known_can_be_looked_up_while_etcd_is_away(server: EtcdServer, make: Make) -> None:
    """The rest is a lost peer, by name, at once; what changed meanwhile is known afterwards."""
    one, reader = make(), make()
    one.publish("prefill", Rank(0), 1, "there")
    one.publish("decode", Rank(0), 2, "zero")
    assert within(5.0, lambda: found(reader) == ("there",))
    server.kill()
    assert within(5.0, lambda: _lost(reader, "decode"))
    began = time.monotonic()
    for _ in range(100):
        assert found(reader) == ("there",)
        assert _lost(reader, "decode")
        assert _lost(reader, "unknown")
    assert time.monotonic() - began < 1.0
    with pytest.raises(StoreUnreachableError, match=f"etcd at {server.url} cannot be reached"):
        one.publish("decode", Rank(1), 2, "one")
    with pytest.raises(StoreUnreachableError, match=f"etcd at {server.url} cannot be reached"):
        make().lookup(Source("prefill"))
    server.start()
    one.publish("decode", Rank(1), 2, "one")
    assert within(15.0, lambda: found(reader, "decode") == ("zero", "one"))
    assert found(reader, "unknown") is None


def _lost(one: EtcdRendezvous, instance: str) -> bool:
    """Whether a look-up fails because etcd is away."""
    try:
        found(one, instance)
    except PeerLostError as exc:
        return re.search(f"instance '{instance}': .*(cannot be reached|watch has ended)", str(exc)) is not None
    return False


def test_a_server_that_stands_still_is_a_lost_peer(server: EtcdServer, make: Make) -> None:
    """No call waits for longer than its time-out; afterwards all goes on, and no rank was forgotten."""
    one = make(lease_s=2)
    one.publish("prefill", Rank(0), 1, "there")
    assert found(one) == ("there",)
    server.send(signal.SIGSTOP)
    fresh = make()
    calls: list[Callable[[], object]] = [lambda: one.publish("decode", Rank(0), 1, "a"), lambda: found(fresh)]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(PeerLostError):
            call()
        assert time.monotonic() - began < 10.0
    assert found(one) == ("there",)
    # A look-up of what is not known asks etcd for nothing, but the lease could not be renewed.
    assert within(60.0, lambda: _lost(one, "unknown"))
    time.sleep(2.0)
    server.send(signal.SIGCONT)
    assert within(60.0, lambda: found(one, "unknown") is None)
    assert within(60.0, lambda: found(fresh) == ("there",))


@pytest.mark.parametrize("more", [0, 50], ids=["behind", "ahead"])
def test_a_server_that_lost_its_data_gets_them_back(server: EtcdServer, make: Make, more: int) -> None:
    """Every process publishes its ranks again with their ids, whether or not the new server has had more changes."""
    ranks = [make(lease_s=4) for _ in range(3)]
    for rank, one in enumerate(ranks):
        one.publish("prefill", Rank(rank), 3, str(rank))
    make(lease_s=4).publish("gone", Rank(0), 2, "part")
    before = {path: one["value"] for path, one in server.keys("disagg_kv/").items()}
    assert within(5.0, lambda: all(found(one) == ("0", "1", "2") for one in ranks))
    server.kill()
    server.wipe()
    server.start()
    for number in range(more):
        server.put("other", str(number))
    assert within(20.0, lambda: {path: one["value"] for path, one in server.keys("disagg_kv/").items()} == before)
    ranks.append(make())
    assert within(20.0, lambda: all(found(one) == ("0", "1", "2") for one in ranks))
    ranks[0].publish("new", Rank(0), 1, "after")
    assert within(20.0, lambda: all(found(one, "new") == ("after",) for one in ranks))


def test_a_watch_resumes_where_it_was(server: EtcdServer, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no more than has changed."""
    one, reader = make(), make()
    for number in range(20):
        one.publish(f"instance {number}", Rank(0), 1, "there")
    assert within(5.0, lambda: found(reader, "instance 19") == ("there",))
    read: list[object] = []
    monkeypatch.setattr(type(reader._watch), "_read_all", lambda self: read.append(self))
    server.kill()
    server.start()
    one.withdraw("instance 0", Rank(0))
    one.publish("instance 1", Rank(0), 1, "moved")
    assert within(15.0, lambda: found(reader, "instance 1") == ("moved",))
    assert found(reader, "instance 2") == ("there",)
    assert read == []


def test_a_watch_that_resumes_from_a_compacted_revision_reads_everything(
    server: EtcdServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changed while it was away is forgotten, and known nevertheless."""
    reader, one = make(), make()
    one.publish("prefill", Rank(0), 1, "old")
    one.publish("gone", Rank(0), 1, "there")
    assert within(5.0, lambda: found(reader, "gone") == ("there",))
    away = threading.Event()
    monkeypatch.setattr("disagg_kv.rendezvous.etcd.watch.pause_s", lambda failures: 0.05 if away.wait(60.0) else 0.0)
    server.kill()
    assert within(5.0, lambda: reader._watch.error is not None)
    server.start()
    writer = make()
    writer.publish("prefill", Rank(0), 1, "new")
    server.post("/kv/deleterange", key="disagg_kv/ranks/gone/1/0")
    server.post("/kv/compaction", revision=server.post("/kv/range", key="a")["header"]["revision"], physical=True)
    assert not reader._watch.current
    away.set()
    assert within(15.0, lambda: found(reader) == ("new",) and reader._watch.error is None)


@pytest.mark.parametrize("replaced", [False, True], ids=["alone", "replaced meanwhile"])
def test_a_process_that_was_paused_beyond_its_lease(server: EtcdServer, make: Make, replaced: bool) -> None:
    """Its key vanishes. It registers again with its id when it goes on, unless another process has taken its place."""
    reader = make()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, server.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"published\n"
        assert within(5.0, lambda: found(reader) == ("child",))
        value = server.keys(KEY)[KEY]["value"]
        child.send_signal(signal.SIGSTOP)
        assert within(15.0, lambda: found(reader) is None)
        if replaced:
            make().publish("prefill", Rank(0), 1, "successor")
        child.send_signal(signal.SIGCONT)
        if replaced:
            line = b"rank 0 at child: another process has published it, at successor"
            assert line in child.stderr.readline()
        assert within(10.0, lambda: found(reader) == ("successor" if replaced else "child",))
        assert (server.keys(KEY)[KEY]["value"] == value) is not replaced
        child.kill()


def test_a_cluster_goes_on_while_most_of_its_members_live(tmp_path: Path) -> None:
    """Three members; the one that answers is killed."""
    names, peers = ("a", "b", "c"), [f"http://127.0.0.1:{free_port()}" for _ in range(3)]
    cluster = ",".join(f"{name}={peer}" for name, peer in zip(names, peers, strict=True))
    servers = [
        EtcdServer(tmp_path / name, "--name", name, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                   "--initial-cluster", cluster)
        for name, peer in zip(names, peers, strict=True)
    ]  # fmt: skip
    for server in servers:
        server.begin()
    try:
        for server in servers:
            server.wait()
        urls = [server.url for server in servers]
        with EtcdRendezvous(urls, lease_s=4) as one, EtcdRendezvous(urls, lease_s=4) as two:
            one.publish("prefill", Rank(0), 2, "zero")
            assert within(5.0, lambda: found(two) is None)
            servers[0].kill()

            def publish() -> bool:
                one.publish("prefill", Rank(1), 2, "one")
                return True

            assert within(20.0, publish)
            assert within(20.0, lambda: found(two) == ("zero", "one"))
            time.sleep(5.0)
            assert len(servers[1].keys("disagg_kv/ranks/")) == 2
    finally:
        for server in servers:
            server.kill()
