"""`Mismatches`: compares the calls of the members of a board, and raises if they differ.

A member that finds a mismatch writes its call at that fence into its control page. A member that does not
wait for all at a fence has logged its call before: see `call_log`.
"""

from __future__ import annotations

import time

from dist2.backends.socket.transport.boards.call_log import CallLog, names_call, read_call_log
from dist2.backends.socket.transport.boards.control_words import (
    DESCRIBED,
    ENTRY,
    PHASES,
    PRINT_BITS,
    RING,
    SEQ,
    WINDOW,
    entry_at,
)
from dist2.backends.socket.transport.boards.regions import TEXT_AT, TEXT_BYTES, Regions
from dist2.backends.socket.transport.boards.roster import Peers
from dist2.backends.socket.transport.messages.explaining import HEAR_S, mismatch
from dist2.backends.socket.transport.spinning import yield_core
from dist2.errors import MismatchError
from dist2.operation.description import Call
from dist2.operation.engine import Arrivals
from dist2.operation.record import Operation
from dist2.runtime.rank_names import RankNames

_LENGTH_BITS = 16
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1


class Mismatches:
    """The differing calls of all members, as one member sees them.

    Args:
        rank: The caller's.
        own: Its control words.
        regions: Where the members write.
        arrivals: How this member comes to fences.
        peers: The other members that were met.
        names: Names the members in texts.
    """

    def __init__(
        self,
        rank: int,
        own: memoryview,
        regions: Regions,
        arrivals: Arrivals,
        peers: Peers,
        names: RankNames,
    ) -> None:
        self._names = names
        self._rank = rank
        self._own = own
        self._regions = regions
        self._arrivals = arrivals
        self._peers = peers
        self._call_log: CallLog | None = None

    # This member's call

    def log_call(self, operation: Operation) -> int:
        """Log a call; return the number that names it, to be published with a fence."""
        if self._call_log is None:
            self._call_log = CallLog(self._regions.call_log(self._rank))
        word = self._call_log.word(operation)
        self._arrivals.texts = self._call_log.count
        return word

    def publish(self, call: Call, phase: int) -> None:
        """Publish the call of this member at a fence."""
        text = call.encode()
        self._regions.part(self._rank, TEXT_AT, len(text))[:] = text
        self._own[DESCRIBED] = phase << _LENGTH_BITS | len(text)

    # The others' calls

    def published(self, rank: int) -> Call:
        """Return the last call that another member has published."""
        described = next(words[DESCRIBED] for words, member in self._peers if member.rank == rank)
        return self._text(rank, described)

    def last_seen(self, rank: int) -> str:
        """Return the operation that another member was last seen at, in words."""
        seq = next((words[SEQ] for words, member in self._peers if member.rank == rank), 0)
        if seq == 0:
            return "no operation of this group"
        known: dict[int, Operation] = {
            each.seq: each for each in (self._arrivals.before, self._arrivals.at) if each is not None
        }
        if seq in known:
            return known[seq].describe()
        call = self._of_operation(seq)
        return f"operation #{seq}" if call is None else call.text

    def compare(self) -> None:
        """Raise if a member has called something else at one of the last fences.

        Words of older ones are equal, or this member would not have come here.

        Raises:
            MismatchError: Names the calls of all ranks.
        """
        phase = self._arrivals.phase
        for number in range(max(1, phase - WINDOW), phase + 1):
            at = entry_at(number)
            word = self._own[at]
            for words, _ in self._peers:
                seen = words[at]
                if seen != word and seen >> PRINT_BITS == number % PHASES and seen:
                    raise self._mismatch(number, word)

    def _mismatch(self, phase: int, word: int) -> MismatchError:
        """Exchange descriptions with all members, which see the mismatch as well, and return the error with
        each rank's call."""
        mine = self._called(phase)
        self.publish(mine, phase)
        calls: dict[int, Call] = {}
        deadline = time.monotonic() + HEAR_S
        while len(calls) < len(self._peers) and time.monotonic() < deadline:
            for words, member in self._peers:
                call = None if member.rank in calls else self._at_fence(words, member.rank, phase)
                if call is not None:
                    calls[member.rank] = call
            yield_core()
        at = entry_at(phase)
        differ = {member.rank for words, member in self._peers if words[at] != word}
        for rank in differ - calls.keys():
            calls[rank] = Call(text="an operation that it did not describe in time")
        actual = {rank: calls[rank].text for rank in differ}
        return mismatch(self._rank, mine, calls, actual, self._names)

    def _called(self, phase: int) -> Call:
        """Return this member's call at one of the last fences."""
        left = self._left_at(self._own, self._rank, phase)
        if left is not None:
            return left
        assert self._arrivals.at is not None  # it logs calls in which it does not wait for all
        operation: Operation = self._arrivals.at
        return operation.call()

    def _at_fence(self, words: memoryview, rank: int, phase: int) -> Call | None:
        """Return the published call of a member at one of the last fences; None if it says nothing yet."""
        described = words[DESCRIBED]
        if described >> _LENGTH_BITS == phase:
            return self._text(rank, described)
        return self._left_at(words, rank, phase)

    def _text(self, rank: int, described: int) -> Call:
        """Return the text that a member has published, of the length that its `DESCRIBED` says."""
        nbytes = min(described & _LENGTH_MASK, TEXT_BYTES)
        return Call.decode(bytes(self._regions.part(rank, TEXT_AT, nbytes)))

    def _left_at(self, words: memoryview, rank: int, phase: int) -> Call | None:
        """Return the call that a member logged at one of the last fences; None if there is none."""
        if words[entry_at(phase)] >> PRINT_BITS != phase % PHASES:
            return None
        return read_call_log(self._regions.call_log(rank), words[entry_at(phase) + 1])

    def _of_operation(self, seq: int) -> Call | None:
        """Return one of the last calls that this member logged, by its number."""
        for word in self._own[1 : RING * ENTRY : ENTRY]:
            if names_call(word, seq):
                return read_call_log(self._regions.call_log(self._rank), word)
        return None
