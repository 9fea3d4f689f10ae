"""A child program around NIXL's transport."""

from __future__ import annotations

import os
import subprocess
import sys

from disagg_kv.transports.nixl_library import ENVIRONMENT


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own, in which nobody has set what the transport sets."""
    inherited = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
