"""What one benchmark of a transfer moves, between whom."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from disagg_kv.core import Verify, check_verify
from disagg_kv.errors import ConfigurationError
from disagg_kv.geometry import CONVERSIONS, CacheSpec, Shard, shard
from disagg_kv.ids import Role
from disagg_kv.memory import Layout
from disagg_kv.strategies import Explanation, explain, strategy

WIRE = "staged, wire only"
"""A run of ``staged`` in which gather and scatter copy nothing: what is left is what the wire takes."""


@frozen
class TransferShape:
    """One request between two instances, moved again and again.

    Args:
        transport: a registered transport's name.
        device: ``"cpu"``, or ``"cuda"``: each rank has one of the GPUs, or its share of one.
        strategies: those that are compared, in this order within each repeat.
        prefill_tp, decode_tp: ranks of the two instances, each in a process of its own.
        tokens: rows of the request.
        layers, kv_heads, head_dim, dtype: the cache.
        decode_dtype: of decode's cache, into which prefill's is converted, without scales; None: the same.
        page_size, decode_page_size: tokens of a page.
        layout, decode_layout: order inside a page.
        compute_s: emulated compute of all layers: one is handed over after another, evenly; 0: all at once.
        announced: rows are announced before they are handed over, as by an engine that computes meanwhile: the
            grants' round trip is over by then.
        queued_s: on GPUs, with ``announced``: seconds for which the engine's GPU still computes the rows after they are
            handed over, as by an engine whose host runs ahead; 0: they are final.
        slots, slot_bytes: staging of each prefill rank; None: the endpoint's own choice.
        ring_bytes: of each decode rank; None: the endpoint's own choice.
        group: layers of a group where a schedule cuts them; None: as it chooses.
        programs: on GPUs: most programs of a copy into mapped pages; None: one per multiprocessor.
        busy: during a transfer, each rank's engine thread runs Python code between two polls.
        decode_load: during a transfer, each decode rank runs steps like those of a decode engine between two polls.
        wire_bytes_per_s: emulated wire of each prefill rank; None: the transport as it is.
        verify: with ``"sampled"`` or ``"full"``, each strategy is measured once more with that verification.
        repeats: measured transfers per strategy.
        timeout_s: what takes longer than this is a failure.
    """

    transport: str = "shm"
    device: str = "cpu"
    strategies: tuple[str, ...] = ("slice", "staged")
    prefill_tp: int = 4
    decode_tp: int = 1
    tokens: int = 1024
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    decode_dtype: str | None = None
    page_size: int = 64
    decode_page_size: int = 64
    layout: Layout = "NHD"
    decode_layout: Layout = "NHD"
    compute_s: float = 0.0
    announced: bool = False
    queued_s: float = 0.0
    slots: int = 8
    slot_bytes: int | None = None
    ring_bytes: int | None = None
    group: int | None = None
    programs: int | None = None
    busy: bool = False
    decode_load: bool = False
    wire_bytes_per_s: float | None = None
    verify: Verify = "off"
    repeats: int = 20
    timeout_s: float = 120.0

    @property
    def runs(self) -> tuple[str, ...]:
        """What each repeat moves, in this order."""
        wire = (WIRE,) if "staged" in self.strategies else ()
        return (*self.strategies, *self.again, *wire)

    @property
    def again(self) -> tuple[str, ...]:
        """Runs of strategies in another way."""
        return tuple(self.verified.values())

    @property
    def verified(self) -> Mapping[str, str]:
        """Per strategy the name of its run with verification, where there is one."""
        return {} if self.verify == "off" else {name: f"{name}, verify {self.verify}" for name in self.strategies}

    def ranks(self, role: Role) -> int:
        """How many there are."""
        return self.prefill_tp if role == "prefill" else self.decode_tp

    def pages(self, role: Role) -> tuple[int, Layout]:
        """Tokens of a page and the order inside it."""
        return (self.page_size, self.layout) if role == "prefill" else (self.decode_page_size, self.decode_layout)

    def spec(self, role: Role = "prefill") -> CacheSpec:
        """The whole cache, as a role holds it."""
        spec = CacheSpec.kv(self.layers, self.kv_heads, self.head_dim, self.dtype)
        return spec if role == "prefill" or self.decode_dtype is None else spec.cast(self.decode_dtype)

    def shards(self, role: Role) -> tuple[Shard, ...]:
        """What each rank holds."""
        tp = self.ranks(role)
        return tuple(shard(self.spec(role), tp=tp, rank=rank) for rank in range(tp))

    def explain(self) -> Explanation:
        """Who sends how much to whom, and which paths can.

        Raises:
            ConfigurationError: numbers that cannot be, a strategy that is unknown, named twice or cannot do this.
        """
        named = [strategy(name).path for name in self.strategies]
        if not named or len(set(self.strategies)) < len(named):
            raise ConfigurationError(f"strategies {list(self.strategies)}: name at least one, and each once")
        if self.repeats < 1 or self.timeout_s <= 0:
            raise ConfigurationError(f"{self.repeats} repeats in at most {self.timeout_s} s")
        check_verify(self.verify)
        if self.decode_dtype not in (None, self.dtype) and (self.dtype, self.decode_dtype) not in CONVERSIONS:
            raise ConfigurationError(f"there is no conversion from {self.dtype!r} to {self.decode_dtype!r}")
        if self.busy and self.decode_load:
            raise ConfigurationError("busy and decode_load: decode's engine thread does one of them")
        if self.programs is not None and (self.device == "cpu" or self.programs < 1):
            raise ConfigurationError(f"{self.programs} programs of a copy: at least one, and only on GPUs")
        if self.queued_s < 0 or (self.queued_s and (self.device == "cpu" or not self.announced or self.compute_s)):
            raise ConfigurationError(
                f"{self.queued_s} s of queued work: only of GPUs, of rows that are announced, and without compute_s"
            )
        if not 0 <= self.compute_s < self.timeout_s:
            raise ConfigurationError(f"{self.compute_s} s of compute in at most {self.timeout_s} s")
        found = explain(
            self.spec(),
            self.shards("prefill"),
            self.shards("decode"),
            self.tokens,
            (self.page_size, self.decode_page_size),
            order=(self.layout, self.decode_layout),
            decode_spec=self.spec("decode"),
        )
        for path in named:
            if path in found.refused:
                raise ConfigurationError(f"path {path!r} cannot: {found.refused[path]}")
        return found
