"""Checks and conversions of the arguments of public calls, before anything is queued.

Each function returns the value in the form that the library stores. For a wrong value it raises a
:class:`ConfigurationError` with the name of the argument and the value, on the thread of the caller.

Counts accept any object with ``__index__``: an ``int``, a NumPy integer, an integer tensor of one element. They reject
``bool``: a truth value instead of a number is a mistake.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import SupportsFloat, SupportsIndex, TypeVar

import numpy as np

from .errors import ConfigurationError

T = TypeVar("T")

MOST = 1 << 62
"""The largest count: the largest number in a frame, and larger than any address."""

MOST_SECONDS = 1e9
"""The longest time, 31 years; timers of the operating system accept about ten times as much."""


def shown(value: object) -> str:
    """A short text for any value, even if its ``repr`` raises or is long."""
    try:
        return reprlib.repr(value)
    except Exception:
        return f"an object of {type(value).__name__}"


def brief(thing: object, text: Callable[[], str]) -> str:
    """What ``repr`` of an object returns: its class and ``text()``.

    It never raises. A traceback may show an object whose constructor has failed, or one that calls another project's
    code.
    """
    kind = type(thing).__name__
    try:
        return f"<{kind} {text()}>"
    except Exception as exc:
        return f"<{kind}: {type(exc).__name__} in its repr>"


def wrong(
    name: str, value: object, wanted: str, error: type[ConfigurationError] = ConfigurationError
) -> ConfigurationError:
    """The error for an invalid argument; the caller raises it."""
    return error(f"{name}: {wanted}, not {shown(value)} ({type(value).__name__})")


def _is_truth(value: object) -> bool:
    """Whether a value is a ``bool`` of Python, NumPy or torch; False if its type cannot be read."""
    try:
        return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    except Exception:
        return False


def count(
    value: object,
    name: str,
    *,
    least: int = 0,
    most: int = MOST,
    error: type[ConfigurationError] = ConfigurationError,
) -> int:
    """An integer in ``[least, most]``.

    Args:
        value: an object with ``__index__``; no ``bool``.
        name: the argument's name, for the message.
        least: the smallest allowed value.
        most: the largest allowed value.
        error: the class to raise.

    Raises:
        ConfigurationError: (or ``error``) another type, or out of range.
    """
    if type(value) is int:  # every call of a hot path ends here or at the range
        number = value
    else:
        if _is_truth(value) or not isinstance(value, SupportsIndex):
            raise wrong(name, value, "an integer is needed", error)
        try:
            number = int(operator.index(value))
        except Exception as exc:
            raise wrong(name, value, "an integer is needed", error) from exc
    if not least <= number <= most:
        bounds = f"at least {least}" if most == MOST and number < least else f"{least} to {most}"
        raise error(f"{name} must be {bounds}, not {shown(number)}")
    return number


def _items(value: object, name: str, kind: str, error: type[ConfigurationError]) -> tuple[object, ...]:
    needed = f"a list of {kind} is needed"
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        raise wrong(name, value, needed, error)
    try:
        return tuple(value.tolist() if isinstance(value, np.ndarray) else value)
    except Exception as exc:
        raise wrong(name, value, needed, error) from exc


def counts(
    value: object, name: str, *, least: int = 0, error: type[ConfigurationError] = ConfigurationError
) -> tuple[int, ...]:
    """Integers from a list, an array, a range or another iterable; see :func:`count`.

    Raises:
        ConfigurationError: (or ``error``) no iterable, or an invalid item.
    """
    return tuple(count(item, name, least=least, error=error) for item in _items(value, name, "integers", error))


def reals(value: object, name: str, error: type[ConfigurationError] = ConfigurationError) -> tuple[float, ...]:
    """Floats from a list, an array or another iterable; see :func:`real`.

    Raises:
        ConfigurationError: (or ``error``) no iterable, or an invalid item.
    """
    try:
        return tuple(real(item, name) for item in _items(value, name, "numbers", error))
    except ConfigurationError as exc:
        raise error(str(exc)) from exc


def seconds(value: object, name: str, *, zero: bool = False) -> float:
    """A finite time in seconds, positive (or zero, if ``zero`` is True).

    Raises:
        ConfigurationError: another type, NaN, infinite, negative, or longer than :data:`MOST_SECONDS`.
    """
    number = real(value, name)
    if not (number >= 0 if zero else number > 0) or number > MOST_SECONDS:
        wanted = f"{'at least 0' if zero else 'more than 0'} and at most {MOST_SECONDS:g} seconds"
        raise ConfigurationError(f"{name} must be {wanted}, not {number:g}")
    return number


def real(value: object, name: str) -> float:
    """A float; infinite and NaN are accepted.

    Raises:
        ConfigurationError: no number.
    """
    if type(value) is float:
        return value
    if _is_truth(value) or not isinstance(value, SupportsFloat):
        raise wrong(name, value, "a number is needed")
    try:
        return float(value)
    except Exception as exc:
        raise wrong(name, value, "a number is needed") from exc


def positive(value: object, name: str) -> float:
    """A number above 0, not infinite.

    Raises:
        ConfigurationError: no number, NaN, infinite, or not positive.
    """
    number = real(value, name)
    if not 0 < number < math.inf:
        raise ConfigurationError(f"{name} must be positive and finite, not {number:g}")
    return number


def octets(value: object, name: str, *, least: int = 0, most: int = 256) -> bytes:
    """Bytes from ``bytes``, ``bytearray`` or ``memoryview``, copied.

    Raises:
        ConfigurationError: another type, or an invalid length.
    """
    if isinstance(value, str):
        raise ConfigurationError(f"{name}: bytes are needed, not text {shown(value)}; encode it, with str.encode()")
    if not isinstance(value, bytes | bytearray | memoryview):
        raise wrong(name, value, "bytes are needed")
    found = bytes(value)
    if not least <= len(found) <= most:
        raise ConfigurationError(f"{name} must have {least} to {most} bytes, not {len(found)}")
    return found


def text(value: object, name: str, *, least: int = 0, most: int = 4096) -> str:
    """Text that can be encoded as UTF-8.

    Raises:
        ConfigurationError: another type, an invalid length, or half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise wrong(name, value, "text is needed")
    if not least <= len(value) <= most:
        raise ConfigurationError(f"{name} must have {least} to {most} characters, not {len(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise ConfigurationError(f"{name}: {shown(value)} cannot be encoded as UTF-8") from exc
    return str(value)


def flag(value: object, name: str) -> bool:
    """True or False.

    Raises:
        ConfigurationError: anything else.
    """
    if not isinstance(value, bool):
        raise wrong(name, value, "True or False is needed")
    return value


def one(value: object, name: str, kind: type[T], error: type[ConfigurationError] = ConfigurationError) -> T:
    """An instance of a class.

    Raises:
        ConfigurationError: (or ``error``) anything else.
    """
    if not isinstance(value, kind):
        raise wrong(name, value, f"a {kind.__name__} is needed", error)
    return value


def several(
    value: object, name: str, kind: type[T], error: type[ConfigurationError] = ConfigurationError
) -> tuple[T, ...]:
    """A tuple of instances of a class, from a list or another iterable.

    Raises:
        ConfigurationError: (or ``error``) a single instance, an array, a tensor, text, a mapping, or an invalid item.
    """
    wanted = f"a list of {kind.__name__} is needed"
    if isinstance(value, kind):
        raise error(f"{name}: {wanted}, not a single one: put it into a list")
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        raise wrong(name, value, wanted, error)
    try:
        array = hasattr(value, "dtype")
        items = () if array else tuple(value)
    except Exception as exc:
        raise wrong(name, value, wanted, error) from exc
    if array:
        raise wrong(name, value, wanted, error)
    for item in items:
        if not isinstance(item, kind):
            raise error(f"{name}: {wanted}, but one of its items is {shown(item)} ({type(item).__name__})")
    return items


def mapping(value: object, name: str) -> dict[object, object]:
    """A plain copy of a mapping.

    Raises:
        ConfigurationError: no mapping, or one that cannot be read.
    """
    if not isinstance(value, Mapping):
        raise wrong(name, value, "a mapping is needed")
    try:
        return dict(value)
    except Exception as exc:
        raise wrong(name, value, "a mapping is needed") from exc


def methods(value: object, name: str, kind: str, *wanted: str) -> None:
    """Check that an object has certain methods, for example those of an event.

    Args:
        value: the object; no class.
        name: the argument's name, for the message.
        kind: the required kind of object, with its article.
        wanted: names of the methods.

    Raises:
        ConfigurationError: a method is missing.
    """
    try:
        missing = [method for method in wanted if not callable(getattr(value, method, None))]
    except Exception as exc:
        raise wrong(name, value, f"{kind} is needed") from exc
    if missing or isinstance(value, type):
        without = f", and {', '.join(missing)}() is missing" if missing else ""
        raise ConfigurationError(f"{name}: {kind} is needed, not {shown(value)} ({type(value).__name__}){without}")


def attributes(value: object, name: str, kind: str, *wanted: str) -> None:
    """Check that an object has certain attributes; see :func:`methods`."""
    try:
        missing = [attribute for attribute in wanted if not hasattr(value, attribute)]
    except Exception as exc:
        raise wrong(name, value, f"{kind} is needed") from exc
    if missing or isinstance(value, type):
        raise wrong(name, value, f"{kind} is needed")


def function(value: object, name: str) -> Callable[..., object]:
    """A callable.

    Raises:
        ConfigurationError: it cannot be called.
    """
    if not callable(value):
        raise wrong(name, value, "a function is needed")
    return value


def clock(value: object, name: str) -> None:
    """Check that a function returns a time.

    Raises:
        ConfigurationError: it cannot be called, raises, or returns no number.
    """
    read = function(value, name)
    try:
        now = read()
    except Exception as exc:
        raise wrong(name, value, "a function that returns a time is needed") from exc
    real(now, f"{name}: its result")


def event(value: T, name: str) -> T:
    """An event, or None.

    Raises:
        ConfigurationError: an object without ``query``.
    """
    if value is not None:
        methods(value, name, "an event", "query")
    return value


def room_id(value: object) -> bytes:
    """The id of a room: 1 to 64 bytes.

    Raises:
        ConfigurationError: text, another type, or another length.
    """
    if isinstance(value, str):
        raise wrong("room id", value, "bytes are needed: disagg_kv.room_id(text) makes them of text")
    return octets(value, "room id", least=1, most=64)


def epoch(value: object) -> bytes:
    """The 16 bytes that name one incarnation of an endpoint.

    Raises:
        ConfigurationError: another type or length.
    """
    return octets(value, "epoch", least=16, most=16)
