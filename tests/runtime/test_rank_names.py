"""The names of ranks in texts."""

from __future__ import annotations

import pickle

import attrs
import pytest

from dist2.errors import (
    Dist2Error,
    GroupRevokedError,
    OperationTimeoutError,
    PeerLostError,
)
from dist2.runtime.rank_names import RANKS, RankNames, host_and_pid, rank_names

TP = RankNames("tp", (1, 2, 4, 3), lambda rank: host_and_pid("a", 4710 + rank))


@pytest.mark.parametrize(
    ("ranks", "named"),
    [([3], "rank 3"), ([2, 0], "ranks 0, 2"), ([0, 1, 2, 5, 4, 7], "ranks 0-2, 4, 5, 7"), ([1, 1], "rank 1")],
)
def test_ranks_of_the_job_are_listed(ranks: list[int], named: str) -> None:
    assert rank_names(ranks) == named
    assert RANKS(ranks) == named


def test_a_rank_is_named_by_its_rank_in_the_job_and_the_group_and_its_process() -> None:
    assert TP([1]) == "rank 2 (rank 1 of tp, host a, pid 4711)"
    assert TP([1], processes=False) == "rank 2 (rank 1 of tp)"


def test_ranks_are_named_in_the_order_of_the_job() -> None:
    assert TP([0, 2, 3]) == "ranks 1, 3, 4 (ranks 0, 3, 2 of tp)"
    assert TP(range(4)) == "ranks 1-4 (ranks 0, 1, 3, 2 of tp)"


def test_a_rank_with_the_same_number_in_the_job_needs_nothing_beside_it() -> None:
    assert RankNames("part", (0, 2))([0]) == "rank 0"
    assert RankNames("part", (0, 2))([0, 1]) == "ranks 0, 2 (ranks 0, 1 of part)"


def test_an_argument_stays_as_it_was_given() -> None:
    assert TP.argument(1) == "1 (rank 2)"
    assert RANKS.argument(1) == "1"


def test_ends_name_processes() -> None:
    ends = {1: "was killed by SIGKILL"}
    assert TP.ended(ends) == "rank 2 (rank 1 of tp, host a, pid 4711) was killed by SIGKILL"
    assert attrs.evolve(TP, global_ranks=()).ended(ends) == "rank 1 (host a, pid 4711) was killed by SIGKILL"
    assert RANKS.ended({0: "died", 2: "died", 3: "exited with code 3"}) == (
        "ranks 0, 2 died; rank 3 exited with code 3"
    )
    assert RANKS.ended({0: "was killed by SIGKILL", 1: "was killed by SIGKILL"}) == (
        "ranks 0, 1 were killed by SIGKILL"
    )


def test_many_ends_are_summed_up() -> None:
    assert RANKS.ended({rank: f"exited with code {rank}" for rank in range(1, 8)}) == "ranks 1-7 died"


def test_ranks_that_left_and_live_are_named_together() -> None:
    assert TP.departed({0: "left the group", 1: "left the group"}) == (
        "ranks 1, 2 (ranks 0, 1 of tp) left the group"
    )


def test_the_last_known_operations_are_told_by_rank() -> None:
    assert TP.last_seen({}) == ""
    assert TP.last_seen({0: "barrier()", 1: "barrier()"}) == (
        " (last seen at: ranks 1, 2 (ranks 0, 1 of tp): barrier())"
    )


def test_errors_have_both_ranks() -> None:
    """Fields are group ranks; those that begin with ``global`` are ranks of the job."""
    late = OperationTimeoutError("late", missing=[1, 3], rank=0, members=(1, 2, 4, 3))
    assert (late.missing, late.global_missing) == ((1, 3), (2, 3))
    assert (late.rank, late.global_rank) == (0, 1)
    lost = PeerLostError("lost", ranks=[2])
    assert lost.global_ranks == (2,)
    lost.locate("tp", "barrier", 1, 0, (1, 2, 4))
    assert (lost.ranks, lost.global_ranks, lost.members) == ((2,), (4,), (1, 2, 4))
    revoked = GroupRevokedError("revoked", by=1, members=(1, 2))
    assert (revoked.by, revoked.global_by) == (1, 2)
    assert revoked.again("again").global_by == 2
    assert Dist2Error("no rank is known").global_rank is None


def test_errors_travel_between_processes() -> None:
    """As `concurrent.futures` sends them from a worker."""
    for error in (GroupRevokedError("revoked", by=1, members=(1, 2)), PeerLostError("lost", ranks=[1])):
        came = pickle.loads(pickle.dumps(error))
        assert (type(came), str(came), vars(came)) == (type(error), str(error), vars(error))
