"""A completion is set once, and wakes all waiters."""

from __future__ import annotations

import threading

import pytest
from support.captured_logs import logged

from dist2.runtime.completion import Completion


def test_it_is_done_once() -> None:
    made = Completion()
    assert not made.done()
    made.set_result(None)
    assert made.done()
    assert made.exception() is None
    made.result()
    with pytest.raises(RuntimeError, match="done already"):
        made.set_exception(ValueError())


def test_who_waits_gets_the_error_and_the_same_one_each_time() -> None:
    made, error = Completion(), ValueError("no")
    with pytest.raises(TimeoutError):
        made.exception(0.001)
    threading.Timer(0.01, made.set_exception, [error]).start()
    assert made.exception(10.0) is error
    for _ in range(2):
        with pytest.raises(ValueError, match="no") as caught:
            made.result()
        assert caught.value is error


def test_all_who_wait_are_woken() -> None:
    made = Completion()
    woken = [threading.Thread(target=made.result) for _ in range(4)]
    for each in woken:
        each.start()
    made.set_result(None)
    for each in woken:
        each.join(10.0)
        assert not each.is_alive()


def test_callbacks_are_called_once_and_in_order_whether_it_is_done_or_not() -> None:
    made, called = Completion(), list[int]()
    for number in range(3):
        made.add_done_callback(lambda _, number=number: called.append(number))
    assert called == []
    made.set_result(None)
    made.add_done_callback(lambda _: called.append(3))
    assert called == [0, 1, 2, 3]


def test_a_callback_that_raises_is_logged_and_the_others_are_called() -> None:
    made, called = Completion(), list[bool]()
    made.add_done_callback(lambda _: 1 / 0 and None)
    made.add_done_callback(lambda ended: called.append(ended.done()))
    with logged() as logs:
        made.set_result(None)
    assert called == [True]
    assert ["a callback of an operation raised" in entry["event"] for entry in logs] == [True]
