"""Messages between two ranks, counted on both sides: which rank has made fewer calls than the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from observability.job.answer import State

if TYPE_CHECKING:
    from dist2.operation.signature import GroupInfo
    from observability.flight_recorder import Channel

MAX_CHANNELS = 256
"""Channels of a group whose counts a rank reports; with more of them it reports none."""


def counts_of(info: GroupInfo, delivered: Mapping[Channel, int]) -> dict[str, dict[str, int]] | None:
    """Return how many messages a rank has sent to, and received from, each other rank of a group.

    Returns:
        ``sent`` and ``received``, each by ``PEER/TAG`` with the peer's rank in the job; None if there are too
        many.
    """
    mine = {channel: count for channel, count in delivered.items() if channel[0] is info}
    if len(mine) > MAX_CHANNELS:
        return None
    found: dict[str, dict[str, int]] = {"sent": {}, "received": {}}
    for (_, source, destination, tag), count in mine.items():
        is_sent = source == info.rank
        peer = info.global_ranks[destination if is_sent else source]
        found["sent" if is_sent else "received"][f"{peer}/{tag}"] = count
    return found


def owed(states: Mapping[int, State], rank: int, operation: State) -> str:
    """Say that the peer of a message in flight has made fewer calls; empty if that is not known.

    Args:
        states: By rank in the job.
        rank: The caller.
        operation: Its message.
    """
    peer, tag, is_send = operation["peer"], operation["tag"], operation["op"] == "send"
    if peer is None or peer not in states:
        return ""
    here, there = ("sent", "received") if is_send else ("received", "sent")
    mine = _count(states[rank], operation["uid"], here, peer, tag)
    theirs = _count(states[peer], operation["uid"], there, rank, tag)
    if mine is None or theirs is None:
        return ""
    number = mine + 1 + _earlier(states[rank], operation)
    if theirs + _in_flight(states[peer], operation, rank) >= number:
        return ""
    tagged = f" with tag {tag}" if tag else ""
    return (
        f"rank {peer} has {there} {theirs} message{'' if theirs == 1 else 's'}{tagged} "
        f"{'from' if is_send else 'to'} rank {rank} in group {operation['group']}, "
        f"which waits {'to send' if is_send else 'for'} the {_ordinal(number)}"
    )


def _count(state: State, uid: str, direction: str, peer: int, tag: int) -> int | None:
    group = state["groups"].get(uid)
    counts = None if group is None else group.get("messages")
    return None if counts is None else int(counts[direction].get(f"{peer}/{tag}", 0))


def _is_on_channel(each: State, operation: State, op: str, peer: int | None) -> bool:
    wanted = (operation["uid"], op, peer, operation["tag"])
    return (each["uid"], each["op"], each["peer"], each["tag"]) == wanted


def _earlier(state: State, operation: State) -> int:
    """Return the number of messages of the same channel that are in flight and were called before."""
    same = [
        each
        for each in state["in_flight"]
        if _is_on_channel(each, operation, operation["op"], operation["peer"])
    ]
    return sum(each["seq"] < operation["seq"] for each in same)


def _in_flight(state: State, operation: State, rank: int) -> int:
    """Return the number of calls in flight of a peer that match messages with a rank."""
    op = "recv" if operation["op"] == "send" else "send"
    peers = (rank, None)  # None: of any rank
    return sum(_is_on_channel(each, operation, op, peer) for each in state["in_flight"] for peer in peers)


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
