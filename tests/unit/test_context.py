"""The current group: nested, restored, one stack a thread."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from dist2 import ProcessGroup, current_process_group, process_group

ONE, TWO = (cast("ProcessGroup", object()) for _ in range(2))


def test_blocks_nest_and_restore() -> None:
    assert current_process_group() is None
    with process_group(ONE) as entered:
        assert entered is ONE
        with process_group(TWO):
            assert current_process_group() is TWO
        assert current_process_group() is ONE
    assert current_process_group() is None


def test_an_exception_restores_too() -> None:
    with process_group(ONE):
        with pytest.raises(KeyError), process_group(TWO):
            raise KeyError
        assert current_process_group() is ONE
    assert current_process_group() is None


def test_threads_do_not_see_each_other() -> None:
    seen: list[object] = []
    with process_group(ONE):
        thread = threading.Thread(target=lambda: seen.append(current_process_group()))
        thread.start()
        thread.join(5)
    assert seen == [None]
