/* Plans: the steps of one rank in one operation, as data. A plan contains no addresses, so that one plan serves all
   groups of the same likeness, on tensors anywhere. Functions: plan.c makes and checks plans, executor.c runs them. */

#ifndef DIST2_CORE_PLAN_H
#define DIST2_CORE_PLAN_H

#include "board.h"

/* The memory of a place. */
typedef enum {
    TENSOR, /* of the call: its inputs, then its outputs */
    SLOT,   /* a member's half or piece, claimed last: the same place for all, as all claim in the same order */
    MAPPED, /* exposed by a member, as TAKE found it */
} Base;

typedef struct {
    Base base;
    int index; /* of the tensor, or of the place in TAKE's list; for SLOT, and in that list, the member's rank */
    uint64_t at; /* offset in bytes; in TAKE's list the number of the part */
} Place;

typedef enum {
    COPY,    /* src to dst */
    FOLD,    /* srcs to dst, by FOLDS[number] */
    FENCE,   /* come to a fence and publish `number`, or the call if not all are awaited; copy src to dst while others
                come (memory that only this rank uses); await `whom` */
    CLAIM,   /* the half that is next, or the next piece: `number` is its kind */
    LOOP,    /* run the steps up to END `number` times; places in tensors move on by `nbytes` each time */
    END,
    NOTED,   /* CALL unless all others published `number` with the last fence, a fence of all */
    SHARED,  /* OTHER unless srcs, which are in tensors, lie in shared memory of this process */
    OFFER,   /* expose srcs, which are in tensors, from the next fence on */
    TAKE,    /* find what the others exposed with the last fence: srcs are member and part; OTHER unless all is mapped */
    SEND,    /* CALL: the caller sends src */
    RECV,    /* CALL: it receives to dst */
    CALLER,  /* CALL: only the caller can do it */
} Kind;

/* How a COPY stores: through the caches; past them; or into a slot, past them if the readers are far. */
typedef enum { THROUGH, PAST, FILL } Way;

typedef struct {
    Kind kind;
    Way way;
    int checked;     /* of a FENCE: CALL if a member has given up an operation in which it exposed memory */
    long whom;       /* a rank, ALL or NOBODY */
    uint64_t number; /* see Kind */
    size_t nbytes;
    double divisor;  /* of a FOLD */
    Place dst, src;
    Place *srcs;
    int count;
} Step;

typedef struct {
    long rank;
    int inputs, tensors; /* of a call: those that are only read, and all */
    int mapped;          /* places that TAKE finds */
    size_t *sizes;       /* of the tensors, in bytes; SIZE_MAX: not known */
    size_t half;         /* bytes of a half of a slot */
    char *used;          /* by tensor: whether steps have places in it */
    Step *steps;
    int count;
    size_t moved; /* bytes, by copies and folds */
    int fences, leaving; /* fences, and those at which the rank does not await all */
} Plan;

/* Set up an empty plan, or free one. 0, or -1 without memory. */
int plan_open(Plan *plan, long rank, int inputs, int outputs, const size_t *sizes, size_t half);
void plan_close(Plan *plan);

/* Append a step, whose srcs are copied. 0, or -1 without memory. */
int plan_add(Plan *plan, const Step *step);

/* Check a complete plan: that every step stays inside the memory it was given, and writes only outputs and the rank's
   own slot. Memory that other ranks expose has no known size: with the same fingerprint they expose as much. When memory
   may be accessed is not checked: that is the schedule's part. Return NULL, or a text about the step whose number is in
   `at`. */
const char *plan_check(Plan *plan, int *at);

/* Whether all members that a plan names are on a board, and its slots are as long as plans assume. */
int plan_fits(const Plan *plan, const Board *board);

/* ---- executor.c ---- */

/* The header by which a member's exposed memory was found last, and the shift of its addresses in this process. */
typedef struct {
    uint64_t header[HEADER_WORDS];
    uint64_t shift;
} Known;

/* What a call did for a while. */
typedef enum { NO_PART, COPYING, WAITING, REDUCING } PartKind;
typedef struct {
    PartKind kind;
    int64_t begun_ns, ended_ns;
} Part;

/* A run of a plan on the tensors of one call. */
typedef struct {
    const Plan *plan;
    Board *board;
    char **tensors; /* addresses */
    char **mapped;
    const Known *known;     /* by rank */
    const uint64_t *header; /* of this member's exposed memory, if it lies in shared memory */
    uintptr_t shared_from, shared_until;
    uint64_t print, called;
    int at;         /* the step that is being run, */
    int stage;      /* and how far it is */
    uint64_t turns; /* of the loop that are left, */
    uint64_t offset; /* and how far its places have moved */
    Wait wait;
    Part *parts; /* NULL: no clock is read */
    int part_count, part_room; /* parts for which there is no room are dropped */
    int64_t part_ns;
} Run;

/* Run steps until the plan is DONE or the caller has to act. */
Status run_plan(Run *run);

/* Return where a place lies in this run. */
char *place_address(const Run *run, const Place *place);

#endif
