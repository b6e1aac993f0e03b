"""`RankRegistration`: which process has come as a rank; and the keys of a rendezvous in its store."""

from __future__ import annotations

import json
import secrets

import attrs

from dist2.rendezvous.liveness import Process
from dist2.store.base import Store


@attrs.frozen
class RankRegistration:
    """What a process says of itself when it comes as a rank.

    Attributes:
        process: Which process.
        world_size: How many ranks it thinks there are.
        token: Another one each time.
    """

    process: Process
    world_size: int
    token: str = attrs.field(factory=lambda: secrets.token_hex(4))

    def to_text(self) -> str:
        """Return it for the store."""
        return json.dumps([self.process.text, self.world_size, self.token])

    @classmethod
    def read(cls, text: str) -> RankRegistration | None:
        """Return what a rank has written; None if it is something else."""
        try:
            where, world_size, token = json.loads(text)
            process = Process.read(where)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        return cls(process, world_size, str(token)) if process and isinstance(world_size, int) else None


def rank_key(generation: str, rank: int) -> str:
    """Return the key of a rank's place in a generation."""
    return f"dist2/{generation}/rank/{rank}"


def ack_key(generation: str, rank: int) -> str:
    """Return the key that a rank sets when it knows that a generation has come to nothing."""
    return f"dist2/{generation}/told/{rank}"


def go_key(generation: str) -> str:
    """Return the key for how many ranks a generation has, or why it has come to nothing."""
    return f"dist2/{generation}/go"


def registration_of(store: Store, generation: str, rank: int) -> RankRegistration | None:
    """Return who has come as a rank, if anybody has."""
    key = rank_key(generation, rank)
    return RankRegistration.read(store.get(key).decode(errors="replace")) if store.check([key]) else None


def sizes(leader: RankRegistration, other: RankRegistration, rank: int) -> str:
    """Return how many ranks two of them think there are."""
    return (
        f"rank 0 has a world size of {leader.world_size} ({leader.process}), "
        f"rank {rank} of {other.world_size} ({other.process})"
    )


def process_in(text: str) -> Process | None:
    """Return the process of a registration; None if the text is something else."""
    found = RankRegistration.read(text)
    return None if found is None else found.process
