/* Long messages, moved by both sides: the receiver reads one part out of the sender's memory, and the sender writes
   the rest into the receiver's, if it waits for nothing else.

   Where they meet is the desk, words in the first page of the sender's ring. The sender says for which loan it waits,
   or that it comes for whatever is read; the receiver, who knows where to, opens the desk. Blocks are claimed one by
   one, from one end by either, so a side that has no core takes none. Which end is whose goes by process, not by role:
   of memory that goes to and fro, each keeps its part in its cache. The claims say which loan they are for: a sender
   that is late for one takes none of the next.

   The desk belongs to one loan of its ring from when it is opened until all that was claimed is there.

   Nobody may write to a receiver's memory once its call has ended. So the first bytes of each write go to a guard, a
   page of the receiver's that is there for nothing else. A receiver that gives up while the sender has a block takes
   the page's permissions away: a sender that was stopped before it called the kernel then writes nothing at all. One
   that is in the kernel is not held up there, save by the scheduler, and is waited for. */

#include "messages.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WAITS = DESK_AT, OPEN, BUFFER, GUARD, FAILED, CLAIMS = DESK_AT + 8, DONE };

#define PAGE_BYTES 4096
#define LEAST_BLOCK (32 << 10)
#define MOST_BLOCK (1 << 20)
#define BLOCKS 8
#define CHECK_NS 1000000
#define LOOKS 200
#define RECALL_NS 100000000 /* for a write that the kernel is at: longer than it takes */

/* Claims are how many blocks are taken from the front and from the back, and for which loan: its number's last bits. */
#define COUNT_BITS 20
#define COUNTED ((UINT64_C(1) << COUNT_BITS) - 1)
#define LOAN_AT (2 * COUNT_BITS)

/* What moves: either side's view of it. */
typedef struct {
    End *ring;
    uint64_t number;
    pid_t pid;
    char *here;
    uint64_t there, guard;
    size_t nbytes, block;
    uint32_t count;
    uint32_t alone; /* how many blocks this side has moved alone */
    int front; /* whether this side takes blocks from the front */
    long long checked_ns;
} Share;

static inline uint64_t
look_at(const Share *share, int word)
{
    return atomic_load_explicit(&share->ring->words[word], memory_order_acquire);
}

static inline void
say(const Share *share, int word, uint64_t value)
{
    atomic_store_explicit(&share->ring->words[word], value, memory_order_release);
}

/* Cut a message into blocks of whole pages. */
static void
cut(Share *share)
{
    size_t block = (share->nbytes / BLOCKS + PAGE_BYTES - 1) & ~(size_t)(PAGE_BYTES - 1);
    block = block < LEAST_BLOCK ? LEAST_BLOCK : block;
    share->block = block = block > MOST_BLOCK ? MOST_BLOCK : block;
    share->count = (uint32_t)((share->nbytes + block - 1) / block);
}

/* Claim the next block: its number, or -1 if all are claimed. */
static long
claim(Share *share)
{
    Word *claims = &share->ring->words[CLAIMS];
    uint64_t seen = atomic_load_explicit(claims, memory_order_relaxed);
    for (;;) {
        uint64_t front = seen >> COUNT_BITS & COUNTED, back = seen & COUNTED;
        if (front + back >= share->count || (seen ^ share->number << LOAN_AT) >> LOAN_AT != 0) {
            return -1;
        }
        uint64_t next = share->front ? seen + (UINT64_C(1) << COUNT_BITS) : seen + 1;
        if (atomic_compare_exchange_weak_explicit(claims, &seen, next, memory_order_acq_rel, memory_order_relaxed)) {
            return (long)(share->front ? front : share->count - 1 - back);
        }
    }
}

/* The next block for who moves them alone: its number, or -1 behind the last. */
static long
next_of_all(Share *share)
{
    return share->alone < share->count ? (long)share->alone++ : -1;
}

/* Whether it is time to look whether something is the matter. */
static int
is_check_due(Share *share)
{
    long long now = monotonic_ns();
    if (now - share->checked_ns < CHECK_NS) {
        return 0;
    }
    share->checked_ns = now;
    return 1;
}

/* Look whether the group has failed: 1, 0, or -1 with an exception. */
static int
has_failed(Express *self, Lock *lock)
{
    take_lock(lock);
    int none = attribute_is_none(self->its[MAILBOX], &field_aborted);
    none = none > 0 ? attribute_is_none(self->its[MAILBOX], &field_fault) : none;
    give_up_lock(lock);
    return none < 0 ? -1 : !none;
}

