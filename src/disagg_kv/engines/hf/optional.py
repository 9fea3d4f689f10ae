"""The error for a missing transformers package."""

from __future__ import annotations

from importlib.util import find_spec

from ...errors import MissingDependencyError


def require_transformers() -> None:
    """Raise a :class:`MissingDependencyError` unless transformers is installed; does not import it, which is slow."""
    if find_spec("transformers") is None:
        raise MissingDependencyError(
            "engine adapter 'hf'", "transformers is not installed", "pip install 'disagg_kv[hf]'"
        )
