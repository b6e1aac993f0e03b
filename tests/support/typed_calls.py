"""Calls of `new_group` as type checkers see them: none is made. A missing error is an unused `ignore`."""

from __future__ import annotations

from typing import Any

import dist2
from dist2 import HashStore, ProcessGroup


def options_that_backends_have(given: dict[str, Any], name: str) -> list[ProcessGroup]:
    return [
        dist2.new_group("socket", 30, "cpu", store=HashStore(), rank=0, world_size=1, desc="words"),
        dist2.new_group("socket", transport="shm", algorithm="ring", deterministic=False),
        dist2.new_group("mpi", host="127.0.0.1", name="stage"),
        dist2.new_group("gloo", interface="lo", control=False, transport="tcp"),
        dist2.new_group("nccl", device="cuda", blocking=True, min_ctas=4, net_name="Socket"),
        dist2.new_group("fake", rank=0, world_size=512),
        dist2.new_group("of another package", pg_options=object()),
        dist2.new_group("cpu:socket,cuda:nccl", transport="tcp", blocking=True),
        dist2.new_group("socket", **given),
        dist2.new_group(name, **given),
    ]


def options_that_they_lack(name: str) -> None:
    dist2.new_group("socket", transprt="shm")  # type: ignore[call-overload]
    dist2.new_group("socket", transport=2)  # type: ignore[call-overload]
    dist2.new_group("socket", store="tcp://localhost")  # type: ignore[call-overload]
    dist2.new_group("mpi", deterministic="no")  # type: ignore[call-overload]
    dist2.new_group("gloo", control="no")  # type: ignore[call-overload]
    dist2.new_group("nccl", min_ctas="4")  # type: ignore[call-overload]
    dist2.new_group("fake", rank="0")  # type: ignore[call-overload]
    dist2.new_group(name, timeout_s=3)  # type: ignore[call-overload]
    dist2.new_group(2)  # type: ignore[call-overload]
