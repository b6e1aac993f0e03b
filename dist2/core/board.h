/* A board: the members of a group on one host, and their arrival at fences. Functions: fences.c, waiter.c.

   Words that the core uses everywhere:
     region  shared memory of one member, which all read and it alone writes: control words, tables, slots
     fence   a point to which all members come in the same order; phase: its number
     print   the fingerprint of an operation: equal on all members that make the same call
     whom    the members that are awaited at a fence
     slot    the part of a region by which data goes from member to member; it consists of two halves, which plans with
             fences of all use in turn, and of pieces, which those use that await only some
     nap     one sleep of a member on its doorbell */

#ifndef DIST2_CORE_BOARD_H
#define DIST2_CORE_BOARD_H

#include "base.h"
#include "bell.h"
#include "layout.h"

/* Another member. */
typedef struct {
    Word *words; /* its region, which begins with its control words */
    long rank;
    int bell;        /* a byte written there wakes the threads of its process */
    uint64_t agreed; /* it has come to all fences up to this one, with the same fingerprints */
    uint64_t rung;   /* its SLEEPING when its doorbell was rung last */
    uint64_t probe;  /* its PROBE when that was read last */
} Peer;

/* Parts of the slots that are used in turn, without a wait of all for all in between. */
enum { TINY_BYTES = 1 << 10, LONGER_BYTES = 128 << 10 }; /* of a piece of either kind */
enum { TINY, LONGER, PIECE_KINDS, HALVES = PIECE_KINDS, MOST_PIECES = 32 };
typedef struct {
    uint64_t base, stride; /* in bytes, from the beginning of a member's region */
    int count, next;
    uint64_t last[MOST_PIECES]; /* of each: the last fence of the operations that used it */
} Pieces;

/* A wait for other members, which may be continued. */
typedef struct {
    int brief;      /* look a few times only, then AGAIN */
    int attended;   /* AGAIN after each yield: the caller has other work */
    size_t moved;   /* bytes that others may move before they come */
    int64_t since_ns; /* when it began; 0: it did not */
    int64_t yields_ns; /* when it began to yield; 0: it did not */
    long left;      /* yields before it asks whether to sleep, */
    int turns;      /* and how often it asks */
} Wait;

enum { SHORT_NAP = 8 }; /* fences at which a member sleeps at once after a slow yield, at first */

typedef struct {
    Word *own;
    long rank;
    Bell *bell; /* of this process, for all its boards */
    Peer *peers;
    int count;
    char **regions; /* by rank: where a member's region begins; NULL: not known */
    long ranks;
    uint64_t phase;  /* number of the last fence to which this member has come */
    uint64_t sought; /* the fence that the caller is to await after SLOW, */
    long whom;       /* and the awaited members: a rank, ALL or NOBODY */
    uint64_t slot;   /* offset in each region of the half or piece in use */
    uint64_t halves[2]; /* offsets of the halves of the slots, which have turns */
    int turn;           /* which of them is next */
    Pieces pieces[PIECE_KINDS];
    uint64_t *claimed;  /* `last` of the piece that was claimed last */
    uint64_t naps;      /* how often this member has gone to sleep, */
    uint64_t waited_ns; /* and for how long it has waited for others */
    int64_t looked_ns;  /* when it looked after the health of the others last */
    /* Of the policy of waiting: waiter.c. */
    long spins, yields; /* polls before the first yield, and yields before it asks whether to sleep */
    long sleepy, nap;   /* fences at which it sleeps at once, and at how many it does after the next slow yield */
    int64_t slow_ns;    /* the longest normal yield */
    int64_t wanted_ns;  /* time of the last slow yield */
    int slow_wakes;
    int64_t awake_ns, awake_until_ns;
    int core;
    char crowded;
    int far;        /* of the caches of the others: far.h, */
    unsigned looks; /* and how often one was measured */
    _Atomic char stopped; /* set by another thread: every wait ends; only the value matters, and the bell wakes */
} Board;

/* Set up a board of one member; 0, or -1 without memory. Add another member likewise. Free what they hold. */
int board_open(Board *board, Word *own, long rank, Bell *bell);
int board_add(Board *board, Word *words, long rank, int bell);
void board_close(Board *board);

/* ---- fences.c ---- */

/* Return the index of another member, ALL or NOBODY; a value below NOBODY if the rank is no other member. */
int peer_index(const Board *board, long whom);

/* Wait until all have come to an earlier fence. If that is necessary, wait for up to `more` fences behind it, so that
   one switch of the core serves several operations; this member is less far ahead then. */
Status reach(Board *board, Wait *wait, uint64_t phase, uint64_t more);

/* Wait until this member may come to the next fence: its entry takes the place of one that all must have read. */
Status make_room(Board *board, Wait *wait);

/* Come to the next fence; return whether the caller must look after the health of the others before it goes on: it
   does not wait for all of them. `print`: the operation's fingerprint. `number`: others can read it (`number_of`).
   `whom`: as `peer_index` returns it. */
int arrive(Board *board, uint64_t print, uint64_t number, int whom, size_t moved);

/* Return the number that a member, which was awaited there, has published with the last fence. */
uint64_t number_of(const Board *board, const Peer *peer);

/* Wait until members have come to a fence, with the same fingerprints. */
Status await(Board *board, Wait *wait, int whom, uint64_t phase);

/* Have `slot` name the half whose turn it is, or the next piece of a kind, once no member uses its contents. */
Status claim(Board *board, Wait *wait, int kind);

/* Whether the members, from an index up to one before another, have come to a fence: `absent` is lowered. */
int have_come(Board *board, int first, int *absent, uint64_t phase);

/* Return the value of SLEEPING for a nap that begins. */
uint64_t sleeping_word(Board *board, uint64_t phase);

/* ---- waiter.c ---- */

/* Spin, yield and doze until the members of the indices from `first` to before `absent` have come to a fence. */
Status wait_longer(Board *board, Wait *wait, int first, int absent, uint64_t phase);

/* Publish that this member runs. */
void tell_running(Board *board, int64_t now_ns);

#endif
