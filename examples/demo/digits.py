"""The data and the model: scikit-learn's 1,797 handwritten digits, and a small network that reads them."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

SEED = 0
TEST_IMAGES = 450
BATCH = 64
"""Images of a step, over all ranks: the result hardly depends on the number of ranks."""


@attrs.frozen(eq=False)
class Images:
    """Some of the digits.

    Attributes:
        pixels: float32 ``[n, 1, 8, 8]``, 0 to 1.
        labels: int64 ``[n]``, 0 to 9.
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> Images:
        return Images(self.pixels[index], self.labels[index])


def train_and_test() -> tuple[Images, Images]:
    """Return the digits in two parts that share no image and are the same in every run."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
    everything = Images(pixels, torch.tensor(digits.target))
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(SEED))
    return everything[order[TEST_IMAGES:]], everything[order[:TEST_IMAGES]]


def batches(images: Images, epoch: int, rank: int, world_size: int) -> Iterator[Images]:
    """Yield a rank's share of each batch of an epoch: all shuffle alike, each takes its own part."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 + epoch))
    share = max(1, BATCH // world_size)
    for step in range(steps_an_epoch(images, world_size)):
        start = (step * world_size + rank) * share
        yield images[order[start : start + share]]


def steps_an_epoch(images: Images, world_size: int) -> int:
    """Return how many full batches there are."""
    return len(images) // (max(1, BATCH // world_size) * world_size)


def classifier() -> nn.Sequential:
    """Return the untrained network: two convolutions and two layers, 38,282 parameters."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
