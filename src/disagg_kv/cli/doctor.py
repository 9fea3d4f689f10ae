"""``disagg-kv doctor``: what works on this host; for what does not, the reason and the remedy."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from attrs import asdict, evolve, frozen
from rich.text import Text

from ..engines.versions import ENGINES, Engine
from ..errors import ConfigurationError, DisaggKVError
from .output import Json, JsonFlag, emit, log, progress
from .places import nics, place

if TYPE_CHECKING:
    from .lanes import Probe
    from .probe import Lane

T = TypeVar("T")
Checks = Mapping[str, "Callable[[], Sequence[Finding]]"]

EXPOSED = {
    "cuda_ipc": "a peer maps the whole allocation that holds a region: allocate nothing else beside the cache",
    "shm": "a peer maps what the transport allocated, and nothing else",
}
"""What a mapping exposes to the peers that are connected, of transports that map memory between processes."""

NEEDED = ("transports", "kernels", "channels")
"""Of each of these at least one must work."""


@frozen
class Finding:
    """One check.

    Args:
        name: the thing checked.
        works: whether it works.
        detail: more about it; if it does not work, the reason.
        remedy: how to make it work.
        library: a transport's package, its version, and the module that is imported.
    """

    name: str
    works: bool
    detail: str = ""
    remedy: str = ""
    library: str = ""

    def __str__(self) -> str:
        word = "works" if self.works else "NO"
        parts = [self.detail, self.remedy and f"remedy: {self.remedy}", self.library]
        return f"{self.name:<15} {word:<6} {'; '.join(filter(None, parts))}".rstrip()


def doctor(
    peers: Annotated[int, typer.Option(min=1, help="Peers that an endpoint shall have.")] = 256,
    between: Annotated[
        bool, typer.Option("--between", help="Measure each transport between two processes of this host.")
    ] = False,
    peer: Annotated[
        str | None, typer.Option(help="Measure each transport to the process that --listens there.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="Be the other side of one --peer, at tcp://HOST:PORT or unix:///PATH.")
    ] = None,
    device: Annotated[str, typer.Option(help="Memory that is written from, or to: cpu, cuda, cuda:1 ...")] = "cpu",
    secret: Annotated[
        Path | None, typer.Option(help="Own .key_secret beside the allowed keys, for another host.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what works on this host, and for the rest the reason and the remedy; or measure what carries bytes."""
    if between + (peer is not None) + (listen is not None) > 1:
        raise ConfigurationError("--between, --peer and --listen exclude each other")
    if not between and peer is None and listen is None:
        _examine(peers, as_json)
        return
    from ..channels import Keys
    from . import lanes  # this imports torch, which costs seconds

    pair = None if secret is None else Keys.load(secret, secret.parent)
    if listen is not None:
        _waited("what is written here", partial(lanes.listen, listen, device, pair, math.inf, log))
        emit({"ok": True, "listened": listen}, Text("one probe is over"), as_json=as_json)
    else:
        _measure(lanes.between(device) if peer is None else lanes.to_peer(peer, device, pair), as_json)


def _waited(what: str, act: Callable[[], T]) -> T:
    """Do something that may take seconds, with a bar that says what it is."""
    with progress() as bar, _stdout_is_stderr():
        bar.add_task(f"checking {what}", total=None)
        return act()


def _measure(opening: AbstractContextManager[Probe], as_json: bool) -> None:
    """Show a probe while it goes on; exit code 1 unless what ``auto`` takes is good."""
    from .lanes import good, text

    found: list[Lane] = []
    with ExitStack() as stack:
        probe = _waited("the other side", lambda: stack.enter_context(opening))
        _show(probe.head(), as_json)
        for name in probe.names():
            if not found or name != found[0].transport:
                found.append(_waited(f"transport {name}", partial(probe.measured, name)))
                _show([text(found[-1])], as_json)
    if as_json:
        emit(probe.document(found), as_json=True)
    if not good(found[0]):
        raise typer.Exit(1)


def _show(lines: Iterable[Text], as_json: bool) -> None:
    """Print lines of a result as they are found; JSON comes in the end."""
    if not as_json:
        emit({}, *lines, as_json=False)


