"""What is measured: an operation with its tensors at one rank, and how to tell that it did its work.

``nbytes`` is the size of the largest tensor (or list of tensors) of the operation on a rank: the whole
output of a gather, the whole input of a scatter.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

ROOT = 0
SEND_RECV = "send_recv"

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    SEND_RECV,
)

_WHOLE_IN = {"reduce_scatter", "reduce_scatter_single", "scatter", "all_to_all", "all_to_all_single"}
_WHOLE_OUT = {"all_gather", "all_gather_single", "gather", "all_to_all", "all_to_all_single"}


@attrs.frozen
class Case:
    """An operation at one size.

    Attributes:
        op: One of `OPERATIONS`.
        nbytes: Payload, of float32.
    """

    op: str
    nbytes: int


class WrongResultError(AssertionError):
    """An operation gave something else than it must."""


class Workload:
    """The tensors of a case at one rank. All values are small integers, so that every sum is exact.

    Attributes:
        case: What they are for.
        rank: Whose they are.
        world_size: Of how many.
        input: What is read; ``whole`` times a part, or a part.
        output: What is written; the same tensor where the operation is in place.
    """

    def __init__(self, case: Case, rank: int, world_size: int) -> None:
        self.case = case
        self.rank = rank
        self.world_size = world_size
        part = max(1, case.nbytes // 4 // world_size)
        whole = part * world_size
        in_place = case.op not in _WHOLE_IN | _WHOLE_OUT
        self.input = torch.zeros(whole if in_place or case.op in _WHOLE_IN else part)
        self.output = self.input if in_place else torch.zeros(whole if case.op in _WHOLE_OUT else part)

    @property
    def input_parts(self) -> list[Tensor]:
        """The input as one tensor a rank."""
        return list(self.input.chunk(self.world_size))

    @property
    def output_parts(self) -> list[Tensor]:
        """The output as one tensor a rank."""
        return list(self.output.chunk(self.world_size))

    def fill(self) -> None:
        """Give every rank and element a value of its own, and spoil the output."""
        if self.output is not self.input:
            self.output.fill_(-1)
        self.input.copy_(_values(self.rank, self.input.numel()))

    def clear(self) -> None:
        """Make everything zero, which sums in place leave as it is however often they run."""
        self.input.zero_()
        self.output.zero_()

    def check(self) -> None:
        """Compare the output of a call after `fill` with what it must be.

        Raises:
            WrongResultError: It differs.
        """
        expected = self._expected()
        if expected is not None and not torch.equal(self.output, expected):
            wrong = int((self.output != expected).sum())
            raise WrongResultError(
                f"{self.case.op} of {self.case.nbytes} bytes at rank {self.rank}: "
                f"{wrong} of {expected.numel()} elements are wrong"
            )

    def _expected(self) -> Tensor | None:
        """Return what the output must be; None where this rank's says nothing."""
        op, mine = self.case.op, self.rank
        inputs = [_values(rank, self.input.numel()) for rank in range(self.world_size)]
        if op == "barrier" or (op in ("reduce", "gather") and mine != ROOT):
            return None
        if op in ("all_reduce", "reduce"):
            return torch.stack(inputs).sum(0)
        if op in ("broadcast", SEND_RECV):
            return inputs[ROOT]
        if op in ("all_gather", "all_gather_single", "gather"):
            return torch.cat(inputs)
        if op in ("reduce_scatter", "reduce_scatter_single"):
            return torch.stack(inputs).sum(0).chunk(self.world_size)[mine]
        if op == "scatter":
            return inputs[ROOT].chunk(self.world_size)[mine]
        return torch.cat([each.chunk(self.world_size)[mine] for each in inputs])


def _values(rank: int, numel: int) -> Tensor:
    return (torch.arange(numel) % 1021 + 31 * rank).float()
