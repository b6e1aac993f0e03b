"""A program of three ranks on MPI with ULFM: one is killed, and the others go on without it."""

from __future__ import annotations

import os
import signal
import sys

import torch

import dist2

if __name__ == "__main__":
    torch.set_num_threads(1)
    pg = dist2.new_group("mpi", 20)
    pg.barrier()
    if pg.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        pg.all_reduce(torch.ones(1))
    except dist2.PeerLostError as error:
        assert "was killed by SIGKILL" in str(error), error
    with pg.shrink() as survivors:
        survivors.all_reduce(total := torch.ones(1))
        sys.stdout.write(f"{survivors.size()} survivors, total {total.item()}\n")
        survivors.barrier()
    sys.stdout.flush()
    os._exit(0)  # MPI_Finalize of Open MPI 5.0 may hang after a death, without dist2 as well
