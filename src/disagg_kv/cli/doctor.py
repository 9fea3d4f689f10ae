"""``disagg-kv doctor``: what works on this host; for what does not, the reason and the remedy."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import typer
from attrs import asdict, frozen
from rich.text import Text

from ..errors import ConfigurationError
from .output import Json, JsonFlag, emit

NEEDED = ("transports", "kernels", "channels")
"""Of each of these at least one must work."""

OPTIONAL = {"hf": ("transformers", "the demo and the Hugging Face adapter")}
"""Extra -> (its package, what it is for)."""


@frozen
class Finding:
    """One thing that was tried; where it does not work ``detail`` is the reason."""

    name: str
    works: bool
    detail: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        word = "works" if self.works else "NO"
        return f"{self.name:<13} {word:<6} {self.detail}{self.remedy and '; remedy: '}{self.remedy}".rstrip()


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(doctor)


def doctor(as_json: JsonFlag = False) -> None:
    """Say what works on this host; for what does not, the reason and the remedy."""
    found = examine()
    lacking = [kind for kind in NEEDED if not any(f.works for f in found[kind])]
    lines = [f"{kind:<11} {finding}" for kind, findings in found.items() for finding in findings]
    host = {"python": platform.python_version(), "platform": platform.platform(), "disagg_kv": version("disagg_kv")}
    groups: dict[str, Json] = {kind: [asdict(f) for f in findings] for kind, findings in found.items()}
    verdict = f"Nothing works of: {', '.join(lacking)}." if lacking else "This host can run disagg_kv."
    emit({"ok": not lacking, "host": host, **groups}, *map(Text, lines), verdict, as_json=as_json)
    if lacking:
        raise typer.Exit(1)


def examine() -> dict[str, Sequence[Finding]]:
    """Try everything there is, kind by kind."""
    from ..kernels import available as kernels  # these import torch, which costs seconds
    from ..transports import available as transports

    return {
        "transports": _findings(transports()),
        "kernels": _findings(kernels()),
        "channels": _findings({"tcp": channel("tcp://127.0.0.1:0"), "ipc": _ipc()}),
        "packages": [_torch(), *(package(extra, *what) for extra, what in OPTIONAL.items())],
    }


def _findings(reasons: Mapping[str, str | None]) -> Sequence[Finding]:
    findings = []
    for name, text in reasons.items():
        reason, _, remedy = (text or "").partition("; remedy: ")
        findings.append(Finding(name, text is None, reason, remedy))
    return findings


def _ipc() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        return channel(f"ipc://{folder}/doctor")


def channel(bind: str) -> str | None:
    """Why a frame does not come back over a channel bound to ``bind``; None: it does."""
    from ..channels import Arrived, ZmqChannel

    try:
        made = ZmqChannel(bind)
    except ConfigurationError as error:
        return str(error)
    try:
        made.send(made.address, b"doctor")
        arrived = any(Arrived(b"doctor") in made.poll(0.5) for _ in range(10))
        return None if arrived else f"channel {bind!r}: a frame to itself did not arrive within 5 s"
    finally:
        made.close()


def _torch() -> Finding:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("torch", True, f"{torch.__version__}, GPUs: {', '.join(gpus) or 'none'}")


def package(extra: str, name: str, purpose: str) -> Finding:
    """Whether an optional package is installed."""
    try:
        return Finding(name, True, version(name))
    except PackageNotFoundError:
        return Finding(name, False, f"not installed; only needed for {purpose}", f"pip install 'disagg_kv[{extra}]'")
