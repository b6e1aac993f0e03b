"""Texts for errors of a wait: the calls of each rank, and the ranks that did not arrive."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dist2.backends.socket.transport.messages.calls import Called, Calls
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.errors import MismatchError, OperationTimeoutError, ResourceError
from dist2.operation.description import Call, describe_calls, describe_difference, is_behind
from dist2.runtime.rank_names import RankNames

HEAR_S = 0.3
"""Longest time that a rank with a failed operation waits for the others' reports."""


NO_OPERATION = "no operation of this group"


def left_words(why: str = "") -> str:
    """Return that a rank has closed the group which others wait for, in words that follow its name.

    Args:
        why: The error that broke the group on it, as a suffix; empty without one.
    """
    fewer = " after fewer calls: uneven batches? Use torch's Join, or agree on the number of steps"
    return f"left the group{why or fewer}"


def differing(calls: Calls) -> set[int]:
    """Return the members that are known to have called something else than this rank.

    Others may accuse a member that called the same as this rank: the accuser differs then. A member that is
    still at an earlier collective differs if this rank called that one differently. Those that have gone on,
    as the root of a broadcast does, are named if no other one is: they differ from each other. Where calls
    match but not the lengths of their parts, both sides of such a part are returned.
    """
    others, mine = calls.described, calls.mine
    if any(each.call.sizes for each in (mine, *others.values())):
        return calls.offenders | {rank for rank, called in others.items() if called.call.sizes}
    ahead = {rank for rank, called in others.items() if is_behind(mine.call, called.call)}
    here = {rank for rank in others.keys() - ahead if _differs(others[rank], calls)}
    there = {rank for rank in ahead if others[rank].differs_from(mine)}
    return here | (calls.offenders - others.keys()) or there or ahead


def _differs(called: Called, calls: Calls) -> bool:
    """Whether a call that is not ahead of this rank's is known to be another."""
    if not is_behind(called.call, calls.mine.call):
        return called.differs_from(calls.mine)
    own = calls.describe(called.seq, 0)  # the last one, if that is long ago
    return called.seq > 0 and called.differs_from(own)


def explained(calls: Calls) -> MismatchError:
    """Return the error of a group whose members' calls differ, from their descriptions."""
    said = {rank: called.call for rank, called in calls.described.items()}
    for rank in calls.offenders - calls.described.keys():
        said[rank] = Call(text="an operation that it did not describe in time")
    actual = {rank: said[rank].text for rank in differing(calls)}
    return mismatch(calls.rank, calls.mine.call, said, actual, calls.names)


def mismatch(
    rank: int, mine: Call, calls: dict[int, Call], actual: dict[int, str], names: RankNames
) -> MismatchError:
    """Return the error that shows each rank's call.

    Args:
        rank: The caller's group rank.
        mine: Its call.
        calls: The known calls of the others.
        actual: The calls that differ from this rank's, in words.
        names: Names the ranks.
    """
    everyone = dict(sorted({**calls, rank: mine}.items()))
    return MismatchError(
        f"{describe_difference(everyone, names)}: {describe_calls(everyone, names)} "
        f"(this is {names([rank], False)})",
        expected=mine.text,
        actual=dict(sorted(actual.items())),
        calls=everyone,
    )


def overdue(
    mailbox: Mailbox, waited_for: Collection[int], collective: bool, shortage: ResourceError | None
) -> OperationTimeoutError:
    """Return the error of an expired wait: the missing ranks, and the last known operation of each.

    Args:
        mailbox: The group.
        waited_for: Group ranks of the messages that did not come through.
        collective: They belong to this rank's last collective. Then the members that are not known to have
            called it are missing, or, if there are none, the senders of the missing messages.
        shortage: See `absence`.
    """
    calls, missing = mailbox.calls, sorted(waited_for)
    if collective and calls.begun:
        seq = calls.latest
        missing = [rank for rank, latest in enumerate(calls.latest_seen()) if latest < seq] or missing
    seen = last_seen(calls, missing)
    if not collective:
        seen = {rank: _last_sent(mailbox, rank) or _known(words) for rank, words in seen.items()}
    return absence(missing, seen, calls.names, shortage)


def _known(words: str) -> str:
    """Return the last known operation of a member which may be in a message, in words."""
    return "no operation that this rank knows of" if words == NO_OPERATION else words


def _last_sent(mailbox: Mailbox, rank: int) -> str:
    """Return the message of a member that waits for its receive here, or the last one known, in words."""
    introduced, arrived = mailbox.calls.introduced, mailbox.first_unreceived(rank)
    if arrived is None:
        return next((introduced[key].text for key in reversed(introduced) if key[0] == rank), "")
    tag = arrived.header.tag
    call = introduced.get((rank, arrived.header.fingerprint))
    sent = f"send(peer={mailbox.rank}, tag={tag})" if call is None else call.with_tag(tag).text
    return f"{sent}, for which this rank has posted no recv; if each sends first, one must use isend"


def last_seen(calls: Calls, ranks: Iterable[int]) -> dict[int, str]:
    """Return the operation that each of some members was last seen at, in words."""
    seen = calls.latest_seen()
    return {rank: _last_seen(calls, rank, seen[rank]) for rank in ranks}


def _last_seen(calls: Calls, rank: int, seq: int) -> str:
    if seq == 0:
        found = NO_OPERATION if calls.witness is None else calls.witness(rank)
        return calls.elsewhere.get(rank, found) if found == NO_OPERATION else found
    return calls.describe(seq, 0).text if seq in calls.begun else f"operation #{seq}"


def absence(
    missing: list[int], last_seen: dict[int, str], names: RankNames, shortage: ResourceError | None = None
) -> OperationTimeoutError:
    """Return the error that names the ranks that did not arrive; no rank, where any could have.

    Args:
        missing: Their group ranks.
        last_seen: Their last known operations.
        names: Names the ranks.
        shortage: The lack of a resource that a connection of this process waits for.
    """
    absent = f"{names(missing)} did not arrive in time" if missing else "nothing arrived in time"
    lacking = "" if shortage is None else f"; a connection of this rank waits: {shortage}"
    return OperationTimeoutError(
        f"{absent}{names.last_seen(last_seen)}{lacking}",
        missing=missing,
        last_seen=last_seen,
    )
