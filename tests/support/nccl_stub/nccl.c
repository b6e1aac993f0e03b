/* NCCL's functions, and those by which tests command the stub (stub_*). */

#define _GNU_SOURCE
#include "stub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

typedef Comm *ncclComm_t;

static _Atomic int version = 22809, init_error;
static _Thread_local char last_error[256] = "";

void
stub_set_version(int code)
{
    version = code;
}

/* Have the next communicators fail to be made. */
void
stub_set_init_error(int code)
{
    init_error = code;
}

/* Have a communicator report an asynchronous error. */
void
stub_set_async_error(ncclComm_t comm, int code)
{
    comm->async_error = code;
}

static Result
failed(Result code, const char *why)
{
    snprintf(last_error, sizeof last_error, "%s", why);
    return code;
}

static uint64_t
hash_of(const char *text, uint64_t hash)
{
    for (; *text; text++) {
        hash = (hash ^ (unsigned char)*text) * 1099511628211u;
    }
    return hash;
}

static void
name_it(Comm *comm, const char *text)
{
    snprintf(comm->name, sizeof comm->name, "/dist2-nccl-%016llx%016llx",
             (unsigned long long)hash_of(text, 14695981039346656037u), (unsigned long long)hash_of(text, 88172645463325252u));
}

/* Make a communicator; its address is known to the caller before this blocks, so that it can be aborted. */
static Result
make(ncclComm_t *made, const char *name, int size, int rank, Comm *parent)
{
    if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) {
        return failed(INVALID_ARGUMENT, "rank or size out of range");
    }
    if (init_error) {
        return failed((Result)init_error, "told to fail");
    }
    Comm *comm = calloc(1, sizeof *comm);
    comm->rank = rank;
    comm->size = size;
    name_it(comm, name);
    atomic_store(&comm->making, 1);
    *made = comm;
    if (parent != NULL) {
        atomic_store(&parent->child, comm);
    }
    Result result = board_attach(comm);
    if (parent != NULL) {
        atomic_store(&parent->child, NULL);
    }
    atomic_store(&comm->making, 0);
    return result == SUCCESS ? result : failed(result, "the communicator was aborted while it was made");
}

Result
ncclGetVersion(int *code)
{
    *code = version;
    return SUCCESS;
}

Result
ncclGetUniqueId(UniqueId *id)
{
    memset(id, 0, sizeof *id);
    unsigned char random[32];
    if (getrandom(random, sizeof random, 0) != sizeof random) {
        return SYSTEM_ERROR;
    }
    for (size_t i = 0; i < sizeof random; i++) {
        snprintf(id->internal + 2 * i, 3, "%02x", random[i]);
    }
    return SUCCESS;
}

Result
ncclCommInitRankConfig(ncclComm_t *comm, int size, UniqueId id, int rank, void *config)
{
    (void)config;
    id.internal[ID_BYTES - 1] = 0;
    return make(comm, id.internal, size, rank, NULL);
}

Result
ncclCommInitRank(ncclComm_t *comm, int size, UniqueId id, int rank)
{
    return ncclCommInitRankConfig(comm, size, id, rank, NULL);
}

Result
ncclCommInitAll(ncclComm_t *comms, int count, const int *devices)
{
    (void)comms, (void)count, (void)devices;
    return failed(INVALID_USAGE, "the stub has one rank a call");
}

static void
await_launches(Comm *comm)
{
    for (int spins = 0; comm->finished != comm->issued;) {
        pause_briefly(&spins);
    }
}

Result
ncclCommFinalize(ncclComm_t comm)
{
    await_launches(comm);
    return SUCCESS;
}

/* Free a communicator once all ranks do so, or are gone: as in NCCL a collective. */
Result
ncclCommDestroy(ncclComm_t comm)
{
    if (comm == NULL) {
        return SUCCESS;
    }
    await_launches(comm);
    if (comm->board != NULL) {
        atomic_store(&comm->board->gone[comm->rank], 1);
        for (int rank = 0, spins = 0; rank < comm->size;) {
            if (!board_alive(comm, rank)) {
                rank++;
            }
            else {
                pause_briefly(&spins);
            }
        }
    }
    board_leave(comm);
    free(comm);
    return SUCCESS;
}

/* Abort the running operations, and free the communicator: also during a split or a first message in another thread.
   A communicator that is still being made is only aborted. */
Result
ncclCommAbort(ncclComm_t comm)
{
    if (comm == NULL) {
        return SUCCESS;
    }
    atomic_store(&comm->aborted, 1);
    if (atomic_load(&comm->making)) {
        return SUCCESS;
    }
    for (int spins = 0; atomic_load(&comm->blocked);) {
        Comm *child = atomic_load(&comm->child);
        if (child != NULL) {
            atomic_store(&child->aborted, 1);
        }
        pause_briefly(&spins);
    }
    await_launches(comm);
    board_leave(comm);
    free(comm);
    return SUCCESS;
}

const char *
ncclGetErrorString(Result code)
{
    static const char *const words[] = {"no error",         "unhandled cuda error", "unhandled system error",
                                        "internal error",   "invalid argument",     "invalid usage",
                                        "remote process exited or there was a network error", "NCCL operation in progress"};
    return code >= 0 && code < 8 ? words[code] : "unknown result code";
}

