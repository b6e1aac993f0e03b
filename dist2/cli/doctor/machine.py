"""Checks of the machine: cores, memory that processes share, limits, clocks."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dist2.cli.doctor.finding import Finding
from dist2.runtime.config import environment_value
from dist2.runtime.control_groups import control_groups
from dist2.runtime.shared_memory import INSTEAD

SMALL_SHM_BYTES = 64 << 20
"""The size of ``/dev/shm`` in many containers."""
FEW_FILES = 1024
FILES_A_RANK = 4
OTHER_FILES = 200
SLOW_CLOCK_NS = 250.0
CHILD_S = 20.0

_PROBE = """
import ctypes, os, sys
pid, fd, address = map(int, sys.argv[1:])
class Stretch(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))
try:
    os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))
    print("mapped")
except OSError as error:
    print(error.strerror)
found = ctypes.create_string_buffer(8)
here, there = Stretch(ctypes.addressof(found), 8), Stretch(address, 8)
libc = ctypes.CDLL(None, use_errno=True)
count = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
print("read" if count == 8 and found.raw == b"dist2 ok" else os.strerror(ctypes.get_errno()))
"""
"""A child process that opens shared memory of this process and reads its memory, as ranks do."""


def cores() -> Iterator[Finding]:
    """The cores that this process may use, and the ranks that share them."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _cpu_quota()
    found = f"{usable} of {present} cores usable" + (f", quota of {quota:g} cores" if quota else "")
    ranks = int(environment_value("LOCAL_WORLD_SIZE") or 0)
    available = min(usable, quota) if quota else usable
    if ranks > available:
        yield Finding.warning(
            "cores",
            f"{found}, {ranks} ranks on this host",
            "ranks share cores: they do not poll, and each operation waits for the scheduler",
            "start at most one rank for each core, or widen affinity and quota",
        )
    elif quota and quota < usable:
        yield Finding.warning(
            "cores",
            found,
            "the kernel stops ranks that have used up the quota: operations then take tens of milliseconds",
            "give the container as many cores as it may see",
        )
    else:
        yield Finding.ok("cores", found)


def shared_memory() -> Iterator[Finding]:
    """Memory that processes share: anonymous files, opened by another process; and looks into processes."""
    if platform.machine() not in ("x86_64", "AMD64"):
        yield Finding.problem(
            "shared memory",
            f"processor {platform.machine()}",
            "ranks of one host use TCP; dist2 is neither built for nor tested on this processor",
            "use x86-64",
        )
        return
    try:
        mapped, read = _probed()
    except OSError as error:
        yield Finding.problem(
            "shared memory",
            f"memfd_create: {error.strerror}",
            "ranks of one host cannot share memory",
            f"allow memfd_create(2) in the seccomp profile; meanwhile {INSTEAD}",
        )
        return
    if mapped == "mapped":
        yield Finding.ok("shared memory", "memfd works, and another process can open it")
    else:
        yield Finding.problem(
            "shared memory",
            f"another process of this user cannot open a memfd: {mapped}",
            "ranks of one host cannot share memory",
            f"allow access to /proc/PID/fd (hidepid, seccomp); meanwhile {INSTEAD}",
        )
    scope = _read("/proc/sys/kernel/yama/ptrace_scope") or "absent"
    if read == "read":
        yield Finding.ok("ptrace", f"processes may look into each other (Yama's scope: {scope})")
    else:
        yield Finding.warning(
            "ptrace",
            f"process_vm_readv: {read} (Yama's scope: {scope})",
            "py-spy cannot take the stack of a rank that does not answer",
            "sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE for the container",
        )


def dev_shm() -> Iterator[Finding]:
    """The size of ``/dev/shm``, which dist2 does not use but its neighbours do."""
    try:
        there = os.statvfs("/dev/shm")
    except OSError as error:
        yield _small_shm(f"/dev/shm: {error.strerror}")
        return
    size, free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
    found = f"{size >> 20} MiB, {free >> 20} MiB free; not used by dist2"
    yield Finding.ok("/dev/shm", found) if free > SMALL_SHM_BYTES else _small_shm(found)


def _small_shm(found: str) -> Finding:
    return Finding.warning(
        "/dev/shm",
        found,
        "workers of torch's DataLoader and NCCL may run out of shared memory",
        "start the container with --shm-size=1g or --ipc=host",
    )


