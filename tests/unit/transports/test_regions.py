"""The table of regions, the bounds of batches, and the copy."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from disagg_kv.errors import ConfigurationError, RegistrationError
from disagg_kv.ids import RegionId
from disagg_kv.memory import Buffer
from disagg_kv.testing.ends import plain
from disagg_kv.transports import Extents, RegionTable, copy
from disagg_kv.transports.regions import readable

CPU = frozenset({"cpu"})


def test_numbers_are_never_used_again() -> None:
    """A late message about an old region cannot mean a new one."""
    table = RegionTable(CPU)
    memory = plain(np.zeros(100, np.uint8))
    seen = set()
    for _ in range(5):
        (region,) = table.add([memory])
        assert region not in seen
        seen.add(region)
        assert table.items() == ((region, memory),)
        table.remove([region])
        assert table.items() == ()


def test_each_change_has_a_serial() -> None:
    """So that of two descriptors the later one is known."""
    table = RegionTable(CPU)
    serials = [table.serial]
    region = table.add([plain(np.zeros(100, np.uint8))])
    serials.append(table.serial)
    table.remove(region)
    serials.append(table.serial)
    assert serials == sorted(set(serials))


def test_equal_addresses_on_different_devices_are_no_overlap() -> None:
    """Each GPU has addresses of its own."""
    table = RegionTable(frozenset({"cuda"}))
    assert len(table.add([Buffer(4096, 100, "cuda:0"), Buffer(4096, 100, "cuda:1")])) == 2
    with pytest.raises(ConfigurationError, match="overlaps the region of 100 bytes at 0x1000"):
        table.add([Buffer(4195, 1, "cuda:1")])
    with pytest.raises(RegistrationError, match="registers cuda memory only"):
        table.add([Buffer(8192, 1, "cpu")])


def test_an_empty_batch_has_no_bounds() -> None:
    """Also where nothing is registered."""
    empty = np.empty(0, np.int64)
    assert len(Extents((), "local").addresses(empty.astype(np.int32), empty, empty)) == 0


def test_the_error_names_the_first_bad_descriptor() -> None:
    """With its place, offset and length, and the region's size."""
    extents = Extents([(RegionId(5), 1000, 64), (RegionId(2), 5000, 32)], "local")
    regions, sizes = np.array([2, 5, 2], np.int32), np.array([8, 8, 8], np.int64)
    assert extents.addresses(regions, np.array([0, 56, 24], np.int64), sizes).tolist() == [5000, 1056, 5024]
    with pytest.raises(
        RegistrationError, match=r"local region 2: 8 bytes at offset 25 .* 32 bytes .*descriptor 2 of 3"
    ):
        extents.addresses(regions, np.array([0, 56, 25], np.int64), sizes)
    with pytest.raises(RegistrationError, match="local region 3 is not registered"):
        extents.addresses(np.array([2, 3, 9], np.int32), np.zeros(3, np.int64), sizes)
    with pytest.raises(RegistrationError, match="region 3: none is registered"):
        Extents((), "peer's").addresses(np.array([3], np.int32), np.zeros(1, np.int64), sizes[:1])


def test_readable_asks_and_does_not_crash() -> None:
    """About unmapped and impossible addresses, too."""
    byte = ctypes.c_char()
    assert readable(ctypes.addressof(byte))
    assert not readable(4096)
    assert not readable((1 << 63) - 1)
    assert not readable(1 << 63)


def test_a_copy_of_nothing_touches_nothing() -> None:
    """Not even the addresses."""
    nowhere, none = np.array([1, 1], np.int64), np.zeros(2, np.int64)
    copy(nowhere, nowhere, none)
    copy(nowhere[:0], nowhere[:0], none[:0])


def test_regions_are_compared_by_number_and_place() -> None:
    """Fewer regions are among them; a region that is new, moved or longer is not."""
    known = Extents([(RegionId(1), 0, 100), (RegionId(2), 500, 50)], "a peer's")
    for others, held in (
        ([], True),
        ([(2, 500, 50)], True),
        ([(3, 0, 100)], False),
        ([(2, 501, 50)], False),
        ([(2, 500, 51)], False),
    ):
        assert known.has_all(Extents([(RegionId(i), base, size) for i, base, size in others], "a peer's")) is held
