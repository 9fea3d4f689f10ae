"""Anonymous files of memory (``memfd_create``) that the processes of a host share: how they are made, found and mapped.

A process opens a file of another one as ``/proc/<pid>/fd/<fd>``, after a look that it is the one that was meant. The
files are sealed, so whatever their owner does meanwhile, a mapping never loses its pages.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Annotated

import msgspec
from attrs import frozen
from msgspec import Meta

from ..errors import PeerLostError, RegistrationError, TransportError
from ..ids import Peer
from ..memory import Buffer
from .descriptor import pack, unpack
from .flags import WORD
from .process import Process, keep_in_children


@frozen
class Place:
    """Where a region's memory is to be found: byte ``offset`` of memory ``number``, open as ``fd`` in its process."""

    number: Annotated[int, Meta(ge=0, lt=1 << 31)]
    fd: Annotated[int, Meta(ge=0, lt=1 << 31)]
    offset: Annotated[int, Meta(ge=0, lt=1 << 62)]


PLACE = msgspec.msgpack.Decoder(Place)


@frozen
class FlagPlace:
    """Where a flag page is: all of ``nbytes`` bytes of memory of this process."""

    process: Process
    place: Place
    nbytes: Annotated[int, Meta(gt=0, lt=1 << 40, multiple_of=WORD)]


FLAG_PLACE = msgspec.msgpack.Decoder(FlagPlace)


def _name(peer: Peer, number: int) -> str:
    return f"disagg_kv-{peer.hex()}-{number}"


def _available() -> int:
    """Bytes of memory that the host could still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class SharedMemory:
    """Memory that peers can map. It is unmapped when the last reference to this object goes."""

    fd = -1

    def __init__(self, peer: Peer, number: int, nbytes: int) -> None:
        # Linux would begin to hand out pages and end by killing some process.
        if nbytes > _available():
            raise OSError(errno.ENOMEM, f"the host has {_available()} bytes to give")
        self.number = number
        self.fd = os.memfd_create(_name(peer, number), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Reserved now, so that a failure is an error here and not a SIGBUS at some write.
            os.posix_fallocate(self.fd, 0, nbytes)
            # A peer that shrank the file would kill us at the next access.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._mapping = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED)
        except BaseException:
            self.hide()
            raise
        self.addr = _address(self._mapping)
        self.nbytes = nbytes

    def hide(self) -> None:
        """Let no further peer map it; those that have, keep it, and so does this process."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.hide()


class PeerMemory:
    """Memory of a peer, mapped here without touching its pages. The mapping goes with this object.

    Args:
        fd: of the file that it is in.
        offset: byte of the file at which it begins.
        nbytes: its length.

    Raises:
        TransportError: this process cannot have the address space, or one more descriptor.
    """

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        into = offset % mmap.ALLOCATIONGRANULARITY
        try:
            self._mapping = mmap.mmap(fd, into + nbytes, mmap.MAP_SHARED, offset=offset - into)
        except OSError as error:
            raise TransportError(f"shared memory: {nbytes} bytes of a peer cannot be mapped: {error}") from error
        # A child forked by this process must not be able to write after this process has ended.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        # A child has a hole there, and may have filled it with memory of its own.
        keep_in_children(self)
        self.addr = _address(self._mapping) + into


def open_memory(process: Process, peer: Peer, place: Place, nbytes: int) -> Buffer:
    """Map the peer's memory that holds ``nbytes`` bytes from ``place`` on, after a look that it is what was meant."""
    path = f"/proc/{process.pid}/fd/{place.fd}"
    link = f"/memfd:{_name(peer, place.number)} (deleted)"
    try:
        # The link is checked first, so that only such memory is ever opened, and again once it is open.
        if os.readlink(path) != link:
            raise PeerLostError(f"shared memory: {path} is not {link} any more: the peer has given the memory back")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise PeerLostError(f"shared memory: {path} is gone: the peer has ended or given the memory back") from error
    except OSError as error:
        raise TransportError(
            f"shared memory: {path} cannot be opened; have both processes the same user? {error}"
        ) from error
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != link or not 0 <= place.offset <= os.fstat(fd).st_size - nbytes:
            raise PeerLostError(f"shared memory: {path} is not {nbytes} bytes of {link} from {place.offset} on")
        # A write beyond the end of a file that became shorter would kill this process.
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransportError(f"shared memory: {path} is not sealed: its owner could make it shorter")
        far = PeerMemory(fd, place.offset, nbytes)
    except OSError as error:
        raise TransportError(f"shared memory: {path} is no memory that can be shared: {error}") from error
    finally:
        os.close(fd)
    return Buffer(far.addr, nbytes, "cpu", far)


def new_flag_page(peer: Peer, number: int, nbytes: int) -> tuple[Buffer, bytes]:
    """Return host memory for flags, and what a peer passes to ``open_flags``.

    ``number`` is new among the files of this peer.
    """
    try:
        memory = SharedMemory(peer, number, nbytes)
    except (OSError, OverflowError) as error:
        raise RegistrationError(f"cannot allocate {nbytes} bytes of shared memory for flags: {error}") from error
    place = FlagPlace(Process.own(), Place(number, memory.fd, 0), nbytes)
    return Buffer(memory.addr, nbytes, "cpu", memory), pack(place)


def open_flag_page(peer: Peer, page: bytes) -> Buffer:
    """The flag page of a peer of this host, mapped; errors are those of ``SupportsFlags.open_flags``."""
    there = unpack(page, FLAG_PLACE)
    if there.process.host != Process.own().host:
        raise TransportError(f"flags are raised within one host, and the peer's is {there.process.host!r}")
    if there.place.offset % WORD:
        raise TransportError(f"a flag page at byte {there.place.offset} of a file: a multiple of {WORD} is needed")
    return open_memory(there.process, peer, there.place, there.nbytes)
