"""What an endpoint announces of itself, and whether two endpoints can work together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from attrs import frozen

from ...channels import key_of
from ...core import VERSION, Alone, AnyFrame, Elected, Hello, PeerTable
from ...core.wire.frames import Refused, WireHolding
from ...core.wire.specs import (
    shard_to_wire,
    shards_from_wire,
    site_from_wire,
    site_to_wire,
    spec_from_wire,
    spec_to_wire,
)
from ...errors import (
    ConfigurationError,
    GeometryError,
    IncompatiblePeerError,
    RemoteProtocolError,
)
from ...geometry import CacheSpec, Shard, Site, conversions, difference, shards_as
from ...ids import Epoch, Rank, RegionId, Role, peer_name
from ...memory import MappedPool
from ...planning import rank_plan_of
from ...strategies import TransferPlanner
from ...trace import Observer
from ...transports import Transport
from ...transports.combining import lane_names, said_name
from .incarnation import Incarnation

KEPT = 64
"""Specs, instances and sites that are kept decoded, by value: the ranks of an instance say much the same."""

_spec = lru_cache(KEPT)(spec_from_wire)
_shards = lru_cache(KEPT)(shards_from_wire)
_site = lru_cache(KEPT)(site_from_wire)
_spec_to_wire = lru_cache(KEPT)(spec_to_wire)
_site_to_wire = lru_cache(KEPT)(site_to_wire)


@lru_cache(KEPT)
def _shards_to_wire(shards: tuple[Shard, ...]) -> tuple[tuple[WireHolding, ...], ...]:
    return tuple(shard_to_wire(one) for one in shards)


@frozen
class EndpointInfo:
    """One endpoint, as it introduces itself.

    Args:
        incarnation: its incarnation.
        role: which side.
        instance: name of the set of ranks it belongs to.
        rank: its index there.
        shards: what every rank of the instance holds.
        site: its pool.
        regions: its pool's registered buffers.
        paths: what it can use.
        verdict: who says how its rooms ended.
        flags: decode: where its flag page is; empty: it has none.
        slot_bytes: prefill: bytes of a staging slot.
        queues: prefill: its kernels queue copies on a device, and keep no thread meanwhile.
        ring_region, ring_bytes, lease_bytes: decode: the ring, and its largest lease.
        conversions: prefill: names of those that its kernels know.
        device: where its pool lies.
        prepare: prefill: makes its kernels ready for a peer's cache, or its mapped pool. Blocks; on any thread.
    """

    incarnation: Incarnation
    address: str
    role: Role
    instance: str
    rank: Rank
    shards: tuple[Shard, ...]
    site: Site
    regions: tuple[RegionId, ...]
    transport: Transport
    paths: tuple[TransferPlanner, ...]
    verdict: type[Elected] | type[Alone] = Elected
    flags: bytes = b""
    slot_bytes: int = 0
    queues: bool = False
    ring_region: RegionId = RegionId(0)  # noqa: RUF009 - a NewType of int
    ring_bytes: int = 0
    lease_bytes: int = 0
    conversions: tuple[str, ...] = ()
    device: str = "cpu"
    prepare: Callable[[CacheSpec, MappedPool | None], None] = lambda _spec, _mapped: None

    @property
    def epoch(self) -> Epoch:
        """Its incarnation's name."""
        return self.incarnation.epoch

    def hello(self) -> Callable[[bytes], Hello]:
        """Makes the ``Hello`` towards an incarnation; everything but that is encoded once."""
        spec, shards, site = _spec_to_wire(self.site.spec), _shards_to_wire(self.shards), _site_to_wire(self.site)
        descriptor = self.transport.local_descriptor()

        def hello(dst: bytes) -> Hello:
            return Hello(
                src=self.epoch,
                dst=dst,
                version=VERSION,
                address=self.address,
                role=self.role,
                instance=self.instance,
                rank=self.rank,
                host=self.incarnation.process.host,
                pid=self.incarnation.process.pid,
                started=self.incarnation.process.started,
                born=self.incarnation.born,
                spec=spec,
                shards=shards,
                site=site,
                regions=self.regions,
                transport=self.transport.name,
                descriptor=descriptor,
                paths=tuple((p.name, p.version) for p in self.paths),
                conversions=self.conversions,
                verdict=self.verdict.name,
                flags=self.flags,
                slot_bytes=self.slot_bytes,
                queues=self.queues,
                ring_region=self.ring_region,
                ring_bytes=self.ring_bytes,
                lease_bytes=self.lease_bytes,
            )

        return hello

    def admit(self, hello: Hello) -> None:
        """Raise unless we can work with the sender of a ``Hello``.

        Raises:
            IncompatiblePeerError: names the one field that differs.
            RemoteProtocolError: what it says of itself cannot be.
        """
        spec = _spec(hello.spec)
        if hello.role == self.role:
            check_spec(self.site.spec, spec)
        else:
            self._check_conversion(spec, hello.conversions)
        shards = _shards(hello.shards, spec)
        if not hello.rank < len(shards):
            raise IncompatiblePeerError("rank", f"below {len(shards)}", hello.rank)
        site = _site(hello.site, spec, shards[hello.rank])
        if len(hello.regions) not in (0, len(site.buffers)):
            raise RemoteProtocolError(f"{len(hello.regions)} regions for a pool of {len(site.buffers)} buffers")
        if hello.lease_bytes > hello.ring_bytes:
            raise RemoteProtocolError(f"leases of {hello.lease_bytes} bytes in a ring of {hello.ring_bytes}")
        if hello.role not in ("prefill", "decode"):
            raise IncompatiblePeerError("role", "prefill or decode", hello.role)
        if hello.role == self.role:
            self._admit_sibling(hello, shards)
            return
        if not set(lane_names(hello.transport)) & set(lane_names(self.transport.name)):
            raise IncompatiblePeerError("transport", said_name(self.transport), hello.transport)
        ours = {(p.name, p.version) for p in self.paths}
        if not ours & set(hello.paths):
            raise IncompatiblePeerError("paths", sorted(ours), sorted(hello.paths))
        # Only of the two of us: every pair of ranks asks for itself.
        decode = self.role == "decode"
        writers, target = (shards, self.site.shard) if decode else (self.shards, shards[hello.rank])
        held, wanted = (spec, self.site.spec) if decode else (self.site.spec, spec)
        try:
            rank_plan_of(wanted, shards_as(tuple(writers), held, wanted), target, 0)
        except ConfigurationError as exc:
            found = f"{len(writers)} of them, and {exc}; give each rank the shards of all (shards=)"
            raise IncompatiblePeerError("shards", "prefill ranks that hold a decode rank's cache", found) from exc

    def _check_conversion(self, theirs: CacheSpec, known: Collection[str]) -> None:
        """Raise an IncompatiblePeerError unless prefill's cache is decode's, or prefill converts it to that."""
        decode = self.role == "decode"
        source, target = (theirs, self.site.spec) if decode else (self.site.spec, theirs)
        found = difference(source, target)
        if found is not None:
            values = (found.target, found.source) if decode else (found.source, found.target)
            raise IncompatiblePeerError(found.field, *values)
        needed = conversions(source, target)
        here, there = (needed, set(known)) if decode else (set(self.conversions), needed)
        missing = needed - set(known if decode else self.conversions)
        if missing:
            raise IncompatiblePeerError("conversions", sorted(here), sorted(there))

    def _admit_sibling(self, hello: Hello, shards: Sequence[Shard]) -> None:
        if hello.instance != self.instance:
            raise IncompatiblePeerError("role", f"{self.role} of {self.instance}", f"{hello.role} of {hello.instance}")
        if tuple(shards) != self.shards:
            raise IncompatiblePeerError("shards", f"{len(self.shards)} of our instance", f"{len(shards)} others")
        if hello.verdict != self.verdict.name:
            raise IncompatiblePeerError("verdict", self.verdict.name, hello.verdict)


