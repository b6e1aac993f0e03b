"""Any MPI that mpi4py finds, as a dist2 backend: MPI moves the tensors, under dist2's objects and errors.

For machines whose network MPI knows better than TCP: InfiniBand, Slingshot, Omni-Path. Ranks are processes of
one MPI job. A group has a communicator, and a control group (see `Controlled`).

Each collective waits until all ranks have called it, by a nonblocking agreement that can time out and be
aborted; then MPI's blocking collective moves the data (`communicator`, `collectives`). So a missing rank and
a mismatch raise before anything moves, as on the socket backend. Once it moves, nothing can break it off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dist2.backends.base import GroupSpec
from dist2.backends.mpi.communicator import Communicator
from dist2.backends.mpi.messages import Messages
from dist2.backends.socket import create as create_socket
from dist2.backends.socket.backend import SocketBackend
from dist2.backends.socket.controlled import CONTROL_OPTIONS, shut_down_on_failure
from dist2.errors import UnknownOptionError
from dist2.runtime.mpi_library import load
from dist2.runtime.signals import OnCtrlC, package_on_ctrl_c

__all__ = ["MpiBackend", "create"]

package_on_ctrl_c(__spec__, OnCtrlC.DEFER)


class MpiBackend(Messages):
    """A group whose tensors MPI moves."""

    staged_types = ("cuda",)
    leaves_at_once = True
    _aborted = False
    _closed = False

    def split(self, spec: GroupSpec) -> MpiBackend:
        """Make a communicator of a subset of the members; only they call."""
        return _connected(spec, self.control_of(spec))

    def reconfigure(self, spec: GroupSpec, handles: Sequence[str]) -> MpiBackend:
        """Meet over new control links, then make a communicator; all processes are of this MPI job."""
        return _connected(spec, self.control.reconfigure(spec, handles))

    def abort(self) -> None:
        """Make blocked callers raise, unless MPI is moving data; `shutdown` then cleans up."""
        self._aborted = True
        self.control.abort()

    def shutdown(self) -> None:
        """Free the communicator, unless something may still be under way on it; leave the control group."""
        if self._closed:
            return
        self._closed = True
        self._progress.stop()
        if not self._aborted and not self.lost():
            self.link.free()
        self.control.shutdown()


def create(spec: GroupSpec) -> MpiBackend:
    """Return the backend of a new group.

    Options: those of the socket backend, for the control group.

    Raises:
        BackendUnavailableError: mpi4py or MPI is missing, or it was initialized without threads.
        UnknownOptionError, InvalidUsageError: An option is wrong, or the ranks are not of one MPI job.
        OperationTimeoutError: Members did not arrive in time; names them.
        PeerLostError: A member failed or died while it built the group.
        BackendError: MPI failed.
    """
    check(spec.device, spec.options)
    return _connected(spec, create_socket(spec))


def check(device: torch.device, options: Mapping[str, object]) -> None:
    """Check the arguments of `new_group`, which calls this before it waits for other ranks.

    Raises:
        UnknownOptionError, InvalidUsageError: An option is wrong, or the device is.
        BackendUnavailableError: MPI cannot be used here.
    """
    for name in options:
        if name not in CONTROL_OPTIONS:
            raise UnknownOptionError(
                f"backend 'mpi' has no option {name!r}; it has {', '.join(CONTROL_OPTIONS)}"
            )
    load()


create.check = check  # type: ignore[attr-defined]  # found by `new_group`
create.init_method = "mpi://"  # type: ignore[attr-defined]  # likewise


def _connected(spec: GroupSpec, control: SocketBackend) -> MpiBackend:
    with shut_down_on_failure(control):
        link = Communicator.connect(load(), control.outside, spec.info, spec.timeout_s)
        return MpiBackend(spec, control, link)
