/* Operations and groups. A group becomes one launch per communicator, which a stream runs; a single call is a group
   of one.

   Launches of a communicator run in the order of their issue, also on different streams: so a launch on one stream
   delays those behind it on others, as NCCL's do.

   The first message from one rank to another connects them: both calls block until the other side has made its own. */

#define _GNU_SOURCE
#include "stub.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    int peer, receives;
    char *bytes;
    size_t left;
    int done;
} Transfer;

typedef struct {
    Comm *comm;
    uint64_t number;
    size_t count;
    Op ops[];
} Launch;

static _Thread_local Op *pending;
static _Thread_local size_t pending_count, pending_room;
static _Thread_local int depth;

/* Move as many bytes as possible now. A send is complete once the receiver has taken all of it: the ring buffers no
   message for good. */
static int
advance(Comm *comm, Transfer *transfer)
{
    int rank = comm->rank, size = comm->size;
    Ring *ring = &comm->board->rings[transfer->receives ? transfer->peer * size + rank : rank * size + transfer->peer];
    uint64_t written = atomic_load(&ring->written), read = atomic_load(&ring->read);
    size_t room = transfer->receives ? written - read : RING_BYTES - (written - read);
    uint64_t at = (transfer->receives ? read : written) % RING_BYTES;
    size_t length = room < transfer->left ? room : transfer->left;
    length = length < RING_BYTES - at ? length : RING_BYTES - at;
    if (transfer->receives) {
        memcpy(transfer->bytes, ring->bytes + at, length);
        atomic_store(&ring->read, read + length);
        transfer->done = transfer->left == length;
    }
    else {
        memcpy(ring->bytes + at, transfer->bytes, length);
        atomic_store(&ring->written, written + length);
        transfer->done = transfer->left == length && atomic_load(&ring->read) == written + length;
    }
    transfer->bytes += length;
    transfer->left -= length;
    return length > 0 || transfer->done;
}

/* Finish transfers: those with one peer in one direction in their order, all others at the same time. */
static int
exchange(Comm *comm, Transfer *transfers, size_t count)
{
    for (int spins = 0;;) {
        int busy[2][MAX_RANKS] = {{0}}, moved = 0, left = 0;
        for (size_t i = 0; i < count; i++) {
            Transfer *each = &transfers[i];
            if (each->done || busy[each->receives][each->peer]) {
                continue;
            }
            moved |= advance(comm, each);
            if (!each->done) {
                busy[each->receives][each->peer] = 1;
                left = 1;
            }
        }
        if (!left) {
            return 1;
        }
        if (atomic_load(&comm->aborted)) {
            return 0;
        }
        if (moved) {
            spins = 0;
        }
        else {
            pause_briefly(&spins);
        }
    }
}

/* Send to each rank the buffer in `sent`, and receive from each into the buffer in `received`; NULL for none. */
static int
with_all(Comm *comm, char *const *sent, char *const *received, size_t nbytes)
{
    Transfer transfers[2 * MAX_RANKS];
    size_t count = 0;
    for (int peer = 0; peer < comm->size; peer++) {
        if (peer != comm->rank && sent[peer] != NULL) {
            transfers[count++] = (Transfer){peer, 0, sent[peer], nbytes, nbytes == 0};
        }
        if (peer != comm->rank && received[peer] != NULL) {
            transfers[count++] = (Transfer){peer, 1, received[peer], nbytes, nbytes == 0};
        }
    }
    return exchange(comm, transfers, count);
}

