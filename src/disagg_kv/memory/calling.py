"""Work of an endpoint on a thread of its engine, which has settings of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[bool]:
    """Inside, torch makes ordinary tensors, as on a thread of our own; False: the thread must launch nothing now.

    An engine computes in inference mode, in which torch makes tensors that no other thread may change. While the engine
    captures a CUDA graph, a launch of ours would become part of its graph. The library names the device of each tensor
    and the stream of each kernel, so the engine's default device and its current device and stream do not matter.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield True
    elif torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        yield False
    elif torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            yield True
    else:
        yield True
