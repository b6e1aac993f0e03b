# cython: annotation_typing=False
"""`Parts` and `Layout`: the mapping from the tensors of a call to the buffers of a schedule."""

from __future__ import annotations

from itertools import accumulate

import attrs
import torch


@attrs.frozen
class Parts:
    """The mapping of a schedule's buffer to tensors: part r is the data from or for rank r.

    Attributes:
        numels: Elements of each part.
        single: Whether the parts lie one after the other in a single tensor.
    """

    numels: tuple[int, ...]
    single: bool

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        return 1 if self.single else len(self.numels)

    def sizes(self, itemsize: int) -> list[int]:
        """Return the bytes of each tensor."""
        numels = [sum(self.numels)] if self.single else self.numels
        return [numel * itemsize for numel in numels]

    def begins(self, first: int, itemsize: int) -> list[tuple[int, int]]:
        """Return the tensor of each part, whose first has a number, and its first byte there."""
        if not self.single:
            return [(first + part, 0) for part in range(len(self.numels))]
        return [(first, at * itemsize) for at in accumulate(self.numels[:-1], initial=0)]

    def block(self, index: int, numel: int) -> tuple[int, ...]:
        """Return how many elements of each part fall into a block."""
        return tuple([max(0, min(numel, part - index * numel)) for part in self.numels])


@attrs.frozen
class Layout:
    """The division of a call's tensors into parts.

    Attributes:
        inputs: Those read.
        outputs: Those written.
        dtype: The dtype of all of them.
    """

    inputs: Parts
    outputs: Parts
    dtype: torch.dtype
