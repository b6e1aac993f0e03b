"""The MPI library of this process, through mpi4py, or the reason why there is none.

The first import of ``mpi4py.MPI`` initializes MPI. mpi4py finalizes it when the interpreter ends, after all
groups were closed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dist2.errors import BackendError, BackendUnavailableError, Dist2Error, PeerLostError

_INSTALL = "pip install 'dist2[mpi]'"

_abandoned: list[Any] = []


def load() -> Any:
    """Return the module ``mpi4py.MPI``, initialized.

    Raises:
        BackendUnavailableError: mpi4py or an MPI library is missing, MPI was finalized, or it was initialized
            without support for threads.
    """
    try:
        import_module("mpi4py")
    except ImportError as error:
        raise BackendUnavailableError(f"MPI needs mpi4py; install it with: {_INSTALL}") from error
    try:
        mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"mpi4py finds no MPI library, such as Open MPI or MPICH: {error}"
        ) from error
    if mpi.Is_finalized():
        raise BackendUnavailableError("MPI cannot be used after it was finalized")
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise BackendUnavailableError(
            "MPI was initialized without MPI_THREAD_MULTIPLE, and groups call it from several threads: "
            "set mpi4py.rc.thread_level = 'multiple' before the first import of mpi4py.MPI"
        )
    return mpi


def failure(mpi: Any, error: Exception, what: str) -> Dist2Error:
    """Return the error for an exception of mpi4py.

    Args:
        mpi: The module.
        error: The exception; becomes the cause.
        what: The failed action, for the message.
    """
    lost = (getattr(mpi, "ERR_PROC_FAILED", None), getattr(mpi, "ERR_PROC_FAILED_PENDING", None))
    is_lost = isinstance(error, mpi.Exception) and error.Get_error_class() in lost
    found: Dist2Error = (PeerLostError if is_lost else BackendError)(f"{what} failed in MPI: {error}")
    found.__cause__ = error
    return found


def give_up(request: Any) -> None:
    """Keep a request that nothing waits for any more: MPI may still read and write its buffer."""
    _abandoned.append(request)
