"""Programs that take 0.1 s of CPU to start and end in place of 1.5 s: forks of an interpreter with torch.

A server has imported torch and the other projects that dist2 imports, but neither dist2 nor observability:
their imports may depend on the program's environment. For each client (see `warm_client`) the server forks.
The fork takes the client's descriptors, environment, folder and processors, returns from `serve` to the top
level of the interpreter, and runs the program there. So the program ends like any other: uncaught exceptions,
waits for threads, exit handlers. It does not clear modules in the end, which takes half a second, unless the
client is that of `whole_python`. The server tells the client the exit status.

A program that starts others by `sys.executable`, as launchers do, can have them started so too: see
`warm_executable`.

Not for tests of the time of imports or of options of the interpreter, nor for programs with their own
terminal or namespace, nor for ranks that MPI's launchers start: mpi4py finalizes MPI after the last exit
handler, and MPICH's launcher kills the others if a rank ends before.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import attrs

from support.huge_pages import prepare_for_forks

IMPORTED = (
    "torch.distributed.run",
    "torch._dynamo",
    "attrs",
    "structlog",
    "msgpack",
    "prometheus_client.parser",
    "starlette.applications",
    "starlette.middleware.gzip",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.httptools_impl",
    "rich.console",
)
MOST_DESCRIPTORS = 64
START_S = 50.0
CLIENT = Path(__file__).with_name("warm_client.py")
ROOT = Path(__file__).parent.parent.parent


@functools.cache
def warm_python() -> list[str | Path]:
    """Return the replacement of ``python`` in a command: ``(*warm_python(), script, *arguments)``.

    The workers of pytest-xdist use the server of the process that started them; other processes start one.
    """
    path = _shared[0] if _shared else start_server()
    deadline = time.monotonic() + START_S
    while not Path(path).exists():
        assert time.monotonic() < deadline, "the warm interpreter did not start"
        time.sleep(0.01)
    return [sys.executable, "-I", "-S", CLIENT, path]


def whole_python() -> list[str | Path]:
    """Return the same for a program that ends as an interpreter does: that needs objects to the very end."""
    return [*warm_python(), WHOLE]


_shared: list[str] = []
"""The socket of the server that this process shares with others, if any."""


def use_server(path: str) -> None:
    """Use a server that another process has started and ends."""
    _shared[:] = [path]


def start_server() -> str:
    """Start a server, which ends with this process; return its socket, which exists once it is ready."""
    folder = tempfile.mkdtemp(prefix="dist2-warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = f"{folder}/socket"
    code = f"from support.warm_interpreter import serve; run = serve({path!r}); run()"
    server = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,  # it ends when this closes
        stdout=subprocess.PIPE,  # `sys.stdout` of the forks then does not seek
        start_new_session=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdout.close()
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    return path


WHOLE = "--whole"
"""First argument of a program of `whole_python`."""
CHILDREN = "--children"
"""First argument of a program whose `sys.executable` is to be `warm_executable`."""


@functools.cache
def warm_executable(for_children: bool = True) -> str:
    """Return a program that stands for ``python`` in `sys.executable`: with scripts, ``-m`` and ``-c``.

    ``[*warm_python(), CHILDREN, program]`` runs a program that finds it there. Its children find it as well.

    Args:
        for_children: Whether they do; if not, they find the real one.
    """
    python = [str(part) for part in warm_python()]
    folder = Path(python[-1]).parent
    if not for_children:
        return _wrapper(folder / "python-alone", *python)
    executable = _wrapper(folder / "python", *python, CHILDREN)
    for script in Path(sys.executable).parent.glob("torch*"):
        _wrapper(folder / script.name, executable, str(script))
    return executable


def _wrapper(path: Path, *command: str) -> str:
    """Write a program that stands for a command; other processes may write it at the same time."""
    unfinished = path.with_name(f"{path.name}-{os.getpid()}")
    unfinished.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    unfinished.chmod(0o700)
    unfinished.rename(path)
    return str(path)


# The server


@attrs.define(eq=False)
class _Running:
    """A program that runs: its process, and the connection to its client."""

    pid: int
    connection: socket.socket


def serve(path: str) -> Callable[[], object]:
    """Fork for each client; return only in the forks, with the callable for the top level."""
    gc.disable()  # a fourth of the time of imports
    for name in IMPORTED:
        importlib.import_module(name)
    # Not in each fork, which would copy the pages of all names.
    own_modules = [name for name in sys.modules if name.partition(".")[0] == "support"]
    prepare_for_forks()
    gc.enable()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}-unfinished")
    listener.listen(64)
    Path(f"{path}-unfinished").rename(path)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    _kill_all(selector)
                    sys.exit()
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    _, fds, _, _ = socket.recv_fds(connection, 1, MOST_DESCRIPTORS)
                    pid = os.fork()
                    if pid == 0:
                        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has the tests ignore it
                        break
                    for fd in fds:
                        os.close(fd)
                    running = _Running(pid, connection)
                    selector.register(connection, selectors.EVENT_READ, running)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, running)
                elif key.fileobj is key.data.connection:
                    _obey(selector, key.data)
                else:
                    _bury(selector, key.fd, key.data)
            else:
                continue
            break
        for other in list(selector.get_map().values()):
            if isinstance(other.fileobj, socket.socket):
                other.fileobj.close()
            elif other.fd != 0:
                os.close(other.fd)
    connection.close()
    return _adopt(path, fds, own_modules)


def _obey(selector: selectors.BaseSelector, running: _Running) -> None:
    """Send the program a signal that its client got; kill it if the client was killed."""
    if running.connection.fileno() < 0:
        return  # the program ended at the same time
    numbers = running.connection.recv(1)
    with suppress(ProcessLookupError):
        os.kill(running.pid, numbers[0] if numbers else signal.SIGKILL)
    if not numbers:
        selector.unregister(running.connection)


def _bury(selector: selectors.BaseSelector, pidfd: int, running: _Running) -> None:
    """Tell the client how its program ended."""
    _, status = os.waitpid(running.pid, 0)
    with suppress(KeyError):
        selector.unregister(running.connection)
    selector.unregister(pidfd)
    os.close(pidfd)
    with running.connection, suppress(OSError):
        running.connection.send(status.to_bytes(8, "little"))


def _kill_all(selector: selectors.BaseSelector) -> None:
    for running in {key.data for key in selector.get_map().values() if key.data is not None}:
        with suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGKILL)


# The forks


def _adopt(path: str, fds: list[int], own_modules: list[str]) -> Callable[[], object]:
    """Take over the client's process state; return a callable that runs its program.

    Args:
        path: The server's socket; `warm_executable` is beside it.
        fds: The client's standard streams, its request and its other descriptors.
        own_modules: Modules of the tests, which the program is not to find.
    """
    os.setsid()
    *streams, text = fds[:4]
    os.lseek(text, 0, os.SEEK_SET)
    with os.fdopen(text) as file:
        request = json.load(file)
    targets = [0, 1, 2, *request["descriptors"]]
    above = max(targets) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in (*streams, *fds[4:])]
    for fd in (*streams, *fds[4:]):
        os.close(fd)
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.sched_setaffinity(0, request["processors"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # to be looked up in this environment
    sys.path.remove(str(ROOT / "tests"))
    sys.path[0:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    for name in own_modules:
        del sys.modules[name]
    kind, *arguments = request["arguments"]
    run = _run
    if kind == WHOLE:
        run = _run_whole
        kind, *arguments = arguments
    if kind == CHILDREN:
        sys.executable = str(Path(path).with_name("python"))
        kind, *arguments = arguments
    if kind == "-u":  # from torchrun
        for output in (sys.stdout, sys.stderr):
            if isinstance(output, io.TextIOWrapper):
                output.reconfigure(write_through=True)
        kind, *arguments = arguments
    if kind == "-m":
        sys.path.insert(0, request["folder"])
        sys.argv = arguments
        sys.modules.pop(arguments[0], None)
        module = functools.partial(runpy.run_module, arguments[0], run_name="__main__", alter_sys=True)
        return functools.partial(run, module)
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[1:]]
        code = compile(arguments[0], "<string>", "exec")
        return functools.partial(run, functools.partial(exec, code, vars(main)))
    sys.argv = [kind, *arguments]
    script = Path(kind) / "__main__.py" if Path(kind).is_dir() else Path(kind)
    sys.path.insert(0, str(script.parent.resolve()))
    main.__file__ = str(script)
    code = compile(script.read_bytes(), str(script), "exec")
    return functools.partial(run, functools.partial(exec, code, vars(main)))


def _run_whole(program: Callable[[], object]) -> None:
    program()


def _run(program: Callable[[], object]) -> None:
    """Run a program; have the last exit handler end this process with its exit code."""
    code: object = 1  # of uncaught exceptions

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        if code is KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code if isinstance(code, int) else code is not None)

    atexit.register(end)  # before the program registers its own: these run first
    try:
        program()
        code = 0
    except SystemExit as error:
        code = error.code
        raise
    except KeyboardInterrupt:
        code = KeyboardInterrupt
        raise
