"""The bugs, by the promise that each breaks."""

from __future__ import annotations

from collections.abc import Sequence

from .planting import Mutant

RECEIVE = "protocol.receiving:ReceiveRoom."
FLOW = "protocol.sending:Flow."
MOVER = "endpoints.mover:Mover."
PREFILL = "endpoints.prefill:PrefillRole."
DECODE = "endpoints.decode:DecodeRole."
CLAIM = "prefix.cache:Claim."

BUGS: Sequence[Mutant] = (
    Mutant("pages are freed on abort while a write is in flight", "E1",
           RECEIVE + "_may_touch_pages", "return self._exposed", "return False"),
    Mutant("a lost frame is never sent again", "E2",
           "protocol.retry:Repeater.tick", "if due.at <= now:", "if due is None:"),
    Mutant("arrivals are counted, not writers", "E3",
           RECEIVE + "_on_chunk_ready", "if w.rank in part.arrived:\n        return",
           "if w.rank in part.arrived:\n        part.staged |= set(part.writers) - part.arrived\n"
           "        part.arrived |= set(part.writers)"),
    Mutant("a late staging request gets a lease again", "E4",
           RECEIVE + "_part", "if self._coverage", "if False and self._coverage"),
    Mutant("a segment is sent again to a destination that has it", "E5",
           MOVER + "_gathered", "in posts:", "in [*posts, *posts]:"),
    Mutant("links to dead subscribers are kept for ever", "E6",
           "endpoints.node:Node._unlink", "self.me.transport.disconnect(link)", "pass"),
    Mutant("a write that could not be posted is only logged", "E7",
           MOVER + "_post", "post.error = exc", "pass"),
    Mutant("a failed gather ends whatever runs it", "E8",
           MOVER + "_gather", "except Exception as exc:", "except ZeroDivisionError as exc:"),
    Mutant("our own heartbeat is taken for that of a frozen peer", "E9",
           "protocol.peers:PeerTable.tick", "elif beat and self.lively(epoch, now):\n",
           "elif beat and self.lively(epoch, now):\n            peer.heard = now\n"),
    Mutant("frames for an earlier life of ours are taken", "E10",
           "protocol.peers:PeerTable.on_frame", " or frame.dst != self._epoch", ""),
    Mutant("an ended life of a room id is not remembered", "E11",
           "protocol.tombstones:Tombstones.outcome", "return known", "return None"),
    Mutant("look-ahead may take the whole ring", "E12",
           "staging.queue:GrantQueue._may", "return not wanted.lookahead or", "return True or"),
    Mutant("what is no frame is not refused", "E13",
           "protocol.frames:Codec.decode", "except (", "except () and ("),
    Mutant("flows of ended rooms are never forgotten", "E14",
           PREFILL + "_close", "self._flows.pop((name, epoch, flow.generation), None)", "pass"),
    Mutant("heads are swapped where the two sides differ, and nobody looks", "E15",
           "planning.staged:_local", "return before + part.units.start - run.start",
           "return before + (part.units.start - run.start) // 2"),
    Mutant("the first success of a rank counts for all", "E16",
           "protocol.agreement:Agreement._count", "sum(life.votes.values()) == self._world", "life.votes"),
    Mutant("a lease in quarantine is released without evidence", "I5",
           RECEIVE + "_settle", "if w.evidence}", "if True}"),
    Mutant("an abort is acknowledged before the writes have drained", "I5",
           FLOW + "_settle", "if self._unquiet:", "if False:"),
    Mutant("a grant covers bytes that are not free yet", "I5",
           "staging.ring:RingStagingAllocator.reserve",
           "(free_from := self._last_end_before(place + size)) > place", "(free_from := 0) > place"),
    Mutant("a lease is released before its scatter has ended", "I1",
           DECODE + "_begin_scatter", "if one.event is None:", "if True:"),
    Mutant("Done is taken for success", "I2",
           RECEIVE + "_check_landed", "if self._parts or any(", "if any("),
    Mutant("a slot is used again while a failed write may read it", "I5",
           MOVER + "_end", "if not post.unquiet:", "if True:"),
    Mutant("a write that is not quiet is posted again", "I1",
           FLOW + "_on_write_failed", "if event.quiesced:", "if True:"),
    Mutant("pages that are taken away are still read", "I2",
           PREFILL + "_publish", "if room.withdrawn and machine.reads == 0:", "if room.withdrawn:"),
    Mutant("silence is taken for evidence", "I5",
           RECEIVE + "_on_lost", "w.lost = True", "w.gone = True"),
    Mutant("an end is evidence before the last writes have landed", "I5",
           "endpoints.exits:Exits.drained", "self._clock() - at >= drain_s", "True"),
    Mutant("a repeated Done of an ended room is not answered", "I4",
           DECODE + "_answer_ended", "node.send(Send(epoch, Complete(**head)))", "pass"),
    Mutant("a room that failed succeeds after all", "I6",
           "protocol.delivery:SendRoom.decided", "if self.error is not None or self.done:\n        return []",
           "self.error = None"),
    Mutant("what a failed room brought is kept as a prefix", "C4",
           CLAIM + "settle", "if handle.phase is Phase.DONE:", "if True:"),
    Mutant("rows are kept as a prefix before they have arrived", "C4",
           CLAIM + "begin", "self._state = _State.AWAITED",
           "self._state = _State.AWAITED\n    self._insert(self._tokens)"),
    Mutant("a prefix that a room holds may be evicted", "C4",
           "prefix.index:HashPrefixIndex._is_free_leaf", "self._refs[page] == 0 and ", ""),
    Mutant("a claim lets its prefix go when its transfer begins", "C4",
           CLAIM + "begin", "self._mine = set(taken.tolist())",
           "self._mine = set(taken.tolist())\n    self._cache.index._drop(self._lock.ids)\n    self._lock.ids = []"),
    Mutant("ranks agree on the longest prefix", "C3",
           "rendezvous.minimum:StoreMinimum.agreed", "return min(", "return max("),
    Mutant("who reads an answer last counts itself twice", "C3",
           "rendezvous.minimum:StoreMinimum._values", "if question not in self._read:", "if True:"),
    Mutant("equal hashes are taken for equal prefixes", "C4",
           "prefix.index:HashPrefixIndex.match",
           "page is None or self._before[page] != before or self._content[page] != content", "page is None"),
    Mutant("what is held is sent again", "C1",
           "endpoints.reception:ReceptionHandle.expect", "Wanted(start, stop,", "Wanted(0, stop,"),
)  # fmt: skip
"""At least one for each of E1 to E16."""
