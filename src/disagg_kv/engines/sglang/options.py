"""What the environment variable ``DISAGG_KV_SGLANG`` may hold."""

from __future__ import annotations

import json
from collections.abc import Mapping

import attrs
from attrs import frozen

from ...errors import ConfigurationError
from ...strategies import AUTO, exposes_pages, paths, strategy
from ..opening import selecting
from ..options import EngineOptions

VARIABLE = "DISAGG_KV_SGLANG"
"""A JSON object; unset: all defaults."""


@frozen(kw_only=True)
class SGLangOptions(EngineOptions):
    """Options of the plug-in; see :class:`~disagg_kv.engines.options.EngineOptions`.

    Of the paths under which peers write into pages only ``mapped`` is accepted: its copies end by themselves. Where a
    network reads pages of prefill, SGLang's scheduler would stand still for as long as a peer is silent.
    ``claim_s`` is the time for which decode waits until prefill opens a request, which it does between two steps.
    """

    claim_s: float = 300.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        chosen = strategy(self.strategy)
        if chosen.path != AUTO and paths()[chosen.path].mover == "direct":
            raise ConfigurationError(
                f"strategy {self.strategy!r}: with path {chosen.path!r} a network reads pages of prefill, and its "
                "scheduler would wait for a peer that is silent; take 'staged'"
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

    def of_instance(self, number: int, ranks: int) -> SGLangOptions:
        """Those of one of a server's data-parallel instances of ``ranks`` each: its ports of metrics follow."""
        host, _, port = self.metrics.rpartition(":")
        return attrs.evolve(self, metrics=f"{host}:{int(port) + number * ranks}") if int(port or 0) else self

    def names(self, *, exposes: bool) -> str:
        """The strategy as an endpoint takes it.

        Args:
            exposes: peers may write into this server's pages, or it has none that they write to.

        Raises:
            ConfigurationError: a path that needs it.
        """
        chosen = strategy(self.strategy)
        if not exposes and chosen.path != AUTO and exposes_pages(paths()[chosen.path]):
            raise ConfigurationError(
                f"strategy {self.strategy!r}: with path {chosen.path!r} peers write into pages, which this SGLang "
                "frees without waiting for them (SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0, or "
                "--enable-memory-saver); take 'staged'"
            )
        path = "staged" if chosen.path == AUTO and not exposes else chosen.path
        return selecting(f"{path}+{chosen.schedule.name}")
