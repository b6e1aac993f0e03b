"""The keys and values by which ranks meet: a `JoinRequest` of each rank and one `Verdict` for all.

Ranks meet in two places: at an endpoint (`session`) and in the part of a store where a group is built
(`joining`). Both have the same three keys: each rank sets `rank_key` to its request; `GO` is set once, to the
verdict (`decide`); a rank that is not waited for otherwise sets `ack_key` when it has read why the rendezvous
failed (`acknowledge`). `error_of` makes an exception of a verdict.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from enum import StrEnum
from multiprocessing import current_process
from typing import Any

import attrs
from torch.distributed import Store as TorchStore

from dist2.errors import (
    Dist2Error,
    InvalidUsageError,
    OperationTimeoutError,
    PeerLostError,
    RendezvousError,
    RendezvousTimeoutError,
    WireError,
)
from dist2.runtime.other_process import Process
from dist2.runtime.rank_names import rank_names
from dist2.store.base import Store
from dist2.store.prefix import PrefixStore
from dist2.store.waiting import absent


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
"""The key of the verdict."""
_WORDS = 1000
"""The longest text from a store that is shown, in characters."""


class Outcome(StrEnum):
    """The possible verdicts."""

    PROCEED = "proceed"
    MISMATCH = "mismatch"
    DUPLICATE_RANK = "duplicate_rank"
    TIMEOUT = "timeout"
    LOST = "lost"
    UNREADABLE = "unreadable"


@attrs.frozen
class Verdict:
    """The decision about a rendezvous, which is final, except that a group that may proceed can still fail.

    Attributes:
        outcome: The kind of decision.
        words: Reason of a failure.
        ranks: The ranks that are missing or lost.
    """

    outcome: Outcome
    words: str = ""
    ranks: tuple[int, ...] = ()

    def to_text(self) -> str:
        """Return it for the store."""
        return json.dumps([self.outcome, self.words[:_WORDS], self.ranks])

    @classmethod
    def read(cls, text: bytes) -> Verdict:
        """Return the verdict of a text. `UNREADABLE`: another version of dist2 may have written it."""
        try:
            fields: Any = json.loads(text)
            outcome, words, ranks = fields
            if isinstance(words, str) and all(isinstance(rank, int) for rank in ranks):
                return cls(Outcome(outcome), words[:_WORDS], tuple(ranks))
        except (ValueError, TypeError, RecursionError):
            pass  # malformed too
        return cls(Outcome.UNREADABLE, f"no verdict on a rendezvous: {text[:100]!r}")


PROCEED = Verdict(Outcome.PROCEED)


def decide(part: Store, verdict: Verdict) -> Verdict:
    """Decide for all ranks, unless one has decided before; return the decision."""
    return Verdict.read(part.compare_set(GO, "", verdict.to_text()))


def publish_failure(part: Store, verdict: Verdict) -> None:
    """Decide that a group fails, unless that was decided before; also where its ranks may proceed already."""
    if decide(part, verdict) == PROCEED:
        part.compare_set(GO, PROCEED.to_text(), verdict.to_text())


def acknowledge(part: Store, rank: int) -> None:
    """Tell the others that a rank has read why the rendezvous failed."""
    part.set(ack_key(rank), "yes")


def error_of(verdict: Verdict, timeout_s: float, endpoint: object = None) -> Dist2Error:
    """Return the exception that a rank raises for a failure.

    Args:
        verdict: The failure.
        timeout_s: The limit of the wait for other ranks, in seconds.
        endpoint: Where ranks meet, named in the message. There each failure is a `RendezvousError`.
    """
    words = verdict.words
    if endpoint is not None:
        words = f"{endpoint}: {words}"
        if verdict.outcome is Outcome.TIMEOUT:
            return RendezvousTimeoutError(words, missing=verdict.ranks, timeout_s=timeout_s)
        return RendezvousError(words)
    match verdict.outcome:
        case Outcome.TIMEOUT:
            return OperationTimeoutError(words, missing=verdict.ranks, timeout_s=timeout_s)
        case Outcome.LOST:
            return PeerLostError(words, ranks=verdict.ranks)
        case Outcome.MISMATCH:
            return InvalidUsageError(words)
        case Outcome.UNREADABLE:
            return WireError(words)
        case _:
            return RendezvousError(words)


def part_of(store: TorchStore, name: object) -> PrefixStore:
    """Return the part of a store in which one rendezvous takes place."""
    return PrefixStore(f"dist2/{name}", store)


def cannot_come(words: str) -> Verdict:
    """Return the verdict by which a process that cannot join tells the waiting ranks why."""
    return Verdict(Outcome.MISMATCH, f"{Process.here()} cannot come: {words}")


def started_twice(rank: int, found: JoinRequest | None, here: Process) -> Verdict:
    """Return the verdict on a rank that another process has registered too, or another thread of this one."""
    if found is not None and found.process == here:
        return two_threads(rank, here)
    other = "a process that cannot be read" if found is None else str(found.process)
    words = f"{rank_names([rank])} was started twice: as {other} and as {here}"
    if getattr(current_process(), "_inheriting", False):  # as multiprocessing tells it itself
        words += (
            ", a worker of multiprocessing that imports the program: make groups below `if __name__ == "
            "'__main__':`"
        )
    return Verdict(Outcome.DUPLICATE_RANK, words)


def two_threads(rank: int, here: Process) -> Verdict:
    """Return the verdict on a rank as which two threads of a process meet the others at once."""
    words = f"{rank_names([rank])} was started twice: by two threads of {here}; give each a rank of its own"
    return Verdict(Outcome.DUPLICATE_RANK, words)


def too_late(part: Store, ranks: Iterable[int], world_size: int, timeout_s: float) -> Verdict:
    """Return the verdict after the deadline: it names the ranks, of those given, that have not registered."""
    missing = absent(part, rank_key, ranks)
    words = f"{rank_names(missing)} of {world_size} did not arrive"
    if not missing:
        words = f"all {world_size} ranks arrived, but one did not proceed"
    return Verdict(Outcome.TIMEOUT, f"{words} within {timeout_s:.3g} s", tuple(missing))


def request_of(store: Store, rank: int) -> JoinRequest | None:
    """Return the request of a rank, if it has registered."""
    key = rank_key(rank)
    return JoinRequest.read(store.fetch([key])[0]) if store.check([key]) else None
