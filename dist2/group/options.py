"""Types of the keyword arguments of `new_group`, for type checkers.

Each backend checks its options itself when it is used. To a type checker, an option of another backend of
dist2 matches the last overload, which is for names that it does not know.
"""

from __future__ import annotations

from typing import TypedDict

from torch.distributed import Store


class FakeOptions(TypedDict, total=False):
    """Keyword arguments for every backend; `fake` has no others."""

    init_method: str | None
    store: Store | None
    rank: int | None
    world_size: int | None
    name: str | None
    desc: str
    check_nan: bool | None
    verify: bool | int


class SocketOptions(FakeOptions, total=False):
    """Those of `socket`, and of `mpi` for its control group."""

    transport: str
    algorithm: str | None
    deterministic: bool
    host: str | None
    tuning: str | None
    node: object


class GlooOptions(SocketOptions, total=False):
    """Those of `gloo`."""

    hostname: str
    interface: str
    control: bool


class NcclOptions(SocketOptions, total=False):
    """Those of `nccl`."""

    blocking: bool
    strict: bool
    eager: bool
    timing: bool
    is_high_priority_stream: bool
    min_ctas: int
    max_ctas: int
    cga_cluster_size: int
    net_name: str
    split_share: int
    platform: object


class AnyOptions(NcclOptions, GlooOptions, total=False):
    """Those of a backend whose name is no constant, or of several, or of a backend of another package."""

    pg_options: object
