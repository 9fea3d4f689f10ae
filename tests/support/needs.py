"""Optional libraries that tests need: skipped without them, an error where they were promised."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import pytest

from disagg_kv.transports.nixl_library import MODULES

VARIABLE = "DISAGG_KV_NEEDS"
"""Names of libraries, separated by commas: their tests run, and fail if the library is not there."""


def needs(library: str, modules: tuple[str, ...], install: str, programs: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """A mark that skips where it is not installed, unless ``DISAGG_KV_NEEDS`` promises it: it is an error then.

    Installed means one of ``modules``, and all ``programs``.
    """
    promised = library in os.environ.get(VARIABLE, "").split(",")
    here = any(map(_is_installed, modules)) and all(map(shutil.which, programs))
    return pytest.mark.skipif(not here and not promised, reason=f"{library} is not installed: {install}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


needs_nixl = needs("nixl", MODULES, "pip install nixl-cu13")
needs_mooncake = needs("mooncake", ("mooncake",), "pip install mooncake-transfer-engine-non-cuda")
needs_prometheus = needs("prometheus", ("prometheus_client",), "pip install prometheus-client")
needs_etcd = needs(
    "etcd", ("etcd3gw",), "pip install etcd3gw, apt-get install etcd-server openssl", ("etcd", "openssl")
)
