"""The desk, where both sides of a long message inside a host share the copying: its words."""

from __future__ import annotations

from dist2 import ProcessGroup

WAITS, OPEN, BUFFER, GUARD, FAILED, CLAIMS, DONE = 496, 497, 498, 499, 500, 504, 505


def stay_awake(pg: ProcessGroup) -> None:
    """Have who waits look for long: where cores are crowded, senders would go to sleep at once."""
    pg.backend.endpoint._spins = 100_000  # type: ignore[attr-defined]  # the socket backend's


def blocks_written(pg: ProcessGroup, peer: int) -> int:
    """Return how many blocks this rank, as a sender, has written of its last message to a rank."""
    endpoint = pg.backend.endpoint  # type: ignore[attr-defined]  # the socket backend's
    ring = endpoint._fabric.outgoing(endpoint._mailbox.fabric_ids[peer]).tx
    return 0 if ring is None else int(ring._words[DONE])
