"""`Calls`: the known calls of the members of one group. The fabric's lock guards it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import attrs

from dist2.backends.socket.wire import TAGGED, Header
from dist2.errors import MismatchError
from dist2.operation.description import Call, attributes_differ
from dist2.runtime.rank_names import RANKS, RankNames

REMEMBERED = 64
"""Operations whose fingerprints are kept at least, for messages that come after their end."""
UNKNOWN = 2**64 - 1
"""In place of a fingerprint: such a call is compared by the attributes in its description."""
INTRODUCED = 1024
"""Fingerprints whose meaning is kept, of all members together."""


@attrs.frozen
class Called:
    """The call of a rank, for ranks with another call.

    Attributes:
        seq: Number of the operation.
        fingerprint: Its fingerprint; `UNKNOWN` where the rank itself did not send the call.
        text: The call, in words.
        call: The call, in parts.
    """

    seq: int
    fingerprint: int
    text: str
    call: Call = attrs.field()

    @call.default
    def _nothing(self) -> Call:
        return Call(seq=self.seq, text=self.text)

    def differs_from(self, other: Called) -> bool:
        """Whether it is known to be another call, wherever in the order of calls the two are."""
        if UNKNOWN in (self.fingerprint, other.fingerprint):
            return attributes_differ(self.call, other.call)
        return self.fingerprint != other.fingerprint


NOTHING_YET = Called(0, 0, "nothing yet")

Describe = Callable[[int | None, int], Called]
"""Returns this rank's call of collective ``seq`` (or its last one, if that is long ago); for None, the
point-to-point operation whose message has the given number (or the last one)."""


def _describe_nothing(seq: int | None, number: int) -> Called:
    """Describe calls of a group that was closed."""
    return NOTHING_YET


class Calls:
    """Calls of one group.

    Args:
        rank: The caller's group rank.
        size: Number of members.
        describe: See `Describe`.
        names: Names the members in texts.

    Attributes:
        rank: The caller's group rank.
        describe: See `Describe`.
        names: As above.
        mine: Its result, after a mismatch.
        described: The other members' calls at the mismatch, by group rank.
        offenders: Senders of messages that did not match.
        begun: Fingerprints of the latest collectives, by number.
        latest: Number of the latest of them; 0 before the first.
        seen: For each member, the number of the latest collective that it is known to have called.
        told: Fingerprints with a description already sent, by member.
        introduced: Received descriptions of fingerprints, by the sender's group rank.
        met: The latest collective that ended here and that no rank ends before all have called it.
        put_off_ns: Messages between others did not match: the group fails when the current collective has
            ended, or at this monotonic nanosecond if it does not; 0 if the group is not to fail.
        probes: Calls of blocked members that this rank has not made yet, by group rank.
        witness: Returns the last operation of a member, if collectives use no messages.
        elsewhere: For members without an operation of this group: whether they have made it, in words.
    """

    def __init__(self, rank: int, size: int, describe: Describe, names: RankNames = RANKS) -> None:
        self.describe = describe
        self.names = names
        self.mine = NOTHING_YET
        self.described: dict[int, Called] = {}
        self.offenders: set[int] = set()
        self.begun: dict[int, int] = {}
        self.latest = 0
        self.seen = [0] * size
        self.told: defaultdict[int, set[int]] = defaultdict(set)
        self.introduced: dict[tuple[int, int], Call] = {}
        self.met = 0
        self.put_off_ns = 0
        self.probes: dict[int, Called] = {}
        self.witness: Callable[[int], str] | None = None
        self.elsewhere: dict[int, str] = {}
        self.rank = rank

    def begin(self, seq: int, fingerprint: int) -> None:
        """Keep the fingerprint that an operation's messages must carry; evict the oldest."""
        begun = self.begun
        begun[seq] = fingerprint
        self.latest = seq
        if len(begun) >= 2 * REMEMBERED:  # many at once, which costs less than one each time
            for old in list(begun)[:-REMEMBERED]:
                del begun[old]

    def take(self, error: MismatchError) -> None:
        """Take in which calls differ from an error that tells the calls of all members."""
        said = {rank: Called(call.seq, UNKNOWN, call.text, call) for rank, call in error.calls.items()}
        self.mine = said.pop(self.rank, NOTHING_YET)
        self.described.update(said)
        self.offenders.update(error.actual)

    def let_go(self) -> None:
        """After the group was closed: break the reference cycle with the owner."""
        self.describe = _describe_nothing

    def has_begun(self, seq: int) -> bool:
        """Whether this rank has called operation ``seq``."""
        return bool(self.begun) and seq <= self.latest

    def note_seen(self, peer: int, seq: int, others: Sequence[int]) -> None:
        """Record the progress of a member: its latest collective, and its view of the others' latest ones."""
        if len(others) == len(self.seen):
            self.seen = [max(pair) for pair in zip(self.seen, others, strict=True)]
        self.seen[peer] = max(self.seen[peer], seq)

    def note_called(self, peer: int, seq: int) -> None:
        """Note that a member has called a collective."""
        if seq > self.seen[peer]:
            self.seen[peer] = seq

    def note_introduced(self, peer: int, fingerprint: int, call: Call) -> None:
        """Note the call behind a member's fingerprint; evict the oldest."""
        self.introduced[peer, fingerprint] = call
        if len(self.introduced) > INTRODUCED:
            del self.introduced[next(iter(self.introduced))]

    def latest_seen(self) -> list[int]:
        """Return the latest collective that each member is known to have called."""
        seen = [max(seq, self.met) for seq in self.seen]
        seen[self.rank] = self.latest
        return seen

    def contradicts(self, header: Header) -> bool:
        """Whether a message is of an operation that this rank called differently."""
        if header.flags & TAGGED:
            return False
        return self.begun.get(header.seq, header.fingerprint) != header.fingerprint
