"""A second exception in the call path: the first one is in its chain of contexts, and neither leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.exceptions import MarkedError, Raised
from support.instruments import Told, backend_does

import dist2
from dist2 import ProcessGroup
from dist2.errors import Dist2Error
from dist2.operation import runner
from dist2.operation.instruments import Calling, add_instrument, tell
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation, State
from dist2.operation.signature import GroupInfo, Signature

OPERATION = Operation(Signature(OpKind.BARRIER, GroupInfo("uid", "g", "", "fake", 0, (0,))), 1, 0, 1, False)


@pytest.fixture
def pg() -> Iterator[ProcessGroup]:
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        yield pg


def reduce(pg: ProcessGroup) -> None:
    pg.all_reduce(torch.ones(2))


def send(pg: ProcessGroup) -> None:
    pg.send(torch.ones(2), 0)


def poisoning_raises(pg: ProcessGroup, raised: Raised, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(type(pg.backend), "frees_tensors", True)
    patched.setattr(runner, "poison_outputs", raised.raising("second"))


def test_a_handler_of_an_instruments_failure_that_fails_keeps_that_in_its_context() -> None:
    raised = Raised()
    chain = raised.chain_of(tell, (Calling(raised.raising("first")),), OPERATION, raised.raising("second"))
    assert chain == ["second", "first"]
    assert raised.alive() == []


def reduce_later(pg: ProcessGroup) -> None:
    pg.all_reduce(torch.ones(2), async_op=True).wait()


@pytest.mark.parametrize("call", [reduce, send])
def test_what_noting_a_failure_raises_keeps_the_failure_in_its_context(
    pg: ProcessGroup, call: Callable[[ProcessGroup], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = Raised()
    backend_does(pg, raised.raising("first"))
    poisoning_raises(pg, raised, monkeypatch)
    assert raised.chain_of(call, pg) == ["second", "first"]
    assert raised.alive() == []


@pytest.mark.parametrize("call", [reduce, send, reduce_later])
@pytest.mark.parametrize("where", ["poisoning", "breaking"])
def test_an_operation_ends_and_breaks_its_group_though_noting_its_failure_fails(
    pg: ProcessGroup, call: Callable[[ProcessGroup], None], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised, told = Raised(), Told()
    backend_does(pg, raised.raising("first"))
    remove = add_instrument(told)
    with monkeypatch.context() as patched:
        if where == "poisoning":
            poisoning_raises(pg, raised, patched)
        else:
            patched.setattr(pg._runner, "on_failure", raised.raising("second"))
        with suppress(MarkedError):
            call(pg)
    remove()
    assert [(event, state) for event, state, _ in told.events] == [
        ("started", State.SCHEDULED),
        ("finished", State.FAILED),
    ]
    with pytest.raises(Dist2Error, match="cannot be used any more"):
        pg.all_reduce(torch.ones(2))


def test_an_aborted_group_is_released_though_noting_a_failure_fails(
    pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = Raised()

    def fail(operation: Any) -> None:
        pg._runner.state.aborted = True
        raised.raising("first")()

    backend_does(pg, fail)
    with monkeypatch.context() as patched:
        poisoning_raises(pg, raised, patched)
        patched.setattr(pg.backend, "shutdown", raised.raising("third"))
        assert raised.chain_of(reduce, pg) == ["third", "second", "first"]
    assert raised.alive() == []


def test_contexts_that_both_have_in_common_close_no_circle() -> None:
    raised = Raised()

    def within() -> None:
        try:
            raised.raising("handled")()
        except Exception:  # noqa: BLE001 - both are raised while this one is handled
            tell((Calling(raised.raising("first")),), OPERATION, raised.raising("second"))

    assert raised.chain_of(within) == ["second", "first", "handled"]
    assert raised.alive() == []


def test_a_cause_that_is_raised_again_closes_no_circle() -> None:
    raised = Raised()

    def fail(_: object) -> None:
        try:
            raised.raising("cause")()
        except Exception as error:
            raise ValueError("first") from error

    def again(_: object, error: BaseException) -> None:
        assert error.__context__ is not None
        raise error.__context__

    assert raised.chain_of(tell, (Calling(fail),), OPERATION, again) == ["cause", "first"]
    assert raised.alive() == []
