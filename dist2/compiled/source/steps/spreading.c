/* Spreading: where members meet at one fence after the other, a member goes to another core if clearly fewer of them
   are there. And who else has had a core: members tell when they run, so that the others on it know who has not told.

   The kernel would leave them where they are: it seldom looks at cores that are all busy, and takes who has just run
   for settled. Six members on one core and two on another take twice as long as four and four; two on one core, with
   the other one idle, can stay so for tens of milliseconds, as they never sleep, and take four times as long.

   A member goes by having its thread run on that core alone and, at once, anywhere again; from then on the kernel moves
   it as ever. It does so only if it was asked to, and where it may run on all cores: nobody has chosen any for it. */

#include "steps.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

#define WAITS 16 /* how many waits lie between two looks, */
#define FEW_WAITS 2 /* and where there is a core for each member. If they took longer than this, members compute as well: */
#define DENSE_NS INT64_C(16000000)
#define STAY_NS INT64_C(4000000) /* how long it stays after it has gone, or waited for a core that others use; */
#define BAD_NS INT64_C(10000000) /* if it waits so soon after it has gone, longer each time, */
#define LONG_STAY_NS INT64_C(4000000000) /* and this long at most */
#define TURN_NS INT64_C(1000000) /* for longer no member has a core between two fences; who computes has it for 4 ms, say */

/* Count the members that wait on each core; 0 if this is not the one to go: of several the last rank is. */
static int
count_members(const Arrivals *self, int here, uint16_t counts[CPU_SETSIZE])
{
    memset(counts, 0, CPU_SETSIZE * sizeof counts[0]);
    counts[here]++;
    for (Py_ssize_t each = 0; each < self->count; each++) {
        uint64_t core = atomic_load_explicit(&self->peers[each].words[CORE], memory_order_relaxed);
        if (core == 0 || core > CPU_SETSIZE) {
            continue;
        }
        counts[core - 1]++;
        if (core - 1 == (uint64_t)here && self->peers[each].rank > self->rank) {
            return 0;
        }
    }
    return counts[here] > 1;
}

/* Find a core with fewer members by two or more; -1 if there is none, or somebody chose cores for this thread. */
static int
find_core(const Arrivals *self, int here)
{
    uint16_t counts[CPU_SETSIZE];
    cpu_set_t allowed;
    int best = here;
    if (!count_members(self, here, counts) || sched_getaffinity(0, sizeof allowed, &allowed) < 0) {
        return -1;
    }
    for (int step = 1; step < CPU_SETSIZE; step++) { /* the next ones first: not all go to the same one */
        int core = (here + step) % CPU_SETSIZE;
        if (CPU_ISSET(core, &allowed) && counts[core] < counts[best]) {
            best = core;
        }
    }
    if (counts[here] - counts[best] < 2 || CPU_COUNT(&allowed) != sysconf(_SC_NPROCESSORS_ONLN)) {
        return -1;
    }
    return best;
}

/* Have this thread run on a core, and wherever the kernel likes from then on; 0 if that is not permitted. */
static int
go_to(int core)
{
    cpu_set_t there, anywhere;
    CPU_ZERO(&there);
    CPU_SET(core, &there);
    if (sched_setaffinity(0, sizeof there, &there) < 0) {
        return 0;
    }
    memset(&anywhere, 0xff, sizeof anywhere);
    sched_setaffinity(0, sizeof anywhere, &anywhere);
    return 1;
}

/* Tell on which core this member waits. */
static void
tell_core(Arrivals *self, int core)
{
    self->core = core;
    atomic_store_explicit(&self->own[CORE], (uint64_t)core + 1, memory_order_relaxed);
}

void
spread(Arrivals *self, int64_t now)
{
    int core = sched_getcpu();
    if (core != self->core && core >= 0 && core < CPU_SETSIZE) {
        tell_core(self, core);
    }
    if (!self->spreads) {
        return;
    }
    if (core != self->core || ++self->waits < (self->spins ? FEW_WAITS : WAITS)) {
        return;
    }
    int64_t took = now - self->spread_ns;
    self->waits = 0;
    self->spread_ns = now;
    if (took > DENSE_NS || now < self->stay_until_ns) {
        return;
    }
    int better = find_core(self, core);
    if (better < 0) {
        return;
    }
    if (!go_to(better)) {
        self->stay_until_ns = INT64_MAX;
        return;
    }
    self->moves++;
    self->stay_ns = self->stay_ns / 2 > STAY_NS ? self->stay_ns / 2 : STAY_NS;
    self->stay_until_ns = now + STAY_NS;
    self->moved_ns = now;
    tell_core(self, better);
}

void
stay(Arrivals *self, int64_t now)
{
    if (self->stay_until_ns == INT64_MAX) {
        return;
    }
    int64_t until = now + STAY_NS;
    if (self->moves && now - self->moved_ns < BAD_NS) {
        self->stay_ns = 4 * self->stay_ns < LONG_STAY_NS ? 4 * self->stay_ns : LONG_STAY_NS;
        until = now + self->stay_ns;
    }
    if (until > self->stay_until_ns) {
        self->stay_until_ns = until;
    }
}

void
tell_running(Arrivals *self, int64_t now)
{
    atomic_store_explicit(&self->own[RAN], (uint64_t)now, memory_order_relaxed);
}

/* Return when one of the other members on this core was known to run first between two moments; the later one if none
   was. */
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
