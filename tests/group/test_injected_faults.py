"""``verify=`` against bits that a fault flips in shared memory and on the wire, injected from outside.

Nothing in the library helps. Shared memory is changed through the files of this process; connections go
through a proxy. In each test rank 0 hands a marked tensor to ranks 1 and 2, and a bit is flipped in what
rank 2 is about to read: in memory, once rank 1 has read the same. So the place is certain, the culprit known.

That takes an operation in which rank 1 reads what rank 0 wrote before rank 2 comes: a broadcast in slots,
where rank 0 does not wait, and an all_gather by messages. In the other operations in slots all wait for all.
There, a bit that is flipped before the last rank comes is read by all others, and between the arrival of the
last rank and its copy nothing can stop it from outside. Faults of results are in `test_verification`.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.ranks import Tenant, run_ranks

import dist2
from dist2 import CorruptionError, ProcessGroup, Work
from dist2.group.verification import BLOCK_BYTES

LIMIT_S = 20.0
MARK = bytes(range(131, 195))
MARKS = 64
FLIPPED = MARK[:7] + bytes([MARK[7] ^ 16]) + MARK[8:]


@attrs.frozen
class Case:
    """An operation that hands a tensor of rank 0, with marks at its end, to all ranks."""

    op: str
    nbytes: int

    def empty(self) -> torch.Tensor:
        return torch.zeros(self.nbytes, dtype=torch.uint8)

    def marked(self) -> torch.Tensor:
        x = self.empty()
        x[-MARKS * len(MARK) :] = torch.frombuffer(bytearray(MARKS * MARK), dtype=torch.uint8)
        return x

    def call(self, pg: ProcessGroup, async_op: bool) -> tuple[Work, torch.Tensor]:
        """Call the operation; return where the tensor of rank 0 arrives here, too."""
        mine = self.marked() if pg.rank() == 0 else self.empty()
        if self.op == "broadcast":
            return pg.broadcast(mine, root=0, async_op=async_op), mine
        outputs = [self.empty() for _ in range(pg.size())]
        return pg.all_gather(outputs, mine, async_op=async_op), outputs[0]

    def expect_corruption(self, pg: ProcessGroup, call: Callable[[], object]) -> None:
        """Check that the operation raises, and names rank 2, the operation and the block."""
        with pytest.raises(CorruptionError, match="the result of rank 2 differs from that of the") as caught:
            call()
        error = caught.value
        offset = (self.nbytes - 1) // BLOCK_BYTES * BLOCK_BYTES
        tensor = "the output" if self.op == "broadcast" else "outputs[0]"
        assert (error.ranks, error.op, error.rank) == ((2,), self.op, pg.rank())
        assert (error.tensor, error.offset_bytes, error.nbytes) == (tensor, offset, self.nbytes - offset)


SLOT = Case("broadcast", 3 * BLOCK_BYTES // 2)
RING = Case("all_gather", BLOCK_BYTES // 2)  # longer ones are read from the memory of rank 0
SOCKET = Case("all_gather", 3 * BLOCK_BYTES // 2)


def damage_shared_memory() -> int:
    """Flip a bit of each mark in the memory that the ranks share; return how many marks there were."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor with which this directory is read
            if str(link.readlink()).startswith("/memfd:dist2"):
                with link.open("r+b", buffering=0) as memory:
                    found += _damage(memory.fileno())
    return found


def _damage(fd: int) -> int:
    """Flip a bit of each mark in a sparse file; return their number."""
    found, end = 0, 0
    with suppress(OSError):  # ENXIO: no data follow
        while True:
            start_of_data = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start_of_data, os.SEEK_HOLE)
            data = os.pread(fd, end - start_of_data, start_of_data)
            for match in re.finditer(re.escape(MARK), data):
                os.pwrite(fd, FLIPPED, start_of_data + match.start())
                found += 1
    return found


@pytest.mark.parametrize(
    ("case", "algorithm", "copies"), [(SLOT, "flat", 1), (RING, "direct", 2)], ids=["slot", "ring"]
)
def test_a_bit_flipped_in_shared_memory_is_named(case: Case, algorithm: str, copies: int) -> None:
    held, damaged = threading.Event(), threading.Event()

    def body(pg: ProcessGroup) -> None:
        pg.all_gather_single(torch.empty(3), torch.ones(1))  # all have met: rank 0 need not wait now
        if pg.rank() == 2:
            with pg.backend._node._fabric.poller.role:  # type: ignore[attr-defined]  # nothing of its rings is read meanwhile
                held.set()
                assert damaged.wait(LIMIT_S)
        assert held.wait(LIMIT_S)
        work, arrived = case.call(pg, async_op=True)
        if pg.rank() == 1:
            deadline, found = time.monotonic() + LIMIT_S, 0
            while not torch.equal(arrived, case.marked()):
                assert time.monotonic() < deadline
            while found < copies * MARKS:  # rank 0 may still write that for rank 2
                assert time.monotonic() < deadline
                found += damage_shared_memory()
            damaged.set()
        case.expect_corruption(pg, work.wait)

    run_ranks(3, body, Tenant("shm", "socket", {"transport": "shm", "algorithm": algorithm, "verify": True}))


class Wire:
    """Carries the connections of this process through a proxy that flips a bit on the way to rank 2.

    Ranks connect in threads with their names, as all operations block, and their listeners have addresses of
    their own. So both ends are known.
    """

    ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")

    def __init__(self) -> None:
        self.damaged = False
        self._connect = socket.socket.connect_ex
        self._open = ExitStack()

    def connect_ex(self, sock: socket.socket, address: tuple[str, int]) -> int:
        """Connect a socket to an address by way of the proxy, in place of `socket.connect_ex`."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            code = self._connect(sock, server.getsockname())
            near, _ = server.accept()
        far = socket.create_connection(address)
        self._carry(near, far, to=self.ADDRESSES.index(address[0]))
        self._carry(far, near, to=int(threading.current_thread().name.removeprefix("rank")))
        return code

    def _carry(self, source: socket.socket, sink: socket.socket, to: int) -> None:
        def pump() -> None:
            with suppress(OSError):
                while data := source.recv(1 << 20):
                    if to == 2 and not self.damaged and MARK in data:  # some are in two pieces
                        self.damaged = True
                        data = data.replace(MARK, FLIPPED, 1)
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=pump)
        thread.start()
        self._open.enter_context(source)
        self._open.callback(thread.join)

    def close(self) -> None:
        """Wait until all connections have ended."""
        self._open.close()


def test_a_bit_flipped_in_the_payload_of_a_socket_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *where: wire.connect_ex(*where), raising=False)

    def body(met: ProcessGroup) -> None:
        store = dist2.PrefixStore("wire", met.get_group_store())
        options: dict[str, Any] = {"transport": "tcp", "host": Wire.ADDRESSES[met.rank()], "verify": True}
        with dist2.new_group("socket", LIMIT_S, store=store, rank=met.rank(), world_size=3, **options) as pg:
            SOCKET.expect_corruption(pg, lambda: SOCKET.call(pg, async_op=False))

    run_ranks(3, body, Tenant("met", "fake"))
    wire.close()
    assert wire.damaged
