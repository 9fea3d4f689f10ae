"""SGLang's buffers as a pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from disagg_kv.engines.common import CommonCache
from disagg_kv.engines.sglang.cache import Buffers, SGLangPool, common_pool_of, pool_of
from disagg_kv.errors import GeometryError, UnsupportedError
from disagg_kv.ids import KV, LayerId
from tests.support.sglang_like import described

PAGE, HEADS, DIM = 4, 2, 8


def arrays(count: int = 4, slots: int = 20) -> list[npt.NDArray[np.uint16]]:
    return [np.full((slots, HEADS, DIM), number, np.uint16) for number in range(count)]


def metadata() -> list[npt.NDArray[Any]]:
    return [np.zeros((3, 4), np.int32), np.zeros((3, 2), np.uint64)]


def made(kv: list[npt.NDArray[np.uint16]], rows: list[npt.NDArray[Any]], **given: Any) -> SGLangPool:
    item = given.pop("item", PAGE * HEADS * DIM * 2)
    what = {"page": PAGE, "heads": HEADS, "latent": False, "dtype": "float16", "tp": 1, "rank": 0, **given}
    pool, _ = pool_of(described(kv, item), described(rows), model=b"m", device="cpu", **what)
    return pool


def test_keys_come_before_values() -> None:
    """K of layers 0 and 1, then V of layers 0 and 1; pages of 4 slots."""
    kv = arrays()
    pool = made(kv, metadata())
    names = [(plane.layer, plane.component) for plane in pool.site.planes]
    assert names == [(0, "k"), (1, "k"), (0, "v"), (1, "v")]
    assert (pool.site.group(KV).pages, pool.site.group(KV).rows_per_page) == (5, PAGE)
    for number in range(4):
        view = pool.view(number)
        assert view.shape == (5, PAGE, HEADS, DIM * 2)
        view[3, 1, 1] = 255
        assert (kv[number][13, 1] == 0xFFFF).all()
        assert (kv[number][13, 0] == number).all()


def test_latents_have_one_buffer_a_layer() -> None:
    pool = made(arrays(3), metadata(), latent=True, tp=2, rank=1)
    assert [plane.component for plane in pool.site.planes] == ["latent"] * 3
    assert pool.site.spec.component(LayerId(0), "latent").unit_bytes == HEADS * DIM * 2


def test_metadata_rows_are_aux_rows() -> None:
    rows, others = metadata(), metadata()
    one, two = made(arrays(), rows), made(arrays(), others)
    rows[0][1], rows[1][1] = [1, 2, 3, 4], [5, 6]
    assert one.aux_bytes == 32
    two.write_aux(2, one.read_aux(1))
    assert others[0].tolist() == [[0] * 4, [0] * 4, [1, 2, 3, 4]]
    assert others[1].tolist() == [[0] * 2, [0] * 2, [5, 6]]


def test_metadata_rows_that_do_not_fit_are_refused() -> None:
    pool = made(arrays(), metadata())
    with pytest.raises(GeometryError, match="metadata row 3: there are 3"):
        pool.read_aux(3)
    with pytest.raises(GeometryError, match="metadata row -1"):
        pool.write_aux(-1, bytes(32))
    with pytest.raises(GeometryError, match="have 31 bytes, decode's 32"):
        pool.write_aux(0, bytes(31))


def test_buffers_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(GeometryError, match="1 addresses, 2 lengths and 1 sizes"):
        Buffers([1], [2, 2], [1])
    with pytest.raises(GeometryError, match=r"\[5, 6\] pages"):
        made([*arrays(3), *arrays(1, 24)], metadata())
    with pytest.raises(GeometryError, match="metadata rows"):
        made(arrays(), [np.zeros((3, 4), np.int32), np.zeros((4, 2), np.int32)])


@pytest.mark.parametrize(
    ("count", "given", "message"),
    [
        (3, {}, "3 KV buffers"),
        (0, {}, "0 KV buffers"),
        (4, {"heads": 6, "tp": 4}, "6 heads on 4 ranks"),
        (4, {"heads": 3, "item": PAGE * HEADS * DIM * 2}, "128 bytes of a page of 4 tokens of 3 heads"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(count: int, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        made(arrays(count), metadata(), **given)


def test_a_metadata_row_with_a_first_token_and_a_room() -> None:
    rows = metadata()
    for one in rows:
        one[:] = 9
    pool = made(arrays(), rows)
    pool.write_first(1, 77, 1 << 62)
    assert (rows[0].tolist(), rows[1].tolist()) == ([[9] * 4, [77, 0, 0, 0], [9] * 4], [[9] * 2, [1 << 62, 0], [9] * 2])
    for wrong, message in (((3, 1, 1), "there are 3"), ((0, -1, 1), "token -1"), ((0, 1, 1 << 64), "room 1844")):
        with pytest.raises(GeometryError, match=message):
            pool.write_first(*wrong)
    assert (rows[0][0] == 9).all()


@pytest.mark.parametrize(("layers", "dim", "dtype"), [(1, DIM, "float16"), (2, 4, "float16"), (2, DIM, "float32")])
def test_buffers_of_another_model_have_no_common_description(layers: int, dim: int, dtype: str) -> None:
    cache = CommonCache(layers=layers, heads=HEADS, dim=dim, dtype=dtype, rotation="rotated", model=b"m")
    with pytest.raises(UnsupportedError, match=r"description 'common': 4 KV buffers with pages of \[128\] bytes"):
        common_pool_of(
            cache, described(arrays(), PAGE * HEADS * DIM * 2), described(metadata()), page=PAGE, tp=1, rank=0,
            device="cpu",
        )  # fmt: skip
