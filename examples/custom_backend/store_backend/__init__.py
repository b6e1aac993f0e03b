"""A backend that sends tensors through the store: a template for backends of your own.

Every collective is one exchange: each rank puts a message for every other rank under a key, and waits for
those of the others. Each rank combines the messages in the order of ranks, so results are equal on all ranks.

Keys are removed one exchange later: a rank that has all messages of exchange n knows that every other rank
has started it, hence has read all messages of exchange n - 1.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "store"
STEP_S = 0.001
"""Between two looks for a message from any rank."""

_IN_PLACE: dict[Any, Any] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.AVG: torch.Tensor.add_,
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
    dist.ReduceOp.BAND: torch.Tensor.bitwise_and_,
    dist.ReduceOp.BOR: torch.Tensor.bitwise_or_,
    dist.ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}
_OUT_OF_PLACE: dict[Any, Any] = {dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum}


class Done(dist.Work):
    """The Work of a call that was complete when it returned."""

    def __init__(self, source: int = -1) -> None:
        super().__init__()
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank


class Receive(Done):
    """A receive: the message is read by the thread that waits."""

    def __init__(self, group: StoreGroup, tensor: torch.Tensor, sources: Sequence[int], tag: int) -> None:
        super().__init__()
        self._group, self._tensor, self._sources, self._tag = group, tensor, sources, tag
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            limit = timeout or self._group._timeout
            self._source = self._group._take(self._tensor, self._sources, self._tag, limit)
            self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done


class StoreGroup(dist.ProcessGroup):
    """A process group over a store, with the methods of c10d from which dist2 builds all others.

    Args:
        store: Private to the group.
        rank: The caller's rank.
        size: Number of ranks.
        timeout: Limit of operations that name none.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs lack it
        self._store, self._timeout = store, timeout
        self._exchanges = itertools.count()
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    # Collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        everyone = [torch.empty_like(tensor) for _ in range(self.size())]
        self._exchange([tensor] * self.size(), everyone, opts.timeout)
        tensor.detach().copy_(_combined(everyone, opts.reduceOp))
        return Done()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.BroadcastOptions()
        (tensor,) = tensors
        nothing = tensor.new_empty(0)
        mine = tensor if opts.rootRank == self.rank() else nothing
        everyone = [tensor if rank == opts.rootRank else nothing for rank in range(self.size())]
        self._exchange([mine] * self.size(), everyone, opts.timeout)
        return Done()

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.AllgatherOptions()
        self._exchange([inputs[0]] * self.size(), outputs[0], opts.timeout)
        return Done()

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.AllToAllOptions()
        self._exchange(inputs, outputs, opts.timeout)
        return Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        nothing = [torch.empty(0)] * self.size()
        self._exchange(nothing, nothing, (opts or dist.BarrierOptions()).timeout)
        return Done()

    def _exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], timeout: timedelta
    ) -> None:
        """Give ``outgoing[r]`` to rank r, and write the message of rank r to ``incoming[r]``."""
        number, me = next(self._exchanges), self.rank()
        for rank, tensor in enumerate(outgoing):
            self._store.set(f"{number}/{me}/{rank}", _bytes(tensor))  # type: ignore[arg-type]  # stubs: str
        for rank, tensor in enumerate(incoming):
            _write(tensor, self._get(f"{number}/{rank}/{me}", timeout))
        if number:
            for rank in range(self.size()):
                self._store.delete_key(f"{number - 1}/{me}/{rank}")

    # Messages

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        key = self._key(self.rank(), dst, tag, self._sent[dst, tag])
        self._sent[dst, tag] += 1
        self._store.set(key, _bytes(tensors[0]))  # type: ignore[arg-type]  # stubs: str
        return Done()

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        return Receive(self, tensors[0], [src], tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        return Receive(self, tensors[0], range(self.size()), tag)

    def _take(self, tensor: torch.Tensor, sources: Sequence[int], tag: int, timeout: timedelta) -> int:
        """Read the next message of one of these ranks; return which."""
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            for src in sources:
                key = self._key(src, self.rank(), tag, self._received[src, tag])
                if self._store.check([key]):
                    self._received[src, tag] += 1
                    _write(tensor, self._store.get(key))
                    self._store.delete_key(key)
                    return src
            if time.monotonic() > deadline:
                raise RuntimeError(f"timeout: no message of tag {tag} from ranks {list(sources)}")
            time.sleep(STEP_S)

    def _key(self, src: int, dst: int, tag: int, number: int) -> str:
        return f"message/{src}/{dst}/{tag}/{number}"

    def _get(self, key: str, timeout: timedelta) -> bytes:
        limit = timeout if timeout > timedelta() else self._timeout
        self._store.wait([key], limit)
        return self._store.get(key)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _write(tensor: torch.Tensor, content: bytes) -> None:
    if content:
        received = torch.frombuffer(bytearray(content), dtype=tensor.dtype)
        tensor.detach().copy_(received.view(tensor.shape))


def _combined(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Combine the tensors of all ranks in the order of ranks."""
    kind = next((each for each in (*_IN_PLACE, *_OUT_OF_PLACE) if op == each), None)
    if kind is None:
        raise RuntimeError(f"the backend {NAME!r} does not support {op}")
    dtype = tensors[0].dtype
    if dtype in (torch.float16, torch.bfloat16):  # added in float32 and rounded once
        tensors = [tensor.float() for tensor in tensors]
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        result = _IN_PLACE[kind](result, tensor) if kind in _IN_PLACE else _OUT_OF_PLACE[kind](result, tensor)
    if kind is dist.ReduceOp.AVG:
        whole = not (result.is_floating_point() or result.is_complex())
        result = torch.div(result, len(tensors), rounding_mode="trunc") if whole else result / len(tensors)
    return result.to(dtype)


dist.Backend.register_backend(NAME, StoreGroup, devices=["cpu"])
