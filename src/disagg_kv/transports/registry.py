"""Transports by name: the built-in ones, those registered by a call, those of installed packages."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint, entry_points

from .. import arguments
from ..errors import (
    ConfigurationError,
    DisaggKVError,
    MissingDependencyError,
    TransportError,
    UnknownNameError,
    text_of,
)
from .base import Transport
from .several import JOIN, Transports, check, listed, names_of, unfit

log = logging.getLogger("disagg_kv")

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
AUTO = "auto"
"""The name of the transports that start on a host."""

NO_NETWORK = "peers of this host need no network; name it to have it"
"""Why ``auto`` goes without networks where they are not asked for."""

IN_AUTO = {"cpu": ("shm", "nixl", "mooncake"), "cuda": ("cuda_ipc", "nixl", "mooncake")}
"""By kind of memory: the transport within a host, then those between hosts, of which the first that starts is taken."""

FAR_DRAIN_S = 120.0
"""Seconds after which a process of another host that has ended writes nothing more over NIXL. Its kernel may send its
last bytes again for 100 seconds, on a broken link."""

_registered: dict[str, Factory] = {}


def register_transport(name: str, factory: Factory) -> None:
    """Make ``transport(name, ...)`` call ``factory`` in this process; replaces what the name meant before."""
    arguments.function(factory, "factory")
    name = arguments.text(name, "name of a transport", least=1)
    if name == AUTO or JOIN in name:
        raise ConfigurationError(f"name of a transport: {name!r} means several transports")
    _registered[name] = factory


def transport(name: str, **options: object) -> Transport:
    """A new transport. Imports nothing but what is asked for.

    Raises:
        UnknownNameError: no transport, or no option of it, has that name; lists those that there are.
        MissingDependencyError: it needs a package that is not installed, or another host.
        ConfigurationError: a package's entry point cannot be loaded, or what it makes is no transport.
    """
    factory = factory_of(arguments.text(name, "name of a transport"))
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(factory).parameters.values()):
        known = _options_of(factory)
        for option in options:
            if option not in known:
                raise UnknownNameError(f"option of transport {name!r}", option, known)
    made = factory(**options)
    with _closed_on_error([made]):
        check(made, f"transport {name!r}")
    return made


def between_processes(name: str, device: str = "cpu", host: str = "", /, **options: object) -> Transports:
    """New transports for memory on a device, as an endpoint takes them, with what GPUs and networks need.

    One that cannot start here, of several that are named, is left out, with a warning. ``"auto"`` takes those that
    start, see :data:`IN_AUTO`.

    Args:
        name: of a transport, of several, joined by ``+``, or ``"auto"``.
        device: of the memory.
        host: the address at which other hosts reach this one; empty: all peers are on this host. A transport with an
            option of that name gets it.
        options: those of each transport, by its name, as ``nixl={"num_threads": 2}``; they come first. Besides,
            ``"auto"`` has ``network``, by default whether there is a ``host``. False: none of the networks is started,
            unless the transport within the host does not start.

    Raises:
        UnknownNameError: no transport, or no option of one, has that name; lists those that there are.
        MissingDependencyError: the only one needs a package that is not installed, or another host.
        ConfigurationError: a package's entry point cannot be loaded, none of them starts, or none of them can move such
            memory.
    """
    device = arguments.text(device, "device")
    name, host = arguments.text(name, "name of transports"), arguments.text(host, "host")
    if name == AUTO:
        network = arguments.flag(options.pop("network", bool(host)), "network")
        return _auto(device, _by_name(_in_auto(device), options), network, host)
    given = _by_name(names_of(name), options)
    every = {one: {**_between(one, device, host), **given.get(one, {})} for one in names_of(name)}
    if JOIN in name:
        return _several(name, every, device)
    made = [transport(name, **every[name])]
    with _closed_on_error(made):
        if why := unfit(made[0], device):
            raise ConfigurationError(f"transport {name!r} moves no memory on {device!r}: {why}")
        return Transports(made, argument=f"transport {name!r}")


def _several(name: str, options: Mapping[str, Mapping[str, object]], device: str) -> Transports:
    """What starts of the transports that a name names and moves memory on a device."""
    names = names_of(name)
    if "" in names or len(set(names)) < len(names) or AUTO in names:
        raise ConfigurationError(f"transport {name!r}: names of different transports are needed between each {JOIN!r}")
    for one in names:
        factory_of(one)
    made: list[Transport] = []
    with _closed_on_error(made):
        left_out = _start(made, names, options, [one for one in names if options[one]], device)
        if not made:
            why = f"none of them starts here for memory on {device!r}: {listed(left_out)}"
            raise ConfigurationError(f"transport {name!r}: {why}")
        for one, why in left_out.items():
            log.warning("transport %r goes without %r: %s", name, one, why)
        return Transports(made, left_out, f"transport {name!r}")


@contextmanager
def _closed_on_error(made: Sequence[Transport]) -> Iterator[None]:
    """Close transports where the block raises, since no caller has them."""
    try:
        yield
    except BaseException:
        _close(made)
        raise


def _close(made: Sequence[Transport]) -> None:
    """Close transports that no caller gets, of which none has moved anything: why they are closed is what counts."""
    for one in made:
        with suppress(Exception):
            one.close(0.0)


def _options_of(factory: Factory) -> list[str]:
    parameters = inspect.signature(factory).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _by_name(names: Sequence[str], options: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """Options of several transports, by the name of each.

    Raises:
        UnknownNameError: options of another one.
        ConfigurationError: no options.
    """
    for one in options:
        if one not in names:
            raise UnknownNameError("transport with options", one, names)
    found = {one: arguments.mapping(of, f"options of transport {one!r}") for one, of in options.items()}
    return {one: {arguments.text(name, "option"): value for name, value in of.items()} for one, of in found.items()}


def _start(
    made: list[Transport],
    names: Sequence[str],
    options: Mapping[str, Mapping[str, object]],
    given: Container[str],
    device: str,
) -> dict[str, str]:
    """Add to ``made`` what starts and moves memory on a device; why the others do not.

    A wrong option is an error where options were ``given``.
    """
    left_out: dict[str, str] = {}
    for name in names:
        try:
            made.append(transport(name, **options.get(name, {})))
        except DisaggKVError as error:
            if name in given and not isinstance(error, MissingDependencyError | TransportError):
                raise
            left_out[name] = text_of(error)
            continue
        if why := unfit(made[-1], device):
            left_out[name] = why
            _close([made.pop()])
    return left_out


def _in_auto(device: str) -> tuple[str, ...]:
    kind = device.partition(":")[0]
    if kind not in IN_AUTO:
        raise UnknownNameError("device", device, IN_AUTO)
    return IN_AUTO[kind]


def _auto(device: str, options: Mapping[str, Mapping[str, object]], network: bool, host: str) -> Transports:
    """What starts of :data:`IN_AUTO`; the others stay in ``left_out``."""
    near, *networks = _in_auto(device)
    made: list[Transport] = []
    with _closed_on_error(made):
        left_out = _start(made, [near], options, options, device)
        if network or not made:
            placed = {one: {**_placed(one, device, host), **options.get(one, {})} for one in networks}
            left_out |= _start_network(made, device, placed, options)
        else:
            left_out |= dict.fromkeys(networks, NO_NETWORK)
        if not made:
            raise ConfigurationError(f"transport 'auto': none starts for memory on {device!r}: {listed(left_out)}")
        result = Transports(made, left_out, "transport 'auto'")
        log.info("transport 'auto' for memory on %r: %s", device, result)
        return result


def _start_network(
    made: list[Transport], device: str, networks: Mapping[str, Mapping[str, object]], given: Container[str]
) -> dict[str, str]:
    """Add to ``made`` the first of some networks, each with its options, that starts and moves memory on the device.

    Returns:
        Why the others are left out.
    """
    left_out: dict[str, str] = {}
    names = iter(networks)
    for name in names:
        whys = _start(made, [name], networks, given, device)
        left_out |= whys or dict.fromkeys(names, f"{name!r} reaches the same peers")
    return left_out


def _placed(name: str, device: str, host: str) -> dict[str, object]:
    """What a transport needs for memory on a device, and to be reached at ``host`` by other hosts, if that is given."""
    kind, _, index = device.partition(":")
    options: dict[str, object] = {"cuda_device": _index(device, index)} if (kind, name) == ("cuda", "nixl") else {}
    known = _options_of(factory_of(name)) if host else ()
    if "host" in known:
        options["host"] = host
    if name == "nixl" and "drain_s" in known:
        options["drain_s"] = FAR_DRAIN_S
    return options


def _between(name: str, device: str, host: str) -> dict[str, object]:
    """What a transport needs between processes; see :func:`between_processes`."""
    if name == "mooncake" and device.startswith("cuda") and not host:
        return {"protocol": "nvlink_intra"}
    return _placed(name, device, host)


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


def factory_of(name: str) -> Factory:
    """What makes a transport: its class, or a function.

    Raises:
        UnknownNameError: no transport has that name.
        ConfigurationError: a package's entry point cannot be loaded.
    """
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
