"""The nodes of a process: which rank gets which, and when they close."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.threads import together

from dist2.backends.socket.transport.node_pool import NodePool
from dist2.errors import GroupAbortedError

HOST = "127.0.0.1"


@pytest.fixture
def pool() -> Iterator[NodePool]:
    made = NodePool()
    yield made
    for entry in list(made._entries):
        entry.users = 1
        made.release(entry.node)


def test_groups_share_a_node_and_ranks_of_a_group_do_not(pool: NodePool) -> None:
    first = pool.acquire(HOST, "a")
    second = pool.acquire(HOST, "a")
    assert first is not second
    pool.built(first, "a")
    pool.built(second, "a")
    assert pool.acquire(HOST, "b") is second, "this thread had it last"
    assert pool.acquire(HOST, "b") is first
    assert pool.share(first) is first


def test_a_new_thread_gets_the_oldest_node(pool: NodePool) -> None:
    first = pool.acquire(HOST, "a")
    pool.acquire(HOST, "a")
    assert together(lambda: pool.acquire(HOST, "b")) == [first]


def test_ranks_that_come_at_once_get_different_nodes(pool: NodePool) -> None:
    nodes = together(*[lambda: pool.acquire(HOST, "a")] * 8)
    assert len({node.fabric_id for node in nodes}) == 8


def test_a_node_closes_with_its_last_group(pool: NodePool) -> None:
    node = pool.acquire(HOST, "a")
    assert pool.share(node) is node
    pool.release(node)
    assert pool.acquire(HOST, "b") is node
    pool.release(node)
    pool.release(node)
    with pytest.raises(GroupAbortedError, match="closed meanwhile"):
        pool.share(node)
    assert pool.acquire(HOST, "a").fabric_id != node.fabric_id


def test_an_address_of_a_group_that_failed_is_not_given_again(pool: NodePool) -> None:
    """A late rank would find the address published by another one, and take it for its own."""
    kept, failed = pool.acquire(HOST, "kept"), pool.acquire(HOST, "failed")
    assert kept is failed
    pool.release(failed)
    assert pool.acquire(HOST, "failed") is not kept


def test_a_child_has_none_of_them(pool: NodePool) -> None:
    node = pool.acquire(HOST, "a")
    with pool._lock:
        child = os.fork()
        if child == 0:
            try:
                node.forget_in_child()
                pool.forget_in_child()
                pool.release(node)
                made = pool.acquire(HOST, "a")
                made.close()
                os._exit(0 if made is not node else 1)
            finally:
                os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
