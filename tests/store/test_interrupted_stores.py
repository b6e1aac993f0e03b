"""Signal handlers that raise at every place of every call of a store: it stays usable, here and elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.raising_handlers import handled, interrupted
from support.stores import server

import dist2

# Python discards exceptions of destructors and of generators that end; a socket whose clean-up was cut off
# is closed with its last reference.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

LIMIT_S = 2.0


@attrs.frozen
class Pair:
    """Two stores over the same keys, as two processes have them.

    Attributes:
        own: Its calls are interrupted, in this thread.
        other: Used by another thread.
        keeps: An object that must live as long.
    """

    own: Any
    other: Any
    keeps: Any = None


def _hash(_: Path) -> Pair:
    store = dist2.HashStore(LIMIT_S)
    return Pair(store, store.clone())


def _file(folder: Path) -> Pair:
    return Pair(*(dist2.FileStore(str(folder / "file"), -1, LIMIT_S) for _ in range(2)))


def _tcp(_: Path) -> Pair:
    host = server()
    store = dist2.TCPStore("127.0.0.1", host.port, timeout=LIMIT_S)
    return Pair(store, store.clone(), host)


def _prefix(folder: Path) -> Pair:
    below = _tcp(folder)
    return Pair(dist2.PrefixStore("p", below.own), dist2.PrefixStore("p", below.other), below)


numbers = itertools.count()
Call = Callable[[Any], object]

CALLS: dict[str, Call] = {
    "set": lambda store: store.set("key", "value"),
    "get": lambda store: store.get("there"),
    "add": lambda store: store.add("count", 1),
    "compare_set": lambda store: store.compare_set("there", "value", "value"),
    "append": lambda store: store.append("log", "text"),
    "delete_key": lambda store: store.delete_key("key"),
    "num_keys": lambda store: store.num_keys(),
    "list_keys": lambda store: store.list_keys(),
    "multi_get": lambda store: store.multi_get(["there", "count"]),
    "multi_set": lambda store: store.multi_set(["key", "key2"], ["1", "2"]),
    "check": lambda store: store.check(["there", "never"]),
    "wait": lambda store: store.wait(["there"]),
    "late": lambda store: _times_out(lambda: store.wait(["never"], 0.012)),
    "barrier": lambda store: store.barrier(f"barrier {next(numbers)}", 1),
}
QUEUES: dict[str, Call] = {
    "queue_push": lambda store: store.queue_push("queue", "item"),
    "queue_pop": lambda store: _pop(store),
    "queue_len": lambda store: store.queue_len("queue"),
}


def _times_out(call: Callable[[], object]) -> None:
    with pytest.raises(dist2.StoreTimeoutError):
        call()


def _pop(store: Any) -> None:
    store.queue_push("queue", "item")
    store.queue_pop("queue")


MAKERS = {"hash": _hash, "file": _file, "tcp": _tcp, "prefix": _prefix}
CASES = [(kind, call) for kind in MAKERS for call in CALLS | (QUEUES if kind != "file" else {})]


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        yield executor


def check_usable(pair: Pair, thread: ThreadPoolExecutor, where: str) -> None:
    """Count on either store: no addition is lost, and none finds the store locked or its answers mixed up."""
    try:
        counted = [thread.submit(pair.other.add, "count", 1).result(), pair.own.add("count", 1)]
        counted.append(thread.submit(pair.other.add, "count", 1).result())
        assert counted == list(range(counted[0], counted[0] + 3))
        assert pair.own.multi_get(["there", "count"]) == [b"value", b"%d" % counted[-1]]
        assert pair.other.get("there") == b"value"
    except Exception as error:
        raise AssertionError(f"after signals at {where}") from error


def prepare(kind: str, folder: Path) -> Pair:
    pair = MAKERS[kind](folder)
    pair.own.set("there", "value")
    pair.own.add("count", 1)
    return pair


@pytest.mark.parametrize(("kind", "call"), CASES)
def test_a_handler_that_raises_anywhere_leaves_the_store_usable(
    kind: str, call: str, tmp_path: Path, thread: ThreadPoolExecutor
) -> None:
    pair = prepare(kind, tmp_path)
    for where in itertools.count():
        raised = interrupted(where, lambda: (CALLS | QUEUES)[call](pair.own))
        check_usable(pair, thread, raised)
        if not raised:
            break
    assert where > 4


def test_a_store_that_is_dropped_after_such_a_signal_is_counted_out(tmp_path: Path) -> None:
    pair = prepare("file", tmp_path)
    for where in itertools.count():
        pair.own.get("there")  # reads what others wrote, so that all calls have as much to do
        if not interrupted(where, lambda: pair.own.set("key", "value")):
            break
    dropped = tmp_path / "dropped"
    dist2.FileStore(str(dropped), 1)
    assert not dropped.exists()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("call", ["add", "late"])
def test_a_second_one_during_the_clean_up_of_the_first_does_no_more(
    kind: str, call: str, tmp_path: Path, thread: ThreadPoolExecutor
) -> None:
    pair = prepare(kind, tmp_path)
    for where in itertools.count():
        for again in itertools.count():
            raised = interrupted(where, lambda: CALLS[call](pair.own), again)
            check_usable(pair, thread, raised)
            if raised.count("\n") < 2:
                break
        if not raised:
            break
    assert where > 4


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("call", ["add", "delete_key", "late"])
def test_a_handler_may_use_the_store_that_it_interrupts(kind: str, call: str, tmp_path: Path) -> None:
    pair = prepare(kind, tmp_path)
    count = 1
    for where in itertools.count():
        ran = handled(where, lambda: CALLS[call](pair.own), lambda: pair.own.add("count", 1))
        count += ran + (call == "add")
        assert pair.own.add("count", 0) == pair.other.add("count", 0) == count, where
        if not ran:
            break
