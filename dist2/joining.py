"""How the ranks of a new group come together in a store, and find out that they want the same group.

The first to come says what it asks for; each compares that with its own. The last of those that ask for the
same decides that the group is made, and whoever finds something wrong, or gives up, that it is not. It is
decided once, and all wait for the decision: so all are told, at once, by whoever knew first.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import StrEnum
from typing import Any, NoReturn

import attrs
from torch.distributed import Store

from dist2.errors import InvalidUsageError, OperationTimeoutError, RendezvousError, WireError
from dist2.store import PrefixStore
from dist2.store.process import Process
from dist2.validation import difference_of

_FIRST, _AGREED, _DECIDED, _VERDICT, _HEARD = "first", "agreed", "decided", "verdict", "heard"
_HEARD_S = 2.0
"""How long who finds its rank taken waits for a sign that the other lives, where it cannot look."""
_WORDS = 1000
"""How long what stands in a store may be, to be shown."""


class Verdict(StrEnum):
    """What can be decided."""

    GO = "go"
    DIFFER = "differ"
    TWICE = "twice"
    LATE = "late"
    GONE = "gone"


@attrs.frozen
class Claim:
    """What a rank says that comes to build a group.

    Attributes:
        uid: The group's id, if this rank is the first.
        asked: What it asks for, which all must have alike: each argument in words.
        process: Which process it is.
    """

    uid: str
    asked: Mapping[str, str]
    process: str

    def to_text(self) -> str:
        """Return it for the store."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def read(cls, said: bytes) -> Claim:
        """Return what a rank has said.

        Raises:
            WireError: It is something else.
        """
        try:
            fields = json.loads(said)
            claim = cls(**fields)
            texts = (claim.uid, claim.process, *claim.asked, *claim.asked.values())
            if all(isinstance(each, str) for each in texts):
                return claim
        except (ValueError, TypeError, AttributeError, RecursionError):
            pass  # as where it is of other types
        raise WireError(f"not what a rank says that builds a group: {said[:100]!r}")

    @property
    def who(self) -> str:
        """Which process it is, for messages."""
        process = Process.read(self.process)
        return self.process[:80] if process is None else str(process)


