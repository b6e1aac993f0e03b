"""``dist2 doctor``: its findings on this machine, on broken ones, and without extras."""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.programs import run
from support.warm_interpreter import warm_python

from dist2.cli.app import cli
from dist2.cli.doctor import HEALTHY, PROBLEMS, examine, machine, main, network, software
from dist2.cli.doctor.finding import Finding, Level
from dist2.runtime import control_groups

CHECKED = {
    "cores", "shared memory", "/dev/shm", "open files", "locked memory", "pidfd", "clock",
    "time of day", "loopback", "host name", "MASTER_ADDR", "Python", "torch", "dist2",
    "extra control-plane", "extra bench", "variables", "launcher", "GPUs",
}  # fmt: skip


def levels(findings: Iterable[Finding]) -> dict[str, Level]:
    return {each.check: each.level for each in findings}


def test_this_machine_can_run_dist2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--json"]) == HEALTHY
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is True
    assert {each["check"] for each in told["findings"]} >= CHECKED
    for each in told["findings"]:
        assert each["finding"]
        assert bool(each["consequence"]) == bool(each["remedy"]) == (each["level"] in ("warning", "problem"))


def test_problems_of_the_environment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"DIST2_SPIN_US": "x", "DIST2_TIMEOUTS": "3", "RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in {**variables, "MASTER_PORT": "99999"}.items():
        monkeypatch.setenv(name, value)
    ended = CliRunner().invoke(cli, ["doctor"])
    assert ended.exit_code == PROBLEMS
    assert "DIST2_SPIN_US must be a positive number, got 'x'" in ended.output
    assert "did you mean DIST2_TIMEOUT?" in ended.output
    assert "set MASTER_PORT to a number from 1 to 65535" in ended.output
    assert "only one of RANK and WORLD_SIZE is set" in ended.output


def test_the_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST2_SECRET", "a-secret-of-sixteen-bytes")
    (found,) = software.variables()
    assert "DIST2_SECRET" in found.found
    assert "sixteen" not in str(found)


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_a_build_of_torch_for_gpus_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    found = {each.check: each.remedy for each in software.gpus()}
    assert ("https://pytorch.org" in found.get("torch's build", "")) == bool(cuda)


def test_what_the_kernel_refuses_has_a_consequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_probed", lambda: ("Permission denied", "Operation not permitted"))
    assert levels(machine.shared_memory()) == {"shared memory": Level.PROBLEM, "ptrace": Level.WARNING}
    monkeypatch.setattr(machine, "_probed", lambda: ("mapped", "Operation not permitted"))
    assert levels(machine.shared_memory()) == {"shared memory": Level.OK, "ptrace": Level.WARNING}
    monkeypatch.setattr(machine, "_cpu_quota", lambda: 0.5)
    assert levels(machine.cores()) == {"cores": Level.WARNING}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 4096))
    monkeypatch.setenv("WORLD_SIZE", "500")
    files, _ = machine.limits()
    assert (files.level, files.remedy) == (Level.WARNING, "ulimit -n 2200")


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "50000 100000"}, 0.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a", {"cpu.max": "100000 100000", "a/cpu.max": "300000 100000"}, 1.0),
        ("0::/on/the/host", {"cpu.max": "200000 100000"}, 2.0),
        (
            "4:cpu,cpuacct:/pod\n2:memory:/pod\n0::/",
            {"cpu/pod/cpu.cfs_quota_us": "400000", "cpu/pod/cpu.cfs_period_us": "100000"},
            4.0,
        ),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)
def test_the_least_quota_of_the_control_groups_counts(
    groups: str,
    files: dict[str, str],
    quota: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()}
    monkeypatch.setattr(machine, "_read", lambda path: texts.get(path, ""))
    (tmp_path / "groups").write_text(groups)
    monkeypatch.setattr(control_groups, "MEMBERSHIP", tmp_path / "groups")
    assert machine._cpu_quota() == quota


def test_a_place_to_meet_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Finding:
        (finding,) = network.meeting_place()
        return finding

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert "accepts connections" in found().found
    assert found().level is Level.OK
    assert "does not listen yet" in found().found

    def refuse(*arguments: object, **named: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert found().level is Level.PROBLEM
    assert levels(network.host_name()) == {"host name": Level.WARNING}
    answers = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.wait(60) and [])
    monkeypatch.setattr(network, "RESOLVE_S", 0.05)
    assert "no answer of the resolver within 0.05 s" in found().found
    answers.set()


def test_a_check_that_fails_does_not_hide_the_others() -> None:
    def broken_check() -> Iterator[Finding]:
        yield Finding.ok("first", "fine")
        raise ValueError("unexpected")

    findings = examine([broken_check, network.loopback])
    assert levels(findings) == {"broken check": Level.SKIPPED, "loopback": Level.OK} | {"first": Level.OK}
    assert "ValueError: unexpected" in findings[1].found


def test_it_needs_the_core_installation_only() -> None:
    absent = ("click", "rich", "matplotlib", "starlette", "uvicorn", "cupy", "observability")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "from dist2.cli import main; sys.argv = ['dist2', *sys.argv[1:]]; main()"
    )
    ended = run([*warm_python(), "-c", code, "doctor"])
    assert ended.code in (HEALTHY, PROBLEMS), ended
    assert "shared memory" in ended.output
    assert not ended.errors
    for command, extra in (("why", "control-plane"), ("bench", "bench")):
        assert f"pip install 'dist2[{extra}]'" in run([*warm_python(), "-c", code, command]).errors
