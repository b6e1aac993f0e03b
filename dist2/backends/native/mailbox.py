"""`Mailbox`: what a rank sends to itself, for libraries that cannot."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta

import torch

from dist2.errors import GroupAbortedError, MismatchError, OperationTimeoutError


class Mailbox:
    """Messages matched by tag, in the order sent."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._messages: dict[tuple[int, int], torch.Tensor] = {}
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._closed = False

    def put(self, tag: int, content: torch.Tensor) -> None:
        """Keep a copy of some bytes."""
        with self._arrived:
            self._messages[tag, self._sent[tag]] = content.clone()
            self._sent[tag] += 1
            self._arrived.notify_all()

    def has(self, tag: int) -> bool:
        """Whether a message of this tag is there that no `take` waits for."""
        with self._arrived:
            return self._sent[tag] > self._received[tag]

    def take(self, tag: int) -> Letter:
        """Claim the next message of a tag, whether it is there or not."""
        with self._arrived:
            number = self._received[tag]
            self._received[tag] += 1
        return Letter(self, tag, number)

    def open(self, tag: int, number: int, timeout: timedelta) -> torch.Tensor:
        """Wait for a claimed message and return it."""
        key, limit_s = (tag, number), timeout.total_seconds()
        with self._arrived:
            self._arrived.wait_for(lambda: self._closed or key in self._messages, limit_s)
            if key in self._messages:
                return self._messages.pop(key)
            if self._closed:
                raise GroupAbortedError("the group was taken down")
        raise OperationTimeoutError(
            f"nothing with tag {tag} was sent by this rank to itself within {limit_s:.3g} s",
            timeout_s=limit_s,
        )

    def close(self) -> None:
        """Free whoever waits."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()


class Letter:
    """One message that a receive has claimed."""

    def __init__(self, mailbox: Mailbox, tag: int, number: int) -> None:
        self._mailbox = mailbox
        self._tag = tag
        self._number = number

    def read_into(self, buffer: torch.Tensor, timeout: timedelta) -> None:
        """Wait for the message and copy its bytes.

        Raises:
            MismatchError: It has another size.
            OperationTimeoutError: It did not come.
        """
        content = self._mailbox.open(self._tag, self._number, timeout)
        if content.numel() != buffer.numel():
            raise MismatchError(
                f"this rank sent itself {content.numel()} bytes with tag {self._tag}, "
                f"and receives {buffer.numel()}",
                expected=f"{buffer.numel()} bytes",
                actual={},
            )
        buffer.copy_(content)