def check_spec(ours: CacheSpec, theirs: CacheSpec) -> None:
    """Raise an IncompatiblePeerError that names the first field in which the specs of two ranks of one side differ."""
    found = difference(ours, theirs)
    if found is not None:
        raise IncompatiblePeerError(found.field, found.source, found.target)
    for layer, components in ours.layers.items():
        for a, b in zip_longest(components, theirs.layers[layer]):
            if a != b:
                raise IncompatiblePeerError(f"spec.layers[{layer}]", a, b)


@frozen
class RemoteEndpoint:
    """Another endpoint, decoded once: what its ``Hello`` said."""

    hello: Hello
    spec: CacheSpec
    shards: tuple[Shard, ...]
    site: Site

    @classmethod
    def of(cls, hello: Hello) -> RemoteEndpoint:
        """From a ``Hello`` that was admitted."""
        spec = _spec(hello.spec)
        shards = _shards(hello.shards, spec)
        return cls(hello, spec, shards, _site(hello.site, spec, shards[hello.rank]))

    @property
    def epoch(self) -> Epoch:
        """Its incarnation."""
        return Epoch(self.hello.src)

    @property
    def name(self) -> str:
        """For messages."""
        return f"peer {peer_name(self.hello.src, self.hello.instance, self.hello.rank)}"

    def shards_as(self, spec: CacheSpec) -> tuple[Shard, ...]:
        """What each rank of its instance holds, as a spec to which it converts its cache names it."""
        return shards_as(self.shards, self.spec, spec)


def page_rows(site: Site) -> int:
    """Rows of the largest page of decode's pool: where segments are cut."""
    return max((g.rows_per_page for g in site.groups), default=1)


def check_instance(shards: Sequence[Shard], rank: int, site: Site) -> None:
    """Raise a GeometryError unless the pool is what the instance says this rank holds."""
    if not 0 <= rank < len(shards):
        raise GeometryError(f"rank {rank} of an instance of {len(shards)} ranks")
    if shards[rank] != site.shard:
        raise GeometryError(f"rank {rank}: the pool's shard is not the one that the instance's list has for it")


def check_key(frame: AnyFrame, key: str, peers: PeerTable[Any], observer: Observer) -> None:
    """A proved key speaks only for those whose address names it.

    Raises:
        RemoteProtocolError: the frame is in the name of another address.
    """
    address = frame.address if isinstance(frame, Hello | Refused) else peers.address(Epoch(frame.src))
    if address is not None and key_of(address) != key:
        observer.count("frames.forged")
        raise RemoteProtocolError(f"{type(frame).__name__} in the name of {address} from the key {key}")
