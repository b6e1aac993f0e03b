"""How the ranks of a new group come together in a store, and find out that they want the same group.

The first to come says what it asks for; each compares that with its own. The last of those that ask for the
same decides that the group is made, and whoever finds something wrong, or waits in vain, that it is not.
It is decided once, and all wait for the decision: so all are told, at once, by whoever knew first. Of one
that fails or dies they hear as long as the group is built, and not only here: see `FailureWatch`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, NoReturn

import attrs
from torch.distributed import Store

from dist2.errors import (
    InvalidUsageError,
    OperationTimeoutError,
    PeerLostError,
    RendezvousError,
    WireError,
    rank_names,
)
from dist2.rendezvous.liveness import FAILED, FailureWatch, LivenessMonitor, Process, presence_key
from dist2.rendezvous.waiting import absent
from dist2.runtime.arguments import difference_of
from dist2.store import PrefixStore

_FIRST, _AGREED, _DECIDED, _VERDICT, _HEARD = "first", "agreed", "decided", "verdict", "heard"
_SOON_S = 2.0
"""How long who finds its rank taken waits for a sign that the other lives, where it cannot look."""
_WORDS = 1000
"""How long what stands in a store may be, to be shown."""


class JoinDecision(StrEnum):
    """What can be decided."""

    PROCEED = "proceed"
    MISMATCH = "mismatch"
    DUPLICATE_RANK = "duplicate_rank"
    TIMEOUT = "timeout"


@attrs.frozen
class JoinRequest:
    """What a rank says that comes to build a group.

    Attributes:
        uid: The group's id, if this rank is the first.
        asked: What it asks for, which all must have alike: each argument in words.
    """

    uid: str
    asked: Mapping[str, str]

    def to_text(self) -> str:
        """Return it for the store."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def read(cls, said: bytes) -> JoinRequest:
        """Return what a rank has said.

        Raises:
            WireError: It is something else.
        """
        try:
            fields = json.loads(said)
            claim = cls(**fields)
            texts = (claim.uid, *claim.asked, *claim.asked.values())
            if all(isinstance(each, str) for each in texts):
                return claim
        except (ValueError, TypeError, AttributeError, RecursionError):
            pass  # as where it is of other types
        raise WireError(f"not what a rank says that builds a group: {said[:100]!r}")


