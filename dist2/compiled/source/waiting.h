/* Helpers for the waits of all extensions: a clock, the interpreter lock, and a pause between two looks. */

#ifndef DIST2_WAITING_H
#define DIST2_WAITING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base.h"

#include <sched.h>

/* Return the monotonic clock in nanoseconds, as time.monotonic_ns does. */
static inline long long
monotonic_ns(void)
{
    return clock_ns();
}

/* The interpreter lock, which a waiter releases at most once, and takes again when it must. */
typedef struct {
    PyThreadState *state;
} Lock;

static inline void
give_up_lock(Lock *lock)
{
    if (lock->state == NULL) {
        lock->state = PyEval_SaveThread();
    }
}

static inline void
take_lock(Lock *lock)
{
    if (lock->state != NULL) {
        PyEval_RestoreThread(lock->state);
        lock->state = NULL;
    }
}

#define YIELD_NS 1000000     /* how long a waiter yields before it sleeps, */
#define SLOW_YIELD_NS 200000 /* unless yields take longer, one after the other: another process needs the core */

/* A wait for a socket. */
typedef struct {
    long long since_ns; /* the time since when nothing has moved; 0: bytes have just moved */
    int slow;           /* yields in a row */
} Yielding;

/* Yield the core; 0, with nothing done, if it is time to sleep: nothing has moved for long, or another process uses
   the core. */
static inline int
give_way(Yielding *self)
{
    long long before = monotonic_ns();
    if (self->since_ns == 0) {
        self->since_ns = before;
    }
    if (before - self->since_ns > YIELD_NS || self->slow > 1) {
        return 0;
    }
    sched_yield();
    self->slow = monotonic_ns() - before > SLOW_YIELD_NS ? self->slow + 1 : 0;
    return 1;
}

#endif
