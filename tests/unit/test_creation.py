"""Ranks that build a group and ask for different things are told at once who asks for what."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from threads import ends_of

import dist2
from dist2 import HashStore, InvalidUsageError, OperationTimeoutError, ProcessGroup, WireError
from dist2.backends.socket.transport.node import Node
from dist2.creation import read_uid

LONG_S, SHORT_S = 30.0, 0.5


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made = [Node() for _ in range(3)]
    yield made
    for node in made:
        node.close()


def open_ranks(*asked: dict[str, Any]) -> list[Any]:
    """Return the group of each rank, or what it raised; all groups are closed."""
    store = HashStore()

    def open_one(rank: int, options: dict[str, Any]) -> ProcessGroup:
        given = {"backend": "socket", "world_size": len(asked), "timeout": LONG_S, **options}
        return dist2.new_group(rank=rank, store=store, **given)

    ends = ends_of(*(lambda each=each: open_one(*each) for each in enumerate(asked)))
    for end in ends:
        if isinstance(end, ProcessGroup):
            end.abort()
    return ends


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"transport": "tcp"}, "transport is 'auto' on rank(s) 0, 2 and 'tcp' on rank(s) 1"),
        ({"algorithm": "ring"}, "algorithm is None on rank(s) 0, 2 and 'ring' on rank(s) 1"),
        ({"deterministic": False}, "deterministic is True on rank(s) 0, 2 and False on rank(s) 1"),
    ],
    ids=["transport", "algorithm", "deterministic"],
)
def test_options_that_differ_are_told_to_all_ranks(
    nodes: list[Node], odd: dict[str, Any], words: str
) -> None:
    start = time.monotonic()
    first, second, third = nodes
    ends = open_ranks({"node": first}, {"node": second, **odd}, {"node": third})
    for end in ends:
        assert isinstance(end, InvalidUsageError), end
        assert words in str(end)
    assert time.monotonic() - start < LONG_S / 2


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {"world_size": 3}, "world_size is 2 on rank(s) 0 and 3 on rank(s) 1"),
        ({"backend": "gloo"}, {}, "backend is 'gloo' on rank(s) 0 and 'socket' on rank(s) 1"),
    ],
    ids=["world_size", "backend"],
)
def test_who_asks_for_another_group_than_rank_0_is_told(
    nodes: list[Node], first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    waits = {"timeout": SHORT_S, **({} if first else {"node": nodes[0]})}
    told, waited = open_ranks({**waits, **first}, {"node": nodes[1], **second})[::-1]
    assert isinstance(told, InvalidUsageError), told
    assert f"the group cannot be built: {words}" in str(told)
    assert isinstance(waited, OperationTimeoutError | dist2.StoreTimeoutError), waited


@pytest.mark.parametrize(
    "said", [b"", b"9f3a", b"[]", b'["a"]', b'["a", []]', b'["a", {"b": 3}]', b"\xff", b"3"]
)
def test_what_is_no_group_is_refused(said: bytes) -> None:
    with pytest.raises(WireError, match="not the id of a group"):
        read_uid(said)
    assert read_uid(json.dumps(["a", {"b": "c"}]).encode()) == ("a", {"b": "c"})
