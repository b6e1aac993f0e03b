"""`local`: call a function in new processes of this host, as the ranks of a job.

Theory of operation. Each rank is a new interpreter (`dist2.launch.worker`), which gets the function over a
socket pair and answers with its result or its exception. The calling thread watches the sockets, the ranks'
output and their ends, all in one selector. Each rank leads a session of its own: Ctrl-C in a terminal
reaches the caller alone, which then kills the session, so that processes that a rank has started end too. A
rank whose socket closes kills itself: no rank outlives its caller.
"""

from __future__ import annotations

import linecache
import os
import pickle
import re
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from inspect import iscoroutinefunction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from dist2.errors import InvalidUsageError, RanksFailedError
from dist2.group.object_types import registered_in
from dist2.launch.meeting import HOST, rank_environment, serve_ranks
from dist2.runtime.arguments import as_int
from dist2.runtime.config import child_environment
from dist2.runtime.deadline import FOREVER_NS, deadline_in, remaining_s, seconds
from dist2.runtime.other_process import was_killed_by
from dist2.runtime.rank_names import rank_names
from dist2.runtime.resources import system_call

Result = TypeVar("Result")
_Failed = tuple[BaseException, str, list[int]]
"""An exception, its traceback, and the ranks that it names as its cause."""
GRACE_S = 5.0
"""How long the other ranks may take, after one has failed, to report their own exceptions."""
_CHUNK_BYTES = 1 << 16
_LINE_ENDS = re.compile(rb"(\r?\n|\r(?=[^\n]))")
"""A carriage return at the end of a chunk is left for the next one: a newline may follow."""
_PROGRAM = "import sys; sys.path[:] = {path!r}; from dist2.launch.worker import main; main()"
"""The program of a rank: it imports what its caller could, dist2 included."""


def local(
    fn: Callable[..., Result], ranks: int, *args: object, timeout: timedelta | float | None = None
) -> list[Result]:
    """Call a function in new processes of this host, as ranks of one job; return the results by rank.

    In each process the environment is that of a launcher, so that `dist2.new_group`, `dist2.legacy` and
    torch.distributed meet the other ranks. Lines that a rank prints appear at once, behind its number. It
    works in scripts, also without a guard of ``__main__``, in the REPL and in notebooks; types that
    `register_type` knows there are known on the ranks too. When it returns or raises, the processes have
    ended, and those that they started in their session. Ctrl-C ends them as well.

    Args:
        fn: Called as ``fn(*args)`` on every rank. A function of ``__main__``, a lambda or an inner function
            needs cloudpickle: ``pip install 'dist2[launch]'``.
        ranks: Number of ranks.
        *args: Arguments, pickled like the results.
        timeout: Limit of the whole call, a `timedelta` or seconds; by default none.

    Raises:
        InvalidUsageError: ``ranks`` is not positive, ``fn`` is a coroutine function, or ``fn`` or an argument
            cannot be pickled.
        RanksFailedError: A rank raised or died; has the exception of every rank, with its traceback.

    Examples:
        >>> def total(x):
        ...     with dist2.new_group("socket") as pg:
        ...         tensor = torch.full((1,), x + pg.rank())
        ...         pg.all_reduce(tensor)
        ...         return tensor.item()
        >>> dist2.launch.local(total, 2, 10.0)  # doctest: +SKIP
        [21.0, 21.0]
    """
    count = as_int(ranks)
    if count is None or count < 1:
        raise InvalidUsageError(f"ranks must be a positive integer, got {ranks!r}")
    if not callable(fn):
        raise InvalidUsageError(f"fn must be callable, got {fn!r} ({type(fn).__name__})")
    if iscoroutinefunction(fn):
        raise InvalidUsageError(
            f"fn is the coroutine function {fn.__qualname__}, which nothing would run: pass a function that "
            f"calls asyncio.run({fn.__name__}(...))"
        )
    call = _pickled(fn, args)
    ends_ns = FOREVER_NS if timeout is None else deadline_in(seconds(timeout))
    job = _Job(count, call)
    try:
        job.watch(ends_ns)
    finally:
        job.end()
    return job.results()


