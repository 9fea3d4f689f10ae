"""Both ways: decode holds the rows of an answer, and the prompt of the next turn is computed from there on.

The router asks for that: decode's request has :data:`HOLD_S` among its parameters, and those of decode's answer have
:data:`EARLIER`, which the router passes on, once, to the prefill instance that computes the next prompt. Only an
instance that prefills and decodes (``kv_both``) holds rows, or takes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field, frozen

from ...errors import RemoteProtocolError
from .params import REMOTE_DECODE, REMOTE_PREFILL, Origin
from .request import EngineRequest, tag_of

EARLIER = "earlier"
"""Of a prefill request: the turn before, as decode's answer names it."""

HOLD_S = "hold_s"
"""Of a decode request: seconds for which its rows are held after the answer."""

PASS_ON = "a router has to pass on what decode has answered, unchanged"

_LATEST = 1e12
"""No second of the epoch, and no number of seconds, is larger."""

GIVE_UP_S = 1.0
"""Seconds for which the blocks of an answer may take to be free before the next one is given up, too."""

RETURN_S = 5.0
"""Prefill's ``claim_s`` for rows of decode: decode opens their room in the step after its answer."""


@frozen
class Earlier:
    """An answer whose rows decode holds.

    Args:
        origin: where prefill finds them.
        tokens: how many leading tokens of the conversation they are of: all but the last.
        tag: digest of these tokens.
        until: when decode gives them up, in seconds of the epoch.
    """

    origin: Origin
    tokens: int
    tag: bytes
    until: float

    def params(self) -> dict[str, Any]:
        """As decode returns them to the router: they make a prefill request as they are."""
        found = self.origin.params()
        del found[REMOTE_PREFILL], found[REMOTE_DECODE]
        held = {**found, "tokens": self.tokens, "tag": self.tag.hex(), "until": self.until}
        return {REMOTE_DECODE: True, REMOTE_PREFILL: False, EARLIER: held}

    @classmethod
    def of(cls, given: object) -> Earlier:
        """From a prefill request.

        Raises:
            RemoteProtocolError: a key is missing, or is not what decode returned.
        """
        if not isinstance(given, Mapping):
            raise RemoteProtocolError(f"kv_transfer_params: {EARLIER} {given!r:.200} is no mapping: {PASS_ON}")
        tokens, tag, until = given.get("tokens"), given.get("tag"), given.get("until")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise RemoteProtocolError(f"kv_transfer_params: {EARLIER}: tokens {tokens!r:.200}: {PASS_ON}")
        if not isinstance(until, int | float) or not 0 <= until <= _LATEST:
            raise RemoteProtocolError(f"kv_transfer_params: {EARLIER}: until {until!r:.200}: {PASS_ON}")
        try:
            digest = bytes.fromhex(tag)  # type: ignore[arg-type]
        except (TypeError, ValueError) as exc:
            raise RemoteProtocolError(f"kv_transfer_params: {EARLIER}: tag {tag!r:.200}: {PASS_ON}") from exc
        return cls(Origin.of(given), tokens, digest, float(until))

    @property
    def over(self) -> bool:
        """Decode has given them up, if the hosts' clocks agree."""
        return time.time() > self.until

    def unfit(self, request: EngineRequest) -> str:
        """Why a prompt does not go on from these rows; "": it does."""
        if self.over:
            return "decode has given them up"
        if self.tokens > request.num_prompt_tokens or tag_of(request, self.tokens) != self.tag:
            return "they are not of the tokens with which this prompt begins"
        return ""


def hold_s(params: Mapping[str, Any] | None) -> float:
    """Seconds for which the rows of a decode request are to be held after its answer; 0: they are not.

    Raises:
        RemoteProtocolError: no positive number.
    """
    given = (params or {}).get(HOLD_S)
    if given is None:
        return 0.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= _LATEST:
        raise RemoteProtocolError(f"kv_transfer_params: {HOLD_S} {given!r:.200} is no number of seconds")
    return float(given)


@define
class HeldTurns:
    """The answers that a decode instance holds, the oldest first.

    Args:
        few: whether the engine is short of free blocks.
        names: of their requests.
        leaving: those that the ranks give up, and since when.
    """

    few: Callable[[], bool] = field(default=lambda: False)
    names: dict[str, None] = field(factory=dict)
    leaving: dict[str, float] = field(factory=dict)

    def give_up(self, now: float, *, waiting: bool) -> str | None:
        """The oldest one, if blocks are short, or a request is ``waiting`` for some.

        The next one follows once these blocks are free, or after GIVE_UP_S: a frozen peer may be reading them.
        After the last one comes the first again, since a rank lets a peer finish what it reads at first.
        """
        if not self.names or not (waiting or self.few()):
            return None
        if self.leaving and now - max(self.leaving.values()) < GIVE_UP_S:
            return None
        name = next((one for one in self.names if one not in self.leaving), next(iter(self.names)))
        self.leaving[name] = now
        return name

    def give_up_all(self, now: float) -> list[str]:
        """All of them."""
        self.leaving |= dict.fromkeys(self.names, now)
        return list(self.names)

    def ended(self, name: str) -> None:
        """The blocks of a request are free."""
        self.names.pop(name, None)
        self.leaving.pop(name, None)
