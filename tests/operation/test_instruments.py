"""Instruments and completion hooks: they see everything, and can break nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.captured_logs import logged
from support.fake_groups import FakeGroup, info_of
from support.ranks import TENANTS, run_ranks

from dist2 import InvalidUsageError, OperationTimeoutError, ProcessGroup, add_instrument
from dist2.operation.instruments import Dispatch


class Seen:
    """Records its calls; raises at one of them."""

    def __init__(self, fails_at: str = "") -> None:
        self.told: list[tuple[str, Any]] = []
        self._fails_at = fails_at

    def _note(self, what: str, value: Any) -> None:
        self.told.append((what, value))
        if what == self._fails_at:
            raise ValueError("instrument")

    def group_opened(self, group: Any) -> None:
        self._note("opened", group.info.name)

    def group_closed(self, group: Any) -> None:
        self._note("closed", group.info.name)

    def operation_started(self, operation: Any) -> None:
        self._note("started", operation.signature.kind.value)

    def operation_finished(self, operation: Any) -> None:
        self._note("finished", operation.signature.kind.value)

    @property
    def names(self) -> list[str]:
        return [what for what, _ in self.told]


@pytest.mark.parametrize("event", ["opened", "started", "finished", "closed"])
def test_an_instrument_that_raises_is_dropped_and_the_others_go_on(event: str) -> None:
    bad, good = Seen(event), Seen()
    with logged() as logs:
        group = FakeGroup(info_of(), bad, good)
        group.run()
        group.run()
        group.close()
    assert good.names == ["opened", "started", "finished", "started", "finished", "closed"]
    assert bad.names == good.names[: good.names.index(event) + 1]
    assert ["instrument Seen raised, and is switched off" in log["event"] for log in logs] == [True]


def test_an_instrument_is_removed() -> None:
    dispatch, seen = Dispatch(), Seen()
    remove = dispatch.add(seen)
    assert dispatch.instruments == (seen,)
    remove()
    remove()
    assert dispatch.instruments == dispatch.operation_started == dispatch.operation_finished == ()


def test_what_is_no_instrument_is_refused_and_not_kept() -> None:
    dispatch = Dispatch()
    with pytest.raises(InvalidUsageError, match=r"instrument must have .* got 5 \(int\) without group"):
        dispatch.add(5)
    assert dispatch.instruments == ()
    assert callable(dispatch.add(Seen()))


def test_a_real_group_tells_of_all_it_does() -> None:
    seen = Seen()
    remove = add_instrument(seen)
    try:

        def body(pg: ProcessGroup) -> None:
            if pg.rank() == 0:
                pg.isend(torch.ones(1), 0)
                pg.recv(torch.ones(1), 0)
            pg.barrier(async_op=True).wait()
            with pytest.raises(InvalidUsageError):
                pg.broadcast(torch.ones(1), 5)  # no instrument is called for a refused call

        run_ranks(2, body, TENANTS[0])
    finally:
        remove()
    assert seen.names.count("opened") == seen.names.count("closed") == 2
    operations = [value for what, value in seen.told if what == "finished"]
    assert sorted(operations) == ["barrier", "barrier", "recv", "send"]
    assert seen.names.count("started") == 4


def test_a_completion_hook_that_raises_is_kept() -> None:
    calls: list[str] = []

    def body(pg: ProcessGroup) -> None:
        def bad(operation: Any) -> None:
            calls.append(operation.signature.kind.value)
            raise ValueError("hook")

        remove = pg.register_completion_hook(bad)
        pg.barrier()
        pg.all_reduce(torch.ones(1), async_op=True).wait()
        pg.shutdown()
        remove()

    with logged() as logs:
        run_ranks(1, body, TENANTS[0])
    assert calls == ["barrier", "all_reduce"]
    assert sum("completion hook" in log["event"] for log in logs) == 2


def test_hooks_are_told_of_failures() -> None:
    def body(pg: ProcessGroup) -> None:
        ended: list[Any] = []
        pg.register_completion_hook(ended.append)
        with pytest.raises(OperationTimeoutError):
            pg.recv(torch.ones(1), 0, timeout=0.05)
        assert [type(operation.error) for operation in ended] == [OperationTimeoutError]
        pg.abort()

    run_ranks(1, body, TENANTS[0])


def test_a_hook_must_be_callable() -> None:
    def body(pg: ProcessGroup) -> None:
        with pytest.raises(InvalidUsageError, match=r"hook must be callable, got 3 \(int\)"):
            pg.register_completion_hook(3)

    run_ranks(1, body, TENANTS[0])
