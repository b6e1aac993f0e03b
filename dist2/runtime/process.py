"""The exit of this process and its forks: the steps of each part of the library, in one order.

A module registers a function for a step of the exit (`at_exit`), before a fork (`before_fork`), or for a step
in a forked child (`in_child`). Nothing else in the library registers such functions with Python:
`tests/test_architecture.py` checks that. One function that fails does not keep the others from running.

At exit the steps go down the layers. Groups are aborted first, so that no peer waits for this process while
it does the rest. Then store clients disconnect, and store servers go on for others that are still connected.
All of it runs after the exit functions that the program registered once it had imported dist2.

A forked child inherits memory and descriptors, and no thread. Locks are replaced before anything takes them,
since a thread of the parent may have held one. Descriptors are closed without a message, so that a connection
ends when the parent ends it. Objects stay, and raise when used: they belong to the parent.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - for `before_fork`
import logging  # noqa: F401 - likewise
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from dist2.runtime.signals import ctrl_c, holds_no_lock
from dist2.runtime.threads import start_no_more

Hook = TypeVar("Hook", bound=Callable[[], None])

pid = os.getpid()
"""The process: read without a system call."""


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return Path("/")


started_in = _here()
"""The directory in which the process imported the library: programs change it, ranks perhaps to their own."""


class AtExit(IntEnum):
    """The steps at exit, in their order."""

    EVIDENCE = 0  # of an error that ends the process, while its groups are open
    GROUPS = 1
    STORES = 2
    CONTROL_PLANE = 3
    LAST_WORDS = 4


class InChild(IntEnum):
    """The steps in a forked child, in their order."""

    USAGE_LOCK = 0  # what the other steps close is counted
    SIGNALS = 1
    STORES = 2
    LINKS = 3
    NODES = 4
    SHARED_TENSORS = 5
    GROUPS = 6
    WORLDS = 7
    CONTROL_PLANE = 8
    FRAMES = 9
    STACKS = 10
    USAGE = 11


_exit_hooks: dict[int, Callable[[], None]] = {}
_child_hooks: dict[int, Callable[[], None]] = {}


def at_exit(step: AtExit) -> Callable[[Hook], Hook]:
    """Return a decorator: the function is this step of the exit."""
    return _registrar(_exit_hooks, step)


def end_with_multiprocessing() -> None:
    """Have a process that `multiprocessing` started call the first steps of its exit while it still raises.

    Such a process catches the error of its target, so that functions of `atexit` cannot know it; in a process
    that was forked they do not run at all.
    """
    global _ends_in
    multiprocessing = sys.modules.get("multiprocessing")
    if _ends_in == os.getpid() or multiprocessing is None or multiprocessing.parent_process() is None:
        return
    from multiprocessing.util import Finalize

    _ends_in = os.getpid()  # a child of this process has forgotten it
    Finalize(None, _first_steps, exitpriority=0)


def _first_steps() -> None:
    _call_all({step: hook for step, hook in _exit_hooks.items() if step <= AtExit.GROUPS})


_ends_in = 0
"""The process in which `end_with_multiprocessing` has been called."""


def raised() -> BaseException | None:
    """Return the exception that ends this process, if Python still knows it.

    That is the one that is being handled, or else the last one that was not caught. Where a program calls
    `sys.exit` while it handles an exception, it is that exception.
    """
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # at a prompt, it may be of an earlier command
        error = getattr(sys, "last_value", None)
    return None if error is None else cause_of(error)


def cause_of(error: BaseException) -> BaseException:
    """Return the exception during whose handling the program called `sys.exit`, or else the given one."""
    if isinstance(error, SystemExit) and error.__context__ is not None:
        return error.__context__
    return error


def in_child(step: InChild) -> Callable[[Hook], Hook]:
    """Return a decorator: the function is this step in a forked child."""
    return _registrar(_child_hooks, step)


def before_fork(hook: Hook) -> Hook:
    """Call a function in the parent before each fork.

    It may import modules, but none that have functions called before a fork and behind it, which release what
    those before have locked: only the second kind would be called in this fork. This module imports those of
    Python's library.
    """
    os.register_at_fork(before=hook)
    return hook


def _registrar(hooks: dict[int, Callable[[], None]], step: int) -> Callable[[Hook], Hook]:
    def register(hook: Hook) -> Hook:
        hooks[step] = hook
        return hook

    return register


@holds_no_lock
def _call_all(hooks: dict[int, Callable[[], None]]) -> None:
    with ExitStack() as steps:  # runs all, the last one that was pushed first, and raises an error after that
        for step in sorted(hooks, reverse=True):
            steps.callback(hooks[step])


@holds_no_lock
def _exit() -> None:
    start_no_more()
    with suppress(MemoryError):  # peers see the end of the process, and a traceback would need memory as well
        _call_all(_exit_hooks)


def _enter_child() -> None:
    global pid
    pid = os.getpid()
    _call_all(_child_hooks)


in_child(InChild.SIGNALS)(ctrl_c.forget)
atexit.register(_exit)
os.register_at_fork(after_in_child=_enter_child)
