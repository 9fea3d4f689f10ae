"""Every public call, found by looking at the package; each has arguments that work."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator

import torch
from attrs import evolve

import disagg_kv
from disagg_kv import endpoints, prefix
from disagg_kv.channels import InprocChannel, UnixChannel, ZmqChannel
from disagg_kv.core import Elected, Options
from disagg_kv.endpoints import (
    Environment,
    Expectation,
    Fail,
    RecoveringReceiver,
    Retry,
    attempt_id,
    room_id,
)
from disagg_kv.endpoints.decode import handle as reception
from disagg_kv.endpoints.prefill import handle as delivery
from disagg_kv.endpoints.retry import Recovering
from disagg_kv.geometry import (
    CacheSpec,
    Component,
    Group,
    Holding,
    PageTable,
    Plane,
    Shard,
    Site,
    shard,
    stages,
)
from disagg_kv.ids import LayerId, Rank
from disagg_kv.kernels import gpu_kernels
from disagg_kv.memory import Buffer, MappedPool, PagedPool
from disagg_kv.prefix import HashPrefixIndex, PageAllocator, PrefixCache, namespace_of
from disagg_kv.rendezvous import Rendezvous, RequestRendezvous, Source, StaticRendezvous, StoreRendezvous
from disagg_kv.staging import RingStagingAllocator
from disagg_kv.strategies import LayerPipelined, register, strategy
from disagg_kv.transports import (
    InprocTransport,
    Transports,
    between_processes,
    register_transport,
    transport,
)
from tests.support.rig import KV

from .bench import ROWS, SPEC, Bench, Call, Ready

L0 = LayerId(0)
MADE_HERE = {"Alone", "DisaggKVError", "Elected", "GroupId", "LayerId", "Phase"}
"""Public names that an engine does not make, or that are only names for plain values."""

OWN = {"check_integrity", "turn", "again"}
"""Methods for tests and simulations, and one that the library calls."""

SPOKEN = {
    endpoints.PrefillEndpoint: ("open", "step", "poll", "confirm_terminated", "close", "peers"),
    endpoints.DecodeEndpoint: (endpoints.Receiver, "peers"),
    delivery.DeliveryHandle: (endpoints.Delivery,),
    reception.ReceptionHandle: (endpoints.Reception,),
    delivery.ForwardPass: ("layer_ready", "close"),
    Recovering: (endpoints.Reception,),
    UnixChannel: ("__init__",),
    ZmqChannel: ("__init__",),
}
"""Classes of which an engine only calls what a protocol names; and what else it calls."""

MORE = (
    RecoveringReceiver, Retry, prefix.PrefixLease, PageAllocator, StoreRendezvous, StaticRendezvous, RequestRendezvous,
    Buffer, MappedPool, Environment, Group, Holding, Plane, Shard, Site, HashPrefixIndex, PrefixCache,
    *SPOKEN,
)  # fmt: skip
"""Public classes that the face of the package does not name."""

FUNCTIONS = (attempt_id, between_processes, namespace_of, register, register_transport, room_id, stages)


def discovered() -> Iterator[tuple[str, Callable[..., object]]]:
    """Name and function of every public call; the constructors' names end with ``__init__``."""
    classes: list[type] = list(MORE)
    for name in disagg_kv.__all__:
        found = getattr(disagg_kv, name)
        if name in MADE_HERE:
            continue
        if inspect.isfunction(found):
            yield name, found
        elif inspect.isclass(found) and not getattr(found, "_is_protocol", False) and found not in classes:
            classes.append(found)
    for function in FUNCTIONS:
        yield function.__name__, function
    for owner in classes:
        yield from _of(owner)


def _of(owner: type) -> Iterator[tuple[str, Callable[..., object]]]:
    names = {name for name in vars(owner) if not name.startswith("_")} - OWN
    if owner in SPOKEN:
        names = set()
        for said in SPOKEN[owner]:
            names |= {said} if isinstance(said, str) else {n for n in _members(said) if not n.startswith("_")}
    if owner in (endpoints.PrefillEndpoint, endpoints.DecodeEndpoint) or owner not in SPOKEN:
        yield f"{owner.__name__}.__init__", vars(owner)["__init__"]
    for name in sorted(names):
        found = inspect.getattr_static(owner, name, None)  # None: an attribute of its objects
        function = found.__func__ if isinstance(found, classmethod) else found
        if inspect.isfunction(function) and len(inspect.signature(function).parameters) > 1:
            yield f"{owner.__name__}.{name}", function


