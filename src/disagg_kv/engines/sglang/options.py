"""What the environment variable ``DISAGG_KV_SGLANG`` may hold."""

from __future__ import annotations

import json
from collections.abc import Mapping

from attrs import frozen

from ...errors import ConfigurationError
from ...strategies import AUTO, PER_CHUNK, exposes_pages, paths, strategy
from ..opening import selecting
from ..options import EngineOptions

VARIABLE = "DISAGG_KV_SGLANG"
"""A JSON object; unset: all defaults."""


@frozen(kw_only=True)
class SGLangOptions(EngineOptions):
    """Options of the plug-in; see :class:`~disagg_kv.engines.options.EngineOptions`.

    SGLang frees pages by its own clock. So only paths are accepted under which no peer writes into pages.
    ``claim_s`` is the time for which decode waits until prefill opens a request, which it does between two steps.
    """

    claim_s: float = 300.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        chosen = strategy(self.strategy)
        if chosen.path != AUTO and exposes_pages(paths()[chosen.path]):
            raise ConfigurationError(
                f"strategy {self.strategy!r}: with path {chosen.path!r} peers write into pages, which SGLang frees "
                "without waiting for them; take 'staged'"
            )
        if chosen.schedule.name != PER_CHUNK:
            raise ConfigurationError(
                f"strategy {self.strategy!r}: SGLang reports rows once all layers are computed, so the schedule "
                f"{chosen.schedule.name!r} is not supported"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SGLangOptions:
        """From the variable :data:`VARIABLE`.

        Raises:
            UnknownNameError: an option of another name; lists those that there are.
            ConfigurationError: no JSON object, or a value that cannot be.
        """
        text = environment.get(VARIABLE, "")
        try:
            given = json.loads(text or "{}")
        except ValueError as exc:
            raise ConfigurationError(f"{VARIABLE}: no JSON: {exc}: {text:.200}") from exc
        if not isinstance(given, dict):
            raise ConfigurationError(f"{VARIABLE}: no JSON object: {text:.200}")
        return cls.read(VARIABLE, given)

    def names(self) -> str:
        """The strategy as the endpoint of either side takes it: with ``auto``, no path uses or exposes pages.

        Decode frees its pages without waiting for peers. Prefill's server stands still while a path uses its pages.
        """
        chosen = strategy(self.strategy)
        path = "staged" if chosen.path == AUTO else chosen.path
        return selecting(f"{path}+{chosen.schedule.name}")
