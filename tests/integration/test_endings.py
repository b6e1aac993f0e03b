"""`abort` and `shutdown` in every state, called in every way: nothing hangs, and everything is given back."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
import pytest
import torch
from drill.holdings import holdings, kept_since, segments, segments_since
from support.programs import run
from support.stores import exit_code, forked
from support.time_limits import in_time
from support.warm_interpreter import warm_python, whole_python

import dist2
from dist2 import Dist2Error, GroupAbortedError, HashStore, PeerLostError, PrefixStore, ProcessGroup
from dist2.backends.socket.transport.node import Node

LIMIT_S = 0.2
"""Of operations, where the end waits for them."""
FREED_S = 0.1
NOISE_S = 0.4
JOIN_S = 10.0


@attrs.define(eq=False)
class Blocked:
    """A call on a thread of its own, and its end.

    Attributes:
        error: Its exception.
        ended: The time of its end, in seconds.
    """

    call: Callable[[], object]
    error: BaseException | None = None
    ended: float = 0.0
    thread: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.call()
        except Dist2Error as error:
            self.error = error
        self.ended = time.monotonic()


@contextmanager
def two_ranks(
    transport: str, nodes: Sequence[Node] | None = None
) -> Iterator[tuple[ProcessGroup, ProcessGroup]]:
    """Yield both ranks of a new group, each with links and memory of its own; they may be left open."""
    store, groups, nodes = HashStore(), [], nodes or [Node(), Node()]

    def open_rank(rank: int) -> None:
        groups.append(
            dist2.new_group(
                "socket",
                JOIN_S,
                store=store,
                rank=rank,
                world_size=2,
                name="ending",
                transport=transport,
                node=nodes[rank],
            )
        )

    opening = [threading.Thread(target=open_rank, args=(rank,)) for rank in (0, 1)]
    for thread in opening:
        thread.start()
    for thread in opening:
        thread.join()
    try:
        ours, theirs = sorted(groups, key=lambda group: group.rank())
        other = Blocked(theirs.barrier)
        ours.barrier()
        other.thread.join()
        yield ours, theirs
    finally:
        for group in groups:
            group.abort()
        for node in nodes:
            node.close()


# States: each makes its state, and returns the calls that are blocked in it


def _idle(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    return []


def _in_a_collective(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    return [Blocked(lambda: ours.all_reduce(torch.ones(4)))]


def _in_a_long_collective(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    return [Blocked(lambda: ours.all_reduce(torch.ones(600_000)))]


def _in_a_receive(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    return [Blocked(lambda: ours.recv(torch.ones(4), 1)), Blocked(lambda: ours.recv(torch.ones(4)))]


def _in_a_long_send(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    return [Blocked(lambda: ours.send(torch.ones(3_000_000), 1))]


def _in_waits_for_queued(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    works = [ours.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
    works.append(ours.irecv(torch.ones(4), 1))
    return [Blocked(work.wait) for work in works] + [Blocked(ours.barrier)]


def _in_a_monitored_barrier(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    return [Blocked(ours.monitored_barrier)]


def _agreeing(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    return [Blocked(ours.agree)]


def _after_the_peer_aborted(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    theirs.abort()
    with pytest.raises(PeerLostError):
        ours.barrier()
    return []


def _after_a_timeout(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    with pytest.raises(dist2.OperationTimeoutError):
        ours.all_reduce(torch.ones(4), timeout=0.05)
    return []


def _revoked(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    theirs.revoke()
    return []


def _with_a_child(ours: ProcessGroup, theirs: ProcessGroup) -> list[Blocked]:
    """While a group is made from it, and another thread looks at it."""
    child = ours.split([0, 1], timeout=LIMIT_S, name="child")
    assert child is not None
    return [Blocked(lambda: _use_and_close(child))]


def _use_and_close(child: ProcessGroup) -> None:
    try:
        child.barrier()  # the other rank never makes it
    finally:
        child.abort()


STATES = {
    state.__name__.strip("_"): state
    for state in (
        _idle,
        _in_a_collective,
        _in_a_long_collective,
        _in_a_receive,
        _in_a_long_send,
        _in_waits_for_queued,
        _in_a_monitored_barrier,
        _agreeing,
        _after_the_peer_aborted,
        _after_a_timeout,
        _revoked,
        _with_a_child,
    )
}


# Ways


def _abort(pg: ProcessGroup) -> None:
    pg.abort()


def _shut_down(pg: ProcessGroup) -> None:
    pg.shutdown()


def _again_and_again(pg: ProcessGroup) -> None:
    for end in (pg.abort, pg.shutdown, pg.abort, pg.shutdown):
        end()


def _from_threads(pg: ProcessGroup) -> None:
    """All at once: only one of them closes it."""
    threads = [threading.Thread(target=end) for end in (pg.abort, pg.abort, pg.shutdown, pg.abort)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()


def _from_a_handler(pg: ProcessGroup) -> None:
    """While the main thread is in a call of the group."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: pg.abort())
    main = threading.main_thread().ident
    timer = threading.Timer(0.02, signal.pthread_kill, (main, signal.SIGUSR1))
    timer.start()
    try:
        with suppress(Dist2Error):
            pg.recv(torch.ones(2), 1)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def _by_an_exception(pg: ProcessGroup) -> None:
    with pytest.raises(ZeroDivisionError), pg:
        raise ZeroDivisionError


