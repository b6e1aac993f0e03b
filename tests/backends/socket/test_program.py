"""Programs in C: which script they run, and which calls they leave to Python."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.boards import Members, operation

from dist2.backends.socket.bound_steps import Bound, copying, fencing
from dist2.backends.socket.script import Script, native_program, script_of
from dist2.backends.socket.transport.boards.board import Board

VALUES = torch.tensor([0.0, 1.0, 2.0, 3.0])

Events = list[tuple[Any, ...]]


@pytest.fixture
def board() -> Iterator[Board]:
    made = Members(1)
    yield made.boards[0]
    made.close()


def nothing(argument: object) -> None:
    raise AssertionError("Python was not to do this step")


def writing(board: Board, value: int, *more: Bound) -> Script:
    """Return a script that passes a fence and writes a number."""
    copy = copying(nothing, (0, 0), (-1, VALUES[value].data_ptr()), 4)
    script = script_of(board, [fencing(nothing), copy, *more], 1)
    assert script is not None
    return script


def recorded(board: Board, events: Events, **options: Any) -> Any:
    program = native_program(
        board,
        lambda *call: events.append(("first", *call)),
        lambda *where: events.append(("stopped", *where)),
        **options,
    )
    assert program is not None
    return program


def test_python_is_called_until_there_are_scripts(board: Board) -> None:
    events: Events = []
    program = recorded(board, events)
    call, tensor = operation(0), torch.zeros(1)
    program(call, (tensor,), ())
    assert events == [("first", call, (tensor,), ())]
    assert board.turn == 0 and program.scripts == (None, None)


def test_halves_take_turns(board: Board) -> None:
    events: Events = []
    program = recorded(board, events)
    program.scripts = scripts = writing(board, 1), writing(board, 2)
    assert program.scripts == scripts
    tensor, seen = torch.zeros(1), []
    for _ in range(4):
        assert program(operation(0), (tensor,), ()) is None
        seen.append((tensor.item(), board.turn))
    assert seen == [(1.0, 1), (2.0, 0), (1.0, 1), (2.0, 0)]
    board.turn = 1  # another program took one
    program(operation(0), (tensor,), ())
    assert tensor.item() == 2.0 and events == []


def test_parities_of_fences_have_scripts_of_their_own(board: Board) -> None:
    events: Events = []
    program = recorded(board, events, by_parity=True)
    even, odd = writing(board, 2), writing(board, 1)
    tensor = torch.zeros(1)
    program.scripts = even, odd
    program(operation(0), (tensor,), ())
    assert (tensor.item(), board.phase, board.turn) == (1.0, 1, 0)
    program(operation(0), (tensor,), ())
    assert (tensor.item(), board.phase, board.turn) == (2.0, 2, 0)
    program.scripts = even, None
    program(operation(0), (tensor,), ())
    assert [name for name, *_ in events] == ["first"]


def test_two_ways_have_turns_whatever_the_parity(board: Board) -> None:
    events: Events = []
    program = recorded(board, events, by_parity=True)
    tensor, seen = torch.zeros(1), []
    program.scripts = scripts = tuple([writing(board, value) for value in (0, 1, 2, 3)])
    assert program.scripts == scripts
    for _ in range(5):
        program(operation(0), (tensor,), ())
        seen.append(tensor.item())
    assert seen == [
        3.0,
        0.0,
        3.0,
        0.0,
        3.0,
    ]  # fences 1 to 5
    program.scripts = (*scripts[:2], None, None)
    program(operation(0), (tensor,), ())
    program(operation(0), (tensor,), ())
    assert tensor.item() == 0.0 and [name for name, *_ in events] == ["first"]


@pytest.mark.parametrize("wrong", [(None,), (None,) * 3, (None, 1), None])
def test_there_are_two_scripts_or_four(board: Board, wrong: Any) -> None:
    program = recorded(board, [])
    with pytest.raises(TypeError, match="two or four"):
        program.scripts = wrong


def test_python_goes_on_where_a_script_stops(board: Board) -> None:
    events: Events = []
    program = recorded(board, events)
    program.scripts = writing(board, 1, Bound(nothing)), writing(board, 2)
    call, tensor = operation(0), torch.zeros(1)
    program(call, (tensor,), ())
    assert events == [("stopped", call, (tensor,), (), 0, 2, 1)]
    assert board.turn == 1


def test_what_a_script_raises_is_told_and_raised(board: Board) -> None:
    events: Events = []

    def failed(phase: int, error: BaseException) -> None:
        assert error.__traceback__ is None or error.__traceback__.tb_frame
        events.append((phase, str(error)))

    program = recorded(board, events, failed=failed)
    program.scripts = writing(board, 1), writing(board, 2)
    with pytest.raises(ValueError, match="0 tensors, not 1"):
        program(operation(0), (), ())
    assert events == [(1, "0 tensors, not 1")]
    program.scripts = None, None
    with pytest.raises(ValueError, match="0 tensors"):
        writing(board, 1).run(operation(0), (), (), 0, 0)


def test_what_telling_raises_comes_with_the_failure_in_its_context(board: Board) -> None:
    def failed(phase: int, error: BaseException) -> None:
        raise RuntimeError("no way back")

    program = recorded(board, [], failed=failed)
    program.scripts = writing(board, 1), writing(board, 2)
    with pytest.raises(RuntimeError, match="no way back") as caught:
        program(operation(0), (), ())
    assert "0 tensors" in str(caught.value.__context__)


def test_what_is_no_call_or_script_is_refused(board: Board) -> None:
    program = recorded(board, [])
    for arguments in ((), (1, 2), (1, 2, 3, 4)):
        with pytest.raises(TypeError, match="an operation, inputs and outputs"):
            program(*arguments)
    for scripts in ((1, None), (None,), 7):
        with pytest.raises(TypeError):
            program.scripts = scripts
    with pytest.raises(TypeError):
        del program.scripts


def test_a_program_keeps_nothing_of_its_calls_and_ends_in_a_collection(board: Board) -> None:
    class Owner:
        def __init__(self) -> None:
            self.program = native_program(board, self.call, self.call)

        def call(self, *arguments: object) -> None: ...

    owner = Owner()
    assert owner.program is not None
    owner.program.scripts = writing(board, 1), writing(board, 2, Bound(nothing))
    call, inputs, outputs = operation(0), (torch.zeros(1),), ()
    owner.program(call, inputs, outputs)
    before = [sys.getrefcount(each) for each in (call, inputs, inputs[0])]
    for _ in range(1000):
        owner.program(call, inputs, outputs)
    assert [sys.getrefcount(each) for each in (call, inputs, inputs[0])] == before
    seen = weakref.ref(owner)
    del owner
    gc.collect()
    assert seen() is None
