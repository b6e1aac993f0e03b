"""FSDP2: a transformer that learns to copy, with sharded parameters and a distributed checkpoint."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import job, report
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORDS, WIDTH, LENGTH = 16, 32, 8


class Transformer(nn.Module):
    """Words in, words out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


def sharded(size: int) -> Transformer:
    """Return a model whose layers are sharded over all ranks."""
    mesh = init_device_mesh("cpu", (size,))
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    """Train, save, load into another model, compare."""
    with job() as (rank, size):
        model = sharded(size)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(8):
            words = torch.randint(WORDS, (8, LENGTH), generator=generator)
            loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2, losses

        place = [tempfile.mkdtemp(prefix="checkpoint-") if rank == 0 else None]
        dist.broadcast_object_list(place)
        dcp.save(get_model_state_dict(model), checkpoint_id=place[0])
        torch.manual_seed(99)
        other = sharded(size)
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=place[0])
        set_model_state_dict(other, state)
        words = torch.arange(LENGTH).view(1, -1)
        assert torch.equal(model(words), other(words))
        report(f"loss from {losses[0]:.2f} to {losses[-1]:.2f}, and the checkpoint gives the same model")


if __name__ == "__main__":
    main()
