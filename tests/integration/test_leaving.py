"""A rank leaves a group in good order, at every point of the group's life, and its process lives on.

The others call an operation that needs it: they get an error that names it, and wait for no timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from support.processes import Crew, caught, hear, tell
from support.ranks import TENANTS, Tenant, run_ranks
from support.time_limits import in_time

from dist2 import OperationTimeoutError, PeerLostError, ProcessGroup

SIZE = 3
LEAVER = 1
TOLD_S = 1.0
TOLD_BESIDE_S = 3.0
"""Of a backend with a control group, whose links may have to be made first."""
TIMEOUT_S = 15.0
TWO_HOSTS = Tenant("hosts", "socket", layout=(0, 1, 1))


def _exchange(pg: ProcessGroup) -> None:
    """Send a message between two ranks that stay."""
    if pg.rank() == 0:
        pg.send(torch.ones(1), 2)
    elif pg.rank() == 2:
        pg.recv(torch.ones(1), 0)


POINTS: dict[str, Callable[[ProcessGroup], object]] = {
    "before the first call": lambda pg: None,
    "after a message of others": _exchange,
    "after a broadcast": lambda pg: pg.broadcast(torch.ones(4), 0),
    "after a barrier": lambda pg: pg.barrier(),
}
NEEDS: dict[str, Callable[[ProcessGroup], object]] = {
    "all_reduce": lambda pg: pg.all_reduce(torch.ones(4)),
    "long all_reduce": lambda pg: pg.all_reduce(torch.ones(600_000)),
    "async all_reduce": lambda pg: pg.all_reduce(torch.ones(4), async_op=True).wait(),
    "barrier": lambda pg: pg.barrier(),
    "broadcast": lambda pg: pg.broadcast(torch.ones(4), LEAVER),
    "recv": lambda pg: pg.recv(torch.ones(4), LEAVER),
    "monitored_barrier": lambda pg: pg.monitored_barrier(),
}


def leave(pg: ProcessGroup, point: str, need: str, stays: bool) -> tuple[str, tuple[int, ...], float] | None:
    """Leave, or need the leaver; return the error, the ranks that it names, and the time that it took.

    Args:
        stays: The leaver has another group, so that its process keeps its links.
    """
    child = pg.split(range(SIZE))
    assert child is not None
    group = child if stays else pg
    if not stays:
        child.shutdown()
    POINTS[point](group)
    all_know = [f"{rank} knows" for rank in range(SIZE) if rank != LEAVER]
    if pg.rank() == LEAVER:
        group.shutdown()
        hear(pg, *all_know)  # it calls nothing meanwhile
        return None
    error, took_s = caught(PeerLostError, lambda: NEEDS[need](group))
    tell(pg, f"{pg.rank()} knows")
    hear(pg, *all_know)  # from no abort of another
    group.abort()
    return str(error), error.ranks, took_s


def judge(told: list[tuple[str, tuple[int, ...], float] | None], case: tuple[object, ...]) -> None:
    for each in told[:LEAVER] + told[LEAVER + 1 :]:
        assert each is not None
        text, ranks, took_s = each
        assert ranks == (LEAVER,), (case, text)
        assert f"rank {LEAVER} left the group after fewer calls: uneven batches?" in text, case
        in_time(took_s, TOLD_S, case)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp", "hosts"])
def test_a_thread_that_leaves_is_known_to_all(transport: str, point: str) -> None:
    tenant = Tenant(transport, "socket", {"transport": transport})
    if transport == "hosts":
        tenant = TWO_HOSTS
    for need in NEEDS:
        for stays in (False, True):
            told = run_ranks(
                SIZE, lambda pg, n=need, s=stays: leave(pg, point, n, s), tenant, timeout=TIMEOUT_S
            )
            judge(told, (need, stays))


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    made = Crew(SIZE, tmp_path_factory.mktemp("stores"))
    yield made
    made.close()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_process_that_leaves_and_lives_on_is_known_to_all(crew: Crew, transport: str, point: str) -> None:
    for need in NEEDS:
        for stays in (False, True):
            told = crew.run(leave, point, need, stays, transport=transport, timeout=TIMEOUT_S)
            judge(told, (need, stays))


def _on_a_split(pg: ProcessGroup) -> object:
    made = pg.split(range(SIZE))
    assert made is not None
    return made.all_reduce(torch.ones(4))


NEEDS_BESIDE: dict[str, Callable[[ProcessGroup], object]] = {
    **{name: NEEDS[name] for name in ("all_reduce", "recv")},
    "send": lambda pg: [pg.send(torch.ones(600_000), LEAVER) for _ in range(9)],
    "split": _on_a_split,
}


@pytest.mark.parametrize("need", NEEDS_BESIDE)
@pytest.mark.parametrize("tenant", TENANTS, ids=str)
def test_a_member_that_leaves_is_known_on_every_backend(tenant: Tenant, need: str) -> None:
    """Also where the tensors move beside the links, and where the others make a group with the leaver."""
    all_know = threading.Barrier(SIZE)

    def body(pg: ProcessGroup) -> None:
        if pg.rank() == LEAVER:
            pg.shutdown()
            all_know.wait(TIMEOUT_S)
            return
        error, took_s = caught(PeerLostError, lambda: NEEDS_BESIDE[need](pg))
        all_know.wait(TIMEOUT_S)
        pg.abort()
        assert LEAVER in error.ranks, error
        assert "left the group" in str(error), error
        in_time(took_s, TOLD_BESIDE_S)

    run_ranks(SIZE, body, tenant, timeout=TIMEOUT_S)


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
def test_a_thread_that_aborts_before_its_first_call_is_not_said_to_have_left(transport: str) -> None:
    """Its links close with its only group, so that others may find them closed before they read why."""
    all_know = threading.Barrier(SIZE)

    def body(pg: ProcessGroup) -> str:
        if pg.rank() == LEAVER:
            pg.abort()
            all_know.wait(TIMEOUT_S)
            return ""
        error, _ = caught(PeerLostError, lambda: pg.all_reduce(torch.ones(4)))
        all_know.wait(TIMEOUT_S)
        pg.abort()
        return str(error)

    for _ in range(8):
        told = run_ranks(SIZE, body, Tenant(transport, "socket", {"transport": transport}), timeout=TIMEOUT_S)
        assert not [text for text in told if "left the group" in text]
        assert all(f"rank {LEAVER} aborted the group" in told[rank] for rank in (0, 2)), told


@pytest.mark.parametrize(
    "tenant", [*(each for each in TENANTS if each.backend != "nccl"), TWO_HOSTS], ids=str
)
def test_who_comes_late_is_told_the_timeout_for_which_others_left(tenant: Tenant) -> None:
    """They close the group, as after any other call; the late rank made as many calls as they did."""
    all_gave_up, all_left = threading.Barrier(SIZE - 1), threading.Barrier(SIZE)

    def body(pg: ProcessGroup) -> None:
        group = pg.split(range(SIZE))
        assert group is not None
        group.barrier()
        if pg.rank() == LEAVER:
            all_left.wait(TIMEOUT_S)
            with pytest.raises(
                PeerLostError, match=r"left the group \(.*OperationTimeoutError: .*rank 1 did not arrive"
            ):
                group.all_reduce(torch.ones(600_000))
        else:
            caught(OperationTimeoutError, lambda: group.all_reduce(torch.ones(600_000), timeout=0.3))
            all_gave_up.wait(TIMEOUT_S)  # not to be told of the other's
            group.shutdown()
            all_left.wait(TIMEOUT_S)
        pg.barrier()

    run_ranks(SIZE, body, tenant, timeout=TIMEOUT_S)
