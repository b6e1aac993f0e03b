/* Waiting for bytes in a ring, for sending and receiving. */

#include "messages.h"

#include <sched.h>

#define MOST_READERS 64
#define CHECKED 16 /* yields between two checks that need the interpreter lock */
#define SWITCH_NS 1500   /* a longer yield: another thread ran on this core */
#define SOME_TURNS 4     /* after so many such waits in a row, a waiter yields soon: */
#define SOON 5           /* after so many looks */
#define UNUSED_YIELDS 8  /* so many in a row: no other thread needs the core */
#define MANY_TURNS 32    /* after so many, the other thread is the awaited process */
#define PAUSE_NS 4000000 /* between two sleeps; four times as long if a sleep did not help, and so on */
#define LONGEST_PAUSE_NS 4000000000

static Field field_until;
static PyObject *str_note, *str_readers;

/* ---- Waiting ---- */

/* Whether the wait is to end: the group has failed, or another thread wants to poll. */
static int
is_disturbed(Express *self)
{
    int none = attribute_is_none(self->its[MAILBOX], &field_aborted);
    none = none > 0 ? attribute_is_none(self->its[MAILBOX], &field_fault) : none;
    if (none <= 0) {
        return none < 0 ? -1 : 1;
    }
    return attribute_is_true(self->its[POLLER], &field_waiters);
}

/* A wait for one ring that also serves the others. */
typedef struct {
    End *rx;
    End *others[MOST_READERS];
    Py_ssize_t count;
    long long end_ns;
    int slow; /* yields in a row */
    Together *together;
} Watch;

/* Whether awaited bytes have arrived. */
static inline int
is_here(const Watch *watch)
{
    return has_bytes(watch->rx);
}

/* Sleep for a moment if the awaited process shares this core. The kernel does not separate two threads that yield to
   each other, but it places a thread that wakes up on an idle core, if there is one. */
static void
part(Together *together, long long now)
{
    if (together->turns < MANY_TURNS || now < together->until_ns) {
        return;
    }
    struct timespec moment = {0, 1};
    int in_vain = now - together->until_ns < together->pause_ns;
    long long pause = in_vain ? 4 * together->pause_ns : PAUSE_NS;
    together->pause_ns = pause < PAUSE_NS ? PAUSE_NS : pause > LONGEST_PAUSE_NS ? LONGEST_PAUSE_NS : pause;
    together->until_ns = now + together->pause_ns;
    together->turns = 0;
    together->partings++;
    nanosleep(&moment, NULL);
}

/* Note whether another thread had the core in a yield. */
static inline void
note_yield(Together *together, int was_used)
{
    together->unused = was_used ? 0 : together->unused < UNUSED_YIELDS ? together->unused + 1 : UNUSED_YIELDS;
}

/* How often to look before the first yield. */
static inline long
looks_of(const Express *self)
{
    if (self->spins == 0) {
        return self->together.unused == UNUSED_YIELDS ? self->lone_spins : 0;
    }
    return self->together.turns < SOME_TURNS || self->spins < SOON ? self->spins : SOON;
}

/* Yield until bytes have come: 1; 0 if it is time for another check. Without the interpreter lock. */
static int
yield_some(Watch *watch)
{
    long long now = monotonic_ns();
    part(watch->together, now);
    for (int yields = 0; yields < CHECKED && now < watch->end_ns && watch->slow < 2; yields++) {
        for (Py_ssize_t each = 0; each < watch->count; each++) {
            if (has_bytes(watch->others[each])) {
                watch->end_ns = 0;
                return 0;
            }
        }
        sched_yield();
        int here = is_here(watch);
        long long before = now;
        now = monotonic_ns();
        note_yield(watch->together, now - before > SWITCH_NS);
        if (here) {
            watch->together->turns = now - before > SWITCH_NS ? watch->together->turns + 1 : 0;
            return 1;
        }
        watch->slow = now - before > SLOW_YIELD_NS ? watch->slow + 1 : 0;
    }
    return 0;
}

/* Note the other rings that may have bytes. */
static int
watch_others(Watch *watch, PyObject *readers)
{
    if (!PyTuple_Check(readers)) {
        PyErr_Format(PyExc_TypeError, "readers: %R is no tuple", readers);
        return -1;
    }
    for (Py_ssize_t each = 0; each < PyTuple_GET_SIZE(readers) && watch->count < MOST_READERS; each++) {
        PyObject *end = PyTuple_GET_ITEM(readers, each);
        if (PyObject_TypeCheck(end, &End_Type) && end != (PyObject *)watch->rx) {
            watch->others[watch->count++] = (End *)end;
        }
    }
    return 0;
}

/* Yield until bytes have come, or another thread needs the core or the role. */
static int
yield_until(Express *self, Watch *watch)
{
    for (;;) {
        int disturbed = is_disturbed(self);
        if (disturbed) {
            return disturbed < 0 ? -1 : 0;
        }
        Lock lock = {NULL};
        give_up_lock(&lock);
        int here = yield_some(watch);
        long long now = monotonic_ns();
        take_lock(&lock);
        if (here || now >= watch->end_ns) {
            return here;
        }
        if (watch->slow > 1) {
            PyObject *at = PyLong_FromLongLong(now);
            PyObject *noted = at == NULL ? NULL : PyObject_CallMethodOneArg(self->its[CROWD], str_note, at);
            Py_XDECREF(at);
            Py_XDECREF(noted);
            return noted == NULL ? -1 : 0;
        }
    }
}

int
watch_ring(Express *self, End *rx, long long deadline_ns)
{
    Watch watch = {.rx = rx, .together = &self->together};
    long looks = looks_of(self);
    for (long look = 0; look <= looks; look++) {
        if (is_here(&watch)) {
            self->together.turns = 0;
            return 1;
        }
        pause_core();
    }
    long long now = monotonic_ns(), crowded = attribute_number(self->its[CROWD], &field_until);
    if (crowded == -1 && PyErr_Occurred()) {
        return -1;
    }
    watch.end_ns = now + YIELD_NS < deadline_ns ? now + YIELD_NS : deadline_ns;
    if (now < crowded || now >= watch.end_ns) {
        return 0;
    }
    PyObject *readers = PyObject_GetAttr(self->its[RINGS], str_readers);
    if (readers == NULL) {
        return -1;
    }
    int here = watch_others(&watch, readers) < 0 ? -1 : yield_until(self, &watch);
    Py_DECREF(readers);
    return here;
}

int
watching_ready(void)
{
    static const Name names[] = {{&field_until.name, "_until"}, {&str_note, "_note"}, {&str_readers, "readers"}};
    return intern(names, Py_ARRAY_LENGTH(names));
}
