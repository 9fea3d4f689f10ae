"""The metrics that endpoints have: names, units and meaning, and which event or value of an endpoint becomes which.

Names and units follow Prometheus' conventions (its pages on naming and on instrumentation): base units, ``_total`` for
counters, and one unit per metric. Every metric has the labels ``side``, ``instance`` and ``rank`` of its endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import frozen

PREFIX = "disagg_kv_"
OF_ENDPOINT = ("side", "instance", "rank")
"""Labels of every metric."""


@frozen(eq=False)
class Metric:
    """A metric.

    Args:
        name: without the prefix; a counter's without ``_total``.
        kind: its type in Prometheus.
        help: what it counts or measures.
        labels: beside those of the endpoint.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The name that a query uses; a histogram's without its suffixes."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


ROOM_SECONDS = Metric("room_seconds", "histogram", "Time from open until the endpoint forgets the room.", ("outcome",))
ROOMS_ENDED = Metric("rooms_ended", "counter", "Rooms that ended, by outcome and by the path of their bytes.",
                     ("outcome", "path"))  # fmt: skip
ROOMS_FAILED = Metric("rooms_failed", "counter", "Rooms that failed, by the type of the error.", ("error",))
BYTES = Metric("bytes", "counter", "Bytes of ended rooms: written to peers (prefill), or placed in pages (decode).")
SEGMENTS = Metric("segments", "counter", "Segments of ended rooms: acknowledged (prefill), or placed (decode).")
WRITES = Metric("writes", "counter", "Descriptors of ended rooms that were posted; on prefill only.")
LAYER_GROUPS = Metric("layer_groups", "counter", "Layer groups into which chunks were divided; on prefill only.")
LOST_PEERS = Metric("lost_peers", "counter", "Peers that were lost.")
RETRIES = Metric("retries", "counter", "Attempts after the first one of a request.")
LINKS_DROPPED = Metric("links_dropped", "counter", "Links that were dropped, as no room used them.")
LOOKUP_FAILURES = Metric("lookup_failures", "counter", "Look-ups that the rendezvous could not answer.")
REFUSALS = Metric("refusals", "counter", "What peers sent and the endpoint refused, by reason.", ("reason",))
FRAMES_DROPPED = Metric("frames_dropped", "counter", "Frames of this endpoint that were not sent, by reason.",
                        ("reason",))  # fmt: skip
INTERNAL_ERRORS = Metric("internal_errors", "counter", "Errors that harmed no other room, by kind.", ("kind",))
OTHER_EVENTS = Metric("other_events", "counter", "Events of the caller's own, by name.", ("event",))

SECONDS: Mapping[str, Metric] = {
    "queue": Metric("queue_seconds", "histogram", "Time a segment waits for staging memory; on decode only."),
    "gather": Metric("gather_seconds", "histogram", "Time to gather a segment into a slot; on prefill only."),
    "wire": Metric("wire_seconds", "histogram", "Time the writes of a segment are in flight; on prefill only."),
    "scatter": Metric("scatter_seconds", "histogram", "Time to scatter a segment into pages; on decode only."),
}
"""By the name of the span that is measured."""

ROOMS = Metric("rooms", "gauge", "Rooms that are not released, by phase.", ("phase",))
RING_BYTES = Metric("ring_bytes", "gauge", "Size of the staging ring; on decode only.")
RING_USED = Metric("ring_used_bytes", "gauge", "Bytes of the ring that are leased, those in quarantine included.")
SLOTS = Metric("slots", "gauge", "Staging slots; on prefill only.")
SLOTS_USED = Metric("slots_used", "gauge", "Slots that are being filled or that a write may still read.")
QUARANTINED = Metric("quarantined_bytes", "gauge", "Bytes of ring or slots of failed rooms that wait for evidence.")
PEERS = Metric("peers", "gauge", "Peers that are connected or hold memory, by state.", ("state",))
LINKS = Metric("links", "gauge", "Peers to which there are connections.")
LINKS_BUDGET = Metric("links_budget", "gauge", "Links above which those are dropped that no room uses.")

METRICS = (
    ROOM_SECONDS, *SECONDS.values(), ROOMS_ENDED, ROOMS_FAILED, BYTES, SEGMENTS, WRITES, LAYER_GROUPS, LOST_PEERS,
    LINKS_DROPPED, RETRIES, LOOKUP_FAILURES, REFUSALS, FRAMES_DROPPED, INTERNAL_ERRORS, OTHER_EVENTS,
    ROOMS, RING_BYTES, RING_USED, SLOTS, SLOTS_USED, QUARANTINED, PEERS, LINKS,
    LINKS_BUDGET,
)  # fmt: skip
"""All of them."""

COUNTED: Mapping[str, tuple[Metric, tuple[str, ...]]] = {
    "groups": (LAYER_GROUPS, ()),
    "peers.lost": (LOST_PEERS, ()),
    "links.dropped": (LINKS_DROPPED, ()),
    "requests.retried": (RETRIES, ()),
    "lookups.failed": (LOOKUP_FAILURES, ()),
    "connections.refused": (REFUSALS, ("connection",)),
    "frames.refused": (REFUSALS, ("frame",)),
    "frames.forged": (REFUSALS, ("forged",)),
    "flags.refused": (REFUSALS, ("flag",)),
    "frames.stale": (REFUSALS, ("stale",)),
    "frames.unknown_peer": (REFUSALS, ("unknown_peer",)),
    "frames.unknown_room": (REFUSALS, ("unknown_room",)),
    "frames.other_tag": (REFUSALS, ("other_tag",)),
    "frames.not_parked": (REFUSALS, ("not_parked",)),
    "frames.not_a_writer": (REFUSALS, ("not_a_writer",)),
    "rooms.too_many_pages": (REFUSALS, ("too_many_pages",)),
    "frames.dropped": (FRAMES_DROPPED, ("not_sent",)),
    "frames.unroutable": (FRAMES_DROPPED, ("unknown_peer",)),
    "errors.unforeseen": (INTERNAL_ERRORS, ("unforeseen",)),
    "disconnects.failed": (INTERNAL_ERRORS, ("disconnect",)),
    "transport.unexpected": (INTERNAL_ERRORS, ("transport_event",)),
    "gathers.not_prepared": (INTERNAL_ERRORS, ("gather_not_prepared",)),
    "gathers.not_dropped": (INTERNAL_ERRORS, ("gather_not_dropped",)),
    "scatters.not_prepared": (INTERNAL_ERRORS, ("scatter_not_prepared",)),
    "scatters.not_dropped": (INTERNAL_ERRORS, ("scatter_not_dropped",)),
}
"""By the name that an observer's ``count`` gets: the metric, and the values of its labels."""

SEGMENT_BOUNDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the histograms of segments, in seconds."""

ROOM_BOUNDS = (1e-3, 3e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histogram of rooms, in seconds."""
