"""Groups that the system refuses a rank the means to make: all ranks learn which, and may try again."""

from __future__ import annotations

import errno
import gc
import itertools
import mmap
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scarcity import no_descriptors
from support.stores import exit_code, forked, unused_port
from support.time_limits import in_time

import dist2
from dist2 import PeerLostError, PrefixStore, ResourceError, StoreError
from dist2.backends.socket.backend import SocketBackend
from dist2.backends.socket.transport.node import Node

LIMIT_S = 20.0
DONE = 7


def make(folder: Path, rank: int, attempt: str) -> dist2.ProcessGroup:
    store = dist2.FileStore(str(folder / "store"), -1, LIMIT_S)
    return dist2.new_group(
        "socket", LIMIT_S, store=PrefixStore(attempt, store), rank=rank, world_size=2, name=attempt
    )


def check_together(folder: Path, rank: int) -> None:
    """Make a group after all, and use it."""
    with make(folder, rank, "after") as pg:
        total = torch.ones(2)
        pg.all_reduce(total)
        assert total.tolist() == [2.0, 2.0]
        pg.barrier()


def in_rank_1(folder: Path, body: Callable[[], None]) -> int:
    """Run a function as rank 1 in a forked process."""

    def run() -> int:
        body()
        check_together(folder, 1)
        return DONE

    return forked(run)


def descriptors() -> list[str]:
    """Return what this process holds open."""
    gc.collect()  # tracebacks have held some
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(entry.readlink()).partition(":")[0])
    return sorted(found)


def refused(code: int) -> Callable[..., Any]:
    def call(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("module", "name", "code", "words"),
    [
        (
            os,
            "memfd_create",
            errno.EMFILE,
            r"memfd_create failed: .*\(EMFILE\): close .*ulimit -n.*DIST2_TRAN",
        ),
        (
            os,
            "memfd_create",
            errno.EPERM,
            r"memfd_create failed: .*seccomp.*dist2 doctor.*DIST2_TRANSPORT=tcp",
        ),
        (os, "ftruncate", errno.ENOSPC, r"ftruncate of shared memory to 40 GiB failed: .*\(ENOSPC\): raise"),
        (os, "ftruncate", errno.EFBIG, r"ftruncate .*\(EFBIG\): raise .*ulimit -f.*DIST2_TRANSPORT=tcp"),
        (mmap, "mmap", errno.ENOMEM, r"mmap of 40 GiB of address space .*\(ENOMEM\): raise .*ulimit -v"),
        (os, "fchmod", errno.EPERM, r"fchmod failed: .*seccomp.*DIST2_TRANSPORT=tcp"),
        (
            os,
            "sched_getaffinity",
            errno.ENOSYS,
            r"a system call failed: .*\(ENOSYS\): the kernel or a seccomp",
        ),
        (os, "eventfd", errno.EMFILE, r"eventfd2 failed: .*\(EMFILE\)"),
        (os, "pipe2", errno.ENFILE, r"pipe2 failed: .*\(ENFILE\): close .*fs.file-max"),
        (os, "pidfd_open", errno.EMFILE, r"pidfd_open failed: .*\(EMFILE\)"),
        (os, "pidfd_open", errno.ENOSYS, r"pidfd_open failed: .*\(ENOSYS\): the kernel or a seccomp profile"),
        (select, "epoll", errno.EMFILE, r"epoll_create1 failed: .*\(EMFILE\)"),
        (socket, "socket", errno.EMFILE, r"socket failed: .*\(EMFILE\)"),
    ],
)
def test_a_refused_system_call_is_named_here_and_to_the_others(
    module: Any, name: str, code: int, words: str, tmp_path: Path
) -> None:
    def body() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if name == "ftruncate":
                make_room = os.ftruncate
                patch.setattr(os, name, lambda fd, n: make_room(fd, n) if n < 1 << 30 else refused(code)())
            else:
                patch.setattr(module, name, refused(code))
            with pytest.raises(ResourceError, match=words) as caught:
                make(tmp_path, 1, "first")
            assert caught.value.errno == code
            assert caught.value.call in words
            held = descriptors()
            with pytest.raises(ResourceError, match=words):
                make(tmp_path, 1, "again")
            assert descriptors() == held

    child = in_rank_1(tmp_path, body)
    start = time.monotonic()
    for attempt in ("first", "again"):
        with pytest.raises(PeerLostError, match=rf"rank 1 gave up \(ResourceError: {words}"):
            make(tmp_path, 0, attempt)
    in_time(time.monotonic() - start, 4.0)
    check_together(tmp_path, 0)
    assert exit_code(child) == DONE


class _LastWordLost(dist2.HashStore):
    """A store whose server ends just before a rank has built its group."""

    def set(self, *arguments: Any) -> None:
        if "built" in arguments[0]:
            raise StoreError("the store has closed")
        super().set(*arguments)


def test_a_group_that_fails_last_of_all_closes_what_it_has_opened() -> None:
    def fail() -> None:
        with pytest.raises(StoreError, match="the store has closed"):
            dist2.new_group("socket", LIMIT_S, store=_LastWordLost(), rank=0, world_size=1)

    fail()
    held = descriptors()
    fail()
    assert descriptors() == held


def test_a_group_without_its_shared_memory_is_no_longer_known_to_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: SocketBackend, context: int) -> None:
        raise ResourceError("no room")

    node = Node()
    with monkeypatch.context() as patch:
        patch.setattr(SocketBackend, "_open_board", refuse)
        with pytest.raises(ResourceError, match="no room"):
            dist2.new_group("socket", LIMIT_S, store=dist2.HashStore(), rank=0, world_size=1, node=node)
    assert not node._fabric._mailboxes
    node.close()


