/* Fences: publishing one, and waiting for the other members. */

#include "steps.h"

#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#define PHASES (UINT64_C(1) << (64 - PRINT_BITS))

/* SLEEPING: a nap's number, the awaited fence, and the awaited members: 1 for all, a rank and 2 for one. 0: awake. */
#define PHASE_BITS (64 - PRINT_BITS)
#define WHOM_BITS 16
#define FOR_ALL 1
#define FOR_ONE 2

#define LOOK_NS INT64_C(5000000) /* how often a wait for fewer than all checks the health of all, in Python */
#define YIELD_BUDGET_NS INT64_C(2000000)
#define DOZE_NS INT64_C(4000000) /* from the beginning of the wait; after that Python sleeps */
#define LONG_NAP 512
#define LONG_NAP_IN_CROWDS 64 /* where more than so many share a core: a useless sleep delays all of them */
#define CROWD 4
#define LASTING_NS INT64_C(20000000) /* within which two yields have to be slow: one may be a thread of the system */
#define SLOW_WAKE_NS INT64_C(200000) /* from the wake-up call until it runs: */
#define SLOW_WAKES 3                 /* after so many in a row slow yields cause no sleep, */
#define AWAKE_NS INT64_C(20000000)   /* for this time; twice as long if wake-ups are still slow, and so on, */
#define LONG_AWAKE_NS INT64_C(2000000000) /* up to this time */
#define PATIENT 25 /* factor on the yields of a waiter while no other process is known to use the cores */
#define YIELD_BYTES 512          /* one more yield before sleeping for each so many bytes that others move */
#define SLOW_BYTES (768.0 * 1024) /* bytes that members move in the time of a slow yield */
#define FEW_LOOKS 8 /* with the interpreter lock: releasing it costs as much as they do */

/* Whether a member has come to a fence, with the same fingerprint there and before. */
static inline int
has_come(Arrivals *self, Peer *peer, uint64_t phase)
{
    while (peer->agreed < phase) {
        size_t next = (peer->agreed + 1) % RING;
        if (atomic_load_explicit(&peer->words[next], memory_order_acquire) !=
            atomic_load_explicit(&self->own[next], memory_order_relaxed)) {
            return 0;
        }
        peer->agreed++;
    }
    return 1;
}

/* Whether a member's word of a fence is in its page, regardless of its fingerprint. */
static inline int
is_at(const Peer *peer, uint64_t phase)
{
    uint64_t word = atomic_load_explicit(&peer->words[phase % RING], memory_order_acquire);
    return word >> PRINT_BITS == phase % PHASES;
}

/* Awaited members: those from `first` up to `absent` may not have come to the fence. */
typedef struct {
    Py_ssize_t first, absent;
    uint64_t phase;
} Awaited;

static inline Awaited
awaited_of(const Arrivals *self, Py_ssize_t whom, uint64_t phase)
{
    if (whom == ALL) {
        return (Awaited){0, self->count, phase};
    }
    return whom == NOBODY ? (Awaited){0, 0, phase} : (Awaited){whom, whom + 1, phase};
}

/* Whether the awaited members have come. */
static inline int
have_come(Arrivals *self, Awaited *awaited)
{
    while (awaited->absent > awaited->first && has_come(self, &self->peers[awaited->absent - 1], awaited->phase)) {
        awaited->absent--;
    }
    return awaited->absent == awaited->first;
}

/* Whether a sleeping member can continue, because this one has come to its last fence. */
static int
frees(const Arrivals *self, const Peer *sleeper, uint64_t sleeping)
{
    uint64_t whom = sleeping % (UINT64_C(1) << WHOM_BITS), phase = (sleeping >> WHOM_BITS) % PHASES;
    if ((self->phase - phase) % PHASES >= PHASES / 2) {
        return 0;
    }
    if (whom != FOR_ALL) {
        return whom == (uint64_t)self->rank + FOR_ONE;
    }
    for (Py_ssize_t each = 0; each < self->count; each++) {
        if (&self->peers[each] != sleeper && !is_at(&self->peers[each], phase)) {
            return 0;
        }
    }
    return 1;
}

/* Wake the members that can continue, once for each of their naps. Of several members that come at the same time at
   least one sees the words of all, as each published its own first. */
