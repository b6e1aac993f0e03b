"""The groups of this process that were not closed yet: their names, a fork, and the end of the process."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dist2.errors import GroupAbortedError, InvalidUsageError
from dist2.runtime.deadline import deadline_in
from dist2.runtime.exit_report import report
from dist2.runtime.process import AtExit, InChild, at_exit, end_with_multiprocessing, in_child, raised
from dist2.runtime.rank_names import host_and_pid
from dist2.runtime.signals import holds_no_lock
from dist2.runtime.threads import end_workers
from dist2.runtime.torch_versions import BINDING, group_of_name

if TYPE_CHECKING:
    from dist2.group.process_group import ProcessGroup

_c10d = BINDING

_lock = threading.RLock()  # reentrant: abort() may run in a signal handler that interrupted its owner
# Strong references until closed: C++ may use a group, or look it up by name, after users dropped it.
_open: set[ProcessGroup] = set()
# A name has several groups where ranks are threads: the same group, seen by different ranks.
_by_name: dict[str, set[ProcessGroup]] = {}
_named: set[ProcessGroup] = set()
_inherited: list[ProcessGroup] = []

_EXIT_S = 5.0
"""How long the end of the interpreter waits for threads that still complete operations."""


def open_groups() -> list[ProcessGroup]:
    """Return the groups of this process that were not closed yet."""
    return list(_open)


def named(name: str) -> list[ProcessGroup]:
    """Return the open groups of a name: several where ranks are threads, or none."""
    found = list(_by_name.get(name, ()))
    return found or [each for each in list(_open) if each._alias == name]


def enter(group: ProcessGroup, name: str) -> None:
    """Note that a group is open, and let torch's C++ find it by a name; it holds it weakly.

    Raises:
        InvalidUsageError: Another group of this process has the name, here or in torch's table.
    """
    with _lock:
        namesakes = _by_name.get(name)
        if namesakes and any(each.info.uid != group.info.uid for each in namesakes):
            raise _taken(name)
        _open.add(group)
        if not namesakes:
            _register(group, name)
        else:
            _register_beside(namesakes, group, name)
        _by_name.setdefault(name, set()).add(group)
    end_with_multiprocessing()


def _taken(name: str) -> InvalidUsageError:
    return InvalidUsageError(f"name {name!r} is taken by another group of this process")


def _register(group: ProcessGroup, name: str) -> None:
    try:
        _c10d._register_process_group(name, group)
    except RuntimeError as error:  # a group that torch has made
        raise _taken(name) from error
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
        group_of_name(name)
    except RuntimeError:  # torch has no other way to ask
        return False
    return True


def unname(group: ProcessGroup) -> None:
    """Have torch's C++ forget the name of a group."""
    with _lock:
        if group in _named:
            _c10d._unregister_process_group(group.info.name)
            _named.discard(group)


def call_also(group: ProcessGroup, name: str) -> None:
    """Let torch's C++ find a group by another name as well, and call it that."""
    _c10d._register_process_group(name, group)
    group._alias = name


def call_only_by_its_name(group: ProcessGroup, other: str) -> None:
    """Undo `call_also`."""
    group._alias = ""
    if _is_found(other):  # torch's destroy_process_group has forgotten all names
        _c10d._unregister_process_group(other)


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


def restore_cause(error: BaseException, group: ProcessGroup) -> None:
    """Make a group's failure the cause of an error in which torch's C++ has its text alone, as of DDP."""
    fault = group._runner.fault
    if fault is not None and type(error) is RuntimeError and not error.__cause__ and str(fault) in str(error):
        error.__cause__ = fault


@in_child(InChild.GROUPS)
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


@at_exit(AtExit.GROUPS)
@holds_no_lock
def _end_forgotten() -> None:
    """At exit: leave groups that were not closed, so that no thread or peer waits for them.

    After a failure, of the program or of a group, they are aborted.
    """
    forgotten = open_groups()
    error = raised()
    if error is not None:
        for group in forgotten:
            restore_cause(error, group)
        report(error)
    failure = error or _failure_of(forgotten)
    warned = [_never_closed(group) for group in forgotten]  # says which are open: not for long
    reason = failure or _left_open()
    for group in forgotten:
        if failure is None:
            group._leave_for(reason)
        else:
            group._abort_for(reason)
    deadline_ns = deadline_in(_EXIT_S)
    end_workers(deadline_ns)
    for group in forgotten:  # a thread that poisons outputs is inside torch: see `worker`
        group._runner.queue.await_empty(deadline_ns)
    for each in warned:
        warnings.warn(each, stacklevel=1)


def _failure_of(groups: Iterable[ProcessGroup]) -> ResourceWarning | None:
    """Return the failure of one of some groups as the reason that ranks of the others receive."""
    for group in groups:
        fault = group._runner.fault
        if fault is not None and not isinstance(fault, GroupAbortedError):
            return ResourceWarning(f"{_where()} exited after a failure in another group: {fault}")
    return None


def _where() -> str:
    return f"its process ({host_and_pid(socket.gethostname(), os.getpid())})"


def _left_open() -> ResourceWarning:
    return ResourceWarning(
        f"{_where()} exited without closing the group: if it failed, its own output has the error; if not, "
        "call shutdown(), or use the group as a context manager"
    )


def _never_closed(group: ProcessGroup) -> ResourceWarning:
    return ResourceWarning(f"{group!r} was never closed: call shutdown(), or use it as a context manager")
