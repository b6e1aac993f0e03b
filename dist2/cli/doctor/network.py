"""Checks of the network: loopback, the name of this host, the place where ranks meet."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator

from dist2.cli.doctor.finding import Finding
from dist2.runtime.config import environment_value

RESOLVE_S = 5.0
CONNECT_S = 3.0


def loopback() -> Iterator[Finding]:
    """Whether processes of this host can connect."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), CONNECT_S).close()
    except OSError as error:
        yield Finding.problem(
            "loopback",
            f"127.0.0.1: {error}",
            "ranks of one host cannot meet",
            "bring up the interface lo: ip link set lo up",
        )
    else:
        yield Finding.ok("loopback", "127.0.0.1 accepts connections")


def host_name() -> Iterator[Finding]:
    """Whether the name of this host has an address."""
    name = socket.gethostname()
    addresses = _addresses(name)
    if isinstance(addresses, str):
        yield Finding.warning(
            "host name",
            f"{name!r}: {addresses}",
            "other hosts cannot use this name as MASTER_ADDR, and Gloo may not start",
            "add the name to the DNS or /etc/hosts, or set MASTER_ADDR and DIST2_HOST to addresses",
        )
    else:
        yield Finding.ok("host name", f"{name} is {', '.join(addresses)}")


def meeting_place() -> Iterator[Finding]:
    """Whether the store at MASTER_ADDR and MASTER_PORT can be reached."""
    host, port = environment_value("MASTER_ADDR"), environment_value("MASTER_PORT")
    if not host or not port:
        yield Finding.ok("MASTER_ADDR", "not set: no place of meeting to check")
        return
    place, failure = f"{host}:{port}", "env:// fails: the ranks cannot meet"
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        yield Finding.problem("MASTER_ADDR", place, failure, "set MASTER_PORT to a number from 1 to 65535")
        return
    addresses = _addresses(host)
    if isinstance(addresses, str):
        remedy = "set MASTER_ADDR to an address, or to a name that this host resolves"
        yield Finding.problem("MASTER_ADDR", f"{place}: {addresses}", failure, remedy)
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except ConnectionRefusedError:
        yield Finding.ok("MASTER_ADDR", f"{place}: the host answers; rank 0 does not listen yet")
    except OSError as error:
        remedy = "open the port in the firewall, or name an address of rank 0 that this host reaches"
        yield Finding.problem("MASTER_ADDR", f"{place}: {error}", failure, remedy)
    else:
        yield Finding.ok("MASTER_ADDR", f"{place} accepts connections")


CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (loopback, host_name, meeting_place)


def _addresses(name: str) -> list[str] | str:
    """Return the addresses of a name, or the reason for none, within `RESOLVE_S`: a resolver may block."""
    answers: queue.SimpleQueue[list[str] | str] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answers.put(sorted({str(each[4][0]) for each in found}))
        except OSError as error:
            answers.put(error.strerror or str(error))
        except UnicodeError as error:
            answers.put(str(error))

    threading.Thread(target=resolve, name="dist2-doctor-resolver", daemon=True).start()
    try:
        return answers.get(timeout=RESOLVE_S)
    except queue.Empty:
        return f"no answer of the resolver within {RESOLVE_S:g} s"