def limits() -> Iterator[Finding]:
    """Open files and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = int(environment_value("WORLD_SIZE") or 0)
    needed = max(FEW_FILES, FILES_A_RANK * ranks + OTHER_FILES)
    if soft != resource.RLIM_INFINITY and soft < needed:
        of_job = f"; {ranks} ranks may need {needed}" if ranks else ""
        yield Finding.warning(
            "open files",
            f"{soft} allowed, up to {hard}{of_job}",
            "groups of many ranks cannot be made: two to four descriptors for each other rank",
            f"ulimit -n {needed}",
        )
    else:
        yield Finding.ok("open files", f"{_amount(soft)} allowed")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unit = "" if locked == resource.RLIM_INFINITY else " bytes"
    yield Finding.ok("locked memory", f"{_amount(locked)}{unit} allowed; only NCCL over InfiniBand needs it")


def deaths() -> Iterator[Finding]:
    """Whether the end of a process is seen at once."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        yield Finding.problem(
            "pidfd",
            f"pidfd_open: {error.strerror}",
            "ranks of one host cannot share memory, and dist2.launch.local cannot start ranks",
            f"Linux 5.3 or newer, and a seccomp profile that allows pidfd_open(2); meanwhile {INSTEAD}",
        )
    else:
        yield Finding.ok("pidfd", f"works (Linux {platform.release()})")


def clocks() -> Iterator[Finding]:
    """The cost of a reading, and whether the time of day is synchronized."""
    source = _read("/sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    cost_ns = min(_reading_ns() for _ in range(5))
    found = f"source {source}, {cost_ns:.0f} ns a reading"
    if cost_ns > SLOW_CLOCK_NS:
        yield Finding.warning(
            "clock",
            found,
            "each operation reads the clock several times: small operations take a few microseconds longer",
            "a kernel and hypervisor with tsc or kvm-clock as clock source",
        )
    else:
        yield Finding.ok("clock", found)
    if _is_synchronized():
        yield Finding.ok("time of day", "synchronized")
    else:
        yield Finding.warning(
            "time of day",
            "the kernel says that it is not synchronized",
            "time stamps in the logs of several hosts differ, and certificates may seem expired; "
            "timeouts and traces are not affected",
            "start chrony or systemd-timesyncd on the host",
        )


CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    cores,
    shared_memory,
    dev_shm,
    limits,
    deaths,
    clocks,
)


def _probed() -> tuple[str, str]:
    """Return the outcomes of the child: of opening a memfd, and of reading memory.

    Raises:
        OSError: A memfd cannot be created here.
    """
    known = ctypes.create_string_buffer(b"dist2 ok")
    fd = os.memfd_create("dist2-doctor", os.MFD_CLOEXEC)
    try:
        command = [sys.executable, "-I", "-S", "-c", _PROBE]
        numbers = [os.getpid(), fd, ctypes.addressof(known)]
        child = subprocess.run(
            [*command, *map(str, numbers)], capture_output=True, text=True, timeout=CHILD_S, check=True
        )
    finally:
        os.close(fd)
    mapped, read = child.stdout.splitlines()
    return mapped, read


def _cpu_quota() -> float | None:
    """Return the number of cores that this process may use by its control groups; None without a quota."""
    quotas = []
    for group, version in control_groups("cpu"):
        files = ("max",) if version == 2 else ("cfs_quota_us", "cfs_period_us")
        texts = " ".join(_read(f"{group}/cpu.{file}") for file in files).split()
        if len(texts) == 2 and all(each.isdigit() for each in texts):
            quotas.append(int(texts[0]) / int(texts[1]))
    return min(quotas, default=None)


def _reading_ns(readings: int = 2000) -> float:
    began_ns = time.perf_counter_ns()
    for _ in range(readings):
        time.monotonic_ns()
    return (time.perf_counter_ns() - began_ns) / readings


def _is_synchronized() -> bool:
    """Whether the kernel's clock is disciplined: adjtimex(2) without a change, which everyone may call."""
    state = ctypes.create_string_buffer(512)  # larger than struct timex; zeros: no change
    return ctypes.CDLL(None).adjtimex(state) not in (-1, 5)  # TIME_ERROR


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _read(path: str) -> str:
    """Return the text of a file of the kernel; empty text if it is absent."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
