"""Groups without a backend: they number operations and call instruments, as real groups do."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import Any

import torch

from dist2.operation.instruments import Dispatch, Instrument
from dist2.operation.kinds import SUM, OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature, TensorMeta

REDUCING = {OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER, OpKind.REDUCE_SCATTER_SINGLE}


def info_of(
    rank: int = 0,
    world_size: int = 2,
    *,
    uid: str = "world",
    name: str | None = None,
    desc: str = "",
    backend: str = "socket",
    global_ranks: Sequence[int] | None = None,
) -> GroupInfo:
    """Return the identity of a group: by default one of the whole job."""
    ranks = tuple(range(world_size)) if global_ranks is None else tuple(global_ranks)
    return GroupInfo(
        uid=uid, name=uid if name is None else name, desc=desc, backend=backend, rank=rank, global_ranks=ranks
    )


def metas(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[TensorMeta, ...]:
    """Return the metas of tensors of these shapes."""
    return tuple(TensorMeta(tuple(shape), dtype) for shape in shapes)


class FakeGroup:
    """A group as instruments see it, driven by hand."""

    def __init__(self, info: GroupInfo, *instruments: Instrument) -> None:
        self.info = info
        self.dispatch = Dispatch()
        for instrument in instruments:
            self.dispatch.add(instrument)
        self.numbers = {False: 0, True: 0}
        self.dispatch.group_opened(self)

    def close(self) -> None:
        self.dispatch.group_closed(self)

    def signature(
        self,
        kind: OpKind = OpKind.ALL_REDUCE,
        inputs: tuple[TensorMeta, ...] = metas([2]),
        outputs: tuple[TensorMeta, ...] | None = None,
        **fields: Any,
    ) -> Signature:
        if kind in REDUCING:
            fields.setdefault("reduction", SUM)
        chosen = inputs if outputs is None else outputs
        return Signature(kind, self.info, inputs, chosen, **fields)

    def begin(self, signature: Signature | None = None, *, timeout_s: float = 60.0) -> Operation:
        """Call an operation, and let it begin."""
        signature = signature or self.signature()
        self.numbers[signature.kind.is_p2p] += 1
        now_ns = monotonic_ns()
        operation = Operation(
            signature, self.numbers[signature.kind.is_p2p], now_ns, now_ns + int(timeout_s * 1e9), False
        )
        frame_code = type(self).begin.__code__
        operation.code = frame_code
        self.dispatch.started(operation)
        operation.started_ns = now_ns
        return operation

    def end(
        self,
        operation: Operation,
        error: BaseException | None = None,
        *,
        took_ns: int | None = None,
        source: int = -1,
    ) -> Operation:
        """Let an operation end."""
        operation.finished_ns = monotonic_ns() if took_ns is None else operation.created_ns + took_ns
        operation.error = error
        operation.source = source
        self.dispatch.finished(operation)
        return operation

    def run(
        self, signature: Signature | None = None, error: BaseException | None = None, **ended: int
    ) -> Operation:
        """Call an operation and let it end."""
        return self.end(self.begin(signature), error, **ended)
