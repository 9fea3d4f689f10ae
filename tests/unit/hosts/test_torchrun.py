"""``examples/torchrun`` on two hosts: jobs meet in etcd, with keys, over NIXL; etcd may be killed meanwhile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from disagg_kv.channels import write_keys
from disagg_kv.observe.status import read_status, sockets
from tests.support.etcd import EtcdServer, ask
from tests.support.hosts import CABLE, UCX, Host, apart, refusal, two_hosts
from tests.support.needs import needs_etcd, needs_nixl, needs_prometheus
from tests.support.pages import ROOT

pytestmark = [pytest.mark.slow, needs_etcd, needs_nixl, needs_prometheus]

OUTAGE_S = float(os.environ.get("DISAGG_KV_OUTAGE_S", "5"))
"""Seconds for which etcd is away."""

EVERY_S = 1.0
"""From one request to the next."""

DEADLINE_S = 240.0 + 2 * OUTAGE_S
ETCD_PORT, PREFILL_PORT, DECODE_PORT, METRICS_PORT = 2379, 29500, 29501, 9100
SCRIPT = ROOT / "examples" / "torchrun" / "serve.py"
MONTH_S = 30 * 86400
ENVIRONMENT = {**UCX, "GLOO_SOCKET_IFNAME": CABLE, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class Jobs:
    """The jobs' agents: one of torchrun per job and host, each with one rank."""

    def __init__(self, folder: Path, etcd: str, requests: int, undo: ExitStack) -> None:
        self._folder, self._undo = folder, undo
        self._given = ("--etcd", etcd, "--keys", str(folder / "keys"), "--requests", str(requests))
        self._agents: list[subprocess.Popen[bytes]] = []
        for name in ("prefill", "decode"):
            write_keys(folder / "keys", name)

    def start(self, role: str, hosts: Sequence[tuple[Host, int]], port: int) -> None:
        """A job with a rank on each host. The number beside the host is the seconds by which its clocks are ahead."""
        for node, (host, clock_s) in enumerate(hosts):
            number = len(self._agents)
            job = ("--nnodes", str(len(hosts)), "--nproc-per-node", "1", "--node-rank", str(node))
            meet = ("--master-addr", hosts[0][0].address, "--master-port", str(port))
            rank = (role, "--host", host.address, "--metrics-port", str(METRICS_PORT + number))
            every = ("--every", str(EVERY_S), "--tokens", "6")
            launch = [*host.launch, *apart(clock_s), sys.executable, "-m", "torch.distributed.run"]
            with (self._folder / f"out-{number}").open("wb") as out, (self._folder / f"err-{number}").open("wb") as err:
                agent = subprocess.Popen(
                    [*launch, *job, *meet, str(SCRIPT), *rank, *every, *self._given],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env={**os.environ, **ENVIRONMENT, "XDG_RUNTIME_DIR": str(self._folder)},
                )
            self._agents.append(agent)
            self._undo.callback(_end, agent)

    def answers(self) -> list[dict[str, Any]]:
        """What rank 0 of the last job has printed."""
        *lines, _ = (self._folder / f"out-{len(self._agents) - 1}").read_text().split("\n")
        return [json.loads(line) for line in lines]

    def until(self, good: Callable[[], bool]) -> None:
        """Wait until ``good()``; no agent may fail meanwhile."""
        until = time.monotonic() + DEADLINE_S
        while not good():
            assert not any(agent.poll() for agent in self._agents), self.log()
            assert time.monotonic() < until, self.log()
            time.sleep(0.05)

    def ended(self) -> bool:
        """Whether all agents have."""
        return all(agent.poll() is not None for agent in self._agents)

    def log(self) -> str:
        """The last lines of every agent and its rank."""
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._folder.glob("err-*")))


def _end(agent: subprocess.Popen[bytes]) -> None:
    """Its rank ends with it."""
    agent.kill()
    agent.wait()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Both have a rank of prefill; the second has decode."""
    if reason := refusal():
        pytest.skip(reason)
    with two_hosts() as pair:
        yield pair


@pytest.mark.timeout(DEADLINE_S + 60.0)
def test_jobs_of_torchrun_serve_while_etcd_is_away(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """A prefill job over both hosts, a decode job on the second: no request fails, and every token is right.

    The second host was booted a month before the first.
    """
    a, b = hosts
    requests = int(OUTAGE_S / EVERY_S) + 6
    with ExitStack() as undo:
        etcd = EtcdServer(tmp_path / "etcd", port=ETCD_PORT, address=a.address, launch=a.launch).start()
        undo.callback(etcd.kill)
        jobs = Jobs(tmp_path, etcd.url, requests, undo)
        jobs.start("prefill", [(a, 0), (b, MONTH_S)], PREFILL_PORT)
        jobs.start("decode", [(b, MONTH_S)], DECODE_PORT)
        jobs.until(lambda: len(jobs.answers()) > 0)
        etcd.kill()
        before, until = len(jobs.answers()), time.monotonic() + OUTAGE_S
        jobs.until(lambda: time.monotonic() >= until and len(jobs.answers()) >= before + 2)
        shown = ask(b.launch, f"{b.address}:{METRICS_PORT + 2}", "/metrics")
        states = [read_status(path) for path in sockets(tmp_path / "disagg_kv")]
        etcd.start()
        jobs.until(jobs.ended)
        answers = jobs.answers()
    assert [answer["request"] for answer in answers] == list(range(requests)), jobs.log()
    assert all(answer["tokens_equal"] for answer in answers)
    assert len({tuple(answer["tokens"]) for answer in answers}) == requests, "a model that repeats itself proves little"
    done = r'disagg_kv_rooms_ended_total{instance="decode",outcome="done",path="staged",rank="0",side="decode"} (\S+)'
    assert float(re.findall(done, shown)[0]) >= 2
    assert sorted((one["side"], one["rank"], one["state"]) for one in states) == [
        ("decode", 0, "open"),
        ("prefill", 0, "open"),
        ("prefill", 1, "open"),
    ]
