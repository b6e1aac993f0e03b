/* Spreading: where members meet at one fence after the other, a member migrates to another core if clearly fewer
   members are there. Members also publish that they run, so that the others on a core can tell whether some other
   process has had it.

   The kernel leaves members on their cores: it seldom looks at cores that are all busy, and treats a thread that has
   just run as settled. Six members on one core and two on another take twice as long as four and four. Two on one
   core, with the other one idle, can stay so for tens of milliseconds, as they never sleep, and take four times as
   long.

   A member migrates by setting the affinity of its thread to that core and at once back to all cores; afterwards the
   kernel schedules it as usual. It migrates only if the caller asked for this and the thread may run on all cores: a
   set affinity is left alone. */

#include "steps.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

#define WAITS 16 /* how many waits lie between two checks, */
#define FEW_WAITS 2 /* and with a core for each member. If they took longer than this, members compute as well: */
#define DENSE_NS INT64_C(16000000)
#define STAY_NS INT64_C(4000000) /* no migration for so long after one, or after a wait for a core that others use; */
#define BAD_NS INT64_C(10000000) /* if it waits so soon after a migration, longer each time, */
#define LONG_STAY_NS INT64_C(4000000000) /* and this long at most */
#define TURN_NS INT64_C(1000000) /* the longest turn of a member between fences; a computation's is about 4 ms */

/* Count the members that wait on each core; 0 if this is not the one to migrate: of several the last rank does. */
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

/* Find a core with at least two members fewer; -1 if there is none, or this thread has a restricted affinity. */
static int
find_core(const Arrivals *self, int here)
{
    uint16_t counts[CPU_SETSIZE];
    cpu_set_t allowed;
    int best = here;
    if (!count_members(self, here, counts) || sched_getaffinity(0, sizeof allowed, &allowed) < 0) {
        return -1;
    }
    for (int step = 1; step < CPU_SETSIZE; step++) { /* the next ones first, so that not all choose the same one */
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

/* Move this thread to a core, and then allow all cores again; 0 if that is not permitted. */
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

/* Publish the core on which this member waits. */
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
