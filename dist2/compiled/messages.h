/* What the files of dist2.compiled._messages share. */

#ifndef DIST2_MESSAGES_H
#define DIST2_MESSAGES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdatomic.h>
#include <stdint.h>

#include "clock.h"

#ifdef Py_GIL_DISABLED
#error "needs the interpreter lock: without it the counterparts in Python run, which take locks"
#endif

#define HEADER_BYTES 56 /* of a frame: `wire.py` */
#define LONG_BYTES (32 << 10) /* moved without the interpreter lock */

/* The words of a ring's first page, as `ring.py` has them. */
enum { HEAD = 0, TAIL = 8, READER_SLEEPS = 16, WRITER_SLEEPS = 24, SLOTS_AT = 32, DESK_AT = 496, PAGE_WORDS = 512 };

typedef _Atomic uint64_t Word;

/* The interpreter lock, which a waiter gives up at most once, and takes again when it must. */
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

/* Let the other thread of this core run, and save power, while looking at memory. */
static inline void
pause_core(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* One end of a ring: rings.c. `count` is how much this end has written or read. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Word *words;
    char *bytes;
    uint64_t capacity;
    unsigned long long count;
} End;

extern PyTypeObject End_Type;

/* Whether something is to be read that was not. */
static inline int
has_bytes(End *end)
{
    return atomic_load_explicit(&end->words[HEAD], memory_order_acquire) != end->count;
}

/* Write a header and what lies at an address: 1, or 0 if there is no room for both, or the reader is out of its
   mind. What is long is published piece by piece, for a reader that is at it already. */
int push_frame(End *end, const char *header, size_t header_bytes, const char *payload, size_t nbytes, Lock *lock);

/* Copy what follows a header that is next to an address: 1, or 0 if something else is next, or it does not come. It
   stays in the ring until `consume`. */
int pull_frame(End *end, const char *header, size_t header_bytes, char *payload, size_t nbytes, Lock *lock);

/* Free what was pulled. */
void consume(End *end, uint64_t nbytes);

/* What an `Express` refers to. */
enum {
    FABRIC,
    MAILBOX,
    FABRIC_ID,
    RANK,
    FINGERPRINT,
    ACCOUNT,
    CROWD,
    OUTGOING,
    RINGED_FROM,
    POSTED,
    ARRIVED,
    ABORTERS,
    LEFT,
    TOLD,
    ACQUIRE,
    RELEASE,
    TAKE_ROLE,
    GIVE_ROLE,
    HEADER,
    KEY,
    KEY_OF_ANY,
    REFERENCES
};

/* The short way of the messages of a lot, out or in: express.c. */
typedef struct {
    PyObject_HEAD
    PyObject *its[REFERENCES];
    long long nbytes, cost, credit, reported;
    long long glanced_ns;
    long spins;
    char is_told;
} Express;

extern PyTypeObject Express_Type;

/* A name that is made once. */
typedef struct {
    PyObject **name;
    const char *text;
} Name;

extern PyObject *str_tx, *str_rx, *str_fault, *str_aborted, *str_waiters, *str_wake_peer;

/* Objects in Python: watching.c. What returns a number returns -1 with an exception. */
int intern(const Name *names, size_t count);
int attribute_is_true(PyObject *object, PyObject *name);
int attribute_is_none(PyObject *object, PyObject *name);
long long attribute_number(PyObject *object, PyObject *name);
int set_number(PyObject *object, PyObject *name, long long number);
int call(PyObject *callable);
int call_method(PyObject *object, PyObject *name);

/* Put the exception that is on its way aside, if one is, and have it go on. */
void set_aside(PyObject *error[3]);
void go_on(PyObject *error[3]);

/* Release a lock, whatever exception is on its way: that one goes on. */
void release(PyObject *callable);

/* Return the end of a link's ring, borrowed from the link; NULL if it has none, with an exception or without. */
End *ring_of(PyObject *link, PyObject *name);

/* Look into a ring, and yield: 1 once something is there, 0 if it is time for something else, -1 with an exception. */
int watch_ring(Express *self, End *rx, long long deadline_ns);

/* Write a frame if nothing stands in its way: 1, 0, or -1 with an exception. */
int express_push(Express *self, const char *header, size_t header_bytes, const char *payload, size_t nbytes);

/* Read the next frame if it has this express's header, and wait for it until a deadline, or not at all if that is 0:
   1, 0, or -1 with an exception. `link` is what it came over. */
int express_pull(Express *self, char *payload, size_t nbytes, long long deadline_ns, PyObject **link);

/* Send a message, take one that is here, wait for one: 1, 0 with nothing done, or -1 with an exception. */
int express_send(Express *self, const char *payload);
int express_take(Express *self, char *payload);
int express_wait(Express *self, char *payload, long long deadline_ns);

/* Make names, or add the types of a file to the module; -1 with an exception. */
int watching_ready(void);
int rings_ready(PyObject *module);
int express_ready(PyObject *module);

#endif
