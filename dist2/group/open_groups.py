"""The groups of this process that were not closed yet: their names, a fork, and the end of the process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dist2.errors import GroupAbortedError, InvalidUsageError
from dist2.runtime.deadline import deadline_in
from dist2.runtime.signals import holds_no_lock
from dist2.runtime.threads import end_workers

if TYPE_CHECKING:
    from dist2.group.process_group import ProcessGroup

_c10d: Any = torch._C._distributed_c10d

_lock = threading.RLock()  # an abort may come in a signal handler whose frame holds it
# Held until closed: torch's C++ may hold the C++ half of a group, or find it by name, after users let go.
_open: set[ProcessGroup] = set()
# Of several with one name, each is the same group of another rank.
_by_name: dict[str, set[ProcessGroup]] = {}
_named: set[ProcessGroup] = set()
_inherited: list[ProcessGroup] = []

_EXIT_S = 5.0
"""How long the end of the interpreter waits for threads that still complete operations."""


def open_groups() -> list[ProcessGroup]:
    """Return the groups of this process that were not closed yet."""
    return list(_open)


def enter(group: ProcessGroup, name: str) -> None:
    """Note that a group is open, and let torch's C++ find it by a name; it holds it weakly.

    Raises:
        InvalidUsageError: Another group of this process has the name.
    """
    with _lock:
        namesakes = _by_name.get(name)
        if namesakes and any(each.info.uid != group.info.uid for each in namesakes):
            raise InvalidUsageError(f"name {name!r} is taken by another group of this process")
        _open.add(group)
        if not namesakes:
            _register(group, name)
        else:
            _register_beside(namesakes, group, name)
        _by_name.setdefault(name, set()).add(group)


def _register(group: ProcessGroup, name: str) -> None:
    _c10d._register_process_group(name, group)
    _named.add(group)


def _register_beside(namesakes: set[ProcessGroup], group: ProcessGroup, name: str) -> None:
    """Let torch find a group by its name where ranks are threads of one process, if torch keeps them apart.

    torch has one table of names, or one for each thread (in its thread isolation mode). In one table the name
    could stand for one rank only, and the other ranks would act as that one: so it stands for none.
    """
    named = namesakes & _named
    if named and not _is_found(name):
        _register(group, name)
    elif named:
        for each in named:
            unname(each)


def _is_found(name: str) -> bool:
    """Whether torch finds a group by a name, in this thread."""
    try:
        _c10d._resolve_process_group(name)
    except RuntimeError:  # torch has no other way to ask
        return False
    return True


def unname(group: ProcessGroup) -> None:
    """Have torch's C++ forget the name of a group."""
    with _lock:
        if group in _named:
            _c10d._unregister_process_group(group.info.name)
            _named.discard(group)


@contextmanager
def also_named(group: ProcessGroup, name: str) -> Iterator[None]:
    """Let torch's C++ find a group by another name as well, and call it that, for a while."""
    _c10d._register_process_group(name, group)
    group._alias = name
    try:
        yield
    finally:
        group._alias = ""
        _c10d._unregister_process_group(name)


def rename(group: ProcessGroup, name: str) -> None:
    """Note that a group is about to have another name, by which torch's C++ does not find it."""
    with _lock:
        unname(group)
        if group in _open:
            _forget_name(group)
            _by_name.setdefault(name, set()).add(group)


def _forget_name(group: ProcessGroup) -> None:
    namesakes = _by_name.get(group.info.name, set())
    namesakes.discard(group)
    if not namesakes:
        _by_name.pop(group.info.name, None)


def leave(group: ProcessGroup) -> bool:
    """Note that a group is closed: at once, so that a name that no open group has is free.

    Returns:
        Whether it was open: True for one caller only, though several close it at a time.
    """
    with _lock:
        unname(group)
        _forget_name(group)
        try:
            _open.remove(group)  # one step: the next may be a signal handler that closes it as well
        except KeyError:
            return False
        return True


def _forbid_in_child() -> None:
    """After a fork: a group's links and numbers belong to the parent."""
    global _lock  # another thread of the parent may have held it
    _lock = threading.RLock()
    for group in list(_open):
        group._forbid(
            GroupAbortedError(
                f"group {group.info.name!r} belongs to the parent process; after a fork, make a new group",
                group=group.info.name,
                rank=group.info.rank,
            )
        )
    # Never destroyed here: the destructors of torch's C++ would wait for threads that only the parent has.
    _inherited.extend(_open)
    _open.clear()
    _by_name.clear()
    _named.clear()


@holds_no_lock
def _abort_forgotten() -> None:
    """At exit: take down groups that nobody closed, so that no thread or peer waits for them."""
    forgotten = open_groups()
    uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # not of an earlier prompt
    for group in forgotten:
        group._abort_for(uncaught if isinstance(uncaught, BaseException) else _never_closed(group))
    deadline_ns = deadline_in(_EXIT_S)
    end_workers(deadline_ns)
    for group in forgotten:  # a thread that marks what it was to write is inside torch: see `worker`
        group._runner.queue.await_empty(deadline_ns)
    for group in forgotten:
        warnings.warn(_never_closed(group), stacklevel=1)


def _never_closed(group: ProcessGroup) -> ResourceWarning:
    return ResourceWarning(f"{group!r} was never closed: call shutdown(), or use it as a context manager")


atexit.register(_abort_forgotten)
os.register_at_fork(after_in_child=_forbid_in_child)
