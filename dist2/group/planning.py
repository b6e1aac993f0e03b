"""The first call of each signature: its arguments are checked, and the backend plans it."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from dist2.backends.base import split_rows
from dist2.errors import InvalidUsageError
from dist2.operation import validation as check
from dist2.operation.aliasing import check_apart
from dist2.operation.contract import GroupParts
from dist2.operation.execution import Tensors
from dist2.operation.kinds import OpKind, Reduction
from dist2.operation.plan_cache import Plan
from dist2.operation.signature import Signature, TensorMeta
from dist2.runtime.arguments import check_rank


class Planning(GroupParts):
    """The path of a collective without a cached plan: validate, then plan."""

    def _plan(
        self,
        kind: OpKind,
        agreed: Hashable,
        inputs: Tensors,
        outputs: Tensors,
        *,
        reduction: Reduction | None = None,
        root: int | None = None,
        input_splits: tuple[int, ...] | None = None,
        output_splits: tuple[int, ...] | None = None,
    ) -> Plan:
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
        self._check(input, "input")
        check.check_writable(self._check(output, "output"), "output")
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

    # Checks

    def _check(self, tensor: object, argument: str) -> torch.Tensor:
        return check.check_tensor(tensor, argument, self._taken_types)

    def _check_list(self, tensors: object, argument: str) -> Tensors:
        return check.check_tensors(tensors, argument, self._taken_types)

    def _check_root(self, root: object) -> int:
        return check_rank(root, "root", self.info.world_size)

    def _check_parts(
        self, parts: object, argument: str, like: torch.Tensor, name: str, *, written: bool = False
    ) -> None:
        tensors = self._check_list(parts, argument)
        check.check_one_each(tensors, argument, self.info.world_size)
        check.check_same_dtype(like, name, tensors, argument)
        if written:
            self._check_written(tensors, argument)

    def _check_written(self, tensors: Tensors, argument: str) -> None:
        for index, tensor in enumerate(tensors):
            check.check_writable(tensor, f"{argument}[{index}]")
        check_apart(tensors, argument)

    def _check_whole_and_part(self, whole: object, name: str, part: object, other: str) -> None:
        checked_part = self._check(part, other)
        check.check_concatenation(self._check(whole, name), name, checked_part, other, self.info.world_size)

    def _check_pairs(self, wholes: object, name: str, parts: object, other: str) -> None:
        whole_list, part_list = self._check_list(wholes, name), self._check_list(parts, other)
        if len(whole_list) != len(part_list):
            raise InvalidUsageError(
                f"{name} must be as many as {other}, got {len(whole_list)} and {len(part_list)}"
            )
        for index, (whole, part) in enumerate(zip(whole_list, part_list, strict=True)):
            self._check_whole_and_part(whole, f"{name}[{index}]", part, f"{other}[{index}]")

    def _only_at_root(self, tensors: Tensors, argument: str, root: int) -> bool:
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
