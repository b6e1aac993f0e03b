"""Changes of membership: each function plays one role of one scenario, which ends with a working group."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable

import attrs
import torch
from support.time_limits import in_time

import dist2
from dist2 import GroupRevokedError, OperationTimeoutError, PeerLostError, PrefixStore, ProcessGroup
from drill.faults import TOLD_S, kill, leave
from drill.holdings import holdings
from drill.operations import all_reduce_small, something_else, verify
from drill.stage import EVENT_S, Stage

Plot = Callable[[Stage], None]

SOON_S = 0.5


def _lose(stage: Stage, pg: ProcessGroup, *lost: int) -> None:
    """See a group break because these of its ranks went."""
    error, _ = stage.first_error(lambda: all_reduce_small(pg))
    assert isinstance(error, PeerLostError), repr(error)
    assert set(error.ranks) <= set(lost), error.ranks


def _check(stage: Stage, pg: ProcessGroup, *roles: int) -> None:
    """Check that a group is of these global ranks and works."""
    assert pg.global_ranks == roles, pg.global_ranks
    verify(pg)
    stage.note(f"goes on as rank {pg.rank()} of {pg.size()}")


def _merged(stage: Stage, pg: ProcessGroup, name: str, size: int, timeout: float = EVENT_S) -> ProcessGroup:
    """Return a group merged from this one and those of other callers with the same name."""
    return pg.merge_remote_group(PrefixStore(name, stage.store), size, timeout)


# Going on without some


def without(*victims: int, how: Callable[[ProcessGroup], None] = kill) -> Plot:
    """Some go at once; the others shrink."""

    def play(stage: Stage) -> None:
        pg = stage.group(4)
        if stage.role in victims:
            how(pg)
        for victim in victims:
            stage.see_end(victim)
        _lose(stage, pg, *victims)
        left = pg.shrink()
        _check(stage, left, *(role for role in range(4) if role not in victims))

    return play


def twice(stage: Stage) -> None:
    """The last goes, later the first: the group that shrank shrinks again."""
    pg = stage.group(4)
    if stage.role == 3:
        kill(pg)
    _lose(stage, pg, 3)
    smaller = pg.shrink()
    _check(stage, smaller, 0, 1, 2)
    if stage.role == 0:
        kill(pg)
    _lose(stage, smaller, 0)
    _check(stage, smaller.shrink(), 1, 2)


def death_in_the_smaller(stage: Stage) -> None:
    """One more goes while the others make the smaller group without asking it."""
    pg = stage.group(4)
    if stage.role == 1:
        kill(pg)
    _lose(stage, pg, 1)
    if stage.role == 2:
        kill(pg)
    smaller = pg.shrink([1])
    error, _ = stage.first_error(lambda: all_reduce_small(smaller))
    assert isinstance(error, PeerLostError)
    assert error.ranks == (1,), error.ranks  # it was rank 2 of the first group
    _check(stage, smaller.shrink(error.ranks), 0, 3)


def death_during_shrink(stage: Stage) -> None:
    """One more goes inside `shrink`: it is left out there, or is lost in the smaller group."""
    pg = stage.group(4)
    if stage.role == 1:
        kill(pg)
    _lose(stage, pg, 1)
    stage.tell(f"lost/{stage.role}")
    if stage.role == 2:
        stage.hear("lost/0", "lost/3")  # a slow rank would lose both at once
        threading.Timer(0.002, kill, [pg]).start()
        while True:
            all_reduce_small(pg.shrink())
    left = pg.shrink()
    if left.size() == 3:
        _lose(stage, left, 1)
        left = left.shrink()
    _check(stage, left, 0, 3)


def death_during_agree(stage: Stage) -> None:
    """The deciding rank dies during many agreements: the others have the same answers."""
    pg = stage.group(4)
    if stage.role == 0:
        threading.Timer(0.01, kill, [pg]).start()
        while True:
            pg.agree(0b1111)
    answers = [pg.agree(0b1111)]
    while not answers[-1].failed:
        answers.append(pg.agree(0b1111 & ~(1 << stage.role)))
    stage.note(f"{len(answers)} agreements, the last is {answers[-1]}")
    assert answers[-1].failed == (0,)
    left = pg.shrink()
    _check(stage, left, 1, 2, 3)
    mine = [[answer.flags, *answer.failed] for answer in answers]
    assert left.all_gather_object(mine) == [mine] * 3


def revoke_with_the_dead(stage: Stage) -> None:
    """One is dead, one sees it and revokes; the ranks that wait for a message from it are notified."""
    pg = stage.group(4)
    if stage.role == 1:
        kill(pg)
    stage.tell(f"in/{stage.role}")
    if stage.role == 3:
        stage.see_end(1)
        stage.hear("in/0", "in/2")  # a rank that is still in the barrier would fail there
        pg.revoke()
    error, took_s = stage.first_error(lambda: pg.recv(torch.empty(4), 3 - stage.role))
    assert isinstance(error, PeerLostError | GroupRevokedError), repr(error)
    in_time(took_s, TOLD_S)
    stage.until(lambda: isinstance(pg.get_error(), GroupRevokedError))
    _check(stage, pg.shrink(), 0, 2, 3)


def without_the_stopped(stage: Stage) -> None:
    """One is stopped until the others have given up on it."""
    pg = stage.group(4)
    pg.set_timeout(SOON_S)
    if stage.role == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        stage.first_error(lambda: all_reduce_small(pg))
        return
    error, _ = stage.first_error(lambda: all_reduce_small(pg))
    assert isinstance(error, OperationTimeoutError)
    _check(stage, pg.shrink([2], timeout=EVENT_S), 0, 1, 3)
    if stage.role == 0:
        os.kill(stage.pid(2), signal.SIGCONT)


# Groups beside each other


def overlapping(stage: Stage) -> None:
    """A death breaks the groups that it was in, and no other."""
    pg = stage.group(4)
    groups = [pg.split(ranks) for ranks in ([0, 2], [1, 2], [3, 0], [3, 1, 2])]
    evens, _, ends, _ = groups
    nested = evens.split([1]) if evens is not None else None
    if stage.role == 1:
        kill(pg)
    for group in (groups[1], groups[3]):
        if group is not None:
            error, _ = stage.first_error(lambda group=group: all_reduce_small(group))
            assert isinstance(error, PeerLostError)
            assert [group.global_ranks[rank] for rank in error.ranks] == [1]
    for group, ranks in ((evens, (0, 2)), (ends, (3, 0)), (nested, (2,))):
        if group is not None:
            _check(stage, group, *ranks)


def split_of_the_broken(stage: Stage) -> None:
    """After a mismatch no rank is gone: parts of the broken group continue, in any order of ranks."""
    pg = stage.group(4)
    stage.first_error(lambda: (something_else if stage.role == 1 else all_reduce_small)(pg))
    part = pg.split([3, 0]) if stage.role in (0, 3) else pg.split([2, 1])
    assert part is not None
    _check(stage, part, *((3, 0) if stage.role in (0, 3) else (2, 1)))


# Coming, and coming back


def late_join(stage: Stage) -> None:
    """A process that was never in the group joins while it works."""
    if stage.role == 3:
        stage.hear("training")
        _check(stage, _merged(stage, stage.alone(), "late", 4), 0, 1, 2, 3)
        return
    pg = stage.group(3)
    verify(pg)
    stage.tell("training")
    everyone = _merged(stage, pg, "late", 4)
    _check(stage, everyone, 0, 1, 2, 3)
    verify(pg)  # the old group stays as it is


def restart(stage: Stage) -> None:
    """One dies; a new process takes its place."""
    if stage.role == 3:
        stage.hear("shrunk")
        _check(stage, _merged(stage, stage.alone(), "back", 3), 0, 1, 2)
        return
    pg = stage.group(3)
    if stage.role == 1:
        kill(pg)
    _lose(stage, pg, 1)
    left = pg.shrink()
    _check(stage, left, 0, 2)
    stage.tell("shrunk")
    _check(stage, _merged(stage, left, "back", 3), 0, 1, 2)


def restart_again_and_again(stage: Stage) -> None:
    """One lives through the deaths of four others, and holds no more after the last than after the second."""
    if stage.role > 1:
        stage.hear(f"alone/{stage.role}")
        pg = _merged(stage, stage.alone(), f"back/{stage.role}", 2)
        verify(pg)
        stage.hear(f"enough/{stage.role}")
        kill(pg)
    pg = stage.group(2)
    if stage.role == 1:
        kill(pg)
    held = 0

    def holds_no_more() -> bool:
        gc.collect()
        return holdings().total() <= held

    for newcomer in (2, 3, 4):
        stage.first_error(lambda pg=pg: all_reduce_small(pg))
        left = pg.shrink()
        pg.abort()
        stage.tell(f"alone/{newcomer}")
        pg = _merged(stage, left, f"back/{newcomer}", 2)
        left.abort()
        verify(pg)
        if newcomer == 2:
            gc.collect()
            held = holdings().total()
        elif newcomer == 4:
            stage.until(holds_no_more)  # links may be on their way
        stage.tell(f"enough/{newcomer}")


def merge_after_split(stage: Stage) -> None:
    """Two halves of a group become one again."""
    pg = stage.group(4)
    half = pg.split([0, 1] if stage.role < 2 else [2, 3])
    assert half is not None
    verify(half)
    _check(stage, _merged(stage, half, "whole", 4), 0, 1, 2, 3)


def merge_of_shrunk_halves(stage: Stage) -> None:
    """Each half of a group loses one rank; the survivors of both become one group."""
    pg = stage.group(4)
    half = pg.split([0, 1] if stage.role < 2 else [2, 3])
    assert half is not None
    if stage.role in (1, 2):
        kill(pg)
    _lose(stage, half, 1 - half.rank())
    left = half.shrink([1 - half.rank()])
    _check(stage, _merged(stage, left, "rest", 2), 0, 3)


def merge_after_abort(stage: Stage) -> None:
    """One aborts its group, and comes back with one of its own."""
    pg = stage.group(4)
    if stage.role == 1:
        pg.abort()
        stage.hear("shrunk")
        group = stage.alone()
    else:
        _lose(stage, pg, 1)
        group = pg.shrink([1])
        _check(stage, group, 0, 2, 3)
        stage.tell("shrunk")
    verify(_merged(stage, group, "again", 4))


def merge_after_timeout(stage: Stage) -> None:
    """One is too slow, is left behind, and comes back."""
    pg = stage.group(4)
    pg.set_timeout(SOON_S)
    if stage.role == 3:
        stage.hear("shrunk")
        stage.first_error(lambda: all_reduce_small(pg))
        pg.abort()
        group = stage.alone()
    else:
        error, _ = stage.first_error(lambda: all_reduce_small(pg))
        assert isinstance(error, OperationTimeoutError)
        assert error.missing == (3,)
        group = pg.shrink([3], timeout=EVENT_S)
        _check(stage, group, 0, 1, 2)
        stage.tell("shrunk")
    verify(_merged(stage, group, "again", 4))


def nobody_comes(stage: Stage) -> None:
    """The rank that should rejoin does not: the merge times out, the group goes on."""
    if stage.role == 3:
        stage.hear("trying")
        kill(stage.alone())
    pg = stage.group(3)
    stage.tell("trying")
    try:
        _merged(stage, pg, "nobody", 4, SOON_S)
    except OperationTimeoutError as error:
        stage.note(str(error))
    else:
        raise AssertionError("merged with nobody")
    _check(stage, pg, 0, 1, 2)


def death_during_merge(stage: Stage) -> None:
    """The rejoining rank dies after the others have seen it: no rank hangs, the group goes on."""
    if stage.role == 3:
        alone = stage.alone()
        stage.store.add("dying/merge/comers", 1)  # as far as it gets
        stage.tell("died")
        kill(alone)
    pg = stage.group(3)
    stage.hear("died")
    try:
        _merged(stage, pg, "dying", 4, SOON_S)
    except dist2.Dist2Error as error:
        stage.note(str(error))
    else:
        raise AssertionError("merged with the dead")
    _check(stage, pg, 0, 1, 2)


class _Fatal(PrefixStore):
    """A part of a store: this process is killed before it sets a key that contains a word."""

    def __init__(self, stage: Stage, name: str, word: str) -> None:
        super().__init__(name, stage.store)
        self._stage, self._word = stage, word

    def set(self, key: str | bytes, value: str | bytes) -> None:
        self._reaches(key)
        super().set(key, value)

    def compare_set(self, key: str | bytes, expected: str | bytes, desired: str | bytes) -> bytes:
        self._reaches(key)
        return super().compare_set(key, expected, desired)

    def _reaches(self, key: str | bytes) -> None:
        if self._word in str(key):
            self._stage.tell("committed")
            os.kill(os.getpid(), signal.SIGKILL)


def death_while_building(victim: int, word: str) -> Plot:
    """One rank dies while a group is built; the others get the error in time, and build one without it."""

    def play(stage: Stage) -> None:
        def build(store: PrefixStore, rank: int, size: int) -> ProcessGroup:
            backend, options = stage.backend()
            return dist2.new_group(backend, EVENT_S, store=store, rank=rank, world_size=size, **options)

        doomed = PrefixStore("doomed", stage.store)
        if stage.role == victim:
            build(_Fatal(stage, "doomed", word), victim, 3)
        error, _ = stage.first_error(lambda: build(doomed, stage.role, 3))
        in_time(time.monotonic() - stage.hear("committed"), TOLD_S)
        assert isinstance(error, PeerLostError), repr(error)
        assert error.ranks == (victim,), str(error)
        left = build(PrefixStore("again", stage.store), stage.role - (stage.role > victim), 2)
        left.set_timeout(stage.timeout_s)
        verify(left)

    return play


@attrs.frozen
class Story:
    """How to play a cell about membership.

    Attributes:
        play: Plays one role.
        dies: Roles whose processes end.
        roles: How many there are.
    """

    play: Plot
    dies: frozenset[int] = attrs.field(default=(), converter=frozenset)
    roles: int = 4


STORIES = {
    "build-with-a-death-before-all-came": Story(death_while_building(0, "first"), dies=[0], roles=3),
    "build-with-a-death-before-a-card": Story(death_while_building(1, "card/"), dies=[1], roles=3),
    "build-with-a-death-at-the-end": Story(death_while_building(2, "built/"), dies=[2], roles=3),
    "shrink-last": Story(without(3), dies=[3]),
    "shrink-middle": Story(without(1), dies=[1]),
    "shrink-first": Story(without(0), dies=[0]),
    "shrink-two-at-once": Story(without(1, 2), dies=[1, 2]),
    "shrink-all-but-one": Story(without(0, 1, 3), dies=[0, 1, 3]),
    "shrink-after-exit": Story(without(2, how=leave), dies=[2]),
    "shrink-twice": Story(twice, dies=[0, 3]),
    "shrink-with-a-death": Story(death_during_shrink, dies=[1, 2]),
    "shrink-then-a-death": Story(death_in_the_smaller, dies=[1, 2]),
    "agree-with-a-death": Story(death_during_agree, dies=[0]),
    "revoke-with-the-dead": Story(revoke_with_the_dead, dies=[1]),
    "shrink-the-stopped": Story(without_the_stopped),
    "split-overlapping": Story(overlapping, dies=[1]),
    "split-after-mismatch": Story(split_of_the_broken),
    "late-join": Story(late_join),
    "restart": Story(restart, dies=[1]),
    "restart-again-and-again": Story(restart_again_and_again, dies=[1, 2, 3, 4], roles=5),
    "merge-after-split": Story(merge_after_split),
    "merge-after-deaths": Story(merge_of_shrunk_halves, dies=[1, 2]),
    "merge-after-abort": Story(merge_after_abort),
    "merge-after-timeout": Story(merge_after_timeout),
    "merge-with-nobody": Story(nobody_comes, dies=[3]),
    "merge-with-a-death": Story(death_during_merge, dies=[3]),
}
