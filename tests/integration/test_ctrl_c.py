"""Ctrl-C: raised at once wherever a rank waits, and at no moment in a way that spoils other groups."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drill.holdings import holdings, kept_since
from support.mixed_operations import some_of_everything
from support.processes import caught, run_processes
from support.time_limits import in_time

import dist2
from dist2 import GroupAbortedError, PeerLostError, ProcessGroup

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])

AT_ONCE_S = 0.5


def press() -> None:
    """Send SIGINT, as the terminal does."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def pressed(call: Callable[[], object], after_s: float = 0.08) -> float:
    """Press Ctrl-C while a call waits; return how long it took to raise."""
    timer = threading.Timer(after_s, press)
    timer.start()
    _, elapsed_s = caught(KeyboardInterrupt, call)
    timer.join()
    return elapsed_s - after_s


def _leave(pg: ProcessGroup) -> None:
    pg.barrier(async_op=True)
    pg.shutdown()


WAITS: dict[str, Callable[[ProcessGroup], object]] = {
    "all_reduce": lambda pg: pg.all_reduce(torch.ones(2)),
    "long_all_reduce": lambda pg: pg.all_reduce(torch.ones(500_000)),
    "async": lambda pg: pg.all_reduce(torch.ones(2), async_op=True).wait(),
    "behind_async": lambda pg: (pg.barrier(async_op=True), pg.barrier()),
    "coalesced": lambda pg: pg.all_reduce_coalesced([torch.ones(2), torch.ones(3)]),
    "recv": lambda pg: pg.recv(torch.ones(2), 1),
    "irecv": lambda pg: pg.irecv(torch.ones(2), 1).wait(),
    "long_send": lambda pg: pg.send(torch.ones(3_000_000), 1),
    "monitored_barrier": lambda pg: pg.monitored_barrier(),
    "agree": lambda pg: pg.agree(),
    "shutdown": _leave,
    "store": lambda pg: pg.get_group_store().get("never"),
    "new_group": lambda pg: dist2.new_group(
        "socket", store=dist2.HashStore(), rank=0, world_size=2, name="half"
    ),
}


def _wait_everywhere(pg: ProcessGroup) -> dict[str, float]:
    late_s = {}
    for name, wait in WAITS.items():
        group = pg.split([0, 1], name=name)
        assert group is not None
        if pg.rank() == 0:
            late_s[name] = pressed(lambda wait=wait, group=group: wait(group))
            group.abort()
            caught(GroupAbortedError, group.barrier)
        total = torch.ones(2)
        pg.all_reduce(total)
        assert total.tolist() == [2.0] * 2
        group.abort()
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    pg.barrier()
    pg.shutdown()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return late_s


def test_ctrl_c_ends_every_wait_at_once(transport: str, tmp_path: Path) -> None:
    late_s = run_processes(2, _wait_everywhere, tmp_path, transport=transport)[0]
    assert late_s.keys() == WAITS.keys()
    in_time(max(late_s.values()), AT_ONCE_S, late_s)


def _press_soon(delay_s: float) -> None:
    signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, delay_s)


def _storm(pg: ProcessGroup, rounds: int) -> list[str]:
    """Press Ctrl-C again and again in one group, and go on in another that is on the same links."""
    dice = random.Random(pg.rank())
    some_of_everything(pg)
    before = holdings()
    for _ in range(rounds):
        doomed = pg.split([0, 1])
        assert doomed is not None
        try:
            _press_soon(dice.uniform(0.0001, 0.004))
            try:
                while True:
                    some_of_everything(doomed)
            except (GroupAbortedError, PeerLostError):  # the other rank was first
                time.sleep(5)
                raise AssertionError("Ctrl-C was lost") from None
        except KeyboardInterrupt:
            pass
        doomed.abort()
        some_of_everything(pg)
    pg.barrier()
    return list(kept_since(before))


def test_ctrl_c_at_any_moment_leaves_other_groups_whole(transport: str, tmp_path: Path) -> None:
    assert run_processes(2, _storm, tmp_path, 50, transport=transport) == [[], []]


def _own_handler(pg: ProcessGroup) -> bool:
    """A program's own handler stays, and aborts at once."""
    pg.barrier()
    signal.signal(signal.SIGINT, lambda number, frame: pg.abort())
    other = pg.split([0, 1])
    assert other is not None
    other.shutdown()
    if pg.rank() == 1:
        return True  # it lives, and does not come
    timer = threading.Timer(0.1, press)
    timer.start()
    _, elapsed_s = caught(GroupAbortedError, lambda: pg.all_reduce(torch.ones(2)))
    in_time(elapsed_s, 0.1 + AT_ONCE_S)
    return True


def test_a_handler_of_the_program_is_left_alone(transport: str, tmp_path: Path) -> None:
    assert run_processes(2, _own_handler, tmp_path, transport=transport) == [True, True]
