"""``verify=``: results that must be equal on all ranks are hashed and compared.

Theory of operation. `all_reduce`, `broadcast` and the gathers to all leave the same bytes on all ranks. After
such an operation each rank hashes its result in blocks, and a second operation, an `all_gather_single` of the
hashes, follows it in the group's queue. It is numbered and recorded like any other, and it works on
asynchronous and coalesced calls as well. Every rank compares all hashes by itself. The ranks that find a
difference count themselves in the group's store. If a bit changed among the hashes, only some find one: they
revoke the group, because the others go on.

A hash is the sum of a block's 64-bit words, each multiplied by an odd random constant, modulo 2**64. An error
within one word always changes it, because an odd factor is invertible. Errors in more words cancel for one of
2**63 choices of the constants or fewer.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import NoReturn

import attrs
import torch

from dist2.backends.base import GroupSpec
from dist2.errors import CorruptionError, InvalidUsageError
from dist2.group.planning import Planning
from dist2.operation.execution import Tensors
from dist2.operation.kinds import OpKind, ReduceKind
from dist2.operation.plan_cache import Plan
from dist2.operation.record import Operation
from dist2.operation.runner import Timeout
from dist2.operation.signature import Signature
from dist2.operation.work import Work
from dist2.runtime.arguments import as_int
from dist2.runtime.rank_names import RankNames
from dist2.runtime.signals import OnCtrlC, on_ctrl_c
from dist2.store import PrefixStore

BLOCK_BYTES = 65536
"""Bytes that share a hash: their constants (as many bytes) stay in the L2 cache of a core."""
_WORD_BYTES = 8
_SEED = 2026
_SOON_S = 2.0
"""Time for all ranks to compare the same hashes, in seconds."""
_FOUND, _ALL = "found", "all"
_GATHER = OpKind.ALL_GATHER_SINGLE
EQUAL = frozenset(
    {
        OpKind.ALL_REDUCE,
        OpKind.ALL_REDUCE_COALESCED,
        OpKind.BROADCAST,
        OpKind.ALL_GATHER,
        OpKind.ALL_GATHER_V,
        OpKind.ALL_GATHER_SINGLE,
        OpKind.ALL_GATHER_SINGLE_COALESCED,
    }
)
"""Operations that leave the same bytes on all ranks."""


def check_verify(verify: object) -> int:
    """Return which of the operations are verified: every n-th, or none for 0.

    Raises:
        InvalidUsageError: It is no bool and no int of at least 0.
    """
    every = int(verify) if isinstance(verify, bool) else as_int(verify)
    if every is None or every < 0:
        raise InvalidUsageError(
            f"verify must be a bool, or an int n >= 1 to verify every n-th operation, got {verify!r}"
        )
    return every


def check_completes_on_host(backend: str, verify: int, natively_async: bool) -> None:
    """Refuse to verify results that nothing on the host can read when their operation returns.

    Args:
        backend: The name of the group's backend.
        verify: Which of the operations are to be verified.
        natively_async: Whether the backend completes operations on the device: see `Backend`.

    Raises:
        InvalidUsageError: It does.
    """
    if natively_async:
        raise InvalidUsageError(
            f"verify={verify} needs a backend that completes operations on the host, such as 'socket'; "
            f"{backend!r} completes them on the device"
        )


@on_ctrl_c(OnCtrlC.DEFER_IN_CALLS)
class Verifier:
    """Verifies the results of one group.

    Args:
        planning: The group.
        spec: Its description: every ``verify``-th operation with equal results is verified.
        refuse: Revokes the group because of an error.

    Raises:
        InvalidUsageError: The group's backend completes operations on a device: nothing can be read yet.
    """

    def __init__(self, planning: Planning, spec: GroupSpec, refuse: Callable[[BaseException], None]) -> None:
        runner = planning._runner
        check_completes_on_host(spec.info.backend, spec.verify, runner.backend.natively_async)
        self._planning = planning
        self._spec = spec
        self._refuse = refuse
        self._runner = runner
        self._run = runner.run
        self._count = 0
        self._in_order = threading.RLock()

    def run(self, plan: Plan, inputs: Tensors, outputs: Tensors, async_op: bool, timeout: Timeout) -> Work:
        """Run or issue a collective, and verify its result if its turn has come."""
        with self._in_order:  # the check follows its operation on all ranks, whatever other threads call
            work = self._run(plan, inputs, outputs, async_op, timeout)
            if plan.signature.kind not in EQUAL or _may_differ(plan.signature):
                return work
            self._count += 1
            layout = _Layout.of(plan.signature)
            if self._count % self._spec.verify or not layout.blocks:
                return work
            check = self._check(layout, work)
            checked = self._run(check, _kept(plan.signature, inputs), outputs, async_op, timeout)
        return checked if async_op or self._runner.state.batches else work

    @torch.inference_mode(False)  # another thread may write the hashes
    def _check(self, layout: _Layout, work: Work) -> Plan:
        """Return the plan of the operation that verifies another one."""
        mine = torch.empty(layout.blocks, dtype=torch.int64, device="cpu")
        table = torch.empty(self._spec.info.world_size * layout.blocks, dtype=torch.int64, device="cpu")
        gather = self._runner.plans.find(_GATHER, None, (mine,), (table,))
        if gather is None:
            gather = self._planning._plan(_GATHER, None, (mine,), (table,))

        def run(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
            torch.cat([hashes(output) for output in outputs], out=mine)
            gather.execute(operation, (mine,), (table,))
            rows = table.view(-1, layout.blocks)
            if not torch.equal(rows, mine.expand_as(rows)):
                self._fail(_error(rows, layout, work.operation, self._runner.backend.names))

        return Plan(gather.signature, run)

    def _fail(self, error: CorruptionError) -> NoReturn:
        """Raise an error once all ranks have found it, or the group is revoked."""
        store = PrefixStore(f"verify/{error.seq}", self._spec.store)
        try:
            if store.add(_FOUND, 1) == self._spec.info.world_size:
                store.set(_ALL, b"")
            store.wait([_ALL], timedelta(seconds=_SOON_S))
        except RuntimeError:  # of the store: some find no difference, have ended, or the store has
            self._refuse(error)
        raise error


def _may_differ(signature: Signature) -> bool:
    """Whether results differ in their last bits without a fault: torch rounds these by their place."""
    product = signature.reduction is not None and signature.reduction.kind is ReduceKind.PRODUCT
    return product and any(meta.dtype.is_complex for meta in signature.outputs)


def _kept(signature: Signature, inputs: Tensors) -> Tensors:
    """Return the tensors of a call that keep their values if its result is corrupt: those only read."""
    if signature.reduction is not None or signature.root not in (None, signature.group.rank):
        return ()
    return inputs


@attrs.frozen
class _Layout:
    """The blocks of the outputs of a call.

    Attributes:
        counts: Blocks of each output.
        nbytes: Bytes of each output.
    """

    counts: tuple[int, ...]
    nbytes: tuple[int, ...]

    @classmethod
    def of(cls, signature: Signature) -> _Layout:
        sizes = tuple([meta.nbytes for meta in signature.outputs])
        return cls(tuple([-(-size // BLOCK_BYTES) for size in sizes]), sizes)

    @property
    def blocks(self) -> int:
        return sum(self.counts)

    def find(self, block: int) -> tuple[int, int, int]:
        """Return the output of a block, the block's first byte in it, and its length in bytes."""
        for output, count in enumerate(self.counts):
            if block < count:
                start = block * BLOCK_BYTES
                return output, start, min(BLOCK_BYTES, self.nbytes[output] - start)
            block -= count
        raise IndexError(block)


