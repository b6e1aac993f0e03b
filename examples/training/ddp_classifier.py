"""DDP: an image classifier on made images, in which a bar of bright pixels says the class."""

from __future__ import annotations

import torch
from job import equal_on_all_ranks, job, report
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SIDE, CLASSES, IMAGES = 8, 8, 512


def images() -> TensorDataset:
    """Return noisy images of ``SIDE`` x ``SIDE`` pixels whose bright row is the label."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
    pixels = torch.randn(IMAGES, 1, SIDE, SIDE, generator=generator) / 2
    pixels[torch.arange(IMAGES), 0, labels] += 2
    return TensorDataset(pixels, labels)


def main() -> None:
    """Start the job and train."""
    with job() as (rank, _):
        train(rank)  # DDP ends before the group: torch's Gloo can deadlock if DDP holds its last reference


def train(rank: int) -> None:
    """Train for some epochs; check accuracy, and that all ranks have the same parameters."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * SIDE * SIDE, CLASSES)
    )
    parallel = DistributedDataParallel(model)
    data = images()
    sampler: DistributedSampler[object] = DistributedSampler(data)
    optimizer = torch.optim.Adam(parallel.parameters(), 0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (pixels, labels) in enumerate(DataLoader(data, 64, sampler=sampler)):
            if step % 4 == 0:  # accumulate: these gradients travel with those of the next call
                with parallel.no_sync():
                    nn.functional.cross_entropy(parallel(pixels), labels).backward()
            nn.functional.cross_entropy(parallel(pixels), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    pixels, labels = data.tensors
    accuracy = (model(pixels).argmax(1) == labels).float().mean().item()
    assert accuracy > 0.95, f"rank {rank}: {accuracy}"
    assert all(equal_on_all_ranks(each) for each in model.parameters())
    report(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