def _examine(peers: int, as_json: bool) -> None:
    found = dict[str, Sequence[Finding]]()
    checks: Checks = {**CHECKS, "limits": lambda: limits(peers, *resource.getrlimit(resource.RLIMIT_NOFILE))}
    for kind, check in checks.items():
        found[kind] = _waited(kind, check)
        _show((Text(f"{kind:<11} {finding}") for finding in found[kind]), as_json)
    troubles = [*problems(os.environ), *rivals("mooncake", packages_distributions())]
    lacking = [kind for kind in NEEDED if not any(f.works for f in found[kind])]
    host = {"python": platform.python_version(), "platform": platform.platform(), "disagg_kv": version("disagg_kv")}
    groups: dict[str, Json] = {kind: [asdict(f) for f in findings] for kind, findings in found.items()}
    verdict = f"None of these works: {', '.join(lacking)}." if lacking else "This host can run disagg_kv."
    document: dict[str, Json] = {"ok": not lacking, "host": host, "problems": troubles, **groups}
    emit(document, *(Text(f"problem     {trouble}") for trouble in troubles), verdict, as_json=as_json)
    if lacking:
        raise typer.Exit(1)


def _transports() -> Sequence[Finding]:
    from ..transports import available  # this imports torch, which costs seconds

    return [*(_carrier(finding) for finding in _findings(available())), *automatic()]


def _kernels() -> Sequence[Finding]:
    from ..kernels import available

    return [mover(finding) for finding in _findings(available())]


def _channels() -> Sequence[Finding]:
    return _findings({"tcp": channel("tcp://127.0.0.1:0"), "ipc": _local("ipc"), "unix": _local("unix")})


def _places() -> Sequence[Finding]:
    """Network cards, and which of them is nearest to each GPU."""
    import torch

    cards = [Finding(card.name, True, str(card)) for card in nics()]
    return [*cards, *(Finding(f"cuda:{n}", True, str(place(f"cuda:{n}"))) for n in range(torch.cuda.device_count()))]


def _findings(reasons: Mapping[str, str | None]) -> Sequence[Finding]:
    findings = []
    for name, text in reasons.items():
        reason, _, remedy = (text or "").partition("; remedy: ")
        findings.append(Finding(name, text is None, reason, remedy))
    return findings


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """What libraries print, in Python or in C, is no result of ours."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def mover(finding: Finding) -> Finding:
    """The same with what serves GPUs where Triton cannot."""
    if finding.works or finding.name != "triton":
        return finding
    return evolve(finding, detail=f"{finding.detail}; GPU memory uses 'reference', which is many times slower")


def _carrier(finding: Finding) -> Finding:
    """The same with the library behind the transport, or what a peer maps."""
    if not finding.works:
        return finding
    if finding.name in EXPOSED:
        return evolve(finding, detail=EXPOSED[finding.name])
    if finding.name == "nixl":
        from ..transports.nixl_library import load

        return evolve(finding, library=distribution(load().module.__name__))
    return evolve(finding, library=distribution("mooncake")) if finding.name == "mooncake" else finding


def distribution(module: str) -> str:
    """The installed package that a module comes from."""
    names = packages_distributions().get(module, [])
    return ", ".join([*(f"{name} {version(name)}" for name in sorted(set(names))), f"module {module}"])


def automatic() -> Sequence[Finding]:
    """What transport ``auto`` gives the peers of an endpoint, by kind of memory."""
    import torch

    from ..transports import between_processes

    found = []
    for device in ("cpu", "cuda:0")[: 1 + torch.cuda.is_available()]:
        try:
            made = between_processes("auto", device, network=True)
            found.append(Finding("auto", True, f"memory on {device}: {made}"))
            made.close(0.0)
        except DisaggKVError as error:
            found.append(Finding("auto", False, f"memory on {device}: {error}"))
    return found


def system_libraries() -> Sequence[Finding]:
    """System libraries that Mooncake's wheels leave out, by Debian package."""
    from ..transports.mooncake_library import PACKAGES

    found = []
    for library, debian in PACKAGES.items():
        # Only builds with CUDA need it.
        purpose = "mooncake with CUDA" if library.startswith("libmlx5") else "mooncake"
        try:
            ctypes.CDLL(library)
            found.append(Finding(library, True, f"Debian package {debian}"))
        except OSError:
            remedy = f"apt-get install --no-install-recommends {debian}"
            found.append(Finding(library, False, f"Debian package {debian} is missing; {purpose} needs it", remedy))
    return found