class Joining:
    """One rank that comes to build a group.

    Args:
        store: Where the ranks meet. It may serve many groups: each rank counts how often it came, and the
            n-th comers meet.
        rank: The caller's.
        world_size: How many it expects.
        timeout_s: How long it waits for them.
        asked: What it asks for beside `world_size`.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout_s: float, asked: Mapping[str, str]
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        process = Process.here()
        self._me = Claim(secrets.token_hex(6), {**asked, "world_size": repr(world_size)}, process.text)

    def join(self) -> tuple[Store, str]:
        """Return the group's own part of the store, and an id that no other group of any job has.

        Raises:
            InvalidUsageError: Ranks ask for different things.
            RendezvousError: A rank came twice, as two processes, or one gave up.
            OperationTimeoutError: Some did not come; `missing` has them.
        """
        nth = self._store.add(f"dist2/joined/{self._rank}", 1)
        if nth > 1:
            self._look_back(PrefixStore(f"dist2/{nth - 1}", self._store))
        scoped = PrefixStore(f"dist2/{nth}", self._store)
        scoped.set_timeout(timedelta(seconds=self._timeout_s))
        try:
            return scoped, self._agree(scoped)
        except BaseException as error:
            with suppress(RuntimeError):  # the store may be what failed
                why = f"rank {self._rank} gave up: {type(error).__name__}: {error}"
                self._decide(scoped, Verdict.GONE, why)
            raise

    def _agree(self, scoped: PrefixStore) -> str:
        scoped.set(_claim(self._rank), self._me.to_text())
        if scoped.add(_FIRST + "/count", 1) == 1:
            scoped.set(_FIRST, self._me.to_text())
        first = Claim.read(self._get(scoped, _FIRST))
        if first.asked != self._me.asked:
            self._decide(scoped, Verdict.DIFFER, self._difference(scoped))
        elif scoped.add(_AGREED, 1) == self._world_size:
            self._decide(scoped, Verdict.GO)
        self._heed(self._get(scoped, _VERDICT), scoped)
        return first.uid

    def _get(self, scoped: PrefixStore, key: str) -> bytes:
        """Return a key's value; give up for all if nobody sets it in time."""
        try:
            return scoped.get(key)
        except RuntimeError:  # torch's stores have no type of their own for a timeout
            if not scoped.check([key]):
                missing = self._missing(scoped)
                names = f"rank(s) {', '.join(map(str, missing))} of {self._world_size} did not come"
                if not missing:
                    names = f"all {self._world_size} ranks came, but one did not go on"
                words = f"{names} within {self._timeout_s:.3g} s{scoped.refused(self._timeout_s)}"
                self._decide(scoped, Verdict.LATE, words, missing)
                self._heed(scoped.get(_VERDICT), scoped)
            return scoped.get(key)

    def _heed(self, said: bytes, scoped: PrefixStore) -> None:
        """Raise what was decided, if the group is not made."""
        kind, words, missing = read_verdict(said)
        if kind is not Verdict.GO:
            scoped.set(_HEARD, "yes")
            self._fail(kind, words, missing)

    def _difference(self, scoped: PrefixStore) -> str:
        """Return who of those that have come asks for what."""
        claims = {self._rank: self._me.asked}
        for rank in range(self._world_size):
            if rank != self._rank and scoped.check([_claim(rank)]):
                claims[rank] = Claim.read(scoped.get(_claim(rank))).asked
        return difference_of(dict(sorted(claims.items()))) or "ranks ask for different groups"

    def _missing(self, scoped: PrefixStore) -> list[int]:
        return [rank for rank in range(self._world_size) if not scoped.check([_claim(rank)])]

    def _look_back(self, scoped: PrefixStore) -> None:
        """Find out whether another process plays this rank, and tell those who wait in its group.

        Who comes a second time has been through the first. If that is still undecided, it was another, which
        waits, or died. One that died has left what others may still wait in; nobody hears it if they do not.

        Raises:
            RendezvousError: It lives.
        """
        if scoped.check([_VERDICT]) or not scoped.check([_claim(self._rank)]):
            return
        other = Claim.read(scoped.get(_claim(self._rank)))
        if other.process == self._me.process:
            return
        words = f"rank {self._rank} was started twice: as {other.who} and as {self._me.who}"
        process = Process.read(other.process)
        self._decide(scoped, Verdict.TWICE, words)
        ended = process is not None and process.has_ended
        if not ended and ((process is not None and process.is_another_here) or _heard(scoped)):
            self._fail(Verdict.TWICE, words, [])

    def _decide(
        self, scoped: PrefixStore, kind: Verdict, words: str = "", missing: Sequence[int] = ()
    ) -> None:
        """Decide for all, unless somebody has."""
        if scoped.add(_DECIDED, 1) == 1:
            scoped.set(_VERDICT, json.dumps([kind, words, list(missing)]))

    def _fail(self, kind: Verdict, words: str, missing: list[int]) -> NoReturn:
        message = f"the group cannot be built: {words}"
        if kind is Verdict.LATE:
            raise OperationTimeoutError(
                message, missing=missing, timeout_s=self._timeout_s, op="new_group", rank=self._rank
            )
        error = InvalidUsageError if kind is Verdict.DIFFER else RendezvousError
        raise error(message, op="new_group", rank=self._rank)


def _claim(rank: int) -> str:
    """Return the key of what a rank says."""
    return f"asked/{rank}"


def _heard(scoped: PrefixStore) -> bool:
    """Whether somebody has read the verdict."""
    try:
        scoped.wait([_HEARD], timedelta(seconds=_HEARD_S))
    except RuntimeError:  # torch's stores have no type of their own for a timeout
        return False
    return True


def read_verdict(said: bytes) -> tuple[Verdict, str, list[int]]:
    """Return what was decided, why, and who is missing.

    Raises:
        WireError: It is no verdict.
    """
    try:
        fields: Any = json.loads(said)
        kind, words, missing = fields
        if isinstance(words, str) and all(isinstance(rank, int) for rank in missing):
            return Verdict(kind), words[:_WORDS], missing
    except (ValueError, TypeError, RecursionError):
        pass  # as where it is of other types
    raise WireError(f"not the end of what ranks decide that build a group: {said[:100]!r}")
