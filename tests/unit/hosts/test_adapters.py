"""Instances of vLLM's connector on two hosts meet in etcd, with keys, over NIXL; what is wrong says what to change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from disagg_kv.channels import write_keys
from tests.support.etcd import EtcdServer
from tests.support.hosts import CABLE, UCX, Host, apart, refusal, two_hosts
from tests.support.needs import needs_etcd, needs_nixl
from tests.support.pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), needs_etcd, needs_nixl]

ETCD_PORT = 2379
NOBODY = "10.213.77.9"


class Rank:
    """A process on a host; see ``tests/support/adapter_rank.py``."""

    def __init__(self, role: str, name: str, host: Host, options: dict[str, Any]) -> None:
        words = [*host.launch, *apart(), sys.executable, "-m", "tests.support.adapter_rank"]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [*words, role, name, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **UCX, "PYTHONPATH": path},
        )  # fmt: skip

    @cached_property
    def began(self) -> dict[str, Any]:
        """Its first line: several processes start beside each other until one is asked for it."""
        return self.answer()

    def begin(self, transfer: str) -> None:
        """Its part of a transfer."""
        assert "address" in self.began, self.began
        assert self._process.stdin is not None
        self._process.stdin.write(f"{transfer}\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return dict(json.loads(line))

    def kill(self) -> None:
        """End it at once: it withdraws nothing."""
        self._process.kill()
        self._process.communicate()


class Ranks:
    """All processes of a test; prefill on the first host, decode on the second."""

    def __init__(self, hosts: tuple[Host, Host], keys: Path, undo: ExitStack) -> None:
        self._hosts, self._keys, self._undo, self._count = hosts, keys, undo, 0
        for folder, names in ((keys, ("prefill", "decode")), (keys / "strange", ("prefill", "stranger"))):
            for name in names:
                write_keys(folder, name)

    def start(self, role: str, key: str | None = None, **changes: Any) -> Rank:
        """An instance, ``P`` or one of decode's; ``key`` names another pair than that of its role."""
        self._count += 1
        name, host = ("P", self._hosts[0]) if role == "prefill" else (f"D{self._count}", self._hosts[1])
        folder = self._keys if key is None else self._keys / "strange"
        given = {
            "channel": "zmq", "listen": f"tcp://{CABLE}:0", "keys": f"{folder}/{key or role}.key_secret,{folder}",
            "transport": "nixl", "rendezvous": f"etcd://{self._hosts[0].address}:{ETCD_PORT}/prod", "silence_s": 5.0,
            "claim_s": 5.0, "staging_bytes": 1 << 16,
        }  # fmt: skip
        rank = Rank(role, name, host, {**given, **changes})
        self._undo.callback(rank.kill)
        return rank


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    if reason := refusal():
        pytest.skip(reason)
    with two_hosts() as hosts, ExitStack() as undo:
        at = hosts[0]
        etcd = EtcdServer(tmp_path / "etcd", port=ETCD_PORT, address=at.address, launch=at.launch).start()
        undo.callback(etcd.kill)
        yield Ranks(hosts, tmp_path / "keys", undo)


def transferred(p: Rank, d: Rank, transfer: str) -> None:
    """Rows cross, and are right."""
    d.begin(transfer)
    p.begin(transfer)
    for one in (d, p):
        found = one.answer()
        assert not found["failed"], found


def refused(d: Rank, transfer: str) -> str:
    """Decode alone begins a transfer, which fails; the reason in its log."""
    d.begin(transfer)
    found = d.answer()
    assert found["failed"]
    return "\n".join(found["log"])


def test_an_instance_that_was_killed_is_found_where_it_comes_back(ranks: Ranks) -> None:
    """Under its name, at another address, by decode that goes on. What decode asks meanwhile ends with its address."""
    p, d = ranks.start("prefill"), ranks.start("decode")
    transferred(p, d, "first")
    p.kill()
    reason = refused(d, "meanwhile")
    assert "P/0" in reason
    assert p.began["address"] in reason
    again = ranks.start("prefill")
    assert again.began["address"] != p.began["address"]
    transferred(again, d, "second")


def test_what_is_wrong_says_what_to_change(ranks: Ranks) -> None:
    """A key, a host, a port, a prefix; and the right ones serve meanwhile."""
    p, d, wrong = ranks.start("prefill"), ranks.start("decode"), ranks.start("decode", key="stranger")
    etcds = [f"etcd://{NOBODY}:{ETCD_PORT}/prod", "etcd://10.213.77.1:9/prod"]
    absent = [ranks.start("decode", rendezvous=where) for where in etcds]
    lost = ranks.start("decode", rendezvous=f"etcd://10.213.77.1:{ETCD_PORT}/other")
    assert p.began["address"].startswith("tcp://10.213.77.1:")
    assert "one of the two sides does not allow the other's public key" in refused(wrong, "first")
    for where, one in zip(etcds, absent, strict=True):
        assert one.began["error"].startswith(
            f"StoreUnreachableError: option rendezvous '{where}': etcd at {where[:-5].replace('etcd', 'http')} cannot"
        )
    assert "prefill instance 'P' was not found in 5 s" in refused(lost, "second")
    transferred(p, d, "third")
