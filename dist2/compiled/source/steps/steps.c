/* Runs the steps of a script in order: copies, folds, fences, messages, and reads of other processes' memory by the
   kernel. A step that cannot be done here stops the script: see script.c. */

#include "script.h"

#include <string.h>

#define LONG_BYTES (32 << 10) /* longer copies are made without the interpreter lock, */
#define AWAY_BYTES (4 << 10)  /* and into slots past the caches, if the readers' caches are far */

/* Let Python continue with a fence. */
static int
call_python(Run *run, PyObject *callable)
{
    take_lock(&run->lock);
    PyObject *done = PyObject_CallOneArg(callable, run->operation);
    if (done == NULL) {
        return -1;
    }
    Py_DECREF(done);
    return 0;
}

static inline Waiter
waiter_of(Run *run)
{
    return (Waiter){run->operation, run->script->wait, NULL, &run->lock, run->script->moved};
}

static inline void *
address_of(const Run *run, const Place *place)
{
    if (place->tensor >= 0) {
        return (void *)(uintptr_t)(run->bases[place->tensor] + place->at);
    }
    return (void *)(uintptr_t)(place->at + (place->tensor == PIECE ? run->script->arrivals->slot : 0));
}

/* The address range of `shared_empty` tensors in this process, set by Python. */
static uintptr_t shared_from, shared_until;

void
tell_shared(uintptr_t from, uintptr_t until)
{
    shared_from = from;
    shared_until = until;
}

static inline int
is_shared(const void *address)
{
    return (uintptr_t)address - shared_from < shared_until - shared_from;
}

/* Return how to copy: into slots past the caches if the caches are far from the readers. */
static inline int
way_of(const Run *run, const Step *step)
{
    if (step->way != FILL && step->way != IN) {
        return step->way;
    }
    if (step->nbytes >= AWAY_BYTES && are_far(run->script->arrivals)) {
        return AWAY;
    }
    return step->way == FILL ? FORWARDS : IN;
}

static int
run_copy(Run *run, const Step *step)
{
    void *dst = address_of(run, &step->dst), *src = address_of(run, &step->src);
    if (step->nbytes >= LONG_BYTES) {
        give_up_lock(&run->lock);
    }
    (step->kind == OWN ? copy_own : copy)(dst, src, step->nbytes, way_of(run, step));
    return 0;
}

static int
run_both(Run *run, const Step *step)
{
    if (step->nbytes >= LONG_BYTES) {
        give_up_lock(&run->lock);
    }
    copy_both(address_of(run, &step->dst), address_of(run, step->srcs), address_of(run, &step->src), step->nbytes,
              way_of(run, step));
    return 0;
}

/* Make a copy, alternating with the copy of the step before. */
static int
run_beside(Run *run, const Step *step)
{
    const Step *before = &step[-1];
    void *passed = step->kind == BOTH ? address_of(run, step->srcs) : NULL;
    give_up_lock(&run->lock);
    copy_beside(address_of(run, &before->dst), address_of(run, &before->src), before->nbytes,
                address_of(run, &step->dst), passed, address_of(run, &step->src), step->nbytes, way_of(run, step));
    return 0;
}

/* Publish a fence, copy data that only the caller uses while other members arrive, and wait for them. */
static int
run_fence(Run *run, const Step *step)
{
    Script *script = run->script;
    Arrivals *arrivals = script->arrivals;
    Waiter waiter = waiter_of(run);
    if (come(arrivals, &run->label, step->owner, &waiter) < 0) {
        return -1;
    }
    if (step > script->steps && step[-1].kind == OWN) {
        run_copy(run, &step[-1]);
    }
    if (wait_for(arrivals, step->owner, arrivals->phase, &waiter) < 0) {
        return -1;
    }
    note_distance(arrivals, waiter.moved);
    if (step->check == NULL) {
        return 0;
    }
    for (Py_ssize_t each = 0; each < arrivals->count; each++) {
        if (atomic_load_explicit(&arrivals->peers[each].words[GAVE_UP], memory_order_acquire)) {
            return call_python(run, step->check);
        }
    }
    return 0;
}

