"""The operations that Triton kernels do, how they are tuned, and Triton's own interface to compiled kernels."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, Protocol

import triton
import triton.language as tl
from attrs import frozen

from ..errors import MissingDependencyError
from .checksum.triton import checksum
from .moves.triton import copy, stage
from .triton_tables import Cells

ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Types of the elements that kernels move, by their bytes; the meaning of the bytes does not matter here."""

INTERPRETED = not isinstance(stage, triton.runtime.JITFunction)
"""True if Triton interprets kernels (``TRITON_INTERPRET=1``): they then run on the CPU's memory."""


@frozen
class Tuning:
    """How a call is cut into programs. The defaults are what ``benchmarks/gpu_kernels.py`` found best on an H200.

    Args:
        tile_bytes: what one program moves, a power of two.
        warps: of one program, a power of two.
        neighbours_together: see :class:`.triton_tables.Planes`.
        programs: most programs of a launch per multiprocessor; 0: as many as there are tiles.
    """

    tile_bytes: int = 4096
    warps: int = 1
    neighbours_together: bool = False
    programs: float = 0


class Launchable(Protocol):
    """A Triton kernel, compiled or interpreted."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., object]:
        """What runs the kernel, interpreted, with a number of programs."""
        ...

    def warmup(self, *args: object, grid: tuple[int], num_warps: int) -> Compiled:
        """Compile for such arguments, and launch nothing."""
        ...


class Compiled(Protocol):
    """A kernel compiled for one set of constants."""

    function: int
    packed_metadata: tuple[int, ...]

    @property
    def metadata(self) -> Any:
        """What the compiler says of it; the names differ between versions of Triton."""
        ...

    def __getitem__(self, grid: tuple[int, int, int]) -> object:
        """Load it, if it is not loaded yet."""
        ...

    def run(self, *args: object) -> None:
        """Triton's own launcher without its look at the arguments, as ``CompiledKernel`` calls it."""
        ...


LAUNCHER = (
    "gridX", "gridY", "gridZ", "stream", "function",
    "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook",
)  # fmt: skip
"""What Triton's own launcher takes before a kernel's arguments. Nothing promises it; some versions name the first five
alone and take the others with the arguments."""

COMPILING = threading.Lock()
"""Held while Triton compiles: its documentation does not allow several threads to compile."""


def check_launcher(compiled: Compiled) -> Compiled:
    """Raise unless the launcher takes what :meth:`Compiled.run` is given, by position; else the kernel as it is.

    Raises:
        MissingDependencyError: Triton is of a version with another launcher.
    """
    takes = tuple(inspect.signature(compiled.run).parameters.values())
    named = tuple(one.name for one in takes if one.kind is one.POSITIONAL_OR_KEYWORD)
    rest = [one.kind for one in takes[len(named) :]]
    if len(named) < 5 or named != LAUNCHER[: len(named)] or rest != [inspect.Parameter.VAR_POSITIONAL]:
        problem = f"Triton {triton.__version__} launches by ({', '.join(map(str, takes))})"
        raise MissingDependencyError("kernels 'triton'", problem, "pip install 'triton>=3.6,<3.10'")
    return compiled


@frozen
class Op:
    """An operation, done by one kernel.

    Args:
        kernel: the kernel.
        tuning: how its calls are cut.
        constants: the kernel's last arguments, behind those of a call's shape.
        cells: what changes on the way; None: bytes are copied, or summed, as they are.
    """

    kernel: Launchable
    tuning: Tuning
    constants: tuple[int | float | str | bool, ...] = ()
    cells: Cells | None = None


OPS = {
    "gather": Op(stage, Tuning(), ("staging",)),
    "scatter": Op(stage, Tuning(neighbours_together=True), ("pages",)),
    "copy": Op(copy, Tuning(tile_bytes=65536, warps=16, programs=0.5)),
    "checksum": Op(checksum, Tuning(tile_bytes=8192)),
}
"""What needs no conversion. Writing short runs far apart costs more than reading them so; more rows share what a
checksum's keys cost. A copy leaves the GPU to the model as far as it can: large tiles fill a link between GPUs with few
programs."""
