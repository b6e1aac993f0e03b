"""The CPU data plane: shared memory inside a host, TCP between hosts.

Theory of operation: a signature selects an algorithm (``selection.py``), a pure function that returns a
schedule: steps as data (``algorithms/``). The schedule is compiled once for the group's memory and
channels, and the result is cached with the group's plan. A call runs it in the calling thread. Inside a
host the ranks copy and fold in shared memory between *fences*, barriers that also compare fingerprints
(``transport/boards/``). Between hosts they exchange messages over links, one for each pair of processes
(``transport/messages/``, ``transport/links/``). ``docs/socket-backend.md`` describes each part.
"""

from dist2.backends.socket.create import create
from dist2.runtime.signals import OnCtrlC, package_on_ctrl_c

__all__ = ["create"]

package_on_ctrl_c(__spec__, OnCtrlC.DEFER)
