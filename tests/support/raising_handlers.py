"""Signal handlers that raise, at every place where Python runs them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupted(TimeoutError):  # noqa: N818 - by a signal handler of the program
    """The exception of the signal handler: an `OSError`, as handlers of SIGALRM often raise."""


def interrupted(where: int, body: Callable[[], object], again: int | None = None) -> str:
    """Have a signal handler raise at one of the places where Python runs them; return which, if there is one.

    They are where a function in Python begins, and where one in C has returned.

    Args:
        where: The number of the place.
        body: The code to interrupt.
        again: A second handler raises at this place after the first, while that exception is handled.
    """
    countdown = [where] if again is None else [where, again]
    places, raised = itertools.count(), ""

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal raised, places
        ours = frame.f_globals["__name__"].startswith("dist2.")
        if event in ("call", "c_return") and ours and countdown and next(places) == countdown[0]:
            del countdown[0]
            places = itertools.count()
            raised += f"{event} in {frame.f_code.co_name}, line {frame.f_lineno}\n"
            raise Interrupted

    def resume(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "exception" and countdown:
            sys.setprofile(look)  # Python has removed the function, because it raised
        return resume

    traced = sys.gettrace()
    if again is not None:
        sys.settrace(resume)
    sys.setprofile(look)
    try:
        body()
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)
        sys.settrace(traced)
    return raised


def handled(where: int, body: Callable[[], object], handler: Callable[[], object]) -> bool:
    """Run a signal handler at one of these places, if there is one; return whether it ran."""
    places, ran = itertools.count(), False

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal ran
        ours = frame.f_globals["__name__"].startswith("dist2.")
        if event in ("call", "c_return") and ours and next(places) == where:
            ran = True
            handler()

    sys.setprofile(look)
    try:
        body()
    finally:
        sys.setprofile(None)
    return ran
