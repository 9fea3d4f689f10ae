"""What identifies a model, and a prompt, to both sides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS = "*.safetensors", "*.bin", "*.pt", "*.gguf"
"""Files of a model's weights."""

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Parts of each file that identify it, evenly spread: the first has the names and sizes of the weights."""


def model_digest(model: str, config: Mapping[str, Any], *facts: object) -> bytes:
    """Identifies the model: its configuration and weights, and what else both sides must share.

    Weights in a local directory count by the size and :data:`SAMPLES` parts of each file, so that the directory's name
    does not. Models that differ elsewhere only count as equal.
    """
    kept = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    digest = hashlib.blake2b(
        json.dumps([kept, *map(str, facts)], sort_keys=True, default=_plain).encode(), digest_size=16
    )
    folder = Path(model)
    files = sorted(one for kind in WEIGHTS for one in folder.glob(kind)) if folder.is_dir() else []
    for file in files:
        with file.open("rb") as content:
            size = content.seek(0, 2)
            digest.update(f"{file.name} {size}".encode())
            for number in range(SAMPLES):
                content.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(content.read(SAMPLE_BYTES))
    if not files:
        digest.update(model.encode())
    return digest.digest()


def prompt_tag(token_ids: Sequence[int], *others: str) -> bytes:
    """A digest of the prompt, which both sides must agree on.

    Args:
        token_ids: of the prompt.
        others: what else its rows depend on: images, an adapter.
    """
    digest = hashlib.blake2b(np.asarray(token_ids, np.int64).tobytes(), digest_size=16)
    for one in others:
        digest.update(f"\0{one}".encode(errors="surrogatepass"))
    return digest.digest()


def _plain(value: object) -> object:
    """A value that JSON does not know; a set has no order of its own."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
