"""The invariants. Each violation names its rule; I8 is held by comparing the digests of two runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf

from disagg_kv.core import Elected, Phase
from disagg_kv.core.peers.refusals import AGAIN_S
from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.decode.room import DecodeRoom
from disagg_kv.endpoints.decode.rooms import DecodeSide
from disagg_kv.endpoints.loop.event_loop import SOON_S
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.endpoints.prepared import PreparedLaunches
from disagg_kv.errors import (
    AbortedError,
    CapacityError,
    DeadlineError,
    DisaggKVError,
    EndpointBrokenError,
    IncompatiblePeerError,
    IntegrityError,
    PeerLostError,
    SupersededError,
    TransportError,
)
from disagg_kv.ids import RoomId, room_name
from disagg_kv.rendezvous import Source

from .accounts import check_side
from .cluster import Cluster
from .fault import FaultClass, survives
from .kind import Kind
from .memory_holders import check_holders
from .node import SimNode
from .outages import POLL_S
from .rooms import Entry

SLACK_S = 0.6
"""After its deadline a room ends within this; a process that stood still needs as much longer."""

REFUSED_S = 1.0
"""Where two sides cannot work together, both know it within this. A ``Refused`` that is lost takes ``AGAIN_S`` more."""

MAPPED_S = 0.5
"""A room may end for want of time while a pool is mapped, and within this after it."""

OVERDUE = 3
"""Frames of a step may make something due, which a step handles SOON_S later; more steps after that are in vain."""

EVERYTHING = 8
"""In every eighth step of a process all of its rooms are checked, in other steps those that took an event."""

HONEST = (AbortedError, CapacityError, DeadlineError, PeerLostError, SupersededError, TransportError)
"""Why a room may fail where every process keeps to the protocol."""

INJECTED = (
    "the kernel failed",
    "can't start new thread",
    "the transport's poll failed",
    "the handling of an error failed",
)
"""What the simulator's own faults say."""

DELAYS = frozenset({FaultClass.RENDEZVOUS, FaultClass.BLOCKED, FaultClass.MAPPING})
"""Faults that delay what comes before decode asks for a room."""

UNTOLD = (FaultClass.PAUSE, FaultClass.RENDEZVOUS, FaultClass.NO_THREAD, FaultClass.NO_ANSWER)
"""If one of these happens after an incarnation goes on, it may not learn that another one has its place."""

MISTAKES = ("errors.unforeseen", "frames.not_a_writer")
"""Counters that stay at zero while every process keeps to the protocol."""


