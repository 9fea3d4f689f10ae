"""Transports by name: the built-in ones, those registered by a call, those of installed packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from .. import arguments
from ..errors import ConfigurationError, DisaggKVError, UnknownNameError
from .base import Transport

ENTRY_POINTS = "disagg_kv.transports"
"""The entry-point group in which an installed package names its transports."""

Factory = Callable[..., Transport]
"""Makes a transport; its parameters are the transport's options."""

_BUILTIN = {
    "cuda_ipc": "disagg_kv.transports.cuda_ipc:CudaIpcTransport",
    "inproc": "disagg_kv.transports.inproc:InprocTransport",
    "mooncake": "disagg_kv.transports.mooncake:MooncakeTransport",
    "nixl": "disagg_kv.transports.nixl:NixlTransport",
    "shm": "disagg_kv.transports.shm:ShmTransport",
}
_DEFAULTS = {"cpu": "shm", "cuda": "cuda_ipc"}
_registered: dict[str, Factory] = {}


def register_transport(name: str, factory: Factory) -> None:
    """Make ``transport(name, ...)`` call ``factory`` in this process; replaces what the name meant before."""
    arguments.function(factory, "factory")
    _registered[arguments.text(name, "name of a transport", least=1)] = factory


def transport(name: str, **options: object) -> Transport:
    """A new transport. Imports nothing but the one that is asked for.

    Raises:
        UnknownNameError: no transport, or no option of it, has that name; lists those that there are.
        MissingDependencyError: it needs a package that is not installed, or another host.
        ConfigurationError: a package's entry point cannot be loaded.
    """
    factory = _factory(arguments.text(name, "name of a transport"))
    parameters = inspect.signature(factory).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for option in options:
            if option not in known:
                raise UnknownNameError(f"option of transport {name!r}", option, known)
    return factory(**options)


def default_transport(device: str) -> str:
    """The transport between processes of one host for memory on a device: it needs no package but this one.

    Raises:
        UnknownNameError: there is none for such a device.
    """
    kind = arguments.text(device, "device").partition(":")[0]
    if kind not in _DEFAULTS:
        raise UnknownNameError("device", device, _DEFAULTS)
    return _DEFAULTS[kind]


def between_processes(name: str, device: str = "cpu", **options: object) -> Transport:
    """``transport(name, ...)`` for memory on a device, between processes of one host: with what GPU memory takes there.

    Raises:
        ConfigurationError: also where it cannot move such memory.
    """
    kind, _, index = arguments.text(device, "device").partition(":")
    if kind == "cuda" and name == "mooncake":
        options = {"protocol": "nvlink_intra", **options}
    elif kind == "cuda" and name == "nixl":
        options = {"cuda_device": _index(device, index), **options}
    made = transport(name, **options)
    if kind not in made.caps.devices:
        made.close(0.0)
        raise ConfigurationError(
            f"transport {name!r} moves memory of kind {', '.join(sorted(made.caps.devices))}, not on {device!r}"
        )
    return made


def available() -> dict[str, str | None]:
    """Every known name with the reason why it does not work here, or None if it does.

    Each transport is made once and closed, so this may load large libraries.
    """
    found: dict[str, str | None] = {}
    for name in sorted({*_BUILTIN, *_registered, *_installed()}):
        try:
            transport(name).close(0.0)
            found[name] = None
        except DisaggKVError as error:
            found[name] = str(error)
    return found


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _factory(name: str) -> Factory:
    if name in _registered:
        return _registered[name]
    if name in _BUILTIN:
        return _load(EntryPoint(name, _BUILTIN[name], ENTRY_POINTS))
    installed = _installed()
    if name not in installed:
        raise UnknownNameError("transport", name, {*_BUILTIN, *_registered, *installed})
    return _load(installed[name])


def _load(point: EntryPoint) -> Factory:
    try:
        factory: Factory = point.load()
    except Exception as error:
        raise ConfigurationError(f"transport {point.name!r}: {point.value} cannot be loaded: {error}") from error
    return factory


def _index(device: str, number: str) -> int:
    if number and not number.isdecimal():
        raise ConfigurationError(f"device {device!r}: {number!r} is no number of a GPU")
    return int(number or 0)
