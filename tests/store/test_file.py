"""`FileStore`: one file with torch's, when it goes, crashes in the middle, and locks."""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.stores import exit_code, forked
from support.threads import together
from support.time_limits import in_time

import dist2
from dist2.errors import InvalidUsageError, StoreError, StoreTimeoutError
from dist2.store.file import REFERENCES, encode_deletion, encode_record, replay

Make = Callable[[Path, int], Any]


def ours(path: Path, world_size: int = -1) -> dist2.FileStore:
    return dist2.FileStore(str(path), world_size, 10)


def torchs(path: Path, world_size: int = -1) -> dist.FileStore:
    return dist.FileStore(str(path), world_size)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_both_write_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for make in (ours, torchs):
        path = tmp_path / make.__name__
        store: Any = make(path)
        store.set("key", b"\x00value")
        store.add("count", 3)
        store.compare_set("key", b"\x00value", "new")
        store.delete_key("key")
        store.append("text", "a")
        del store
        written.append(path.read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize(("first", "second"), [(ours, torchs), (torchs, ours)])
def test_both_share_a_file(path: Path, first: Make, second: Make) -> None:
    one, other = first(path, 2), second(path, 2)
    one.set("key", "value")
    assert other.get("key") == b"value"
    assert other.add("count", 2) == 2
    assert one.add("count", 3) == 5
    other.delete_key("key")
    assert not one.check(["key"])
    assert one.num_keys() == other.num_keys() == 2


@pytest.mark.parametrize(("first", "second"), [(ours, torchs), (torchs, ours)])
def test_the_last_of_both_removes_it(path: Path, first: Make, second: Make) -> None:
    one, other = first(path, 2), second(path, 2)
    del one
    assert path.exists()
    del other
    assert not path.exists()


def test_torch_wakes_ours(path: Path) -> None:
    waiter, writer = ours(path), torchs(path)
    got, _ = together(lambda: waiter.get("late"), lambda: (time.sleep(0.05), writer.set("late", "1")))
    assert got == b"1"


def test_both_count_under_contention(path: Path) -> None:
    stores = [ours(path), torchs(path), ours(path), torchs(path)]
    together(*(lambda store=store: [store.add("count", 1) for _ in range(50)] for store in stores))
    assert stores[0].add("count", 0) == 200


@pytest.mark.parametrize(("world_size", "stays"), [(-1, True), (0, False), (1, False), (2, True)], ids=str)
@pytest.mark.parametrize("make", [ours, torchs])
def test_the_file_goes_with_its_last_user(path: Path, make: Make, world_size: int, stays: bool) -> None:
    store = make(path, world_size)
    store.set("key", "value")
    del store
    assert path.exists() is stays


def test_later_users_count(path: Path) -> None:
    for left in (2, 1):
        store = ours(path, 3)
        store.set("left", str(left))
        store.close()
        assert path.exists()
    store = ours(path, 3)
    assert store.get("left") == b"1"
    store.close()
    assert not path.exists()


def test_a_store_that_is_dropped_while_its_file_is_locked_here_ends_later(path: Path) -> None:
    """A garbage collection in a step of one store may find another one of the same file."""
    store, dropped = ours(path), [ours(path)]

    def step() -> tuple[bytes, None]:
        dropped.clear()
        return b"", None

    start = time.monotonic()
    store._log.update(step, store._deadline())
    in_time(time.monotonic() - start, 1.0)  # it would wait 5 s for the lock that this thread has
    for _ in range(20):  # making a store ends some of those that were dropped
        ours(path).close()
    store._log.read(lambda: None, store._deadline())
    assert store._log.values[REFERENCES] == b"1"
    store.close()


def test_a_wait_keeps_its_own_limit_while_the_file_is_locked(path: Path) -> None:
    store = ours(path)  # its own limit is 10 s
    with path.open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        start = time.monotonic()
        with pytest.raises(StoreTimeoutError):
            store.wait(["key"], 0.3)
        in_time(time.monotonic() - start, 2.0)
    store.close()


def test_closing_twice_counts_once(path: Path) -> None:
    first, second = ours(path, 2), ours(path, 2)
    first.close()
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()
    with pytest.raises(StoreError, match="FileStore is closed"):
        first.get("key")


def test_a_file_removed_by_hand_is_no_obstacle_to_closing(path: Path) -> None:
    store = ours(path, 1)
    path.unlink()
    store.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_vanishes_in_use_is_an_error(path: Path, replaced: bool) -> None:
    store = ours(path)
    store.set("key", "value")
    path.unlink()
    if replaced:
        ours(path).set("key", "another's")
    for call in (lambda: store.get("key"), lambda: store.set("key", "x"), lambda: store.wait(["never"])):
        with pytest.raises(StoreError, match=r"removed or replaced while in use.*world_size too small"):
            call()
    if replaced:
        path.unlink()


@pytest.mark.parametrize("nbytes", [0, 5, 30])
def test_a_file_that_is_truncated_in_use_is_an_error(path: Path, nbytes: int) -> None:
    store = ours(path)
    store.set("key", "value" * 10)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(nbytes)
    for call in (lambda: store.get("key"), lambda: store.set("key", "x"), lambda: store.wait(["key"])):
        with pytest.raises(
            StoreError, match=f"truncated while in use, from {size} to {nbytes} bytes.*new file"
        ):
            call()
    path.unlink()


@pytest.mark.parametrize(
    "content", [b"root:x:0:0", b"\x00", b"\x09\x00\x00\x00elsecount/\x01\x00\x00\x001"], ids=repr
)
def test_other_files_are_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError, match="is not a FileStore's"):
        ours(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "words"),
    [("no/such/folder/file", "No such file"), (".", "Is a directory")],
    ids=["folder", "is"],
)
def test_files_that_cannot_be_opened_are_named(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        ours(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("",), "file_name must be a non-empty path"),
        ((None,), "file_name must be a non-empty path, got None"),
        (("x", "2"), "world_size must be an int, got '2'"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        dist2.FileStore(*arguments)


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_writer_that_died_in_a_record_does_no_harm(path: Path, cut: int) -> None:
    store = ours(path)
    store.set("key", "value")
    whole = path.read_bytes()
    record = encode_record(b"/torn", b"record of it")
    path.write_bytes(whole + record[:cut])
    assert store.get("key") == b"value"
    assert not store.check(["torn"])
    store.set("next", "one")
    assert store.get("next") == b"one"
    fresh = ours(path)
    assert fresh.multi_get(["key", "next"]) == [b"value", b"one"]
    assert set(fresh.list_keys()) == {"key", "next"}


def test_a_lock_that_is_never_given_back_is_a_timeout(path: Path) -> None:
    store = ours(path)
    store.set_timeout(0.2)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start = time.monotonic()
        with pytest.raises(StoreTimeoutError, match=r"timeout after 200ms, others lock it"):
            store.set("key", "value")
        took_s = time.monotonic() - start
        assert took_s >= 0.2
        in_time(took_s, 0.6)
    store.set("key", "value")


def test_waits_end_in_time(path: Path) -> None:
    store = ours(path)
    store.set_timeout(timedelta(seconds=0.3))
    for call in (lambda: store.get("no"), lambda: store.wait(["no"]), lambda: store.wait(["no"], 0.3)):
        start = time.monotonic()
        with pytest.raises(StoreTimeoutError, match=r"(?i)timeout.*300 ?ms"):
            call()
        took_s = time.monotonic() - start
        assert took_s >= 0.3
        in_time(took_s, 0.7)


def test_a_forked_child_does_not_count(path: Path) -> None:
    store = ours(path, 1)
    store.set("key", "value")

    def body() -> int:
        seen = store.get("key")  # a file is as good in the child
        store.close()
        return 7 if seen == b"value" else 8

    assert exit_code(forked(body)) == 7
    assert store.get("key") == b"value"
    store.close()
    assert not path.exists()


records = st.one_of(
    st.tuples(st.binary(max_size=8), st.binary(max_size=20)),
    st.tuples(st.binary(max_size=8), st.none()),
)


@given(st.lists(records, max_size=8), st.integers(0, 300))
def test_replaying_a_log_however_cut(log: list[tuple[bytes, bytes | None]], cut: int) -> None:
    expected: dict[bytes, bytes] = {}
    data = b""
    ends = [0]
    for key, value in log:
        name = b"/" + key
        if value is None:
            expected.pop(name, None)
            data += encode_deletion(name)
        else:
            expected[name] = value
            data += encode_record(name, value)
        ends.append(len(data))
    values: dict[bytes, bytes] = {}
    taken = replay(data[:cut], values)
    assert taken == max(end for end in ends if end <= cut)
    assert replay(data[taken:], values) == len(data) - taken
    assert values == expected


@given(st.binary(max_size=200))
def test_garbage_in_a_log_is_taken_for_an_unfinished_end(garbage: bytes) -> None:
    values: dict[bytes, bytes] = {}
    assert 0 <= replay(garbage, values) <= len(garbage)
    assert sum(map(len, values)) <= len(garbage)


def test_a_file_system_without_locks_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, kind: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        StoreError, match=r"cannot be locked: Function not implemented: .* no flock .* tcp://"
    ):
        ours(path)