def problems(environment: Mapping[str, str]) -> Sequence[str]:
    """Settings that make transports refuse GPU memory."""
    return [
        f"{name}={environment[name]}: GPU memory of expandable segments cannot be shared between processes, and is "
        "refused; unset it"
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", "")
    ]


def rivals(module: str, installed: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Packages that bring the same module: the last one to be installed has replaced the files of the others."""
    names = sorted(set(installed.get(module, ())))
    if len(names) < 2:
        return []
    return [f"{' and '.join(names)} all install the module {module!r}: uninstall all of them, and install one"]


def limits(peers: int, soft: int, hard: int) -> Sequence[Finding]:
    """Whether an endpoint of a process keeps the links to all of these peers, by kind of channel."""
    from ..channels import UnixChannel, ZmqChannel
    from ..core import Options
    from ..endpoints.peers.link_budget import OVER, OWN_DESCRIPTORS, OWN_LINK, allowed_descriptors, allowed_links
    from ..transports import Capabilities

    found = []
    for kind in (UnixChannel, ZmqChannel):
        cost = OWN_LINK + kind.link_cost + Capabilities().link
        links = allowed_links(cost, Options(), soft)
        name = f"links, {'unix' if kind is UnixChannel else 'zeromq'}"
        needed = OWN_DESCRIPTORS + math.ceil(OVER * cost.descriptors * peers)
        most = "all" if links.most >= peers else f"the {links.most:,.0f} used last"
        detail = f"of {peers:,} peers, {most} keep their links when idle"
        detail += f": {cost.descriptors} descriptors and {cost.nbytes:,} bytes each; the soft limit is {soft:,}"
        few = allowed_descriptors(soft) < cost.descriptors * peers
        remedies = [_raised(needed, hard)] if few else []
        remedies += [f"Options(link_bytes={cost.nbytes * peers})"] if cost.nbytes * peers > Options().link_bytes else []
        found.append(Finding(name, links.most >= peers, detail, "" if links.most >= peers else "; ".join(remedies)))
    return found


def _raised(needed: int, hard: int) -> str:
    raised = "" if hard == resource.RLIM_INFINITY or hard >= needed else f", after the hard limit of {hard:,} is raised"
    return f"ulimit -n {needed}{raised}"


def _local(scheme: str) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        return channel(f"{scheme}://{folder}/doctor")


def channel(bind: str) -> str | None:
    """Why a frame does not come back over a channel bound to ``bind``; None: it does."""
    from ..channels import Arrived, UnixChannel, ZmqChannel

    try:
        made = UnixChannel(bind) if bind.startswith("unix:") else ZmqChannel(bind)
    except ConfigurationError as error:
        return str(error)
    try:
        made.send(made.address, b"doctor")
        until = time.monotonic() + 5.0
        while (left_s := until - time.monotonic()) > 0:
            made.wait(left_s)
            if Arrived(b"doctor") in made.poll():
                return None
        return f"channel {bind!r}: a frame to itself did not arrive within 5 s"
    finally:
        made.close()


def _torch() -> Finding:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("torch", True, f"{torch.__version__}, GPUs: {', '.join(gpus) or 'none'}")


def engine(one: Engine) -> Finding:
    """Whether an engine is installed, and in a version that its adapter is tested with; newer ones may work."""
    installed = one.version
    if installed is None:
        return Finding(one.name, False, f"not installed; only needed for its adapter; {one.tested}", one.remedy)
    problem, _, remedy = (one.untested(installed) or "").partition("; remedy: ")
    return Finding(one.name, not one.is_older(installed), problem or f"{installed}; {one.tested}", remedy)


CHECKS: Checks = {
    "transports": _transports,
    "kernels": _kernels,
    "channels": _channels,
    "places": _places,
    "libraries": system_libraries,
    "packages": lambda: [_torch()],
    "engines": lambda: [engine(one) for one in ENGINES.values()],
}
"""All there is, kind by kind, in this order."""
