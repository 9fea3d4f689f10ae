"""Launches that fail: what they held is given back. The driver is a stand-in; ``tests/gpu`` asks the real one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import numpy as np
import pytest
import torch

from disagg_kv.errors import DisaggKVError, MissingDependencyError
from disagg_kv.kernels.triton_entry import DriverEntry, TritonEntry, driver_entry, entry_of
from disagg_kv.kernels.triton_kernels import OPS, Compiled, check_launcher
from disagg_kv.kernels.triton_launch import LaunchContext, Launcher, Written
from disagg_kv.kernels.triton_slots import ArgumentSlot
from disagg_kv.kernels.triton_tables import Shape
from disagg_kv.memory import Event, Flag


class Queue:
    """Counts what is enqueued; ``broken`` names calls that fail."""

    def __init__(self, broken: frozenset[str]) -> None:
        self.broken = broken
        self.recorded = 0
        self.stored: list[tuple[int, int, int]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def upload(self, stream: int, target: int, source: int, nbytes: int) -> None:
        if "upload" in self.broken:
            raise DisaggKVError("cuda: upload")

    def store(self, stream: int, addr: int, value: int) -> None:
        assert not self.recorded, "a flag behind the event of the end"
        if "store" in self.broken:
            raise DisaggKVError("cuda: store")
        self.stored.append((stream, addr, value))

    def record(self, stream: int) -> str:
        if "record" in self.broken:
            raise DisaggKVError("cuda: record")
        self.recorded += 1
        return f"mark {self.recorded}"


class Slots:
    """Slots that came back, each with what it waits for."""

    def __init__(self) -> None:
        self.back: list[tuple[ArgumentSlot, object]] = []

    def give(self, slot: ArgumentSlot, event: object) -> None:
        self.back.append((slot, event))


class Context:
    """What a launch needs of its context."""

    def __init__(self, broken: frozenset[str], run: Callable[..., None]) -> None:
        self.queue = Queue(broken)
        self.before: tuple[tuple[int, ...], object] = (), None
        self.entries = {(16, 4, 4): TritonEntry(cast("Compiled", _Kernel(run)))}
        self.slots = Slots()


class _Kernel:
    function, packed_metadata = 1, (1,)
    metadata = SimpleNamespace()

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run


class _Stream:
    cuda_stream = 7


class Fails:
    """An engine's event that raises."""

    def query(self) -> bool:
        raise RuntimeError("the engine's own")

    def synchronize(self) -> None:
        raise AssertionError


def refuse(*args: object) -> None:
    raise RuntimeError("Triton refuses")


def accept(*args: object) -> None:
    pass


@pytest.mark.parametrize(
    ("broken", "run", "after", "error", "back"),
    [
        ((), accept, None, "", ["mark 1"]),
        ((), refuse, None, "Triton refuses", ["mark 1"]),
        ((), accept, Fails(), "the engine's own", ["mark 1"]),
        (("upload",), accept, None, "cuda: upload", [None]),
        (("record",), accept, None, "cuda: record", []),
    ],
)
def test_the_slot_of_a_launch_that_fails_comes_back(
    broken: tuple[str, ...], run: Callable[..., None], after: Event | None, error: str, back: list[object]
) -> None:
    """Once what reads it is over; where nothing can tell that, never, rather than too early."""
    words = torch.zeros(16, dtype=torch.int64)
    slot = ArgumentSlot(words, words.numpy(), words.data_ptr(), words.clone(), 0)
    context = Context(frozenset(broken), run)
    shape = Shape(16, 4, 4, 1)
    stream = cast("torch.cuda.Stream", _Stream())
    call = Written(cast("LaunchContext", context), stream, slot, 16, 1, shape, 1, False)
    launcher = Launcher(OPS["gather"])
    if error:
        with pytest.raises((RuntimeError, DisaggKVError), match=error):
            launcher._enqueue(call, after)
    else:
        launcher._enqueue(call, after)
    assert [(one is slot, event) for one, event in context.slots.back] == [(True, event) for event in back]
    assert not np.any(slot.words)


