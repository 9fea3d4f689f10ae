"""Flags that a GPU's stream raises: another process that sees one finds the bytes there.

``DISAGG_KV_FLAGS`` is the number of copies.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from disagg_kv.geometry import CacheSpec, Group, PageTable, Plane, shard
from disagg_kv.ids import LayerId, RegionId
from disagg_kv.kernels import PageMove, Pages, gpu_kernels
from disagg_kv.memory import Buffer, PagedPool
from disagg_kv.planning import PageCopy
from disagg_kv.transports import SupportsFlags, SupportsMapping, Transport
from disagg_kv.transports.flags import SLOT_WORDS, WORD, raised, words_of
from tests.support import cuda_ends
from tests.support.cuda_ends import device
from tests.support.pools import KV, adopted, staged_layout

COPIES = int(os.environ.get("DISAGG_KV_FLAGS", "400"))
PAGES, PAGE = 32, 1 << 20
SLOTS = 32
RECORD = (0, PAGES, 0, 1, 0)
TIMEOUT_S = 60.0


def content(number: int) -> int:
    """The byte of which copy ``number`` is full; not that of the one before it."""
    return number % 251


def pool(buffer: Buffer) -> PagedPool:
    """32 pages of 1 MiB each."""
    spec, plane = CacheSpec.mla(1, PAGE, "uint8"), Plane(LayerId(0), "latent", KV, 0, 0, PAGE, PAGE, PAGE)
    return adopted(spec, shard(spec), [Group(KV, rows_per_page=1, pages=PAGES)], [plane], [buffer])


def memory() -> tuple[torch.Tensor, Buffer]:
    """All its bytes."""
    tensor = torch.zeros(PAGES * PAGE, dtype=torch.uint8, device=device())
    torch.cuda.synchronize(device())
    return tensor, Buffer(tensor.data_ptr(), PAGES * PAGE, device(), tensor)


def listen(pipe: Connection) -> None:
    """The child: sees one flag after the other, looks at once, and says how many bytes are wrong."""
    transport = cuda_ends.cuda_ipc()
    assert isinstance(transport, SupportsFlags)
    tensor, buffer = memory()
    (region,) = transport.register([buffer])
    page, place = transport.flag_page(SLOTS * SLOT_WORDS * WORD)
    words = words_of(page)
    pipe.send((transport.local_descriptor(), region, place))
    with torch.cuda.stream(torch.cuda.Stream(device())):
        for number in iter(pipe.recv, 0):
            until = time.monotonic() + TIMEOUT_S
            while (record := raised(words, number % SLOTS, number)) is None:
                assert time.monotonic() < until, f"flag {number} was not raised"
            pipe.send((record, int((tensor != content(number)).sum())))
    transport.close(1.0)


@pytest.fixture
def pipe() -> Iterator[Connection]:
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=listen, args=(there,), daemon=True)
    child.start()
    yield here
    here.send(0)
    child.join(TIMEOUT_S)
    assert child.exitcode == 0


def answer(pipe: Connection) -> Any:
    """The child's next one."""
    assert pipe.poll(TIMEOUT_S), "the child does not answer"
    return pipe.recv()


def test_who_sees_a_flag_finds_the_bytes(pipe: Connection) -> None:
    """Each time: the stream stores the value behind the copy, and no thread of the writer looks at its end."""
    descriptor, region, place = answer(pipe)
    transport: Transport = cuda_ends.cuda_ipc()
    assert isinstance(transport, SupportsFlags)
    assert isinstance(transport, SupportsMapping)
    kernels = gpu_kernels()
    tensor, buffer = memory()
    transport.register([buffer])
    peer = transport.connect(descriptor, TIMEOUT_S)
    flags = transport.open_flags(peer, place)
    source, target = pool(buffer), pool(transport.map(peer, RegionId(region), device()))
    kernels.warm_copy(source, target)
    layout = staged_layout([(0, 0, 1, 0, PAGES, 0)], PAGES * PAGE)
    pages = [PageTable(KV, list(range(PAGES))), PageTable(KV, list(range(PAGES))[::-1])]
    sides = Pages(source, {KV: pages[0]}), Pages(target, {KV: pages[1]})
    move = PageMove(PageCopy(layout, layout), *sides)
    ends = []
    for number in range(1, COPIES + 1):
        flag = flags.arm(number % SLOTS, number, RECORD, device())
        assert flag is not None, "the driver lets no stream of this GPU raise it"
        pipe.send(number)
        tensor.fill_(content(number))
        final = torch.cuda.Event()
        final.record()
        ends.append(kernels.copy([move], final, [flag]))
        assert answer(pipe) == (RECORD, 0), f"copy {number}"
    for end in ends:
        assert end is not None
        end.synchronize()
    del flags, flag, ends
    transport.close(1.0)
