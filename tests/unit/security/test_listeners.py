"""Where transports listen, as SECURITY.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import needs_mooncake, needs_nixl

CODE = """
import json, os, sys
from pathlib import Path
from disagg_kv.transports import transport

carrier = transport(sys.argv[1])
here = Path("/proc/self/fd")
mine = set()
for number in os.listdir(here):
    try:
        mine.add(os.readlink(here / number))
    except FileNotFoundError:
        pass
found = []
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
            address, port = fields[1].split(":")
            found.append((address, int(port, 16)))
carrier.close(0.0)
Path(sys.argv[2]).write_text(json.dumps(found))
"""
LOOPBACK = "0100007F"


def listeners(transport: str, into: Path, **environment: str) -> list[tuple[str, int]]:
    """Where a transport in a process of its own listens: addresses as the kernel writes them, and ports."""
    subprocess.run(
        [sys.executable, "-c", CODE, transport, str(into)], env=os.environ | environment, timeout=240, check=True
    )
    return [(address, port) for address, port in json.loads(into.read_text())]


@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_transports_within_a_host_listen_nowhere(transport: str, tmp_path: Path) -> None:
    assert listeners(transport, tmp_path / "found") == []


@needs_nixl
def test_nixl_listens_only_on_the_networks_that_it_is_told_of(tmp_path: Path) -> None:
    """Its own listener, which is on all interfaces, is not used."""
    found = listeners("nixl", tmp_path / "found", UCX_NET_DEVICES="lo")
    assert {address for address, _ in found} <= {LOOPBACK}


@needs_mooncake
def test_mooncake_listens_everywhere_and_only_its_ports_can_be_narrowed(tmp_path: Path) -> None:
    narrowed = {"MC_MIN_RPC_PORT": "24000", "MC_MAX_RPC_PORT": "24099", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    found = listeners("mooncake", tmp_path / "found", **narrowed)
    assert len(found) == 2
    assert all(set(address) == {"0"} for address, _ in found), "it can be narrowed now: say so"
    assert all(24000 <= port <= 24099 for _, port in found)
