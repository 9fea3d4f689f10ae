"""What requests can be like: each kind must occur in a run that is held to its coverage."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """Something that requests of some worlds do. The value says what."""

    __hash__ = object.__hash__  # each is counted as it happens; Enum's own hash is computed in Python

    PREFIX = "only what follows a held prefix crosses"
    FULL_HIT = "nothing of the tokens crosses, as all of them are held"
    UNEQUAL = "ranks of decode hold different prefixes, and settle on the shortest"
    SHARED = "a prefix that another conversation brought is held"
    TWICE = "a page arrives that the cache has already"
    EVICTED = "a cache evicts pages that no room holds"
    EVICTED_FOR = "a cache forgets pages because a request needs them"
    EVICTED_DURING = "a cache forgets pages while requests hold others of it"
    GENERATED = "rows that decode computed itself are held later"
    FAILED = "a request with a held prefix fails, and what it brought is not held"
    GROUPS = "groups of layers cross one after the other"
    GROUPS_STAGED = "they cross through staging"
    GROUPS_PLACED = "they are written where they belong"
    GROUPS_MEASURED = "how many groups there are follows a pace that was measured"
    GROUPS_AFTER = "groups of what follows a held prefix"
    GROUPS_STAGE = "groups of the layers of a pipeline stage"
    GROUPS_FAILED = "a room fails while groups of its layers are under way"
    LAYER_LATE = "a layer is final only after it was announced"
    LAYERS_REST = "a forward pass ends whose last layers were not announced"
    PASS = "one forward pass computes chunks of several rooms"
    PASS_IN_STEP = "ranks compute the same passes, whose tokens say how many groups of layers there are"
    STATES = "recurrent states cross, once"
    STATES_REPLICATED = "one of several ranks that hold a state sends it"
    STATES_ALONE = "a rank of decode holds states and nothing of tokens"
    STATES_AFTER = "states cross with what follows a held prefix"
    STATES_LATE = "states are final only after the room was finished"
    STATES_AGAIN = "states that were taken away are given again"
    TOGETHER = "several frames to one peer leave as one message"
    TOGETHER_CUT = "such a message loses its end: some frames arrive, and one loses its own"
    CHUNKS = "very many chunks are handed over at once"
    CROWD = "many small requests end while one waits, at either side"
    UNCLAIMED = "prefill gives a finished room up that no decode rank has asked for"
    UNOPENED = "decode gives a room up that prefill has not opened"
    UNMET_LATE = "the side that comes after that fails at once"
    REFUSED = "a room of two instances that cannot work together ends on both"
    WINDOW = "only those rows of a sliding window cross that the end of the room leaves in it"
    MAPPED = "a kernel copies rows from prefill's pages into decode's mapped pages"
    PULLED = "a kernel of decode copies rows from prefill's mapped pages into its own"
    ARMED = "the call of an engine that makes rows final launches their copy, which was armed before"
    BELLS = "bells show an engine that a request is done, before its endpoint knows"
    OVERLAID = "layers with a window have pages of their own, in the same bytes as those of the others"
    WINDOW_OPEN = "all rows of a sliding window cross, as the end was not known"