def _members(protocol: type) -> set[str]:
    return {
        name
        for one in protocol.__mro__
        if one not in (object,)
        for name in vars(one)
        if one.__name__ not in ("Protocol", "Generic")
    }


class Store:
    """A store in a dictionary."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        """The value."""
        return self._values[key]

    def set(self, key: str, value: str) -> None:
        """Write it."""
        self._values[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write it where nothing stands."""
        return self._values.setdefault(key, desired.encode())

    def delete_key(self, key: str) -> bool:
        """Forget it."""
        return self._values.pop(key, None) is not None


CALLS: dict[str, Call] = {}


def covers(name: str, /, **kinds: str) -> Callable[[Callable[[Bench], Ready]], Callable[[Bench], Ready]]:
    """Put what makes a call into the table."""

    def note(make: Callable[[Bench], Ready]) -> Callable[[Bench], Ready]:
        CALLS[name] = Call(name, kinds, make)
        return make

    return note


def plain(name: str, function: Callable[..., object], good: dict[str, object], /, **kinds: str) -> None:
    """A call that needs nothing of the bench."""
    CALLS[name] = Call(name, kinds, lambda bench: (function, dict(good)))


ENDPOINT = {
    "pool": "thing", "transport": "thing or none", "channel": "thing", "rendezvous": "thing", "instance": "name",
    "rank": "count", "shards": "things or none", "strategy": "thing", "verify": "thing", "verdict": "thing",
    "options": "thing or none",
    "kernels": "thing or none", "observer": "thing or none", "environment": "thing or none",
}  # fmt: skip


def _endpoint(bench: Bench) -> dict[str, object]:
    number = bench.room()
    made = InprocTransport()
    bench.later(lambda: made.close(0.0))
    return {
        "pool": PagedPool.allocate(SPEC, shard(SPEC), pages=2, page_size=4), "transport": made,
        "channel": InprocChannel(bench.rig.hub, number.decode()), "rendezvous": StaticRendezvous(), "instance": "X",
        "rank": 0, "shards": None, "strategy": "auto", "verify": "off", "verdict": Elected,
        "options": Options(), "kernels": None,
        "observer": None, "environment": Environment(clock=bench.rig.clock, thread=False, engine=False),
    }  # fmt: skip


@covers("PrefillEndpoint.__init__", **ENDPOINT, schedule="thing or none", uses="things", slot_bytes="count or none",
        slots="count")  # fmt: skip
def _prefill(bench: Bench) -> Ready:
    more = {"schedule": LayerPipelined(fixed=1), "uses": (), "slot_bytes": 4096, "slots": 2}
    return endpoints.PrefillEndpoint, {**_endpoint(bench), **more}


@covers("DecodeEndpoint.__init__", **ENDPOINT, ring_bytes="count or none",
        allocator="function", scatter_bytes_per_s="number or none")  # fmt: skip
def _decode(bench: Bench) -> Ready:
    more = {"ring_bytes": 4096, "allocator": RingStagingAllocator}
    more |= {"scatter_bytes_per_s": None}
    return endpoints.DecodeEndpoint, {**_endpoint(bench), **more}


@covers("Environment.__init__", clock="function", sleep="function", thread="flag", engine="flag",
        incarnation="thing or none", background="function or none")  # fmt: skip
def _environment(bench: Bench) -> Ready:
    quiet = {
        "sleep": lambda seconds: None,
        "thread": False,
        "engine": False,
        "incarnation": None,
        "background": None,
    }
    return Environment, {"clock": bench.rig.clock, **quiet}


TIMES = {"total_s": "seconds or none", "claim_s": "seconds or none"}
NO_TIMES = dict.fromkeys(TIMES)


@covers("PrefillEndpoint.open", room="room", tag="octets", **TIMES)
def _open_prefill(bench: Bench) -> Ready:
    return bench.prefill.open, {"room": bench.room(), "tag": b"", **NO_TIMES}


@covers("DecodeEndpoint.open", room="room", source="thing", tag="octets", **TIMES)
def _open_decode(bench: Bench) -> Ready:
    return bench.decode.open, {"room": bench.room(), "source": Source("nowhere"), "tag": b"", **NO_TIMES}


