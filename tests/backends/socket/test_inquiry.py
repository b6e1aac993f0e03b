"""The reason of a failed group: survivors wait for a possible last message of a departed rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.boards import Members, operation
from support.fabrics import World
from support.threads import ends_of, together

from dist2 import GroupAbortedError, GroupRevokedError, MismatchError, PeerLostError
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.messages import inquiry
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.runtime.deadline import deadline_in


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A useless wait hangs the test, and a correct early end passes it at any load."""
    monkeypatch.setattr(inquiry, "HEAR_S", 600.0)


@pytest.fixture
def world() -> Iterator[World]:
    made = World([Fabric() for _ in range(3)])
    yield made
    made.close()


def listening(endpoint: FabricEndpoint) -> None:
    """Return when a thread makes progress for a rank: it waits for something."""
    while not endpoint._fabric.poller.role.locked():
        pass


def greet(endpoint: FabricEndpoint, peer: int) -> None:
    """Make a link to a member that does the same."""
    sending = endpoint.send_tagged(peer, 0, 11, memoryview(b"hello"))
    receiving = endpoint.recv_tagged(peer, 0, 11, memoryview(bytearray(5)))
    endpoint.wait([sending, receiving], deadline_in(10.0))


def listening_boards(*endpoints: FabricEndpoint) -> Members:
    """Return boards that listen to the messages of a group."""
    members = Members(len(endpoints))
    for board, messages in zip(members.boards, endpoints, strict=True):
        assert board.meeting.look_up()
        board.listen(messages)
    return members


def fail(endpoint: FabricEndpoint, error: Exception) -> None:
    """Abort a group over an error."""
    endpoint.broken_by(error)
    endpoint.abort(GroupAbortedError("by the test"))
    endpoint.close()


def test_the_word_of_who_aborted_is_waited_for(world: World) -> None:
    first, second, _ = world.group()

    def abort() -> None:
        listening(first)
        fail(second, OSError("the disk is full"))

    together(lambda: first.hear_out([1], []), abort)
    assert first.why([1]) == " (OSError: the disk is full)"


def test_who_left_in_good_order_has_no_word_to_wait_for(world: World) -> None:
    first, second, _ = world.group()
    second.close()  # without a link: nothing is sent
    first.hear_out([], [1])
    assert first.why([1]) == ""


@pytest.mark.parametrize("in_good_order", [True, False])
@pytest.mark.parametrize("told", [MismatchError("not this"), PeerLostError("rank 2 died")])
def test_where_others_are_to_blame_their_word_is_waited_for(
    world: World, told: Exception, in_good_order: bool
) -> None:
    first, second, third = world.group()
    together(lambda: greet(first, 1), lambda: greet(second, 0))

    def blame() -> None:
        listening(first)
        if in_good_order:
            second.broken_by(told)
            second.close()
        else:
            fail(second, told)
        while not first.why([1]):
            pass
        third.revoke(2)

    (ended, _) = ends_of(lambda: first.hear_out([1], []), blame)
    assert isinstance(ended, GroupRevokedError), ended


@pytest.mark.parametrize("late", [False, True])
def test_a_collective_names_who_left_without_it_and_not_who_left_for_that(world: World, late: bool) -> None:
    """The departure of rank 2 is a consequence of that of rank 1, and may be heard first."""
    first, second, third = world.group()
    together(lambda: greet(first, 1), lambda: greet(second, 0))
    together(lambda: greet(first, 2), lambda: greet(third, 0))
    for called in (first, third):
        called.begin(1, 7)
    receiving = first.recv(2, 1, 0, 7, memoryview(bytearray(1)))

    def leave() -> None:
        if not late:
            second.close()
        third.broken_by(PeerLostError("rank 1 left the group", ranks=[1]))
        third.close()
        while not first.why([2]):
            pass
        second.close()

    ended, _ = ends_of(lambda: first.wait([receiving], deadline_in(60.0)), leave)
    assert isinstance(ended, PeerLostError)
    assert ended.ranks == (1,), ended


def test_who_is_aborted_itself_waits_for_nobody(world: World) -> None:
    first, *_ = world.group()

    def abort() -> None:
        listening(first)
        first.abort(GroupAbortedError("here"))

    ended, _ = ends_of(lambda: first.hear_out([1], []), abort)
    assert isinstance(ended, GroupAbortedError)


def test_in_shared_memory_the_word_of_who_aborted_is_in_the_error(world: World) -> None:
    """Shared memory shows the abort before the message with its reason, by any delay of the aborting rank."""
    first, second, _ = world.group()
    members = listening_boards(first, second)

    def abort() -> None:
        members.boards[1].abort(GroupAbortedError("by the test"))
        listening(first)
        fail(second, OSError("the disk is full"))

    try:
        ended, _ = ends_of(lambda: members.boards[0].fence(operation(0)), abort)
    finally:
        members.close()
    assert isinstance(ended, PeerLostError)
    assert "rank 1 aborted the group (OSError: the disk is full)" in str(ended)


def test_in_shared_memory_who_aborted_because_of_another_is_not_named(world: World) -> None:
    """The abort of rank 1 is a consequence of that of rank 2, and may be seen first."""
    first, second, third = world.group()
    members = listening_boards(first, second, third)

    def abort() -> None:
        members.boards[1].abort(GroupAbortedError("by the test"))
        listening(first)
        fail(second, PeerLostError("rank 2 aborted the group", ranks=[2]))
        while not first.why([1]):
            pass
        members.boards[2].abort(GroupAbortedError("by the test"))
        fail(third, OSError("the disk is full"))

    try:
        ended, _ = ends_of(lambda: members.boards[0].fence(operation(0)), abort)
    finally:
        members.close()
    assert isinstance(ended, PeerLostError)
    assert ended.ranks == (2,), ended


def test_a_group_that_was_aborted_because_of_a_departure_names_who_left() -> None:
    """Rank 0 waits for a message of rank 3; rank 1 aborts because rank 2 has left without a collective."""
    world = World([Fabric() for _ in range(4)])
    try:
        first, second, third, fourth = world.group()
        for peer, other in enumerate((second, third, fourth), 1):
            together(lambda peer=peer: greet(first, peer), lambda other=other: greet(other, 0))
        for called in (first, second):
            called.begin(1, 7)
        receiving = first.recv_tagged(3, 0, 11, memoryview(bytearray(1)))

        def leave() -> None:
            third.close()
            fail(second, PeerLostError("rank 2 left the group", ranks=[2]))

        ended, _ = ends_of(lambda: first.wait([receiving], deadline_in(60.0)), leave)
    finally:
        world.close()
    assert isinstance(ended, PeerLostError)
    assert ended.ranks == (2,), ended
