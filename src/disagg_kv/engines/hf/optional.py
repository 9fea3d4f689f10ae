"""The one place that says what to install when transformers is not there."""

from __future__ import annotations

from ...errors import MissingDependencyError


def require_transformers() -> None:
    """Import transformers, or raise a :class:`MissingDependencyError`."""
    try:
        import transformers  # noqa: F401
    except ImportError as exc:
        raise MissingDependencyError(
            "engine adapter 'hf'", f"transformers cannot be imported ({exc})", "pip install 'disagg_kv[hf]'"
        ) from exc
