"""``examples/vllm/serve.sh`` gives servers their GPUs, memory and options; a stand-in for vLLM shows which."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from disagg_kv.engines.options import EngineOptions
from tests.support.pages import ROOT

SERVE = ROOT / "examples" / "vllm" / "serve.sh"

SERVER = """#!/usr/bin/env python3
import json, os, sys, time
print(json.dumps({"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "args": sys.argv[1:]}), flush=True)
time.sleep(1.0)  # the script ends with its server, whose lines another process has begun to read by then
"""
SMI = """#!/usr/bin/env bash
case $* in
*query-gpu=index*) for ((gpu = 0; gpu < GPUS; gpu++)); do echo $gpu; done ;;
*query-gpu=memory.total*) echo 81920 ;;
esac
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Commands that stand in for vLLM and for ``nvidia-smi``."""
    for name, text in (("vllm-server", SERVER), ("nvidia-smi", SMI)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def ran(commands: Path, gpus: int, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script, in a session of its own, since it ends its process group."""
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env |= {"PATH": f"{commands}{os.pathsep}{env['PATH']}", "VLLM": "vllm-server", "GPUS": str(gpus), **variables}
    return subprocess.run(
        [str(SERVE), "MODEL", *args], env=env, capture_output=True, text=True, timeout=60, start_new_session=True
    )


def started(
    commands: Path, gpus: int, *args: str, **variables: str
) -> tuple[str | None, dict[str, str], dict[str, Any]]:
    """A server's GPUs, its options, and those of the connector."""
    done = ran(commands, gpus, *args, **variables)
    lines = [line.split(" | ", 1)[1] for line in done.stdout.splitlines() if " | {" in line]
    assert len(lines) == 1, done.stdout + done.stderr
    seen = json.loads(lines[0])
    assert seen["args"][0] == "MODEL"
    options = dict(zip(seen["args"][1::2], seen["args"][2::2], strict=True))
    connector = json.loads(options.pop("--kv-transfer-config"))
    EngineOptions.read("kv_connector_extra_config", connector["kv_connector_extra_config"])
    return seen["gpus"], options, connector


@pytest.mark.parametrize(
    ("role", "variables", "gpus", "share"),
    [
        ("prefill", {}, "0", "0.908"),
        ("decode", {}, "0", "0.908"),
        ("prefill", {"PREFILL_TP": "2"}, "0,1", "0.908"),
        ("decode", {"DECODE_TP": "2", "DECODE_GPUS": "2,3"}, "2,3", "0.908"),
        ("decode", {"DECODE_STAGING": str(4 << 30)}, "0", "0.870"),
        ("decode", {"CUDA_VISIBLE_DEVICES": "3,1"}, "3", "0.908"),
    ],
)
def test_a_server_gets_its_gpus_and_leaves_room_for_staging(
    commands: Path, role: str, variables: dict[str, str], gpus: str, share: str
) -> None:
    """Of 80 GiB, where vLLM would take 0.92. A role alone on its host has the first GPUs."""
    seen, options, connector = started(commands, 4, ROLE=role, **variables)
    assert (seen, options["--gpu-memory-utilization"]) == (gpus, share)
    assert options["--tensor-parallel-size"] == str(len(gpus.split(",")))
    staging = int(variables.get("DECODE_STAGING", 1 << 30))
    assert connector["kv_connector_extra_config"]["staging_bytes"] == staging
    assert connector["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]


def test_options_of_the_user_come_last(commands: Path) -> None:
    """So vLLM takes them instead of the script's."""
    done = ran(commands, 1, "--gpu-memory-utilization", "0.4", ROLE="decode")
    args = json.loads(done.stdout.split(" | ", 1)[1])["args"]
    assert args[-2:] == ["--gpu-memory-utilization", "0.4"]


def test_a_host_without_gpus(commands: Path) -> None:
    seen, options, connector = started(commands, 0, ROLE="prefill")
    assert seen is None
    assert "--gpu-memory-utilization" not in options
    assert "staging_bytes" not in connector["kv_connector_extra_config"]


@pytest.mark.parametrize("variables", [{}, {"PREFILL_GPUS": "0,1"}, {"PREFILL_TP": "2"}])
def test_too_few_gpus_are_named(commands: Path, variables: dict[str, str]) -> None:
    """Decode never gets the CPU for that."""
    done = ran(commands, 1, **variables)
    assert done.returncode != 0
    assert "GPUs and has '" in done.stderr
    assert "set PREFILL_GPUS and DECODE_GPUS" in done.stderr


def test_between_hosts_the_channel_is_zeromq_with_keys(commands: Path) -> None:
    variables = {"HOST": "10.0.0.1", "KEYS": "keys/prefill.key_secret,keys", "TRANSPORT": "nixl"}
    variables["RENDEZVOUS"] = "etcd://10.0.0.3:2379/prod"
    _, _, connector = started(commands, 0, ROLE="prefill", **variables)
    options = connector["kv_connector_extra_config"]
    assert options["channel"] == "zmq"
    assert options["listen"] == "tcp://10.0.0.1:0"
    assert options["keys"] == "keys/prefill.key_secret,keys"
    assert options["transport"] == "nixl"
    assert options["rendezvous"] == "etcd://10.0.0.3:2379/prod"
    _, _, connector = started(commands, 0, ROLE="prefill", **{**variables, "HOST": "10.0.0.1:7000"})
    assert connector["kv_connector_extra_config"]["listen"] == "tcp://10.0.0.1:7000"


@pytest.mark.parametrize(
    ("variables", "message"), [({"ROLE": "both"}, "ROLE is 'both'"), ({"HOST": "h"}, "HOST needs ROLE")]
)
def test_variables_that_cannot_be_are_named(commands: Path, variables: dict[str, str], message: str) -> None:
    done = ran(commands, 0, **variables)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_server_that_ends_ends_the_script(commands: Path) -> None:
    """Instead of waiting for its health without end."""
    done = ran(commands, 0)
    assert done.returncode != 0
    assert "has ended: see its lines above" in done.stderr


def test_the_head_of_the_script_names_every_variable() -> None:
    head, body = SERVE.read_text().split("set -euo pipefail", 1)
    used = {part.split("}")[0].split(":")[0].split("-")[0] for part in body.split("${")[1:]}
    names = {name for name in used if name.isupper() and not name.startswith(("VLLM_", "CUDA_"))} - {"KV_ROLE"}
    assert names
    assert [name for name in sorted(names) if f"{name}=" not in head] == []