class Checks:
    """The rules for the end of a room, for the release of its pages, and for the end of the world."""

    def __init__(self, world: Cluster) -> None:
        self._world = world

    def _fail(self, rule: str, message: str) -> None:
        self._world.violation(rule, message)

    # A room ends on one rank.

    def ended(self, entry: Entry) -> None:
        """I2, I4, I9: it ended in time, for a reason that can be, with its bytes, as the other ranks did."""
        world, name = self._world, entry.room.name(entry)
        assert entry.handle is not None
        phase, error = entry.handle.phase, entry.handle.error
        took = world.now - entry.opened
        most = entry.room.plan.total_s + SLACK_S + world.stood_still
        if entry.node.split.world > 1 and world.unheard:
            # A frame of long ago counts as a word of its sender, who may have ended.
            heard = min(world.now, world.network.stale_at.get(entry.node.address, 0.0)) - entry.opened
            most = max(most, heard + SLACK_S) + world.scenario.options.silence_s
            most += POLL_S[-1] if FaultClass.POLL in world.hits else 0.0  # a rank that is mute, and then ends
        if isinstance(error, DeadlineError):
            # Its own deadline, for which it needs no other rank.
            most = entry.room.plan.total_s + SLACK_S + entry.node.stood_still
        if took > most:
            self._fail("I4", f"{name}: ended after {took:.3f} s, with {most:.3f} s to go")
        if entry.room.plan.unmet:
            self._unmet(entry, error)
        if entry.room.plan.source == world.scenario.refused:
            self._refused(entry, error)
        if phase is Phase.FAILED:
            self._reason(entry, error)
        elif entry in entry.room.decode:
            self._bytes(entry)
            self._cut(entry, entry.handle)
        else:
            self._decode_succeeds(entry)

    def _reason(self, entry: Entry, error: DisaggKVError | None) -> None:
        world = self._world
        # What is slow one after the other may take longer than decode has to ask.
        late = len(DELAYS & world.hits.keys()) > 1 and "claim_s" in str(error)
        # Prefill takes no frames of a peer before its pool is mapped.
        mapped = _mapped_at(entry) > max(entry.opened, world.now - MAPPED_S)
        late = late or (mapped and _out_of_time(error))
        served = not entry.room.again and not entry.room.plan.unmet and entry.room.plan.source != world.scenario.refused
        if survives(world.scenario.faults) and served and not late:
            self._fail(
                "I4",
                f"{entry.room.name(entry)}: failed although at most some frames were lost: {error}",
            )
        if isinstance(error, DeadlineError):
            self._noticed(entry)
            if entry in entry.room.decode:
                self._learned(entry)
        if isinstance(error, IncompatiblePeerError) and error.field.startswith("instance") and world.dead:
            return
        if isinstance(error, IncompatiblePeerError) and entry.room.plan.source == world.scenario.refused:
            return
        injected = isinstance(error, DisaggKVError) and any(why in str(error) for why in INJECTED)
        mixed = isinstance(error, IntegrityError) and FaultClass.REUSED in world.hits
        if not isinstance(error, HONEST) and not injected and not mixed:
            self._fail(
                "I7",
                f"{entry.room.name(entry)}: failed for what no honest peer does: {error!r}",
            )

    def _unmet(self, entry: Entry, error: DisaggKVError | None) -> None:
        """I4: a room that the other side does not join ends by ``claim_s``; the side that comes later ends at once."""
        world, room = self._world, entry.room
        waits = entry in room.prefill if room.plan.unmet == "decode" else entry in room.decode
        since = entry.waits_from if waits else entry.opened
        waits_long = waits or self._forgotten(error)
        most = 2 * SLACK_S + world.stood_still + (world.scenario.options.claim_s if waits_long else 0.0)
        took = 0.0 if since is None else world.now - since
        # It waits for a pool before it asks, or before it is asked.
        most += min(max(0.0, _mapped_at(entry) - (world.now - took)), world.scenario.options.silence_s)
        if survives(world.scenario.faults) and (took > most or error is None):
            self._fail("I4", f"{room.name(entry)}: waited {took:.3f} s of {most:.3f} s for the other side: {error}")
        if waits and isinstance(error, DeadlineError) and "claim_s" in str(error):
            world.saw(Kind.UNCLAIMED if entry in room.prefill else Kind.UNOPENED)
        elif not waits and isinstance(error, AbortedError):
            world.saw(Kind.UNMET_LATE)

    def _refused(self, entry: Entry, error: DisaggKVError | None) -> None:
        """I4: a room of two instances that cannot work together ends at once on both, with the field that differs."""
        world, room = self._world, entry.room
        others = room.decode if entry in room.prefill else room.prefill
        if entry.handle is None or entry.handle.phase is Phase.DONE:
            self._fail("I7", f"{room.name(entry)}: succeeded although the two sides have no path in common")
        lossy = not survives(world.scenario.faults) or FaultClass.RENDEZVOUS in world.hits
        if lossy or room.plan.unmet or room.again or self._forgotten(error):
            return
        since = max(entry.opened, max((one.opened for one in room.decode), default=0.0))
        most = REFUSED_S + (AGAIN_S if world.scenario.faults else 0.0)
        if world.now - since > most:
            self._fail("I4", f"{room.name(entry)}: ended {world.now - since:.3f} s after decode was refused: {error}")
        if all(one.refused for one in others):
            return
        if not isinstance(error, AbortedError | IncompatiblePeerError) or "paths" not in str(error):
            self._fail("I4", f"{room.name(entry)}: its error does not say what differs: {error!r}")
        world.saw(Kind.REFUSED)

    def _forgotten(self, error: DisaggKVError | None) -> bool:
        """Whether a time limit has ended a room where little is remembered: what ended before may be forgotten."""
        options = self._world.scenario.options
        return min(options.parked, options.tombstones) < len(self._world.rooms) and isinstance(error, DeadlineError)

    def _learned(self, entry: Entry) -> None:
        """I4: decode learns in time that a prefill rank has given the room up, also one that had lost it meanwhile."""
        world = self._world
        most = world.scenario.options.silence_s + 2 * SLACK_S + world.stood_still
        room = _room_of(entry)
        if room is None:
            return
        asker = (entry.node.epoch, room.key.generation)
        for other in entry.room.prefill:
            since = max(other.ended, entry.opened, world.scenario.faults_until)
            gave_up = asker in other.asked and other.phase is Phase.FAILED and other.node.alive
            if gave_up and not other.node.followed and self._owes(entry, other.node) and world.now - since > most:
                took = f"{world.now - since:.3f} s"
                self._fail("I4", f"{entry.room.name(entry)}: did not learn in {took} that prefill has given it up")

    def _noticed(self, entry: Entry) -> None:
        """I4: a rank that lost its only peer, or one whose notices are missing, fails by silence in time."""
        others = entry.room.decode if entry in entry.room.prefill else entry.room.prefill
        for other in others:
            if len(others) == 1 or self._owes(entry, other.node):
                self._noticed_one(entry, other.node)

    def _owes(self, entry: Entry, peer: SimNode) -> bool:
        """Whether a decode rank lacks notices of a prefill rank that it has met."""
        room = _room_of(entry)
        writer = None if room is None else room.machine.writers.get(peer.epoch)
        return writer is not None and not writer.complete

    def _noticed_one(self, entry: Entry, peer: SimNode) -> None:
        """Where another life came back in its instance, the room may wait for that one, which knows nothing of it."""
        world = self._world
        died = peer.frozen_at if peer.died_at is None else peer.died_at
        if died is None or peer.followed or not self._met(entry):
            return
        took = world.now - max(died, entry.opened, world.network.stale_at.get(entry.node.address, 0.0))
        if took > world.scenario.options.silence_s + 2 * SLACK_S + entry.node.stood_still:
            self._fail(
                "I4",
                f"{entry.room.name(entry)}: did not notice in {took:.3f} s that its peer is gone",
            )

    def _met(self, entry: Entry) -> bool:
        """Whether a prefill rank has learned of the room from decode; it looks for no peer itself."""
        return not isinstance(entry.handle, DeliveryHandle) or entry.handle.held is not None

    def _bytes(self, entry: Entry) -> None:
        """I2: every page of the room holds exactly its rows, whichever rank brought them."""
        name = entry.room.name(entry)
        for pages in (entry.pages, entry.slots):
            wrong = entry.node.memory.wrong(pages) if pages else None
            if wrong is not None:
                self._fail("I2", f"{name}: succeeded with a wrong byte at {wrong} of its pool")
        self._wire(entry)
        if entry.room.plan.prompt is not None:
            wrong = entry.node.memory.differs(entry.pages, entry.room.plan.rows, entry.room.truth)
            if wrong is not None:
                self._fail("I2", f"{name}: succeeded with a byte at {wrong} that is not its prompt's")
        if entry.aux is not None and entry.node.memory.pool.read_aux(entry.aux) != entry.room.aux:
            self._fail("I2", f"{entry.room.name(entry)}: succeeded with wrong aux data")

    def _wire(self, entry: Entry) -> None:
        """I2: exactly the bytes of the rows that decode did not hold have landed."""
        handle, memory = entry.handle, entry.node.memory
        assert handle is not None
        plan = entry.room.plan
        lacked = memory.lens.lacked(entry.held, plan.rows, known=not plan.open_end)
        if handle.report.nbytes != lacked:
            moved = f"{handle.report.nbytes} bytes landed, {lacked} were lacking"
            self._fail("I2", f"{entry.room.name(entry)}: {moved} ({entry.held} rows were held)")
        if lacked and not handle.report.transport:
            self._fail("I2", f"{entry.room.name(entry)}: {lacked} bytes landed over no transport")

    def _decode_succeeds(self, entry: Entry) -> None:
        """I2: prefill learns of success only after decode has everything.

        Where decode's engine has opened the id again, any of its uses may be the one that prefill served.
        """
        room = entry.room
        if not {"prefill", "decode"} - self._world.scenario.alone and len(room.prefill) > 1:
            return  # a prefill rank knows of the decode ranks that it has sent to
        same = [one for one in self._world.rooms if one.plan.room == room.plan.room and one.plan.back is room.plan.back]
        again = [one.decode for one in same if one.again]
        for rank, other in enumerate(room.decode):
            served = any(use[rank].phase not in (None, Phase.FAILED) for use in again)
            if other.phase is Phase.FAILED and other.node.alive and not served:
                self._fail("I2", f"{room.name(entry)}: succeeded, but decode failed: {other.error}")

    def released(self, node: SimNode) -> None:
        """Coverage: by which evidence leases came back since the last look, and pages that a peer could write to."""
        view = node.view
        if not isinstance(view, DecodeSide):
            return
        granted = view.queue.leases
        if not granted and not node.leased:
            return
        live = {(key, int(one.lease.start)): key for (key, _), one in granted.items()}
        if live.keys() == node.leased.keys():
            return
        leased = {at: node.leased.get(at) or view.rooms[key].machine for at, key in live.items()}
        for at, machine in node.leased.items():
            if at in leased:
                continue
            if machine.error is None:
                self._world.mark("release:landed")
                continue
            writers = machine.writers.values()
            if any(w.drained for w in writers):
                self._world.mark("release:drained")
            if any(w.gone for w in writers):
                self._world.mark("release:gone")
        node.leased = leased

    def freed(self, entry: Entry) -> None:
        """I2, I5: its pages are free; no byte of other pages has changed."""
        if entry in entry.room.decode and entry.exposed and entry.phase is Phase.FAILED:
            self._world.mark("release:exposed pages")
        self.untouched(entry.node)
        if entry.room.over:
            self.agree(entry)

    def _cut(self, entry: Entry, handle: DeliveryHandle | ReceptionHandle) -> None:
        """Coverage: slots cut a room of which nothing is staged, as kernels of a prefill rank do not queue."""
        writers = entry.room.prefill
        queued = all(self._world.scenario.queues[one.node.index] for one in writers)
        paths = {one.handle.report.path for one in writers if one.handle is not None} - {""}
        if not queued and handle.report.segments > 1 and paths == {"mapped"}:
            self._world.mark("mapped:cut although all paths copy")

    def untouched(self, node: SimNode) -> None:
        """No byte changed outside pages that a room has."""
        wrong = node.memory.touched()
        if wrong is not None:
            self._fail(
                "I2",
                f"{node.address}: byte {wrong} of the pool changed, which no room has",
            )

    def agree(self, entry: Entry) -> None:
        """I9: the ranks of one instance that live saw one outcome, but for those that may have lost rank 0.

        Where each rank decides for itself, its engine reduces, and every rank that has succeeded has its bytes.
        """
        for side_name, (first, *others) in (("prefill", entry.room.prefill), ("decode", entry.room.decode)):
            if side_name in self._world.scenario.alone:
                if len({one.phase for one in (first, *others)}) > 1:
                    self._world.mark("verdict:ranks of one side end differently")
                continue
            if not first.node.alive or first.node.followed:
                continue
            living = [one for one in others if one.node.alive and not one.node.followed]
            side = [first, *(one for one in living if not one.node.counters.of.get("peers.lost"))]
            seen = {one.phase for one in side if not one.refused}
            if len(seen) > 1:
                ends = {one.node.address: (one.phase.name if one.phase else None, str(one.error)) for one in side}
                self._fail("I9", f"{room_name(entry.room.plan.room)}: ranks disagree: {ends}")

    def superseded(self, node: SimNode, before: Counter[FaultClass]) -> None:
        """I4: an incarnation that stood still while another took its place takes no more rooms when it goes on.

        ``before``: the faults that happened before it went on.
        """
        world = self._world
        same = [n for n in world.nodes if n.instance == node.instance and n.rank == node.rank and n is not node]
        if not same or not node.alive or node.paused or any(world.hits[f] > before[f] for f in UNTOLD):
            return
        if node.broken or node.must_break:
            return
        younger = same[0]
        world.mark("superseded:refuses rooms")
        if node.view.loop.ranks.superseded is None:
            self._fail("I4", f"{node.address}: did not learn that {younger.address} has taken its place")

    def broke(self, node: SimNode) -> None:
        """I7: an endpoint that cannot go on has failed every room by name, and takes no calls."""
        world = self._world
        world.mark("broken:an endpoint")
        for entry in list(world.entries.values()):
            handle = entry.handle
            if entry.node is not node or handle is None:
                continue
            known = handle.error if handle.phase is Phase.FAILED else None
            if handle.phase is not Phase.DONE and not isinstance(known, DisaggKVError):
                world.violation("I7", f"{entry.room.name(entry)}: {handle.phase.name} in a broken endpoint")
        for name, call in _calls(node).items():
            try:
                call()
            except EndpointBrokenError:
                continue
            world.violation("I7", f"{node.address}: a broken endpoint takes {name}")

    # After every event.

    def node(self, node: SimNode) -> None:
        """The accounts of an endpoint agree with themselves."""
        node.steps += 1
        since, node.checked_at = node.checked_at, node.loop.now
        self._integrity(node, since if node.steps % EVERYTHING else -inf)
        self.released(node)
        check_holders(self._world, node)
        view = node.view
        prepared = view.scatters.prepared if isinstance(view, DecodeSide) else view.transfers.staged.prepared
        assert prepared is not None
        launches = prepared.ready if isinstance(prepared, PreparedLaunches) else prepared.gathers.ready
        if len(node.prepared) != len(launches):
            self._fail("I3", f"{node.address}: {len(node.prepared)} launches are prepared, {len(launches)} are known")
        if node.other is not None and isinstance(view, DecodeSide) and view.queue.waiting:
            self._full(node)
        if "links.dropped" in node.counters.of:
            self._world.mark("links:dropped")
        due = node.loop.side.next_at()
        overdue = due is not None and due < node.loop.now - SOON_S and not node.behind and not node.failing
        if not overdue:
            node.overdue, node.overdue_since = 0, inf
        else:
            node.overdue_since = min(node.overdue_since, node.loop.now)
            node.overdue += node.loop.now > node.overdue_since + SOON_S
        if node.overdue > OVERDUE:
            self._fail("I4", f"{node.address}: its thread turns and turns: something is due since {due:.3f} s")
        there = view.loop.peers.epochs()
        peers = view.loop.peers
        kept = [e for e in node.loop.connections.linked() if peers.known(e) is None]
        if kept and (peers.next_at() or inf) > node.loop.now and not node.failing:
            self._fail("I3", f"{node.address}: still linked to {len(kept)} forgotten incarnations that no room uses")
        lost = [peer.epoch for peer in peers.all() if peer.remote is not None and peer.epoch not in there]
        if lost and not node.failing:
            self._fail("I4", f"{node.address}: new rooms may be bound to {len(lost)} peers that are lost")
        raised = FaultClass.POLL in self._world.hits or FaultClass.BROKEN in self._world.hits
        if not raised and not node.counters.of.keys().isdisjoint(MISTAKES):
            self._fail("I7", f"{node.address}: {node.counters.of}: {self._world.errors}")

    def _full(self, node: SimNode) -> None:
        """Coverage: requests wait for bytes of the rings in both directions."""
        views = [other.view for other in self._world.nodes if other.back is not node.back]
        if any(isinstance(view, DecodeSide) and view.queue.waiting for view in views):
            self._world.mark("both ways:both rings are full")

    def _integrity(self, node: SimNode, since: float) -> None:
        try:
            check_side(node.view, since)
            node.view.loop.peers.check_integrity()
        except AssertionError as exc:
            self._fail("I3", f"{node.address}: {exc!r}")

    # When all is over.

    def still_open(self) -> list[str]:
        """I4: what has not ended or come to rest, in words."""
        world = self._world
        left = []
        for entry in world.entries.values():
            if entry.node.alive:
                assert entry.handle is not None
                left.append(f"{entry.room.name(entry)}: {entry.handle.phase.name}, released {entry.handle.released}")
        left += [f"{n.address}: {n.endpoint.open_rooms} rooms" for n in world.nodes if n.endpoint.open_rooms]
        return left

    def at_rest(self) -> None:
        """I3: nothing is left of any room, and no byte of memory is missing or has changed."""
        world = self._world
        if world.dma.live:
            self._fail("I3", f"{len(world.dma.live)} writes are still under way")
        for node in world.nodes:
            self._integrity(node, -inf)
            self.untouched(node)
            kept = 0 if node.prefixes is None else len(node.prefixes.index)
            free, pages = len(node.memory.free) + len(node.memory.free_slots), len(node.memory.owners)
            if not node.memory.check_pages() or free + kept != pages:
                self._fail("I3", f"{node.address}: {free} of {pages} pages are free, and {kept} in a cache")
            if node.prefixes is not None and node.prefixes.index.evictable != kept:
                self._fail("I3", f"{node.address}: {kept} pages are in a cache, some of them locked")
            ghosts = [t.node.address for t in node.transport.linked() if t.node.confirmed and not t.alive]
            if ghosts and world.scenario.drain_s is not None:
                self._fail(
                    "I3",
                    f"{node.address}: still connected to processes that have ended: {ghosts}",
                )
            view = node.view
            verdict = view.loop.verdict
            undelivered = isinstance(verdict, Elected) and verdict._pending
            linked = {t.node.epoch for t in node.transport.linked()} - set(node.loop.connections.linked())
            left: dict[str, object] = {
                "links": len(linked),
                "undecided": verdict.undecided,
                "votes": not undelivered and verdict.next_at() is not None,
                "commands": len(view.loop.commands),
            }
            if isinstance(view, DecodeSide):
                left |= {
                    "leases": node.ring.live_bytes,
                    "quarantine": view.queue.quarantined_bytes(),
                    "waiting": view.queue.waiting,
                    "scatters": len(view.scatters.running) + len(view.scatters.waiting) + len(view.scatters.barred),
                    "prepared": len(node.prepared) + len(view.scatters.prepared.waiting),
                }
            else:
                transfers = view.transfers
                assert transfers.staged.prepared is not None
                gathers, mapped = transfers.staged.prepared.gathers, transfers.mapped
                left |= {
                    "slots": transfers.staged.slots.in_use,
                    "transfers": sum(len(one.lines.of) for one in (transfers.staged, transfers.direct, mapped)),
                    "posts": len(transfers.posts.tickets),
                    "gathers": len(transfers.staged.gathering),
                    "copies": len(mapped.running) + len(mapped.failed),
                    "flows": len(view.flows),
                    "newest": len(view.newest),
                    "prepared": len(node.prepared) + len(gathers.waiting) + len(gathers.ready),
                }
            if any(left.values()):
                self._fail(
                    "I3",
                    f"{node.address}: not at rest: { {k: v for k, v in left.items() if v} }",
                )

    def closed(self, node: SimNode) -> None:
        """I3: an endpoint that is closed has given everything back."""
        if node.transport.regions or node.transport.links or not node.channel.closed:
            self._fail(
                "I3",
                f"{node.address}: closed, but {len(node.transport.regions)} regions are registered",
            )

    def evidence_missing(self) -> bool:
        """Whether memory may stay in quarantine for good: no bound is known for the writes of a dead peer."""
        world = self._world
        return world.scenario.drain_s is None and any(
            f in world.hits for f in (FaultClass.PREFILL_CRASH, FaultClass.DECODE_CRASH, FaultClass.BROKEN)
        )


