"""Ring attention with `dist2.functional`: each rank has a part of the sequence.

torchrun --nproc-per-node=2 examples/ring_attention.py

Keys and values travel around the ring of ranks; each rank adds up the attention of its queries to them with
the online softmax (Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023). Autograd
sends the gradients of keys and values around the ring the other way. Result and gradients are compared with
attention over the whole sequence.
"""

from __future__ import annotations

import torch

import dist2
from dist2 import functional

HEADS, LENGTH, WIDTH = 2, 12, 4


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pg: dist2.ProcessGroup) -> torch.Tensor:
    """Return the attention of this rank's queries to the keys and values of all ranks.

    Args:
        q, k, v: This rank's part of the sequence, of shape (heads, length / size, width).
        pg: The group, by whose ranks the sequence is cut.
    """
    rank, size = pg.rank(), pg.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    highest = torch.full((*q.shape[:-1], 1), -torch.inf)
    weight, result = torch.zeros_like(highest), torch.zeros_like(q)
    for step in range(size):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        highest_now = torch.maximum(highest, scores.amax(-1, keepdim=True))
        exponentials, decay = (scores - highest_now).exp(), (highest - highest_now).exp()
        weight = weight * decay + exponentials.sum(-1, keepdim=True)
        result = result * decay + exponentials @ v
        highest = highest_now
        if step + 1 < size:
            k, v = functional.sendrecv(torch.stack([k, v]), pg, dst=after, src=before)
    return result / weight


def main() -> None:
    """Compare result and gradients with those of attention over the whole sequence."""
    with dist2.new_group("socket", timeout=60) as pg:
        rank, size = pg.rank(), pg.size()
        torch.manual_seed(1)  # the same sequence on all ranks
        sequence = torch.randn(3, HEADS, LENGTH, WIDTH, requires_grad=True)
        expected = torch.nn.functional.scaled_dot_product_attention(*sequence)
        expected.square().sum().backward()
        assert sequence.grad is not None

        part = sequence.detach().chunk(size, dim=2)[rank].clone().requires_grad_()
        q, k, v = part
        result = ring_attention(q, k, v, pg)
        result.square().sum().backward()
        assert part.grad is not None
        torch.testing.assert_close(result, expected.chunk(size, dim=1)[rank])
        torch.testing.assert_close(part.grad, sequence.grad.chunk(size, dim=2)[rank])
    print(f"ok: rank {rank} of {size} attends from {LENGTH // size} of {LENGTH} positions to all")


if __name__ == "__main__":
    main()
