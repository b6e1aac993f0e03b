/* Moves of memory: copies in this process, and reads of other processes' memory by the kernel. Backward moves go
   block by block from the end, with several blocks in one system call. Long copies that no other member reads are
   stored past the caches: sweeping.c. */

#include "script.h"

#include <poll.h>
#include <string.h>
#include <sys/uio.h>

#define BLOCK (128 << 10) /* bytes: it fits a cache, where order does not matter, and calls stay few */
#define MOST_BLOCKS 32    /* in one system call */

#define PAST_BYTES (1 << 20) /* of a copy past the caches: the next call may find shorter ones there */

/* Return the length of the last block of so many bytes: blocks are counted from the beginning. */
static size_t
last_block(size_t nbytes)
{
    return (nbytes - 1) % BLOCK + 1;
}

/* Copy blocks from the end; return how many bytes are left. */
static size_t
copy_last(char *dst, const char *src, size_t nbytes, void (*copy_block)(char *, const char *, size_t))
{
    while (nbytes > BLOCK) {
        size_t length = last_block(nbytes);
        nbytes -= length;
        copy_block(dst + nbytes, src + nbytes, length);
    }
    return nbytes;
}

static void
copy_block(char *dst, const char *src, size_t nbytes)
{
    memcpy(dst, src, nbytes);
}

static void
pass_block(char *dst, const char *src, size_t nbytes)
{
    sweep(dst, src, nbytes, PAST);
}

static int
overlap(const void *dst, const void *src, size_t nbytes)
{
    uintptr_t ahead = (uintptr_t)dst - (uintptr_t)src;
    return ahead < nbytes || -ahead < nbytes;
}

void
copy(void *dst, const void *src, size_t nbytes, int way)
{
    if (way > BACKWARDS && !overlap(dst, src, nbytes)) {
        sweep(dst, src, nbytes, way);
        return;
    }
    if (way == BACKWARDS) {
        nbytes = copy_last(dst, src, nbytes, copy_block);
    }
    if (dst != src) {
        memmove(dst, src, nbytes);
    }
}

void
copy_own(void *dst, const void *src, size_t nbytes, int way)
{
    if (way > BACKWARDS || nbytes < PAST_BYTES || overlap(dst, src, nbytes)) {
        copy(dst, src, nbytes, way);
        return;
    }
    if (way == BACKWARDS) {
        nbytes = copy_last(dst, src, nbytes, pass_block);
    }
    pass_block(dst, src, nbytes);
}

void
copy_both(void *slot, void *passed, const void *src, size_t nbytes, int into)
{
    if (overlap(passed, src, nbytes)) {
        copy(slot, src, nbytes, into);
        copy(passed, src, nbytes, FORWARDS);
    } else {
        sweep_both(slot, passed, src, nbytes, into);
    }
}

void
copy_beside(void *out, const void *emptied, size_t length, void *slot, void *passed, const void *src, size_t nbytes,
            int into)
{
    if (passed != NULL && overlap(passed, src, nbytes)) {
        copy(out, emptied, length, OUT);
        copy_both(slot, passed, src, nbytes, into);
    } else {
        sweep_beside(out, emptied, length, slot, passed, src, nbytes, into);
    }
}

static ssize_t
call_kernel(const Step *step, const struct iovec *here, const struct iovec *there, unsigned long count)
{
    return process_vm_readv((pid_t)step->pid, here, count, there, count, 0);
}

static char *
here_of(const Step *step)
{
    return (char *)(uintptr_t)step->dst.at;
}

static char *
there_of(const Step *step)
{
    return (char *)(uintptr_t)step->src.at;
}

/* Move the first bytes of a step, in ascending order; the kernel moves less than 2 GiB at a time. */
static int
move_forwards(const Step *step, size_t nbytes)
{
    for (size_t done = 0; done < nbytes;) {
        struct iovec here = {here_of(step) + done, nbytes - done}, there = {there_of(step) + done, nbytes - done};
        ssize_t moved = call_kernel(step, &here, &there, 1);
        if (moved <= 0) {
            return -1;
        }
        done += (size_t)moved;
    }
    return 0;
}

/* Move the last blocks of the first bytes of a step; return how many bytes are left, or -1. */
static ssize_t
move_last(const Step *step, size_t nbytes)
{
    struct iovec here[MOST_BLOCKS], there[MOST_BLOCKS];
    size_t left = nbytes;
    unsigned long count = 0;
    for (; count < MOST_BLOCKS && left; count++) {
        size_t length = last_block(left);
        left -= length;
        here[count] = (struct iovec){here_of(step) + left, length};
        there[count] = (struct iovec){there_of(step) + left, length};
    }
    ssize_t moved = call_kernel(step, here, there, count);
    return moved == (ssize_t)(nbytes - left) ? (ssize_t)left : -1;
}

/* Move all bytes of a step. */
static int
move_all(const Step *step)
{
    ssize_t left = (ssize_t)step->nbytes;
    while (step->way == BACKWARDS && left > BLOCK) {
        left = move_last(step, (size_t)left);
        if (left < 0) { /* it may have stopped half way: a retry from the beginning shows it */
            return move_forwards(step, step->nbytes);
        }
    }
    return move_forwards(step, (size_t)left);
}

int
move(const Step *step)
{
    struct pollfd process = {.fd = step->pidfd, .events = POLLIN};
    if (move_all(step) < 0) {
        return -1;
    }
    /* After the end of a process its id may belong to another one, and the bytes be that one's. */
    return step->pidfd >= 0 && poll(&process, 1, 0) != 0 ? -1 : 0;
}
