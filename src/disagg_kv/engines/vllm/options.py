"""What ``kv_connector_extra_config`` may hold."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from ...errors import ConfigurationError
from ..options import EngineOptions


@frozen(kw_only=True)
class ConnectorOptions(EngineOptions):
    """Options of the connector; see :class:`~disagg_kv.engines.options.EngineOptions`."""

    @classmethod
    def of(cls, given: Mapping[str, object]) -> ConnectorOptions:
        """From ``kv_connector_extra_config``.

        Raises:
            UnknownNameError: an option of another name; lists those that there are.
            ConfigurationError: a value that cannot be.
        """
        return cls.read("kv_connector_extra_config", given)

    def check(self, prefix_caching: bool) -> None:
        """Raise a :class:`ConfigurationError` for options that vLLM's own ones contradict.

        Args:
            prefix_caching: whether this is a decode instance that keeps the blocks of earlier prompts.
        """
        if prefix_caching and self.verify == "full":
            raise ConfigurationError(
                "verify 'full' compares every row, and there are no checksums of vLLM's own prefix cache: "
                "start decode instances with --no-enable-prefix-caching, or take verify 'sampled'"
            )