/* Run a collective: each rank sends its data to the ranks that need them, and folds the data that it needs. */
static void
collective(const Op *op)
{
    Comm *comm = op->comm;
    int rank = comm->rank, size = comm->size, reduces = op->kind <= REDUCE || op->kind == REDUCE_SCATTER;
    size_t nbytes = op->count * size_of(op->datatype), whole = op->kind == REDUCE_SCATTER ? nbytes * (size_t)size : nbytes;
    char *source = (char *)op->source, *scratch = NULL, *scaled = NULL;
    char *sent[MAX_RANKS] = {0}, *received[MAX_RANKS] = {0};
    CustomOp *custom = op->op >= FIRST_CUSTOM_OP ? &comm->custom[op->op - FIRST_CUSTOM_OP] : NULL;
    if (reduces && custom != NULL) {
        source = scaled = malloc(whole + 1);
        memcpy(scaled, op->source, whole);
        scale(scaled, whole / size_of(op->datatype), op->datatype, custom->factor);
    }
    if (reduces) {
        scratch = malloc(nbytes * (size_t)size + 1);
    }
    for (int peer = 0; peer < size; peer++) {
        size_t offset = (size_t)peer * nbytes;
        switch (op->kind) {
        case ALL_REDUCE: sent[peer] = source; received[peer] = scratch + offset; break;
        case REDUCE:
            sent[peer] = peer == op->peer ? source : NULL;
            received[peer] = rank == op->peer ? scratch + offset : NULL;
            break;
        case REDUCE_SCATTER: sent[peer] = source + offset; received[peer] = scratch + offset; break;
        case ALL_GATHER: sent[peer] = source; received[peer] = (char *)op->target + offset; break;
        default:
            sent[peer] = rank == op->peer ? source : NULL;
            received[peer] = peer == op->peer && rank != op->peer ? op->target : NULL;
        }
    }
    if (with_all(comm, sent, received, nbytes)) {
        char *own = source + (op->kind == REDUCE_SCATTER ? (size_t)rank * nbytes : 0);
        if (reduces && (op->kind != REDUCE || rank == op->peer)) {
            void *parts[MAX_RANKS];
            for (int peer = 0; peer < size; peer++) {
                parts[peer] = peer == rank ? own : scratch + (size_t)peer * nbytes;
            }
            char *result = malloc(nbytes + 1); /* the own part may lie in the target */
            fold(result, parts, size, op->count, op->datatype, custom != NULL ? 0 : op->op);
            memcpy(op->target, result, nbytes);
            free(result);
        }
        else if (op->kind == ALL_GATHER) {
            memmove((char *)op->target + (size_t)rank * nbytes, source, nbytes);
        }
        else if (op->kind == BROADCAST && rank == op->peer && op->target != op->source) {
            memmove(op->target, source, nbytes);
        }
    }
    free(scratch);
    free(scaled);
}

/* Do the sends and receives of a launch; those of a rank with itself are matched in order. */
static void
messages(Launch *launch)
{
    Comm *comm = launch->comm;
    Transfer *transfers = malloc((launch->count + 1) * sizeof *transfers);
    size_t count = 0, own = 0;
    for (size_t i = 0; i < launch->count; i++) {
        Op *op = &launch->ops[i];
        size_t nbytes = op->count * size_of(op->datatype);
        if (op->kind == SEND && op->peer == comm->rank) {
            size_t at = 0, nth = 0;
            for (; at < launch->count; at++) {
                Op *other = &launch->ops[at];
                if (other->kind == RECV && other->peer == comm->rank && nth++ == own) {
                    memmove(other->target, op->source, nbytes);
                    break;
                }
            }
            own++;
        }
        else if (op->kind >= SEND && op->peer != comm->rank) {
            char *bytes = op->kind == SEND ? (char *)op->source : op->target;
            transfers[count++] = (Transfer){op->peer, op->kind == RECV, bytes, nbytes, nbytes == 0};
        }
    }
    exchange(comm, transfers, count);
    free(transfers);
}

static void
run_launch(void *argument)
{
    Launch *launch = argument;
    Comm *comm = launch->comm;
    for (int spins = 0; atomic_load(&comm->finished) != launch->number;) {
        pause_briefly(&spins);
    }
    for (size_t i = 0; i < launch->count && !atomic_load(&comm->aborted); i++) {
        if (launch->ops[i].kind < SEND) {
            collective(&launch->ops[i]);
        }
    }
    if (!atomic_load(&comm->aborted)) {
        messages(launch);
    }
    atomic_fetch_add(&comm->finished, 1);
    free(launch);
}

