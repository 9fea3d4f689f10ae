"""The machine and the versions of a benchmark."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from attrs import frozen

PACKAGES = ("disagg_kv", "numpy", "torch", "triton", "pyzmq", "msgspec")


@frozen
class Machine:
    """The host, the software, and the commit.

    Args:
        cpu: the processor's name.
        cores: how many this process may use.
        versions: of Python and of the packages that matter here.
        commit: of the checkout that the library was imported from, with ``-dirty`` if files differ; None: no checkout.
    """

    cpu: str
    cores: int
    versions: Mapping[str, str]
    commit: str | None

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        versions = {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}}
        return cls(cpu_model(Path("/proc/cpuinfo")), len(os.sched_getaffinity(0)), versions, commit(Path(__file__)))


def installed(package: str) -> str:
    """Its version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_model(info: Path) -> str:
    """The name of the first core in Linux; elsewhere the architecture."""
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit(file: Path) -> str | None:
    """The commit of the checkout in which a tracked file lies."""
    folder = str(file.parent)
    try:
        subprocess.run(["git", "-C", folder, "ls-files", "--error-unmatch", str(file)], check=True, capture_output=True)
        said = subprocess.run(
            ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()
