"""A rank's endpoints from the connector's options: instances with one rank, over real channels."""

from __future__ import annotations

import itertools
import os
import random
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define
from torch._C._distributed_c10d import TCPStore

from disagg_kv.cli.main import run
from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from disagg_kv.engines import meeting
from disagg_kv.engines.opening import CPU_STAGING_BYTES, SLOTS, Opened, decode_name, selecting
from disagg_kv.engines.options import EngineOptions
from disagg_kv.engines.shown import Shown
from disagg_kv.engines.vllm import worker
from disagg_kv.engines.vllm.endpoints import open_worker
from disagg_kv.engines.vllm.host import facts
from disagg_kv.engines.vllm.params import Origin
from disagg_kv.engines.vllm.work import Chunk, Load, StepWork
from disagg_kv.engines.vllm.worker import Results, WorkerSide
from disagg_kv.errors import ConfigurationError, StoreUnreachableError
from disagg_kv.ids import GroupId
from disagg_kv.observe.status import read_status, sockets
from disagg_kv.rendezvous import Source
from tests.support.etcd import EtcdServer, free_port
from tests.support.needs import needs_etcd, needs_prometheus
from tests.support.processes import wait
from tests.support.vllm_like import Model, configs, layer_name

STAGING = 1 << 16


@define
class Instance:
    """One rank, which is all of its instance."""

    worker: WorkerSide
    ends: Opened
    tensors: dict[str, torch.Tensor]

    @property
    def address(self) -> str:
        """Of its prefill endpoint."""
        return self.ends.address

    @property
    def sender(self) -> PrefillEndpoint:
        """Its prefill endpoint."""
        assert self.worker._sender is not None
        return self.worker._sender

    @property
    def receiver(self) -> DecodeEndpoint:
        """Its decode endpoint."""
        assert self.worker._receiver is not None
        return self.worker._receiver


Open = Callable[..., Instance]


@pytest.fixture
def opened() -> Iterator[Open]:
    made: list[Instance] = []

    def make(name: str, given: dict[str, Any], *, produces: bool = True, consumes: bool = True) -> Instance:
        vllm, cache = configs(Model(), name)
        tensors = {layer_name(n): torch.full((33, 4, 4, 8), -1.0, dtype=torch.float16) for n in range(3)}
        options = EngineOptions.read("kv_connector_extra_config", {"staging_bytes": STAGING, **given})
        side, ends = open_worker(
            options, facts(vllm, cache, tiles=True), tensors, {}, e4m3="float8_e4m3fn",
            rank=0, group=None, produces=produces, consumes=consumes,
        )  # fmt: skip
        made.append(Instance(side, ends, tensors))
        return made[-1]

    yield make
    for one in made:
        one.ends.close()


def begin(p: Instance, d: Instance, addresses: tuple[str, ...], held: int = 0, name: str = "t") -> None:
    """Decode asks for two blocks of rows, and prefill has computed them."""
    group = GroupId("group 0")
    known = {group: held} if held else {}
    load = Load(Origin(name, Source("P", addresses)), 2, ((group, (8, 9)[held:], held),), known, b"tag")
    d.worker.begin(StepWork(loads={"d": load}, idle=True))
    p.worker.begin(StepWork(chunks={"p": Chunk(name, 2, 2, ((group, (5, 6), 0),), True, b"tag")}))
    p.worker.end()


def transfer(p: Instance, d: Instance, addresses: tuple[str, ...], held: int = 0, name: str = "t") -> set[str]:
    """Two blocks of rows, of which decode may hold the first; the requests that failed."""
    for tensor in d.tensors.values():
        tensor[8:10] = -1.0
    for number, tensor in enumerate(p.tensors.values()):
        tensor[5:7] = torch.arange(2 * 4 * 4 * 8).reshape(2, 4, 4, 8) + number
    begin(p, d, addresses, held, name)
    found = Results()

    def over() -> bool:
        for one in (d, p):
            results = one.worker.results({"p"})
            found.sent.update(results.sent)
            found.received.update(results.received)
            found.failed.update(results.failed)
        return found.sent == {"p"} and found.received == {"d"}

    wait(over, lambda: f"the ends of both requests: {found}")
    for name, tensor in d.tensors.items():
        equal = torch.equal(tensor[8 + held : 10], p.tensors[name][5 + held : 7])
        assert equal != bool(found.failed)
        assert not held or bool((tensor[8] == -1).all())
    return found.failed


