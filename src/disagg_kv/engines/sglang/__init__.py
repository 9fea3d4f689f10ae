"""A plug-in for SGLang: the transfer backend ``disagg_kv``, for prefill and decode servers of different TP sizes.

SGLang finds it by its entry point, for example::

    python -m sglang.launch_server --model-path MODEL --disaggregation-mode prefill \
        --disaggregation-transfer-backend disagg_kv

The parts, none of which imports SGLang but the first:

* ``plugin``: SGLang's classes, a few lines each.
* ``rooms``: a request on a prefill rank and on a decode rank, as SGLang's scheduler drives it.
* ``passes``: layers that are sent while others are computed.
* ``side``: what the requests of a rank have in common.
* ``cache``: SGLang's KV buffers and metadata rows as a pool.
* ``bootstrap``: where decode finds a prefill instance.
* ``host``: what is read of SGLang's server, and what is refused.
* ``options``: what the environment variable ``DISAGG_KV_SGLANG`` may hold.
* ``names``: the names of SGLang that must exist.
"""

from __future__ import annotations

import logging

__all__ = ["install"]


def install() -> None:
    """SGLang calls this in each of its processes.

    Raises:
        UnsupportedError: names of SGLang that the plug-in needs were not found. SGLang logs it, and goes on without the
            backend.
    """
    from ..versions import require
    from .names import check

    require("sglang")
    check()
    from .plugin import register_backend

    register_backend()
    _log_through_sglang()


def _log_through_sglang() -> None:
    """The library's messages are in SGLang's log: a root logger with handlers prints them."""
    logging.getLogger("disagg_kv").setLevel(logging.INFO)
