"""Runs one target under atheris: ``python -m fuzz.run TARGET [options of libFuzzer]``, from the repository's root."""

from __future__ import annotations

import logging
import sys

import atheris

with atheris.instrument_imports(include=["disagg_kv", "fuzz"]):
    from fuzz.targets import TARGETS

from fuzz.mutate import changed

# Targets whose bytes are one message of values.
MESSAGES = ("frame", "plan")


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """Values of a message changed, or, one time in four, its bytes."""
    found = changed(data, most, seed) if seed % 4 else data
    return found if found != data else bytes(atheris.Mutate(data, most))


def main() -> None:
    """Fuzz until libFuzzer's options say stop, or something is found; that is left in a file and exits with 77."""
    logging.disable(logging.CRITICAL)
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, TARGETS[name], **({"custom_mutator": mutate} if name in MESSAGES else {}))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
