"""The launch scripts of ``examples`` start the one router, with the engine and the place of each server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT

PYTHON = f"""#!/usr/bin/env bash
case $* in
*router.py*)
    until [ "$(grep -c . "$SEEN")" = 2 ]; do sleep 0.05; done
    echo "router $*" >>"$SEEN"
    ;;
*sglang.launch_server*) echo "sglang $* on $CUDA_VISIBLE_DEVICES" >>"$SEEN" && exec sleep 60 ;;
*) exec {sys.executable} "$@" ;;
esac
"""
VLLM = """#!/usr/bin/env bash
echo "vllm $*" >>"$SEEN" && exec sleep 60
"""
CURL = """#!/usr/bin/env bash
exit 0
"""
ONE = {"PORT": "1", "PREFILL_PORT": "2", "DECODE_PORT": "3", "BOOTSTRAP_PORT": "4"}


def lines_of(folder: Path, script: str, args: list[str], **variables: str) -> list[str]:
    """What a script starts. It ends with its router, and its servers with it. The router waits for both to begin."""
    for name, text in (("python3", PYTHON), ("vllm-server", VLLM), ("curl", CURL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    seen = folder / "seen"
    env = {**os.environ, **ONE, "VLLM": "vllm-server", "SEEN": str(seen), "CUDA_VISIBLE_DEVICES": "", **variables}
    env["PATH"] = f"{folder}{os.pathsep}{env['PATH']}"
    file = ROOT / "examples" / script / "serve.sh"
    subprocess.run([str(file), *args], env=env, timeout=60, start_new_session=True, capture_output=True, check=False)
    return seen.read_text().splitlines()


@pytest.mark.parametrize(
    ("script", "args", "prefill", "decode"),
    [
        ("vllm", ["MODEL"], "vllm=localhost:2", "vllm=localhost:3"),
        ("sglang", ["MODEL"], "sglang=127.0.0.1:2/4", "sglang=127.0.0.1:3"),
        ("between", ["sglang", "MODEL"], "sglang=127.0.0.1:2/4", "vllm=127.0.0.1:3"),
        ("between", ["vllm", "MODEL"], "vllm=127.0.0.1:2", "sglang=127.0.0.1:3"),
    ],
)
def test_a_script_starts_two_servers_and_the_router(
    tmp_path: Path, script: str, args: list[str], prefill: str, decode: str
) -> None:
    started = lines_of(tmp_path, script, args)
    file = ROOT / "examples" / script / "serve.sh"
    (router,) = (line.split() for line in started if line.startswith("router "))
    assert router[1:] == [
        str(file.parent / ".." / "router.py"), "--port", "1", "--prefill", prefill, "--decode", decode,
    ]  # fmt: skip
    assert (ROOT / "examples" / "router.py").exists()
    assert sorted(line.split()[0] for line in started if line != " ".join(router)) == sorted(
        one.partition("=")[0] for one in (prefill, decode)
    )


def test_each_server_of_sglang_has_the_gpus_that_are_named(tmp_path: Path) -> None:
    """Without names both see what the script sees."""
    named = lines_of(tmp_path, "sglang", ["MODEL"], PREFILL_GPUS="3", DECODE_GPUS="4,5")
    gpus = {line.split("--disaggregation-mode ")[1].split()[0]: line.rsplit(" on ", 1)[1] for line in named[:2]}
    assert gpus == {"prefill": "3", "decode": "4,5"}
    (tmp_path / "seen").unlink()
    unnamed = lines_of(tmp_path, "sglang", ["MODEL"], CUDA_VISIBLE_DEVICES="0,1")
    assert [line.rsplit(" on ", 1)[1] for line in unnamed[:2]] == ["0,1", "0,1"]