static void
ring_sleepers(Arrivals *self)
{
    for (Py_ssize_t each = 0; each < self->count; each++) {
        Peer *peer = &self->peers[each];
        uint64_t sleeping = atomic_load_explicit(&peer->words[SLEEPING], memory_order_relaxed);
        if (!sleeping || sleeping == peer->rung || !frees(self, peer, sleeping)) {
            continue;
        }
        peer->rung = sleeping;
        atomic_store_explicit(&self->own[RANG], (uint64_t)monotonic_ns(), memory_order_relaxed);
        if (write(peer->bell, "!", 1) < 0) {
            continue; /* full: it is about to wake anyway; broken: it is dead, and its watchers report that */
        }
    }
}

/* Run the attending function between two yields; 0, or -1 with an exception. */
static int
give_turn(const Waiter *waiter)
{
    if (waiter->attend == NULL) {
        return 0;
    }
    take_lock(waiter->lock);
    PyObject *attended = PyObject_CallNoArgs(waiter->attend);
    if (attended == NULL) {
        return -1;
    }
    Py_DECREF(attended);
    return 0;
}

/* Return how often to yield: longer while others move much data. A member that slept meanwhile would wake late,
   because an idle core goes to sleep as well. */
static long
yields_for(const Arrivals *self, size_t moved)
{
    size_t more = moved / YIELD_BYTES;
    return more < (size_t)(LONG_MAX - self->yields) ? self->yields + (long)more : LONG_MAX;
}

/* Record whether slow yields show another user of this member's core, and publish it. */
static void
note_crowd(Arrivals *self, long nap)
{
    char crowded = nap > SHORT_NAP;
    self->nap = nap;
    if (crowded == self->crowded) {
        return;
    }
    self->crowded = crowded;
    atomic_store_explicit(&self->own[CROWDED], (uint64_t)crowded, memory_order_relaxed);
}

/* Whether an awaited member is known to share its core with another process. */
static int
waits_for_crowded(const Arrivals *self, const Awaited *awaited)
{
    for (Py_ssize_t each = awaited->first; each < awaited->absent; each++) {
        if (atomic_load_explicit(&self->peers[each].words[CROWDED], memory_order_relaxed)) {
            return 1;
        }
    }
    return 0;
}

/* Return for how many fences this member sleeps at once after one more slow yield. */
static long
longer_nap(const Arrivals *self)
{
    long most = self->slow_ns > CROWD * SLOW_YIELD_NS ? LONG_NAP_IN_CROWDS : LONG_NAP;
    return 2 * self->nap < most ? 2 * self->nap : most;
}

/* Whether a slow yield shows another process that needs this core for longer, so that sleeping helps. */
static int
is_wanted(Arrivals *self, int64_t now)
{
    int lasting = now - self->wanted_ns < LASTING_NS;
    self->wanted_ns = now;
    return lasting && now > self->awake_until_ns;
}

/* Yield until the awaited members have come or it is time to sleep: 1, 0, or -1 with an exception. While no other
   process uses the cores this goes on for long. If each member has a session of its own, the kernel returns the core
   to a yielding member until that member has used as much time as the others. A member that slept instead would stay
   behind in that count, and would yield in vain and be woken at fence after fence. */
static int
yield_until(Arrivals *self, Awaited *awaited, const Waiter *waiter)
{
    int64_t start = monotonic_ns(), now = start, budget = self->sleepy ? 0 : YIELD_BUDGET_NS;
    long left = waiter->attend == NULL ? yields_for(self, waiter->moved) : LONG_MAX;
    int turns = self->crowded ? 1 : PATIENT;
    double more = (double)waiter->moved / SLOW_BYTES; /* at most twice: another user must be noticed */
    int64_t slow_ns = self->slow_ns + (int64_t)((double)self->slow_ns * (more < 1.0 ? more : 1.0));
    tell_core(self);
    if (self->sleepy) {
        self->sleepy--;
        self->wanted_ns = now;
    }
    while (now - start < budget && left-- > 0) {
        if (have_come(self, awaited)) {
            note_crowd(self, self->nap - (self->nap > SHORT_NAP));
            return 1;
        }
        if (left == 0 && --turns > 0 && !waits_for_crowded(self, awaited)) {
            left = self->yields;
        }
        if (atomic_load_explicit(&self->stopped, memory_order_relaxed)) {
            return 0;
        }
        if (give_turn(waiter) < 0) {
            return -1;
        }
        give_up_lock(waiter->lock);
        sched_yield();
        int64_t before = now;
        now = monotonic_ns();
        tell_running(self, now);
        if (now - before > slow_ns && had_long_turn(self, before, now, slow_ns) && is_wanted(self, now)) {
            self->sleepy = self->nap; /* do not compete by polling */
            note_crowd(self, longer_nap(self));
            break;
        }
    }
    return 0;
}

