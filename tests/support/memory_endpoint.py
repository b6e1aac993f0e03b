"""An endpoint in memory, as plans with messages use one, for ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dist2.errors import OperationTimeoutError
from dist2.runtime.deadline import remaining_s

Key = tuple[int, int, int, int]  # from, to, seq, step


class MemoryTransfer:
    """A posted message; `PostOffice` completes it."""

    def __init__(self, peer: int, view: memoryview) -> None:
        self.peer = peer
        self.view = view
        self.number = 0
        self.done = False
        self.error: BaseException | None = None
        self.nbytes = len(view)
        self.source = peer


class PostOffice:
    """Matches the messages of all ranks; a send completes only when its receive is posted."""

    def __init__(self, world_size: int) -> None:
        self.changed = threading.Condition()
        self.sends: dict[Key, MemoryTransfer] = {}
        self.recvs: dict[Key, MemoryTransfer] = {}
        self.messages = 0
        self.endpoints = [MemoryEndpoint(self, rank, world_size) for rank in range(world_size)]

    def post(self, own: dict[Key, MemoryTransfer], key: Key, transfer: MemoryTransfer) -> MemoryTransfer:
        with self.changed:
            assert key not in own, f"posted twice: {key}"
            own[key] = transfer
            if key in self.sends and key in self.recvs:
                send, recv = self.sends.pop(key), self.recvs.pop(key)
                assert send.nbytes == recv.nbytes, f"{key}: {send.nbytes} bytes into {recv.nbytes}"
                if send.view:  # an empty buffer may be read-only
                    recv.view[:] = send.view
                send.done = recv.done = True
                self.messages += 1
                self.changed.notify_all()
        return transfer


class MemoryEndpoint:
    """One rank's side of the post office."""

    def __init__(self, office: PostOffice, rank: int, world_size: int) -> None:
        self.office = office
        self.rank = rank
        self.world_size = world_size
        self.cancelled: list[MemoryTransfer] = []

    def send(self, peer: int, seq: int, step: int, fingerprint: int, data: memoryview) -> MemoryTransfer:
        assert fingerprint
        key = (self.rank, peer, seq, step)
        return self.office.post(self.office.sends, key, MemoryTransfer(peer, data))

    def recv(self, peer: int, seq: int, step: int, fingerprint: int, buffer: memoryview) -> MemoryTransfer:
        assert fingerprint
        key = (peer, self.rank, seq, step)
        return self.office.post(self.office.recvs, key, MemoryTransfer(peer, buffer))

    def wait(
        self, transfers: Sequence[MemoryTransfer], deadline_ns: int, beside: Sequence[MemoryTransfer] = ()
    ) -> None:
        def done() -> bool:
            return all(transfer.done for transfer in transfers)

        with self.office.changed:
            complete = self.office.changed.wait_for(done, remaining_s(deadline_ns))
        if not complete:
            missing = sorted({transfer.source for transfer in transfers if not transfer.done})
            self.cancel(transfers)
            raise OperationTimeoutError(f"ranks {missing} did not arrive", missing=missing)

    def cancel(self, transfers: Sequence[MemoryTransfer]) -> None:
        self.cancelled += [each for each in transfers if not each.done]