@covers("RecoveringReceiver.open", room="room", source="thing", tag="octets", **TIMES)
def _open_recovering(bench: Bench) -> Ready:
    return bench.recovering.open, {"room": bench.room(), "source": Source("nowhere"), "tag": b"", **NO_TIMES}


def _victim_of_prefill(bench: Bench) -> delivery.DeliveryHandle:
    handle = bench.prefill.open(bench.room())
    bench.victim(handle)
    return handle


@covers("PrefillEndpoint.step", chunks="mapping", uses="things", tokens="tokens or none")
def _step(bench: Bench) -> Ready:
    room = _victim_of_prefill(bench).room
    return bench.prefill.step, {"chunks": {room: (ROWS, [bench.table])}, "uses": (), "tokens": None}


@covers("PrefillEndpoint.step: a chunk", chunk="thing")
def _step_chunk(bench: Bench) -> Ready:
    room = _victim_of_prefill(bench).room
    return (lambda chunk: bench.prefill.step({room: chunk})), {"chunk": (ROWS, [bench.table])}


@covers("PrefillEndpoint.step: a stop", stop="count")
def _step_stop(bench: Bench) -> Ready:
    room = _victim_of_prefill(bench).room
    return (lambda stop: bench.prefill.step({room: (stop, [bench.table])})), {"stop": ROWS}


@covers("PrefillEndpoint.step: pages", pages="tables")
def _step_pages(bench: Bench) -> Ready:
    room = _victim_of_prefill(bench).room
    return (lambda pages: bench.prefill.step({room: (ROWS, pages)})), {"pages": [bench.table]}


@covers("PrefillEndpoint.confirm_terminated", epoch="epoch")
def _confirm_prefill(bench: Bench) -> Ready:
    return bench.prefill.confirm_terminated, {"epoch": b"0" * 16}


@covers("DecodeEndpoint.confirm_terminated", epoch="epoch")
def _confirm_decode(bench: Bench) -> Ready:
    return bench.decode.confirm_terminated, {"epoch": b"0" * 16}


@covers("RecoveringReceiver.confirm_terminated", epoch="epoch")
def _confirm_recovering(bench: Bench) -> Ready:
    return bench.recovering.confirm_terminated, {"epoch": b"0" * 16}


def _closes(kind: Callable[..., object], more: Callable[[Bench], dict[str, object]]) -> Callable[[Bench], Ready]:
    def make(bench: Bench) -> Ready:
        endpoint = kind(**more(bench))
        bench.later(lambda: endpoint.close(0.0))  # type: ignore[attr-defined]
        return endpoint.close, {"drain_s": 0.0}  # type: ignore[attr-defined]

    return make


covers("PrefillEndpoint.close", drain_s="drain")(_closes(endpoints.PrefillEndpoint, lambda b: _prefill(b)[1]))
covers("DecodeEndpoint.close", drain_s="drain")(_closes(endpoints.DecodeEndpoint, lambda b: _decode(b)[1]))


@covers("RecoveringReceiver.close", drain_s="drain")
def _close_recovering(bench: Bench) -> Ready:
    inner = endpoints.DecodeEndpoint(**_decode(bench)[1])  # type: ignore[arg-type]
    bench.later(lambda: inner.close(0.0))
    return RecoveringReceiver(inner, Fail()).close, {"drain_s": 0.0}


@covers("RecoveringReceiver.__init__", inner="thing", policy="thing", options="thing or none", clock="function",
        observer="thing or none")  # fmt: skip
def _recovering(bench: Bench) -> Ready:
    good = {"inner": bench.decode, "policy": Fail(), "options": None, "clock": bench.rig.clock, "observer": None}
    return RecoveringReceiver, good


plain("Retry.__init__", Retry, {"place": lambda attempt: None, "attempts": 2}, place="function", attempts="count")


@covers("DeliveryHandle.send_chunk", stop="count", pages="tables", ready="event")
def _send_chunk(bench: Bench) -> Ready:
    return _victim_of_prefill(bench).send_chunk, {"stop": ROWS, "pages": [bench.table], "ready": None}


@covers("DeliveryHandle.check_chunk", stop="count", pages="tables")
def _check_chunk(bench: Bench) -> Ready:
    return _victim_of_prefill(bench).check_chunk, {"stop": ROWS, "pages": [bench.table]}


@covers("DeliveryHandle.finish", stop="count", state="tables", aux="count or none", ready="event")
def _finish(bench: Bench) -> Ready:
    good = {"stop": 0, "state": (), "aux": 0, "ready": None}
    return _victim_of_prefill(bench).finish, good


