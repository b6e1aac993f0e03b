"""Programs from Debian's packages, installed where a test needs a real server or browser."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest

DOWNLOAD_S = 120.0
"""Chromium takes 5 s, and then 13 s to be unpacked; Prometheus takes less."""
NEEDED_S = 360
"""The timeout of a test that may have to wait for another package, install its own, and run."""


def require(package: str, *programs: str) -> None:
    """Install a package if one of its programs is missing; skip the test if that cannot be done."""
    if why := _why_missing(package, programs):
        pytest.skip(f"needs Debian's package {package}: {why}")


@cache
def _why_missing(package: str, programs: tuple[str, ...]) -> str:
    """Install a package where programs are missing; return why that cannot be done, or nothing."""
    if all(map(shutil.which, programs)):
        return ""
    if shutil.which("apt-get") is None:
        return "there is no apt-get to install it with"
    if os.geteuid() != 0:
        return f"only root may install it: apt-get install {package}"
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the other workers
        return "" if all(map(shutil.which, programs)) else _install(package)


def _install(package: str) -> str:
    """Download within the time, then install; return the reason if that fails.

    Only the download has a limit, because it may be stopped at any moment: dpkg would leave a package half
    configured.
    """
    ends_s = time.monotonic() + DOWNLOAD_S
    install = ["install", "-y", "-qq", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=60", package]
    for command in (["update", "-qq"], [*install, "--download-only"], [*install, "--no-download"]):
        try:
            done = subprocess.run(
                ["apt-get", *command],
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                capture_output=True,
                text=True,
                timeout=None if "--no-download" in command else max(1.0, ends_s - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"apt-get {command[0]} took longer than {DOWNLOAD_S:.0f} s"
        if done.returncode:
            return f"apt-get {command[0]} failed: {done.stderr.strip()[-300:]}"
    return ""
