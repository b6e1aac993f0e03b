"""Workloads: an operation with its tensors at one rank, and a check of its result.

``nbytes`` is the size of the largest tensor (or list of tensors) of the operation on a rank: the whole
output of a gather, the whole input of a scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import attrs
import torch
from torch import Tensor

from dist2.backends.shared_tensors import shared_empty

ROOT = 0
BARRIER = "barrier"
SEND_RECV = "send_recv"

HOT, FRESH, COLD = BUFFERS = ("hot", "fresh", "cold")
"""The state of buffers before each call: see `measuring`."""

OPERATIONS = (
    "all_reduce",
    "all_gather_single",
    "reduce_scatter_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all_single",
    SEND_RECV,
    BARRIER,
)
"""Those that every peer has."""

LIST_OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all")
"""Those on lists of tensors, which MPI does not have."""

_WHOLE_IN = {"reduce_scatter", "reduce_scatter_single", "scatter", "all_to_all", "all_to_all_single"}
_WHOLE_OUT = {"all_gather", "all_gather_single", "gather", "all_to_all", "all_to_all_single"}
_SUMS = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"}
_BLOCK = 1 << 20
_PERIOD = 1021


@attrs.frozen
class Case:
    """An operation at one size.

    Attributes:
        op: One of `OPERATIONS` or `LIST_OPERATIONS`.
        nbytes: Payload, of float32; 0 for a barrier.
        shared: Tensors are from `dist2.shared_empty`, which other ranks of the host can map.
    """

    op: str
    nbytes: int
    shared: bool = False

    def footprint(self, world_size: int) -> int:
        """Return the bytes that the tensors of all ranks take."""
        part = self.nbytes // world_size
        beside = 0 if self.op not in _WHOLE_IN | _WHOLE_OUT else part
        if self.op in _WHOLE_IN & _WHOLE_OUT:
            beside = self.nbytes
        return (self.nbytes + beside) * world_size

    def bus_factor(self, world_size: int) -> float:
        """Return the bytes that a rank must send or receive, divided by the operation's ``nbytes``."""
        if self.op == "all_reduce":
            return 2 * (world_size - 1) / world_size
        parted = self.op in _WHOLE_IN | _WHOLE_OUT
        return (world_size - 1) / world_size if parted else 1.0


class WrongResultError(AssertionError):
    """An operation gave something else than it must."""


@attrs.frozen
class _Piece:
    """A part of an output: the sum of the patterns of some ranks, from an element on."""

    tensor: Tensor
    ranks: Sequence[int]
    start: int


class Workload:
    """The tensors of a case at one rank. All values are small integers, so that every sum is exact.

    Attributes:
        case: The operation, dtype and size.
        rank: The rank that they belong to.
        world_size: Number of ranks.
        input: The tensor that is read: ``whole`` times a part, or a part.
        output: The tensor that is written; the same tensor where the operation is in place.
    """

    def __init__(self, case: Case, rank: int, world_size: int) -> None:
        self.case = case
        self.rank = rank
        self.world_size = world_size
        part = max(1, case.nbytes // 4 // world_size)
        whole = part * world_size
        in_place = case.op not in _WHOLE_IN | _WHOLE_OUT
        empty = shared_empty if case.shared else torch.empty
        self.input = empty(whole if in_place or case.op in _WHOLE_IN else part)
        self.output = self.input if in_place else empty(whole if case.op in _WHOLE_OUT else part)

    @property
    def input_parts(self) -> list[Tensor]:
        """The input as one tensor a rank."""
        return list(self.input.chunk(self.world_size))

    @property
    def output_parts(self) -> list[Tensor]:
        """The output as one tensor a rank."""
        return list(self.output.chunk(self.world_size))

    def fill(self) -> None:
        """Give every rank and element a different value, and poison the output."""
        if self.output is not self.input:
            self.output.fill_(-1)
        for start, block in _blocks(self.input):
            block.copy_(_values(self.rank, start, block.numel()))

    def clear(self) -> None:
        """Make everything zero, which sums in place leave as it is however often they run."""
        self.input.zero_()
        self.output.zero_()

    def check(self) -> None:
        """Compare the output of a call after `fill` with the expected values.

        Raises:
            WrongResultError: It differs.
        """
        wrong = sum(_wrong(piece) for piece in self._expected())
        if wrong:
            raise WrongResultError(
                f"{self.case.op} of {self.case.nbytes} bytes at rank {self.rank}: "
                f"{wrong} of {self.output.numel()} elements are wrong"
            )

    def _expected(self) -> list[_Piece]:
        """Return the expected output; nothing where this rank's output is undefined."""
        op, mine, everyone = self.case.op, self.rank, range(self.world_size)
        if op == BARRIER or (op in ("reduce", "gather") and mine != ROOT) or (op == SEND_RECV and mine > 1):
            return []
        part = self.output.numel() if op in _WHOLE_IN - _WHOLE_OUT else self.output.numel() // self.world_size
        if op in _SUMS:
            start = mine * part if op in _WHOLE_IN else 0
            return [_Piece(self.output, everyone, start)]
        if op in ("broadcast", SEND_RECV, "scatter"):
            return [_Piece(self.output, [ROOT], mine * part if op == "scatter" else 0)]
        start = mine * part if op in _WHOLE_IN else 0
        return [_Piece(each, [rank], start) for rank, each in enumerate(self.output_parts)]


def _wrong(piece: _Piece) -> int:
    """Return how many elements are wrong; block by block, as large expectations would fill the memory."""
    wrong = 0
    for start, block in _blocks(piece.tensor):
        expected = torch.zeros(block.numel())
        for rank in piece.ranks:
            expected += _values(rank, piece.start + start, block.numel())
        wrong += 0 if torch.equal(block, expected) else int((block != expected).sum())
    return wrong


def _blocks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, tensor.numel(), _BLOCK):
        yield start, tensor[start : start + _BLOCK]


def _values(rank: int, start: int, numel: int) -> Tensor:
    """Return a rank's pattern from an element on: it repeats, and differs from that of other ranks."""
    offset = start % _PERIOD
    return _pattern()[offset : offset + numel] + 31 * rank


@lru_cache(maxsize=1)
def _pattern() -> Tensor:
    return (torch.arange(_BLOCK + _PERIOD) % _PERIOD).float()
