"""Set-up and tear-down of ranks around a case; run in their processes."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed
from legacy.cases import CASES

import dist2.legacy

WORLD_SIZE = 4
LIMIT = datetime.timedelta(seconds=20)


def package(name: str) -> Any:
    """Return one of the two packages that have the same API."""
    return dist2.legacy if name == "dist2" else torch.distributed


def begin(rank: int, name: str, backend: str, url: str) -> None:
    """Make the default group; dist2's leaves torch's tables to torch, which may be initialised beside it."""
    place = f"{url}?rank={rank}&world_size={WORLD_SIZE}"
    apart = {"register_with_torch": False} if name == "dist2" else {}
    package(name).init_process_group(backend, init_method=place, timeout=LIMIT, **apart)


def end(rank: int, name: str) -> None:
    """Close everything, unless the case did."""
    if package(name).is_initialized():
        package(name).destroy_process_group()


def run_case(rank: int, name: str, number: int) -> Any:
    """Run a case of the table."""
    return CASES[number](package(name), rank)
