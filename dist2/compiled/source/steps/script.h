/* Scripts: script.c. Their steps are read in reading.c and run in steps.c; what moves memory is in moving.c. */

#ifndef DIST2_SCRIPT_H
#define DIST2_SCRIPT_H

#include "rails.h"

#define FEW_SOURCES 64 /* of a FOLD, whose addresses fit the stack */

enum {
    STOP, COPY, FENCE, FOLD, READ, SAME, SHARED, STORE, LENT, NOTE, NOTED, OWN, CLAIM, SEND, RECEIVE, SENT, BOTH,
    BESIDE, KINDS
};

/* Where a step reads or writes: at an address, or so far into a tensor of the call, or of what others lend. Python may
   say where it is in the region of a member, which is at an address. */
enum { FIXED = -1, PIECE = -2 };
typedef struct {
    Py_ssize_t tensor; /* FIXED: `at` is the address; PIECE: it is, but for where the claimed piece begins */
    uint64_t at;
} Place;

/* How memory is copied: in any order; from the end on, if it is long; into a slot; or, if it is a block of what is longer
   than the caches, into a slot, out of one, past it, or into a slot past the caches. As `Way` has them in
   bound_steps.py. */
enum { FORWARDS, BACKWARDS, FILL, IN, OUT, PAST, AWAY, WAYS };

/* One step. */
typedef struct {
    int kind;
    int fold;
    long pid;
    int pidfd; /* of a READ: readable once the process has ended; -1: it is this one */
    Py_ssize_t owner; /* index of the peer that a READ reads from, or whom a FENCE waits for; first base of a LENT */
    int pieces;       /* of a CLAIM: of which kind */
    int way;          /* of what moves */
    size_t nbytes;
    double divisor;
    Place dst, src;
    Py_ssize_t count; /* of `srcs`; of the addresses that a LENT finds */
    Place *srcs;      /* of a FOLD; of a BOTH: the other place to copy to; of a STORE: whose addresses are among the bytes */
    const void **many; /* of a FOLD of more than a few sources: room for their addresses */
    PyObject *check;  /* of a FENCE among those that lend: called if somebody has given up */
    PyObject *code;   /* of a CLAIM: of the last call that word was left of, in this code, */
    long instruction; /* at this place of it; */
    uint64_t number;  /* which is in the text of this number */
    PyObject *bytes;  /* of a SAME and a STORE; what stands before the addresses of a LENT; a message's header */
    Rail *rail;       /* of these, and of a SENT; */
    long message;     /* and which message it is */
} Step;

/* The steps of one program. */
typedef struct {
    PyObject_HEAD
    Arrivals *arrivals;
    PyObject *wait;     /* called if not all have come in time */
    PyObject *log_call; /* called to leave word of a call from elsewhere than the last one */
    Py_ssize_t count;
    Step *steps;
    Py_ssize_t tensors; /* of the call: the inputs, then the outputs */
    Py_ssize_t inputs;
    Py_ssize_t places; /* tensors, and parts of what others lend */
    char *used;
    int fences;
    Printed printed; /* of the last call */
    size_t moved; /* bytes, by all steps: see `Waiter` */
    Rails rails;  /* that steps use */
} Script;

/* A run of a script. */
typedef struct {
    Script *script;
    PyObject *operation;
    Label label;
    Lock lock;
    const Places *places; /* where some tensors lie, if that is known */
    uint64_t *bases;      /* where the tensors lie, a shift included, and what others lend */
} Run;

/* Tell where tensors of `shared_empty` lie: from one address until another. */
void tell_shared(uintptr_t from, uintptr_t until);

/* Have `taker(operation, begun_ns, parts)` told of each run of a script from now on; NULL: nobody. A part is what was
   done, when it began and when it ended: `dist2.operation.parts`. */
void take_parts(PyObject *taker);

/* Run the steps from one on; return the number of the one that stopped it, or of all, or -1 with an exception. */
Py_ssize_t run_steps(Run *run, Py_ssize_t at);

/* Copy memory, which may only overlap forwards. */
void copy(void *dst, const void *src, size_t nbytes, int way);

/* Copy memory that is only the caller's: as above, but a long copy leaves nothing in the caches. */
void copy_own(void *dst, const void *src, size_t nbytes, int way);

/* Copy a block of what is longer than the caches: IN, OUT, PAST or AWAY. It may not overlap. */
void sweep(char *dst, const char *src, size_t nbytes, int way);

/* Copy such a block to two places, reading it once: into a slot, IN or AWAY, and PAST. */
void copy_both(void *slot, void *passed, const void *src, size_t nbytes, int into);
void sweep_both(char *slot, char *passed, const char *src, size_t nbytes, int into);

/* Copy a block OUT of a slot that is emptied, and in turn with it, line by line, one into another slot, or to two
   places: what is waited for differs. */
void copy_beside(void *out, const void *emptied, size_t length, void *slot, void *passed, const void *src,
                 size_t nbytes, int into);
void sweep_beside(char *out, const char *emptied, size_t length, char *slot, char *passed, const char *src,
                  size_t nbytes, int into);

/* Have the kernel do a READ; -1 if it does not. */
int move(const Step *step);

/* Read one step: a tuple that begins with its kind; 0, or -1 with an exception. */
int read_step(Script *self, PyObject *args, Step *step);

#endif