/* Log the call: the number of the text that describes it, and its own number. */
static int
log_call(Run *run, Step *step)
{
    Arrivals *arrivals = run->script->arrivals;
    long instruction;
    PyObject *code = read_place_of_call(run->operation, &instruction);
    if (code == NULL) {
        return -1;
    }
    if (code == step->code && instruction == step->instruction && arrivals->texts - step->number < TEXTS) {
        arrivals->called = run->label.seq << 32 | (step->number & UINT32_MAX);
        Py_DECREF(code);
        return 0;
    }
    Py_XSETREF(step->code, code);
    step->instruction = instruction;
    if (call_python(run, run->script->log_call) < 0) {
        return -1;
    }
    step->number = arrivals->called & UINT32_MAX;
    return 0;
}

static int
run_claim(Run *run, Step *step)
{
    take_lock(&run->lock);
    if (log_call(run, step) < 0) {
        return -1;
    }
    Waiter waiter = waiter_of(run);
    return claim(run->script->arrivals, step->pieces, &waiter);
}

static int
run_fold(Run *run, const Step *step)
{
    const void *few[FEW_SOURCES], **srcs = step->many == NULL ? few : step->many;
    size_t itemsize = FOLDS[step->fold].itemsize;
    void *dst = address_of(run, &step->dst);
    uintptr_t bits = (uintptr_t)dst;
    for (Py_ssize_t each = 0; each < step->count; each++) {
        srcs[each] = address_of(run, &step->srcs[each]);
        bits |= (uintptr_t)srcs[each];
    }
    if (bits % itemsize) { /* elements across words: torch knows how to add them */
        return 1;
    }
    if (step->nbytes * (size_t)step->count >= LONG_BYTES) {
        give_up_lock(&run->lock);
    }
    FOLDS[step->fold].function(dst, srcs, step->count, step->nbytes / itemsize, step->divisor);
    return 0;
}

static int
run_move(Run *run, const Step *step)
{
    Step moved = *step;
    moved.dst.at = (uint64_t)(uintptr_t)address_of(run, &step->dst);
    moved.src.at = (uint64_t)(uintptr_t)address_of(run, &step->src);
    give_up_lock(&run->lock);
    return move(&moved) < 0;
}

/* Return whether memory holds the expected bytes. */
static int
is_same(const Step *step)
{
    const void *here = (const void *)(uintptr_t)step->src.at;
    return memcmp(here, PyBytes_AS_STRING(step->bytes), (size_t)PyBytes_GET_SIZE(step->bytes)) == 0;
}

/* Wait until memory that others read behind the next fence may be overwritten: see `Board.prepare`. */
static int
prepare(Run *run)
{
    Arrivals *arrivals = run->script->arrivals;
    Waiter waiter = waiter_of(run);
    return reach(arrivals, arrivals->phase, 0, &waiter);
}

/* Return whether memory holds the bytes of a STORE, with the addresses of this call. */
static int
is_stored(const Run *run, const Step *step)
{
    const char *here = (const char *)(uintptr_t)step->src.at, *bytes = PyBytes_AS_STRING(step->bytes);
    size_t first = (size_t)step->dst.at, behind = first + (size_t)step->count * sizeof(uint64_t);
    for (Py_ssize_t each = 0; each < step->count; each++) {
        uint64_t address = (uint64_t)(uintptr_t)address_of(run, &step->srcs[each]);
        if (memcmp(here + first + (size_t)each * sizeof address, &address, sizeof address) != 0) {
            return 0;
        }
    }
    return memcmp(here, bytes, first) == 0 &&
           memcmp(here + behind, bytes + behind, (size_t)PyBytes_GET_SIZE(step->bytes) - behind) == 0;
}

/* Write bytes that others read, addresses of this call among them, unless they are there already: an unchanged cache
   line need not move between cores. */
static int
run_store(Run *run, const Step *step)
{
    if (is_stored(run, step)) {
        return 0;
    }
    if (prepare(run) < 0) {
        return -1;
    }
    char *here = (char *)(uintptr_t)step->src.at;
    memcpy(here, PyBytes_AS_STRING(step->bytes), (size_t)PyBytes_GET_SIZE(step->bytes));
    for (Py_ssize_t each = 0; each < step->count; each++) {
        uint64_t address = (uint64_t)(uintptr_t)address_of(run, &step->srcs[each]);
        memcpy(here + step->dst.at + (size_t)each * sizeof address, &address, sizeof address);
    }
    return 0;
}