@pytest.mark.parametrize("broken", [(), ("store",)])
def test_flags_follow_their_kernel_and_precede_its_end(broken: tuple[str, ...]) -> None:
    """In its stream. One that cannot be stored costs the room nothing: the copy is launched, and its frame follows."""
    queue: list[Queue] = []

    def run(*args: object) -> None:
        assert not queue[0].stored, "a flag before its kernel"

    words = torch.zeros(16, dtype=torch.int64)
    slot = ArgumentSlot(words, words.numpy(), words.data_ptr(), words.clone(), 0)
    context = Context(frozenset(broken), run)
    queue.append(context.queue)
    stream = cast("torch.cuda.Stream", _Stream())
    flags = [Flag(64, 5), Flag(128, 6)]
    call = Written(cast("LaunchContext", context), stream, slot, 16, 1, Shape(16, 4, 4, 1), 1, False, flags)
    launcher = Launcher(OPS["gather"])
    assert str(launcher._launch(call, None)) == "mark 1"
    assert context.queue.stored == ([] if broken else [(7, 64, 5), (7, 128, 6)])


def _named(*names: str) -> Any:
    """A launcher with such arguments."""
    code = f"def run({', '.join((*names, '*args'))}): pass"
    found: dict[str, Any] = {}
    exec(code, found)
    return found["run"]


FIRST = ("gridX", "gridY", "gridZ", "stream", "function")


def test_a_launcher_of_another_shape_is_refused_by_name() -> None:
    """It is called by position: another order would read arguments as addresses."""
    for fine in (FIRST, (*FIRST, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")):
        check_launcher(cast("Compiled", _Kernel(_named(*fine))))
    for other in (FIRST[:4], (*FIRST[:3], "function", "stream"), (*FIRST, "num_warps"), ("grid", "stream")):
        with pytest.raises(MissingDependencyError, match="launches by"):
            check_launcher(cast("Compiled", _Kernel(_named(*other))))
    with pytest.raises(MissingDependencyError, match="pip install"):
        check_launcher(cast("Compiled", _Kernel(accept)))


class _Driver:
    """Says what it is told to of a kernel's parameters, and notes launches."""

    def __init__(self, said: list[tuple[int, int]] | None) -> None:
        self.said = said
        self.launched: list[tuple[object, ...]] = []

    def parameters(self, function: int) -> list[tuple[int, int]] | None:
        return self.said

    def launch(self, *args: object) -> None:
        self.launched.append(args)


PLAIN = SimpleNamespace(
    num_warps=4, shared=64, num_ctas=1, launch_cooperative_grid=False, launch_pdl=False,
    global_scratch_size=0, profile_scratch_size=0,
)  # fmt: skip


def _compiled(run: Callable[..., None], **other: object) -> Compiled:
    kernel = _Kernel(run)
    kernel.metadata = SimpleNamespace(**{**vars(PLAIN), **other})
    return cast("Compiled", kernel)


@pytest.mark.parametrize("more", [0, 1, 2])
def test_the_driver_launches_what_has_the_parameters_that_were_written(more: int) -> None:
    """An address, two counts, and null for what the compiler adds."""
    driver = _Driver([(0, 8), (8, 4), (12, 4), (16, 8), (24, 8)][: 3 + more])
    entry = entry_of(_compiled(refuse), driver)
    assert isinstance(entry, DriverEntry)
    entry(driver, 7, 9, (1000, 3, 4), ("a constant",))
    assert driver.launched == [(1, 9, 128, 64, 7, (1000, 3, 4, *[0] * more))]


@pytest.mark.parametrize(
    "said", [None, [(0, 8), (8, 4)], [(0, 8), (8, 4), (16, 8)], [(0, 8), (8, 4), (12, 4), (16, 4)],
             [(0, 8), (8, 4), (12, 4), (16, 8), (24, 8), (32, 8)], [(0, 8), (8, 4), (16, 4)]],
)  # fmt: skip
def test_a_kernel_of_other_parameters_goes_through_tritons_launcher(said: list[tuple[int, int]] | None) -> None:
    """Parameters that were packed for another kernel would be read as addresses."""
    passed: list[tuple[object, ...]] = []
    driver = _Driver(said)
    entry = entry_of(_compiled(lambda *args: passed.append(args)), driver)
    entry(driver, 7, 9, (1000, 3, 4), ("a constant",))
    assert passed == [(9, 1, 1, 7, 1, (1,), None, None, None, 1000, 3, 4, "a constant")]
    assert not driver.launched


@pytest.mark.parametrize("other", [{"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 64}])
def test_a_kernel_that_wants_more_than_a_plain_launch_goes_through_tritons_launcher(other: dict[str, object]) -> None:
    """So does one whose version of Triton does not say."""
    parameters = [(0, 8), (8, 4), (12, 4)]
    assert driver_entry(_compiled(accept), parameters) is not None
    assert driver_entry(_compiled(accept, **other), parameters) is None
    silent = _compiled(accept)
    for name in other:
        delattr(silent.metadata, name)
    assert driver_entry(silent, parameters) is None
