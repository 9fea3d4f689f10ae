"""The configuration of a demo, and the messages between its processes."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from ....core import Verify, check_verify
from ....errors import ConfigurationError
from ....geometry import CONVERSIONS
from ....geometry.formats import SCALED
from ....strategies import Incremental, strategy

Role = Literal["prefill", "decode", "reference"]
Injection = Literal["swap-heads", "negate"]
Model = Literal["llama", "mla", "hybrid", "mamba", "window"]
CACHES = ("float32", "bfloat16", "float16")
"""Dtypes of prefill's cache."""
Kind = Literal["ready", "prefilled", "released", "arrived", "decoded", "done", "failed"]


@frozen
class DemoConfig:
    """One demo.

    Args:
        model: its architecture: ``"llama"`` (grouped-query attention), ``"mla"`` (DeepSeek-V3: latents), ``"hybrid"``
            (Qwen3-Next: every other layer is a gated delta net), ``"mamba"`` (Falcon-H1: Mamba 2 and attention in every
            layer), ``"window"`` (Qwen3, where every other layer sees only the last 128 tokens).
        prefill_tp: tensor-parallel processes of a prefill stage.
        prefill_pp: pipeline stages of prefill, each of which sends its own layers.
        decode_tp: tensor-parallel processes of a decode stage.
        decode_pp: pipeline stages of decode.
        strategy: the strategy's name, for example ``"staged"``.
        transport: a registered transport's name, several joined by ``+``, or ``"auto"``.
        device: ``"cpu"``, or ``"cuda"``: models and caches are on GPUs, which ranks may share.
        transport_module: a module that registers the transport; it is imported first.
        dtype: dtype of prefill's cache: ``float32``, ``bfloat16`` or ``float16``. The model computes in float32, reads
            its cache in this dtype, and its sums differ little between splits. None: ``bfloat16`` if ``decode_dtype``
            is a float8, else ``float32``.
        decode_dtype: dtype of decode's cache, into which prefill's is converted; None: as prefill's.
        requests: number of prompts; each is the first of a conversation.
        turns: prompts per conversation. Each is the previous prompt, its answer, and ``turn_tokens`` more.
        turn_tokens: tokens that a later prompt adds.
        both_ways: before it computes a later prompt, prefill takes the rows that it lacks from decode: of the answer,
            and of the prompt if another instance computed that. Both directions send only what the other side lacks.
        prefill_instances: prefill instances that take turns, each with all of prefill's processes.
        evict: the turn before which decode gives the pages of all conversations to others; None: it never does.
        max_new_tokens: greedy tokens per prompt; prefill computes the first.
        prompt_tokens: length of the first prompt; the others are up to 127 tokens longer.
        chunk_tokens: tokens of one forward pass of prefill.
        prefill_page_size: rows of a page on the prefill side.
        decode_page_size: rows of a page on the decode side.
        layers: layers of the model.
        kv_heads: KV heads of the model, which has twice as many query heads.
        head_dim: elements of one head.
        inject: the error to introduce on the prefill side, after the model's pass and before the transfer. Prefill's
            own cache, the reference for bytes, stays right. ``"swap-heads"``: the gather exchanges KV heads 0 and 1,
            which only path ``staged`` allows; the pages stay right. ``"negate"``: latents, states, or rows inside a
            window change sign.
        layer_group: layers per group, with the schedule ``layer_pipelined``.
        trace: a file for the endpoints' spans, which Perfetto reads.
        verify: the checksum mode of the endpoints.
        seed: seed of the model's weights and of the order of pages.
        timeout_s: seconds after which the demo fails.
    """

    model: Model = "llama"
    prefill_tp: int = 4
    prefill_pp: int = 1
    decode_tp: int = 1
    decode_pp: int = 1
    strategy: str = "staged"
    transport: str = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    transport_module: str | None = None
    dtype: str | None = None
    decode_dtype: str | None = None
    requests: int = 4
    turns: int = 1
    turn_tokens: int = 48
    both_ways: bool = False
    prefill_instances: int = 1
    evict: int | None = None
    max_new_tokens: int = 32
    prompt_tokens: int = 384
    chunk_tokens: int = 150
    prefill_page_size: int = 16
    decode_page_size: int = 16
    layers: int = 4
    kv_heads: int = 8
    head_dim: int = 32
    inject: Injection | None = None
    layer_group: int = 1
    trace: str | None = None
    verify: Verify = "off"
    seed: int = 0
    timeout_s: float = 300.0

    def __attrs_post_init__(self) -> None:
        for name in ("prefill_tp", "decode_tp"):
            tp = getattr(self, name)
            if tp < 1 or (self.kv_heads % tp and self.model != "mamba"):
                raise ConfigurationError(
                    f"{name} {tp}: transformers cuts {self.kv_heads} KV heads only over a divisor of {self.kv_heads}"
                )
        positive = (
            "requests",
            "turns",
            "turn_tokens",
            "prefill_instances",
            "max_new_tokens",
            "chunk_tokens",
            "prefill_page_size",
            "decode_page_size",
            "layers",
            "layer_group",
        )
        self._check_stages()
        for name in (*positive, "head_dim", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} must be positive, not {getattr(self, name)}")
        if not self.chunk_tokens < self.prompt_tokens <= 4096:
            raise ConfigurationError(
                f"prompt_tokens {self.prompt_tokens} must be more than chunk_tokens {self.chunk_tokens}, at most 4096"
            )
        if max(self.lengths(self.turns - 1)) > 8000:
            raise ConfigurationError(
                f"turns {self.turns}: the last prompt has {max(self.lengths(self.turns - 1))} tokens"
            )
        if self.device == "cuda" and self.inject is not None:
            raise ConfigurationError("device 'cuda' supports no inject")
        check_verify(self.verify)
        self._check_dtype()
        if self.inject == "swap-heads" and strategy(self.strategy).path != "staged":
            raise ConfigurationError(
                f"inject {self.inject!r} is a wrong gather: it needs path staged, not {self.strategy!r}"
            )
        if self.inject is not None and (self.kv_heads < 2 or self.max_new_tokens < 2):
            raise ConfigurationError(
                f"inject {self.inject!r} needs 2 KV heads and 2 new tokens (the first is prefill's), "
                f"not {self.kv_heads} and {self.max_new_tokens}"
            )
        self._check_turns()
        if self.inject == "swap-heads" and (self.model != "llama" or self.prefill_pp > 1):
            raise ConfigurationError("inject 'swap-heads' is for the model 'llama' without a pipeline")

    def _check_turns(self) -> None:
        """Rows go back only in a conversation of several turns, which needs K and V of all tokens in every layer."""
        if self.turns > 1 and (self.model != "llama" or self.prefill_pp * self.decode_pp > 1):
            raise ConfigurationError(f"turns {self.turns}: only the model 'llama' without a pipeline has several")
        if self.both_ways and self.turns < 2:
            raise ConfigurationError("both_ways needs a second turn, for which rows go back")
        if not self.both_ways and (self.prefill_instances != 1 or self.evict is not None):
            raise ConfigurationError("prefill_instances and evict need both_ways")
        if self.evict is not None and not 0 < self.evict < self.turns:
            raise ConfigurationError(f"evict {self.evict}: a turn after turn 0, and below {self.turns}, is needed")

    def _check_dtype(self) -> None:
        """A cache of another dtype is shown alone: without later turns, errors on purpose, or states."""
        if self.kept_dtype not in CACHES:
            raise ConfigurationError(f"dtype {self.kept_dtype!r}: prefill's cache has one of {', '.join(CACHES)}")
        if not self.rounds:
            return
        pair = self.kept_dtype, self.decoded_dtype
        if pair not in CONVERSIONS and pair[0] != pair[1]:
            raise ConfigurationError(f"decode_dtype {pair[1]!r}: there is no conversion from {pair[0]} to it")
        if self.turns > 1 or self.inject is not None or self.model not in ("llama", "mla", "window"):
            raise ConfigurationError(
                "dtype and decode_dtype support the models 'llama', 'mla', 'window', one turn, no inject"
            )

    def _check_stages(self) -> None:
        """Each stage must have the kinds of layers that alternate."""
        kinds = 2 if self.model in ("hybrid", "window") else 1
        if self.layers % kinds:
            raise ConfigurationError(f"layers {self.layers}: the model {self.model!r} alternates {kinds} kinds of them")
        for name in ("prefill_pp", "decode_pp"):
            pp = getattr(self, name)
            if pp < 1 or self.layers % (kinds * pp):
                raise ConfigurationError(f"{name} {pp} does not divide {self.layers // kinds} times {kinds} layers")

    @property
    def kept_dtype(self) -> str:
        """Of prefill's cache."""
        if self.dtype is not None:
            return self.dtype
        return "bfloat16" if self.decode_dtype in SCALED else "float32"

    @property
    def decoded_dtype(self) -> str:
        """Of decode's cache."""
        return self.decode_dtype or self.kept_dtype

    @property
    def selected(self) -> str:
        """The strategy's name; where rows go both ways, each side sends what the other lacks."""
        incremental = isinstance(strategy(self.strategy).selection, Incremental)
        return self.strategy if incremental or not self.both_ways else f"{self.strategy}+incremental"

    @property
    def rounds(self) -> bool:
        """Whether a cache has another dtype than the model's computation."""
        return (self.kept_dtype, self.decoded_dtype) != ("float32", "float32")

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Tokens of every first prompt; they differ, so that last pages and chunks are partly filled."""
        return tuple(self.prompt_tokens + 37 * i % 128 for i in range(self.requests))

    def lengths(self, turn: int) -> tuple[int, ...]:
        """Tokens of every prompt of a turn."""
        return tuple(n + turn * (self.max_new_tokens + self.turn_tokens) for n in self.prompt_lengths)

    def kept(self, turn: int) -> tuple[int, ...]:
        """Tokens of every prompt of a turn that decode has from the turn before: its whole pages.

        Of an answer, decode computes all but the last token's cache.
        """
        if turn == 0:
            return (0,) * self.requests
        size = self.decode_page_size
        return tuple((n + self.max_new_tokens - 1) // size * size for n in self.lengths(turn - 1))

    def lacking(self, turn: int) -> tuple[int, ...]:
        """Tokens of every prompt of a turn that decode cannot have."""
        lengths = self.lengths(turn)
        if turn == self.evict:
            return lengths
        return tuple(n - had for n, had in zip(lengths, self.kept(turn), strict=True))

    def computed(self, turn: int) -> tuple[int, ...]:
        """Tokens of every prompt of a turn that the prefill instance whose turn it is has computed or taken before."""
        earlier = turn - self.prefill_instances
        return self.lengths(earlier) if earlier >= 0 else (0,) * self.requests

    def returned(self, turn: int) -> tuple[int, ...]:
        """Tokens of every prompt of a turn that decode has and prefill lacks: all after prefill's whole pages."""
        if not self.both_ways or turn in (0, self.evict):
            return (0,) * self.requests
        size, pairs = self.prefill_page_size, zip(self.kept(turn), self.computed(turn), strict=True)
        return tuple(there - min(here, there) // size * size for there, here in pairs)

    @property
    def passes(self) -> int:
        """Number of forward passes of prefill: each turn computes only the tokens that neither side has."""
        passes = 0
        for turn in range(self.turns):
            back = self.kept(turn) if any(self.returned(turn)) else (0,) * self.requests
            each = zip(self.lengths(turn), self.computed(turn), back, strict=True)
            passes += sum(-(-(n - max(here, there)) // self.chunk_tokens) for n, here, there in each)
        return passes

    @property
    def members(self) -> tuple[tuple[Role, int, int], ...]:
        """Role, rank and world of every process."""
        worlds: tuple[tuple[Role, int], ...] = (("prefill", self.prefills), ("decode", self.decodes), ("reference", 1))
        return tuple((role, rank, world) for role, world in worlds for rank in range(world))

    @property
    def prefills(self) -> int:
        """Prefill processes: by instance, in it stage by stage, inside a stage by tensor-parallel rank."""
        return self.prefill_instances * self.prefill_tp * self.prefill_pp

    @property
    def decodes(self) -> int:
        """Decode processes, in the same order."""
        return self.decode_tp * self.decode_pp

    def ranks(self, role: Role, turn: int) -> range:
        """The processes of a role that serve a turn: prefill instances take turns."""
        tp, pp = self.grid(role)
        instance = turn % self.prefill_instances if role == "prefill" else 0
        return range(instance * tp * pp, (instance + 1) * tp * pp)

    def grid(self, role: Role) -> tuple[int, int]:
        """Tensor-parallel size and pipeline stages of a role."""
        of = {"prefill": (self.prefill_tp, self.prefill_pp), "decode": (self.decode_tp, self.decode_pp)}
        return of.get(role, (1, 1))


@frozen
class Job:
    """What the parent gives to all processes.

    Args:
        config: the demo.
        work: the folder for all files.
        parent: the parent's process id.
        store_port: port of the parent's ``TCPStore``.
        gpus: the names of the GPUs in CUDA_VISIBLE_DEVICES.
    """

    config: DemoConfig
    work: str
    parent: int
    store_port: int
    gpus: tuple[str, ...] = ()


@frozen
class Message:
    """One line from a process to the parent.

    Args:
        role: the role of the process.
        rank: its rank in that role.
        pid: its process id.
        kind: ``ready``, ``done`` or ``failed``; or, once per request: ``prefilled``, ``released``, ``arrived`` or
            ``decoded``.
        text: with ``failed``: the reason.
        error: with ``failed``: the exception's class; empty if the process ended without one.
    """

    role: Role
    rank: int
    pid: int
    kind: Kind
    text: str = ""
    error: str = ""


def steps(config: DemoConfig) -> int:
    """The number of messages other than ``failed`` of a successful demo."""
    busy = sum(len(config.ranks(role, 0)) for role in ("prefill", "decode"))
    requests = config.turns * config.requests * (2 * busy + 1)
    return 2 * (config.prefills + config.decodes + 1) + requests
