"""The control messages of an agreement as frames. Sans-IO."""

from __future__ import annotations

from dist2.backends.consensus import Decision, Letter, Vote
from dist2.backends.socket.wire import Header, Kind
from dist2.errors import WireError


def encode(context: int, number: int, letter: Letter, world_size: int) -> bytes:
    """Return the frame of a letter.

    Args:
        context: The group's context id.
        number: Which of its agreements.
        letter: The message.
        world_size: How many ranks the group has.
    """
    payload = b"".join(_bits(ranks, world_size) for ranks in (letter.failed, letter.shrinking))
    kind = Kind.VOTE if isinstance(letter, Vote) else Kind.DECISION
    header = Header(kind, 0, context, number, letter.flags, 0, len(payload), letter.view)
    return header.encode() + payload


def decode(header: Header, payload: bytes | bytearray, world_size: int) -> Letter:
    """Read the letter in a frame.

    Raises:
        WireError: It names ranks that the group does not have.
    """
    length = _length(world_size)
    sets = [int.from_bytes(part, "little") for part in (payload[:length], payload[length:])]
    beyond = any(bits >> world_size for bits in sets) or header.transfer >= world_size
    if len(payload) != 2 * length or beyond:
        raise WireError(f"a {header.kind.name} frame that names ranks a group of {world_size} does not have")
    failed, shrinking = (frozenset(rank for rank in range(world_size) if bits >> rank & 1) for bits in sets)
    letter = Vote if header.kind is Kind.VOTE else Decision
    return letter(header.transfer, header.tag, failed, shrinking)


def _bits(ranks: frozenset[int], world_size: int) -> bytes:
    return sum(1 << rank for rank in ranks).to_bytes(_length(world_size), "little")


def _length(world_size: int) -> int:
    return (world_size + 7) // 8
