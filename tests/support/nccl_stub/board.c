/* The shared memory of one communicator. Its name is gone from the system as soon as all ranks have it. */

#define _GNU_SOURCE
#include "stub.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

void
pause_briefly(int *spins)
{
    usleep((*spins)++ < 20 ? 0 : *spins < 200 ? 50 : 500);
}

/* Map it and wait for all ranks, unless the communicator is aborted meanwhile. */
Result
board_attach(Comm *comm)
{
    comm->mapped = sizeof(Board) + (size_t)comm->size * (size_t)comm->size * sizeof(Ring);
    int fd = shm_open(comm->name, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)comm->mapped) != 0) {
        return SYSTEM_ERROR;
    }
    comm->board = mmap(NULL, comm->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (comm->board == MAP_FAILED) {
        comm->board = NULL;
        return SYSTEM_ERROR;
    }
    atomic_store(&comm->board->pid[comm->rank], (int)getpid());
    atomic_fetch_add(&comm->board->attached, 1);
    for (int spins = 0; atomic_load(&comm->board->attached) < comm->size;) {
        if (atomic_load(&comm->aborted)) {
            shm_unlink(comm->name);
            return INTERNAL_ERROR;
        }
        pause_briefly(&spins);
    }
    shm_unlink(comm->name); /* by the first; the others find it gone */
    return SUCCESS;
}

int
board_alive(Comm *comm, int rank)
{
    if (atomic_load(&comm->board->gone[rank])) {
        return 0;
    }
    return kill(atomic_load(&comm->board->pid[rank]), 0) == 0 || errno != ESRCH;
}

void
board_leave(Comm *comm)
{
    if (comm->board != NULL) {
        atomic_store(&comm->board->gone[comm->rank], 1);
        munmap(comm->board, comm->mapped);
        comm->board = NULL;
    }
}
