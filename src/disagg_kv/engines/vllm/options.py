"""What ``kv_connector_extra_config`` may hold."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

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
