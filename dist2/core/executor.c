/* The executor: runs the steps of a plan in order.

   A run can be continued. If members are late, or a step is the caller's, it returns with `at` at that step, and
   `stage` at the part of it that comes next. The caller waits or acts, and calls again. A step that it has done
   itself it passes over by raising `at`. */

#include "plan.h"

#include "far.h"
#include "memory.h"
#include "reduce.h"

#include <string.h>

enum {
    FEW_SOURCES = 64,           /* of a FOLD, whose addresses are on the stack; the caller folds more */
    OWN_PAST_BYTES = 1 << 20,   /* own copies at a fence from here on do; shorter ones may still be cached later */
};

char *
place_address(const Run *run, const Place *place)
{
    switch (place->base) {
    case TENSOR:
        return run->tensors[place->index] + place->at + run->offset;
    case SLOT:
        return run->board->regions[place->index] + run->board->slot + place->at;
    case MAPPED:
        break;
    }
    return run->mapped[place->index] + place->at;
}

static Status
run_copy(const Run *run, const Step *step)
{
    char *dst = place_address(run, &step->dst), *src = place_address(run, &step->src);
    int past = step->way == PAST || (step->way == FILL && is_away(step->nbytes, run->board->far));
    (past ? copy_past : copy)(dst, src, step->nbytes);
    return DONE;
}

static Status
run_fold(const Run *run, const Step *step)
{
    const Fold *fold = &FOLDS[step->number];
    const void *few[FEW_SOURCES];
    char *dst = place_address(run, &step->dst);
    uintptr_t bits = (uintptr_t)dst;
    if (step->count > FEW_SOURCES) {
        return CALL;
    }
    for (int each = 0; each < step->count; each++) {
        few[each] = place_address(run, &step->srcs[each]);
        bits |= (uintptr_t)few[each];
    }
    if (bits % fold->itemsize) { /* elements across words: the caller knows how to add them */
        return CALL;
    }
    fold->function(dst, few, step->count, step->nbytes / fold->itemsize, step->divisor);
    return DONE;
}

/* The full fence of `arrive` is between this member's word and these reads; the other member publishes GAVE_UP, then
   reads that word: exposed.py. */
static int
has_any_given_up(const Board *board)
{
    for (int each = 0; each < board->count; each++) {
        if (observe(&board->peers[each].words[GAVE_UP])) {
            return 1;
        }
    }
    return 0;
}

/* Come to a fence, copy what only this rank uses while others come, and await them. */
static Status
run_fence(Run *run, const Step *step)
{
    enum { ROOM, MOVE, AWAIT };
    Board *board = run->board;
    int whom = peer_index(board, step->whom);
    Status status = DONE;
    switch (run->stage) {
    case ROOM:
        status = make_room(board, &run->wait);
        if (status != DONE) {
            return status;
        }
        run->stage = MOVE;
        uint64_t number = whom == ALL ? step->number : run->called;
        if (arrive(board, run->print, number, whom, run->plan->moved)) {
            return SLOW;
        }
        /* fall through */
    case MOVE:
        if (step->nbytes) {
            (step->nbytes < OWN_PAST_BYTES ? copy : copy_past)(place_address(run, &step->dst),
                                                               place_address(run, &step->src), step->nbytes);
        }
        run->stage = AWAIT;
        /* fall through */
    default:
        status = await(board, &run->wait, whom, board->phase);
    }
    if (status != DONE) {
        return status;
    }
    run->stage = 0;
    if (board->count && is_probed(run->plan->moved, board->phase)) {
        Peer *peer = &board->peers[board->looks++ % (unsigned)board->count];
        measure(&peer->words[PROBE], &peer->probe, &board->far);
    }
    return step->checked && has_any_given_up(board) ? CALL : DONE;
}

static Status
run_noted(const Run *run, const Step *step)
{
    const Board *board = run->board;
    for (int each = 0; each < board->count; each++) {
        if (number_of(board, &board->peers[each]) != step->number) {
            return CALL;
        }
    }
    return DONE;
}

static uint64_t *
table_of(const Board *board, long rank, uint64_t phase)
{
    return (uint64_t *)(board->regions[rank] + TABLE_AT + (phase & 1) * TABLE_BYTES);
}

static inline int
is_shared(const Run *run, uintptr_t address)
{
    return address - run->shared_from < run->shared_until - run->shared_from;
}

static Status
run_shared(const Run *run, const Step *step)
{
    for (int each = 0; each < step->count; each++) {
        if (!is_shared(run, (uintptr_t)place_address(run, &step->srcs[each]))) {
            return OTHER;
        }
    }
    return DONE;
}

/* Expose memory, and how it can be accessed, from the next fence on. There is a table for fences of either parity: all
   members that have come to the last fence have read the other one, before they released the word of that fence, which
   `reach` acquires. An unchanged table need not move between cores. */
