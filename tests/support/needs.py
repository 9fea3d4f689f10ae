"""Optional libraries that tests need: skipped without them, an error where they were promised."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from disagg_kv.transports.nixl_library import MODULES

VARIABLE = "DISAGG_KV_NEEDS"
"""Names of libraries, separated by commas: their tests run, and fail if the library is not there."""


def needs(library: str, modules: tuple[str, ...], install: str) -> pytest.MarkDecorator:
    """A mark that skips where none of ``modules`` is installed, unless ``DISAGG_KV_NEEDS`` promises the library."""
    promised = library in os.environ.get(VARIABLE, "").split(",")
    here = any(find_spec(module) for module in modules)
    return pytest.mark.skipif(not here and not promised, reason=f"{library} is not installed: pip install {install}")


needs_nixl = needs("nixl", MODULES, "nixl-cu13")
needs_mooncake = needs("mooncake", ("mooncake",), "mooncake-transfer-engine-non-cuda")