@covers("DeliveryHandle.abort", reason="any text")
def _abort_prefill(bench: Bench) -> Ready:
    return _victim_of_prefill(bench).abort, {"reason": "why not"}


EXPECT = {
    "stop": "count or none", "pages": "tables", "held": "mapping or none", "state": "tables",
    "aux": "count or none", "least": "count", "ready": "event",
}  # fmt: skip


def _rows(place: PageTable) -> dict[str, object]:
    return {"stop": ROWS, "pages": [place], "held": None, "state": (), "aux": 0, "least": 0, "ready": None}


def _expect(handle: endpoints.Reception, bench: Bench, place: PageTable) -> Ready:
    bench.victim(handle)
    return handle.expect, {"expectation": Expectation(**_rows(place))}  # type: ignore[arg-type]


covers("Expectation.__init__", **EXPECT)(lambda bench: (Expectation, _rows(bench.place)))


@covers("ReceptionHandle.expect", expectation="thing")
def _expect_decode(bench: Bench) -> Ready:
    return _expect(bench.decode.open(bench.room(), Source("nowhere")), bench, bench.place)


@covers("ReceptionHandle.expect: its rows and pages", **EXPECT)
def _expect_rows(bench: Bench) -> Ready:
    expect, _ = _expect_decode(bench)
    return (lambda **rows: expect(Expectation(**rows))), _rows(bench.place)


@covers("Recovering.expect", expectation="thing")
def _expect_recovering(bench: Bench) -> Ready:
    return _expect(bench.recovering.open(bench.room(), Source("nowhere")), bench, bench.elsewhere)


@covers("Expectation.__init__: held rows", rows="count")
def _expect_held(bench: Bench) -> Ready:
    return (lambda rows: Expectation(**{**_rows(bench.place), "held": {KV: rows}})), {"rows": 4}  # type: ignore[arg-type]


@covers("ReceptionHandle.abort", reason="any text")
def _abort_decode(bench: Bench) -> Ready:
    handle = bench.decode.open(bench.room(), Source("nowhere"))
    bench.victim(handle)
    return handle.abort, {"reason": "why not"}


@covers("Recovering.abort", reason="any text")
def _abort_recovering(bench: Bench) -> Ready:
    handle = bench.recovering.open(bench.room(), Source("nowhere"))
    bench.victim(handle)
    return handle.abort, {"reason": "why not"}


def _pass(bench: Bench) -> delivery.ForwardPass:
    return bench.prefill.step({_victim_of_prefill(bench).room: (ROWS, [bench.table])})


@covers("ForwardPass.layer_ready", layer="count", ready="event or mark")
def _layer_ready(bench: Bench) -> Ready:
    return _pass(bench).layer_ready, {"layer": 0, "ready": None}


@covers("ForwardPass.close", ready="event")
def _close_pass(bench: Bench) -> Ready:
    return _pass(bench).close, {"ready": None}


def _index() -> HashPrefixIndex:
    return HashPrefixIndex(4, 16, namespace_of(SPEC))


def _cache() -> PrefixCache:
    pool = PagedPool.allocate(SPEC, shard(SPEC), pages=16, page_size=4)
    return PrefixCache(_index(), PageAllocator(range(16)), pool.site)


@covers("PrefixCache.__init__", index="thing", pages="thing", site="thing")
def _prefix_cache(bench: Bench) -> Ready:
    pool = PagedPool.allocate(SPEC, shard(SPEC), pages=16, page_size=4)
    good = {"index": _index(), "pages": PageAllocator(range(16)), "site": pool.site}
    return PrefixCache, good


covers("PrefixCache.lease", tokens="tokens", adapter="long octets")(
    lambda bench: (_cache().lease, {"tokens": list(range(9)), "adapter": b""})
)
covers("PrefixCache.take", count="count")(lambda bench: (_cache().take, {"count": 2}))
covers("PrefixCache.leave", ready="event needed", back="function")(
    lambda bench: (_cache().leave, {"ready": bench.prefill.open(bench.room()).withdraw(), "back": lambda: None})
)
covers("PrefixLease.__init__", cache="thing", tokens="tokens", adapter="long octets")(
    lambda bench: (prefix.PrefixLease, {"cache": _cache(), "tokens": [1], "adapter": b""})
)
covers("PrefixLease.begin", held="count or none")(lambda bench: (_cache().lease(range(9)).begin, {"held": None}))