def _pickled(fn: Callable[..., object], args: Sequence[object]) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        if getattr(fn, "__module__", "__main__") == "__main__" or "<" in getattr(fn, "__qualname__", "<"):
            raise InvalidUsageError(
                f"fn is {fn!r}, which another process cannot import: pip install 'dist2[launch]' "
                f"(cloudpickle), or define it at the top of a module"
            ) from None
        cloudpickle = pickle
    try:
        types = registered_in("__main__")  # the ranks cannot import it
        call: bytes = cloudpickle.dumps((fn, args, types, *_source(fn)))
    except Exception as error:
        raise InvalidUsageError(
            f"fn and its arguments must be picklable, to be sent to other processes: {error}"
        ) from error
    return call


def _source(fn: object) -> tuple[str, list[str]]:
    """Return the name of a function's file, and its lines if it is a cell of a notebook or of the REPL."""
    name = getattr(getattr(fn, "__code__", None), "co_filename", "")
    return name, [] if Path(name).is_file() else linecache.getlines(name)


class _Rank:
    """A process, and its answer.

    Attributes:
        process: The process.
        connection: Carries the call to it, and the answer back.
        answer: Whether it succeeded, and its result, or its exception and traceback; None until it has
            answered or ended.
        end: A descriptor that is readable once it has ended.
    """

    def __init__(self, rank: int, count: int, port: int) -> None:
        self.rank = rank
        with system_call("a start of a rank"):
            self._open(rank, count, port)
        self.answer: tuple[bool, Any] | None = None
        self.end = -1
        self._rest: dict[str, bytes] = {}

    def _open(self, rank: int, count: int, port: int) -> None:
        ours, theirs = socket.socketpair()
        variables = {**rank_environment(rank, count, port), "PYTHONUNBUFFERED": "1"}
        with ours, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
                env=child_environment(variables),
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self.connection = Connection(ours.detach())

    @property
    def failed(self) -> bool:
        """Whether it has raised, or ended without an answer."""
        return self.answer is not None and not self.answer[0]

    def print(self, stream: str, data: bytes) -> bool:
        """Print the complete lines of its output, and the last one at its end, behind its number.

        A carriage return ends a line as well: progress bars write over theirs.

        Returns:
            Whether there may be more.
        """
        *lines, rest = _LINE_ENDS.split(self._rest.pop(stream, b"") + data)
        if data:
            self._rest[stream] = rest
        elif rest:
            lines += [rest, b"\n"]
        out = getattr(sys, stream)  # as it is now: a notebook puts another object there
        for line, end in zip(lines[::2], lines[1::2], strict=True):
            if line or end != b"\r":
                out.write(f"[{self.rank}] {line.decode(errors='replace')}{end.decode()[-1]}")
        out.flush()  # a pipe or a file gets them as the ranks write them
        return bool(data)

    def print_rest(self) -> None:
        """Print the output that has arrived, without waiting for processes that it has left behind."""
        for name in ("stdout", "stderr"):
            stream = getattr(self.process, name)
            os.set_blocking(stream.fileno(), False)
            with suppress(BlockingIOError):
                while self.print(name, os.read(stream.fileno(), _CHUNK_BYTES)):
                    pass
            self.print(name, b"")

    def take_answer(self) -> None:
        """Take the answer, unless the process has closed its end without one."""
        try:
            succeeded, content = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return
        except Exception as error:  # noqa: BLE001 - an object may raise anything as it is loaded
            succeeded, content = False, (_unloaded(error), "", [])
        self.answer = succeeded, content

    def ended(self) -> None:
        """Take its answer, or else note its end."""
        # Not `wait`: its number, that of its session, is no other's until `kill` has asked for its end.
        try:
            end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the program ignores SIGCHLD, or has asked for all ends
            end = None
        if self.answer is None and self.connection.poll():
            self.take_answer()
        if self.answer is None:
            how = "ended" if end is None else _how(end)
            self.answer = False, (RuntimeError(f"the process {how}"), "", [])

    def kill(self) -> None:
        """End it and its session."""
        with suppress(ProcessLookupError, ChildProcessError):  # the number may be another process's
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        if self.end >= 0:
            os.close(self.end)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _how(end: os.waitid_result) -> str:
    if end.si_code == os.CLD_EXITED:
        return f"exited with code {end.si_status}"
    return was_killed_by(end.si_status)


