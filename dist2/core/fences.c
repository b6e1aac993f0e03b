/* Fences: the only synchronisation of the members of a board for their data.

   A member comes to a fence by publishing one word: the fence's number and the operation's fingerprint. Another
   member compares it with its own word of that fence, so one comparison shows that the first has arrived and that it
   made the same call. With the word, in the same cache line, it publishes a number, which those that await it can read
   behind the fence: its call, at a fence at which it does not await all, and else what the plan wants to compare.

   Words stand in a ring of RING entries. To come to fence n, a member awaits that all are at n - (WINDOW - 1); each of
   them had then read the others' words up to n - 2 (WINDOW - 1), as it had awaited the same before. So an entry is
   free again after 2 (WINDOW - 1) fences. A number is read before its reader comes to the next fence, so it is free
   after WINDOW; the reads are ordered before the overwriting by the word of that fence, released and acquired.

   A sleeping member publishes which fence it awaits (SLEEPING), then looks again, then sleeps. A member that comes
   publishes its word, then reads the SLEEPING of the others. Between the two steps both have a full fence: at least
   one of them sees the other. */

#include "board.h"

#include "far.h"

#include <stdlib.h>
#include <unistd.h>

_Static_assert(RING >= 2 * (WINDOW - 1), "an entry is overwritten before all have read it");
_Static_assert(PHASES % RING == 0, "an old word of an entry looks like a new one");
_Static_assert(RING * ENTRY <= SLEEPING, "the ring overlaps other words");

#define LOOK_NS INT64_C(5000000) /* how often a member that waits for fewer than all looks after the others' health */
#define FOR_ALL 1                /* in SLEEPING: the awaited members, */
#define FOR_ONE 2                /* or one: this plus its rank */

int
board_open(Board *board, Word *own, long rank, Bell *bell)
{
    board->own = own;
    board->rank = rank;
    board->bell = bell;
    board->core = -1;
    board->nap = SHORT_NAP;
    board->ranks = rank + 1;
    board->regions = calloc((size_t)board->ranks, sizeof(char *));
    if (board->regions == NULL) {
        return -1;
    }
    board->regions[rank] = (char *)own;
    return 0;
}

int
board_add(Board *board, Word *words, long rank, int bell)
{
    Peer *peers = realloc(board->peers, (size_t)(board->count + 1) * sizeof(Peer));
    if (peers == NULL) {
        return -1;
    }
    board->peers = peers;
    if (rank >= board->ranks) {
        char **regions = realloc(board->regions, (size_t)(rank + 1) * sizeof(char *));
        if (regions == NULL) {
            return -1;
        }
        board->regions = regions;
        for (; board->ranks <= rank; board->ranks++) {
            regions[board->ranks] = NULL;
        }
    }
    board->regions[rank] = (char *)words;
    peers[board->count++] = (Peer){.words = words, .rank = rank, .bell = bell};
    return 0;
}

void
board_close(Board *board)
{
    free(board->peers);
    free(board->regions);
    board->peers = NULL;
    board->regions = NULL;
    board->count = 0;
    board->ranks = 0;
}

int
peer_index(const Board *board, long whom)
{
    if (whom == ALL || whom == NOBODY) {
        return (int)whom;
    }
    for (int each = 0; each < board->count; each++) {
        if (board->peers[each].rank == whom) {
            return each;
        }
    }
    return NOBODY - 1;
}

/* Return the entry of a fence in the ring of a member. */
static inline Word *
entry_of(Word *words, uint64_t phase)
{
    return &words[phase % RING * ENTRY];
}

uint64_t
number_of(const Board *board, const Peer *peer)
{
    return read_word(&entry_of(peer->words, board->phase)[1]); /* written before the word, which was observed */
}

/* Whether a member has come to a fence, with the same fingerprint there and before. Up to this member's last fence:
   both entries of a later one are old, and equal. */
static inline int
has_come(const Board *board, Peer *peer, uint64_t phase)
{
    while (peer->agreed < phase) {
        uint64_t next = peer->agreed + 1;
        if (observe(entry_of(peer->words, next)) != read_word(entry_of(board->own, next))) {
            return 0;
        }
        peer->agreed++;
    }
    return 1;
}

/* Whether a member's word of a fence is in its region, regardless of its fingerprint. */
static inline int
is_at(const Peer *peer, uint64_t phase)
{
    return observe(entry_of(peer->words, phase)) >> PRINT_BITS == phase % PHASES;
}

int
have_come(Board *board, int first, int *absent, uint64_t phase)
{
    while (*absent > first && has_come(board, &board->peers[*absent - 1], phase)) {
        --*absent;
    }
    return *absent == first;
}

Status
await(Board *board, Wait *wait, int whom, uint64_t phase)
{
    int first = whom == ALL || whom == NOBODY ? 0 : whom;
    int absent = whom == ALL ? board->count : whom == NOBODY ? 0 : whom + 1;
    Status status = DONE;
    if (!have_come(board, first, &absent, phase)) {
        if (wait->since_ns == 0) {
            wait->since_ns = clock_ns();
        }
        board->whom = whom == ALL ? ALL : board->peers[whom].rank;
        board->sought = phase;
        status = wait_longer(board, wait, first, absent, phase);
    }
    if (status == DONE && wait->since_ns != 0) {
        board->waited_ns += (uint64_t)(clock_ns() - wait->since_ns);
        wait->since_ns = wait->yields_ns = 0;
    }
    return status;
}