def _begun() -> prefix.PrefixLease:
    lease = _cache().lease(list(range(9)))
    lease.begin()
    return lease


class _Ended:
    """A room that has ended well."""

    phase, released, error = disagg_kv.Phase.DONE, True, None


def _there() -> prefix.PrefixLease:
    lease = _begun()
    lease.settle(_Ended())
    return lease


covers("PrefixLease.settle", handle="thing")(lambda bench: (_begun().settle, {"handle": _Ended()}))
covers("PrefixLease.grow", rows="count")(lambda bench: (_there().grow, {"rows": 12}))
covers("PrefixLease.end", tokens="tokens or none", ready="event")(
    lambda bench: (_there().end, {"tokens": list(range(9)), "ready": None})
)
plain("HashPrefixIndex.__init__", HashPrefixIndex, {"page_rows": 4, "pages": 16, "namespace": b"", "digest": bytes},
      page_rows="count", pages="count", namespace="long octets", digest="function")  # fmt: skip


@covers("HashPrefixIndex.match", tokens="tokens", adapter="long octets")
def _match(bench: Bench) -> Ready:
    return _index().match, {"tokens": [1, 2, 3, 4], "adapter": b""}


def _locked(name: str, **good: object) -> Callable[[Bench], Ready]:
    def make(bench: Bench) -> Ready:
        index = _index()
        return getattr(index, name), {"lock": index.match([1, 2, 3, 4]), **good}

    return make


covers("HashPrefixIndex.shorten", lock="thing", rows="count")(_locked("shorten", rows=0))
covers("HashPrefixIndex.unlock", lock="thing")(_locked("unlock"))
covers("HashPrefixIndex.insert", lock="thing", tokens="tokens", pages="ids")(
    _locked("insert", tokens=[1, 2, 3, 4], pages=[3])
)
covers("HashPrefixIndex.evict", pages="count")(lambda bench: (_index().evict, {"pages": 1}))
plain("PageAllocator.__init__", PageAllocator, {"pages": range(4)}, pages="ids")
covers("PageAllocator.take", count="count")(lambda bench: (PageAllocator(range(4)).take, {"count": 1}))
covers("PageAllocator.give", pages="ids")(lambda bench: (PageAllocator(range(4)).give, {"pages": []}))


def _pool() -> PagedPool:
    return PagedPool.allocate(SPEC, shard(SPEC), pages=4, page_size=4, aux_slots=2, aux_bytes=8)


covers("MappedPool.__init__", site="thing", buffers="things")(
    lambda bench: (MappedPool, {"site": _pool().site, "buffers": _pool().buffers})
)
plain("gpu_kernels", gpu_kernels, {"programs": None}, programs="count or none")
plain("room_id", room_id, {"text": "req-1"}, text="name or long")
covers("attempt_id", request="room", attempt="count")(
    lambda bench: (attempt_id, {"request": bench.room(), "attempt": 2})
)
plain("namespace_of", namespace_of, {"spec": SPEC}, spec="thing")

plain("Source.__init__", Source, {"instance": "P", "addresses": ()}, instance="name", addresses="texts")
plain("Options.__init__", Options, dict.fromkeys((), None),
      **{name: "seconds" if name.endswith("_s") else "count"
         for name in inspect.signature(Options).parameters})  # fmt: skip
plain("Options.of_room", Options().of_room, {"total_s": None, "claim_s": None}, **TIMES)
plain("StaticRendezvous.__init__", StaticRendezvous, {"addresses": None}, addresses="mapping or none")
PUBLISH = {"instance": "P", "rank": 0, "world": 1, "address": "a"}


def _publishes(name: str, make: Callable[[], Rendezvous]) -> None:
    covers(f"{name}.publish", instance="name", rank="count", world="count", address="name")(
        lambda bench: (make().publish, dict(PUBLISH))
    )
    covers(f"{name}.lookup", source="thing")(lambda bench: (make().lookup, {"source": Source("P")}))


_publishes("StaticRendezvous", StaticRendezvous)
_publishes("StoreRendezvous", lambda: StoreRendezvous(Store()))
_publishes("RequestRendezvous", RequestRendezvous)


def _requests() -> RequestRendezvous:
    made = RequestRendezvous()
    made.publish("P", Rank(0), 1, "a")
    return made