WAYS = {
    way.__name__.strip("_"): way
    for way in (_abort, _shut_down, _again_and_again, _from_threads, _from_a_handler, _by_an_exception)
}


_CORE = ("abort", "shut_down", "from_a_handler")
CELLS = [
    *itertools.product(("shm", "tcp"), STATES, _CORE),
    *itertools.product(("shm",), STATES, ("from_threads",)),
    *itertools.product(
        ("shm",), ("idle", "in_a_collective", "after_a_timeout"), ("again_and_again", "by_an_exception")
    ),
]


@pytest.mark.parametrize(("transport", "state", "way"), CELLS)
def test_a_group_ends(transport: str, state: str, way: str) -> None:
    before = holdings()
    _end(transport, state, way)
    kept = kept_since(before)
    assert not kept, dict(kept)


def _end(transport: str, state: str, way: str) -> None:
    with two_ranks(transport) as (ours, theirs):
        if way == "shut_down":
            ours.set_timeout(LIMIT_S)
        blocked = STATES[state](ours, theirs)
        time.sleep(0.02 if blocked else 0)  # for them to be inside
        start = time.monotonic()
        WAYS[way](ours)
        took_s = time.monotonic() - start
        for each in blocked:
            each.thread.join(JOIN_S)
            assert not each.thread.is_alive()
            assert isinstance(each.error, Dist2Error), each.error
            if way != "shut_down" and state != "with_a_child":
                assert isinstance(each.error, GroupAbortedError), each.error
        _judge(way, state, took_s, [each.ended - start for each in blocked])
        with pytest.raises(Dist2Error):
            ours.barrier()
        assert "closed" in repr(ours)
        with pytest.raises(Dist2Error):
            theirs.barrier(timeout=JOIN_S)


def _judge(way: str, state: str, took_s: float, freed_s: list[float]) -> None:
    """Check the time: `shutdown` waits for issued operations, up to its limit."""
    in_time(took_s, LIMIT_S + 2.0)
    if way in ("abort", "again_and_again", "by_an_exception") and state != "with_a_child":
        in_time(took_s, FREED_S + NOISE_S)
        in_time(max(freed_s, default=0.0), FREED_S + NOISE_S)


def ended_by_its_node(transport: str, closes: int) -> BaseException | None:
    """Return how rank 0 ends, which is blocked while the links and memory of one rank are closed."""
    nodes = [Node(), Node()]
    with two_ranks(transport, nodes) as (ours, theirs):
        blocked = Blocked(lambda: ours.all_reduce(torch.ones(4)))
        time.sleep(FREED_S)  # asleep by then
        nodes[closes].close()
        blocked.thread.join(2.0)
        with pytest.raises(Dist2Error):
            theirs.barrier()  # another operation than rank 0's
        return blocked.error


@pytest.mark.timeout(30)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("closes", "kind"), [(0, GroupAbortedError), (1, PeerLostError)])
def test_a_rank_whose_links_and_memory_are_closed_has_left(
    transport: str, closes: int, kind: type[Dist2Error]
) -> None:
    before = holdings()
    assert isinstance(ended_by_its_node(transport, closes), kind)
    assert not kept_since(before)