Status
reach(Board *board, Wait *wait, uint64_t phase, uint64_t more)
{
    int absent = board->count;
    if (have_come(board, 0, &absent, phase)) {
        return await(board, wait, NOBODY, phase); /* ends the accounts of a wait that was begun */
    }
    uint64_t last = phase + more;
    return await(board, wait, ALL, last < board->phase ? last : board->phase);
}

Status
make_room(Board *board, Wait *wait)
{
    uint64_t phase = board->phase + 1;
    return phase < WINDOW ? DONE : reach(board, wait, phase - WINDOW + 1, WINDOW / 2);
}

/* Whether a sleeping member can continue, because this one has come to its last fence. */
static int
frees(const Board *board, const Peer *sleeper, uint64_t sleeping)
{
    uint64_t whom = sleeping % (UINT64_C(1) << WHOM_BITS), phase = (sleeping >> WHOM_BITS) % PHASES;
    if ((board->phase - phase) % PHASES >= PHASES / 2) {
        return 0;
    }
    if (whom != FOR_ALL) {
        return whom == (uint64_t)board->rank + FOR_ONE;
    }
    for (int each = 0; each < board->count; each++) {
        if (&board->peers[each] != sleeper && !is_at(&board->peers[each], phase)) {
            return 0;
        }
    }
    return 1;
}

uint64_t
sleeping_word(Board *board, uint64_t phase)
{
    uint64_t code = board->whom == ALL ? FOR_ALL : (uint64_t)board->whom + FOR_ONE;
    board->naps++; /* no member rings twice for one nap */
    return board->naps << (WHOM_BITS + PHASE_BITS) | phase % PHASES << WHOM_BITS | code;
}

/* Wake the members that can continue, once for each of their naps. Of members that come at the same time, and one that
   goes to sleep, the last to pass its full fence sees the words of all and the nap; if that is the sleeper, it does not
   sleep. */
static void
ring_sleepers(Board *board)
{
    for (int each = 0; each < board->count; each++) {
        Peer *peer = &board->peers[each];
        uint64_t sleeping = read_word(&peer->words[SLEEPING]);
        if (!sleeping || sleeping == peer->rung || !frees(board, peer, sleeping)) {
            continue;
        }
        peer->rung = sleeping;
        write_word(&board->own[RANG], (uint64_t)clock_ns());
        if (write(peer->bell, "!", 1) < 0) {
            continue; /* full: it is about to wake anyway; broken: it is dead, and its watchers report that */
        }
    }
}

/* Whether a member has another fingerprint or reports a failure, or a check of all members is due. */
static int
is_troubled(Board *board)
{
    for (int each = 0; each < board->count; each++) {
        Peer *peer = &board->peers[each];
        if (read_word(&peer->words[STATE]) | read_word(&peer->words[DESCRIBED])) {
            return 1;
        }
        if (!has_come(board, peer, board->phase) && is_at(peer, peer->agreed + 1) &&
            !has_come(board, peer, peer->agreed + 1)) { /* again: it may have come just now */
            return 1;
        }
    }
    int64_t now = clock_ns();
    tell_running(board, now);
    if (now - board->looked_ns < LOOK_NS && !atomic_load_explicit(&board->stopped, memory_order_relaxed)) {
        return 0;
    }
    board->looked_ns = now;
    return 1;
}

int
arrive(Board *board, uint64_t print, uint64_t number, int whom, size_t moved)
{
    uint64_t phase = ++board->phase;
    if (is_probed(moved, board->phase)) {
        write_word(&board->own[PROBE], board->phase);
    }
    Word *entry = entry_of(board->own, phase);
    write_word(&entry[1], number);
    publish(entry, (phase % PHASES) << PRINT_BITS | (print & PRINT_MASK));
    atomic_thread_fence(memory_order_seq_cst); /* the word is out before the sleep flags are read */
    ring_sleepers(board);
    if (whom == ALL || !is_troubled(board)) {
        return 0;
    }
    board->whom = NOBODY;
    board->sought = phase;
    return 1;
}

Status
claim(Board *board, Wait *wait, int kind)
{
    if (kind == HALVES) { /* each use of a half has a fence of all, behind which the half before is read by all */
        board->slot = board->halves[board->turn];
        board->turn ^= 1;
        return DONE;
    }
    Pieces *pieces = &board->pieces[kind];
    uint64_t *last = &pieces->last[pieces->next];
    if (board->claimed != NULL) {
        *board->claimed = board->phase;
    }
    if (*last) { /* all have read the piece once they are at the next fence, which is none ahead: see MOST_PIECES */
        Status status = reach(board, wait, *last + 1, (uint64_t)pieces->count / 2);
        if (status != DONE) {
            return status;
        }
    }
    board->claimed = last;
    board->slot = pieces->base + (uint64_t)pieces->next * pieces->stride;
    pieces->next = (pieces->next + 1) % pieces->count;
    return DONE;
}
