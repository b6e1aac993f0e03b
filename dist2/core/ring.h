/* A ring: a byte pipe through shared memory, with one writer and one reader. Functions: ring.c, ring_waiter.c.

   A ring lies in the writer's memory: a page of words, then the bytes. HEAD counts bytes written, TAIL bytes read;
   each has one writer, so neither needs a lock. The writer stores HEAD (release) after the bytes, the reader loads it
   (acquire) before it reads them; likewise TAIL, for the free space. A reader without data, or a writer without room,
   sets its flag before it sleeps and looks once more; the other side publishes its counter before it reads the flag.
   Both sides therefore have a fence (seq_cst) between the two.

   Positions are counted from BASE. While nothing is unread, the writer may set it to its next position, so that the
   next bytes are written at the beginning again: in memory that both sides have in their caches. BASE is stored before
   HEAD, and read after it.

   Each end keeps its own counter in private memory and accepts the other's only within bounds: shared memory written
   by a peer is untrusted input.

   Source: Lamport, "Proving the Correctness of Multiprocess Programs", 1977 (the two-counter queue). */

#ifndef DIST2_CORE_RING_H
#define DIST2_CORE_RING_H

#include "base.h"

/* The words of the page. Those that different sides write lie a cache line apart. */
enum {
    RING_HEAD = 0,
    RING_BASE = 1,
    RING_TAIL = 8,
    READER_SLEEPS = 16,
    WRITER_SLEEPS = 24,
    RING_PROBE = 32, /* written by the reader of many bytes: far.h */
    RING_PAGE_WORDS = 512
};

/* One end. `count`: how many bytes it has written or read; `base`: the number of the byte at the beginning; `puts`: how
   often it has written. A writer measures how `far` the reader's caches are, by the `probe` that it read last. */
typedef struct {
    Word *words;
    char *bytes;
    uint64_t capacity, count, base;
    uint64_t probe, puts;
    int far;
} Ring;

/* Set up one end of a ring in memory of a page and a number of bytes. */
void ring_open(Ring *ring, void *memory, size_t nbytes, int writes);

/* Whether so many bytes are unread: the reader's question. */
static inline int
ring_has(const Ring *ring, uint64_t nbytes)
{
    return observe(&ring->words[RING_HEAD]) - ring->count >= nbytes;
}

/* Return how many bytes are unread; more than the capacity if the other end's counter cannot be right. */
uint64_t ring_unread(const Ring *ring, int writes);

/* Write a frame, a header and its payload: 1, or 0 if there is no room for both, or the reader's counter is invalid. */
int ring_push(Ring *ring, const char *header, size_t header_bytes, const char *payload, size_t nbytes);

/* Copy the payload behind a header: 1, or 0 if another header is next, or the payload does not come. The frame stays in
   the ring until `ring_consume`. */
int ring_pull(Ring *ring, const char *header, size_t header_bytes, char *payload, size_t nbytes);

/* Copy the next header, if it has come completely and its first `alike` bytes are those of `header`; return whether
   this holds. It stays in the ring until `ring_consume`. */
int ring_pull_like(Ring *ring, const char *header, size_t alike, char *found, size_t header_bytes);

/* Free the bytes of frames that were pulled. */
void ring_consume(Ring *ring, uint64_t nbytes);

/* Write bytes behind those of `ring_begin` and earlier calls; `ring_end` publishes them. The caller knows that there
   is room. Of many bytes the first ones are published as they are written: the reader copies meanwhile. */
uint64_t ring_begin(Ring *ring);
uint64_t ring_put(Ring *ring, uint64_t at, const char *from, size_t nbytes);
void ring_end(Ring *ring, uint64_t at);

/* Read up to so many unread bytes; return how many. */
size_t ring_read(Ring *ring, char *to, size_t most, uint64_t unread);

/* Set whether this end sleeps. The caller looks into the ring again afterwards. */
void ring_doze(Ring *ring, int writes, int sleeps);

/* ---- ring_waiter.c ---- */

/* What a reader has learned of its core: whether it shares that with the process that it waits for. */
typedef struct {
    int turns;  /* waits in a row that ended right after another thread had the core */
    int unused; /* yields in a row without another thread, counted up to UNUSED_YIELDS */
    int64_t until_ns, pause_ns; /* no sleep before this time, and the pause after it */
    uint64_t partings;          /* sleeps so far */
} Together;

enum { UNUSED_YIELDS = 8, MOST_READERS = 64 };

/* A wait for one ring that also looks into others. */
typedef struct {
    const Ring *ring;
    const Ring *others[MOST_READERS];
    int count;
    int slow; /* yields in a row: at two another process needs the core */
    int64_t end_ns;
    Together *together;
} RingWait;

/* Look into a ring, before the first yield: whether it has bytes. `spins`: how often; `lone_spins`: the same if that is
   0 and no other thread needs the core. */
int ring_look(const Ring *ring, Together *together, long spins, long lone_spins);

/* Yield until the ring has bytes: 1; 0 if it is time for the caller's checks, or to end the wait: `end_ns` has passed
   (it is set to 0 if another ring has bytes), or the yields are slow. */
int ring_yield(RingWait *wait);

#endif