/* Return the value of SLEEPING for a nap that begins. */
static uint64_t
begin_nap(Arrivals *self, long whom, uint64_t phase)
{
    uint64_t code = whom == ALL ? FOR_ALL : (uint64_t)whom + FOR_ONE;
    self->naps++;
    return self->naps << (WHOM_BITS + PHASE_BITS) | phase % PHASES << WHOM_BITS | code;
}

/* Return the time since the last wake-up call after a given time; 0 if there was none. */
static int64_t
rung_for(const Arrivals *self, int64_t since_ns, int64_t now)
{
    int64_t rang = 0;
    for (Py_ssize_t each = 0; each < self->count; each++) {
        int64_t when = (int64_t)atomic_load_explicit(&self->peers[each].words[RANG], memory_order_relaxed);
        if (when > rang && when < now) {
            rang = when;
        }
    }
    return rang < since_ns ? 0 : now - rang;
}

/* Record how long it took to wake. If another process has the core, the kernel hands it over within microseconds. If
   a virtual machine first has to get its core back from other users, that may take a millisecond each time, and it
   is better to give up the core only for a yield. If members share cores (and do not spin), a woken member may just
   have to wait for another one. */
static void
note_wake(Arrivals *self, int64_t slept_ns)
{
    if (self->spins == 0) {
        return;
    }
    int64_t now = monotonic_ns();
    self->slow_wakes = rung_for(self, slept_ns, now) > SLOW_WAKE_NS ? self->slow_wakes + 1 : 0;
    if (self->slow_wakes < SLOW_WAKES) {
        return;
    }
    int lasting = now - self->awake_until_ns < self->awake_ns;
    self->awake_ns = lasting ? 2 * self->awake_ns : AWAKE_NS;
    if (self->awake_ns > LONG_AWAKE_NS) {
        self->awake_ns = LONG_AWAKE_NS;
    }
    self->awake_until_ns = now + self->awake_ns;
    self->slow_wakes = 0;
    self->sleepy = 0;
    note_crowd(self, SHORT_NAP);
}

/* Sleep on the doorbell for a few milliseconds: 1 if the awaited members have come, 0 if Python has to continue the
   wait. */
static int
doze_until(Arrivals *self, Awaited *awaited, Lock *lock)
{
    char rings[256];
    int64_t start = monotonic_ns(), end = start + DOZE_NS, now;
    give_up_lock(lock);
    while (!atomic_load_explicit(&self->stopped, memory_order_relaxed) && (now = monotonic_ns()) < end) {
        atomic_store_explicit(&self->own[SLEEPING], begin_nap(self, self->whom, awaited->phase), memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst); /* publish the nap before reading the words again */
        if (!have_come(self, awaited)) {
            struct pollfd bell = {.fd = self->bell, .events = POLLIN};
            poll(&bell, 1, 1 + (int)((end - now) / 1000000));
            while (read(self->bell, rings, sizeof rings) == sizeof rings) {
                ;
            }
            tell_running(self, monotonic_ns());
        }
        atomic_store_explicit(&self->own[SLEEPING], 0, memory_order_relaxed);
        if (have_come(self, awaited)) {
            note_wake(self, start);
            return 1;
        }
    }
    return 0;
}

