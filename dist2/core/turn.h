/* The turn and the numbers of a group's operations: plain C, for dist2/operation/queue.py.

   The functions before `await_job` run under the interpreter lock, which makes each of them one atomic step. `await_job`
   and those that it calls run without it, and read the atomic fields. All loads and stores are relaxed: a field is a
   condition of its own, and nothing else is read behind it. A stale or mixed pair of `ready_ns` and `patience_ns` makes
   the thread look again; the futex calls compare the word that they sleep on. */

#ifndef DIST2_TURN_H
#define DIST2_TURN_H

#include "base.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PATIENCE_NS 250000 /* after this time without a waiting caller, the queue's thread runs a job */
#define ALERT_NS 1000000   /* how long the queue's thread polls for the next job before it sleeps */

typedef struct {
    long long seq;      /* numbers of the last collective */
    long long messages; /* and message */
    atomic_int queued;
    atomic_int busy;
    atomic_int ending;
    atomic_int asleep;        /* the queue's thread sleeps */
    atomic_llong ready_ns;    /* time since when the oldest queued job can run */
    atomic_llong patience_ns; /* for how long other threads may run it first */
    int beside;               /* threads inside operations that take no turn */
    int drainers;             /* threads that wait until the queue is empty */
    int retired;
    pthread_t holder; /* the thread that took the turn last, and has it while `busy` */
} Turn;

static inline int
is_set(atomic_int *flag)
{
    return atomic_load_explicit(flag, memory_order_relaxed);
}

static inline void
set_to(atomic_int *flag, int value)
{
    atomic_store_explicit(flag, value, memory_order_relaxed);
}

/* Tell the queue's thread that a job is ready to run. The thread leaves it to other threads for `patience_ns`. */
static inline void
rouse(Turn *self, long long patience_ns)
{
    atomic_store_explicit(&self->ready_ns, clock_ns(), memory_order_relaxed);
    atomic_store_explicit(&self->patience_ns, patience_ns, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* publish the queued job or the returned turn before reading `asleep` */
    if (is_set(&self->asleep)) {
        set_to(&self->asleep, 0);
        syscall(SYS_futex, &self->asleep, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
}

/* Whether no thread has the turn and no job is queued. */
static inline int
is_idle(Turn *self)
{
    return !is_set(&self->busy) && !is_set(&self->queued);
}

/* Let the calling thread take the free turn. */
static inline void
take_turn(Turn *self)
{
    self->holder = pthread_self(); /* a signal handler of Python's runs between bytecodes: it finds both or neither */
    set_to(&self->busy, 1);
}

static inline int
is_held_here(Turn *self)
{
    return is_set(&self->busy) && pthread_equal(self->holder, pthread_self());
}

/* Take the turn if it is free and no job is queued: return the operation's number, or 0. */
static inline long long
enter_turn(Turn *self)
{
    if (!is_idle(self)) {
        return 0;
    }
    take_turn(self);
    return ++self->seq;
}

/* Remove the oldest job from the queue, if there is one, for the thread that has the turn or takes it now. */
static inline int
take_next(Turn *self)
{
    int queued = is_set(&self->queued);
    if (queued) {
        set_to(&self->queued, queued - 1);
    }
    return queued > 0;
}

/* Take the turn for the oldest queued job; 0 if there is none, or the turn is taken. */
static inline int
enter_queued(Turn *self)
{
    int taken = !is_set(&self->busy) && take_next(self);
    if (taken) {
        take_turn(self);
    }
    return taken;
}

/* Count a queued operation; return its number. */
static inline long long
add_job(Turn *self)
{
    set_to(&self->queued, is_set(&self->queued) + 1);
    if (!is_set(&self->busy)) { /* else the thread that has the turn runs it when it leaves */
        rouse(self, PATIENCE_NS);
    }
    return ++self->seq;
}

/* Release the turn, for the queue's thread to take it after a while; return whether a thread waits for that. */
static inline int
give_back(Turn *self, long long patience_ns)
{
    set_to(&self->busy, 0);
    if (is_set(&self->queued)) {
        rouse(self, patience_ns);
        return 1;
    }
    return self->drainers > 0;
}

/* Have `await_job` return at once if a job is queued: its caller will not run it. */
static inline void
hurry_turn(Turn *self)
{
    if (is_set(&self->queued) && !is_set(&self->busy)) {
        rouse(self, 0);
    }
}

/* Have `await_job` return once nothing is queued. */
static inline void
end_turn(Turn *self)
{
    set_to(&self->ending, 1);
    rouse(self, 0);
}

/* ---- Without the interpreter lock ---- */

static inline struct timespec
time_of(long long duration_ns)
{
    return (struct timespec){duration_ns / 1000000000, duration_ns % 1000000000};
}

static inline void
nap(long long nap_ns)
{
    struct timespec time = time_of(nap_ns);
    nanosleep(&time, NULL);
}

/* Sleep until a wake-up, or for some time; return whether there was one, or a job is queued. */
static inline int
sleep_until_roused(Turn *self, long long idle_ns)
{
    struct timespec time = time_of(idle_ns);
    set_to(&self->asleep, 1);
    atomic_thread_fence(memory_order_seq_cst); /* publish `asleep` before reading the queue */
    if (is_set(&self->queued) ? !is_set(&self->busy) : is_set(&self->ending)) {
        set_to(&self->asleep, 0);
        return 1;
    }
    syscall(SYS_futex, &self->asleep, FUTEX_WAIT_PRIVATE, 1, &time, NULL, 0);
    if (is_set(&self->asleep) == 0 || is_set(&self->queued)) {
        return 1;
    }
    set_to(&self->asleep, 0);
    return 0;
}

/* Let this thread sleep with little timer slack: the kernel may otherwise double the time. */
static inline void
sleep_lightly(void)
{
    static _Thread_local char does;
    if (!does) {
        does = 1;
        prctl(PR_SET_TIMERSLACK, 1000UL);
    }
}

/* Wait until a queued job is ready and no other thread has come to run it; 0 if none is for some time. */
static inline int
await_job(Turn *self, long long idle_ns)
{
    sleep_lightly();
    for (;;) {
        int queued = is_set(&self->queued);
        long long ready_ns = atomic_load_explicit(&self->ready_ns, memory_order_relaxed), now = clock_ns();
        if (queued && !is_set(&self->busy)) {
            long long left_ns = ready_ns + atomic_load_explicit(&self->patience_ns, memory_order_relaxed) - now;
            if (left_ns <= 0) {
                return 1;
            }
            nap(left_ns);
        }
        else if (!queued && is_set(&self->ending)) {
            return 0;
        }
        else if (now - ready_ns < ALERT_NS) {
            nap(PATIENCE_NS);
        }
        else if (!sleep_until_roused(self, idle_ns)) {
            return 0;
        }
    }
}

#endif
