"""A rank that `dist2.launch.local` starts; its standard input is the socket to its caller."""

from __future__ import annotations

import linecache
import os
import pickle
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from types import CodeType, FunctionType
from typing import Any

from dist2.runtime.exit_report import blamed
from dist2.runtime.signals import holds_no_lock


@holds_no_lock  # the function, which it calls, may shut groups down
def main() -> None:
    """Call the function that comes over a socket; send its result or its exception back."""
    connection = Connection(os.dup(0))
    with open(os.devnull) as nothing:  # noqa: PTH123 - a program that reads its input finds none
        os.dup2(nothing.fileno(), 0)
    call = connection.recv_bytes()
    threading.Thread(target=_end_with_caller, args=(connection,), daemon=True).start()
    try:
        fn, args, types, file, lines = pickle.loads(call)
        if types:
            from dist2.group.object_types import register_all

            register_all(types)
        _name_file(fn, file)
        if lines:  # tracebacks show them
            linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
        answer = _dumped((True, fn(*args)))
    except BaseException as error:  # noqa: BLE001 - it is raised by the caller
        answer = _dumped_error(error)
    connection.send_bytes(answer)


def _end_with_caller(connection: Connection) -> None:
    """Kill this process when its caller has ended: then nothing else arrives but the end of the stream."""
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGKILL)


def _name_file(fn: Any, file: str) -> None:
    """Name the file of a function, and of those beside it, in tracebacks: cloudpickle leaves it out."""
    if not isinstance(fn, FunctionType) or fn.__code__.co_filename == file:
        return
    omitted = fn.__code__.co_filename
    for each in [fn, *fn.__globals__.values()]:
        if isinstance(each, FunctionType) and each.__code__.co_filename == omitted:
            each.__code__ = _in_file(each.__code__, file)


def _in_file(code: CodeType, file: str) -> CodeType:
    inner = tuple(_in_file(each, file) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=file, co_consts=inner)


def _dumped(answer: object) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(answer)
    data: bytes = cloudpickle.dumps(answer)
    return data


def _dumped_error(error: BaseException) -> bytes:
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without `main`
    text = "".join(traceback.format_exception(type(error), error, own))
    blames = blamed(error)  # pickle loses the error that it was raised from
    try:
        data = _dumped((False, (error, text, blames)))
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - an exception with fields of its own may fail in any way
        data = _dumped((False, (RuntimeError(f"{type(error).__name__}: {error}"), text, blames)))
    return data