static Status
run_offer(Run *run, const Step *step)
{
    uint64_t entries[TABLE_BYTES / sizeof(uint64_t)] = {0};
    int all_shared = 1;
    for (int each = 0; each < step->count; each++) {
        uintptr_t address = (uintptr_t)place_address(run, &step->srcs[each]);
        all_shared &= is_shared(run, address);
        entries[HEADER_WORDS + each] = address;
    }
    if (step->count == 0) {
        entries[0] = IS_MAPPED;
    } else if (all_shared) {
        memcpy(entries, run->header, HEADER_WORDS * sizeof(uint64_t));
        entries[COUNT_AT] = (uint64_t)step->count;
    }
    uint64_t *table = table_of(run->board, run->board->rank, run->board->phase + 1);
    size_t nbytes = (size_t)(HEADER_WORDS + step->count) * sizeof(uint64_t);
    if (memcmp(table, entries, nbytes) == 0) {
        return DONE;
    }
    Status status = reach(run->board, &run->wait, run->board->phase, 0);
    if (status == DONE) {
        memcpy(table, entries, nbytes);
    }
    return status;
}

/* Whether memory is exposed in the way that is known; operations expose different numbers of parts. */
static inline int
is_known(const Known *known, const uint64_t *table)
{
    return table[0] == known->header[0] && memcmp(table + COUNT_AT + 1, known->header + COUNT_AT + 1,
                                                  (HEADER_WORDS - COUNT_AT - 1) * sizeof(uint64_t)) == 0;
}

/* Find the memory that others expose since the last fence. All members see the same tables, so that all of them decide
   alike whether they can map all of it. */
static Status
run_take(Run *run, const Step *step)
{
    const Board *board = run->board;
    for (long rank = 0; rank < board->ranks; rank++) {
        if (board->regions[rank] != NULL && !(table_of(board, rank, board->phase)[0] & IS_MAPPED)) {
            return OTHER;
        }
    }
    for (int each = 0; each < step->count; each++) {
        const Place *wanted = &step->srcs[each];
        const uint64_t *table = table_of(board, wanted->index, board->phase);
        const Known *known = &run->known[wanted->index];
        if (!is_known(known, table) || wanted->at >= table[COUNT_AT]) {
            return CALL;
        }
        run->mapped[each] = (char *)(uintptr_t)(table[HEADER_WORDS + wanted->at] + known->shift);
    }
    return DONE;
}

static Status
run_loop(Run *run, const Step *step)
{
    run->turns = step->number;
    run->offset = 0;
    return DONE;
}

/* End a turn of a loop: go back to the step behind LOOP, unless it was the last. */
static void
run_end(Run *run)
{
    if (--run->turns == 0) {
        run->offset = 0;
        return;
    }
    int first = run->at;
    while (run->plan->steps[first].kind != LOOP) {
        first--;
    }
    run->offset += run->plan->steps[first].nbytes;
    run->at = first;
}

static Status
run_step(Run *run, const Step *step)
{
    switch (step->kind) {
    case COPY:
        return run_copy(run, step);
    case FOLD:
        return run_fold(run, step);
    case FENCE:
        return run_fence(run, step);
    case CLAIM:
        return claim(run->board, &run->wait, (int)step->number);
    case LOOP:
        return run_loop(run, step);
    case END:
        run_end(run);
        return DONE;
    case NOTED:
        return run_noted(run, step);
    case SHARED:
        return run_shared(run, step);
    case OFFER:
        return run_offer(run, step);
    case TAKE:
        return run_take(run, step);
    case SEND:
    case RECV:
    case CALLER:
        break;
    }
    return CALL;
}

/* ---- The parts of calls, with their times, recorded on request ---- */

/* Return the part of a call that a step belongs to, apart from its waiting time. */
static PartKind
part_of(const Step *step)
{
    switch (step->kind) {
    case COPY:
        return COPYING;
    case FENCE:
        return step->nbytes ? COPYING : WAITING;
    case FOLD:
        return REDUCING;
    default: /* takes no time */
        return NO_PART;
    }
}

static void
add_part(Run *run, PartKind kind, int64_t ended_ns)
{
    int64_t begun_ns = run->part_ns;
    if (ended_ns <= begun_ns) { /* nothing, or a wait that was recorded in part when it was interrupted */
        return;
    }
    run->part_ns = ended_ns;
    if (kind == NO_PART) {
        return;
    }
    Part *last = run->part_count ? &run->parts[run->part_count - 1] : NULL;
    if (last != NULL && last->kind == kind && last->ended_ns == begun_ns) {
        last->ended_ns = ended_ns;
    } else if (run->part_count < run->part_room) {
        run->parts[run->part_count++] = (Part){kind, begun_ns, ended_ns};
    }
}

static Status
run_timed(Run *run, const Step *step)
{
    uint64_t before_ns = run->board->waited_ns;
    Status status = run_step(run, step);
    int64_t now_ns = clock_ns();
    add_part(run, part_of(step), now_ns - (int64_t)(run->board->waited_ns - before_ns));
    add_part(run, WAITING, now_ns);
    return status;
}

Status
run_plan(Run *run)
{
    const Plan *plan = run->plan;
    while (run->at < plan->count) {
        const Step *step = &plan->steps[run->at];
        Status status = run->parts != NULL ? run_timed(run, step) : run_step(run, step);
        if (status != DONE) {
            return status;
        }
        run->at++;
    }
    return DONE;
}
