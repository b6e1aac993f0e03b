/* What the files of dist2.compiled._steps share. */

#ifndef DIST2_STEPS_H
#define DIST2_STEPS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdatomic.h>
#include <stdint.h>

/* The words of a member's control page, as `arrivals.py` has them. */
enum { SLEEPING = 2, NOTES = 5, SEQ = 7, GAVE_UP = 8, WORDS = 9 };

typedef _Atomic uint64_t Word;

/* The interpreter lock, which a waiter gives up at most once, and takes again when it must. */
typedef struct {
    PyThreadState *state;
} Lock;

static inline void
give_up_lock(Lock *lock)
{
    if (lock->state == NULL)
        lock->state = PyEval_SaveThread();
}

static inline void
take_lock(Lock *lock)
{
    if (lock->state != NULL) {
        PyEval_RestoreThread(lock->state);
        lock->state = NULL;
    }
}

/* Another member: arrivals.c. */
typedef struct {
    Py_buffer memory;
    Word *words;
    long rank;
    int bell;
    PyObject *doorbell; /* holds the descriptor open */
} Peer;

/* How a member comes to the fences of a board: arrivals.c. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Word *own;
    Py_ssize_t count;
    Peer *peers;
    unsigned long long phase;
    long long slow_ns;
    long spins, yields, sleepy, nap;
    int turn; /* which half of the slots the next block uses */
    int bell;
    PyObject *doorbell;
    _Atomic char stopped;
    PyObject *at, *before;
} Arrivals;

extern PyTypeObject ArrivalsType;

/* What a call publishes at its fences. */
typedef struct {
    uint64_t print;
    uint64_t seq;
} Label;

/* Read what a call publishes. */
int read_label(PyObject *operation, Label *label);

/* Note which call is under way. */
void note_call(Arrivals *self, PyObject *operation, const Label *label);

/* What a member waits for at a fence. */
typedef struct {
    uint64_t word;
    int parity;
    Py_ssize_t absent; /* how many of the first members may be */
} Waiting;

/* Come to the next fence: 1 if all are here, 0 if some are to be waited for. */
int come(Arrivals *self, const Label *label, Waiting *waiting);

/* Wait for them: by looking, by yielding, and by sleeping for a moment. 1 if all are here, 0 if it is time to sleep in
   Python, -1 with an exception. */
int wait_for(Arrivals *self, Waiting *waiting, PyObject *attend, Lock *lock);

/* Whether an object is a script: steps.c. */
int is_script(PyObject *object);

/* Run a script on a call: an operation, inputs and outputs. Return the number of the step that stopped it, or -1 with
   an exception; `done` tells whether it has done all. */
Py_ssize_t script_call(PyObject *script, PyObject *const *call, int *done);

/* Combine vectors of `numel` elements; `dst` may be any of them. */
typedef void FoldFunction(void *dst, const void *const *srcs, Py_ssize_t count, size_t numel, double divisor);

/* A way to fold: folds.c. */
typedef struct {
    const char *name;
    FoldFunction *function;
    size_t itemsize;
} Fold;

extern const Fold FOLDS[];
extern const Py_ssize_t FOLD_COUNT;

/* Add what a file has for Python to the module; -1 with an exception. */
int arrivals_ready(PyObject *module);
int folds_ready(PyObject *module);
int script_ready(PyObject *module);
int program_ready(PyObject *module);
int streams_ready(PyObject *module);

#endif