static size_t
length_of(const Share *share, long block)
{
    size_t from = (size_t)block * share->block;
    return share->nbytes - from < share->block ? share->nbytes - from : share->block;
}

/* ---- The receiver ---- */

static int
read_block(const Share *share, long block)
{
    size_t from = (size_t)block * share->block, nbytes = length_of(share, block);
    struct iovec local = {share->here + from, nbytes};
    struct iovec remote = {(char *)(uintptr_t)share->there + from, nbytes};
    return process_vm_readv(share->pid, &local, 1, &remote, 1, 0) == (ssize_t)nbytes;
}

/* Make a guard for a ring if it has none; whether it has one. */
static int
has_guard(End *ring)
{
    if (ring->guard == NULL) {
        void *page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        ring->guard = page == MAP_FAILED ? NULL : page;
    }
    return ring->guard != NULL;
}

int
settle_loan(End *ring)
{
    if (!ring->settled && atomic_load_explicit(&ring->words[DONE], memory_order_acquire) == ring->theirs) {
        int failed = atomic_load_explicit(&ring->words[FAILED], memory_order_acquire) == ring->number;
        ring->settled = failed ? -1 : 1;
    }
    return ring->settled;
}

/* Open the desk if the sender comes to it and nobody of this process is there; with the interpreter lock. */
static int
open_desk(Share *share)
{
    End *ring = share->ring;
    uint64_t waits = look_at(share, WAITS);
    if (ring->busy && ring->recalled && settle_loan(ring)) {
        ring->busy = 0;
    }
    if (ring->busy || share->count < 2 || share->count > COUNTED || (waits != share->number && waits != ALL_LOANS) ||
        !has_guard(ring)) {
        return 0;
    }
    ring->busy = 1;
    ring->closed = ring->recalled = ring->settled = ring->refused = 0;
    ring->front = (char)share->front;
    ring->number = share->number;
    ring->theirs = 0;
    say(share, CLAIMS, share->number << LOAN_AT); /* before the rest: whoever is late for another loan finds it first */
    say(share, DONE, 0);
    say(share, BUFFER, (uintptr_t)share->here);
    say(share, GUARD, (uintptr_t)ring->guard);
    say(share, OPEN, share->number);
    return 1;
}

/* Have nobody claim any more. */
static void
close_desk(End *ring)
{
    if (!ring->closed) {
        uint64_t closed = ring->number << LOAN_AT | COUNTED << COUNT_BITS;
        uint64_t seen = atomic_exchange_explicit(&ring->words[CLAIMS], closed, memory_order_acq_rel);
        ring->theirs = (ring->front ? seen : seen >> COUNT_BITS) & COUNTED;
        ring->closed = 1;
    }
}

/* Read one block after the other: 1, 0 if that is refused or the group has failed, -1 with an exception. */
static int
read_blocks(Express *self, Share *share, long (*next)(Share *), Lock *lock)
{
    for (long block; (block = next(share)) >= 0;) {
        if (!read_block(share, block)) {
            return 0;
        }
        if (is_check_due(share)) {
            int failed = has_failed(self, lock);
            if (failed) {
                return failed < 0 ? -1 : 0;
            }
        }
    }
    return 1;
}

/* Wait a moment until the sender is done. */
static int
await_settled(End *ring)
{
    int settled = 0;
    for (int look = 0; look < LOOKS && !(settled = settle_loan(ring)); look++) {
        pause_core();
    }
    for (long long start = monotonic_ns(); !settled && monotonic_ns() - start < CHECK_NS;) {
        sched_yield();
        settled = settle_loan(ring);
    }
    return settled;
}

/* Read a message for which the desk is open together with its sender. */
static int
read_share(Express *self, Share *share, Lock *lock)
{
    int read = read_blocks(self, share, claim, lock);
    close_desk(share->ring);
    int settled = await_settled(share->ring);
    if (!settled) {
        return read < 0 ? -1 : read ? LATE : LATE_REFUSED;
    }
    share->ring->busy = 0;
    return read > 0 && settled < 0 ? read_blocks(self, share, next_of_all, lock) : read;
}

/* Return the receiver's view of a loan. */
static Share
reading(End *rx, pid_t pid, uint64_t number, uint64_t there, char *here, size_t nbytes)
{
    Share share = {.ring = rx, .number = number, .pid = pid, .here = here, .there = there, .nbytes = nbytes};
    cut(&share);
    share.front = getpid() <= pid;
    share.checked_ns = monotonic_ns();
    return share;
}