plain("RequestRendezvous.__init__", RequestRendezvous, {})
covers("RequestRendezvous.published", instance="text", rank="count")(
    lambda bench: (_requests().published, {"instance": "P", "rank": 0})
)
covers("RequestRendezvous.withdraw", instance="text", rank="count")(
    lambda bench: (_requests().withdraw, {"instance": "P", "rank": 0})
)
covers("RequestRendezvous.learn", instance="text", addresses="texts")(
    lambda bench: (_requests().learn, {"instance": "P", "addresses": ["a"]})
)
covers("StoreRendezvous.withdraw", instance="text", rank="count")(
    lambda bench: (StoreRendezvous(Store()).withdraw, {"instance": "P", "rank": 0})
)
plain("StoreRendezvous.__init__", StoreRendezvous, {"store": Store(), "prefix": "p"}, store="thing", prefix="text")
covers("ZmqChannel.__init__", bind="thing", advertise="name or none", keys="thing or none",
       high_water="count", unencrypted_network="flag")(
    lambda bench: (lambda **given: ZmqChannel(**given).close(),
                   {"bind": "tcp://127.0.0.1:0", "advertise": None, "keys": None, "high_water": 1,
                    "unencrypted_network": False})
)  # fmt: skip
covers("UnixChannel.__init__", bind="thing", high_water="count")(
    lambda bench: (lambda **given: UnixChannel(**given).close(),
                   {"bind": f"unix://{tempfile.mkdtemp()}/channel", "high_water": 1})
)  # fmt: skip
plain(
    "PageTable.__init__", PageTable, {"group": KV, "pages": [1], "first": 0}, group="text", pages="ids", first="integer"
)
covers("PageTable.check", group="thing", start="count", stop="count", needed="count or none")(
    lambda bench: (PageTable(KV, [1]).check, {"group": Group(KV, 4, 4), "start": 0, "stop": 4, "needed": None})
)
plain("Group.__init__", Group, {"id": KV, "rows_per_page": 4, "pages": 4, "null_page": None},
      id="text", rows_per_page="count", pages="count", null_page="count or none")  # fmt: skip
PLANE = {"layer": 0, "component": "k", "group": KV, "buffer": 0, "offset": 0, "page_stride": 1, "row_stride": 1,
         "unit_stride": 1}  # fmt: skip
plain("Plane.__init__", Plane, PLANE, **{n: "text" if n in ("component", "group") else "integer" for n in PLANE})
SITE = {"spec": SPEC, "shard": shard(SPEC), "groups": [Group(KV, 4, 4)], "planes": _pool().site.planes,
        "buffers": [4096], "overlaid": False, "conversions": []}  # fmt: skip
plain("Site.__init__", Site, SITE, spec="thing", shard="thing", groups="things", planes="things", buffers="ids",
      overlaid="flag", conversions="things")  # fmt: skip
covers("Site.check_owners", tables="tables")(
    lambda bench: (evolve(_pool().site, overlaid=True).check_owners, {"tables": [PageTable(KV, [0, 1])]})
)
covers("Site.group", group="any text")(lambda bench: (_pool().site.group, {"group": KV}))
covers("Site.first_rows", start="count", stop="count or none")(
    lambda bench: (_pool().site.first_rows, {"start": 0, "stop": None})
)
covers("Site.page_rows", plane="thing")(lambda bench: (_pool().site.page_rows, {"plane": _pool().site.planes[0]}))
COMPONENT = {"name": "k", "dtype": "float16", "units": 1, "unit_bytes": 2, "tokens_per_row": 1, "rows": 0,
             "window": None, "format": "plain", "scales": [], "scaled_by": None}  # fmt: skip
plain("Component.__init__", Component, COMPONENT, name="text", dtype="thing", units="count", unit_bytes="count",
      tokens_per_row="count", rows="count", window="count or none", format="text", scales="things",
      scaled_by="thing or none")  # fmt: skip
K = Component("k", "float16", 1, 2)
plain("CacheSpec.__init__", CacheSpec, {"layers": {0: [K]}, "model": b""}, layers="mapping", model="long octets")
plain("CacheSpec.uniform", CacheSpec.uniform, {"num_layers": 2, "components": [K], "model": b""}, num_layers="count",
      components="things", model="long octets")  # fmt: skip