/* Read the addresses of exposed memory, which stand behind the bytes of a LENT. */
static void
take_lent(const Run *run, const Step *step)
{
    const char *here = (const char *)(uintptr_t)step->src.at + PyBytes_GET_SIZE(step->bytes);
    for (Py_ssize_t each = 0; each < step->count; each++) {
        uint64_t address;
        memcpy(&address, here + (size_t)each * sizeof address, sizeof address);
        run->bases[step->owner + each] = address + step->dst.at;
    }
}

/* Read those of all LENTs before a step again: steps that Python did meanwhile do not change them. */
static void
take_lent_before(const Run *run, Py_ssize_t at)
{
    for (const Step *step = run->script->steps; step < run->script->steps + at; step++) {
        if (step->kind == LENT) {
            take_lent(run, step);
        }
    }
}

/* Check that a member exposes memory of the expected kind, and read its addresses. */
static int
run_lent(const Run *run, const Step *step)
{
    if (!is_same(step)) {
        return 1;
    }
    take_lent(run, step);
    return 0;
}

/* Publish a number to the other members with the next fence, unless it is there already. */
static int
run_note(Run *run, const Step *step)
{
    Arrivals *arrivals = run->script->arrivals;
    Word *note = &arrivals->own[NOTES + ((arrivals->phase + 1) & 1)];
    if (atomic_load_explicit(note, memory_order_relaxed) == step->src.at) {
        return 0;
    }
    if (prepare(run) < 0) {
        return -1;
    }
    atomic_store_explicit(note, step->src.at, memory_order_relaxed);
    return 0;
}

/* Return whether all others published a number for the last fence. */
static int
have_noted(const Arrivals *arrivals, const Step *step)
{
    for (Py_ssize_t each = 0; each < arrivals->count; each++) {
        if (atomic_load_explicit(&arrivals->peers[each].words[NOTES + (arrivals->phase & 1)], memory_order_relaxed) !=
            step->src.at) {
            return 0;
        }
    }
    return 1;
}

/* Send or receive a message, or wait until messages are sent. */
static int
run_message(Run *run, const Step *step)
{
    const Rails *rails = &run->script->rails;
    give_up_lock(&run->lock);
    if (step->kind == SENT) {
        return see_off(step->rail, step->message, rails);
    }
    Parcel parcel = {PyBytes_AS_STRING(step->bytes), address_of(run, &step->src), step->nbytes, step->message};
    return step->kind == SEND ? send_parcel(step->rail, &parcel) : receive_parcel(step->rail, &parcel, rails);
}

/* Run one step: 0, 1 if it stops the script, -1 with an exception. */
static int
run_step(Run *run, Step *step)
{
    int beside = step > run->script->steps && step[-1].kind == BESIDE;
    switch (step->kind) {
    case STOP:
        return 1;
    case COPY:
        return beside ? run_beside(run, step) : run_copy(run, step);
    case OWN:    /* the fence behind it does it */
    case BESIDE: /* the copy behind it does it */
        return 0;
    case BOTH:
        return beside ? run_beside(run, step) : run_both(run, step);
    case FENCE:
        return run_fence(run, step);
    case FOLD:
        return run_fold(run, step);
    case CLAIM:
        return run_claim(run, step);
    case SAME:
        return !is_same(step);
    case SHARED:
        return is_shared(address_of(run, &step->dst)) != step->way;
    case STORE:
        return run_store(run, step);
    case LENT:
        return run_lent(run, step);
    case NOTE:
        return run_note(run, step);
    case NOTED:
        return !have_noted(run->script->arrivals, step);
    case SEND:
    case RECEIVE:
    case SENT:
        return run_message(run, step);
    default:
        return run_move(run, step);
    }
}

/* ---- The parts of calls, with their times, recorded on request ---- */

enum { NO_PART, COPYING, WAITING, REDUCING, SENDING, RECEIVING, PARTS };

static const char *const part_names[PARTS] = {NULL, "copy", "wait", "reduce", "send", "recv"};

typedef struct {
    int kind;
    int64_t begun_ns, ended_ns;
} Part;

static PyObject *parts_taker; /* NULL: no taker, and no clock is read */

