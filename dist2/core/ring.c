/* Rings: see ring.h. */

#include "ring.h"

#include "far.h"
#include "memory.h"

#include <sched.h>
#include <string.h>

#define PIECE_BYTES (32 << 10) /* published at once; past the caches each piece costs a fence */
#define PATIENT_NS 200000     /* how long a reader waits for the rest of a frame */
#define FEW_LOOKS 64
#define LINE_BYTES 64 /* of a cache */

void
ring_open(Ring *ring, void *memory, size_t nbytes, int writes)
{
    size_t page = RING_PAGE_WORDS * sizeof(Word);
    ring->words = memory;
    ring->bytes = (char *)memory + page;
    ring->capacity = nbytes - page;
    ring->count = read_word(&ring->words[writes ? RING_HEAD : RING_TAIL]);
    ring->base = read_word(&ring->words[RING_BASE]);
}

uint64_t
ring_unread(const Ring *ring, int writes)
{
    uint64_t other = observe(&ring->words[writes ? RING_TAIL : RING_HEAD]);
    return writes ? ring->count - other : other - ring->count;
}

/* Copy into the ring, and continue at its beginning. */
static void
copy_in(Ring *ring, uint64_t at, const char *from, size_t nbytes)
{
    uint64_t place = (at - ring->base) % ring->capacity;
    size_t first = nbytes < ring->capacity - place ? nbytes : ring->capacity - place;
    void (*store)(void *, const void *, size_t) = is_away(nbytes, ring->far) ? copy_past : copy;
    store(ring->bytes + place, from, first);
    store(ring->bytes, from + first, nbytes - first);
}

/* Copy out of the ring, and continue at its beginning. */
static void
copy_out(const Ring *ring, uint64_t at, char *to, size_t nbytes)
{
    uint64_t place = (at - ring->base) % ring->capacity;
    size_t first = nbytes < ring->capacity - place ? nbytes : ring->capacity - place;
    memcpy(to, ring->bytes + place, first);
    memcpy(to + first, ring->bytes, nbytes - first);
}

/* Publish a counter of this end; the fence comes before the look at the other end's flag. */
static void
publish_count(Ring *ring, int word, uint64_t count)
{
    ring->count = count;
    publish(&ring->words[word], count);
    atomic_thread_fence(memory_order_seq_cst);
}

/* Start a frame at the beginning of the ring, which both sides have in their caches; possible while no byte is
   unread. A payload that does not fit into one cache line with its header starts at a line of its own. */
static void
restart(Ring *ring, size_t header_bytes, size_t nbytes)
{
    size_t spare = LINE_BYTES - header_bytes % LINE_BYTES;
    ring->base = ring->count - (nbytes > spare ? spare : 0);
    write_word(&ring->words[RING_BASE], ring->base); /* the head is published later */
}

int
ring_push(Ring *ring, const char *header, size_t header_bytes, const char *payload, size_t nbytes)
{
    uint64_t at = ring->count, unread = ring_unread(ring, 1);
    if (unread > ring->capacity || ring->capacity - unread < header_bytes + nbytes) {
        return 0;
    }
    if (unread == 0) {
        restart(ring, header_bytes, nbytes);
    }
    at = ring_put(ring, at, header, header_bytes);
    ring_end(ring, ring_put(ring, at, payload, nbytes));
    return 1;
}

/* Whether the next unread bytes are this header; the remaining unread bytes lie behind it. */
static int
is_next(Ring *ring, const char *header, size_t header_bytes)
{
    uint64_t unread = ring_unread(ring, 0);
    if (unread < header_bytes || unread > ring->capacity) {
        return 0;
    }
    ring->base = read_word(&ring->words[RING_BASE]);
    uint64_t place = (ring->count - ring->base) % ring->capacity;
    size_t first = header_bytes < ring->capacity - place ? header_bytes : ring->capacity - place;
    return memcmp(ring->bytes + place, header, first) == 0 &&
           memcmp(ring->bytes, header + first, header_bytes - first) == 0;
}

/* Wait for bytes beyond a position: return their number, or 0 if none come. */
static uint64_t
await_more(const Ring *ring, uint64_t at)
{
    int64_t start = 0;
    for (long look = 0;; look++) {
        uint64_t more = observe(&ring->words[RING_HEAD]) - at;
        if (more) {
            return more;
        }
        if (look < FEW_LOOKS) {
            pause_core();
            continue;
        }
        int64_t now = clock_ns();
        start = start ? start : now;
        if (now - start > PATIENT_NS) {
            return 0;
        }
        sched_yield();
    }
}

int
ring_pull(Ring *ring, const char *header, size_t header_bytes, char *payload, size_t nbytes)
{
    if (!is_next(ring, header, header_bytes)) {
        return 0;
    }
    uint64_t at = ring->count + header_bytes;
    for (size_t done = 0; done < nbytes;) {
        uint64_t more = await_more(ring, at);
        if (more == 0 || at + more - ring->count > ring->capacity) {
            return 0;
        }
        size_t piece = nbytes - done < more ? nbytes - done : more;
        copy_out(ring, at, payload + done, piece);
        at += piece;
        done += piece;
    }
    return 1;
}

int
ring_pull_like(Ring *ring, const char *header, size_t alike, char *found, size_t header_bytes)
{
    if (!ring_has(ring, header_bytes) || !is_next(ring, header, alike)) {
        return 0;
    }
    copy_out(ring, ring->count, found, header_bytes);
    return 1;
}

void
ring_consume(Ring *ring, uint64_t nbytes)
{
    if (is_probed(nbytes, 0)) { /* each time: the reader does not know which of them the writer measures */
        write_word(&ring->words[RING_PROBE], ring->count);
    }
    publish_count(ring, RING_TAIL, ring->count + nbytes);
}

uint64_t
ring_begin(Ring *ring)
{
    if (ring_unread(ring, 1) == 0) {
        restart(ring, 0, 0);
    }
    return ring->count;
}

uint64_t
ring_put(Ring *ring, uint64_t at, const char *from, size_t nbytes)
{
    if (is_probed(nbytes, ring->puts++)) {
        measure(&ring->words[RING_PROBE], &ring->probe, &ring->far);
    }
    for (; nbytes > PIECE_BYTES; nbytes -= PIECE_BYTES) {
        copy_in(ring, at, from, PIECE_BYTES);
        at += PIECE_BYTES;
        from += PIECE_BYTES;
        publish(&ring->words[RING_HEAD], at);
    }
    copy_in(ring, at, from, nbytes);
    return at + nbytes;
}

void
ring_end(Ring *ring, uint64_t at)
{
    publish_count(ring, RING_HEAD, at);
}

size_t
ring_read(Ring *ring, char *to, size_t most, uint64_t unread)
{
    size_t count = most < unread ? most : (size_t)unread;
    ring->base = read_word(&ring->words[RING_BASE]);
    copy_out(ring, ring->count, to, count);
    ring_consume(ring, count);
    return count;
}

void
ring_doze(Ring *ring, int writes, int sleeps)
{
    write_word(&ring->words[writes ? WRITER_SLEEPS : READER_SLEEPS], (uint64_t)sleeps);
    atomic_thread_fence(memory_order_seq_cst); /* set the flag before looking at the other end's counter again */
}