def _mapped_at(entry: Entry) -> float:
    """By then the last mapping that takes long has returned, or returns, on a rank of a room."""
    return max(one.node.mapped_at for one in entry.room.entries)


def _out_of_time(error: DisaggKVError | None) -> bool:
    """Whether a room has ended because something took too long."""
    return any(word in str(error) for word in ("claim_s", " within ", "not mapped in"))


def _room_of(entry: Entry) -> DecodeRoom | None:
    """What a decode rank knows of a room; None: it has forgotten it, or is no decode rank."""
    view = entry.node.view
    if not isinstance(view, DecodeSide):
        return None
    return next((room for room in view.rooms.values() if room.handle is entry.handle), None)


def _calls(node: SimNode) -> dict[str, Callable[[], object]]:
    """Calls of an engine that a broken endpoint refuses."""
    endpoint, room = node.endpoint, RoomId(b"after the end")
    opens: Callable[[], object]
    if isinstance(endpoint, DecodeEndpoint):
        opens = partial(endpoint.open, room, Source("prefill"))
    else:
        assert isinstance(endpoint, PrefillEndpoint)
        opens = partial(endpoint.open, room)
    return {
        "open": opens,
        "poll": endpoint.poll,
        "confirm_terminated": partial(endpoint.confirm_terminated, node.epoch),
    }