def test_a_step_that_computes_nothing_reports_the_load_that_ends_in_it(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOAD_S", 60.0)
    p, d = opened("P", {}, consumes=False), opened("D", {}, produces=False)
    begin(p, d, (p.address,))
    assert d.worker.results(set()).received == {"d"}


def test_a_step_after_one_that_computed_or_reported_does_not_wait(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine takes in that outcome once this step is over; the one after it waits again."""
    p, d = opened("P", {}, consumes=False), opened("D", {}, produces=False)
    begin(p, d, (p.address,))
    other = Load(Origin("later", Source("P", (p.address,))), 1, ((GroupId("group 0"), (10,), 0),), {}, b"tag")
    d.worker.begin(StepWork(loads={"other": other}, idle=True))
    waits: list[None] = []
    once = d.worker._wait

    def counted() -> None:
        waits.append(None)
        once()

    def waited(idle: bool = True) -> int:
        d.worker.begin(StepWork(idle=idle))
        before = len(waits)
        assert d.worker.results(set()) == Results()
        return len(waits) - before

    monkeypatch.setattr(d.worker, "_wait", counted)
    wait(lambda: "d" in d.worker.results(set()).received, lambda: "the first load")
    assert waits
    assert [waited(), waited()] == [0, 1]
    assert [waited(idle=False), waited(), waited()] == [0, 0, 1]


@pytest.mark.parametrize("channel", ["unix", "zmq"])
def test_instances_find_each_other_by_the_address_in_the_request(opened: Open, channel: str, tmp_path: Path) -> None:
    listen = {"listen": str(tmp_path / "sockets")} if channel == "unix" else {}
    p = opened("P", {"channel": channel, **listen}, consumes=False)
    d = opened("D", {"channel": channel, **listen}, produces=False)
    prefix = f"unix://{tmp_path}/sockets/prefill0-{os.getpid()}" if channel == "unix" else "tcp://127.0.0.1:"
    assert p.address.startswith(prefix)
    assert d.address == ""
    assert p.sender.staging.nbytes == max(1 << 12, STAGING // SLOTS) * SLOTS
    assert d.receiver.staging.nbytes == STAGING
    assert not transfer(p, d, (p.address,))


def test_without_a_directory_each_rank_makes_one(opened: Open) -> None:
    first, second = opened("P", {}, consumes=False), opened("Q", {}, consumes=False)
    assert first.address != second.address
    file = Path(first.address.removeprefix("unix://"))
    assert file.exists()
    first.ends.close()
    assert not file.parent.exists()


def test_an_instance_for_both_is_two_to_the_library(opened: Open) -> None:
    one = opened("P", {})
    assert not transfer(one, one, (one.address,))
    assert decode_name("P") == "P/decode"


def test_a_store_replaces_addresses_in_requests(opened: Open) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"rendezvous": f"tcp://127.0.0.1:{store.port}"}
    p, d = opened("P", where, consumes=False), opened("D", where, produces=False)
    assert not transfer(p, d, ())


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd").start()
    yield server
    server.kill()


def in_etcd(server: EtcdServer, prefix: str = "prod") -> dict[str, str]:
    return {"channel": "zmq", "rendezvous": f"{server.url.replace('http', 'etcd', 1)}/{prefix}"}


@needs_etcd
def test_an_instance_that_comes_back_at_another_address_is_found_in_etcd(etcd: EtcdServer, opened: Open) -> None:
    """Under its name, while decode goes on."""
    where = in_etcd(etcd)
    d = opened("D", where, produces=False)
    first = opened("P", where, consumes=False)
    assert first.ends.addresses == ()
    assert not transfer(first, d, ())
    first.ends.close()
    assert list(etcd.keys("prod/ranks")) == ["prod/ranks/D%2Fdecode/1/0"]
    second = opened("P", where, consumes=False)
    assert second.address != first.address
    # Decode hears of the change from etcd a little later; a request that comes before that fails, and is asked again.
    names = (f"another {number}" for number in itertools.count())
    wait(lambda: not transfer(second, d, (), name=next(names)), lambda: "a request to the instance that came back")


@needs_etcd
def test_a_prefill_instance_of_another_prefix_is_not_found(
    etcd: EtcdServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    p = opened("P", in_etcd(etcd, "one"), consumes=False)
    d = opened("D", {**in_etcd(etcd, "other"), "silence_s": 2}, produces=False)
    begin(p, d, ())
    wait(lambda: bool(d.worker.results(set()).failed), lambda: "the end of the load")
    assert "prefill instance 'P' was not found in 2 s" in caplog.text


@needs_etcd
@pytest.mark.parametrize("scheme", ["etcd", "tcp"])
def test_a_rendezvous_at_a_port_that_is_shut_stops_the_rank_by_name(
    opened: Open, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "STORE_S", 0.5)
    where = f"{scheme}://127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnreachableError, match=f"^(option )?rendezvous '{where}'"):
        opened("P", {"rendezvous": where}, consumes=False)


@needs_etcd
def test_a_server_that_is_no_etcd_stops_the_rank_by_name(opened: Open) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(ConfigurationError, match=f"no etcd answers at http://127.0.0.1:{other.server_port}"):
            opened("P", {"rendezvous": f"etcd://127.0.0.1:{other.server_port}/prod"}, consumes=False)
        other.shutdown()


@needs_prometheus
@pytest.mark.parametrize("both", [False, True], ids=["decode", "prefill and decode"])
def test_an_instance_is_shown_to_its_operator(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both: bool
) -> None:
    """Its metrics over HTTP, its rooms and memory in ``disagg-kv top``; nothing is left once it has ended."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    p = opened("P", {}, consumes=False)
    d = opened("D", {"metrics": "127.0.0.1:0", "status_socket": True}, produces=both)
    assert not transfer(p, d, (p.address,))
    assert d.ends.shown.server is not None
    url = f"http://{d.ends.shown.server.address}/metrics"
    labels = 'instance="D/decode",outcome="done",path="{}",rank="0",side="decode"'

    def counted() -> bool:
        with urllib.request.urlopen(url) as answer:
            text: str = answer.read().decode()
        paths = re.findall(r'^disagg_kv_rooms_ended_total{.*path="(\w+)".*} 1.0$', text, re.MULTILINE)
        assert ('side="prefill"' in text) is both
        return bool(paths) and f"disagg_kv_rooms_ended_total{{{labels.format(paths[0])}}} 1.0" in text

    wait(counted, lambda: "the room to be counted")
    sides = [read_status(path)["side"] for path in sockets(tmp_path / "disagg_kv")]
    assert sorted(sides) == (["decode", "prefill"] if both else ["decode"])
    d.ends.close()
    assert list(sockets(tmp_path / "disagg_kv")) == []
    with pytest.raises(urllib.error.URLError):
        counted()


@needs_prometheus
def test_a_port_of_metrics_that_is_taken_stops_the_rank_by_name(opened: Open) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"address '{address}': metrics cannot be served there"):
            opened("P", {"metrics": address}, consumes=False)


def test_status_sockets_need_a_folder_of_this_user_alone(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank does not start without what was asked for."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "disagg_kv").mkdir(mode=0o755)
    with pytest.raises(ConfigurationError, match="mode 0755 lets other users in"):
        opened("P", {"status_socket": True}, consumes=False)


def two_ports() -> int:
    """A port that is free, as is the second one after it. The system gives none of these to other listeners."""
    for port in random.SystemRandom().sample(range(12_000, 32_000), 100):
        with suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 2))
            return port
    raise AssertionError("no port is free")


