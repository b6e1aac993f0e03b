"""Ranks that build a group with different arguments get an error at once that names ranks and values."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torch_dist
from support.programs import run
from support.stores import torch_server
from support.threads import ends_of
from support.warm_interpreter import warm_python

import dist2
from dist2 import HashStore, InvalidUsageError, OperationTimeoutError, ProcessGroup, WireError
from dist2.backends.socket.backend import SocketBackend
from dist2.backends.socket.transport.node import Node
from dist2.group.open_groups import open_groups
from dist2.rendezvous.joining import agree, join_group
from dist2.rendezvous.requests import JoinRequest, Outcome, Verdict
from dist2.runtime.other_process import Process

LONG_S, SHORT_S = 30.0, 0.5


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made = [Node() for _ in range(3)]
    yield made
    for node in made:
        node.close()


def open_ranks(*asked: dict[str, Any]) -> list[Any]:
    """Return the group of each rank, or its exception; all groups are closed."""
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
        ({"transport": "tcp"}, "transport is 'auto' on ranks 0, 2 and 'tcp' on rank 1"),
        ({"algorithm": "ring"}, "algorithm is None on ranks 0, 2 and 'ring' on rank 1"),
        ({"deterministic": False}, "deterministic is True on ranks 0, 2 and False on rank 1"),
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
        ({}, {"world_size": 3}, "world_size is 2 on rank 0 and 3 on rank 1"),
        ({"world_size": 5}, {}, "world_size is 5 on rank 0 and 2 on rank 1"),
        ({"backend": "gloo"}, {}, "backend is 'gloo' on rank 0 and 'socket' on rank 1"),
        ({}, {"name": "other ranks"}, "name is None on rank 0 and 'other ranks' on rank 1"),
    ],
    ids=["world_size", "rank 0's world_size", "backend", "name"],
)
def test_ranks_that_want_different_groups_are_all_told(
    nodes: list[Node], first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    start = time.monotonic()
    node = {} if "backend" in first else {"node": nodes[0]}
    for end in open_ranks({**node, **first}, {"node": nodes[1], **second}):
        assert isinstance(end, InvalidUsageError), end
        assert re.search(f"ranks'? cannot be built: {words}", str(end))
    assert time.monotonic() - start < LONG_S / 2


OTHER_VERSION = """
import os, sys
import dist2
from dist2.group import creation

rank = 0 if os.fork() else 1
if rank == 1:
    creation.__version__ = "0.0.9"  # as where another one is installed
