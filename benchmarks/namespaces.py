"""Hosts on one machine: network namespaces joined by veth, each with an address and an interface.

    with Hosts(2) as hosts:
        process = hosts.start(1, ["ping", "-c1", hosts.address(0)])

Nothing has a name that could be left behind: a namespace lives as long as its keeper, a ``cat`` that ends
when this process does, however it ends; interfaces go with their namespace.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

INTERFACE = "wire"
_COMMANDS = ("ip", "tc", "unshare", "nsenter")
_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
"""The setting of the current namespace."""


class NoPrivilegeError(RuntimeError):
    """Namespaces cannot be made here; says why."""


class Namespace:
    """One network namespace."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        self._wait_until_apart()
        self.run("ip", "link", "set", "lo", "up")

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def _wait_until_apart(self) -> None:
        ours = Path("/proc/self/ns/net").readlink()
        for _ in range(500):
            if self._keeper.poll() is not None:
                raise NoPrivilegeError("unshare --net is refused: it takes root")
            if Path(f"/proc/{self.pid}/ns/net").readlink() != ours:
                return
            time.sleep(0.01)
        raise NoPrivilegeError("unshare --net does not come to an end")

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs inside."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *command]

    def run(self, *command: str) -> None:
        """Run a command inside.

        Raises:
            NoPrivilegeError: It fails.
        """
        done = subprocess.run(self.command(*command), capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoPrivilegeError(f"{' '.join(command)}: {done.stderr.strip()}")

    def close(self) -> None:
        """End the keeper: the namespace goes with it, once nothing runs inside."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        self._keeper.wait()


class Hosts:
    """Several namespaces that reach each other; leaving it ends the processes inside and removes them.

    Args:
        count: How many hosts: two are joined directly, more by a bridge.
        delay_ms: Delay of the frames of a host. By netem where the kernel has it, else by
            `delay_line.py`.
        congestion: The congestion control that TCP has there, such as ``"cubic"``; empty: the machine's own.

    Raises:
        NoPrivilegeError: The machine does not let this user make them.
    """

    def __init__(self, count: int, delay_ms: float = 0.0, congestion: str = "") -> None:
        self.count = count
        self.delay_ms = delay_ms
        self.congestion = congestion
        self.delayed_by = ""
        self.namespaces: list[Namespace] = []
        self._stack = ExitStack()
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            self._make(stack)
            stack.callback(self._end_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _make(self, stack: ExitStack) -> None:
        _check_commands()
        for _ in range(self.count):
            self.namespaces.append(Namespace())
            stack.callback(self.namespaces[-1].close)
        if self.count == 2:
            first, second = self.namespaces
            _join(first, INTERFACE, second, INTERFACE)
        else:
            self._bridge(stack)
        if self.delay_ms:
            self._delay(stack)
        for number, namespace in enumerate(self.namespaces):
            self._raise_interface(namespace, number)

    def _bridge(self, stack: ExitStack) -> None:
        bridge = Namespace()
        stack.callback(bridge.close)
        bridge.run("ip", "link", "add", "bridge", "type", "bridge")
        bridge.run("ip", "link", "set", "bridge", "up")
        for number, namespace in enumerate(self.namespaces):
            port = f"port{number}"
            _join(namespace, INTERFACE, bridge, port)
            bridge.run("ip", "link", "set", port, "master", "bridge")
            bridge.run("ip", "link", "set", port, "up")

    def _raise_interface(self, namespace: Namespace, number: int) -> None:
        namespace.run("ip", "address", "add", f"{self.address(number)}/24", "dev", INTERFACE)
        namespace.run("ip", "link", "set", INTERFACE, "up")
        if self.congestion:
            namespace.run("sh", "-c", f"echo {shlex.quote(self.congestion)} > {_CONGESTION}")

    def _delay(self, stack: ExitStack) -> None:
        """Delay the frames of all hosts."""
        netem = ("tc", "qdisc", "add", "dev", INTERFACE, "root", "netem", "delay", f"{self.delay_ms}ms")
        try:
            for namespace in self.namespaces:
                namespace.run(*netem)
            self.delayed_by = "netem"
            return
        except NoPrivilegeError:  # this kernel has none
            for namespace in self.namespaces[: 1 if self.count == 2 else None]:  # the other end goes as well
                namespace.run("ip", "link", "delete", INTERFACE)
        pids = [str(namespace.pid) for namespace in self.namespaces]
        script = str(Path(__file__).with_name("delay_line.py"))
        line = subprocess.Popen(
            [sys.executable, script, str(self.delay_ms / 1000), *pids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(line.communicate)
        assert line.stdout is not None  # it is a pipe
        if line.stdout.readline().strip() != "ready":
            raise NoPrivilegeError("neither netem nor tap interfaces can be used here")
        self.delayed_by = "a delay line in user space"

    def address(self, host: int) -> str:
        """Return a host's address."""
        return f"10.231.77.{host + 1}"

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a process on a host; its output can be read from here."""
        process = subprocess.Popen(
            self.namespaces[host].command(*command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=None if environment is None else dict(environment),
        )
        self._running.append(process)
        return process

    def _end_all(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _join(first: Namespace, name: str, second: Namespace, other: str) -> None:
    first.run("ip", "link", "add", name, "type", "veth", "peer", "name", other, "netns", str(second.pid))


def _check_commands() -> None:
    for command in _COMMANDS:
        if subprocess.run(["which", command], capture_output=True, check=False).returncode:
            raise NoPrivilegeError(f"{command} is not installed")
    if os.geteuid() != 0:
        raise NoPrivilegeError("it takes root: run it as root, or under unshare --net --map-root-user")
