"""A running job leaves nothing open on its host that another user can access."""

from __future__ import annotations

import ctypes
import os
import stat
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import pytest
import torch
from support.launched_ranks import answers, job, launched
from support.processes import answers_of, started

import dist2
from dist2 import ProcessGroup

NOBODY = 65534
_PR_SET_DUMPABLE = 4


@attrs.frozen
class Running:
    """A rank that stands still in the middle of its job."""

    pid: int
    pipe: Connection

    def descriptors(self) -> dict[Path, str]:
        """Return the process's open files, and the object behind each."""
        return {file: str(file.readlink()) for file in Path(f"/proc/{self.pid}/fd").iterdir()}


def stand_still(pg: ProcessGroup, pipe: Connection) -> None:
    """Have used all that opens something, and wait."""
    shared = dist2.shared_empty(1 << 20)
    for tensor in (torch.ones(4), torch.ones(1 << 20), shared.fill_(1)):
        pg.all_reduce(tensor)
    got, other = torch.zeros(300_000), 1 - pg.rank()
    sent = pg.isend(torch.ones(300_000), other)
    pg.recv(got, other)
    sent.wait()
    pipe.send(os.getpid())
    pipe.recv()
    pg.barrier()


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Running]]:
    with job(launched(2, DIST2_SECRET="the secret of these tests"), stand_still) as pipes:
        yield [Running(pipe.recv(), pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send("go on")
        assert [answer for answer, _ in answers(pipes)] == [None, None]


def test_nothing_has_a_name(ranks: list[Running]) -> None:
    assert not [file for file in Path("/dev/shm").iterdir() if "dist2" in file.name]
    named = {fields[6]: fields[7] for fields in unix_sockets() if len(fields) > 7}
    for rank in ranks:
        open_sockets = {what[8:-1] for what in rank.descriptors().values() if what.startswith("socket:[")}
        assert not {named[inode] for inode in open_sockets & named.keys()}, "others can reach it"
        files = [what for what in rank.descriptors().values() if "dist2" in what]
        assert files
        assert all(what == "/memfd:dist2 (deleted)" for what in files)


def unix_sockets() -> list[list[str]]:
    return [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]


def test_memory_is_its_owners_alone(ranks: list[Running]) -> None:
    for rank in ranks:
        modes = [file.stat().st_mode for file, what in rank.descriptors().items() if "memfd:dist2" in what]
        assert len(modes) >= 2, "that of the fabric, and that of shared tensors"
        assert {stat.S_IMODE(mode) for mode in modes} == {0o600}


def test_ports_listen_on_loopback_alone(ranks: list[Running]) -> None:
    listening = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening[fields[9]] = fields[1].partition(":")[0]
    for rank in ranks:
        sockets = {what[8:-1] for what in rank.descriptors().values() if what.startswith("socket:[")}
        where = {listening[inode] for inode in sockets & listening.keys()}
        assert where == {"0100007F"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_opens_nothing_of_it(ranks: list[Running]) -> None:
    """Neither its memory nor its doorbell, nor the list of its descriptors."""
    files = [file for rank in ranks for file in rank.descriptors()]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = sum(map(_opens, files)) + sum(_opens(Path(f"/proc/{rank.pid}/mem")) for rank in ranks)
        finally:
            os._exit(min(code, 255))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _opens(file: Path) -> bool:
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        try:
            os.close(os.open(file, flags | os.O_NONBLOCK))
        except OSError as error:
            if not isinstance(error, PermissionError):
                return True
        else:
            return True
    return False


def closed(pipe: Connection, folder: Path, rank: int) -> None:
    """Be a rank after a change of user, whose descriptors no other process of that user can open."""
    with dist2.new_group(
        "socket", store=dist2.FileStore(str(folder / f"alone{rank}"), 1), rank=0, world_size=1
    ):
        pass  # this user may have no access to modules that are imported first later
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    assert ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0) == 0
    tensor = torch.ones(3)
    with dist2.new_group(
        "socket", 20, store=dist2.FileStore(str(folder / "both"), 2), rank=rank, world_size=2
    ) as pg:
        pg.all_reduce(tensor)
    pipe.send(tensor.tolist())


def closed_late(pipe: Connection, folder: Path, rank: int) -> None:
    """Be a rank; as rank 1, close oneself to others after one has said that they can share memory."""
    alone = dist2.FileStore(str(folder / f"alone{rank}"), 1)
    with dist2.new_group("socket", store=alone, rank=0, world_size=1):
        pass
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_PR_SET_DUMPABLE, 1) == 0
    with dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1):
        assert rank == 0 or prctl(_PR_SET_DUMPABLE, 0) == 0
        both = dist2.FileStore(str(folder / "both"), 2)
        with pytest.raises(dist2.Dist2Error) as caught:
            dist2.new_group("socket", 20, store=both, rank=rank, world_size=2)
    pipe.send(str(caught.value))
    pipe.recv()


def test_a_rank_whose_memory_may_not_be_opened_is_not_called_dead() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        with started(closed_late, (Path(folder), 0), (Path(folder), 1)) as pipes:
            for said in answers_of(pipes):
                assert "cannot be opened: Permission denied" in said
                assert "DIST2_TRANSPORT=tcp" in said


def test_ranks_that_cannot_open_each_others_memory_use_connections() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the other user has no access to that of pytest
        Path(folder).chmod(0o777)
        with started(closed, (Path(folder), 0), (Path(folder), 1)) as pipes:
            assert answers_of(pipes) == [[2.0] * 3] * 2
