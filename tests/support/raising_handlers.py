"""Signal handlers that raise, at every place where Python runs them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType


class Interrupted(Exception):  # noqa: N818 - by a signal handler of the program
    """The exception of the signal handler."""


def interrupted(where: int, body: Callable[[], object]) -> str:
    """Have a signal handler raise at one of the places where Python runs them; return which, if there is one.

    They are where a function in Python begins, and where one in C has returned.
    """
    places, raised = itertools.count(), ""

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal raised
        ours = frame.f_globals["__name__"].startswith("dist2.")
        if event in ("call", "c_return") and ours and next(places) == where:
            raised = f"{event} in {frame.f_code.co_name}, line {frame.f_lineno}"
            raise Interrupted

    sys.setprofile(look)
    try:
        body()
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)
    return raised
