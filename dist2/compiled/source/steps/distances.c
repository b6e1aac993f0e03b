/* Distances: whether what another member has in its caches comes later than what is in memory, as where their cores have
   no cache in common. No table of the system tells that to who runs on virtual cores, and it changes there from one
   second to the next. So a member looks how long it takes to read what others have just written. */

#include "steps.h"

#define FAR_NS 70  /* to read a line: 20 to 40 from a core with a common cache, 80 and more from others */
#define FAR_STEP 2 /* a line from far counts for two that are not: some of the others share this one's core */
#define MOST_FAR 32
#define UNKNOWN INT64_MIN

/* Return how much longer it takes to read another member's word of a fence than to read it again; UNKNOWN if the member
   has not come. */
static int64_t
read_time(const Arrivals *self, const Peer *peer, uint64_t phase)
{
    const Word *word = &peer->words[phase % RING];
    int64_t before = monotonic_ns();
    uint64_t first = atomic_load_explicit(word, memory_order_acquire);
    int64_t between = monotonic_ns();
    uint64_t again = atomic_load_explicit(word, memory_order_acquire);
    int64_t behind = monotonic_ns();
    int has_come = first == again && first == atomic_load_explicit(&self->own[phase % RING], memory_order_relaxed);
    return has_come ? between - before - (behind - between) : UNKNOWN;
}

void
note_distances(Arrivals *self, uint64_t phase)
{
    for (Py_ssize_t each = 0; each < self->count; each++) {
        const Peer *peer = &self->peers[each];
        int64_t took = peer->agreed + 1 == phase ? read_time(self, peer, phase) : UNKNOWN;
        if (took > FAR_NS) {
            self->far = self->far + FAR_STEP < MOST_FAR ? self->far + FAR_STEP : MOST_FAR;
        }
        else if (took != UNKNOWN && self->far > 0) {
            self->far--;
        }
    }
}

int
are_far(const Arrivals *self)
{
    return self->far > MOST_FAR / 2;
}
