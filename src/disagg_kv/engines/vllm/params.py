"""What travels in vLLM's ``kv_transfer_params``: from prefill's response, through any router, to decode's request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from ...errors import ConfigurationError, RemoteProtocolError
from ...rendezvous import Source

MAX_ADDRESSES = 128
"""Prefill ranks of an instance; each costs decode a connection."""

REMOTE_PREFILL, REMOTE_DECODE = "do_remote_prefill", "do_remote_decode"
"""vLLM's own keys: another instance prefills this request; another instance decodes it."""


PASS_ON = "a router has to pass on what prefill has answered, unchanged"

FIRST_TOKEN = "first_token"
"""What prefill has computed. A decode instance of vLLM computes it anew; one of another engine may need it."""


@frozen
class Origin:
    """Where decode finds the rows of a request.

    Args:
        transfer: id of the transfer, unique for each sending of a request.
        source: the prefill instance.
    """

    transfer: str
    source: Source

    def params(self) -> dict[str, Any]:
        """As prefill returns them to the router."""
        return {
            REMOTE_PREFILL: True,
            REMOTE_DECODE: False,
            "transfer_id": self.transfer,
            "instance": self.source.instance,
            "addresses": list(self.source.addresses),
        }

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Origin:
        """From decode's request.

        Raises:
            RemoteProtocolError: a key is missing, or is not what prefill returned.
        """
        transfer = transfer_id(params)
        if transfer is None:
            raise RemoteProtocolError(f"kv_transfer_params: transfer_id is missing: {PASS_ON}")
        given = params.get("addresses") or ()
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise RemoteProtocolError(f"kv_transfer_params: addresses {given!r:.200} is no list")
        if len(given) > MAX_ADDRESSES:
            raise RemoteProtocolError(f"kv_transfer_params: {len(given)} addresses, at most {MAX_ADDRESSES}")
        try:
            return cls(transfer, Source(params.get("instance", ""), tuple(given)))
        except ConfigurationError as exc:
            raise RemoteProtocolError(f"kv_transfer_params: {exc}: {PASS_ON}") from exc


def transfer_id(params: Mapping[str, Any]) -> str | None:
    """The id that a router or prefill gave the transfer; None: it gave none.

    Raises:
        RemoteProtocolError: it is no text of 1 to 256 characters that UTF-8 can encode.
    """
    given = params.get("transfer_id")
    if given is None or (isinstance(given, str) and 0 < len(given) <= 256 and _encodable(given)):
        return given
    raise RemoteProtocolError(f"kv_transfer_params: transfer_id {given!r:.200} is no text of 1 to 256 characters")


def _encodable(text: str) -> bool:
    """False: it has a half of a surrogate pair, which JSON can write."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
