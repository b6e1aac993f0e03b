/* Declarations that the files of dist2.compiled._native.steps share. */

#ifndef DIST2_STEPS_H
#define DIST2_STEPS_H

#include "exceptions.h"
#include "names.h"
#include "places.h"
#include "waiting.h"

#include <structmember.h>

/* A word of a fence: its number, and this many bits of the operation's fingerprint. */
#define PRINT_BITS 40
#define PRINT_MASK ((UINT64_C(1) << PRINT_BITS) - 1)

#define SHORT_NAP 8 /* for how many fences a waiter sleeps at once after a slow yield: fences.c */

/* The words of a member's control page, as `control_words.py` has them. */
enum {
    RING = 32,
    WINDOW = 16,
    SLEEPING = 32,
    STATE = 40,
    DESCRIBED = 41,
    GAVE_UP = 42,
    NOTES = 43,
    CORE = 46,
    CROWDED = 47,
    CALLED = 48,
    SEQ = 80,
    RANG = 81,
    RAN = 82,
    PROBE = 88,
    WORDS,
};

/* The number of texts that describe calls: `call_log.py`. */
enum { TEXTS = 128 };

/* The members that a fence waits for, if not a single one. */
enum { ALL = -1, NOBODY = -2 };

/* Another member: arrivals.c. */
typedef struct {
    Py_buffer memory;
    Word *words;
    long rank;
    int bell;
    PyObject *doorbell; /* holds the descriptor open */
    uint64_t agreed;    /* it has come to all fences up to this one, with the same fingerprints */
    uint64_t rung;      /* its SLEEPING when its doorbell was rung last */
    uint64_t probe;     /* its PROBE when that was read last */
} Peer;

/* Parts of the slots that are used in turn, without a wait of all for all in between. */
typedef struct {
    uint64_t base, stride; /* in bytes, from the beginning of a member's region */
    Py_ssize_t count, next;
    uint64_t *last; /* of each: the last fence of the operations that used it */
} Pieces;

enum { PIECE_KINDS = 2 };

/* This member's arrivals at the fences of a board: arrivals.c. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Word *own;
    Py_ssize_t count;
    Peer *peers;
    unsigned long long phase;
    unsigned long long sought; /* the fence that Python is to await, */
    long whom;                 /* and the awaited members: a rank, ALL or NOBODY */
    unsigned long long called; /* the word of the operation for the next fence: see `call_log.py`, */
    unsigned long long texts;  /* and how many texts there have been for it */
    unsigned long long slot;   /* offset of the piece that was claimed last, in each region */
    unsigned long long naps;   /* how often this member has gone to sleep, */
    unsigned long long waited_ns; /* and for how long it has waited for others, after the first look */
    long rank;
    long long slow_ns, looked_ns;
    long spins, yields, sleepy, nap;
    int turn; /* which half of the slots the next block uses */
    int core;  /* the core of its last wait: turns.c */
    int far;   /* a score of the distance of the others' caches, */
    unsigned looks; /* and the number of measurements: distances.c */
    char crowded; /* it has published that another process uses its core: fences.c */
    int64_t wanted_ns; /* time of the last slow yield: fences.c */
    int slow_wakes;    /* in a row, */
    int64_t awake_ns, awake_until_ns; /* and for how long and until when slow yields cause no sleep */
    Pieces pieces[PIECE_KINDS];
    uint64_t *claimed; /* `last` of the piece that was claimed last */
    int bell;
    PyObject *doorbell;
    _Atomic char stopped;
    PyObject *at, *before;
} Arrivals;

extern PyTypeObject ArrivalsType;

/* The label that a call publishes at its fences. */
typedef struct {
    uint64_t print;
    uint64_t seq;
} Label;

/* A signature, and its fingerprint as it is published. */
typedef struct {
    PyObject *signature;
    uint64_t print;
} Printed;

/* Read the label of a call. `printed` may be NULL; it keeps the fingerprint for the next call of the signature. */
int read_label(PyObject *operation, Label *label, Printed *printed);

/* Return the known addresses of the tensors of a call; NULL if there are none. */
const Places *read_places(PyObject *operation);

/* Return the code object of a call's user code, and the instruction in it; NULL with an exception. */
PyObject *read_place_of_call(PyObject *operation, long *instruction);

/* Record the call that is running. */
void note_call(Arrivals *self, PyObject *operation, const Label *label);

/* Find the index of another member; -1 with an exception. */
Py_ssize_t find_peer(const Arrivals *self, long rank);

/* Read a rank to wait for, ALL or NOBODY; 0, or -1 with an exception. */
int read_whom(const Arrivals *self, long whom, Py_ssize_t *index);

/* A waiting call, and the Python function that sleeps for it. */
typedef struct {
    PyObject *operation;
    PyObject *wait;
    PyObject *attend; /* called between two yields, or NULL */
    Lock *lock;
    size_t moved; /* bytes that others may move before they come */
} Waiter;

/* Wait until all have come to an earlier fence. If a wait is necessary, wait for some more fences, so that one
   context switch serves several operations. 0, or -1 with an exception. */
int reach(Arrivals *self, uint64_t phase, uint64_t more, const Waiter *waiter);

/* Publish the next fence, at which to wait for all, for one other (its index) or for none; 0, or -1 with an
   exception. */
int come(Arrivals *self, const Label *label, Py_ssize_t whom, const Waiter *waiter);

/* Wait until members have come to a fence that this member has come to: by polling, by yields, by short sleeps, and
   at last in Python. 0, or -1 with an exception. */
int wait_for(Arrivals *self, Py_ssize_t whom, uint64_t phase, const Waiter *waiter);

/* Claim the next piece of one kind, once no member uses its contents; 0, or -1 with an exception. */
int claim(Arrivals *self, int kind, const Waiter *waiter);

/* Publish the core on which this member waits. */
void tell_core(Arrivals *self);

/* At a fence of a call that moves so many bytes: write a probe word before the fence's word, and read another
   member's probe behind it, to measure the distance between the caches. */
void tell_distance(Arrivals *self, size_t moved);
void note_distance(Arrivals *self, size_t moved);

/* Whether data in another member's caches seems to arrive later than data in memory. */
int are_far(const Arrivals *self);

/* Publish that this member runs. */
void tell_running(Arrivals *self, int64_t now);

/* Whether, between two times further apart than a yield should take, another process had this core for longer than a
   member would. A yield is also slow if many members each had a short turn, as members with cold caches do. */
int had_long_turn(const Arrivals *self, int64_t since, int64_t until, int64_t slow_ns);

/* Whether an object is a script: script.c. */
int is_script(PyObject *object);

/* Run a script on a call: an operation, inputs and outputs. Return the number of the step that stopped it, or -1
   with an exception; `done` is set if all steps ran. */
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

/* Add the Python names of a file to the module; -1 with an exception. */
int operations_ready(void);
int arrivals_ready(PyObject *module);
int folds_ready(PyObject *module);
int script_ready(PyObject *module);
int program_ready(PyObject *module);
int streams_ready(PyObject *module);
int segments_ready(PyObject *module);
int rails_ready(PyObject *module);
int sweeping_ready(PyObject *module);

#endif
