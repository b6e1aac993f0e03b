"""`Assembly`: control messages about the group itself: its revocation, and the remaining members.

It works on groups that are broken: letters have nothing to do with the messages of a mailbox, and a death
fails none of them. Everything here runs under the fabric's lock and never blocks.
"""

from __future__ import annotations

from collections.abc import Collection

from dist2.backends.consensus import Consensus, Decision, Letter, Letters, Vote
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.wire import Header, Kind
from dist2.errors import GroupRevokedError, WireError


class Assembly:
    """Revokes groups, and carries the control messages of their agreements.

    Args:
        courier: Gets frames to members.
        outcomes: Fails the messages of a group that is revoked.
        dead: Fabric ids of processes that are dead.
    """

    def __init__(self, courier: Courier, outcomes: Outcomes, dead: Collection[str]) -> None:
        self._courier = courier
        self._outcomes = outcomes
        self._dead = dead

    def revoke(self, mailbox: Mailbox, by: int) -> None:
        """Make every pending and later message of a group fail, here and, once, on all other members.

        Args:
            mailbox: The group.
            by: Group rank that revoked it first.
        """
        if isinstance(mailbox.fault, GroupRevokedError):
            return
        why = mailbox.said(by)
        mailbox.fault = GroupRevokedError(
            f"the group was revoked by {mailbox.names([by])}{mailbox.why([by])}", by=by
        )
        # Reported first: others would take a withdrawn message for that of a rank that gave up by itself.
        frame = Header(Kind.REVOKE, context=mailbox.context, tag=by, nbytes=len(why)).encode() + why
        for rank in range(len(mailbox.fabric_ids)):
            if rank != mailbox.rank and rank not in mailbox.left:
                self._courier.tell(mailbox, rank, frame)
        self._outcomes.fail(mailbox, mailbox.fault)
        mailbox.on_revoked(mailbox.fault)

    def propose(self, mailbox: Mailbox, flags: int, shrinks: bool) -> Consensus:
        """Take part in the group's next agreement, or in the current one."""
        agreements = mailbox.agreements
        consensus = agreements.current()
        dead = {rank for rank, each in enumerate(mailbox.fabric_ids) if each in self._dead}
        self._deal(mailbox, agreements.number, consensus.propose(flags, mailbox.left | dead, shrinks))
        return consensus

    def settle(self, mailbox: Mailbox) -> None:
        """As the coordinator of the current agreement, leave out ranks that have lost their connection."""
        agreements = mailbox.agreements
        self._deal(mailbox, agreements.number, agreements.current().settle())

    def departed(self, mailbox: Mailbox, rank: int) -> None:
        """Go on without a member that died or left."""
        for number, consensus in mailbox.agreements.under_way():
            self._deal(mailbox, number, consensus.leave_out(rank))

    def _deal(self, mailbox: Mailbox, number: int, letters: Letters) -> None:
        for receiver, letter in letters:
            frame = encode(mailbox.context, number, letter, len(mailbox.fabric_ids))
            self._courier.tell(mailbox, receiver, frame)

    # Frames in

    def on_revoke(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        if not 0 <= header.tag < len(mailbox.fabric_ids):
            raise WireError(f"a revocation by rank {header.tag}, which there is not")
        mailbox.take_reason(header.tag, payload)
        self.revoke(mailbox, header.tag)

    def on_letter(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        letter = decode(header, payload or b"", len(mailbox.fabric_ids))
        consensus = mailbox.agreements.known(header.seq)
        if consensus is not None:
            self._deal(mailbox, header.seq, consensus.receive(peer, letter))


# The letters of an agreement as frames. Sans-IO.


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
