"""The collectives of a group, by their modern names.

Each looks up the plan of its signature (validating and planning on the first call of it) and runs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist2.group.arrays import Array
from dist2.group.planning import Planning
from dist2.group.sparse import all_reduce_sparse
from dist2.operation import validation as check
from dist2.operation.kinds import SUM, AnyReduceOp, OpKind, ReduceOp, Reduction
from dist2.operation.runner import Timeout
from dist2.operation.work import Work
from dist2.runtime.signals import OnCtrlC, on_ctrl_c

_SUM = ReduceOp.SUM

# Names of their own: to look up a member of an enum takes a while in some versions of Python.
_ALL_GATHER = OpKind.ALL_GATHER
_ALL_GATHER_SINGLE = OpKind.ALL_GATHER_SINGLE
_ALL_GATHER_SINGLE_COALESCED = OpKind.ALL_GATHER_SINGLE_COALESCED
_ALL_GATHER_V = OpKind.ALL_GATHER_V
_ALL_REDUCE = OpKind.ALL_REDUCE
_ALL_REDUCE_COALESCED = OpKind.ALL_REDUCE_COALESCED
_ALL_TO_ALL = OpKind.ALL_TO_ALL
_ALL_TO_ALL_SINGLE = OpKind.ALL_TO_ALL_SINGLE
_BARRIER = OpKind.BARRIER
_BROADCAST = OpKind.BROADCAST
_GATHER = OpKind.GATHER
_REDUCE = OpKind.REDUCE
_REDUCE_SCATTER = OpKind.REDUCE_SCATTER
_REDUCE_SCATTER_SINGLE = OpKind.REDUCE_SCATTER_SINGLE
_REDUCE_SCATTER_SINGLE_COALESCED = OpKind.REDUCE_SCATTER_SINGLE_COALESCED
_REDUCE_SCATTER_V = OpKind.REDUCE_SCATTER_V
_SCATTER = OpKind.SCATTER


@on_ctrl_c(OnCtrlC.DEFER_IN_CALLS)
class Collectives(Planning):
    """Operations that every member calls, in the same order.

    Unless said otherwise: tensors live on the group's device and may be non-contiguous, 0-d or empty; an
    array of numpy, or with ``__dlpack__``, stands for a tensor with its memory; all ranks must agree on the
    operation, the reduction, dtypes, element counts and the root. Outputs may share memory with inputs: such
    an input is read from a copy, unless it is the rank's own part of the result, as in
    ``all_gather_single(whole, whole[rank])``. With ``async_op=False`` (the default) the
    operation is complete when the call returns; with True it completes in the background, and its tensors
    must be left alone until ``work.wait()``. ``root`` may also be spelled ``src`` or ``dst``.

    Every method can raise, besides the errors listed with it:
        InvalidUsageError: An argument is wrong; nothing was sent.
        MismatchError: Ranks called different operations, or disagree on an argument.
        OperationTimeoutError: The limit passed; names the ranks that did not arrive.
        PeerLostError: A rank died or left.
        GroupAbortedError, GroupRevokedError: The group was taken down.
    """

    def all_reduce(
        self,
        tensor: Array,
        op: AnyReduceOp = _SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work:
        """Combine the tensors of all ranks; every rank's tensor becomes the result.

        Floating-point results are bitwise equal on all ranks and from run to run: contributions are
        combined in rank order.

        Args:
            tensor: Read and overwritten. Same dtype and element count on all ranks. A sparse (COO) tensor
                has the same shape on all ranks; it takes SUM and AVG, and is complete when the call returns.
            op: A `ReduceOp` or `Reduction`.
            async_op: Return at once; the result is there after `Work.wait`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.

        Examples:
            >>> tensor = torch.full((2,), pg.rank() + 1.0)
            >>> pg.all_reduce(tensor)
            >>> tensor
            tensor([3., 3.])
        """
        reduction = SUM if op is _SUM else Reduction.of(op)
        tensors = (tensor,)
        plan = self._plans.find(_ALL_REDUCE, reduction, tensors, tensors)
        if plan is None:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo:
                return all_reduce_sparse(self, tensor, reduction, timeout)
            tensors = (self._check(tensor, "tensor", written=True),)
            plan = self._plan(_ALL_REDUCE, reduction, tensors, tensors, reduction=reduction)
        return self._run(plan, tensors, tensors, async_op, timeout)

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Array],
        op: AnyReduceOp = _SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work:
        """Combine each tensor of a list with its counterparts, as one operation.

        Args:
            tensors: Read and overwritten; dtypes may differ within the list.
            op: A `ReduceOp` or `Reduction`.
            async_op: Return at once; the result is there after `Work.wait`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.

        Examples:
            >>> tensors = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
            >>> pg.all_reduce_coalesced(tensors)
            >>> tensors
            [tensor([2., 2.]), tensor([2, 2, 2])]
        """
        reduction = Reduction.of(op)
        plan = self._plans.find(_ALL_REDUCE_COALESCED, reduction, tensors, tensors)
        if plan is None:
            tensors = self._check_written(self._check_list(tensors, "tensors", written=True), "tensors")
            plan = self._plan(_ALL_REDUCE_COALESCED, reduction, tensors, tensors, reduction=reduction)
        return self._run(plan, tensors, tensors, async_op, timeout)

    def broadcast(
        self, tensor: Array, root: int = 0, timeout: Timeout = None, *, async_op: bool = False
    ) -> Work:
        """Copy the root's tensor over that of every other rank.

        Args:
            tensor: Read at the root, overwritten elsewhere.
            root: Group rank.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> tensor = torch.full((2,), float(pg.rank()))
            >>> pg.broadcast(tensor, root=1)
            >>> tensor
            tensor([1., 1.])
        """
        if type(root) is not int:  # True and 1.0 would find the plan of 1
            root = self._check_root(root)
        tensors = (tensor,)
        plan = self._plans.find(_BROADCAST, root, tensors, tensors)
        if plan is None:
            tensors = (self._check(tensor, "tensor", written=root != self.info.rank),)
            plan = self._plan(_BROADCAST, root, tensors, tensors, root=self._check_root(root))
        return self._run(plan, tensors, tensors, async_op, timeout)

    def reduce(
        self,
        tensor: Array,
        root: int = 0,
        op: AnyReduceOp = _SUM,
        timeout: Timeout = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Combine the tensors of all ranks at the root; the others keep theirs unchanged.

        Args:
            tensor: Read; overwritten at the root.
            root: Group rank.
            op: A `ReduceOp` or `Reduction`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> tensor = torch.ones(2)
            >>> pg.reduce(tensor, root=0)
            >>> tensor.tolist() == ([2.0, 2.0] if pg.rank() == 0 else [1.0, 1.0])
            True
        """
        reduction = Reduction.of(op)
        if type(root) is not int:
            root = self._check_root(root)
        outputs = (tensor,) if root == self.info.rank else ()
        plan = self._plans.find(_REDUCE, (reduction, root), (tensor,), outputs)
        if plan is None:
            self._check_root(root)
            tensor = self._check(tensor, "tensor", written=bool(outputs))
            outputs = (tensor,) if outputs else ()
            plan = self._plan(_REDUCE, (reduction, root), (tensor,), outputs, reduction=reduction, root=root)
        return self._run(plan, (tensor,), outputs, async_op, timeout)

    def all_gather(
        self,
        outputs: Sequence[Array],
        input: Array,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work:
        """Collect the input of every rank on every rank.

        Args:
            outputs: One tensor a rank, overwritten; each of the input's dtype and element count.
            input: Read. Same element count on all ranks; `all_gather_v` takes differing ones.
            async_op: Return at once; the result is there after `Work.wait`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.

        Examples:
            >>> outputs = [torch.empty(1) for _ in range(pg.size())]
            >>> pg.all_gather(outputs, torch.full((1,), float(pg.rank())))
            >>> outputs
            [tensor([0.]), tensor([1.])]
        """
        plan = self._plans.find(_ALL_GATHER, None, (input,), outputs)
        if plan is None:
            input = self._check(input, "input")
            outputs = self._check_parts(outputs, "outputs", input, "input", written=True)
            check.check_same_numel(input, "input", outputs, "outputs")
            plan = self._plan(_ALL_GATHER, None, (input,), outputs)
        return self._run(plan, (input,), outputs, async_op, timeout)

    def all_gather_v(
        self,
        outputs: Sequence[Array],
        input: Array,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work:
        """Collect inputs with a different size on each rank.

        Args:
            outputs: One tensor a rank, overwritten; ``outputs[r]`` has the element count that rank r
                brings. Every rank must expect the same counts.
            input: Read.
            async_op: Return at once; the result is there after `Work.wait`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.

        Examples:
            >>> outputs = [torch.empty(1), torch.empty(2)]
            >>> pg.all_gather_v(outputs, torch.full((pg.rank() + 1,), float(pg.rank())))
            >>> outputs
            [tensor([0.]), tensor([1., 1.])]
        """
        plan = self._plans.find(_ALL_GATHER_V, None, (input,), outputs)
        if plan is None:
            input = self._check(input, "input")
            outputs = self._check_parts(outputs, "outputs", input, "input", written=True)
            mine = self.info.rank
            check.check_numel(input, "input", outputs[mine], f"outputs[{mine}]")
            plan = self._plan(_ALL_GATHER_V, None, (input,), outputs)
        return self._run(plan, (input,), outputs, async_op, timeout)

    def all_gather_single(
        self,
        output: Array,
        input: Array,
        timeout: Timeout = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Collect the input of every rank, one after the other, in one tensor on every rank.

        Args:
            output: Overwritten: world size times the elements of the input, by rank.
            input: Read. Same element count on all ranks.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> output = torch.empty(4)
            >>> pg.all_gather_single(output, torch.full((2,), float(pg.rank())))
            >>> output
            tensor([0., 0., 1., 1.])
        """
        plan = self._plans.find(_ALL_GATHER_SINGLE, None, (input,), (output,))
        if plan is None:
            output, input = self._check_gathered(output, input)
            plan = self._plan(_ALL_GATHER_SINGLE, None, (input,), (output,))
        return self._run(plan, (input,), (output,), async_op, timeout)

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Array],
        inputs: Sequence[Array],
        timeout: Timeout = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Do `all_gather_single` for each pair of two lists, as one operation.

        Args:
            outputs: One tensor for each input, as in `all_gather_single`; overwritten.
            inputs: Read.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> outputs = [torch.empty(2), torch.empty(4)]
            >>> pg.all_gather_single_coalesced(outputs, [torch.ones(1), torch.zeros(2)])
            >>> outputs
            [tensor([1., 1.]), tensor([0., 0., 0., 0.])]
        """
        plan = self._plans.find(_ALL_GATHER_SINGLE_COALESCED, None, inputs, outputs)
        if plan is None:
            outputs, inputs = self._check_pairs(outputs, inputs, gathers=True)
            plan = self._plan(_ALL_GATHER_SINGLE_COALESCED, None, inputs, outputs)
        return self._run(plan, inputs, outputs, async_op, timeout)

    def reduce_scatter(
        self,
        output: Array,
        inputs: Sequence[Array],
        op: AnyReduceOp = _SUM,
        timeout: Timeout = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Combine ``inputs[r]`` of all ranks at rank r.

        Args:
            output: Overwritten.
            inputs: One tensor a rank, read; each of the output's dtype and element count.
            op: A `ReduceOp` or `Reduction`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> output = torch.empty(2)
            >>> pg.reduce_scatter(output, [torch.zeros(2), torch.ones(2)])
            >>> output.tolist() == ([0.0, 0.0] if pg.rank() == 0 else [2.0, 2.0])
            True
        """
        reduction = Reduction.of(op)
        plan = self._plans.find(_REDUCE_SCATTER, reduction, inputs, (output,))
        if plan is None:
            output = self._check(output, "output", written=True)
            inputs = self._check_parts(inputs, "inputs", output, "output")
            check.check_same_numel(output, "output", inputs, "inputs")
            plan = self._plan(_REDUCE_SCATTER, reduction, inputs, (output,), reduction=reduction)
        return self._run(plan, inputs, (output,), async_op, timeout)

    def reduce_scatter_v(
        self,
        output: Array,
        inputs: Sequence[Array],
        op: AnyReduceOp = _SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work:
        """Combine ``inputs[r]`` of all ranks at rank r, where sizes differ by r.

        Args:
            output: Overwritten; has the element count of ``inputs[rank]``.
            inputs: One tensor a rank, read; ``inputs[r]`` has the same element count on all ranks.
            op: A `ReduceOp` or `Reduction`.
            async_op: Return at once; the result is there after `Work.wait`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.

        Examples:
            >>> output = torch.empty(pg.rank() + 1)
            >>> pg.reduce_scatter_v(output, [torch.ones(1), torch.ones(2)])
            >>> output.tolist() == ([2.0] if pg.rank() == 0 else [2.0, 2.0])
            True
        """
        reduction = Reduction.of(op)
        plan = self._plans.find(_REDUCE_SCATTER_V, reduction, inputs, (output,))
        if plan is None:
            output = self._check(output, "output", written=True)
            inputs = self._check_parts(inputs, "inputs", output, "output")
            mine = self.info.rank
            check.check_numel(output, "output", inputs[mine], f"inputs[{mine}]")
            plan = self._plan(_REDUCE_SCATTER_V, reduction, inputs, (output,), reduction=reduction)
        return self._run(plan, inputs, (output,), async_op, timeout)

    def reduce_scatter_single(
        self,
        output: Array,
        input: Array,
        op: AnyReduceOp = _SUM,
        timeout: Timeout = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Combine the inputs of all ranks and leave the r-th part of the result at rank r.

        Args:
            output: Overwritten.
            input: Read: world size times the elements of the output, by rank.
            op: A `ReduceOp` or `Reduction`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> output = torch.empty(1)
            >>> pg.reduce_scatter_single(output, torch.tensor([1.0, 2.0]))
            >>> output.item() == (2.0 if pg.rank() == 0 else 4.0)
            True
        """
        reduction = Reduction.of(op)
        plan = self._plans.find(_REDUCE_SCATTER_SINGLE, reduction, (input,), (output,))
        if plan is None:
            output, input = self._check_scattered(output, input)
            plan = self._plan(_REDUCE_SCATTER_SINGLE, reduction, (input,), (output,), reduction=reduction)
        return self._run(plan, (input,), (output,), async_op, timeout)

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Array],
        inputs: Sequence[Array],
        op: AnyReduceOp = _SUM,
        timeout: Timeout = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Do `reduce_scatter_single` for each pair of two lists, as one operation.

        Args:
            outputs: One tensor for each input, as in `reduce_scatter_single`; overwritten.
            inputs: Read.
            op: A `ReduceOp` or `Reduction`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> outputs = [torch.empty(1), torch.empty(2)]
            >>> pg.reduce_scatter_single_coalesced(outputs, [torch.ones(2), torch.ones(4)])
            >>> outputs
            [tensor([2.]), tensor([2., 2.])]
        """
        reduction = Reduction.of(op)
        plan = self._plans.find(_REDUCE_SCATTER_SINGLE_COALESCED, reduction, inputs, outputs)
        if plan is None:
            outputs, inputs = self._check_pairs(outputs, inputs, gathers=False)
            plan = self._plan(
                _REDUCE_SCATTER_SINGLE_COALESCED, reduction, inputs, outputs, reduction=reduction
            )
        return self._run(plan, inputs, outputs, async_op, timeout)

    def gather(
        self,
        outputs: Sequence[Array] | None,
        input: Array,
        root: int = 0,
        timeout: Timeout = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Collect the input of every rank at the root.

        Args:
            outputs: At the root: one tensor a rank, overwritten, each of the input's dtype and element
                count. Elsewhere: None or empty.
            input: Read. Same element count on all ranks.
            root: Group rank.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> outputs = [torch.empty(1), torch.empty(1)] if pg.rank() == 0 else None
            >>> pg.gather(outputs, torch.full((1,), float(pg.rank())), root=0)
            >>> outputs == ([torch.tensor([0.0]), torch.tensor([1.0])] if pg.rank() == 0 else None)
            True
        """
        outputs = outputs if outputs is not None else ()
        if type(root) is not int:
            root = self._check_root(root)
        plan = self._plans.find(_GATHER, root, (input,), outputs)
        if plan is None:
            self._check_root(root)
            input = self._check(input, "input")
            if self._only_at_root(outputs, "outputs", root):
                outputs = self._check_parts(outputs, "outputs", input, "input", written=True)
                check.check_same_numel(input, "input", outputs, "outputs")
            plan = self._plan(_GATHER, root, (input,), outputs, root=root)
        return self._run(plan, (input,), outputs, async_op, timeout)

    def scatter(
        self,
        output: Array,
        inputs: Sequence[Array] | None = None,
        root: int = 0,
        timeout: Timeout = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Give each rank its tensor of the root's list.

        Args:
            output: Overwritten. Same element count on all ranks.
            inputs: At the root: one tensor a rank, read, each of the output's dtype and element count.
                Elsewhere: None or empty.
            root: Group rank.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> output = torch.empty(1)
            >>> pg.scatter(output, [torch.zeros(1), torch.ones(1)] if pg.rank() == 0 else None, root=0)
            >>> output.item() == pg.rank()
            True
        """
        inputs = inputs if inputs is not None else ()
        if type(root) is not int:
            root = self._check_root(root)
        plan = self._plans.find(_SCATTER, root, inputs, (output,))
        if plan is None:
            self._check_root(root)
            output = self._check(output, "output", written=True)
            if self._only_at_root(inputs, "inputs", root):
                inputs = self._check_parts(inputs, "inputs", output, "output")
                check.check_same_numel(output, "output", inputs, "inputs")
            plan = self._plan(_SCATTER, root, inputs, (output,), root=root)
        return self._run(plan, inputs, (output,), async_op, timeout)

    def all_to_all(
        self,
        outputs: Sequence[Array],
        inputs: Sequence[Array],
        timeout: Timeout = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Send ``inputs[r]`` to rank r and receive from rank r into ``outputs[r]``.

        Args:
            outputs: One tensor a rank, overwritten; ``outputs[r]`` has the element count that rank r
                sends to this one.
            inputs: One tensor a rank, read; sizes may differ, the dtype may not.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> outputs = [torch.empty(1), torch.empty(1)]
            >>> pg.all_to_all(outputs, [torch.tensor([0.0]), torch.tensor([1.0])])
            >>> [output.item() for output in outputs] == [pg.rank(), pg.rank()]
            True
        """
        plan = self._plans.find(_ALL_TO_ALL, None, inputs, outputs)
        if plan is None:
            inputs = self._check_list(inputs, "inputs")
            check.check_one_each(inputs, "inputs", self.info.world_size)
            check.check_same_dtype(inputs[0], "inputs[0]", inputs, "inputs")
            outputs = self._check_parts(outputs, "outputs", inputs[0], "inputs[0]", written=True)
            mine = self.info.rank
            check.check_numel(inputs[mine], f"inputs[{mine}]", outputs[mine], f"outputs[{mine}]")
            plan = self._plan(_ALL_TO_ALL, None, inputs, outputs)
        return self._run(plan, inputs, outputs, async_op, timeout)

    def all_to_all_single(
        self,
        output: Array,
        input: Array,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        timeout: Timeout = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Exchange blocks of rows: the r-th block of the input goes to rank r.

        Args:
            output: Overwritten: the blocks received, by rank.
            input: Read.
            output_splits: Rows of dimension 0 received from each rank; None or empty for equal parts.
            input_splits: Rows of dimension 0 sent to each rank; None or empty for equal parts.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> output = torch.empty(2)
            >>> pg.all_to_all_single(output, torch.tensor([0.0, 1.0]))
            >>> output.tolist() == [pg.rank(), pg.rank()]
            True
        """
        splits = (
            check.check_counts(output_splits, "output_splits"),
            check.check_counts(input_splits, "input_splits"),
        )
        plan = self._plans.find(_ALL_TO_ALL_SINGLE, splits, (input,), (output,))
        if plan is None:
            input, output = self._check(input, "input"), self._check(output, "output", written=True)
            plan = self._plan_all_to_all_single(output, input, splits)
        return self._run(plan, (input,), (output,), async_op, timeout)

    def barrier(self, timeout: Timeout = None, *, async_op: bool = False) -> Work:
        """Return when every rank has called.

        Args:
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.
            async_op: Return at once; the result is there after `Work.wait`.

        Examples:
            >>> pg.barrier(timeout=5)
        """
        plan = self._plans.find(_BARRIER, None, (), ())
        if plan is None:
            plan = self._plan(_BARRIER, None, (), ())
        return self._run(plan, (), (), async_op, timeout)