@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open", "pipe2"])
def test_what_shared_memory_needs_is_not_needed_for_connections(name: str, tmp_path: Path) -> None:
    """So the remedy that the error names is one."""

    def use(rank: int, store: dist2.FileStore) -> None:
        with dist2.new_group(
            "socket", LIMIT_S, store=store, rank=rank, world_size=2, transport="tcp", name="connected"
        ) as pg:
            total = dist2.shared_empty(2).fill_(1.0)
            pg.all_reduce(total)
            assert total.tolist() == [2.0, 2.0]
            pg.split_by(color=0).shutdown()
            pg.barrier()

    def body() -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, name, refused(errno.EPERM))
            use(1, dist2.FileStore(str(tmp_path / "connected"), -1, LIMIT_S))
        return DONE

    child = forked(body)
    use(0, dist2.FileStore(str(tmp_path / "connected"), -1, LIMIT_S))
    assert exit_code(child) == DONE


def test_memory_that_python_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(spec: object) -> None:
        raise MemoryError

    monkeypatch.setattr("dist2.group.creation.build", lack)
    with pytest.raises(ResourceError, match="out of memory: raise the limits of memory") as caught:
        dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1)
    assert caught.value.errno == errno.ENOMEM


def test_a_thread_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(spec: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("dist2.group.creation.build", lack)
    with pytest.raises(ResourceError, match="can't start new thread: raise the limits of threads"):
        dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1)


def limit_that_spares(spare: int) -> int:
    """The limit of descriptors (the first number refused) below which so many numbers are free."""
    listed = tuple(Path("/proc/self/fd").iterdir())
    taken = {int(entry.name) for entry in listed if entry.exists()}  # not the one that listed them
    free = itertools.filterfalse(taken.__contains__, itertools.count())
    return next(itertools.islice(free, spare, None))


def test_any_number_of_missing_descriptors_is_told(tmp_path: Path) -> None:
    """Rank 1 lacks one descriptor less in each attempt, until the group is made."""
    most = 40

    def body() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        store = dist2.FileStore(str(tmp_path / "store"), -1, LIMIT_S)
        store.set("ready", "")
        for spare in range(most):
            prefix = PrefixStore(f"spare {spare}", store)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit_that_spares(spare), hard))
            try:
                pg = dist2.new_group("socket", LIMIT_S, store=prefix, rank=1, world_size=2)
            except ResourceError as error:
                assert error.errno == errno.EMFILE
                pg = None
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            store.set(f"made {spare}", "" if pg is None else "yes")
            if pg is not None:
                pg.shutdown()
                return
        raise AssertionError("never made")

    child = in_rank_1(tmp_path, body)
    store = dist2.FileStore(str(tmp_path / "store"), -1, LIMIT_S)
    for spare in range(most):
        try:
            dist2.new_group(
                "socket", LIMIT_S, store=PrefixStore(f"spare {spare}", store), rank=0, world_size=2
            ).shutdown()
        except PeerLostError as error:
            assert "EMFILE" in str(error)
        if store.get(f"made {spare}"):
            break
    assert spare > 3
    check_together(tmp_path, 0)
    assert exit_code(child) == DONE


def test_a_limit_of_address_space_is_told() -> None:
    def body() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), -1))
        try:
            dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1)
        except ResourceError as error:
            return DONE if "40 GiB" in str(error) and "ulimit -v" in str(error) else 1
        return 2

    assert exit_code(forked(body)) == DONE


@pytest.mark.usefixtures("descriptors")
def test_a_store_without_descriptors_says_so_and_works_again() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", refused(errno.EMFILE))
        with pytest.raises(ResourceError, match=r"socket failed: .*\(EMFILE\): close .*ulimit -n"):
            dist2.TCPStore("127.0.0.1", 1, timeout=LIMIT_S)
        with pytest.raises(ResourceError, match=r"socket failed: .*\(EMFILE\)"):
            dist2.TCPStore("127.0.0.1", 0, is_master=True)
    host = dist2.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting = threading.Thread(target=lambda: host.wait(["key"], LIMIT_S))
    waiting.start()
    while host._required_link().client._working is not None:  # the wait has not taken it yet
        time.sleep(0.001)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", refused(errno.EMFILE))
        with pytest.raises(ResourceError, match=r"socket failed: .*\(EMFILE\)"):
            host.set("key", "value")
    host.set("key", "value")
    waiting.join()
    host.close()


@pytest.mark.parametrize("left", [0, 3, 11])
def test_a_server_that_lacks_descriptors_says_so_at_once(left: int) -> None:
    """torch's server would try until the limit, or fail without the reason."""

    def run() -> int:
        kept = [os.dup(0) for _ in range(left)]
        with no_descriptors():
            for each in kept:
                os.close(each)
            start = time.monotonic()
            with pytest.raises(ResourceError, match=r"ulimit -n"):
                dist2.new_group(
                    "socket", LIMIT_S, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
                )
            in_time(time.monotonic() - start, 2)
        return DONE

    port = unused_port()
    assert exit_code(forked(run)) == DONE


def test_a_server_ends_with_its_clients_though_descriptors_lack_for_a_while() -> None:
    """It is not known meanwhile whether there are some."""
    master = dist2.TCPStore("127.0.0.1", 0, None, True, LIMIT_S, wait_for_workers=False, multi_tenant=True)
    client = dist2.TCPStore("127.0.0.1", master.port, None, False, LIMIT_S)
    serving = master._required_link().lease.server
    client.set("key", "value")
    with no_descriptors():
        assert not serving._is_idle()
        assert not serving.wait_until_idle(0.05)
    master.close()
    assert client.get("key") == b"value"
    client.close()
    assert serving.wait_until_idle(LIMIT_S)