FORGOTTEN = """
import sys, threading, warnings
from contextlib import suppress
import torch, dist2
from dist2.backends.socket.transport.node import Node

warnings.simplefilter("always", ResourceWarning)
transport, end = sys.argv[1:]
store, nodes, groups = dist2.HashStore(), [Node(), Node()], {}

def open_all(rank):
    first = dist2.new_group("socket", 60, store=store, rank=rank, world_size=2, name="idle",
                            transport=transport, node=nodes[rank])
    groups["idle", rank] = first
    for name in ("collective", "receive", "queued"):
        groups[name, rank] = first.split([0, 1], name=name)
    first.barrier()

opening = [threading.Thread(target=open_all, args=(rank,)) for rank in (0, 1)]
for thread in opening: thread.start()
for thread in opening: thread.join()

entered = threading.Barrier(3)
def blocked(call):
    entered.wait()
    with suppress(dist2.GroupAbortedError, dist2.PeerLostError):
        call()

calls = [lambda: groups["collective", 0].all_reduce(torch.ones(2)),
         lambda: groups["receive", 0].recv(torch.ones(2), 1)]
for call in calls:
    threading.Thread(target=blocked, args=(call,), daemon=True).start()
works = [groups["queued", 0].all_reduce(torch.ones(2), async_op=True) for _ in range(3)]
works.append(groups["queued", 0].irecv(torch.ones(2), 1))
entered.wait()
if end == "exit":
    leaving = threading.Thread(target=sys.exit, args=(7,))  # ends that thread only
    leaving.start()
    leaving.join()
    sys.exit(3)
raise ZeroDivisionError
"""


@pytest.mark.parametrize(("transport", "end", "code"), [("shm", "exit", 3), ("tcp", "error", 1)])
def test_groups_forgotten_in_any_state_end_with_the_process(transport: str, end: str, code: int) -> None:
    before = segments()
    ended = run([*whole_python(), "-c", FORGOTTEN, transport, end])
    assert ended.code == code, ended
    for name in ("idle", "collective", "receive", "queued"):
        assert ended.errors.count(f"ResourceWarning: <ProcessGroup {name!r} socket") == 2, ended
    assert ended.errors.count("Traceback") == (end == "error"), ended
    assert "Fatal" not in ended.errors
    assert not segments_since(before)


LEFT_ALONE = """
import os, sys
from contextlib import suppress
import torch, dist2

path, transport, how = sys.argv[1:]
rank = 0 if os.fork() else 1
store = dist2.FileStore(path, 2)
pg = dist2.new_group("socket", 60, store=store, rank=rank, world_size=2, transport=transport)
pg.barrier()
if rank == 0:
    try:
        pg.all_reduce(torch.ones(3))
    except dist2.PeerLostError as error:
        print(error.ranks, error)
    os.wait()
    pg.abort()
elif how == "uncaught":
    raise ValueError("a bug of mine")
elif how == "block":
    with suppress(ValueError), pg:
        raise ValueError("a bug of mine")
elif how == "exit":
    with pg:
        try:
            raise ValueError("a bug of mine")
        except ValueError:
            sys.exit(1)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("uncaught", "ValueError: a bug of mine"),
        ("block", "ValueError: a bug of mine"),
        ("exit", "ValueError: a bug of mine"),
        ("forgotten", "its process (host "),
    ],
)
def test_why_a_rank_left_the_others_is_told(tmp_path: Path, transport: str, how: str, why: str) -> None:
    ended = run([*warm_python(), "-c", LEFT_ALONE, tmp_path / "store", transport, how])
    assert ended.code == 0, ended
    assert ended.output.startswith("(1,) all_reduce(float32[3], op=sum)"), ended
    left = "left" if how == "forgotten" else "aborted"
    assert f"rank 1 {left} the group ({why}" in ended.output, ended
    told = "exited without closing the group: if it failed, its own output has the error" in ended.output
    assert told == (how == "forgotten"), ended


DONE_EARLY = """
import os, sys, time
import torch, dist2

path, backend, *options = sys.argv[1:]
done = os.fork()
rank = 1 if not done else 0 if os.fork() else 2
options = dict(each.split("=") for each in options)
pg = dist2.new_group(backend, 60, store=dist2.FileStore(path, 3), rank=rank, world_size=3, **options)
pg.barrier()
if rank == 0:
    os.waitpid(done, 0)
    time.sleep(2 * 0.25)  # longer than operations go on after a member has aborted the group
    pg.send(torch.ones(2), 2)
    os.wait()