@needs_prometheus
def test_each_rank_has_a_port_of_its_own() -> None:
    """Rank 0 that of the option, each further rank the next."""
    port = two_ports()
    for rank in (0, 2):
        shown = Shown(f"127.0.0.1:{port}", status_socket=False, rank=rank)
        assert shown.server is not None
        assert shown.server.address == f"127.0.0.1:{port + rank}"
        shown.close()
        shown.close()


def test_frames_of_a_cluster_are_encrypted(opened: Open, tmp_path: Path) -> None:
    """With the keys that ``disagg-kv keys`` writes."""
    for name in ("prefill", "decode"):
        assert run(["keys", str(tmp_path), name]) == 0
    p, d = (
        opened(instance, {"channel": "zmq", "keys": f"{tmp_path}/{name}.key_secret,{tmp_path}"}, **role)
        for instance, name, role in (("P", "prefill", {"consumes": False}), ("D", "decode", {"produces": False}))
    )
    assert not transfer(p, d, (p.address,))


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ("prefill", None, "the address has a public key, and this channel has no keys; both sides need keys"),
        (None, "decode", "the address has no public key, and this channel has keys; both sides need keys"),
        ("prefill", "stranger", "one of the two sides does not allow the other's public key or user"),
        ("stranger", "decode", "one of the two sides does not allow the other's public key or user"),
    ],
)
def test_a_wrong_key_ends_the_load_with_what_to_change(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, prefill: str | None, decode: str | None, reason: str
) -> None:
    """At once. ``stranger`` has a pair of its own, and allows both, which do not allow it."""
    for folder, names in (("keys", ("prefill", "decode")), ("strange", ("prefill", "decode", "stranger"))):
        for name in names:
            assert run(["keys", str(tmp_path / folder), name]) == 0
    p, d = (
        opened(instance, {"channel": "zmq", "keys": keys_of(tmp_path, name), "claim_s": 1.0}, **role)
        for instance, name, role in (("P", prefill, {"consumes": False}), ("D", decode, {"produces": False}))
    )
    begin(p, d, (p.address,))
    wait(lambda: bool(d.worker.results(set()).failed), lambda: "the end of the load")
    assert reason in caplog.text


