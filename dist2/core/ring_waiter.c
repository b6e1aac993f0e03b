/* The waiting for bytes in a ring: look, yield, part.

   As at fences (waiter.c) a yield that takes long shows that another process needs the core; the caller then sleeps.
   A yield that takes the time of a switch shows another thread on this core: mostly the awaited one. The kernel does
   not separate two threads that yield to each other, but it places a thread that wakes up on an idle core, if there is
   one. So after many such waits in a row the reader parts: it sleeps for a moment. If it shares its core as before, it
   does so four times as rarely, and so on. */

#define _GNU_SOURCE
#include "ring.h"

#include <sched.h>

#define CHECKED 16       /* yields between two checks of the caller */
#define SWITCH_NS 1500   /* a longer yield: another thread ran on this core */
#define SOME_TURNS 4     /* after so many such waits in a row, a waiter yields soon: */
#define SOON 5           /* after so many looks */
#define MANY_TURNS 32    /* after so many, the other thread is the awaited process */
#define PAUSE_NS INT64_C(4000000) /* between two partings, at first; */
#define LONGEST_PAUSE_NS INT64_C(4000000000)

int
ring_look(const Ring *ring, Together *together, long spins, long lone_spins)
{
    long looks = spins;
    if (spins == 0) {
        looks = together->unused == UNUSED_YIELDS ? lone_spins : 0;
    }
    else if (together->turns >= SOME_TURNS && spins > SOON) {
        looks = SOON;
    }
    for (long look = 0; look <= looks; look++) {
        if (ring_has(ring, 1)) {
            together->turns = 0;
            return 1;
        }
        pause_core();
    }
    return 0;
}

/* Sleep for a moment if the awaited process shares this core. */
static void
part(Together *together, int64_t now)
{
    if (together->turns < MANY_TURNS || now < together->until_ns) {
        return;
    }
    struct timespec moment = {0, 1};
    int in_vain = now - together->until_ns < together->pause_ns;
    int64_t pause = in_vain ? 4 * together->pause_ns : PAUSE_NS;
    together->pause_ns = pause < PAUSE_NS ? PAUSE_NS : pause > LONGEST_PAUSE_NS ? LONGEST_PAUSE_NS : pause;
    together->until_ns = now + together->pause_ns;
    together->turns = 0;
    together->partings++;
    nanosleep(&moment, NULL);
}

/* Whether another ring has bytes. */
static int
others_have(const RingWait *wait)
{
    for (int each = 0; each < wait->count; each++) {
        if (ring_has(wait->others[each], 1)) {
            return 1;
        }
    }
    return 0;
}

int
ring_yield(RingWait *wait)
{
    Together *together = wait->together;
    int64_t now = clock_ns();
    part(together, now);
    for (int yields = 0; yields < CHECKED && now < wait->end_ns && wait->slow < 2; yields++) {
        if (others_have(wait)) {
            wait->end_ns = 0;
            return 0;
        }
        sched_yield();
        int here = ring_has(wait->ring, 1);
        int64_t before = now;
        now = clock_ns();
        int switched = now - before > SWITCH_NS;
        together->unused = switched ? 0 : together->unused < UNUSED_YIELDS ? together->unused + 1 : UNUSED_YIELDS;
        if (here) {
            together->turns = switched ? together->turns + 1 : 0;
            return 1;
        }
        wait->slow = now - before > SLOW_YIELD_NS ? wait->slow + 1 : 0;
    }
    return 0;
}
