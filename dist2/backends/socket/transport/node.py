"""`Node`: what one process (or, in tests, one rank that is a thread) brings to all its groups.

Its links to other processes and its share of the host's memory belong here, not to groups: a thousand
groups open nothing that the first did not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.base import Endpoint
from dist2.backends.socket.transport.board import Board, Member, default_spins
from dist2.backends.socket.transport.fabric import Card, Fabric
from dist2.backends.socket.transport.host import host_id
from dist2.backends.socket.transport.shared_memory import SharedHost
from dist2.config import Config


class Node:
    """Links and shared memory of one process.

    Attributes:
        fabric: The links.
        shared: Memory shared inside the host; None where this machine cannot.
    """

    _process: Node | None = None
    _process_pid = 0
    _lock = threading.Lock()

    def __init__(self, host: str = "127.0.0.1", config: Config | None = None) -> None:
        config = config or Config.from_environment()
        self.fabric = Fabric(host, job_id=config.job_id)
        self.shared = SharedHost() if shared_memory.available() else None
        self._spin_us = config.spin_us
        self._host_id = config.host_id or host_id()
        self._users = 0
        self._closed = False