def keys_of(folder: Path, name: str | None) -> str:
    """The option ``keys``; "" for None."""
    own = folder / ("strange" if name == "stranger" else "keys")
    return "" if name is None else f"{own}/{name}.key_secret,{own}"


def test_a_port_that_is_shut_ends_the_load_with_its_address(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    p, d = opened("P", {"channel": "zmq"}, consumes=False), opened("D", {"channel": "zmq", "silence_s": 2.0})
    gone = f"tcp://127.0.0.1:{free_port()}"
    begin(p, d, (gone,))
    wait(lambda: bool(d.worker.results(set()).failed), lambda: "the end of the load")
    assert f"no answer from {gone} within 2 s" in caplog.text


@pytest.mark.parametrize("strategy", ["auto", "staged+incremental"])
def test_decode_holds_rows_in_its_prefix_cache(opened: Open, strategy: str) -> None:
    """Prefill takes that from every decode instance, whatever its own cache."""
    p = opened("P", {"strategy": strategy}, consumes=False)
    d = opened("D", {"strategy": strategy}, produces=False)
    assert not transfer(p, d, (p.address,), held=1)


def test_a_selection_is_named_once() -> None:
    assert selecting("auto") == "auto+incremental"
    assert selecting("staged+incremental+layer_pipelined") == "staged+incremental+layer_pipelined"


def test_cpu_memory_has_small_staging(opened: Open) -> None:
    """A ring of the endpoints' own size would stop the engine for a second at the first transfer."""
    d = opened("D", {"staging_bytes": None}, produces=False)
    assert d.receiver.staging.nbytes == CPU_STAGING_BYTES


def test_endpoints_run_beside_the_cores_of_the_computation(opened: Open) -> None:
    """VLLM pins the worker's thread to some cores; the endpoint's thread takes the others, if there are any."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    own = {min(before)}
    os.sched_setaffinity(0, own)
    try:
        one = opened("P", {}, consumes=False)
        assert os.sched_getaffinity(0) == own
        thread = one.sender.driver._thread
        assert thread is not None
        assert thread.native_id is not None
        assert not os.sched_getaffinity(thread.native_id) & own
    finally:
        os.sched_setaffinity(0, before)