void
take_parts(PyObject *taker)
{
    Py_XSETREF(parts_taker, Py_XNewRef(taker));
}

/* Return the part of a call that a step belongs to, apart from its waiting time. */
static int
part_of(const Script *script, const Step *step)
{
    switch (step->kind) {
    case COPY:
    case BOTH:
    case READ:
        return COPYING;
    case FENCE:
        return step > script->steps && step[-1].kind == OWN ? COPYING : WAITING;
    case FOLD:
        return REDUCING;
    case SEND:
    case SENT:
        return SENDING;
    case RECEIVE:
        return RECEIVING;
    default: /* takes no time */
        return NO_PART;
    }
}

/* Add a part, or extend the one before; return the number of parts. */
static Py_ssize_t
add_part(Part *parts, Py_ssize_t count, int kind, int64_t begun_ns, int64_t ended_ns)
{
    if (kind == NO_PART || ended_ns <= begun_ns) {
        return count;
    }
    if (count > 0 && parts[count - 1].kind == kind && parts[count - 1].ended_ns == begun_ns) {
        parts[count - 1].ended_ns = ended_ns;
        return count;
    }
    parts[count] = (Part){kind, begun_ns, ended_ns};
    return count + 1;
}

/* Report the parts of a call; exceptions raised meanwhile do not reach the call. */
static void
tell_parts(PyObject *operation, int64_t begun_ns, const Part *parts, Py_ssize_t count)
{
    PyObject *error = raised(), *taker = Py_XNewRef(parts_taker), *list = PyList_New(0);
    for (Py_ssize_t each = 0; list != NULL && each < count; each++) {
        PyObject *part = Py_BuildValue("sLL", part_names[parts[each].kind], (long long)parts[each].begun_ns,
                                       (long long)parts[each].ended_ns);
        if (part == NULL || PyList_Append(list, part) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(part);
    }
    PyObject *told = NULL;
    if (list != NULL && taker != NULL) {
        told = PyObject_CallFunction(taker, "OLO", operation, (long long)begun_ns, list);
    }
    if (PyErr_Occurred()) {
        PyErr_WriteUnraisable(taker);
    }
    Py_XDECREF(told);
    Py_XDECREF(list);
    Py_XDECREF(taker);
    if (error != NULL) {
        raise_again(error);
    }
}

/* Run steps as `run_steps` does, and record the time of each; return the last outcome. */
static int
run_timed(Run *run, Py_ssize_t *at)
{
    Script *script = run->script;
    Part *parts = PyMem_Malloc(2 * (size_t)(script->count + 1) * sizeof(Part));
    if (parts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const unsigned long long *waited_ns = &script->arrivals->waited_ns;
    Py_ssize_t count = 0;
    int64_t begun_ns = monotonic_ns(), last_ns = begun_ns;
    int outcome = 0;
    for (; *at < script->count && !outcome; *at += !outcome) {
        Step *step = &script->steps[*at];
        unsigned long long before_ns = *waited_ns;
        outcome = run_step(run, step);
        int64_t now_ns = monotonic_ns(), moved_ns = now_ns - (int64_t)(*waited_ns - before_ns);
        count = add_part(parts, count, part_of(script, step), last_ns, moved_ns);
        count = add_part(parts, count, WAITING, moved_ns, now_ns);
        last_ns = now_ns;
    }
    if (outcome > 0 && (script->steps[*at].kind == STOP || script->steps[*at].kind == FOLD)) {
        parts[count++] = (Part){REDUCING, last_ns, last_ns}; /* a fold that torch does: it lasts until the next run */
    }
    take_lock(&run->lock);
    tell_parts(run->operation, begun_ns, parts, count);
    PyMem_Free(parts);
    return outcome;
}

Py_ssize_t
run_steps(Run *run, Py_ssize_t at)
{
    Script *script = run->script;
    int outcome = 0;
    if (script->places > script->tensors) {
        take_lent_before(run, at);
    }
    if (parts_taker != NULL) {
        outcome = run_timed(run, &at);
    }
    for (; at < script->count && !outcome; at += !outcome) {
        outcome = run_step(run, &script->steps[at]);
    }
    take_lock(&run->lock);
    return outcome < 0 ? -1 : at;
}
