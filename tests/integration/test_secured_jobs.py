"""Whole groups with a secret, and with TLS: everything works as without."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from support import certificates
from support.ranks import TENANTS, Tenant, run_ranks

from dist2 import ProcessGroup
from dist2.runtime.shared_memory import Arena


@pytest.fixture(params=["secret", "tls", "both"])
def _secured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if request.param != "tls":
        monkeypatch.setenv("DIST2_SECRET", "the secret of these tests")
    if request.param != "secret":
        for name, path in certificates.make(tmp_path / "member").variables.items():
            monkeypatch.setenv(name, path)


def work(pg: ProcessGroup) -> list[float]:
    small, large = torch.full((4,), float(pg.rank())), torch.ones(1 << 20)
    pg.all_reduce(small)
    pg.all_reduce(large)
    other = 1 - pg.rank()
    if pg.rank() == 0:
        pg.send(torch.arange(300_000.0), other)
    else:
        got = torch.zeros(300_000)
        pg.recv(got, other)
        assert torch.equal(got, torch.arange(300_000.0))
    pg.barrier()
    return [small[0].item(), large[-1].item()]


@pytest.mark.usefixtures("_secured")
@pytest.mark.parametrize("tenant", [each for each in TENANTS if each.name in ("tcp", "shm")], ids=str)
def test_a_secured_job_works(tenant: Tenant) -> None:
    assert run_ranks(2, work, tenant) == [[1.0, 2.0]] * 2


def test_shared_memory_is_its_owners_alone() -> None:
    arena = Arena(1 << 16)
    try:
        assert stat.S_IMODE(os.fstat(arena.fd).st_mode) == 0o600
    finally:
        arena.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_shared_memory() -> None:
    arena = Arena(1 << 16)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.close(os.open(f"/proc/{parent}/fd/{arena.fd}", os.O_RDWR))
        except PermissionError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    arena.close()
