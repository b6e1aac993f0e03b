"""Failures of a rank while a group is built, as published to the others."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest
from support.scarcity import no_descriptors
from support.warm_interpreter import whole_python

from dist2 import HashStore
from dist2.errors import (
    GroupAbortedError,
    OperationTimeoutError,
    PeerLostError,
    RendezvousError,
    StoreTimeoutError,
)
from dist2.rendezvous import rendezvous
from dist2.rendezvous.liveness import (
    UNSURE_LOOKS,
    Building,
    FailureWatch,
    LivenessMonitor,
    abort_building,
    building,
)
from dist2.rendezvous.requests import JoinRequest, rank_key
from dist2.runtime.other_process import Process


@pytest.mark.parametrize(
    ("raised", "words", "rank"),
    [
        (PeerLostError("rank 2 died", ranks=[2]), "rank 2 died", 2),
        (PeerLostError("its connection was reset", ranks=[2]), "its connection was reset", 2),
        (ValueError("no"), r"rank 0 gave up \(ValueError: no\)", 0),
    ],
)
def test_the_others_hear_who_is_why(raised: Exception, words: str, rank: int) -> None:
    store = HashStore()
    first, second = (FailureWatch("building", store, rank, 3, "model") for rank in (0, 1))
    with pytest.raises(type(raised)), first:
        raise raised
    with pytest.raises(PeerLostError, match=f"^group 'model' cannot be built: {words}$") as told, second:
        second.get("what nobody sets")
    assert told.value.ranks == (rank,)


def test_keys_that_never_come_are_told_as_the_ranks_that_are_missing() -> None:
    store = HashStore()
    watch = FailureWatch("building", store, 0, 3, "model")
    FailureWatch("building", store, 2, 3, "model")
    words = "^group 'model' cannot be built: rank 1 did not arrive in time: all members make the group"
    with pytest.raises(OperationTimeoutError, match=words) as told, watch:
        watch.wait(["0/1"], 0.1)
    assert told.value.missing == (1,)
    assert isinstance(told.value.__context__, StoreTimeoutError)


def test_keys_that_never_come_though_all_ranks_are_there_are_told_as_they_are() -> None:
    store = HashStore()
    first, _ = (FailureWatch("building", store, rank, 2, "model") for rank in (0, 1))
    with pytest.raises(StoreTimeoutError, match="0/1"), first:
        first.wait(["0/1"], 0.1)


def test_a_wait_for_ranks_is_aborted_and_the_others_hear_of_it() -> None:
    store = HashStore()
    first, second = (FailureWatch("building", store, rank, 3, "model") for rank in (0, 1))

    def hung() -> GroupAbortedError:
        return GroupAbortedError("the job hangs")

    assert not abort_building(hung), "none is in its block"
    with pytest.raises(GroupAbortedError, match=r"^group 'model' cannot be built: the job hangs"), first:
        assert not abort_building(hung, "another")
        assert abort_building(hung, "model") == 1
        first.get("what nobody sets")
    assert not abort_building(hung)
    with pytest.raises(PeerLostError, match=r"rank 0 gave up \(GroupAbortedError: .*the job hangs"), second:
        second.get("what nobody sets")


def test_a_rank_that_came_too_late_to_watch_a_process_lets_others_tell_how_it_ended() -> None:
    """It said ``died`` where another rank, a little later, would have said by which signal."""
    program = "from dist2.runtime.other_process import Process; print(Process.here().text)"
    ended = subprocess.run([*whole_python(), "-c", program], capture_output=True, text=True, timeout=50)
    process = Process.read(ended.stdout.strip())
    assert process is not None
    store = HashStore()
    store.set(rank_key(1), JoinRequest(process, {}).to_text())
    monitor = LivenessMonitor(store, 0, 2)
    assert [monitor.dead() for _ in range(UNSURE_LOOKS)] == [None] * UNSURE_LOOKS
    assert monitor.dead() == (1, f"rank 1 ({process.place}) died"), "nobody knows it"
    assert monitor.seen_dead(0) == monitor.dead()


def test_a_rank_without_a_free_descriptor_declares_no_living_rank_dead() -> None:
    program = (
        "from dist2.runtime.other_process import Process as P; print(P.here().text, flush=True); input()"
    )
    with subprocess.Popen(
        [*whole_python(), "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        process = Process.read(child.stdout.readline().strip())
        assert process is not None
        store = HashStore()
        store.set(rank_key(1), JoinRequest(process, {}).to_text())
        monitor = LivenessMonitor(store, 0, 2)
        with no_descriptors():
            assert [monitor.dead() for _ in range(UNSURE_LOOKS + 1)] == [None] * (UNSURE_LOOKS + 1)
        assert monitor.seen_dead(0) is None
        child.communicate("\n", timeout=50)
    assert monitor.seen_dead(0) == (1, f"rank 1 ({process.place}) died")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_at_an_endpoint_is_listed_and_can_be_aborted(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def notice(making: Building) -> None:
        begun.append((making.rank, making.world_size, making.uid, making.requests()))
        threading.Thread(target=abort_once_it_waits).start()

    def abort_once_it_waits() -> None:
        (making,) = building()
        while making.part is None and rank == 0:
            time.sleep(0.01)
        (told,) = (each for each, request in making.requests().items() if request is None)
        abort_building(lambda: GroupAbortedError(f"rank {told} is missing"))

    monkeypatch.setattr("dist2.rendezvous.liveness.on_building", [notice])
    with pytest.raises(GroupAbortedError, match=f"^rank {1 - rank} is missing$"):
        rendezvous(f"file://{tmp_path}/meeting", rank, 2, timeout=30)
    assert not building()
    assert len(begun) == 1
    if rank == 0:  # the others read why
        monkeypatch.setattr("dist2.rendezvous.liveness.on_building", [])
        with pytest.raises(RendezvousError, match="rank 0 gave up: rank 1 is missing"):
            rendezvous(f"file://{tmp_path}/meeting", 1, 2, timeout=1)
