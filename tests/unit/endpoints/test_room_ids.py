"""Room ids of text, and how an id is printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv import room_id
from disagg_kv.endpoints import attempt_id
from disagg_kv.endpoints.retry import REQUEST_BYTES
from disagg_kv.errors import ConfigurationError, LocalProtocolError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId, room_name
from disagg_kv.rendezvous import Source
from tests.support.rig import Rig, tp_shards

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=200)


def test_the_ids_of_engines_stay_as_they_are() -> None:
    """Short text is its own id, and longer text keeps its beginning."""
    assert room_id("cmpl-1f0e-0-1234abcd") == b"cmpl-1f0e-0-1234abcd"
    assert room_id("\u00fc" * 24) == ("\u00fc" * 24).encode()
    long = room_id("chatcmpl-0123456789abcdef0123456789abcdef-0-1234abcd")
    assert long.startswith(b"chatcmpl-012345~")
    assert len(long) == REQUEST_BYTES


@given(st.lists(TEXTS | st.sampled_from(["a", "b"]), unique=True, max_size=8))
def test_different_texts_have_different_ids_that_may_be_retried(texts: list[str]) -> None:
    """Also of text that looks like an id: neither another text nor another text's retry has it."""
    for text in list(texts):
        more = (room_id(text).decode(), attempt_id(room_id(text), 2).decode())
        texts += [one for one in more if one not in texts]
    ids = [attempt_id(room_id(text), attempt) for text in texts for attempt in (1, 2)]
    assert len(set(ids)) == len(ids)
    assert [room_id(text) for text in texts] == ids[::2], "the same in every process"


@pytest.mark.parametrize("text", ["", "\ud800", b"bytes"])
def test_what_is_no_text(text: str) -> None:
    with pytest.raises(ConfigurationError, match="room id"):
        room_id(text)


@pytest.mark.parametrize(
    ("room", "name"),
    [
        (b"cmpl-1", "room cmpl-1"),
        ("request \u00fc".encode(), "room request \u00fc"),
        (b"two\nlines", "room 74776f0a6c696e6573"),
        (b"\xff\x00", "room ff00"),
    ],
)
def test_messages_have_the_text_of_an_id_where_it_can_be_printed(room: bytes, name: str) -> None:
    """An id never breaks a log line."""
    assert room_name(room) == name


def test_errors_of_both_sides_name_the_room_as_the_engine_does() -> None:
    """And text in place of an id is refused with what makes one of it."""
    spec = CacheSpec.kv(1, 1, 8, "float16")
    rig = Rig(spec)
    (prefill,), (decode,) = rig.prefill(tp_shards(spec, 1)), rig.decode(tp_shards(spec, 1))
    room = room_id("cmpl-7")
    prefill.endpoint.open(room)
    handle = decode.endpoint.open(room, Source("P"))
    for call in (lambda: prefill.endpoint.open(room), lambda: decode.endpoint.open(room, Source("P"))):
        with pytest.raises(LocalProtocolError, match="room cmpl-7 is open already"):
            call()
    handle.abort("no need")
    rig.until(lambda: handle.released, "the end")
    assert str(handle.error) == "room cmpl-7: no need"
    text: RoomId = "cmpl-8"  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"bytes are needed: disagg_kv.room_id\(text\) makes them of text"):
        prefill.endpoint.open(text)
