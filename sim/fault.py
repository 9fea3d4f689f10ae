"""What may go wrong in a simulation, and how often."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from enum import Enum

from disagg_kv.errors import UnknownNameError


class FaultClass(Enum):
    """One way in which the world may fail. The value says what happens."""

    __hash__ = object.__hash__  # every frame looks up the rates of many; Enum's own hash is computed in Python

    DROP = "a frame is lost"
    DUPLICATE = "a frame arrives twice"
    REORDER = "a frame arrives after later ones"
    DELAY = "a frame takes up to a second"
    STALE = "a frame of long ago arrives once more"
    OUT_OF_TURN = "a peer says what makes no sense now"
    CLOG = "a link delivers nothing for a while, then everything"
    PARTITION = "a link loses everything for a while, in one direction"
    TRUNCATED = "a frame loses its end"
    REFUSED = "a write fails before any byte lands"
    PARTIAL = "a write fails after some bytes have landed"
    UNACKNOWLEDGED = "a write lands, but an error is reported, and only later that it is quiet"
    LATE = "an error is reported, and the bytes land after it"
    HUNG = "a write stops half way and reports nothing until it is fenced"
    SLOW = "a write takes up to a second"
    UNREACHABLE = "a transport cannot be connected"
    KERNEL = "a gather or a scatter fails"
    PREFILL_CRASH = "a prefill process ends without a word"
    DECODE_CRASH = "a decode process ends without a word"
    RESTART = "an instance that lost a process comes back under its old addresses"
    REPLACED = "a lost process is replaced in its instance, at its old address or another"
    PAUSE = "a process stands still for a while"
    CLOCK = "the clock of a process jumps ahead"
    RING = "the ring holds only a few leases"
    QUARANTINE = "writes that are never quiet fill slots and rings"
    ABORT = "an engine gives a room up, in any state"
    WITHDRAW = "an engine takes pages away and gives others"
    RENDEZVOUS = "the rendezvous is away for a while, or holds garbage"
    BLOCKED = "a look-up, or a connection of the transport, takes up to a fifth of a second"
    OBSERVER = "an observer raises"
    POLL = "a transport's poll raises for a while, and in half of the cases a channel's send too"
    BROKEN = "what handles an error raises, so that the endpoint cannot go on"
    JUNK = "an engine gives arguments that cannot be, and counts of other types than int"
    REUSED = "an engine opens a room id again"
    NO_THREAD = "a thread for a look-up or a connection cannot be started"
    NO_ANSWER = "a look-up never returns"
    STUCK = "a transport's disconnect raises"
    MAPPING = "mapping a peer's pool takes longer than a room waits for it, or than it lives"
    FLAG = "a flag is raised late, twice or never, or an old value or a torn record is in its place"


def named(names: Sequence[str]) -> frozenset[FaultClass]:
    """The classes of these names, written ``late`` or ``LATE``.

    Raises:
        UnknownNameError: lists the known ones.
    """
    known = {f.name.lower(): f for f in FaultClass}
    for name in names:
        if name.strip().lower() not in known:
            raise UnknownNameError("fault", name, known)
    return frozenset(known[name.strip().lower()] for name in names)


EVERY = frozenset(FaultClass)

CALM = 0.12
"""Share of seeds in which nothing fails at all: every request must succeed there."""

LOSSY = 0.1
"""Share of seeds in which frames get lost, and nothing worse: requests are late there, but all of them succeed."""

SURVIVED = (
    FaultClass.DROP,
    FaultClass.DUPLICATE,
    FaultClass.REORDER,
    FaultClass.STALE,
    FaultClass.TRUNCATED,
)
"""What a repeated frame makes good, at the lowest rate of each."""

OUTSIDE: Mapping[FaultClass, float] = {
    FaultClass.RENDEZVOUS: 1.0,
    FaultClass.BLOCKED: 1.0,
    FaultClass.OBSERVER: 0.05,
    FaultClass.POLL: 1.0,
    FaultClass.BROKEN: 1.0,
    FaultClass.JUNK: 1.0,
    FaultClass.NO_THREAD: 1.0,
    FaultClass.NO_ANSWER: 1.0,
    FaultClass.STUCK: 1.0,
    FaultClass.REUSED: 1.0,
}
"""Faults of what an endpoint is given, with their rates. They are drawn beside the others."""

BESIDE = frozenset(
    {
        FaultClass.NO_THREAD,
        FaultClass.NO_ANSWER,
        FaultClass.STUCK,
        FaultClass.REUSED,
        FaultClass.FLAG,
        FaultClass.MAPPING,
    }
)
"""Those that are drawn only here."""

HARMLESS = frozenset(
    {
        FaultClass.RENDEZVOUS,
        FaultClass.BLOCKED,
        FaultClass.OBSERVER,
        FaultClass.JUNK,
        FaultClass.STUCK,
        FaultClass.REUSED,
        FaultClass.FLAG,
        FaultClass.MAPPING,
    }
)
"""Those of them that no request may fail for, whose id is used once; under ``MAPPING`` some run out of time."""

_RATES: Mapping[FaultClass, tuple[float, ...]] = {
    FaultClass.DROP: (0.01, 0.05, 0.2),
    FaultClass.DUPLICATE: (0.02, 0.1, 0.4),
    FaultClass.REORDER: (0.05, 0.2, 0.6),
    FaultClass.DELAY: (0.01, 0.05),
    FaultClass.STALE: (0.02, 0.1, 0.3),
    FaultClass.CLOG: (0.004, 0.02),
    FaultClass.PARTITION: (0.002, 0.01),
    FaultClass.TRUNCATED: (0.01, 0.04),
    FaultClass.REFUSED: (0.03, 0.15),
    FaultClass.PARTIAL: (0.03, 0.15),
    FaultClass.UNACKNOWLEDGED: (0.03, 0.15),
    FaultClass.LATE: (0.03, 0.15),
    FaultClass.HUNG: (0.03, 0.1),
    FaultClass.SLOW: (0.05, 0.3),
    FaultClass.UNREACHABLE: (0.1, 0.4),
    FaultClass.KERNEL: (0.03, 0.15),
    FaultClass.QUARANTINE: (0.4, 0.7),
    FaultClass.ABORT: (0.15, 0.4, 0.7),
    FaultClass.WITHDRAW: (0.3, 0.7),
}
"""How often, per frame, write, kernel or room; classes without a rate happen once or twice a seed."""


def swarm(rng: random.Random, allowed: frozenset[FaultClass]) -> dict[FaultClass, float]:
    """The classes that are on for one seed, with their rates: few or many, seldom or often.

    Switching classes off at random finds more than having all of them on: one fault hides another.
    Groce et al., "Swarm Testing", ISSTA 2012.
    """
    if rng.random() < CALM:
        return {}
    if rng.random() < LOSSY:
        return {f: _RATES[f][0] for f in SURVIVED if f in allowed and rng.random() < 0.6}
    share = rng.choice((0.08, 0.2, 0.5))
    allowed -= BESIDE
    return {f: rng.choice(_RATES.get(f, (1.0,))) for f in FaultClass if f in allowed and rng.random() < share}


def outside(rng: random.Random, allowed: frozenset[FaultClass], others: bool) -> dict[FaultClass, float]:
    """The faults of what endpoints are given, in one seed; where ``others`` fail too, seldom."""
    share = rng.choice((0.0, 0.05, 0.15) if others else (0.0, 0.3, 0.6))
    drawn = {f: rate for f, rate in OUTSIDE.items() if rng.random() < share and f in allowed}
    return drawn | {f: 1.0 for f in (FaultClass.FLAG,) if rng.random() < 0.5 and f in allowed}


AGREEING = (FaultClass.ABORT, FaultClass.PAUSE, FaultClass.DECODE_CRASH)
OFTEN = 0.7
"""What matters while ranks of decode vote on rooms of exposed pages, and how often each is on where they do."""


def while_agreeing(rng: random.Random, allowed: frozenset[FaultClass]) -> dict[FaultClass, float]:
    """Faults that such a seed has beside those that it draws, at the lowest rate of each."""
    return {f: _RATES.get(f, (1.0,))[0] for f in AGREEING if f in allowed and rng.random() < OFTEN}


def survives(faults: Mapping[FaultClass, float]) -> bool:
    """Whether every request must succeed although these faults happen."""
    return all(f in HARMLESS or (f in SURVIVED and rate == _RATES[f][0]) for f, rate in faults.items())
