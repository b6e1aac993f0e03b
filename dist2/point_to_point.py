"""The point-to-point operations of a group. They run beside collectives, never behind one."""

from __future__ import annotations

import torch

from dist2 import validation as check
from dist2.funnel import Funnel, Plan, Timeout
from dist2.operation import Signature, TensorMeta
from dist2.ops import OpKind
from dist2.work import Work


class PointToPoint(Funnel):
    """Messages between two members, matched by ``(source, tag)`` in the order sent."""

    def send(
        self,
        tensor: torch.Tensor,
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

        Raises:
            InvalidUsageError, MismatchError, OperationTimeoutError, PeerLostError, GroupAbortedError.
        """
        plan = self._p2p_plan(OpKind.SEND, tensor, dst, "dst", tag)
        return self._run_p2p(plan, (tensor,), (), async_op, timeout)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work:
        """Receive a tensor from a rank, or from whoever sends first.

        Args:
            tensor: Overwritten; must have the element count and dtype that was sent.
            src: Group rank, or None for any; ``work.source_rank()`` tells which it was.
            tag: Takes only messages of this tag.

        Raises:
            InvalidUsageError, MismatchError, OperationTimeoutError, PeerLostError, GroupAbortedError.
        """
        plan = self._p2p_plan(OpKind.RECV, tensor, src, "src", tag)
        return self._run_p2p(plan, (), (tensor,), async_op, timeout)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work:
        """Do `send` in the background."""
        return self.send(tensor, dst, tag, async_op=True, timeout=timeout)

    def irecv(
        self, tensor: torch.Tensor, src: int | None = None, tag: int = 0, *, timeout: Timeout = None
    ) -> Work:
        """Do `recv` in the background."""
        return self.recv(tensor, src, tag, async_op=True, timeout=timeout)

    def _p2p_plan(
        self, kind: OpKind, tensor: torch.Tensor, peer: int | None, argument: str, tag: int
    ) -> Plan:
        plan = None
        if type(peer) is not int or type(tag) is not int:  # True and 1.0 would find the plan of 1
            self._check_address(kind, peer, argument, tag)
        try:
            key = (
                kind,
                peer,
                tag,
                tensor.shape,
                tensor.dtype,
                tensor.is_contiguous() or tensor.stride(),
                tensor.is_cpu,
            )
            plan = self._plans.get(key)
        except (AttributeError, TypeError, RuntimeError):
            pass  # validation will say what is wrong
        return plan or self._new_p2p_plan(kind, tensor, peer, argument, tag)

    def _new_p2p_plan(
        self, kind: OpKind, tensor: torch.Tensor, peer: int | None, argument: str, tag: int
    ) -> Plan:
        check.check_tensor(tensor, "tensor", self.backend.device_types)
        self._check_address(kind, peer, argument, tag)
        if kind is OpKind.RECV:
            check.check_writable(tensor, "tensor")
        metas = (TensorMeta.of(tensor),)
        sending = kind is OpKind.SEND
        signature = Signature(
            kind,
            self.info,
            inputs=metas if sending else (),
            outputs=() if sending else metas,
            peer=peer,
            tag=tag,
        )
        key = (
            kind,
            peer,
            tag,
            tensor.shape,
            tensor.dtype,
            tensor.is_contiguous() or tensor.stride(),
            tensor.is_cpu,
        )
        return self._add_plan(key, signature)

    def _check_address(self, kind: OpKind, peer: object, argument: str, tag: object) -> None:
        check.check_tag(tag)
        if kind is OpKind.SEND or peer is not None:
            check.check_rank(peer, argument, self.info.world_size)
