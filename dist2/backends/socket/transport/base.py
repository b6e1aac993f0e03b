"""The interface of transports for the socket backend: numbered messages between a group's members.

An `Endpoint` is one group's view of the process's `Fabric` (see ``fabric.py``): it knows the members
by group rank and stamps every message with the group's context id. Posting never blocks; `wait` does,
and a thread that waits makes progress for every group of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

ANY_SOURCE = -1
"""As ``peer`` of `recv_tagged`: take the first matching message from any member."""


class Transfer(Protocol):
    """One posted send or receive.

    Attributes:
        number: Unique in the process.
        done: It has ended, with `error` if it failed. The buffer is free for other use.
        error: The cause of its failure.
        nbytes: Bytes moved, once done. A tagged receive may get fewer than its buffer holds.
        source: Group rank of the other side; known for `ANY_SOURCE` once done.
    """

    number: int
    done: bool
    error: BaseException | None
    nbytes: int
    source: int

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call back once it is done (at once if it is), from the thread that completes it."""


class Endpoint(Protocol):
    """Messages between the members of one group.

    Collective messages are matched by ``(peer, seq, step)``: `seq` numbers the operation in its group,
    `step` the message within the operation's schedule between these two ranks. `fingerprint` is the
    operation's; where the two sides differ, both get `MismatchError`. Tagged ones are matched by
    ``(peer, tag)`` in the order sent. Messages to oneself work.

    Attributes:
        rank: The caller's group rank.
        world_size: Members of the group.
        waited_ns: How long threads that waited for messages had nothing to move; 0 if it is not measured.
    """

    rank: int
    world_size: int
    waited_ns: int = 0

    def send(self, peer: int, seq: int, step: int, fingerprint: int, data: memoryview) -> Transfer:
        """Post a collective message. ``data`` must stay unchanged until the transfer is done."""

    def recv(self, peer: int, seq: int, step: int, fingerprint: int, buffer: memoryview) -> Transfer:
        """Post the buffer that takes a collective message of exactly its size."""

    def send_tagged(self, peer: int, tag: int, fingerprint: int, data: memoryview) -> Transfer:
        """Post a point-to-point message; small ones are done once buffered, large ones once received."""

    def recv_tagged(self, peer: int, tag: int, fingerprint: int, buffer: memoryview) -> Transfer:
        """Post the buffer that takes the next message of this tag from ``peer`` (or `ANY_SOURCE`).

        A message longer than the buffer, or one of another fingerprint, is a `MismatchError` on both
        sides.
        """

    def wait(self, transfers: Sequence[Transfer], deadline_ns: int, beside: Sequence[Transfer] = ()) -> None:
        """Return when all are done, making progress meanwhile; raise as soon as one has failed.

        Args:
            transfers: The awaited transfers.
            deadline_ns: When to give up.
            beside: Other transfers started for the same operation: it is not waited for, but where it fails
                the rest may never come.

        Raises:
            OperationTimeoutError: The deadline passed; `missing` has the ranks of unfinished transfers.
                The unfinished ones are cancelled: their buffers are free when this returns.
            PeerLostError, MismatchError, GroupAbortedError: The cause of a transfer's failure, as raised
                by the first that did; the others are cancelled.
        """

    def cancel(self, transfers: Sequence[Transfer]) -> None:
        """Give up on transfers: when this returns no thread touches their buffers. Idempotent."""

    def disagree(self, seq: int) -> None:
        """Fail the group on all members: those of this host called different operations as number ``seq``."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group's context; pending transfers fail with ``error`` (default: group closed)."""
