"""The states of Mamba 2 layers and of gated delta nets, in parts that tensor parallelism cuts by themselves.

vLLM gives each such layer a tensor of bytes, ``[blocks, 1, 1, bytes]``. In each block lie the layer's states, one after
the other: a conv state ``[rows, channels]`` and a recurrent state ``[heads, ...]``. The channels are blocks side by
side, each cut into heads or groups of its own: ``x``, ``b`` and ``c`` of Mamba 2; ``q``, ``k`` and ``v`` of a gated
delta net. On a rank lie its heads of each block. With another layout, which ``VLLM_SSM_CONV_STATE_LAYOUT`` names, the
conv state is ``[channels, rows]``. See ``MambaBase`` and ``MambaStateShapeCalculator`` of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from attrs import frozen

from ...errors import UnsupportedError
from ...geometry import Component, even_units

KINDS = {"MAMBA2": ("x", "b", "c"), "GDN_ATTN": ("q", "k", "v")}
"""vLLM's kinds of states, and the blocks of their channels in order."""

GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
"""Names under which models' configurations have the groups of B and C."""


@frozen
class StateShape:
    """A layer's states.

    Args:
        kind: one of :data:`KINDS`.
        blocks: name, units in the whole model and channels of a unit, of each block of channels.
        rows: of the conv state.
        heads: of the recurrent state, in the whole model.
        size: elements of a head.
        dtypes: of both states.
        channels_first: the conv state has rows inside channels.
    """

    kind: str
    blocks: tuple[tuple[str, int, int], ...]
    rows: int
    heads: int
    size: int
    dtypes: tuple[torch.dtype, torch.dtype]
    channels_first: bool

    def parts(self, pages: torch.Tensor, tp: int, rank: int) -> Iterator[tuple[Component, torch.Tensor]]:
        """The components, and where this rank has them: ``[blocks, units, rows, elements]``.

        Raises:
            UnsupportedError: a tensor that is no such bytes.
        """
        held = [len(even_units(units, tp, rank)) for _, units, _ in self.blocks]
        widths = [of * channels for of, (_, _, channels) in zip(held, self.blocks, strict=True)]
        counts = self.rows * sum(widths), len(even_units(self.heads, tp, rank)) * self.size
        sizes = [count * dtype.itemsize for count, dtype in zip(counts, self.dtypes, strict=True)]
        given = pages.dim() == 4 and pages.element_size() == 1 and pages.shape[1:3] == (1, 1) and pages.stride(3) == 1
        if not given or pages.shape[3] < sum(sizes):
            raise UnsupportedError(
                f"states in a tensor {tuple(pages.shape)} of {pages.dtype} with strides {pages.stride()}; "
                f"[blocks, 1, 1, {sum(sizes)} bytes] is needed"
            )
        conv = pages[:, 0, 0, : sizes[0]].view(self.dtypes[0])
        recurrent = pages[:, 0, 0, sizes[0] : sum(sizes)].view(self.dtypes[1])
        firsts = accumulate(widths, initial=0)
        for (name, units, channels), first, width in zip(self.blocks, firsts, widths, strict=False):
            if self.channels_first:
                block = conv.narrow(1, first * self.rows, width * self.rows)
                block = block.view(len(conv), -1, 1, channels * self.rows)
            else:
                block = conv.view(len(conv), self.rows, -1).narrow(2, first, width)
                block = block.view(len(conv), self.rows, -1, channels).transpose(1, 2)
            yield self._component(f"conv.{name}", units, block), block
        whole = recurrent.view(len(recurrent), -1, 1, self.size)
        yield self._component("state", self.heads, whole), whole

    def _component(self, name: str, units: int, of: torch.Tensor) -> Component:
        order = " channels first" if self.channels_first else ""
        return Component(
            name, str(of.dtype).removeprefix("torch."), units, of.shape[3] * of.element_size(), tokens_per_row=0,
            rows=of.shape[2], format=f"vllm {self.kind.lower()}{order}",
        )  # fmt: skip


def state_shape(name: str, spec: Any, config: Any, *, tp: int, channels_first: bool) -> StateShape:
    """From vLLM's ``MambaSpec``.

    Args:
        name: of the layer, for errors.
        spec: of the layer.
        config: the model's, for the number of groups of B and C.
        tp: number of tensor-parallel ranks.
        channels_first: vLLM's layout of conv states.

    Raises:
        UnsupportedError: states of another kind, or kept in a way that the connector does not move.
    """
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    refused = {
        f"states of the kind {kind} in {len(spec.shapes)} tensors": kind not in KINDS or len(spec.shapes) != 2,
        f"states in its prefix cache (mamba_cache_mode {spec.mamba_cache_mode!r}); start it with "
        "--no-enable-prefix-caching": spec.mamba_cache_mode != "none",
        "speculative states": spec.num_speculative_blocks > 0,
        "states that every rank holds": getattr(spec, "tp_replicated", False),
    }
    for what, used in refused.items():
        if used:
            raise UnsupportedError(f"layer {name}: DisaggKVConnector does not move vLLM's {what}")
    conv, (heads, outer, inner) = spec.shapes
    channels, rows = conv if channels_first else reversed(conv)
    other = (channels - heads * outer) // 2
    first, second, third = KINDS[kind]
    if kind == "GDN_ATTN":
        keys = other // inner * tp
        blocks = ((first, keys, inner), (second, keys, inner), (third, heads * tp, outer))
    else:
        groups = _groups(name, config, other // inner, tp)
        blocks = ((first, heads * tp, outer), (second, groups, inner), (third, groups, inner))
    return StateShape(kind, blocks, rows, heads * tp, outer * inner, spec.dtypes, channels_first)


def _groups(name: str, config: Any, local: int, tp: int) -> int:
    """Groups of B and C of the whole model; a rank has some, or each rank has the only one."""
    given = next((one for key in GROUPS if (one := getattr(config, key, None)) is not None), local if tp == 1 else None)
    if given is None:
        raise UnsupportedError(f"layer {name}: the model's configuration does not say its groups ({', '.join(GROUPS)})")
    if local != max(1, given // tp):
        raise UnsupportedError(f"layer {name}: {local} groups of states on a rank of {tp}, of {given} in all")
    return int(given)
