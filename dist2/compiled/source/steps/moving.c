/* Moves of memory: copies in this process, and what the kernel copies between processes. Those that go backwards go
   block by block from the end on, with several blocks in one call of the kernel. What is long and concerns nobody else
   is stored past the caches: to store into a line that is in none would mean to fetch it first. */

#include "script.h"

#include <string.h>
#include <sys/uio.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define BLOCK (128 << 10) /* bytes: what lies in a cache is found in either order, and calls stay few */
#define MOST_BLOCKS 32    /* that one call of the kernel moves */

#define PAST_BYTES (1 << 20) /* of a copy that goes past the caches: shorter ones may be found there by the next call */
#define LINE 64
#define PAGE 4096
#define PAGES 4 /* that are copied in turn: one at a time leaves most of what memory can do unused */

/* Return how long the last block is of so many bytes: blocks are counted from the beginning. */
static size_t
last_block(size_t nbytes)
{
    return (nbytes - 1) % BLOCK + 1;
}

void
copy(void *dst, const void *src, size_t nbytes, int backwards)
{
    while (backwards && nbytes > BLOCK) {
        size_t length = last_block(nbytes);
        nbytes -= length;
        memcpy((char *)dst + nbytes, (const char *)src + nbytes, length);
    }
    memmove(dst, src, nbytes);
}

#ifdef __SSE2__
/* Store one line past the caches. */
static inline void
stream_line(char *dst, const char *src)
{
    for (int at = 0; at < LINE; at += 16) {
        _mm_stream_si128((__m128i *)(dst + at), _mm_loadu_si128((const __m128i *)(src + at)));
    }
}

/* Copy memory that does not overlap past the caches. */
static void
stream(char *dst, const char *src, size_t nbytes)
{
    size_t ragged = -(uintptr_t)dst % LINE; /* before the first whole line */
    ragged = ragged < nbytes ? ragged : nbytes;
    memcpy(dst, src, ragged);
    dst += ragged, src += ragged, nbytes -= ragged;
    for (; nbytes >= PAGES * PAGE; dst += PAGES * PAGE, src += PAGES * PAGE, nbytes -= PAGES * PAGE) {
        for (int line = 0; line < PAGE; line += LINE) {
            for (int page = 0; page < PAGES * PAGE; page += PAGE) {
                stream_line(dst + page + line, src + page + line);
            }
        }
    }
    _mm_sfence();
    memcpy(dst, src, nbytes);
}
#else
static void
stream(char *dst, const char *src, size_t nbytes)
{
    memcpy(dst, src, nbytes);
}
#endif

void
copy_own(void *dst, const void *src, size_t nbytes, int backwards)
{
    uintptr_t ahead = (uintptr_t)dst - (uintptr_t)src;
    if (nbytes < PAST_BYTES || ahead < nbytes || -ahead < nbytes) {
        copy(dst, src, nbytes, backwards);
        return;
    }
    for (; backwards && nbytes > BLOCK; nbytes -= last_block(nbytes)) {
        size_t length = last_block(nbytes);
        stream((char *)dst + nbytes - length, (const char *)src + nbytes - length, length);
    }
    stream(dst, src, nbytes);
}

static ssize_t
call_kernel(const Step *step, const struct iovec *here, const struct iovec *there, unsigned long count)
{
    return step->kind == READ ? process_vm_readv((pid_t)step->pid, here, count, there, count, 0)
                              : process_vm_writev((pid_t)step->pid, here, count, there, count, 0);
}

static char *
here_of(const Step *step)
{
    return (char *)(uintptr_t)(step->kind == READ ? step->dst.at : step->src.at);
}

static char *
there_of(const Step *step)
{
    return (char *)(uintptr_t)(step->kind == READ ? step->src.at : step->dst.at);
}

/* Move the first bytes of a step, from the first one on; the kernel moves less than 2 GiB at a time. */
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

int
move(const Step *step)
{
    ssize_t left = (ssize_t)step->nbytes;
    while (step->backwards && left > BLOCK) {
        left = move_last(step, (size_t)left);
        if (left < 0) { /* it may have stopped half way: that is found out from the beginning */
            return move_forwards(step, step->nbytes);
        }
    }
    return move_forwards(step, (size_t)left);
}