elif rank == 2:
    pg.recv(torch.zeros(2), 0)
    print("received")
"""


@pytest.mark.parametrize(
    "options", [("socket", "transport=shm"), ("socket", "transport=tcp"), ("gloo",)], ids=" ".join
)
def test_a_rank_that_is_done_may_end_without_closing_the_group(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    ended = run([*warm_python(), "-c", DONE_EARLY, tmp_path / "store", *options])
    assert (ended.code, ended.output) == (0, "received\n"), ended


IN_A_MESH = """
import os, signal, sys
import torch, dist2

path, transport = sys.argv[1:]
rank = 0
while rank < 2 and not os.fork():
    rank += 1
world = dist2.new_group(
    "socket", 60, store=dist2.FileStore(path, 3), rank=rank, world_size=3, transport=transport
)
left, right = world.split([0, 1], name="left"), world.split([1, 2], name="right")
world.barrier()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    (right if rank else left).all_reduce(torch.ones(3))
except dist2.PeerLostError as error:
    if rank == 0:
        print(error.ranks, error)
if rank == 0:
    os.wait()
    for group in (left, world):
        group.abort()
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_died_in_another_group_is_told(tmp_path: Path, transport: str) -> None:
    """Rank 1 catches the error of one group and ends; rank 0 waits for it in another one."""
    ended = run([*warm_python(), "-c", IN_A_MESH, tmp_path / "store", transport])
    assert ended.code == 0, ended
    assert ended.output.startswith("(1,) all_reduce(float32[3], op=sum)"), ended
    assert "exited after a failure in another group" in ended.output, ended
    assert "rank 2 (rank 1 of right" in ended.output, ended


CAUGHT = """
import multiprocessing, signal, sys
import torch, dist2
from torch.multiprocessing import start_processes

path, how = sys.argv[1:]

def work(rank):
    pg = dist2.new_group("socket", 60, store=dist2.FileStore(path, 2), rank=rank, world_size=2)
    pg.barrier()
    if rank == 1:
        raise ValueError("a bug of mine")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torch's launcher ends the others
    try:
        pg.all_reduce(torch.ones(3))
    except dist2.PeerLostError as error:
        print(error, flush=True)
    pg.abort()

if how == "start_processes":
    try:
        start_processes(work, nprocs=2, start_method="fork")
    except Exception as error:
        print(type(error).__name__)
else:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=work, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
"""


@pytest.mark.parametrize("how", ["start_processes", "Process"])
def test_an_error_that_the_launcher_of_a_rank_catches_is_told(tmp_path: Path, how: str) -> None:
    """Python's functions for the exit cannot know it, and do not run in a fork."""
    ended = run([*warm_python(), "-c", CAUGHT, tmp_path / "store", how])
    assert ended.code == 0, ended
    assert "rank 1 aborted the group (ValueError: a bug of mine)" in ended.output, ended


# A wait beside a member that has ended


def test_a_wait_sleeps_though_a_member_has_left_and_ended(tmp_path: Path) -> None:
    """The descriptor of its process stays readable."""
    store = dist2.FileStore(str(tmp_path / "store"), -1, 30)

    def measure(mine: dist2.FileStore) -> None:
        mine.wait(["ended"])
        before_s = time.process_time()
        time.sleep(1.0)
        mine.set("used", repr(time.process_time() - before_s))

    def rank(number: int) -> int:
        mine = dist2.FileStore(str(tmp_path / "store"), -1, 30)
        pg = dist2.new_group("socket", 30, store=PrefixStore("g", mine), rank=number, world_size=3)
        pg.barrier()
        if number == 0:
            threading.Thread(target=measure, args=(mine,)).start()
        if number == 1:
            mine.wait(["used"])
        pg.reduce(total := torch.ones(4), 0)
        pg.shutdown()
        return 0 if number or total.tolist() == [3.0] * 4 else 1

    children = [forked(lambda number=number: rank(number)) for number in range(3)]
    assert exit_code(children[2]) == 0
    store.set("ended", "")
    assert [exit_code(child) for child in children[:2]] == [0, 0]
    assert float(store.get("used")) < 0.3
