"""How an endpoint waits: bounds of its sleeps, seconds between looks, and what counts as a fast wire."""

from __future__ import annotations

IDLE_S = 0.2
"""The longest that an endpoint sleeps: exits of peers are noticed this fast."""

TARGET_S = 0.001
"""The same while rooms are open, with a transport whose writes move only while their target polls."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 500e-6
"""Between two looks at copies and events that nothing but looking shows to be done."""

NAP_S = 10e-6
"""The same where the channel's waits are that exact, and a fast wire has no thread that would need the interpreter
meanwhile: a look itself takes several times as long."""

SOON, SOON_S = 2, 300e-6
"""So many looks, so far apart, before ``patience_s`` after something was told or has come: what that began ends soon
where a GPU waits for its engine's thread, and a wire that is told late is idle until then."""

NUDGE_S = 150e-6
"""A silence of bytes' notices that is filled while they are on a fast wire: a hypervisor that halts a core for longer
wakes it late, and notices pass through two threads of ZeroMQ's on cores of their own. Where a channel has no threads,
there is only the peer's own to keep awake, which stays so for ``linger_s``."""

RECEIPT_S = 0.001
"""So long a receipt waits for what has to leave, where the wire is fast and this thread awake: to write and to read it
takes as long as some MiB."""

FAST_BYTES_PER_S = 5e10
"""On a wire as fast as this the longest pause is the shortest: in the other one it would move tens of MiB."""
