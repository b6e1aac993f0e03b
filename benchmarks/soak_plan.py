"""Plan of a soak, drawn from a seed, and the expected results of its operations: without communication.

Every rank draws the same episodes, so ranks need not exchange them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import torch

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
EXACT = ("sum", "min", "max")
OPERATIONS = (
    "all_reduce",
    "async_all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "ring",
    "barrier",
)
LARGEST_BITS = 19
"""A rank's part of an operation has at most ``2 ** 19`` elements."""

FAULTS = ("none", "delay", "pause", "mismatch", "death", "revoke")
WEIGHTS = (4, 3, 1, 1, 1, 1)
"""How often each is drawn."""

MS = 1e-3


@attrs.frozen
class Step:
    """One operation.

    Attributes:
        name: One of `OPERATIONS`.
        everybody: Whether the whole group calls it, or each part of it separately.
        dtype: Of its tensors.
        numel: Elements of a rank's part.
        reduction: ``sum``, ``min`` or ``max``, where it reduces.
        salt: Determines the tensors' content, and the root.
    """

    name: str
    everybody: bool
    dtype: torch.dtype
    numel: int
    reduction: str
    salt: int


@attrs.frozen
class Episode:
    """Some operations on a group and on its parts, and one fault.

    Attributes:
        number: From 0.
        parts: The group's ranks, in two parts, in any order.
        steps: The steps.
        fault: One of `FAULTS`.
        victim: The rank with the fault.
        at: Before which step; ``len(steps)``: before the barrier that ends the episode.
        pause_s: How long a delay or pause takes.
    """

    number: int
    parts: tuple[tuple[int, ...], tuple[int, ...]]
    steps: tuple[Step, ...]
    fault: str
    victim: int
    at: int
    pause_s: float


def episode(seed: int, number: int, ranks: int, faults: Sequence[str] = FAULTS) -> Episode:
    """Draw an episode; the same for the same arguments.

    Args:
        seed: Of the whole run.
        number: Of the episode.
        ranks: How many there are.
        faults: Those that may happen.
    """
    chance = random.Random(f"{seed}/{number}/{ranks}")
    order = list(range(ranks))
    chance.shuffle(order)
    cut = chance.randint(1, max(1, ranks - 1))
    steps = tuple(_step(chance) for _ in range(chance.randint(4, 16)))
    drawn = chance.choices(FAULTS, WEIGHTS)[0]
    # Steps of the whole group: a rank that waits for the victim in a part, or for its message, sees no
    # mismatch.
    common = [at for at, step in enumerate(steps) if step.everybody and step.name != "ring"] + [len(steps)]
    return Episode(
        number=number,
        parts=(tuple(order[:cut]), tuple(order[cut:])),
        steps=steps,
        fault=drawn if drawn in faults and ranks > 1 else "none",
        victim=chance.randrange(ranks),
        at=chance.choice(common) if drawn == "mismatch" else chance.randrange(len(steps)),
        pause_s=chance.uniform(1 * MS, 60 * MS),
    )


def _step(chance: random.Random) -> Step:
    return Step(
        name=chance.choice(OPERATIONS),
        everybody=chance.random() < 0.6,
        dtype=chance.choice(DTYPES),
        numel=int(2 ** chance.uniform(0, LARGEST_BITS)),
        reduction=chance.choice(EXACT),
        salt=chance.randrange(1 << 30),
    )


def values(step: Step, rank: int, parts: int = 1) -> torch.Tensor:
    """Return a rank's input of an operation: ``parts * numel`` small values, different on each rank."""
    seeded = torch.Generator().manual_seed(step.salt * 64 + rank)
    if step.dtype.is_floating_point:
        return torch.randn(parts * step.numel, generator=seeded).to(step.dtype)
    return torch.randint(0, 8, (parts * step.numel,), generator=seeded).to(step.dtype)


def reduced(step: Step, size: int, parts: int = 1) -> torch.Tensor:
    """Return the reduction of all ranks' values, in rank order, half precision in float32, rounded once."""
    combine = getattr(torch, {"sum": "add", "min": "minimum", "max": "maximum"}[step.reduction])
    half = step.dtype in (torch.float16, torch.bfloat16)
    result: torch.Tensor | None = None
    for rank in range(size):
        mine = values(step, rank, parts)
        mine = mine.float() if half else mine
        result = mine if result is None else combine(result, mine)
    assert result is not None  # no group is empty
    return result.to(step.dtype)
