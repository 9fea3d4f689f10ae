"""What SGLang 0.5.23 asks of CUDA although it runs on a CPU: a plug-in that every process of SGLang loads."""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType
from typing import Any

import torch


class DoneEvent:
    """On a CPU work is done when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, *args: Any) -> None:
        """Note the time."""
        self._at = time.perf_counter()

    def wait(self, *args: Any) -> None:
        """Nothing is awaited."""

    def synchronize(self) -> None:
        """Nothing is awaited."""

    def query(self) -> bool:
        """It is done."""
        return True

    def elapsed_time(self, other: DoneEvent) -> float:
        """Milliseconds between two."""
        return (other._at - self._at) * 1e3


def install() -> None:
    """Replace them; with ``SGLANG_CPU_SWAP`` the negative control is on."""
    torch.Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign]
    torch.cuda.Event = DoneEvent  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda *args: None  # type: ignore[assignment]
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    kernels = ModuleType("vllm._custom_ops")
    kernels.rotary_embedding = None  # type: ignore[attr-defined]
    sys.modules["vllm"], sys.modules["vllm._custom_ops"] = ModuleType("vllm"), kernels
    if os.environ.get("SGLANG_CPU_SWAP"):
        swap_heads()
    if os.environ.get("SGLANG_CPU_SHARED"):
        share_caches()
    if os.environ.get("SGLANG_CPU_LATENTS"):
        attend_to_latents()
    if seconds := os.environ.get("SGLANG_CPU_LAYERS"):
        send_each_layer(float(seconds))


def share_caches() -> None:
    """SGLang's K and V lie in memory that processes of this host can map, as memory of a GPU does."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from disagg_kv.ids import Peer
    from disagg_kv.memory import Buffer
    from disagg_kv.memory.raw import bytes_of
    from disagg_kv.transports.memfd import SharedMemory
    from disagg_kv.transports.shm import ShmTransport

    segments, owner = list[SharedMemory](), Peer(os.urandom(16))
    create, begin = MHATokenToKVPool._create_buffers_normal, ShmTransport.__init__

    def shared(pool: Any) -> None:
        create(pool)
        for buffers in (pool.k_buffer, pool.v_buffer):
            for number, one in enumerate(buffers):
                segments.append(SharedMemory(owner, 10_000 + len(segments), one.nbytes))
                flat = torch.from_numpy(bytes_of(Buffer(segments[-1].addr, one.nbytes)))
                buffers[number] = flat.view(one.dtype).view(one.shape)
                buffers[number].zero_()

    def adopt(transport: ShmTransport) -> None:
        begin(transport)
        transport._me = owner  # peers check the name of the memory
        transport._segments.update(segments)

    MHATokenToKVPool._create_buffers_normal = shared
    ShmTransport.__init__ = adopt  # type: ignore[method-assign,assignment]


def attend_to_latents() -> None:
    """SGLang's ``torch_native`` attention reads K and V from the cache, so with MLA it has to attend to the latents.

    By default SGLang computes the K and V of a prompt from its latents, for kernels that take them beside the cache.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda attn, batch: AttnForwardMethod.MLA)


def send_each_layer(seconds: float) -> None:
    """A schedule ``each_layer``; layers that take longer; lines for what was sent early, and for pages freed early."""
    import logging

    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from disagg_kv.engines.sglang.rooms import SenderRoom
    from disagg_kv.strategies import LayerPipelined, register

    class EachLayer:
        name = "each_layer"
        groups = LayerPipelined(fixed=1).groups

    register(EachLayer())
    attend, send, upcoming = TorchNativeAttnBackend.forward_extend, SenderRoom.send, SenderRoom.upcoming
    apply, sent = UnifiedRadixCache._apply_cache_action, dict[SenderRoom, set[int]]()

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return attend(*args, **kwargs)

    def told(self: SenderRoom, *args: Any, **kwargs: Any) -> None:
        logging.getLogger("disagg_kv").info("room %s: %s bytes were sent early", self._number, self.report.nbytes)
        send(self, *args, **kwargs)

    def noted(self: SenderRoom, stop: int, pages: Any) -> Any:
        made = upcoming(self, stop, pages)
        if made is not None:
            sent.setdefault(self, set()).update(pages.tolist())
        return made

    def watch(allocator: Any) -> None:
        free = allocator.free_segment

        def freed(self: Any, rows: Any, *, start_pos: int) -> None:
            pages = set((rows // self.page_size).tolist())
            for room, own in list(sent.items()):
                if room._handle is None or room._handle.released:
                    del sent[room]
                elif pages & own:
                    logging.getLogger("disagg_kv").error("room %s: its pages are free while it is sent", room._number)
            free(self, rows, start_pos=start_pos)

        allocator.free_segment = freed

    def applied(self: Any, action: Any) -> None:
        if isinstance(action, FreeDeviceKV):
            logging.getLogger("disagg_kv").info("rows that the radix cache has twice are freed")
        apply(self, action)

    watch(PagedTokenToKVPoolAllocator)
    watch(BaseTokenToKVPoolAllocator)
    UnifiedRadixCache._apply_cache_action = applied
    SenderRoom.upcoming = noted  # type: ignore[method-assign]
    TorchNativeAttnBackend.forward_extend = slowly
    SenderRoom.send = told  # type: ignore[method-assign]


def swap_heads() -> None:
    """Everything arrives, and is wrong: heads 0 and 1 of all rows are swapped when a request has arrived."""
    from disagg_kv.engines.sglang.rooms import Poll, ReceiverRoom

    poll = ReceiverRoom.poll
    swapped: set[int] = set()

    def swap(self: ReceiverRoom) -> Poll:
        state = poll(self)
        if state is Poll.SUCCESS and id(self) not in swapped:
            swapped.add(id(self))
            pool: Any = self._side.endpoint._pool
            for plane in range(len(pool.site.planes)):
                view = pool.view(plane)
                view[:, :, [0, 1]] = view[:, :, [1, 0]]
        return state

    ReceiverRoom.poll = swap  # type: ignore[method-assign]