class Joining:
    """One rank that comes to build a group.

    Args:
        store: Where the ranks meet. It may serve many groups: each rank counts how often it came, and the
            n-th comers meet.
        rank: The caller's.
        world_size: How many it expects.
        timeout_s: How long it waits for them.
        asked: What it asks for beside `world_size`.
        name: The group's, if it has one.
        roll: Who the ranks are, if they have met before.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        asked: Mapping[str, str],
        name: str | None = None,
        roll: LivenessMonitor | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._name = name
        self._roll = roll
        self._me = JoinRequest(secrets.token_hex(6), {**asked, "world_size": repr(world_size)})

    def come(self) -> FailureWatch:
        """Return the group's own part of the store: for a `with` block in which the group is built.

        Raises:
            RendezvousError: This rank came twice, as two processes.
        """
        nth = self._store.add(f"dist2/joined/{self._rank}", 1)
        if nth > 1:
            self._look_back(_part(self._store, nth - 1))
        scoped = FailureWatch(
            f"dist2/{nth}", self._store, self._rank, self._world_size, self._name, self._roll
        )
        scoped.set_timeout(timedelta(seconds=self._timeout_s))
        return scoped

    def agree(self, scoped: FailureWatch) -> str:
        """Return an id that the group has on all ranks, and no other group of any job.

        Raises:
            InvalidUsageError: Ranks ask for different things.
            RendezvousError: A rank came twice, as two processes.
            OperationTimeoutError: Some did not come; `missing` has them.
            PeerLostError: One failed or died.
        """
        scoped.set(_claim(self._rank), self._me.to_text())
        if scoped.add(_FIRST + "/count", 1) == 1:
            scoped.set(_FIRST, self._me.to_text())
        first = JoinRequest.read(self._get(scoped, _FIRST))
        if first.asked != self._me.asked:
            words = self._difference(scoped)
            _decide(scoped, JoinDecision.MISMATCH, words)
            if (
                read_decision(scoped.get(_VERDICT))[0] is JoinDecision.PROCEED
            ):  # the others do without this one
                self._fail(JoinDecision.MISMATCH, words, [])
        elif scoped.add(_AGREED, 1) == self._world_size:
            _decide(scoped, JoinDecision.PROCEED)
        self._heed(self._get(scoped, _VERDICT), scoped)
        return first.uid

    def _get(self, scoped: PrefixStore, key: str) -> bytes:
        """Return a key's value; give up for all if nobody sets it in time."""
        try:
            return scoped.get(key)
        except PeerLostError:
            raise
        except RuntimeError:  # torch's stores have no type of their own for a timeout
            if not scoped.check([key]):
                missing = self._missing(scoped)
                names = f"{rank_names(missing)} of {self._world_size} did not come"
                if not missing:
                    names = f"all {self._world_size} ranks came, but one did not go on"
                words = f"{names} within {self._timeout_s:.3g} s"
                _decide(scoped, JoinDecision.TIMEOUT, words, missing)
                self._heed(scoped.get(_VERDICT), scoped)
            return scoped.get(key)

    def _heed(self, said: bytes, scoped: PrefixStore) -> None:
        """Raise what was decided, if the group is not made."""
        kind, words, missing = read_decision(said)
        if kind is not JoinDecision.PROCEED:
            scoped.set(_HEARD, "yes")
            self._fail(kind, words, missing)

    def _difference(self, scoped: PrefixStore) -> str:
        """Return who of those that have come asks for what."""
        claims = {self._rank: self._me.asked}
        for rank in range(self._world_size):
            if rank != self._rank and scoped.check([_claim(rank)]):
                claims[rank] = JoinRequest.read(scoped.get(_claim(rank))).asked
        return difference_of(dict(sorted(claims.items()))) or "ranks ask for different groups"

    def _missing(self, scoped: PrefixStore) -> list[int]:
        return absent(scoped, _claim, range(self._world_size))

    def _look_back(self, scoped: PrefixStore) -> None:
        """Find out whether another process plays this rank, and tell those who wait in its group.

        Who comes a second time has been through the first. If that is still undecided, it was another, which
        waits, or died. One that died has left what others may still wait in; nobody hears it if they do not.

        Raises:
            RendezvousError: It lives.
        """
        if _is_decided(scoped) or not _comes(scoped, presence_key(self._rank)):
            return
        text, here = scoped.get(presence_key(self._rank)).decode(errors="replace"), Process.here()
        if text == here.text:
            return
        other = Process.read(text)
        words = f"rank {self._rank} was started twice: as {other or text[:80]} and as {here}"
        _decide(scoped, JoinDecision.DUPLICATE_RANK, words)
        ended = other is not None and other.has_ended
        if not ended and ((other is not None and other.is_another_here) or _comes(scoped, _HEARD)):
            self._fail(JoinDecision.DUPLICATE_RANK, words, [])

    def _fail(self, kind: JoinDecision, words: str, missing: list[int]) -> NoReturn:
        message = f"the group cannot be built: {words}"
        if kind is JoinDecision.TIMEOUT:
            raise OperationTimeoutError(
                message, missing=missing, timeout_s=self._timeout_s, op="new_group", rank=self._rank
            )
        error = InvalidUsageError if kind is JoinDecision.MISMATCH else RendezvousError
        raise error(message, op="new_group", rank=self._rank)


def object_to(store: Store, words: str) -> None:
    """Tell those who build a group in a store, or come to, why somebody who should does not."""
    nth = 1
    while _is_decided(scoped := _part(store, nth)):
        nth += 1
    _decide(scoped, JoinDecision.MISMATCH, f"{Process.here()} cannot come: {words}")


def _part(store: Store, nth: int) -> PrefixStore:
    """Return the part of a store in which its n-th group is built."""
    return PrefixStore(f"dist2/{nth}", store)


def _is_decided(scoped: PrefixStore) -> bool:
    """Whether it is known what became of a group that was to be built."""
    return scoped.check([_VERDICT]) or scoped.check([FAILED])


def _decide(scoped: PrefixStore, kind: JoinDecision, words: str = "", missing: Sequence[int] = ()) -> None:
    """Decide for all, unless somebody has."""
    if scoped.add(_DECIDED, 1) == 1:
        scoped.set(_VERDICT, json.dumps([kind, words, list(missing)]))


def _claim(rank: int) -> str:
    """Return the key of what a rank says."""
    return f"asked/{rank}"


def _comes(scoped: PrefixStore, key: str) -> bool:
    """Whether somebody who lives sets a key soon."""
    try:
        scoped.wait([key], timedelta(seconds=_SOON_S))
    except RuntimeError:  # torch's stores have no type of their own for a timeout
        return False
    return True


def read_decision(said: bytes) -> tuple[JoinDecision, str, list[int]]:
    """Return what was decided, why, and who is missing.

    Raises:
        WireError: It is no verdict.
    """
    try:
        fields: Any = json.loads(said)
        kind, words, missing = fields
        if isinstance(words, str) and all(isinstance(rank, int) for rank in missing):
            return JoinDecision(kind), words[:_WORDS], missing
    except (ValueError, TypeError, RecursionError):
        pass  # as where it is of other types
    raise WireError(f"not the end of what ranks decide that build a group: {said[:100]!r}")
