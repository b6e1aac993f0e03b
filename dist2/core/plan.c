/* Plans are made once and run often, so they are checked here: `plan_check` as far as no board is known, `plan_fits` for
   a board. The executor checks what only a run shows: the alignment of vectors, the number of sources in the cache, and
   the headers of exposed memory. */

#include "plan.h"

#include "reduce.h"

#include <stdlib.h>
#include <string.h>

int
plan_open(Plan *plan, long rank, int inputs, int outputs, const size_t *sizes, size_t half)
{
    size_t count = (size_t)(inputs + outputs);
    *plan = (Plan){.rank = rank, .inputs = inputs, .tensors = inputs + outputs, .half = half};
    plan->sizes = malloc((count + 1) * sizeof(size_t));
    plan->used = calloc(count + 1, 1);
    if (plan->sizes == NULL || plan->used == NULL) {
        return -1;
    }
    memcpy(plan->sizes, sizes, count * sizeof(size_t));
    return 0;
}

void
plan_close(Plan *plan)
{
    for (int each = 0; each < plan->count; each++) {
        free(plan->steps[each].srcs);
    }
    free(plan->steps);
    free(plan->sizes);
    free(plan->used);
    *plan = (Plan){0};
}

int
plan_add(Plan *plan, const Step *step)
{
    Step *steps = realloc(plan->steps, (size_t)(plan->count + 1) * sizeof(Step));
    if (steps == NULL) {
        return -1;
    }
    plan->steps = steps;
    steps[plan->count] = *step;
    steps[plan->count].srcs = NULL;
    if (step->count) {
        size_t nbytes = (size_t)step->count * sizeof(Place);
        steps[plan->count].srcs = malloc(nbytes);
        if (steps[plan->count].srcs == NULL) {
            return -1;
        }
        memcpy(steps[plan->count].srcs, step->srcs, nbytes);
    }
    plan->count++;
    return 0;
}

/* The state of a check. */
typedef struct {
    Plan *plan;
    int claimed;       /* kind of the memory that was claimed last; -1: none */
    const Step *loop;  /* that the step is in */
    int noted;         /* whether all have come to the last fence */
} Check;

static const size_t PIECE_BYTES[] = {[TINY] = TINY_BYTES, [LONGER] = LONGER_BYTES};

static size_t
slot_bytes(const Plan *plan, int kind)
{
    return kind == HALVES ? plan->half : PIECE_BYTES[kind];
}

/* Whether bytes of a place are inside the memory that it is in; note that a tensor is used. */
static int
is_inside(const Check *check, const Place *place, size_t nbytes)
{
    Plan *plan = check->plan;
    if (place->base == MAPPED) {
        return place->index >= 0 && place->index < plan->mapped;
    }
    if (place->base == SLOT) {
        size_t size = check->claimed < 0 ? 0 : slot_bytes(plan, check->claimed);
        return check->claimed >= 0 && nbytes <= size && place->at <= size - nbytes;
    }
    if (place->index < 0 || place->index >= plan->tensors) {
        return 0;
    }
    plan->used[place->index] = 1;
    size_t size = plan->sizes[place->index];
    uint64_t moved = check->loop != NULL ? (check->loop->number - 1) * check->loop->nbytes : 0;
    return size == SIZE_MAX || (nbytes <= size && place->at <= size - nbytes && moved <= size - nbytes - place->at);
}

/* Whether a place may be written: no other rank's memory, and no input. */
static int
may_be_written(const Check *check, const Place *place)
{
    if (place->base == SLOT) {
        return place->index == check->plan->rank;
    }
    return place->base == TENSOR && place->index >= check->plan->inputs;
}

static const char *
check_move(const Check *check, const Step *step)
{
    if (!is_inside(check, &step->dst, step->nbytes) || !may_be_written(check, &step->dst)) {
        return "writes outside of the rank's own memory";
    }
    int folds = step->kind == FOLD || step->kind == CALLER;
    if (!folds && step->count) {
        return "has more than one source";
    }
    for (int each = 0; each < step->count; each++) {
        if (!is_inside(check, &step->srcs[each], step->nbytes)) {
            return "reads outside of the memory it was given";
        }
    }
    return folds || is_inside(check, &step->src, step->nbytes) ? NULL : "reads outside of the memory it was given";
}

