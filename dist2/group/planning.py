"""The first call of each signature: its arguments are checked, and the backend plans it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from dist2.backends.base import split_rows
from dist2.errors import InvalidUsageError
from dist2.group.arrays import as_tensor
from dist2.operation import validation as check
from dist2.operation.aliasing import check_apart
from dist2.operation.contract import GroupParts
from dist2.operation.execution import Tensors
from dist2.operation.kinds import OpKind, Reduction
from dist2.operation.plan_cache import Arguments, Plan
from dist2.operation.signature import Signature, TensorMeta
from dist2.runtime.arguments import check_rank


class Planning(GroupParts):
    """The path of a collective without a cached plan: validate, then plan."""

    def _plan(
        self,
        kind: OpKind,
        agreed: Hashable,
        inputs: Arguments,
        outputs: Arguments,
        *,
        reduction: Reduction | None = None,
        root: int | None = None,
        input_splits: tuple[int, ...] | None = None,
        output_splits: tuple[int, ...] | None = None,
    ) -> Plan:
        plan = self._plans.find(kind, agreed, inputs, outputs)
        if plan is not None:  # the call named arrays, and these tensors have their memory
            return plan
        read = tuple(map(TensorMeta.of, inputs))
        signature = Signature(
            kind,
            self.info,
            inputs=read,
            outputs=read if outputs is inputs else tuple(map(TensorMeta.of, outputs)),
            reduction=reduction,
            root=root,
            input_splits=input_splits,
            output_splits=output_splits,
        )
        return self._runner.add_plan(signature, agreed, inputs, outputs)

    def _plan_all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        splits: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> Plan:
        world_size = self.info.world_size
        check.check_dtype(input, "input", output, "output")
        received = check.check_splits(splits[0], "output_splits", output, "output", world_size)
        sent = check.check_splits(splits[1], "input_splits", input, "input", world_size)
        mine = self.info.rank
        kept = split_rows(input.detach(), sent, world_size)[mine]
        back = split_rows(output.detach(), received, world_size)[mine]
        check.check_same_numel(
            kept, f"input's block for {self.info.names([mine])}", [back], "output's own block"
        )
        return self._plan(
            OpKind.ALL_TO_ALL_SINGLE, splits, (input,), (output,), input_splits=sent, output_splits=received
        )

    # Checks. Each returns the tensors of an argument: an array is replaced by a tensor with its memory.

    def _check(self, tensor: object, argument: str, *, written: bool = False) -> torch.Tensor:
        checked = check.check_tensor(as_tensor(tensor, argument, written), argument, self._taken_types)
        return check.check_writable(checked, argument) if written else checked

    def _check_list(self, tensors: object, argument: str, *, written: bool = False) -> Tensors:
        if isinstance(tensors, (list, tuple)) and not all(isinstance(each, torch.Tensor) for each in tensors):
            named = [(f"{argument}[{index}]", each) for index, each in enumerate(tensors)]
            tensors = [as_tensor(each, name, written) for name, each in named]
        return check.check_tensors(tensors, argument, self._taken_types)

    def _check_root(self, root: object) -> int:
        return check_rank(root, "root", self.info.world_size)

    def _check_parts(
        self, parts: object, argument: str, like: torch.Tensor, name: str, *, written: bool = False
    ) -> Tensors:
        tensors = self._check_list(parts, argument, written=written)
        check.check_one_each(tensors, argument, self.info.world_size)
        check.check_same_dtype(like, name, tensors, argument)
        return self._check_written(tensors, argument) if written else tensors

    def _check_written(self, tensors: Tensors, argument: str) -> Tensors:
        for index, tensor in enumerate(tensors):
            check.check_writable(tensor, f"{argument}[{index}]")
        check_apart(tensors, argument)
        return tensors

    def _check_gathered(self, output: object, input: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an output that has the parts of all ranks, and this rank's part."""
        part, whole = self._check(input, "input"), self._check(output, "output", written=True)
        check.check_concatenation(whole, "output", part, "input", self.info.world_size)
        return whole, part

    def _check_scattered(self, output: object, input: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an output that gets this rank's part, and the input that has the parts of all ranks."""
        part, whole = self._check(output, "output", written=True), self._check(input, "input")
        check.check_concatenation(whole, "input", part, "output", self.info.world_size)
        return part, whole

    def _check_pairs(self, outputs: object, inputs: object, *, gathers: bool) -> tuple[Tensors, Tensors]:
        """Return the lists of a coalesced `all_gather_single` or `reduce_scatter_single`."""
        written, read = self._check_list(outputs, "outputs", written=True), self._check_list(inputs, "inputs")
        wholes, parts = (written, read) if gathers else (read, written)
        name, other = ("outputs", "inputs") if gathers else ("inputs", "outputs")
        if len(wholes) != len(parts):
            raise InvalidUsageError(f"{name} must be as many as {other}, got {len(wholes)} and {len(parts)}")
        for index, (whole, part) in enumerate(zip(wholes, parts, strict=True)):
            place, beside = f"{name}[{index}]", f"{other}[{index}]"
            check.check_concatenation(whole, place, part, beside, self.info.world_size)
        return self._check_written(written, "outputs"), read

    def _only_at_root(self, tensors: Sequence[object], argument: str, root: int) -> bool:
        """Whether this is the root, which alone may give a list."""
        if self.info.rank == root:
            return True
        if len(tensors):
            names = self.info.names
            raise InvalidUsageError(
                f"{argument} must be None or empty on ranks other than the root {names.argument(root)}, "
                f"got {len(tensors)} tensors on {names([self.info.rank])}"
            )
        return False
