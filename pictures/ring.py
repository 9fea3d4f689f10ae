"""The staging ring of a decode rank: leases, a hole, free bytes, head and tail, as the real allocator places them."""

from __future__ import annotations

from disagg_kv.staging import Lease, RingStagingAllocator

from .drawing import Picture, at_turn

X, Y, INNER, OUTER = 200, 190, 80, 130
CAPACITY = 1 << 20


def ring() -> Picture:
    """Six leases in lap 0; four are released; two more go round, and step over the one that is held."""
    ring = RingStagingAllocator(CAPACITY)
    leases = [_lease(ring, share) for share in (0.14, 0.16, 0.14, 0.16, 0.18, 0.12)]
    held = leases[2]
    for lease in (*leases[:2], leases[3]):
        ring.release(lease)
    later = [_lease(ring, share) for share in (0.22, 0.1)]
    live = [leases[4], leases[5], *later]

    p = Picture("The staging ring", 880, 380)
    p.arc("free", X, Y, INNER, OUTER, 0, 0.5)
    p.arc("free", X, Y, INNER, OUTER, 0.5, 1)
    for lease in live:
        _arc(p, "cell", lease)
    _arc(p, "hole", held)
    for lease, name in ((leases[4], "C"), (leases[5], "D"), (later[0], "E"), (later[1], "F"), (held, "B")):
        x, y = at_turn(X, Y, (INNER + OUTER) / 2, _middle(lease))
        p.text(x, y + 5, name, "title")
    _mark(p, held.start, "tail")
    _mark(p, later[1].end, "head")
    p.text(X, Y - 4, "place =", "small")
    p.text(X, Y + 12, "start mod capacity", "small")
    lines = (
        ("cell", "C, D", "leases of lap 0: a write or a scatter uses them"),
        ("cell", "E, F", "leases of lap 1: E took the bytes of a released lease"),
        ("hole", "B", "in quarantine: its writer may still write, so the ring skips it"),
        ("free", "", "free bytes"),
    )
    for i, (kind, name, meaning) in enumerate(lines):
        y = 70 + 34 * i
        p.rect(kind, 420, y - 15, 44, 22)
        if name:
            p.text(442, y + 1, name, "small")
        p.text(476, y + 1, meaning, "small", "start")
    words = (
        "The start of a lease only grows, and none is used twice:",
        "a late frame about an old lease is recognised by its start.",
        "head: where the next lease is looked for. tail: the oldest live lease.",
        "Leases are released in any order; a slow one delays no other.",
    )
    for i, text in enumerate(words):
        p.text(420, 226 + 20 * i, text, "small", "start")
    return p


def _lease(ring: RingStagingAllocator, share: float) -> Lease:
    made = ring.reserve(int(share * CAPACITY))
    assert made is not None
    return made


def _middle(lease: Lease) -> float:
    return (lease.offset + lease.nbytes / 2) / CAPACITY


def _arc(p: Picture, kind: str, lease: Lease) -> None:
    p.arc(kind, X, Y, INNER, OUTER, lease.offset / CAPACITY, (lease.offset + lease.nbytes) / CAPACITY)


def _mark(p: Picture, offset: int, name: str) -> None:
    """An arrow from outside to a place of the ring."""
    turn = offset % CAPACITY / CAPACITY
    (a, b), (c, d) = at_turn(X, Y, OUTER + 26, turn), at_turn(X, Y, OUTER + 2, turn)
    p.line("call", f"M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}")
    x, y = at_turn(X, Y, OUTER + 42, turn)
    p.text(x, y + 4, name, "small")