class _Job:
    """The ranks of one call."""

    def __init__(self, count: int, call: bytes) -> None:
        with system_call("epoll_create"):
            self._selector = selectors.DefaultSelector()
        self._lease = serve_ranks(HOST)
        self._ranks: list[_Rank] = []
        self._cause: int | None = None
        try:
            for rank in range(count):
                self._ranks.append(_Rank(rank, count, self._lease.server.port))
            for each in self._ranks:
                with suppress(BrokenPipeError):  # it has ended, which is seen later
                    each.connection.send_bytes(call)
        except BaseException:
            self.end()
            raise

    def watch(self, ends_ns: int) -> None:
        """Print the ranks' output until all have ended; shortly after a failure, or at the limit, return."""
        running = self._register()
        while running and remaining_s(ends_ns) > 0:
            for key, _ in self._selector.select(None if ends_ns == FOREVER_NS else remaining_s(ends_ns)):
                each, kind = key.data
                if kind in ("stdout", "stderr"):
                    more = each.print(kind, os.read(key.fd, _CHUNK_BYTES))
                else:
                    more = False
                    each.take_answer() if kind == "answer" else each.ended()
                if not more:
                    self._selector.unregister(key.fileobj)
                if kind == "end":
                    running -= 1
                if self._cause is None and each.failed:
                    self._cause, ends_ns = each.rank, min(ends_ns, deadline_in(GRACE_S))
        for each in self._ranks:
            each.print_rest()

    def _register(self) -> int:
        """Watch the answer, the output and the end of each rank; return how many there are."""
        for each in self._ranks:
            process = each.process
            with system_call("pidfd_open"):
                each.end = os.pidfd_open(process.pid)
            sources: dict[str, Any] = {"answer": each.connection, "end": each.end}
            for kind, source in {**sources, "stdout": process.stdout, "stderr": process.stderr}.items():
                self._selector.register(source, selectors.EVENT_READ, (each, kind))
        return len(self._ranks)

    def end(self) -> None:
        """End all processes; close all files."""
        for each in self._ranks:
            each.kill()
        self._selector.close()
        self._lease.end()

    def results(self) -> list[Any]:
        """Return the results by rank.

        Raises:
            RanksFailedError: There is none of a rank.
        """
        late = TimeoutError(
            "it had not returned within the time limit"
            if self._cause is None
            else f"it had not returned {GRACE_S:g} s after {rank_names([self._cause])} had failed"
        )
        answers: list[tuple[bool, Any]] = [each.answer or (False, (late, "", [])) for each in self._ranks]
        if all(succeeded for succeeded, _ in answers):
            return [content for _, content in answers]
        failed = {rank: content for rank, (succeeded, content) in enumerate(answers) if not succeeded}
        first = self._cause if self._cause is not None else min(failed)
        for rank in failed[first][2]:  # one that failed because of another one
            if rank in failed and not failed[rank][2]:
                first = rank
                break
        raise _failure(failed, first, self._cause is not None) from failed[first][0]


def _failure(failed: dict[int, _Failed], first: int, is_cause: bool) -> RanksFailedError:
    order = [first, *(rank for rank in failed if rank != first)]
    texts = []
    for rank in order:
        error, trace, _ = failed[rank]
        texts.append(f"{rank_names([rank])}: {trace.rstrip() or f'{type(error).__name__}: {error}'}")
    cause = f", {rank_names([first])} as the cause" if is_cause else ""
    return RanksFailedError(
        f"{rank_names(sorted(failed))} failed{cause}\n\n" + "\n\n".join(texts),
        errors={rank: failed[rank][0] for rank in order},
    )


def _unloaded(error: Exception) -> InvalidUsageError:
    return InvalidUsageError(f"the result of fn cannot be loaded here: {type(error).__name__}: {error}")