/* Let Python wait for the awaited fence. */
static int
wait_in_python(const Waiter *waiter)
{
    take_lock(waiter->lock);
    PyObject *done = PyObject_CallOneArg(waiter->wait, waiter->operation);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Wait for the members that were absent at the first look: 0, or -1 with an exception. */
static int
wait_longer(Arrivals *self, Awaited awaited, Py_ssize_t whom, const Waiter *waiter)
{
    for (long look = 0; look < self->spins; look++) {
        if (look == FEW_LOOKS) {
            give_up_lock(waiter->lock);
        }
        pause_core();
        if (have_come(self, &awaited)) {
            return 0;
        }
    }
    self->whom = whom == ALL ? ALL : self->peers[whom].rank;
    self->sought = awaited.phase;
    int come = yield_until(self, &awaited, waiter);
    if (!come && waiter->attend == NULL) {
        come = doze_until(self, &awaited, waiter->lock);
    }
    if (come) {
        return come < 0 ? -1 : 0;
    }
    if (wait_in_python(waiter) < 0) {
        return -1;
    }
    have_come(self, &awaited); /* note it */
    return 0;
}

int
wait_for(Arrivals *self, Py_ssize_t whom, uint64_t phase, const Waiter *waiter)
{
    Awaited awaited = awaited_of(self, whom, phase);
    if (have_come(self, &awaited)) {
        return 0;
    }
    long long since_ns = monotonic_ns();
    int outcome = wait_longer(self, awaited, whom, waiter);
    self->waited_ns += (unsigned long long)(monotonic_ns() - since_ns);
    return outcome;
}

int
reach(Arrivals *self, uint64_t phase, uint64_t more, const Waiter *waiter)
{
    Awaited awaited = awaited_of(self, ALL, phase);
    if (have_come(self, &awaited)) {
        return 0;
    }
    return wait_for(self, ALL, phase + more < self->phase ? phase + more : self->phase, waiter);
}

/* Whether a member has another fingerprint or reports a failure, or a check of all members is due. */
static int
is_troubled(Arrivals *self)
{
    for (Py_ssize_t each = 0; each < self->count; each++) {
        Peer *peer = &self->peers[each];
        if (atomic_load_explicit(&peer->words[STATE], memory_order_relaxed) |
            atomic_load_explicit(&peer->words[DESCRIBED], memory_order_relaxed)) {
            return 1;
        }
        if (!has_come(self, peer, self->phase) && is_at(peer, peer->agreed + 1) &&
            !has_come(self, peer, peer->agreed + 1)) { /* again: it may have come just now */
            return 1;
        }
    }
    int64_t now = monotonic_ns();
    tell_running(self, now);
    if (now - self->looked_ns < LOOK_NS && !atomic_load_explicit(&self->stopped, memory_order_relaxed)) {
        return 0;
    }
    self->looked_ns = now;
    return 1;
}

int
come(Arrivals *self, const Label *label, Py_ssize_t whom, const Waiter *waiter)
{
    uint64_t phase = self->phase + 1;
    /* This word overwrites an older one, which all must have read. And no member may be so far behind that it would
       miss this member's earlier fingerprints. */
    if (phase >= WINDOW && reach(self, phase - WINDOW + 1, WINDOW / 2, waiter) < 0) {
        return -1;
    }
    self->phase = phase;
    tell_distance(self, waiter->moved);
    atomic_store_explicit(&self->own[CALLED + phase % RING], self->called, memory_order_relaxed);
    self->called = 0;
    atomic_store_explicit(&self->own[phase % RING], (phase % PHASES) << PRINT_BITS | label->print,
                          memory_order_release);
    /* Publish the word before reading a peer's sleep flag. */
    atomic_thread_fence(memory_order_seq_cst);
    ring_sleepers(self);
    if (whom != ALL && is_troubled(self)) {
        self->whom = NOBODY;
        self->sought = phase;
        return wait_in_python(waiter);
    }
    return 0;
}

int
claim(Arrivals *self, int kind, const Waiter *waiter)
{
    Pieces *pieces = &self->pieces[kind];
    Py_ssize_t next = pieces->next;
    if (self->claimed != NULL) {
        *self->claimed = self->phase;
    }
    if (pieces->last[next] && reach(self, pieces->last[next] + 1, (uint64_t)pieces->count / 2, waiter) < 0) {
        return -1;
    }
    self->claimed = &pieces->last[next];
    self->slot = pieces->base + (uint64_t)next * pieces->stride;
    pieces->next = (next + 1) % pieces->count;
    return 0;
}
