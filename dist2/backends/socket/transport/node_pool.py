"""`NodePool`: the nodes of this process, one for each of its ranks.

A process is usually one rank: all its groups share one node. Ranks may also be threads of one process. The
links of a node lead to other nodes only, so two ranks of one group must never use the same one. Each group
has a uid, which is equal on all its ranks and which no other group has. A rank that builds a group claims a
node for that uid before it publishes the node's address: under one lock, it takes a node that has no claim of
this uid, or makes one. The claim stays until all ranks have built the group. If building fails, the claim
stays as long as the node, since the address was published.

Later groups use the same nodes again: a thread gets the node it had last, if that is free, else the oldest
free one. Groups made from a group (`split`, `shrink`) keep its node. A node closes with its last group.
"""

from __future__ import annotations

import threading

import attrs

from dist2.backends.socket.transport.node import Node
from dist2.errors import GroupAbortedError
from dist2.runtime.process import InChild, in_child
from dist2.runtime.signals import ctrl_c


@attrs.define(eq=False)
class _Entry:
    """A node in use.

    Attributes:
        node: The node.
        users: Number of groups on it, including those that are being built.
        claims: The uids of groups that are being built on it.
    """

    node: Node
    users: int = 0
    claims: set[str] = attrs.field(factory=set)


class NodePool:
    """Keeps a node for each rank of this process while one of its groups is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._latest = threading.local()

    def acquire(self, host: str, uid: str) -> Node:
        """Return a node that no other rank of a group in this process has.

        Args:
            host: Address that a new node listens on: a node keeps that of its first group.
            uid: The group's.
        """
        ctrl_c.take_over()
        with self._lock:
            free = [each for each in self._entries if uid not in each.claims]
            latest = getattr(self._latest, "fabric_id", None)
            entry = next((each for each in free if each.node.fabric_id == latest), free[0] if free else None)
            if entry is None:
                entry = _Entry(Node(host))
                self._entries.append(entry)
            entry.users += 1
            entry.claims.add(uid)
            self._latest.fabric_id = entry.node.fabric_id
            return entry.node

    def built(self, node: Node, uid: str) -> None:
        """End a claim: all ranks of the group have read each other's addresses."""
        with self._lock:
            entry = self._entry(node)
            if entry is not None:
                entry.claims.discard(uid)

    def share(self, node: Node) -> Node:
        """Return a node that is in use, for one more group on it.

        Raises:
            GroupAbortedError: Its last group was closed meanwhile, and so was the node.
        """
        with self._lock:
            entry = self._entry(node)
            if entry is None:
                raise GroupAbortedError("the links that the new group was to use were closed meanwhile")
            entry.users += 1
            return node

    def release(self, node: Node) -> None:
        """Give a node back; the last group closes it."""
        with self._lock:
            entry = self._entry(node)
            if entry is None:  # of the parent of this process
                return
            entry.users -= 1
            if entry.users:
                return
            self._entries.remove(entry)
        # Without the lock: it may take seconds, and another rank may have to close its node for it to end.
        node.close()
        with self._lock:
            if not self._entries:
                ctrl_c.give_back()

    def _entry(self, node: Node) -> _Entry | None:
        return next((each for each in self._entries if each.node is node), None)

    def forget_in_child(self) -> None:
        """After a fork: nodes belong to the parent, of which another thread may have held the lock."""
        self._lock = threading.Lock()
        self._entries = []


node_pool = NodePool()
"""The nodes of this process."""

in_child(InChild.NODES)(node_pool.forget_in_child)