plain("CacheSpec.kv", CacheSpec.kv, {"num_layers": 2, "kv_heads": 2, "head_dim": 4, "dtype": "float16",
      "v_head_dim": None, "v_dtype": None, "model": b""}, num_layers="count", kv_heads="count", head_dim="count",
      dtype="thing", v_head_dim="count or none", v_dtype="thing or none", model="long octets")  # fmt: skip
plain("CacheSpec.mla", CacheSpec.mla, {"num_layers": 2, "latent_dim": 4, "dtype": "float16", "model": b""},
      num_layers="count", latent_dim="count", dtype="thing", model="long octets")  # fmt: skip
plain("CacheSpec.cast", SPEC.cast, {"dtype": "bfloat16", "computed": False}, dtype="thing", computed="flag")
plain("CacheSpec.component", SPEC.component, {"layer": 0, "name": "k"}, layer="count", name="any text")
plain("Holding.__init__", Holding, {"component": "k", "layers": [0], "units": range(1)}, component="text", layers="ids",
      units="ids")  # fmt: skip
plain("Shard.__init__", Shard, {"holdings": []}, holdings="things")
plain("Shard.units", shard(SPEC).units, {"layer": 0, "component": "k"}, layer="count", component="any text")
plain("Shard.check", shard(SPEC).check, {"spec": SPEC}, spec="thing")
plain("shard", shard, {"spec": SPEC, "tp": 1, "rank": 0, "layers": None, "units": None}, spec="thing", tp="count",
      rank="count", layers="tokens or none", units="mapping or none")  # fmt: skip
plain("stages", stages, {"spec": SPEC, "pp": 1}, spec="thing", pp="count")
plain("Buffer.__init__", Buffer, {"addr": 4096, "nbytes": 1, "device": "cpu", "owner": None}, addr="count",
      nbytes="count", device="text", owner="anything")  # fmt: skip

POOL = {"spec": SPEC, "shard": shard(SPEC), "pages": 2, "page_size": 4, "state_slots": 0, "layout": "NHD",
        "fused": False, "group": KV, "aux_slots": 1, "aux_bytes": 8, "allocator": None,
        "device": "cpu", "pinned": False}  # fmt: skip
plain("PagedPool.allocate", PagedPool.allocate, POOL, spec="thing", shard="thing", pages="count", page_size="count",
      state_slots="count", layout="thing", fused="flag", group="text", aux_slots="count",
      aux_bytes="count", allocator="function or none", device="thing", pinned="flag")  # fmt: skip


covers("PagedPool.__init__", site="thing", buffers="things", aux_slots="count", aux_bytes="count")(
    lambda bench: (lambda pool: (PagedPool, {"site": pool.site, "buffers": pool.buffers, "aux_slots": 1,
                                             "aux_bytes": 8}))(_pool())
)  # fmt: skip


def _tensors() -> dict[str, object]:
    tensors = {layer: {n: torch.zeros(2, 4, 2, 8, dtype=torch.float16) for n in "kv"} for layer in SPEC.layers}
    return {"spec": SPEC, "shard": shard(SPEC), "tensors": tensors, "layout": "NHD", "group": KV,
            "null_page": None, "state_group": "state", "aux_slots": 1, "aux_bytes": 8,
            "overlaid": False}  # fmt: skip


covers("PagedPool.from_tensors", spec="thing", shard="thing", tensors="mapping", layout="thing", group="text by layer",
       null_page="count or none", state_group="text by layer", aux_slots="count", aux_bytes="count", overlaid="flag")(
    lambda bench: (PagedPool.from_tensors, _tensors())
)  # fmt: skip
covers("PagedPool.view", plane="count")(lambda bench: (_pool().view, {"plane": 0}))
covers("PagedPool.read_aux", slot="count")(lambda bench: (_pool().read_aux, {"slot": 0}))
covers("PagedPool.write_aux", slot="count", data="octets")(lambda bench: (_pool().write_aux, {"slot": 0, "data": b""}))

plain("strategy", strategy, {"name": "auto"}, name="thing")
plain("transport", transport, {"name": "inproc"}, name="thing")
plain("between_processes", lambda name, device, host: between_processes(name, device, host),
      {"name": "inproc", "device": "cpu", "host": ""}, name="thing", device="thing", host="text")  # fmt: skip
plain("Transports", Transports, {"several": [InprocTransport()]}, several="things")
plain("register", register, {"part": LayerPipelined()}, part="thing")
plain("register_transport", register_transport, {"name": "junk", "factory": InprocTransport}, name="text",
      factory="function")  # fmt: skip
