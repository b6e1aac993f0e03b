/* Turns: each member publishes the core on which it waits and when it ran, so that the others on that core can tell
   whether some other process has had it. */

#include "steps.h"

#include <sched.h>

#define TURN_NS INT64_C(1000000) /* the longest turn of a member between fences; a computation's is about 4 ms */

void
tell_core(Arrivals *self)
{
    int core = sched_getcpu();
    if (core != self->core && core >= 0) {
        self->core = core;
        atomic_store_explicit(&self->own[CORE], (uint64_t)core + 1, memory_order_relaxed);
    }
}

void
tell_running(Arrivals *self, int64_t now)
{
    atomic_store_explicit(&self->own[RAN], (uint64_t)now, memory_order_relaxed);
}

/* Return the first known time, in an interval, at which another member ran on this core; the end of the interval if
   none did. */
static int64_t
ran_between(const Arrivals *self, int64_t since, int64_t until)
{
    int64_t first = until;
    for (Py_ssize_t each = 0; each < self->count; each++) {
        const Word *words = self->peers[each].words;
        int64_t ran = (int64_t)atomic_load_explicit(&words[RAN], memory_order_relaxed);
        if (ran > since && ran < first &&
            atomic_load_explicit(&words[CORE], memory_order_relaxed) == (uint64_t)self->core + 1) {
            first = ran;
        }
    }
    return first;
}

int
had_long_turn(const Arrivals *self, int64_t since, int64_t until, int64_t slow_ns)
{
    int64_t most = slow_ns < TURN_NS ? slow_ns : TURN_NS;
    while (since < until) {
        int64_t next = ran_between(self, since, until);
        if (next - since > most) {
            return 1;
        }
        since = next;
    }
    return 0;
}