try:
    dist2.new_group("socket", 20, store=dist2.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
except dist2.InvalidUsageError as error:
    sys.stdout.write(f"{error}\\n")
if rank == 0:
    os.wait()
"""


def test_other_versions_of_dist2_are_named(tmp_path: Path) -> None:
    ended = run([*warm_python(), "-c", OTHER_VERSION, tmp_path / "store"])
    assert ended.code == 0, ended
    assert ended.output.count(f"dist2 is {dist2.__version__} on rank 0 and 0.0.9 on rank 1") == 2, ended


def test_who_came_and_did_not_go_on_is_not_said_to_be_missing() -> None:
    store = HashStore()
    store.set("dist2/1/rank/1", JoinRequest(Process.here(), {}).to_text())
    with (
        pytest.raises(
            OperationTimeoutError, match="all 2 ranks arrived, but one did not proceed within"
        ) as late,
        join_group(store, 0, 2, SHORT_S, {"backend": "'socket'"}) as watch,
    ):
        agree(watch, SHORT_S)
    assert late.value.missing == ()


def test_those_who_come_later_are_told_as_well(nodes: list[Node]) -> None:
    store = HashStore()

    def ask(rank: int, world_size: int, limit_s: float) -> None:
        dist2.new_group("socket", limit_s, store=store, rank=rank, world_size=world_size, node=nodes[rank])

    with pytest.raises(OperationTimeoutError, match=r"ranks 1, 2 of 3 did not arrive") as waited:
        ask(0, 3, SHORT_S)
    assert waited.value.missing == (1, 2)
    start = time.monotonic()
    for rank in (1, 2):
        with pytest.raises(OperationTimeoutError, match=r"ranks 1, 2 of 3 did not arrive within 0.5 s"):
            ask(rank, 3, LONG_S)
    assert time.monotonic() - start < LONG_S / 2


def test_a_rank_that_fails_while_it_builds_its_group_is_named(nodes: list[Node]) -> None:
    start = time.monotonic()
    first, odd, third = open_ranks({"node": nodes[0]}, {"node": nodes[1], "no_such": 1}, {"node": nodes[2]})
    assert isinstance(odd, dist2.UnknownOptionError), odd
    for end in (first, third):
        assert isinstance(end, dist2.PeerLostError), end
        assert end.ranks == (1,)
        assert "rank 1 gave up (UnknownOptionError: " in str(end)
        assert "no_such" in str(end)
    assert time.monotonic() - start < LONG_S / 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"no_such": 1}, "no option 'no_such'"),
        ({"transport": "pigeon"}, "transport must be"),
        ({"device": "cuda"}, "device must be 'cpu'"),
        ({"rank": 2}, "rank must be a group rank between 0 and 1, got 2"),
        ({"rank": "0"}, "rank must be a group rank"),
        ({"world_size": 0}, "world_size must be a positive int"),
        ({"timeout": -1}, "timeout must be positive"),
        ({"backend": "pigeon"}, "backend must be one of"),
    ],
)
def test_a_wrong_argument_raises_before_others_come(wrong: dict[str, Any], words: str) -> None:
    given = {
        "backend": "socket",
        "timeout": LONG_S,
        "rank": 0,
        "world_size": 2,
        **wrong,
    }
    start = time.monotonic()
    with pytest.raises(InvalidUsageError, match=words):
        dist2.new_group(store=HashStore(), **given)
    assert time.monotonic() - start < LONG_S / 2


def test_a_name_that_torch_has_given_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of the group that did not come to be."""
    closed: list[SocketBackend] = []
    shutdown = SocketBackend.shutdown

    def noted_shutdown(backend: SocketBackend) -> None:
        closed.append(backend)
        shutdown(backend)

    monkeypatch.setattr(SocketBackend, "shutdown", noted_shutdown)
    torch_dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        theirs = torch_dist.group.WORLD
        assert theirs is not None
        with dist2.new_group("socket", store=HashStore(), rank=0, world_size=1) as pg:
            with pytest.raises(InvalidUsageError, match=f"name '{theirs.group_name}' is taken by another"):
                pg.split([0], name=theirs.group_name)
            assert open_groups() == [pg]
            assert len(closed) == 1
    finally:
        torch_dist.destroy_process_group()


def test_who_waits_at_a_store_of_torchs_is_not_complained_of(
    nodes: list[Node], capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's client writes to stderr when a wait fails."""
    native = torch_server()

    def build(rank: int) -> ProcessGroup:
        time.sleep(rank)
        store = torch_dist.TCPStore("127.0.0.1", native.port, wait_for_workers=False)
        return dist2.new_group("socket", LONG_S, store=store, rank=rank, world_size=2, node=nodes[rank])

    for group in ends_of(lambda: build(0), lambda: build(1)):
        assert isinstance(group, ProcessGroup), group
        group.abort()
    assert "timed out" not in capfd.readouterr().err


def test_a_rank_out_of_range_is_told_to_those_who_build_the_next_group_of_a_store(nodes: list[Node]) -> None:
    store = HashStore()

    def build(rank: int, node: Node) -> ProcessGroup:
        return dist2.new_group("socket", LONG_S, store=store, rank=rank, world_size=2, node=node)

    for group in ends_of(lambda: build(0, nodes[0]), lambda: build(1, nodes[1])):
        assert isinstance(group, ProcessGroup), group
        group.abort()
    for end in ends_of(lambda: build(0, nodes[0]), lambda: build(2, nodes[1])):
        assert isinstance(end, InvalidUsageError), end
        assert "rank must be a group rank between 0 and 1, got 2" in str(end)


def test_who_comes_to_a_group_that_others_have_built_is_told(nodes: list[Node]) -> None:
    store = HashStore()
    dist2.new_group("socket", LONG_S, store=store, rank=0, world_size=1, node=nodes[0]).abort()
    with pytest.raises(InvalidUsageError, match=r"world_size is 1 on rank 0 and 2 on rank 1"):
        dist2.new_group("socket", LONG_S, store=store, rank=1, world_size=2, node=nodes[1])


@pytest.mark.parametrize(
    "said", [b"", b"9f3a", b"[]", b"{}", b"\xff", b"3", b'["no", "w", []]', b'["lost", 1, []]']
)
def test_what_is_no_verdict_is_refused(said: bytes) -> None:
    read = Verdict.read(said)
    assert read.outcome is Outcome.UNREADABLE
    assert "no verdict on a rendezvous" in read.words
    store = HashStore()
    store.set("dist2/1/go", said or b" ")  # an empty value is none
    joined = join_group(store, 0, 1, SHORT_S, {})
    with pytest.raises(WireError, match="no verdict on a rendezvous"), joined as watch:
        agree(watch, SHORT_S)
    verdict = Verdict(Outcome.TIMEOUT, "w", (1,))
    assert Verdict.read(verdict.to_text().encode()) == verdict


def test_a_first_request_that_no_rank_wrote_is_refused() -> None:
    store = HashStore()
    store.set("dist2/1/first", "9f3a")
    joined = join_group(store, 0, 2, SHORT_S, {})
    with pytest.raises(WireError, match="no request of a rank"), joined as watch:
        agree(watch, SHORT_S)


def test_the_class_called_as_torchs_names_the_function() -> None:
    with pytest.raises(InvalidUsageError, match=r"call dist2\.new_group\(backend, store=store"):
        dist2.ProcessGroup(HashStore(), 0, 1)
