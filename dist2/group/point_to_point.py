"""The point-to-point operations of a group. They run beside collectives, never behind one."""

from __future__ import annotations

import torch

from dist2.group.arrays import Array, as_tensor
from dist2.operation import validation as check
from dist2.operation.contract import GroupParts
from dist2.operation.execution import Tensors
from dist2.operation.kinds import OpKind
from dist2.operation.plan_cache import Plan
from dist2.operation.runner import Timeout
from dist2.operation.signature import Signature, TensorMeta
from dist2.operation.work import Work
from dist2.runtime.arguments import check_rank, check_tag
from dist2.runtime.signals import OnCtrlC, on_ctrl_c

# Names of their own: to look up a member of an enum takes a while in some versions of Python.
_RECV = OpKind.RECV
_SEND = OpKind.SEND


@on_ctrl_c(OnCtrlC.DEFER_IN_CALLS)
class PointToPoint(GroupParts):
    """Messages between two members, matched by ``(source, tag)`` in the order sent."""

    def send(
        self,
        tensor: Array,
        dst: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work:
        """Send a tensor to a rank; it may be reused when the Work is complete.

        Small messages complete once buffered, large ones once the receiver takes them: two ranks that
        both `send` large tensors first wait for each other, so use `isend`.

        Args:
            tensor: Read.
            dst: Group rank; sending to oneself works.
            tag: Tells messages between two ranks apart; a receive takes only its own tag.
            async_op: Return at once; the result is there after `Work.wait`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.

        Raises:
            InvalidUsageError, MismatchError, OperationTimeoutError, PeerLostError, GroupAbortedError: See
                `ProcessGroup`.

        Examples:
            >>> tensor = torch.full((2,), float(pg.rank()))
            >>> pg.send(tensor, dst=1) if pg.rank() == 0 else pg.recv(tensor, src=0)
            >>> tensor
            tensor([0., 0.])
        """
        if type(dst) is not int or type(tag) is not int:  # True and 1.0 would find the plan of 1
            dst, tag = self._address(dst, "dst", tag)
        inputs = (tensor,)
        plan = self._plans.find(_SEND, (dst, tag), inputs, ())
        if plan is None:
            inputs = (self._as_tensor(tensor, written=False),)
            plan = self._plan_p2p(_SEND, inputs, (), dst, "dst", tag)
        return self._run_p2p(plan, inputs, (), async_op, timeout)

    def recv(
        self,
        tensor: Array,
        src: int | None = None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work:
        """Receive a tensor from a rank, or from any rank.

        Args:
            tensor: Overwritten; must have the element count and dtype that was sent.
            src: Group rank, or None for any; ``work.source_rank()`` tells which it was.
            tag: Takes only messages of this tag.
            async_op: Return at once; the result is there after `Work.wait`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.

        Raises:
            InvalidUsageError, MismatchError, OperationTimeoutError, PeerLostError, GroupAbortedError: See
                `ProcessGroup`.

        Examples:
            >>> tensor = torch.full((2,), float(pg.rank()))
            >>> pg.send(tensor, dst=1) if pg.rank() == 0 else pg.recv(tensor, src=0)
            >>> tensor
            tensor([0., 0.])
        """
        if type(src) is not int or type(tag) is not int:
            src, tag = (None, check_tag(tag)) if src is None else self._address(src, "src", tag)
        outputs = (tensor,)
        plan = self._plans.find(_RECV, (src, tag), (), outputs)
        if plan is None:
            outputs = (self._as_tensor(tensor, written=True),)
            plan = self._plan_p2p(_RECV, (), outputs, src, "src", tag)
        return self._run_p2p(plan, (), outputs, async_op, timeout)

    def isend(self, tensor: Array, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work:
        """Do `send` in the background.

        Args:
            tensor: Read; left alone until the work is done.
            dst: Group rank.
            tag: As in `send`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.

        Examples:
            >>> received, peer = torch.empty(1), 1 - pg.rank()
            >>> works = [pg.isend(torch.ones(1), peer), pg.irecv(received, peer)]
            >>> all(work.wait() for work in works)
            True
        """
        return self.send(tensor, dst, tag, async_op=True, timeout=timeout)

    def irecv(self, tensor: Array, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work:
        """Do `recv` in the background.

        Args:
            tensor: Overwritten.
            src: Group rank; None for any.
            tag: As in `recv`.
            timeout: Limit of this operation, a `timedelta` or seconds; by default the group's.

        Examples:
            >>> received, peer = torch.empty(1), 1 - pg.rank()
            >>> works = [pg.isend(torch.ones(1), peer), pg.irecv(received, peer)]
            >>> all(work.wait() for work in works)
            True
        """
        return self.recv(tensor, src, tag, async_op=True, timeout=timeout)

    def _as_tensor(self, tensor: object, *, written: bool) -> torch.Tensor:
        checked = check.check_tensor(as_tensor(tensor, "tensor", written), "tensor", self._taken_types)
        return check.check_writable(checked, "tensor") if written else checked

    def _plan_p2p(
        self, kind: OpKind, inputs: Tensors, outputs: Tensors, peer: int | None, argument: str, tag: int
    ) -> Plan:
        plan = self._plans.find(kind, (peer, tag), inputs, outputs)
        if plan is not None:  # the call named an array, and this tensor has its memory
            return plan
        check_tag(tag)
        if kind is _SEND or peer is not None:
            self._address(peer, argument, tag)
        signature = Signature(
            kind,
            self.info,
            inputs=tuple(map(TensorMeta.of, inputs)),
            outputs=tuple(map(TensorMeta.of, outputs)),
            peer=peer,
            tag=tag,
        )
        return self._runner.add_plan(signature, (peer, tag), inputs, outputs)

    def _address(self, peer: object, argument: str, tag: object) -> tuple[int, int]:
        tag = check_tag(tag)
        return check_rank(peer, argument, self.info.world_size), tag
