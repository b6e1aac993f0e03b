/* What the files of dist2.compiled._steps share. */

#ifndef DIST2_STEPS_H
#define DIST2_STEPS_H

#include "exceptions.h"
#include "names.h"
#include "places.h"
#include "waiting.h"

#include <structmember.h>

/* A word of an arrival: the fence's number, and this much of the operation's fingerprint. */
#define PRINT_BITS 40
#define PRINT_MASK ((UINT64_C(1) << PRINT_BITS) - 1)

#define SHORT_NAP 8 /* for how many fences a waiter goes to sleep at once after a yield was slow: fences.c */

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

/* How many of the texts that tell of calls there are at a time: `call_log.py`. */
enum { TEXTS = 128 };

/* Whom a member waits for at a fence, if not for one other. */
enum { ALL = -1, NOBODY = -2 };

/* Another member: arrivals.c. */
typedef struct {
    Py_buffer memory;
    Word *words;
    long rank;
    int bell;
    PyObject *doorbell; /* holds the descriptor open */
    uint64_t agreed;    /* it has come to all fences up to this one, and called the same */
    uint64_t rung;      /* what stood in its SLEEPING when it was rung last */
    uint64_t probe;     /* and in its PROBE when that was read last */
} Peer;

/* Places in the slots that are used in turn, without all waiting for all in between. */
typedef struct {
    uint64_t base, stride; /* in bytes, from the beginning of a member's region */
    Py_ssize_t count, next;
    uint64_t *last; /* of each: no fence of an operation that used it is behind this one */
} Pieces;

enum { PIECE_KINDS = 2 };

/* How a member comes to the fences of a board: arrivals.c. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Word *own;
    Py_ssize_t count;
    Peer *peers;
    unsigned long long phase;
    unsigned long long sought; /* the fence that Python is to wait for, */
    long whom;                 /* and for whom: a rank, ALL or NOBODY */
    unsigned long long called; /* what to tell of the operation with the next fence: see `call_log.py`, */
    unsigned long long texts;  /* and how many texts there have been for that */
    unsigned long long slot;   /* where the piece that was claimed last begins in each region */
    unsigned long long naps;   /* how often this member has gone to sleep, */
    unsigned long long waited_ns; /* and for how long it has waited for others, behind the first look */
    long rank;
    long long slow_ns, looked_ns;
    long spins, yields, sleepy, nap;
    int turn; /* which half of the slots the next block uses */
    int core;  /* on which it waited last, */
    int waits; /* and how often since it looked where the others are: spreading.c */
    int far;   /* how far the others seem to be, */
    unsigned looks; /* and how often it has looked: distances.c */
    char spreads; /* it may go to another core: spreading.c */
    char crowded; /* it has told the others that somebody else uses its core: fences.c */
    unsigned long long moves; /* how often it has gone to another core */
    int64_t wanted_ns; /* when a yield was slow last: fences.c */
    int slow_wakes;    /* in a row, */
    int64_t awake_ns, awake_until_ns; /* and for how long and until when it does not sleep because of slow yields */
    int64_t spread_ns, moved_ns, stay_until_ns, stay_ns;
    Pieces pieces[PIECE_KINDS];
    uint64_t *claimed; /* `last` of the piece that was claimed last */
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

/* A signature, and its fingerprint as it is published. */
typedef struct {
    PyObject *signature;
    uint64_t print;
} Printed;

/* Read what a call publishes; `printed` may be NULL, and keeps the fingerprint for the next call of the signature. */
int read_label(PyObject *operation, Label *label, Printed *printed);

/* Return where tensors of a call lie, as far as that is known; NULL if nothing is. */
const Places *read_places(PyObject *operation);

/* Return in which code a call was made, and at which place of it; NULL with an exception. */
PyObject *read_place_of_call(PyObject *operation, long *instruction);

/* Note which call is under way. */
void note_call(Arrivals *self, PyObject *operation, const Label *label);

/* Find the index of another member; -1 with an exception. */
Py_ssize_t find_peer(const Arrivals *self, long rank);

/* Read for whom to wait: a rank, ALL or NOBODY; 0, or -1 with an exception. */
int read_whom(const Arrivals *self, long whom, Py_ssize_t *index);

/* Who waits: a call, and the function in Python that sleeps for it. */
typedef struct {
    PyObject *operation;
    PyObject *wait;
    PyObject *attend; /* has a turn between two yields, if there is one */
    Lock *lock;
    size_t moved; /* bytes that others may move before they come */
} Waiter;

/* Wait until all have come to an earlier fence; if there is anything to wait for, then for some fences more, so that
   a switch of processes is paid once for several operations. 0, or -1 with an exception. */
int reach(Arrivals *self, uint64_t phase, uint64_t more, const Waiter *waiter);

/* Publish the next fence, at which to wait for all, for one other (its index) or for nobody; 0, or -1 with an
   exception. */
int come(Arrivals *self, const Label *label, Py_ssize_t whom, const Waiter *waiter);

/* Wait until some have come to a fence that this member has come to: by looking, by yielding, by sleeping for a
   moment, and in the end in Python. 0, or -1 with an exception. */
int wait_for(Arrivals *self, Py_ssize_t whom, uint64_t phase, const Waiter *waiter);

/* Claim the next piece of one kind, once no member uses what is in it; 0, or -1 with an exception. */
int claim(Arrivals *self, int kind, const Waiter *waiter);

/* At a wait, of which there are many: go to another core if clearly fewer members are there. */
void spread(Arrivals *self, int64_t now);

/* At a fence of a call that moves so many bytes: write what others read to tell how far this member is, before its word;
   and behind that look how far another is. */
void tell_distance(Arrivals *self, size_t moved);
void note_distance(Arrivals *self, size_t moved);

/* Whether what another has in its caches comes later than what is in memory, as far as is known. */
int are_far(const Arrivals *self);

/* Tell the others that this member runs. */
void tell_running(Arrivals *self, int64_t now);

/* Whether somebody had this core for longer than a member would, between two moments that are further apart than a
   yield may take. They are as well where each of many members had a short turn, as those have whose memory has left the
   caches. */
int had_long_turn(const Arrivals *self, int64_t since, int64_t until, int64_t slow_ns);

/* Somebody else uses the core: stay where the kernel has put this member. */
void stay(Arrivals *self, int64_t now);

/* Whether an object is a script: script.c. */
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
