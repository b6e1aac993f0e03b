"""The backward pass of each operator, made of operators: it can be differentiated and compiled again.

Forward-mode derivatives are made of operators as well: most operators are linear, and a tangent takes the way
of its tensor.

The function that is differentiated has the inputs of all ranks and the outputs of all ranks. So the gradient
of a rank's input adds up the effects on the outputs of all ranks: the backward pass of an `all_gather` is a
`reduce_scatter`, that of a `broadcast` a `reduce`, and that of a message a message the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dist2.functional import operators as ops
from dist2.functional.handles import reduction_of, size_of
from dist2.functional.started import completing
from dist2.operation.kinds import ReduceKind

Grad = torch.Tensor
_NEEDS_RESULT = (ReduceKind.MIN, ReduceKind.MAX, ReduceKind.PRODUCT)


def needs_result(op: str) -> bool:
    """Whether the gradient of a reduction depends on its inputs and its result."""
    return reduction_of(op).kind in _NEEDS_RESULT


def through_reduction(
    op: str, grad: Grad, x: Grad | None, result: Grad | None, group: str, *, ahead: bool = False
) -> Grad:
    """Return the gradient of this rank's contribution to a reduction.

    Args:
        op: The reduction.
        grad: Gradient of the result, added up over the ranks that have it.
        x: Contribution of this rank, of the shape of ``grad``; None unless `needs_result`.
        result: The result, likewise.
        group: The group.
        ahead: ``grad`` is the tangent of the contribution: return what it adds to the tangent of the result.
            Of a complex number the gradient takes the conjugate of the slope, the tangent the slope.
    """
    reduction = reduction_of(op)
    if reduction.kind is ReduceKind.AVG:
        return grad / size_of(group)
    if reduction.factor is not None:
        return grad * reduction.factor
    if x is None or result is None:
        return grad
    if reduction.kind is ReduceKind.PRODUCT:
        slope = _product_of_others(x, group)
        return grad * (slope if ahead else slope.conj())
    mine = (x == result).to(grad.dtype)  # ranks with equal values share the gradient
    return grad * mine / all_reduce(mine, "sum", group)


def _product_of_others(x: Grad, group: str) -> Grad:
    """Return the product of the contributions of all other ranks, some of which may be zero."""
    is_zero = x == 0
    nonzero = torch.where(is_zero, torch.ones_like(x), x)
    zeros = all_reduce(is_zero.to(torch.int32), "sum", group)
    of_nonzero = all_reduce(nonzero, "product", group)
    others_are_zero = zeros > is_zero
    return torch.where(others_are_zero, torch.zeros_like(x), of_nonzero / nonzero)


def _differentiable(
    operator: ops.Operator,
    setup: Callable[[Any, tuple[Any, ...], Grad], None],
    backward: Callable[[Any, Grad], tuple[Grad | None, ...]],
    *,
    tangent: Callable[[Any, Grad], Grad] | None = None,
    batched: bool = True,
) -> Callable[..., Grad]:
    """Return a function that calls an operator, with its derivatives and its rule for `vmap`.

    Graphs contain the operator itself. Other calls go through an `autograd.Function`, which `torch.func.grad`
    needs, and which takes half the time.

    Args:
        operator: The operator. Its first argument is a tensor, its last one the mark, which `call` adds.
        setup: Keeps what the backward pass needs, of the arguments without the mark.
        backward: Returns a gradient for each of these arguments.
        tangent: Returns the tangent of the output; None where the operator is linear.
        batched: Whether the output has the batch dimension of the input.
    """

    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Grad, *others: Any) -> tuple[Grad, int | None]:
        """Move the batch dimension behind dimension 0, which has the rows of each rank."""
        dim = in_dims[0]
        if x.dim() > 1 and dim is not None:
            return call(x.movedim(dim, 1), *others[:-1]), 1 if batched else None
        return call(x, *others[:-1]), 0 if batched else None

    def forward(*arguments: Any) -> Grad:
        result: Grad = operator.called(*arguments)
        return result

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
        ctx.others = inputs[1:-1]
        setup(ctx, inputs[:-1], output)

    def all_gradients(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
        return (*backward(ctx, grad), None)

    def jvp(ctx: Any, grad: Grad, *_: None) -> Grad:
        with completing():
            return call(grad, *ctx.others) if tangent is None else tangent(ctx, grad)

    methods: dict[str, Callable[..., Any]] = {
        "forward": forward,
        "setup_context": setup_context,
        "backward": all_gradients,
        "jvp": jvp,
        "vmap": vmap,
    }
    members = {name: staticmethod(method) for name, method in methods.items()}
    function: Any = type(operator.name, (torch.autograd.Function,), members)

    def call(*arguments: Any) -> Grad:
        if not torch.compiler.is_compiling():
            result: Grad = function.apply(*arguments, None)
        elif torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            result = operator.called(*arguments, torch.empty(0, device="cpu"))
        else:  # torch traces the backward pass
            result = operator.in_backward(*arguments, torch.empty(0, device="cpu"))
            if result.numel() == 0:  # nothing is computed from it, so the graph would drop the call
                result = operator.called(*arguments, torch.empty(0, device="cpu"))
        return result

    for each in (operator.called, operator.in_backward):
        each.register_autograd(all_gradients, setup_context=setup_context)
        each.register_vmap(vmap)
    return call


def _keep(ctx: Any, op: str, x: Grad, result: Grad) -> None:
    ctx.op = op
    kept = (x, result) if needs_result(op) else ()
    ctx.save_for_backward(*kept)
    ctx.save_for_forward(*kept)


def _kept(ctx: Any) -> tuple[Grad | None, Grad | None]:
    return ctx.saved_tensors or (None, None)


def _setup_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
    x, op, ctx.group = inputs
    _keep(ctx, op, x, output)


def _all_reduce(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
    x, result = _kept(ctx)
    total = all_reduce(grad, "sum", ctx.group)
    return through_reduction(ctx.op, total, x, result, ctx.group), None, None


def _all_reduce_tangent(ctx: Any, grad: Grad) -> Grad:
    part = through_reduction(ctx.op, grad, *_kept(ctx), ctx.group, ahead=True)
    return all_reduce(part, "sum", ctx.group)


def _setup_reduce(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
    x, ctx.root, op, ctx.group = inputs
    _keep(ctx, op, x, output)


def _through_reduce(ctx: Any, grad: Grad, *, ahead: bool = False) -> Grad:
    x, result = _kept(ctx)
    if result is not None:
        result = broadcast(result, ctx.root, ctx.group)
    return through_reduction(ctx.op, grad, x, result, ctx.group, ahead=ahead)


def _reduce(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
    return _through_reduce(ctx, broadcast(grad, ctx.root, ctx.group)), None, None, None


def _reduce_tangent(ctx: Any, grad: Grad) -> Grad:
    return reduce(_through_reduce(ctx, grad, ahead=True), ctx.root, "sum", ctx.group)


def _setup_broadcast(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
    _, ctx.root, ctx.group = inputs


def _broadcast(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
    return reduce(grad, ctx.root, "sum", ctx.group), None, None


def _setup_all_gather(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
    _, ctx.sizes, ctx.rank, ctx.group = inputs


def _all_gather(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
    return reduce_scatter(grad, "sum", ctx.sizes, ctx.rank, ctx.group), None, None, None


def _setup_reduce_scatter(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
    x, op, ctx.sizes, ctx.rank, ctx.group = inputs
    _keep(ctx, op, x, output)


def _through_reduce_scatter(ctx: Any, grad: Grad, *, ahead: bool = False) -> Grad:
    x, result = _kept(ctx)
    if result is not None:
        result = all_gather(result, ctx.sizes, ctx.rank, ctx.group)
    return through_reduction(ctx.op, grad, x, result, ctx.group, ahead=ahead)


def _reduce_scatter(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
    total = all_gather(grad, ctx.sizes, ctx.rank, ctx.group)
    return _through_reduce_scatter(ctx, total), None, None, None, None


def _reduce_scatter_tangent(ctx: Any, grad: Grad) -> Grad:
    part = _through_reduce_scatter(ctx, grad, ahead=True)
    return reduce_scatter(part, "sum", ctx.sizes, ctx.rank, ctx.group)


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
    x, ctx.root, ctx.rank, ctx.group = inputs
    ctx.rows = x.shape[0]


def _gather(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
    return scatter(grad, ctx.rows, ctx.root, ctx.rank, ctx.group), None, None, None


def _setup_scatter(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
    x, _, ctx.root, ctx.rank, ctx.group = inputs
    ctx.shape = x.shape


def _scatter(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
    whole = gather(grad, ctx.root, ctx.rank, ctx.group)
    if ctx.rank != ctx.root:  # its input had no effect
        whole = grad.new_zeros(ctx.shape) + whole.sum()  # second derivatives pass through the gather
    return whole, None, None, None, None


def _setup_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
    _, ctx.output_sizes, ctx.input_sizes, ctx.group = inputs


def _all_to_all(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
    return all_to_all(grad, ctx.input_sizes, ctx.output_sizes, ctx.group), None, None, None


def _setup_send(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
    x, ctx.dst, ctx.tag, ctx.group = inputs
    ctx.shape = x.shape


def _send(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
    # Only its shape counts. Zeros would not depend on the gradient: graphs would receive in the forward pass.
    like = grad.expand(ctx.shape)
    return recv(like, ctx.dst, ctx.tag, ctx.group), None, None, None


def _setup_recv(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
    _, ctx.src, ctx.tag, ctx.group = inputs


def _recv(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
    sent = send(grad, ctx.src, ctx.tag, ctx.group)
    return torch.zeros_like(grad) + sent, None, None, None  # the sum keeps the message in a compiled graph


def _setup_sendrecv(ctx: Any, inputs: tuple[Any, ...], output: Grad) -> None:
    _, ctx.dst, ctx.src, ctx.tag, ctx.group = inputs


def _sendrecv(ctx: Any, grad: Grad) -> tuple[Grad | None, ...]:
    return sendrecv(grad, ctx.src, ctx.dst, ctx.tag, ctx.group), None, None, None, None


all_reduce = _differentiable(ops.all_reduce, _setup_all_reduce, _all_reduce, tangent=_all_reduce_tangent)
reduce = _differentiable(ops.reduce, _setup_reduce, _reduce, tangent=_reduce_tangent)
broadcast = _differentiable(ops.broadcast, _setup_broadcast, _broadcast)
all_gather = _differentiable(ops.all_gather, _setup_all_gather, _all_gather)
reduce_scatter = _differentiable(
    ops.reduce_scatter, _setup_reduce_scatter, _reduce_scatter, tangent=_reduce_scatter_tangent
)
gather = _differentiable(ops.gather, _setup_gather, _gather)
scatter = _differentiable(ops.scatter, _setup_scatter, _scatter)
all_to_all = _differentiable(ops.all_to_all, _setup_all_to_all, _all_to_all)
send = _differentiable(ops.send, _setup_send, _send, batched=False)
recv = _differentiable(ops.recv, _setup_recv, _recv)
sendrecv = _differentiable(ops.sendrecv, _setup_sendrecv, _sendrecv)
