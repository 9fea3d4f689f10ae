"""Whatever bytes arrive, decoding gives a valid frame or one of our errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.core import MAX_AUX, VERSION, Codec, Frame
from disagg_kv.core.wire import frames as f
from disagg_kv.core.wire.page_runs import tables_from_wire
from disagg_kv.core.wire.specs import shard_from_wire, site_from_wire, spec_from_wire
from disagg_kv.errors import RemoteProtocolError

numbers = st.integers(0, 2**62)
regions = st.integers(0, 2**31 - 1)
layers = st.integers(0, f.MAX_ENTRIES - 1)
epochs = st.binary(min_size=16, max_size=16)
names = st.text(max_size=20)
texts = st.text(max_size=60)
boxes = st.tuples(numbers, numbers, numbers, numbers, st.booleans())
tables = st.builds(
    f.WireTable,
    group=names,
    first=numbers,
    count=st.integers(0, 12),
    runs=st.integers(0, 4),
    pages=st.binary(max_size=40),
)
counts = st.integers(1, 8)
holdings = st.builds(
    f.WireHolding,
    component=names,
    layers=st.lists(st.tuples(layers, counts), max_size=3).map(tuple),
    start=numbers,
    stop=numbers,
)
small = st.integers(0, 4)
components = st.builds(
    f.WireComponent,
    name=st.sampled_from(["k", "v", ""]),
    dtype=st.sampled_from(["int8", "bfloat16", "bit"]),
    units=small,
    unit_bytes=small,
    tokens_per_row=small,
    rows=small,
    window=st.none() | small,
    format=names,
    scales=st.lists(st.floats(width=32), max_size=3).map(tuple),
    scaled_by=st.none() | names,
)
specs = st.builds(
    f.WireSpec,
    model=st.binary(max_size=8),
    kinds=st.lists(st.lists(components, max_size=2).map(tuple), max_size=2).map(tuple),
    layers=st.lists(st.tuples(small, small), max_size=3).map(tuple),
)
strides = st.integers(-(2**62), 2**62)
planes = st.tuples(
    small, st.sampled_from(["k", "v"]), names, small, numbers, numbers, numbers, numbers, strides, strides, strides
)
sites = st.builds(
    f.WireSite,
    groups=st.lists(st.tuples(names, numbers, numbers, st.none() | numbers), max_size=2).map(tuple),
    planes=st.lists(st.tuples(counts, st.lists(planes, min_size=1, max_size=2).map(tuple)), max_size=2).map(tuple),
    buffers=st.lists(st.tuples(numbers, counts), max_size=2).map(tuple),
)
between = {"src": epochs, "dst": st.just(b"") | epochs}
about = {**between, "room": st.binary(min_size=1, max_size=64), "generation": numbers}


def room_frame(kind: type[Frame], **fields: st.SearchStrategy[object]) -> st.SearchStrategy[Frame]:
    return st.builds(kind, **about, **fields)


any_frame: st.SearchStrategy[Frame] = st.one_of(
    st.builds(
        f.Hello,
        **between,
        version=numbers,
        address=names,
        role=names,
        instance=names,
        rank=st.integers(0, f.MAX_RANKS - 1),
        host=names,
        pid=numbers,
        started=numbers,
        born=numbers,
        spec=specs,
        shards=st.lists(st.lists(holdings, max_size=2).map(tuple), max_size=2).map(tuple),
        site=sites,
        regions=st.lists(regions, max_size=3).map(tuple),
        transport=names,
        descriptor=st.binary(max_size=20),
        paths=st.lists(st.tuples(names, numbers), max_size=2).map(tuple),
        conversions=st.lists(names, max_size=2).map(tuple),
        slot_bytes=numbers,
        ring_region=regions,
        ring_bytes=numbers,
        lease_bytes=numbers,
    ),
    st.builds(f.Refused, **between, address=names, field=texts, ours=texts, theirs=texts),
    st.builds(f.Heartbeat, **between),
    room_frame(
        f.Expect,
        start=numbers,
        stop=st.none() | numbers,
        path=names,
        tables=st.none() | st.lists(tables, max_size=2).map(tuple),
        tag=st.binary(max_size=32),
        verify=st.sampled_from(["off", "sampled", "full"]),
    ),
    room_frame(f.Expected, parked=st.booleans()),
    room_frame(f.StagingRequest, segment=boxes, ask=numbers, ready=st.booleans()),
    room_frame(f.Queued, segment=boxes),
    room_frame(f.Grant, segment=boxes, ask=numbers, lease=numbers, offset=numbers, nbytes=numbers),
    room_frame(f.Landed, segments=st.lists(boxes, min_size=1, max_size=3).map(tuple)),
    room_frame(f.ChunkReady, segment=boxes, lease=st.none() | numbers, sums=st.none() | st.binary(max_size=40)),
    room_frame(f.Done, stop=numbers, segments=numbers, aux=st.none() | st.binary(max_size=40)),
    room_frame(f.Complete),
    room_frame(f.Abort, reason=texts, tag=st.binary(max_size=32)),
    room_frame(f.Drained, reason=texts),
    room_frame(f.DrainedAck),
    room_frame(f.Vote, ok=st.none() | st.booleans(), reason=texts),
    room_frame(f.Decision, ok=st.none() | st.booleans(), shared=st.booleans(), reason=texts),
    room_frame(f.Return, segment=boxes, ask=numbers),
    room_frame(f.Returned, segment=boxes, ask=numbers),
    st.builds(f.Disconnected, **between, closed=st.booleans()),
)
codec = Codec()


@given(any_frame)
def test_every_frame_comes_back_as_it_went(frame: Frame) -> None:
    assert codec.decode(codec.encode(frame)) == frame


@given(any_frame, st.data())
def test_a_frame_that_was_cut_or_changed_is_refused_or_is_another_valid_frame(
    frame: Frame, data: st.DataObject
) -> None:
    """Nothing but RemoteProtocolError, however the bytes were mangled."""
    whole = bytearray(codec.encode(frame))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(RemoteProtocolError):
        codec.decode(bytes(whole[:cut]))
    whole[cut] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(RemoteProtocolError):
        assert codec.decode(codec.encode(codec.decode(bytes(whole)))) == codec.decode(bytes(whole))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        codec.decode(data)


@given(any_frame, st.integers(25, 2**31))
def test_an_unknown_kind_of_frame_is_refused(frame: Frame, tag: int) -> None:
    fields = msgspec.msgpack.decode(codec.encode(frame))
    with pytest.raises(RemoteProtocolError, match=f"not a frame of version {VERSION}"):
        codec.decode(msgspec.msgpack.encode([tag, *fields[1:]]))


@pytest.mark.parametrize("size", [Codec.MAX_BYTES + 1, 10 * Codec.MAX_BYTES])
def test_a_frame_above_the_limit_is_refused_before_it_is_looked_at(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"{size} bytes; at most {Codec.MAX_BYTES}"):
        codec.decode(bytes(size))


@pytest.mark.parametrize(
    "change",
    [
        {"src": bytes(15)},
        {"dst": bytes(17)},
        {"room": b""},
        {"room": bytes(65)},
        {"generation": -1},
        {"generation": 2**62 + 1},
        {"aux": bytes(MAX_AUX + 1)},
        {"stop": None},
        {"stop": "1"},
        {"segments": -1},
        {"segments": 2**62 + 1},
        {"segments": None},
    ],
    ids=str,
)
def test_fields_out_of_bounds_are_refused(change: dict[str, object]) -> None:
    done = f.Done(src=bytes(16), dst=bytes(16), room=b"r", generation=1, stop=1, segments=0, aux=None)
    assert codec.decode(codec.encode(done)) == done
    with pytest.raises(RemoteProtocolError):
        codec.decode(codec.encode(msgspec.structs.replace(done, **change)))


def introduction(**change: object) -> f.Hello:
    """A Hello, one field of which is changed."""
    plain = f.Hello(
        src=bytes(16), dst=b"", version=1, address="a", role="decode", instance="i", rank=0, host="h", pid=1, started=1,
        born=1, spec=f.WireSpec(b"", (), ()), shards=(), site=f.WireSite((), (), ()), regions=(), transport="t",
        descriptor=b"", paths=(), conversions=(),
        verdict="elected", slot_bytes=0, ring_region=0, ring_bytes=0, lease_bytes=0,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **change)


HOLDING = f.WireHolding("k", ((0, 1),), 0, 1)
PLANE = (0, "k", "g", 0, 0, 1, 1, 1, 1, 1, 1)
MANY = f.MAX_ENTRIES + 1


@pytest.mark.parametrize(
    "change",
    [
        {"rank": f.MAX_RANKS},
        {"shards": ((),) * (f.MAX_RANKS + 1)},
        {"shards": ((f.WireHolding("k", ((0, 1),) * MANY, 0, 1),),)},
        {"shards": ((f.WireHolding("k", ((f.MAX_ENTRIES, 1),), 0, 1),),)},
        {"regions": (0,) * MANY},
        {"regions": (1 << 31,)},
        {"descriptor": bytes(f.MAX_DESCRIPTOR + 1)},
        {"paths": (("p", 1),) * 257},
        {"conversions": ("c",) * 257},
        {"address": "a" * 257},
        {"spec": f.WireSpec(b"", ((),) * MANY, ())},
        {"spec": f.WireSpec(b"", (), ((0, 0),) * MANY)},
        {"spec": f.WireSpec(b"", (), ((f.MAX_ENTRIES, 0),))},
        {"site": f.WireSite((("g", 1, 1, None),) * 257, (), ())},
        {"site": f.WireSite((), ((1, (PLANE,)),) * MANY, ())},
        {"site": f.WireSite((), ((2, (PLANE,) * 17),), ())},
        {"site": f.WireSite((), ((MANY, (PLANE,)),), ())},
        {"site": f.WireSite((), (), ((1, 1),) * MANY)},
    ],
    ids=lambda change: repr(change)[:60],
)
def test_no_list_of_an_introduction_is_longer_than_its_limit(change: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode(codec.encode(introduction(**change)))


def test_a_shard_that_names_a_layer_twice_is_refused() -> None:
    spec = f.WireSpec(b"", ((f.WireComponent("k", "int8", 1, 1, 1, 0, None, "plain", (), None),),), ((0, 0),))
    with pytest.raises(RemoteProtocolError, match="names a layer twice"):
        shard_from_wire([msgspec.structs.replace(HOLDING, layers=((0, 1), (0, 1)))], spec_from_wire(spec))


@given(st.text(st.characters(), max_size=2000))
def test_any_reason_fits_a_frame(reason: str) -> None:
    """A message in a foreign encoding must not end the thread that reports it."""
    abort = f.Abort(src=bytes(16), dst=bytes(16), room=b"r", generation=1, reason=f.words(ValueError(reason)))
    assert codec.decode(codec.encode(abort)) == abort


def test_the_largest_aux_data_fits() -> None:
    head = f.Head(src=bytes(16), dst=bytes(16), room=b"r", generation=1)
    done = f.Done(**head, stop=1, segments=0, aux=bytes(MAX_AUX))
    assert codec.decode(codec.encode(done)) == done


@given(specs, st.lists(holdings, max_size=3), sites, st.lists(tables, max_size=3))
def test_geometry_from_a_peer_is_valid_or_the_peers_error(
    spec: f.WireSpec, holding: list[f.WireHolding], site: f.WireSite, table: list[f.WireTable]
) -> None:
    def tried(act: Callable[[], object]) -> None:
        with contextlib.suppress(RemoteProtocolError):
            act()

    def whole() -> None:
        known = spec_from_wire(spec)
        tried(lambda: site_from_wire(site, known, shard_from_wire((), known)))
        site_from_wire(site, known, shard_from_wire(holding, known))

    tried(whole)
    tried(lambda: tables_from_wire(table, 1 << 20))


def test_introductions_that_are_remembered_have_a_bounded_size() -> None:
    one = Codec()
    first = one.encode(introduction())
    known = one.decode(first)
    assert one.decode(first) is known
    for pid in range(Codec.MAX_HELLO_BYTES // f.MAX_DESCRIPTOR):
        frame = introduction(pid=pid, descriptor=bytes(f.MAX_DESCRIPTOR))
        assert one.decode(one.encode(frame)) == frame
    assert sum(size for _, size in one._hellos.values()) == one._hello_bytes <= Codec.MAX_HELLO_BYTES
    again = one.decode(first)
    assert again == known
    assert again is not known
