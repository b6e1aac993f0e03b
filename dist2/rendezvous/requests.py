"""`JoinRequest`: the registration of a process as a rank; and the keys that all rendezvous use.

Ranks meet in two places: at an endpoint (`session`) and in the part of a store where a group is built
(`joining`). Both have the same three keys: each rank sets `rank_key` to its request; `GO` tells the
ranks to proceed, or the reason of a failure; a rank that is not waited for otherwise sets `ack_key` when it
has read the reason.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping

import attrs

from dist2.runtime.other_process import Process
from dist2.store.base import Store


@attrs.frozen
class JoinRequest:
    """The registration of a process as a rank.

    Attributes:
        process: The process.
        asked: The arguments that must be equal on all ranks, by name, in words.
        token: Different for each request.
    """

    process: Process
    asked: Mapping[str, str]
    token: str = attrs.field(factory=lambda: secrets.token_hex(6))

    def to_text(self) -> str:
        """Return it for the store."""
        return json.dumps([self.process.text, self.asked, self.token])

    @classmethod
    def read(cls, text: bytes) -> JoinRequest | None:
        """Return the request of a text; None if it is none."""
        try:
            where, asked, token = json.loads(text)
            process = Process.read(where)
            is_text = all(isinstance(each, str) for each in (token, *asked, *asked.values()))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        return cls(process, asked, token) if process and is_text else None

    @property
    def world_size(self) -> str:
        """The number of ranks that it expects."""
        return self.asked.get("world_size", "not known")


def rank_key(rank: int) -> str:
    """Return the key of a rank's request."""
    return f"rank/{rank}"


def ack_key(rank: int) -> str:
    """Return the key that a rank sets when it knows that the rendezvous has failed."""
    return f"told/{rank}"


GO = "go"
"""The key that tells the ranks to proceed, or the reason of a failure."""


def request_of(store: Store, rank: int) -> JoinRequest | None:
    """Return the request of a rank, if it has registered."""
    key = rank_key(rank)
    return JoinRequest.read(store.fetch([key])[0]) if store.check([key]) else None
