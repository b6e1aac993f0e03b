"""The behaviour of every store, dist2's and torch's: one body over both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.stores import OURS, TORCHS, Held, Kind, leaving_nothing
from support.threads import together
from support.time_limits import in_time
from support.torch_features import require
from torch.distributed import DistStoreError, QueueEmptyError

from dist2 import Store
from dist2.errors import InvalidUsageError, StoreTimeoutError

OWN = {kind.name for kind in OURS if not kind.name.startswith("torchs_")}
SHORT = timedelta(milliseconds=50)


@pytest.fixture(params=OURS + TORCHS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def store(kind: Kind, tmp_path: Path) -> Iterator[Any]:
    with leaving_nothing():
        held = Held(kind.make(tmp_path))
        yield held
        held.let_go()


def only(wanted: Callable[[Kind], bool]) -> pytest.MarkDecorator:
    """Run a test on some kinds of store."""
    return pytest.mark.parametrize(
        "kind", [kind for kind in OURS + TORCHS if wanted(kind)], ids=str, indirect=True
    )


@pytest.mark.parametrize("value", ["text", "", "é", b"\x00\xff", bytearray(b"array")])
def test_what_is_set_is_got(store: Any, value: Any) -> None:
    store.set("key", value)
    assert store.get("key") == (value.encode() if isinstance(value, str) else bytes(value))


def test_keys_may_be_any_text(store: Any) -> None:
    for key in ("ü", "a/b", "with space", "-/x", "k" * 1000):
        store.set(key, key)
        assert store.get(key) == key.encode()


def test_set_overwrites(store: Any) -> None:
    store.set("key", "old")
    store.set("key", "new")
    assert store.get("key") == b"new"


def test_large_values(store: Any) -> None:
    value = bytes(range(256)) * (5 << 12)
    store.set("large", value)
    assert store.get("large") == value


def test_add_counts_from_zero_and_is_readable_as_text(store: Any) -> None:
    assert store.add("count", 5) == 5
    assert store.add("count", -7) == -2
    assert store.add("count", 0) == -2
    assert store.get("count") == b"-2"


def test_add_to_what_set_wrote(store: Any) -> None:
    store.set("count", "40")
    assert store.add("count", 2) == 42


def test_add_takes_all_64_bit_integers(store: Any) -> None:
    assert store.add("most", (1 << 63) - 1) == (1 << 63) - 1
    assert store.add("least", -(1 << 63)) == -(1 << 63)


@pytest.mark.parametrize(
    ("held", "expected", "result", "then"),
    [
        (None, "expected", b"expected", None),
        (None, "", b"new", b"new"),
        ("held", "held", b"new", b"new"),
        ("held", "other", b"held", b"held"),
        ("held", "", b"held", b"held"),
    ],
)
def test_compare_set(store: Any, held: str | None, expected: str, result: bytes, then: bytes | None) -> None:
    if held is not None:
        store.set("key", held)
    assert store.compare_set("key", expected, "new") == result
    assert store.check(["key"]) is (then is not None)
    if then is not None:
        assert store.get("key") == then


def test_append(store: Any) -> None:
    store.append("key", "po")
    store.append("key", "tato")
    assert store.get("key") == b"potato"


def test_many_at_once(store: Any) -> None:
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    store.multi_set([], [])
    assert store.multi_get([]) == []


def test_check(store: Any) -> None:
    store.set("a", "")
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.check([])


def test_deleted_keys_are_gone(store: Any) -> None:
    store.set("key", "value")
    assert store.delete_key("key") is True
    assert not store.check(["key"])
    store.set("key", "again")
    assert store.get("key") == b"again"


def test_num_keys(kind: Kind, store: Any) -> None:
    assert store.num_keys() == kind.own_keys
    store.set("a", "1")
    store.add("b", 1)
    store.set("a", "2")
    assert store.num_keys() == kind.own_keys + 2
    store.delete_key("a")
    assert store.num_keys() == kind.own_keys + 1


@only(lambda kind: kind.lists and not kind.holds_gil)
def test_list_keys(kind: Kind, store: Any) -> None:
    if "torchs" in kind.name:
        require("list_keys")
    store.set("a", "1")
    store.set("ü", "1")
    # torch's FileStore lists its own keys too, without their first letter.
    assert {key for key in store.list_keys() if not key.endswith("efcount/")} == {"a", "ü"}


@only(lambda kind: kind.prompt)
def test_missing_keys_time_out(store: Any) -> None:
    store.set("there", "")
    store.set_timeout(SHORT)
    for call in (
        lambda: store.get("missing"),
        lambda: store.wait(["there", "missing"]),
        lambda: store.wait(["missing"], SHORT),
        lambda: store.multi_get(["there", "missing"]),
    ):
        start = time.monotonic()
        with pytest.raises(DistStoreError, match=r"(?i)timeout"):
            call()
        took_s = time.monotonic() - start
        assert took_s >= 0.045
        in_time(took_s, 0.6)
    store.set("missing", "after a timeout it works as before")
    assert store.get("missing").startswith(b"after")


@only(lambda kind: kind.prompt)
def test_waits_end_when_keys_come(store: Any) -> None:

    def later() -> None:
        time.sleep(0.05)
        other = store.clone()
        other.set("a", "1")
        time.sleep(0.05)
        other.compare_set("b", "", "2")

    start = time.monotonic()
    together(lambda: store.wait(["b", "a"]), later)
    assert 0.1 <= time.monotonic() - start < 5


@only(lambda kind: kind.prompt)
def test_get_waits(store: Any) -> None:
    other = store.clone()
    got, _ = together(lambda: store.get("late"), lambda: (time.sleep(0.05), other.set("late", "3")))
    assert got == b"3"


def test_clones_share_keys(store: Any) -> None:
    other = store.clone()
    other.set("key", "value")
    assert store.get("key") == b"value"
    assert other.timeout == store.timeout


def test_timeouts_can_be_set(store: Any) -> None:
    store.set_timeout(timedelta(seconds=3))
    assert store.timeout == timedelta(seconds=3)


@only(lambda kind: kind.prompt)
def test_barrier(kind: Kind, store: Any) -> None:
    if "torchs" in kind.name:
        require("barrier")
    store.barrier("alone", 1)
    store.barrier("alone", 1, timedelta(seconds=5))
    other = store.clone()
    together(lambda: store.barrier("two", 2, timedelta(seconds=9)), lambda: other.barrier("two", 2))
    with pytest.raises(DistStoreError, match=r"(?i)timeout") as late:
        store.barrier("three", 3, SHORT)
    if isinstance(store, Store):
        assert "barrier 'three': 1 of 3 callers arrived" in str(late.value)


@only(lambda kind: kind.queues and not kind.holds_gil)
def test_queues_are_first_in_first_out(store: Any) -> None:
    assert store.queue_len("queue") == 0
    store.queue_push("queue", "1")
    store.queue_push("queue", b"\xff")
    assert store.queue_len("queue") == 2
    assert store.check(["queue"])
    store.wait(["queue"], SHORT)
    assert store.queue_pop("queue") == b"1"
    assert store.queue_pop("queue", block=False) == b"\xff"
    assert not store.check(["queue"])


@only(lambda kind: kind.queues)
def test_empty_queues(store: Any) -> None:
    with pytest.raises(QueueEmptyError, match="queue is empty"):
        store.queue_pop("queue", block=False)
    store.set_timeout(SHORT)
    with pytest.raises(DistStoreError, match=r"(?i)timeout"):
        store.queue_pop("queue")


@only(lambda kind: kind.queues)
def test_queues_and_keys_live_apart(kind: Kind, store: Any) -> None:
    store.queue_push("name", "item")
    assert store.num_keys() == kind.own_keys
    assert store.delete_key("name") is False
    store.set("name", "value")
    assert store.get("name") == b"value"
    assert store.queue_pop("name") == b"item"


@only(lambda kind: kind.queues)
def test_a_blocked_pop_gets_what_is_pushed(store: Any) -> None:
    other = store.clone()
    item, _ = together(
        lambda: store.queue_pop("queue"), lambda: (time.sleep(0.05), other.queue_push("queue", "item"))
    )
    assert item == b"item"


@only(lambda kind: kind.queues)
def test_each_item_goes_to_one_popper(store: Any) -> None:
    poppers = [store.clone() for _ in range(3)]
    *items, _ = together(
        *(lambda popper=popper: popper.queue_pop("queue") for popper in poppers),
        lambda: [(time.sleep(0.05), store.queue_push("queue", str(item))) for item in range(3)],
    )
    assert sorted(items) == [b"0", b"1", b"2"]


@only(lambda kind: not kind.queues)
def test_stores_without_queues_say_so(store: Any) -> None:
    for call in (
        lambda: store.queue_push("queue", "item"),
        lambda: store.queue_pop("queue"),
        lambda: store.queue_len("queue"),
    ):
        with pytest.raises(NotImplementedError, match="not implemented"):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.set(1, "value"),
        lambda store: store.set("key", None),
        lambda store: store.set("key", 1),
        lambda store: store.get(None),
        lambda store: store.wait("key"),
        lambda store: store.check("key"),
        lambda store: store.add("key", "1"),
        lambda store: store.add("key", 1 << 70),
        lambda store: store.wait(["key"], "soon"),
    ],
)
def test_wrong_types(store: Any, call: Any) -> None:
    with pytest.raises(TypeError):
        call(store)


@only(lambda kind: "tcp" not in kind.name)  # torch's client only sees the end of the connection
def test_add_to_text(store: Any) -> None:
    store.set("text", "no number")
    with pytest.raises(ValueError, match=r"stoll|not an integer"):
        store.add("text", 1)


# Promises of dist2 beyond torch's.


own = only(lambda kind: kind.name in OWN)


@own
def test_timeouts_name_keys_and_limit(store: Any) -> None:
    with pytest.raises(DistStoreError, match=r"(?i)timeout") as caught:
        store.wait(["first", "second"], SHORT)
    if isinstance(caught.value, StoreTimeoutError):
        assert "50ms" in str(caught.value) or "49ms" in str(caught.value)
        assert "first" in str(caught.value)
        assert "second" in str(caught.value)


@only(lambda kind: kind.name in OWN and kind.name != "prefix_torchs_tcp")
@pytest.mark.parametrize("value", ["no number", " ", "9" * 5000])
def test_a_value_that_is_no_number_is_not_counted(store: Any, value: str) -> None:
    store.set("text", value)
    for _ in range(2):
        with pytest.raises(InvalidUsageError, match=r"add: key 'text' "):
            store.add("text", 1)
        assert store.add("count", 0) == 0
    assert store.get("text") == value.encode()


@only(lambda kind: kind.name.startswith("tcp"))
def test_a_barrier_whose_name_has_text_is_refused(store: Any) -> None:
    store.set("text", "no number")
    with pytest.raises(InvalidUsageError, match="key 'text' holds b'no number', not an integer"):
        store.barrier("text", 2, 5)
    assert store.get("text") == b"no number"


@own
def test_text_that_utf_8_has_no_bytes_for_is_refused_by_name(store: Any) -> None:
    for call, argument in (
        (lambda: store.set("\ud800", "value"), "key"),
        (lambda: store.set("key", "\udc80"), "value"),
        (lambda: store.append("key", "\ud800"), "value"),
        (lambda: store.queue_push("key", "\ud800"), "value"),
    ):
        with pytest.raises(InvalidUsageError, match=rf"{argument} cannot be written as UTF-8: '.ud"):
            call()


@own
def test_timeouts_may_be_seconds(store: Any) -> None:
    store.set_timeout(2.5)
    assert store.timeout == timedelta(seconds=2.5)
    store.set("key", "")
    store.wait(["key"], 0.1)


@own
def test_short_timeouts_do_not_become_none(store: Any) -> None:
    store.set_timeout(0.0001)
    assert store.timeout == timedelta(milliseconds=1)
    with pytest.raises(DistStoreError, match=r"(?i)timeout"):
        store.wait(["never"])


@pytest.mark.parametrize("timeout", [-1, timedelta(seconds=-1)])
@own
def test_negative_timeouts_are_refused(store: Any, timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout must not be negative"):
        store.set_timeout(timeout)
    with pytest.raises(ValueError, match="timeout must not be negative"):
        store.wait(["key"], timeout)


@own
def test_as_many_values_as_keys(store: Any) -> None:
    with pytest.raises(ValueError, match="same size, got 2 and 1"):
        store.multi_set(["a", "b"], ["1"])
    assert not store.check(["a"])


@pytest.mark.parametrize("world_size", [0, -1, "2", True])
@own
def test_barriers_of_nobody_are_refused(store: Any, world_size: Any) -> None:
    with pytest.raises(ValueError, match="world_size must be a positive int"):
        store.barrier("key", world_size)


@only(lambda kind: kind.name in OWN and kind.name != "prefix_torchs_hash")  # whose clone is itself
def test_clones_have_their_own_timeouts(store: Any) -> None:
    other = store.clone()
    other.set_timeout(7)
    assert store.timeout != timedelta(seconds=7)


@pytest.mark.parametrize("write", ["add", "append", "multi_set", "compare_set"])
@only(lambda kind: kind.name in OWN and kind.name != "prefix_torchs_hash")  # which ends them for some
def test_every_write_ends_waits(store: Any, write: str) -> None:
    other = store.clone()
    writes = {
        "add": lambda: other.add("late", 1),
        "append": lambda: other.append("late", "1"),
        "multi_set": lambda: other.multi_set(["late"], ["1"]),
        "compare_set": lambda: other.compare_set("late", "", "1"),
    }
    start = time.monotonic()
    together(lambda: store.wait(["late"], 5), lambda: (time.sleep(0.05), writes[write]()))
    assert time.monotonic() - start < 2


@own
def test_closing_twice(store: Any) -> None:
    store.close()
    store.close()
