"""The memory that an engine's cache lies in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from attrs import field, frozen

from .. import arguments
from ..errors import GeometryError
from ..geometry import Site


class Event(Protocol):
    """A point in a device's work. ``torch.cuda.Event`` satisfies this; None in its place means that it has passed."""

    def query(self) -> bool:
        """True once the event has happened; never blocks. Any thread may call, several at a time."""
        ...

    def synchronize(self) -> None:
        """Block until it has happened."""
        ...


Mark: TypeAlias = Callable[[], Event]
"""Makes an event behind all work that the device has been given on the current stream.

If all of that work is done, pass None instead of the function. The function itself must not return None: rows that are
not computed yet would be sent.
"""


@frozen
class Buffer:
    """One allocation, registered with a transport as one region.

    Args:
        addr: its address, bytes; on a GPU a device address.
        nbytes: its length.
        device: ``"cpu"`` or ``"cuda:0"`` ...
        owner: any object that keeps the memory alive (a tensor, a shared-memory mapping); never read.
    """

    addr: int
    nbytes: int
    device: str = "cpu"
    owner: object = field(default=None, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for name in ("addr", "nbytes"):
            value = getattr(self, name)
            known = arguments.count(value, f"buffer: {name}", most=(1 << 64) - 1, error=GeometryError)
            object.__setattr__(self, name, known)
        if not self.addr or not self.nbytes:
            raise GeometryError(f"buffer of {self.nbytes} bytes at address {self.addr}")
        arguments.text(self.device, "buffer: device", least=1, most=256)


class PagedMemory(Protocol):
    """What kernels need of a paged cache: where its planes lie, and the memory of this process that holds them."""

    @property
    def site(self) -> Site:
        """Spec, shard, groups, planes and buffer sizes: the description that crosses the wire."""
        ...

    @property
    def buffers(self) -> Sequence[Buffer]:
        """The allocations, at least one, in the order in which planes number them; ``site.buffers`` bytes long."""
        ...


def pool_text(pool: PagedMemory) -> str:
    """What ``repr`` of a pool returns."""

    def text() -> str:
        groups = ", ".join(f"{g.id} {g.pages} pages of {g.rows_per_page} rows" for g in pool.site.groups)
        return f"on {pool.buffers[0].device}: {groups}; {sum(b.nbytes for b in pool.buffers)} bytes"

    return arguments.brief(pool, text)


def _buffers(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    return arguments.several(buffers, "mapped pool: buffers", Buffer, GeometryError)


@frozen(eq=False, repr=False)
class MappedPool:
    """A peer's pool, whose buffers a transport has mapped here (``SupportsMapping``). Kernels copy into its pages.

    Compared by identity: kernels cache data about its planes by the object, so one serves all requests to a peer. It
    keeps the mappings while it lives.

    Args:
        site: the peer's, as the peer sent it.
        buffers: the mapped buffers, all for one device of this process, in the order in which planes number them.

    Raises:
        GeometryError: the planes do not fit the buffers, or the buffers are for several devices.
    """

    site: Site
    buffers: tuple[Buffer, ...] = field(converter=_buffers)

    __repr__ = pool_text

    def __attrs_post_init__(self) -> None:
        arguments.one(self.site, "mapped pool: site", Site).check()
        sizes = tuple(buffer.nbytes for buffer in self.buffers)
        if sizes != self.site.buffers:
            raise GeometryError(f"mapped pool: buffers of {sizes} bytes, but the site's have {self.site.buffers}")
        devices = sorted({buffer.device for buffer in self.buffers})
        if len(devices) != 1:
            raise GeometryError(f"mapped pool: buffers on {devices}, but kernels need them on one device")


class MemoryPool(PagedMemory, Protocol):
    """One rank's paged cache. Adopting an engine's tensors copies nothing.

    An endpoint checks the following when it is created, and raises a :class:`~disagg_kv.errors.GeometryError` or a
    :class:`~disagg_kv.errors.ConfigurationError`:

    * All pages of a plane lie in one buffer, at one stride. Planes may have a buffer each; pages may not.
    * The buffers lie on one device, and no two cells share a byte; cells of one page in overlaid groups may
      (``Site.overlaid``).
    * ``site`` and ``buffers`` return equal values each time. Kernels and transports store the addresses.
    * A pool is compared by identity and allows weak references. Kernels cache data about its planes by the pool. A
      class with ``__slots__`` names ``__weakref__`` there; a data class has ``eq=False``.

    The thread that advances and the engine's call it. Several endpoints may share one pool.
    """

    @property
    def aux_bytes(self) -> int:
        """Bytes of one aux row, at most 512 KiB; 0 if the pool has none."""
        ...

    def read_aux(self, slot: int) -> bytes:
        """Copy out the aux row ``slot``.

        Raises:
            GeometryError: there is no such row.
        """
        ...

    def write_aux(self, slot: int, data: bytes) -> None:
        """Copy ``data``, at most ``aux_bytes`` long, into the aux row ``slot``.

        The thread that advances calls it; for a room that flags end, so does the engine's in ``poll`` and ``phase``.
        Both may do so at once, for other rows or for one row with the same data.

        Raises:
            GeometryError: there is no such row, or ``data`` is longer.
        """
        ...
