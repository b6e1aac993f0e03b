"""Prometheus from Debian's package, run on files of a test."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

from support import debian

ANSWER_S = 30.0


def require() -> None:
    """Skip the test where there is no Prometheus and none can be installed."""
    debian.require("prometheus", "prometheus", "promtool")


def promtool(*arguments: str, folder: Path) -> None:
    """Run promtool, which must find nothing wrong."""
    done = subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


class Prometheus:
    """A running server.

    Args:
        url: Where its API is.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def _get(self, path: str) -> Any:
        with urlopen(f"{self._url}/api/v1/{path}", timeout=10) as response:
            return json.load(response)["data"]

    def query(self, promql: str) -> dict[str, float]:
        """Return the value of each sample, by its labels as text: ``rank=2``."""
        rows = self._get(f"query?query={quote(promql)}")["result"]
        return {
            ",".join(f"{name}={value}" for name, value in sorted(row["metric"].items())): float(
                row["value"][1]
            )
            for row in rows
        }

    def label_values(self, series: str, label: str) -> list[str]:
        """Return the values of a label in the series of a selector."""
        values: list[str] = self._get(f"label/{label}/values?match[]={quote(series)}")
        return values

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """Return the labels of the alerts that fire, by their name."""
        found: dict[str, list[dict[str, str]]] = {}
        for alert in self._get("alerts")["alerts"]:
            if alert["state"] == "firing":
                labels = {**alert["labels"], "summary": alert["annotations"].get("summary", "")}
                found.setdefault(labels["alertname"], []).append(labels)
        return found


def until(read: Callable[[], Any], right: Callable[[Any], bool]) -> Any:
    """Return the reading once it is right."""
    end = time.monotonic() + ANSWER_S
    while True:
        value = read()
        if right(value):
            return value
        assert time.monotonic() < end, f"still {value}"
        time.sleep(0.2)


@contextmanager
def running(folder: Path) -> Iterator[Prometheus]:
    """Run a server on the ``prometheus.yml`` of a folder."""
    log = folder / "prometheus.log"
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with log.open("w") as output:
            server = subprocess.Popen(
                [
                    "prometheus",
                    "--config.file=prometheus.yml",
                    "--storage.tsdb.path=data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            if _is_ready(server, f"http://127.0.0.1:{port}"):
                yield Prometheus(f"http://127.0.0.1:{port}")
                return
        finally:
            server.terminate()
            server.wait(20)
    raise AssertionError(f"Prometheus did not start: {log.read_text()[-2000:]}")


def _is_ready(server: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until a server answers; False if it has ended: another process may have taken the port."""
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urlopen(f"{url}/-/ready", timeout=1):
                return True
        except OSError:
            time.sleep(0.05)
    return False
