/* Distances: whether what another member has in its caches comes later than what is in memory, as where their cores have
   no cache in common. No table of the system tells that to who runs on virtual cores, and it changes there from one
   second to the next. So members that move much write a word now and then, each in a line of its own, and look how long
   it takes to read the one that another has just written. */

#include "steps.h"

#define FAR_BYTES (16 << 10) /* where a call moves so many, it counts how far they come: */
#define SELDOM 5             /* members look at one fence in so many, */
#define LONG_BYTES (1 << 20) /* and at each of a call that moves so many */
#define FAR_NS 70            /* to read a line: up to 40 from a core with a common cache, 80 and more from others */
#define FAR_STEP 2           /* one from far counts for two that are not: some of the others share this one's core */
#define MOST_FAR 16

static int
is_probed(const Arrivals *self, size_t moved)
{
    return moved >= LONG_BYTES || (moved >= FAR_BYTES && self->phase % SELDOM == 0);
}

void
tell_distance(Arrivals *self, size_t moved)
{
    if (is_probed(self, moved)) {
        atomic_store_explicit(&self->own[PROBE], self->phase, memory_order_relaxed);
    }
}

void
note_distance(Arrivals *self, size_t moved)
{
    if (!is_probed(self, moved) || self->count == 0) {
        return;
    }
    Peer *peer = &self->peers[self->looks++ % (unsigned)self->count];
    int64_t before = monotonic_ns();
    uint64_t probe = atomic_load_explicit(&peer->words[PROBE], memory_order_relaxed);
    int64_t behind = monotonic_ns();
    if (probe == peer->probe) { /* it has not been written since: this one's cache has it */
        return;
    }
    peer->probe = probe;
    if (behind - before - (monotonic_ns() - behind) > FAR_NS) {
        self->far = self->far + FAR_STEP < MOST_FAR ? self->far + FAR_STEP : MOST_FAR;
    }
    else if (self->far > 0) {
        self->far--;
    }
}

int
are_far(const Arrivals *self)
{
    return self->far > MOST_FAR / 2;
}
