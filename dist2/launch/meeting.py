"""The store of a launcher, where the ranks meet that it starts, and their environment."""

import os
from datetime import timedelta

from dist2.runtime.config import environment_value
from dist2.runtime.deadline import Deadline
from dist2.security.authenticator import Credentials
from dist2.store.address import Address
from dist2.store.shared_server import Lease, share

HOST = "127.0.0.1"
_LIMIT = timedelta(seconds=30)
_THREADS = "OMP_NUM_THREADS"


def serve_ranks(host: str) -> Lease:
    """Serve the store where the ranks of this process's job meet, at a port that the kernel chooses.

    As the store of torchrun's agent it asks for no secret, so that torch.distributed joins it too; with a
    secret, ranks publish sealed addresses in it and authenticate each other.
    """
    return share(Address(host, 0), Deadline.after(_LIMIT), Credentials())


def rank_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the variables of a rank on this host, which meets the others at a port of `HOST`.

    Unless ``OMP_NUM_THREADS`` is set, each rank gets its share of the cores for torch's own threads: by
    default torch starts one for each core in each rank, and they wait for each other.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks join the store of the launcher
        _THREADS: environment_value(_THREADS) or str(max(1, len(os.sched_getaffinity(0)) // count)),
    }