const char *
ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return last_error;
}

Result
ncclCommGetAsyncError(ncclComm_t comm, Result *error)
{
    *error = (Result)comm->async_error;
    return SUCCESS;
}

Result
ncclCommCount(const ncclComm_t comm, int *count)
{
    *count = comm->size;
    return SUCCESS;
}

Result
ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    (void)comm;
    *device = 0;
    return SUCCESS;
}

Result
ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return SUCCESS;
}

/* All ranks call; a negative color makes no communicator. Rounds alternate between two rows of arguments. */
static Result
split(ncclComm_t comm, int color, int key, ncclComm_t *made)
{
    Board *board = comm->board;
    int round = atomic_load(&board->split_round[comm->rank]), row = round % 2, rank = 0, size = 0;
    board->color[row][comm->rank] = color;
    board->key[row][comm->rank] = key;
    atomic_store(&board->split_round[comm->rank], round + 1);
    for (int other = 0, spins = 0; other < comm->size;) {
        if (atomic_load(&board->split_round[other]) > round) {
            other++;
        }
        else if (comm->aborted) {
            return failed(INTERNAL_ERROR, "aborted while it was split");
        }
        else {
            pause_briefly(&spins);
        }
    }
    *made = NULL;
    for (int other = 0; other < comm->size; other++) {
        int theirs = board->key[row][other];
        if (board->color[row][other] == color) {
            size++;
            rank += theirs < key || (theirs == key && other < comm->rank);
        }
    }
    char name[128];
    snprintf(name, sizeof name, "%s/split/%d/%d", comm->name, round, color);
    return color < 0 ? SUCCESS : make(made, name, size, rank, comm);
}

Result
ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, void *config)
{
    (void)config;
    atomic_fetch_add(&comm->blocked, 1);
    Result result = split(comm, color, key, made);
    atomic_fetch_sub(&comm->blocked, 1);
    return result;
}

Result
ncclRedOpCreatePreMulSum(int *op, void *scalar, int datatype, int residence, ncclComm_t comm)
{
    (void)residence;
    for (int i = 0; i < MAX_CUSTOM_OPS; i++) {
        if (!comm->custom[i].is_set) {
            double factor = datatype == 7 ? *(float *)scalar : datatype == 8 ? *(double *)scalar : 0;
            if (datatype == 6) {
                factor = (double)*(_Float16 *)scalar;
            }
            if (datatype == 9) {
                uint32_t bits = (uint32_t)*(uint16_t *)scalar << 16;
                float wide;
                memcpy(&wide, &bits, sizeof wide);
                factor = wide;
            }
            comm->custom[i] = (CustomOp){1, datatype, factor};
            *op = FIRST_CUSTOM_OP + i;
            return SUCCESS;
        }
    }
    return failed(INTERNAL_ERROR, "too many operations");
}

Result
ncclRedOpDestroy(int op, ncclComm_t comm)
{
    if (op < FIRST_CUSTOM_OP || op >= FIRST_CUSTOM_OP + MAX_CUSTOM_OPS || !comm->custom[op - FIRST_CUSTOM_OP].is_set) {
        return INVALID_ARGUMENT;
    }
    comm->custom[op - FIRST_CUSTOM_OP].is_set = 0;
    return SUCCESS;
}

Result
ncclGroupStart(void)
{
    return group_start();
}

Result
ncclGroupEnd(void)
{
    return group_end();
}

Result
ncclAllReduce(const void *source, void *target, size_t count, int datatype, int op, ncclComm_t comm, Stream *stream)
{
    return enqueue((Op){ALL_REDUCE, comm, stream, source, target, count, datatype, op, 0});
}

Result
ncclReduce(const void *source, void *target, size_t count, int datatype, int op, int root, ncclComm_t comm, Stream *stream)
{
    return enqueue((Op){REDUCE, comm, stream, source, target, count, datatype, op, root});
}

Result
ncclBroadcast(const void *source, void *target, size_t count, int datatype, int root, ncclComm_t comm, Stream *stream)
{
    return enqueue((Op){BROADCAST, comm, stream, source, target, count, datatype, 0, root});
}

Result
ncclBcast(void *buffer, size_t count, int datatype, int root, ncclComm_t comm, Stream *stream)
{
    return ncclBroadcast(buffer, buffer, count, datatype, root, comm, stream);
}

Result
ncclReduceScatter(const void *source, void *target, size_t count, int datatype, int op, ncclComm_t comm, Stream *stream)
{
    return enqueue((Op){REDUCE_SCATTER, comm, stream, source, target, count, datatype, op, 0});
}

Result
ncclAllGather(const void *source, void *target, size_t count, int datatype, ncclComm_t comm, Stream *stream)
{
    return enqueue((Op){ALL_GATHER, comm, stream, source, target, count, datatype, 0, 0});
}

Result
ncclSend(const void *source, size_t count, int datatype, int peer, ncclComm_t comm, Stream *stream)
{
    return enqueue((Op){SEND, comm, stream, source, NULL, count, datatype, 0, peer});
}

Result
ncclRecv(void *target, size_t count, int datatype, int peer, ncclComm_t comm, Stream *stream)
{
    return enqueue((Op){RECV, comm, stream, NULL, target, count, datatype, 0, peer});
}