int
read_loan(Express *self, End *rx, pid_t pid, const uint64_t loan[3], char *buffer, size_t nbytes)
{
    Share share = reading(rx, pid, loan[0], loan[1], buffer, nbytes);
    Lock lock = {NULL};
    int shared = open_desk(&share);
    give_up_lock(&lock);
    int read = shared ? read_share(self, &share, &lock) : read_blocks(self, &share, next_of_all, &lock);
    take_lock(&lock);
    return read;
}

int
open_loan(End *rx, pid_t pid, uint64_t number, char *buffer, size_t nbytes)
{
    Share share = reading(rx, pid, number, 0, buffer, nbytes);
    return open_desk(&share);
}

int
read_loan_until(End *rx, pid_t pid, uint64_t there, char *buffer, size_t nbytes, long long until_ns)
{
    Share share = reading(rx, pid, rx->number, there, buffer, nbytes);
    Lock lock = {NULL};
    int settled = 0, over = 0;
    give_up_lock(&lock);
    for (long block; !over && (block = claim(&share)) >= 0;) {
        if (read_block(&share, block)) {
            over = monotonic_ns() >= until_ns;
        }
        else {
            rx->refused = 1;
            close_desk(rx);
        }
    }
    if (!over) {
        close_desk(rx);
        settled = await_settled(rx);
    }
    take_lock(&lock);
    if (settled) {
        rx->busy = 0;
    }
    return !settled ? 0 : settled < 0 || rx->refused ? -1 : 1;
}

void
recall_loan(End *rx)
{
    if (!rx->busy) {
        return;
    }
    close_desk(rx);
    if (!settle_loan(rx)) {
        /* It stays reserved: nothing else is ever to lie there. */
        mprotect(rx->guard, PAGE_BYTES, PROT_NONE);
        rx->guard = NULL;
        Lock lock = {NULL};
        give_up_lock(&lock);
        for (long long start = monotonic_ns(); !settle_loan(rx) && monotonic_ns() - start < RECALL_NS;) {
            sched_yield();
        }
        take_lock(&lock);
    }
    rx->recalled = 1; /* as long as the sender may still count what it could not write, nobody else is to be there */
    rx->busy = !rx->settled;
}

void
drop_guard(End *ring)
{
    if (ring->guard != NULL) {
        if (ring->busy) {
            mprotect(ring->guard, PAGE_BYTES, PROT_NONE);
        }
        else {
            munmap(ring->guard, PAGE_BYTES);
        }
        ring->guard = NULL;
    }
}

/* ---- The sender ---- */

static int
write_block(const Share *share, long block)
{
    uint64_t nothing = 0;
    size_t from = (size_t)block * share->block, nbytes = length_of(share, block);
    struct iovec local[] = {{&nothing, sizeof nothing}, {share->here + from, nbytes}};
    struct iovec remote[] = {{(char *)(uintptr_t)share->guard, sizeof nothing},
                             {(char *)(uintptr_t)share->there + from, nbytes}};
    return process_vm_writev(share->pid, local, 2, remote, 2, 0) == (ssize_t)(sizeof nothing + nbytes);
}

void
wait_at_desk(End *tx, uint64_t number)
{
    atomic_store_explicit(&tx->words[WAITS], number, memory_order_release);
}

const Word *
desk_of(End *tx)
{
    return &tx->words[OPEN];
}

int
write_loan(Express *self, End *tx, pid_t pid, uint64_t number, const char *message, size_t nbytes)
{
    Share share = {.ring = tx, .number = number, .pid = pid, .here = (char *)message, .nbytes = nbytes};
    Lock lock = {NULL};
    cut(&share);
    share.front = getpid() < pid;
    share.there = look_at(&share, BUFFER);
    share.guard = look_at(&share, GUARD);
    share.checked_ns = monotonic_ns();
    give_up_lock(&lock);
    int failed = 0;
    for (long block; !failed && (block = claim(&share)) >= 0;) {
        int written = write_block(&share, block);
        if (!written) {
            say(&share, FAILED, number);
        }
        atomic_fetch_add_explicit(&tx->words[DONE], 1, memory_order_release);
        failed = !written ? 1 : is_check_due(&share) ? has_failed(self, &lock) : 0;
    }
    take_lock(&lock);
    return failed < 0 ? -1 : 0;
}
