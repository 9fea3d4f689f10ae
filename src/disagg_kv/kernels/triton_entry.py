"""How a compiled Triton kernel is launched: by the driver's own call, or by Triton's launcher.

Triton's launcher gives the interpreter away while it calls the driver. A thread that computes in Python then keeps it
for ``sys.getswitchinterval()``, 5 ms. So a launch beside a busy engine costs milliseconds, and the driver's own call,
which keeps the interpreter, a tenth of one: ``benchmarks/gpu_launch.py`` measures both.

The call waits while the driver's queue of launches is full. What it waits for runs on the GPU, unless an engine has
enqueued a host function that needs the interpreter: torch enqueues none.

The driver's call needs what the compiler made of the kernel's parameters, and nothing promises that. So the driver is
asked where each parameter lies (``cuFuncGetParamInfo``, CUDA 12.4). Where that is not what :func:`driver_entry`
expects, or where the kernel wants more than a plain launch gives, Triton's launcher is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

from .triton_kernels import Compiled

PARAMETERS = (0, 8), (8, 4), (12, 4)
"""Offset and bytes of the parameters of all kernels: the address of a table, and two counts."""

ADDED = (16, 8), (24, 8)
"""Of those that the compiler may add: one for each kind of :data:`SCRATCH`."""

THREADS = 32
"""Of a warp."""

SCRATCH = ("global_scratch_size", "profile_scratch_size")
"""Memory that Triton allocates for a launch. Kernels that need none are passed a null pointer for each."""

PLAIN = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, **dict.fromkeys(SCRATCH, 0)}
"""What Triton says of a kernel that a plain launch is enough for."""


class Driver(Protocol):
    """The driver's calls of one device, in its context; see :class:`.cuda_queue.CudaQueue`."""

    def parameters(self, function: int) -> Sequence[tuple[int, int]] | None:
        """Offset and bytes of each parameter of a kernel; None: this driver cannot say."""
        ...

    def launch(
        self, function: int, programs: int, threads: int, shared: int, stream: int, values: Sequence[int]
    ) -> None:
        """Launch with parameters of at most 8 bytes each."""
        ...


@frozen
class TritonEntry:
    """By Triton's launcher."""

    compiled: Compiled

    def __call__(
        self, driver: Driver, stream: int, programs: int, values: tuple[int, int, int], constants: tuple[object, ...]
    ) -> None:
        """Launch in the current context.

        Args:
            driver: of the device.
            stream: a ``CUstream``.
            programs: at least 1.
            values: the kernel's arguments: the address of its table, and two integers of 32 bits.
            constants: those that follow.
        """
        grid = programs, 1, 1, stream, self.compiled.function, self.compiled.packed_metadata
        self.compiled.run(*grid, None, None, None, *values, *constants)


@frozen
class DriverEntry:
    """By the driver's own call.

    Args:
        compiled: the kernel, which lives as long as this.
        threads: of a program.
        shared: bytes of shared memory of a program.
        more: parameters that the compiler has added; all are null.
    """

    compiled: Compiled
    threads: int
    shared: int
    more: int

    def __call__(
        self, driver: Driver, stream: int, programs: int, values: tuple[int, int, int], constants: tuple[object, ...]
    ) -> None:
        """See :class:`TritonEntry`."""
        all_values = *values, *(0,) * self.more
        driver.launch(self.compiled.function, programs, self.threads, self.shared, stream, all_values)


Entry = TritonEntry | DriverEntry
"""Launches one compiled kernel."""


def entry_of(compiled: Compiled, driver: Driver) -> Entry:
    """How to launch a loaded kernel."""
    found = driver_entry(compiled, driver.parameters(compiled.function))
    return TritonEntry(compiled) if found is None else found


def driver_entry(compiled: Compiled, parameters: Sequence[tuple[int, int]] | None) -> DriverEntry | None:
    """None: the driver cannot launch it by itself.

    Args:
        compiled: the kernel.
        parameters: offset and bytes of each of its parameters; None: not known.
    """
    said = compiled.metadata
    if parameters is None or any(getattr(said, name, None) != value for name, value in PLAIN.items()):
        return None
    more = len(parameters) - len(PARAMETERS)
    if not 0 <= more <= len(SCRATCH) or [*PARAMETERS, *ADDED[:more]] != list(parameters):
        return None
    return DriverEntry(compiled, THREADS * said.num_warps, said.shared, more)
