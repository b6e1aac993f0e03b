"""What a waiter is told of a group: who called what, who did not come."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dist2.backends.socket.transport.messages.mailbox import Called, Mailbox
from dist2.call import Call
from dist2.errors import MismatchError, OperationTimeoutError


def differing(mailbox: Mailbox) -> dict[int, Called]:
    """Return who is known to have called something else than this rank."""
    mine = (mailbox.mine.seq, mailbox.mine.fingerprint)
    return {
        rank: called
        for rank, called in mailbox.described.items()
        if (called.seq, called.fingerprint) != mine or rank in mailbox.offenders
    }


def explained(mailbox: Mailbox) -> MismatchError:
    """Return the error of a group whose members called different things, from what they said."""
    calls = {rank: called.call for rank, called in mailbox.described.items()}
    for rank in mailbox.offenders - mailbox.described.keys():
        calls[rank] = Call(text="an operation that it did not describe in time")
    actual = {rank: calls[rank].text for rank in differing(mailbox).keys() | mailbox.offenders}
    return mismatch(mailbox.rank, mailbox.mine.call, calls, actual)


def mismatch(rank: int, mine: Call, calls: dict[int, Call], actual: dict[int, str]) -> MismatchError:
    """Return the error that shows each rank's call.

    Args:
        rank: The caller's group rank.
        mine: What it called.
        calls: What the others called, as far as they said.
        actual: What those called that differ from this rank, in words.
    """
    shown = "; ".join(f"rank {other} called {call.text}" for other, call in sorted(calls.items()))
    return MismatchError(
        f"ranks called different operations: rank {rank} (this one) called {mine.text}; {shown}",
        expected=mine.text,
        actual=dict(sorted(actual.items())),
        calls=dict(sorted({**calls, rank: mine}.items())),
    )


def overdue(mailbox: Mailbox, waited_for: Collection[int], collective: bool) -> OperationTimeoutError:
    """Return the error of a wait whose time is up: who did not come, and what each was last seen to call.

    Args:
        waited_for: Group ranks of the messages that did not come through.
        collective: They are of the collective that this rank called last: then those are missing that
            nobody knows to have called it, or if there are none, those whose messages are.
    """
    missing = sorted(waited_for)
    if collective and mailbox.begun:
        seq = mailbox.latest
        missing = [rank for rank, latest in enumerate(mailbox.latest_seen()) if latest < seq] or missing
    return absence(missing, last_seen(mailbox, missing))


def last_seen(mailbox: Mailbox, ranks: Iterable[int]) -> dict[int, str]:
    """Return the operation that each of some members was last seen at, in words."""
    seen = mailbox.latest_seen()
    return {rank: _last_seen(mailbox, rank, seen[rank]) for rank in ranks}


def _last_seen(mailbox: Mailbox, rank: int, seq: int) -> str:
    if seq == 0 and mailbox.witness is not None:
        return mailbox.witness(rank)
    if seq == 0:
        return "nothing in this group"
    return mailbox.describe(seq, 0).text if seq in mailbox.begun else f"operation #{seq}"


def absence(missing: list[int], last_seen: dict[int, str]) -> OperationTimeoutError:
    """Return the error that names who did not come."""
    names = ", ".join(map(str, missing)) or "any"
    seen = "; ".join(f"rank {rank}: {what}" for rank, what in last_seen.items())
    return OperationTimeoutError(
        f"rank(s) {names} did not arrive in time" + (f" (last seen at: {seen})" if seen else ""),
        missing=missing,
        last_seen=last_seen,
    )
