/* Scripts: script.c. Their steps are read in reading.c and run in steps.c; memory is moved in moving.c. */

#ifndef DIST2_SCRIPT_H
#define DIST2_SCRIPT_H

#include "rails.h"

#define FEW_SOURCES 64 /* of a FOLD, with addresses on the stack */

enum {
    STOP, COPY, FENCE, FOLD, READ, SAME, SHARED, STORE, LENT, NOTE, NOTED, OWN, CLAIM, SEND, RECEIVE, SENT, BOTH,
    BESIDE, KINDS
};

/* Where a step reads or writes: an address, or an offset in a tensor of the call or in memory that another member
   exposes. An address may also be in the region of a member. */
enum { FIXED = -1, PIECE = -2 };
typedef struct {
    Py_ssize_t tensor; /* FIXED: `at` is the address; PIECE: plus the start of the claimed piece */
    uint64_t at;
} Place;

/* How memory is copied: in any order; from the end, if it is long; into a slot; or, for a block of data longer than
   the caches: into a slot, out of one, past it, or into a slot past the caches. `Way` in bound_steps.py has the same
   values. */
enum { FORWARDS, BACKWARDS, FILL, IN, OUT, PAST, AWAY, WAYS };

/* One step. */
typedef struct {
    int kind;
    int fold;
    long pid;
    int pidfd; /* of a READ: readable once the process has ended; -1: it is this process */
    Py_ssize_t owner; /* index of the peer that a READ reads or a FENCE awaits; first base of a LENT */
    int pieces;       /* of a CLAIM: the kind of pieces */
    int way;          /* of a step that moves bytes */
    size_t nbytes;
    double divisor;
    Place dst, src;
    Py_ssize_t count; /* of `srcs`; of the addresses in a LENT */
    Place *srcs;      /* of a FOLD; of a BOTH: the second destination; of a STORE: the addresses in its bytes */
    const void **many; /* of a FOLD of more than a few sources: room for their addresses */
    PyObject *check;  /* of a FENCE of exposing members: called if one has given up */
    PyObject *code;   /* of a CLAIM: the code object of the last logged call, */
    long instruction; /* the instruction in it, */
    uint64_t number;  /* and the number of its text */
    PyObject *bytes;  /* of SAME and STORE; of a LENT: the bytes before the addresses; of a message: its header */
    Rail *rail;       /* of a message or a SENT; */
    long message;     /* and the number of the message */
} Step;

/* The steps of one program. */
typedef struct {
    PyObject_HEAD
    Arrivals *arrivals;
    PyObject *wait;     /* called if members are late */
    PyObject *log_call; /* called to log a call from another code line than the last one */
    Py_ssize_t count;
    Step *steps;
    Py_ssize_t tensors; /* of the call: the inputs, then the outputs */
    Py_ssize_t inputs;
    Py_ssize_t places; /* tensors, and exposed memory of other members */
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
    const Places *places; /* known addresses of tensors, or NULL */
    uint64_t *bases;      /* addresses of tensors, shifts included, and of exposed memory */
} Run;

/* Set the address range of `shared_empty` tensors. */
void tell_shared(uintptr_t from, uintptr_t until);

/* Call `taker(operation, begun_ns, parts)` after each run of a script from now on; NULL: no calls. A part has a
   kind, a start time and an end time: `dist2.operation.parts`. */
void take_parts(PyObject *taker);

/* Run the steps from one on; return the number of the step that stopped it, or the number of steps, or -1 with an
   exception. */
Py_ssize_t run_steps(Run *run, Py_ssize_t at);

/* Copy memory. Source and destination may overlap if `dst` is the higher address. */
void copy(void *dst, const void *src, size_t nbytes, int way);

/* Copy memory that only the caller uses: as above, but a long copy leaves nothing in the caches. */
void copy_own(void *dst, const void *src, size_t nbytes, int way);

/* Copy a block of data longer than the caches: IN, OUT, PAST or AWAY. Source and destination do not overlap. */
void sweep(char *dst, const char *src, size_t nbytes, int way);

/* Copy such a block to two places, reading it once: into a slot, IN or AWAY, and PAST. */
void copy_both(void *slot, void *passed, const void *src, size_t nbytes, int into);
void sweep_both(char *slot, char *passed, const char *src, size_t nbytes, int into);

/* Copy a block OUT of a slot, and alternate, line by line, with a copy into another slot, or to two places: the two
   copies wait for different resources. */
void copy_beside(void *out, const void *emptied, size_t length, void *slot, void *passed, const void *src,
                 size_t nbytes, int into);
void sweep_beside(char *out, const char *emptied, size_t length, char *slot, char *passed, const char *src,
                  size_t nbytes, int into);

/* Let the kernel do a READ; -1 if it fails. */
int move(const Step *step);

/* Read one step: a tuple that begins with its kind; 0, or -1 with an exception. */
int read_step(Script *self, PyObject *args, Step *step);

#endif