static int
is_connected(const Op *op)
{
    Board *board = op->comm->board;
    int source = op->kind == SEND ? op->comm->rank : op->peer, target = op->kind == SEND ? op->peer : op->comm->rank;
    return atomic_load(&board->sends[source][target]) && atomic_load(&board->receives[source][target]);
}

static int
is_message(const Op *op)
{
    return op->kind >= SEND && op->peer != op->comm->rank;
}

/* Wait for the other side of each collected message that is the first of its pair; 0 if a communicator is aborted. */
static int
connect_all(void)
{
    int connected = 1;
    for (size_t i = 0; i < pending_count; i++) {
        Op *op = &pending[i];
        if (is_message(op)) {
            Board *board = op->comm->board;
            atomic_store(op->kind == SEND ? &board->sends[op->comm->rank][op->peer] : &board->receives[op->peer][op->comm->rank], 1);
            atomic_fetch_add(&op->comm->blocked, 1);
        }
    }
    for (size_t i = 0; i < pending_count; i++) {
        for (int spins = 0; connected && is_message(&pending[i]) && !is_connected(&pending[i]);) {
            connected = !atomic_load(&pending[i].comm->aborted);
            pause_briefly(&spins);
        }
    }
    for (size_t i = 0; i < pending_count; i++) {
        if (is_message(&pending[i])) {
            atomic_fetch_sub(&pending[i].comm->blocked, 1);
        }
    }
    return connected;
}

/* Launch the collected calls: one launch per communicator, on the stream of its first call. */
static Result
launch_all(void)
{
    if (!connect_all()) {
        pending_count = 0;
        return INTERNAL_ERROR;
    }
    for (size_t first = 0; first < pending_count; first++) {
        Comm *comm = pending[first].comm;
        if (comm == NULL) {
            continue;
        }
        Stream *stream = pending[first].stream;
        Launch *launch = malloc(sizeof *launch + pending_count * sizeof(Op));
        launch->comm = comm;
        launch->count = 0;
        for (size_t i = first; i < pending_count; i++) {
            if (pending[i].comm == comm) {
                launch->ops[launch->count++] = pending[i];
                pending[i].comm = NULL;
            }
        }
        launch->number = atomic_fetch_add(&comm->issued, 1);
        stream_run(stream, run_launch, launch);
    }
    pending_count = 0;
    return SUCCESS;
}

Result
enqueue(Op op)
{
    if (op.comm == NULL || op.comm->board == NULL || !has_type(op.datatype)) {
        return INVALID_ARGUMENT;
    }
    if (op.peer < 0 || op.peer >= op.comm->size || (op.count > 0 && op.kind != SEND && op.kind != REDUCE && op.target == NULL)) {
        return INVALID_ARGUMENT;
    }
    int custom = op.op - FIRST_CUSTOM_OP;
    if (op.op < 0 || custom >= MAX_CUSTOM_OPS || (custom >= 0 && op.kind <= REDUCE && !op.comm->custom[custom].is_set)) {
        return INVALID_ARGUMENT;
    }
    if (op.kind >= SEND && op.peer == op.comm->rank && depth == 0) {
        return INVALID_USAGE;
    }
    if (pending_count == pending_room) {
        pending_room = pending_room ? 2 * pending_room : 16;
        pending = realloc(pending, pending_room * sizeof *pending);
    }
    pending[pending_count++] = op;
    return depth == 0 ? launch_all() : SUCCESS;
}

Result
group_start(void)
{
    depth++;
    return SUCCESS;
}

Result
group_end(void)
{
    if (depth == 0) {
        return INVALID_USAGE;
    }
    return --depth == 0 ? launch_all() : SUCCESS;
}

/* How many groups this thread has open: none, after a call that failed, or it leaks. */
int
stub_group_depth(void)
{
    return depth;
}