def _error(rows: torch.Tensor, layout: _Layout, checked: Operation, names: RankNames) -> CorruptionError:
    """Return the error of an operation.

    Args:
        rows: The hashes of the blocks of each rank: int64, ranks by blocks.
        layout: The blocks.
        checked: The operation.
        names: Names its ranks.
    """
    differing = (rows != rows[0]).any(0).nonzero().flatten().tolist()
    found = [_minority(rows[:, block].tolist()) for block in differing]
    ranks = sorted({rank for each in found for rank in each}) if all(found) else []
    output, offset, nbytes = layout.find(differing[0])
    tensor = "the output" if len(layout.counts) == 1 else f"outputs[{output}]"
    place = f"bytes {offset} to {offset + nbytes} of {tensor}"
    if len(differing) > 1:
        place += f", and in {len(differing) - 1} more blocks of {BLOCK_BYTES} bytes"
    verdict = f"results differ between the ranks in {place}; no majority shows which is right"
    if ranks:
        verdict = f"the result of {names(ranks)} differs from that of the other ranks in {place}"
    signature = checked.signature
    return CorruptionError(
        f"{checked.describe()} in group {signature.group.name!r}: {verdict}. A bit changed in memory, in a "
        f"cache or on a link",
        ranks=ranks,
        tensor=tensor,
        offset_bytes=offset,
        nbytes=nbytes,
        group=signature.group.name,
        op=signature.kind.value,
        seq=checked.seq,
        rank=signature.group.rank,
        members=signature.group.global_ranks,
    )


def _minority(values: Sequence[int]) -> list[int]:
    """Return the ranks whose value differs from that of most ranks; none if no value has a majority."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return []
    return [rank for rank, each in enumerate(values) if each != value]


def hashes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the hash of each block of a tensor's bytes, in the order of its elements: int64, 1-d."""
    words, factors = _words(tensor), _factors()
    length = len(factors)
    whole = len(words) // length * length
    if not whole:
        return torch.dot(words, factors[: len(words)]).view(1)
    found = torch.mv(words[:whole].view(-1, length), factors)
    if whole < len(words):
        rest = torch.dot(words[whole:], factors[: len(words) - whole])
        found = torch.cat((found, rest.view(1)))
    return found


_FOLDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Ranks may fold them in different places, by torch or by the core: NaN has any payload, and 0 any sign."""


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as words, with zeros at the end where the last word is not full.

    All NaN are alike, and both zeros.
    """
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    if data.is_complex():
        data = torch.view_as_real(data).view(-1)
    if data.dtype in _FOLDED:
        data = torch.where(data == data, data + 0.0, torch.nan).to(data.dtype)
    data = data.view(torch.uint8)
    missing = -len(data) % _WORD_BYTES
    if missing:
        data = torch.nn.functional.pad(data, (0, missing))
    elif data.storage_offset() % _WORD_BYTES:
        data = data.clone()  # words begin at a multiple of a word in their storage
    return data.view(torch.int64)


@cache
@torch.inference_mode(False)
def _factors() -> torch.Tensor:
    """Return the odd constants of a block's words."""
    limits = torch.iinfo(torch.int64)
    generator = torch.Generator().manual_seed(_SEED)
    shape = (BLOCK_BYTES // _WORD_BYTES,)
    return torch.randint(limits.min, limits.max, shape, generator=generator, device="cpu") | 1
