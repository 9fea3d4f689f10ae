"""The tiny cache of a simulated world: attention, and in some worlds recurrent states and sliding windows."""

from __future__ import annotations

import random
from functools import lru_cache

from attrs import evolve, frozen

from disagg_kv.geometry import CacheSpec, Component
from disagg_kv.ids import LayerId

HYBRID, SLIDING = 0.2, 0.15
"""Shares of caches with states, and with a window."""


@frozen
class States:
    """What every other layer keeps of a room beside its tokens, or instead of them.

    Args:
        units: of each state; 1: ranks that share tensor parallelism all hold it whole.
        rows: of the first of two states; the second has one.
        alone: those layers have no attention, so that a stage of a pipeline may hold nothing but states.
    """

    units: int
    rows: int
    alone: bool


@frozen
class Model:
    """A tiny cache: layers, and bytes of a K and a V unit (V 0: one MLA latent).

    Args:
        layers, heads, k_bytes, v_bytes: of attention.
        states: of layers 0, 2 ...; None: there are none.
        window: of this many last tokens, in the last layer and every other one before; 0: all see all tokens.
    """

    layers: int
    heads: int
    k_bytes: int
    v_bytes: int
    states: States | None = None
    window: int = 0


@lru_cache(1024)
def spec_of(model: Model) -> CacheSpec:
    """The cache."""
    full = [Component("k" if model.v_bytes else "latent", "int8", model.heads, model.k_bytes)]
    if model.v_bytes:
        full.append(Component("v", "int8", model.heads, model.v_bytes))
    sliding = [evolve(c, window=model.window) for c in full] if model.window else full
    layers: dict[LayerId, list[Component]] = {}
    for number in range(model.layers):
        attention = sliding if (model.layers - number) % 2 else full
        states = _states(model.states) if model.states is not None and number % 2 == 0 else []
        layers[LayerId(number)] = states if states and model.states and model.states.alone else [*attention, *states]
    return CacheSpec(layers)


def _states(states: States) -> list[Component]:
    conv = Component("conv", "int8", states.units, 4, tokens_per_row=0, rows=states.rows)
    return [conv, Component("ssm", "int8", states.units, 24, tokens_per_row=0, rows=1)]


@lru_cache(1024)
def slot_row_of(model: Model) -> int:
    """The most bytes of a row: of tokens in all layers, or of states in one."""
    of = spec_of(model).layers.values()
    tokens = sum(c.units * c.unit_bytes for cs in of for c in cs if not c.rows)
    return max(tokens, *(sum(c.units * c.unit_bytes for c in cs if c.rows) for cs in of))


def draw_model(rng: random.Random) -> Model:
    """Some cache."""
    layers = rng.choice((1, 2, 2, 3, 4))
    if rng.random() < 0.2:
        model = Model(layers, 1, rng.choice((16, 24)), 0)
    else:
        heads = rng.choice((1, 2, 2, 4, 4, 6))
        model = Model(layers, heads, rng.choice((8, 12)), rng.choice((8, 12)))
    if rng.random() < HYBRID:
        units = rng.choice((1, model.heads, model.heads))
        model = evolve(model, states=States(units, rng.choice((1, 3)), layers > 1 and rng.random() < 0.5))
    if rng.random() < SLIDING:
        model = evolve(model, window=rng.choice((1, 3, 6, 11)))
    return model


def fits(model: Model, tp: int, pp: int) -> bool:
    """Whether the cache divides over these ranks."""
    units = {c.units for cs in spec_of(model).layers.values() for c in cs}
    return pp <= model.layers and all(n % tp == 0 or tp % n == 0 for n in units)
