"""Compiles copies as a GPU would have them compiled, without one: Triton's own compiler, and no driver behind it.

Run as a program, without ``TRITON_INTERPRET`` and with an empty ``TRITON_CACHE_DIR``. It prints how many kernels were
compiled for a pool alone, then with each of several peers, and how many of these are ready to be launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from disagg_kv.geometry import CacheSpec, Shard, shard
from disagg_kv.ids import LayerId
from disagg_kv.kernels.moves.triton import copy
from disagg_kv.kernels.triton_copy_launch import CopyLauncher
from disagg_kv.kernels.triton_tables import Planes
from disagg_kv.memory import Buffer, MappedPool, PagedMemory, PagedPool


class Loaded:
    """A launcher, which launches nothing."""

    def __init__(self, source: object, metadata: object) -> None:
        pass

    def __call__(
        self,
        gridX: int,  # noqa: N803
        gridY: int,  # noqa: N803
        gridZ: int,  # noqa: N803
        stream: int,
        function: int,
        kernel_metadata: object,
        launch_metadata: object,
        launch_enter_hook: object,
        launch_exit_hook: object,
        *args: object,
    ) -> None:
        raise AssertionError


class Driver:
    """What Triton asks of a driver before it launches."""

    launcher_cls = Loaded
    utils = SimpleNamespace(
        load_binary=lambda *_args: (1, 1, 32, 0, 1024),
        get_device_properties=lambda _device: {"max_shared_mem": 232448},
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Queue:
    """A device's, which cannot say where parameters lie."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def parameters(self, function: int) -> None:
        return None


class Context:
    """What compiling needs of a launch's context."""

    def __init__(self) -> None:
        self.device = "cuda:0"
        self.entries: dict[tuple[int, int, int], object] = {}
        self.queue = Queue()
        self.tables = self

    def stream(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None)

    def of(self, pool: PagedMemory, stream: object) -> Planes:
        return Planes(pool)


def pool_of(spec: CacheSpec, held: Shard, page_size: int) -> MappedPool:
    """A pool on a GPU, of which nothing is touched."""
    site = PagedPool.allocate(spec, held, pages=4, page_size=page_size).site
    return MappedPool(site, [Buffer(1 << 20, size, "cuda:0") for size in site.buffers])


def compiled(spec: CacheSpec, peers: Sequence[tuple[Shard, int]]) -> list[int]:
    """How many copies were compiled, for the pool alone and then with each peer's shard and page size."""
    launcher, own, found = CopyLauncher(), pool_of(spec, shard(spec), 16), []
    for target in (own, *(pool_of(spec, held, page_size) for held, page_size in peers)):
        launcher.warm(own, target)
        found.append(sum(len(cache[0]) for cache in copy.device_caches.values()))
    return found


def main() -> None:
    """Print the numbers."""
    spec, empty, context = CacheSpec.kv(4, 2, 128, "bfloat16"), torch.empty, Context()
    triton.runtime.driver.set_active(Driver())

    def on_the_cpu(*sizes: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        return empty(*sizes, dtype=dtype)

    peers = [(shard(spec), 64), (shard(spec, tp=2, rank=1), 16), (shard(spec, layers=[LayerId(2), LayerId(3)]), 1)]
    with (
        mock.patch.object(CopyLauncher, "_context", return_value=context),
        mock.patch.object(torch, "empty", on_the_cpu),
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
    ):
        print(*compiled(spec, peers), len(context.entries))


if __name__ == "__main__":
    main()
