"""Stores under test: dist2's, torch's, and each across the other; and the check that they leave nothing."""

from __future__ import annotations

import gc
import os
import random
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

import dist2

TIMEOUT = timedelta(seconds=30)
"""Long, since torch's server now and then looks up addresses for seconds."""


def torch_server(world_size: int | None = None, *, use_libuv: bool = True) -> dist.TCPStore:
    """Return a store of torch's that serves, on loopback only: by itself it would listen everywhere."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        world_size,
        True,
        TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=use_libuv,
    )


def server(**options: Any) -> dist2.TCPStore:
    """Return a store of ours that serves."""
    return dist2.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, **options)


def unused_port() -> int:
    """Return a port without a listener a moment ago, outside of the kernel's range of ephemeral ports."""
    asked_for_any = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(asked_for_any // 2, asked_for_any)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@attrs.frozen
class Kind:
    """A kind of store, and its properties.

    Attributes:
        name: Shown in the test's id.
        make: Returns a new one, given a folder, and the objects that must live as long.
        own_keys: Number of keys that it uses internally.
        queues: It has queues.
        lists: It can list its keys.
        prompt: It notices timeouts and changes within milliseconds.
        holds_gil: Some of its calls keep Python's lock while they wait, so that a server in the same
            process cannot answer them.
    """

    name: str
    make: Callable[[Path], tuple[Any, ...]]
    own_keys: int = 0
    queues: bool = True
    lists: bool = True
    prompt: bool = True
    holds_gil: bool = False

    def __str__(self) -> str:
        return self.name


def _join(kind: Any, host: Any) -> tuple[Any, Any]:
    return kind("127.0.0.1", host.port, timeout=TIMEOUT, wait_for_workers=False), host


OURS = (
    Kind("hash", lambda _: (dist2.HashStore(),)),
    Kind("file", lambda folder: (dist2.FileStore(str(folder / "file"), 1),), own_keys=1, queues=False),
    Kind("tcp", lambda _: (server(),)),
    Kind("tcp_joined", lambda _: _join(dist2.TCPStore, server())),
    Kind("tcp_on_torchs", lambda _: _join(dist2.TCPStore, torch_server())),
    Kind("prefix_hash", lambda _: (dist2.PrefixStore("p", dist2.HashStore()),)),
    Kind("prefix_tcp", lambda _: (dist2.PrefixStore("p", server()),)),
    Kind("prefix_prefix", lambda _: (dist2.PrefixStore("p", dist2.PrefixStore("q", dist2.HashStore())),)),
    Kind("prefix_torchs_hash", lambda _: (dist2.PrefixStore("p", dist.HashStore()),)),
    Kind("prefix_torchs_tcp", lambda _: (dist2.PrefixStore("p", torch_server()),)),
    Kind(
        "torchs_prefix_hash",
        lambda _: (dist.PrefixStore("p", dist2.HashStore()),),
        queues=False,
        lists=False,
    ),
    Kind("torchs_prefix_tcp", lambda _: (dist.PrefixStore("p", server()),), queues=False, lists=False),
)
"""dist2's stores, also below and above torch's."""

TORCHS = (
    Kind("torchs_hash", lambda _: (dist.HashStore(),)),
    Kind(
        "torchs_file",
        lambda folder: (dist.FileStore(str(folder / "file"), 1),),
        own_keys=1,
        queues=False,
        prompt=False,
    ),
    Kind("torchs_tcp", lambda _: (torch_server(),)),
    Kind("torchs_tcp_on_ours", lambda _: _join(dist.TCPStore, server()), holds_gil=True),
    Kind("torchs_prefix_torchs_hash", lambda _: (dist.PrefixStore("p", dist.HashStore()),)),
)
"""torch's stores, the reference for correct results, and torch's client on our server"""


class Held:
    """A store that can be let go of while others (pytest's fixtures) still hold this.

    Attributes of the store are attributes of this.
    """

    def __init__(self, made: tuple[Any, ...]) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made[0], name)

    def let_go(self) -> None:
        self._made = ()


def _resources() -> list[str]:
    found = [thread.name for thread in threading.enumerate() if thread.name.startswith("dist2-")]
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if "socket:" in target or "anon_inode:" in target:
            found.append(f"descriptor {entry.name} {target.split(':')[0]}")
    return sorted(found)


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Check that no thread, socket or poll set is left that was not there before."""
    before = _resources()
    yield
    deadline = time.monotonic() + 5
    while True:
        dist2.HashStore()  # making a store searches for objects that C++ has released
        left = [each for each in _resources() if each not in before]
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.005)
        gc.collect()


def forked(body: Callable[[], int]) -> int:
    """Run a function in a forked child, whose exit code it returns; return the child's process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: it is the point
        child = os.fork()
    if child == 0:
        code = 99
        try:
            code = body()
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    """Wait for a child to end, and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