static const char *
check_step(Check *check, const Step *step)
{
    switch (step->kind) {
    case COPY:
        return check_move(check, step);
    case FOLD:
        if (step->number >= (uint64_t)FOLD_COUNT || step->count < 1) {
            return "has no such fold";
        }
        return check_move(check, step);
    case CALLER:
        return step->nbytes ? check_move(check, step) : NULL;
    case SEND:
        return is_inside(check, &step->src, step->nbytes) ? NULL : "sends from outside of the memory it was given";
    case RECV:
        return is_inside(check, &step->dst, step->nbytes) && may_be_written(check, &step->dst)
                   ? NULL
                   : "receives to outside of the rank's own memory";
    case FENCE:
        check->plan->fences++;
        check->plan->leaving += step->whom != ALL;
        check->noted = step->whom == ALL;
        if (step->nbytes && (step->dst.base != TENSOR || step->src.base != TENSOR)) {
            return "copies what others use while they come to a fence";
        }
        return step->nbytes ? check_move(check, step) : NULL;
    case CLAIM:
        if (step->number > HALVES) {
            return "claims pieces of no kind";
        }
        check->claimed = (int)step->number;
        return NULL;
    case LOOP:
        if (check->loop != NULL || step->number < 1) {
            return "is a loop in a loop, or of no turns";
        }
        if (step->nbytes && step->number - 1 > SIZE_MAX / step->nbytes) {
            return "moves on further than any memory reaches";
        }
        check->loop = step;
        check->claimed = -1; /* each turn claims anew */
        check->noted = 0;
        return NULL;
    case END:
        if (check->loop == NULL) {
            return "ends no loop";
        }
        check->loop = NULL;
        return NULL;
    case SHARED:
    case OFFER:
        for (int each = 0; each < step->count; each++) {
            if (!is_inside(check, &step->srcs[each], 0) || step->srcs[each].base != TENSOR) {
                return "exposes what is in no tensor";
            }
        }
        return (size_t)step->count * 8 > TABLE_BYTES - HEADER_WORDS * 8 ? "exposes too many parts" : NULL;
    case TAKE:
        if (check->plan->mapped) {
            return "takes memory a second time";
        }
        if (!check->noted) {
            return "takes what was exposed with no fence of all";
        }
        check->plan->mapped = step->count;
        return NULL;
    case NOTED:
        return check->noted ? NULL : "reads what was published with no fence of all";
    }
    return "is of no kind";
}

const char *
plan_check(Plan *plan, int *at)
{
    Check check = {.plan = plan, .claimed = -1};
    plan->moved = 0;
    plan->fences = plan->leaving = plan->mapped = 0;
    for (*at = 0; *at < plan->count; ++*at) {
        const Step *step = &plan->steps[*at];
        const char *complaint = check_step(&check, step);
        if (complaint != NULL) {
            return complaint;
        }
        size_t turns = check.loop != NULL ? (size_t)check.loop->number : 1;
        if (step->kind == COPY || step->kind == FENCE) {
            plan->moved += turns * step->nbytes;
        } else if (step->kind == FOLD || step->kind == CALLER) {
            plan->moved += turns * step->nbytes * (size_t)step->count;
        }
    }
    return check.loop != NULL ? "leaves a loop open" : NULL;
}

static int
is_member(const Board *board, long rank)
{
    return rank >= 0 && rank < board->ranks && board->regions[rank] != NULL;
}

/* Whether a place is in no member's memory, or in that of a member of the board. */
static int
place_fits(const Board *board, const Place *place)
{
    return place->base != SLOT || is_member(board, place->index);
}

int
plan_fits(const Plan *plan, const Board *board)
{
    if (board->pieces[TINY].stride < PIECE_BYTES[TINY] || board->pieces[LONGER].stride < PIECE_BYTES[LONGER] ||
        board->halves[1] - board->halves[0] < plan->half) {
        return 0;
    }
    for (const Step *step = plan->steps; step < plan->steps + plan->count; step++) {
        int fits = place_fits(board, &step->dst) && place_fits(board, &step->src);
        for (int each = 0; each < step->count; each++) {
            const Place *place = &step->srcs[each];
            fits &= step->kind == TAKE ? is_member(board, place->index) : place_fits(board, place);
        }
        fits &= step->kind != FENCE || peer_index(board, step->whom) >= NOBODY;
        if (!fits) {
            return 0;
        }
    }
    return 1;
}
