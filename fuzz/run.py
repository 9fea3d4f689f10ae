"""Runs one target under atheris: ``python -m fuzz.run TARGET [options of libFuzzer]``, from the repository's root."""

from __future__ import annotations

import logging
import sys

import atheris

with atheris.instrument_imports(include=["disagg_kv", "fuzz"]):
    from fuzz.targets import TARGETS


def main() -> None:
    """Fuzz until libFuzzer's options say stop, or something is found; that is left in a file and exits with 77."""
    logging.disable(logging.CRITICAL)
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
