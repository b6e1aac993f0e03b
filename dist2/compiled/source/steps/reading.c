/* Reading of scripts: from tuples of Python to steps. */

#include "script.h"

#include <string.h>

/* Return the start of a member's region, where its control words are; NULL with an exception. */
static Word *
region_of(const Arrivals *arrivals, long rank)
{
    if (rank == arrivals->rank) {
        return arrivals->own;
    }
    Py_ssize_t peer = find_peer(arrivals, rank);
    return peer < 0 ? NULL : arrivals->peers[peer].words;
}

/* Read a place, and mark its tensor as used. */
static int
read_place(Script *self, PyObject *source, Place *place)
{
    unsigned long long at;
    long owner = -1;
    if (!PyArg_ParseTuple(source, "nK|l;a place is a tensor, a number of bytes, and perhaps whose", &place->tensor, &at,
                          &owner)) {
        return -1;
    }
    place->at = at;
    if (place->tensor < PIECE || place->tensor >= self->places) {
        PyErr_Format(PyExc_IndexError, "tensor %zd of %zd", place->tensor, self->places);
        return -1;
    }
    if (PyTuple_GET_SIZE(source) == 3) {
        Word *region = region_of(self->arrivals, owner);
        if (region == NULL) {
            return -1;
        }
        place->at += (uint64_t)(uintptr_t)region;
    }
    if (place->tensor >= 0) {
        self->used[place->tensor] = 1;
    }
    return 0;
}

static int
check_way(const Step *step, int is_one)
{
    if (!is_one) {
        PyErr_Format(PyExc_ValueError, "there is no way %d to copy", step->way);
    }
    return is_one ? 0 : -1;
}

static int
read_copy(Script *self, PyObject *args, Step *step)
{
    PyObject *dst, *src;
    if (!PyArg_ParseTuple(args, "iO!O!ni", &step->kind, &PyTuple_Type, &dst, &PyTuple_Type, &src, &step->nbytes,
                          &step->way)) {
        return -1;
    }
    if (check_way(step, step->way >= 0 && step->way < WAYS) < 0) {
        return -1;
    }
    return read_place(self, dst, &step->dst) < 0 || read_place(self, src, &step->src) < 0 ? -1 : 0;
}

static int
read_both(Script *self, PyObject *args, Step *step)
{
    PyObject *slot, *passed, *src;
    if (!PyArg_ParseTuple(args, "iO!O!O!ni", &step->kind, &PyTuple_Type, &slot, &PyTuple_Type, &passed, &PyTuple_Type,
                          &src, &step->nbytes, &step->way)) {
        return -1;
    }
    if (check_way(step, step->way == IN || step->way == AWAY) < 0) {
        return -1;
    }
    step->srcs = PyMem_Calloc(1, sizeof(Place));
    if (step->srcs == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    step->count = 1;
    if (read_place(self, slot, &step->dst) < 0 || read_place(self, passed, step->srcs) < 0) {
        return -1;
    }
    return read_place(self, src, &step->src);
}

static int
read_fence(Script *self, PyObject *args, Step *step)
{
    PyObject *check;
    long whom;
    if (!PyArg_ParseTuple(args, "iOl", &step->kind, &check, &whom)) {
        return -1;
    }
    step->check = check == Py_None ? NULL : Py_NewRef(check);
    self->fences++;
    return read_whom(self->arrivals, whom, &step->owner);
}

static int
read_claim(PyObject *args, Step *step)
{
    if (!PyArg_ParseTuple(args, "ii", &step->kind, &step->pieces)) {
        return -1;
    }
    if (step->pieces < 0 || step->pieces >= PIECE_KINDS) {
        PyErr_Format(PyExc_ValueError, "there are no pieces of kind %d", step->pieces);
        return -1;
    }
    return 0;
}

/* Find a fold by its name. */
static int
find_fold(const char *name)
{
    for (int each = 0; each < FOLD_COUNT; each++) {
        if (strcmp(FOLDS[each].name, name) == 0) {
            return each;
        }
    }
    PyErr_Format(PyExc_ValueError, "there is no fold %s", name);
    return -1;
}

/* Read several places. */
static int
read_sources(Script *self, PyObject *sources, Step *step)
{
    step->count = PyTuple_GET_SIZE(sources);
    step->srcs = PyMem_Calloc((size_t)step->count + 1, sizeof(Place));
    if (step->srcs == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t each = 0; each < step->count; each++) {
        if (read_place(self, PyTuple_GET_ITEM(sources, each), &step->srcs[each]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
read_fold(Script *self, PyObject *args, Step *step)
{
    const char *name;
    PyObject *dst, *srcs;
    if (!PyArg_ParseTuple(args, "isdO!O!n", &step->kind, &name, &step->divisor, &PyTuple_Type, &dst,
                          &PyTuple_Type, &srcs, &step->nbytes)) {
        return -1;
    }
    step->fold = find_fold(name);
    if (step->fold < 0 || read_place(self, dst, &step->dst) < 0) {
        return -1;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(srcs);
    if (count < 1 || step->nbytes % FOLDS[step->fold].itemsize) {
        PyErr_Format(PyExc_ValueError, "cannot fold %zd vectors of %zd bytes", count, step->nbytes);
        return -1;
    }
    if (count > FEW_SOURCES && (step->many = PyMem_Calloc((size_t)count, sizeof *step->many)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return read_sources(self, srcs, step);
}

static int
read_move(Script *self, PyObject *args, Step *step)
{
    PyObject *dst, *src;
    long owner;
    if (!PyArg_ParseTuple(args, "illiO!O!np", &step->kind, &owner, &step->pid, &step->pidfd, &PyTuple_Type, &dst,
                          &PyTuple_Type, &src, &step->nbytes, &step->way)) {
        return -1;
    }
    if (read_place(self, dst, &step->dst) < 0 || read_place(self, src, &step->src) < 0) {
        return -1;
    }
    step->owner = find_peer(self->arrivals, owner);
    return step->owner < 0 ? -1 : 0;
}

static int
read_same(PyObject *args, Step *step)
{
    PyObject *bytes;
    unsigned long long at;
    if (!PyArg_ParseTuple(args, "iKS", &step->kind, &at, &bytes)) {
        return -1;
    }
    step->src.at = at;
    step->bytes = Py_NewRef(bytes);
    return 0;
}

static int
read_store(Script *self, PyObject *args, Step *step)
{
    PyObject *bytes, *places;
    unsigned long long at, first;
    if (!PyArg_ParseTuple(args, "iKSKO!", &step->kind, &at, &bytes, &first, &PyTuple_Type, &places)) {
        return -1;
    }
    size_t room = (size_t)PyBytes_GET_SIZE(bytes), count = (size_t)PyTuple_GET_SIZE(places);
    if (first > room || count > (room - first) / sizeof(uint64_t)) {
        PyErr_Format(PyExc_ValueError, "%zu addresses from byte %llu on do not fit %zu bytes", count, first, room);
        return -1;
    }
    step->src.at = at;
    step->dst.at = first;
    step->bytes = Py_NewRef(bytes);
    return read_sources(self, places, step);
}

static int
read_lent(Script *self, PyObject *args, Step *step)
{
    PyObject *bytes;
    unsigned long long at, shift;
    if (!PyArg_ParseTuple(args, "iKSnnK", &step->kind, &at, &bytes, &step->owner, &step->count, &shift)) {
        return -1;
    }
    if (step->owner < self->tensors || step->count < 0 || step->count > self->places - step->owner) {
        PyErr_Format(PyExc_IndexError, "%zd parts from place %zd of %zd on", step->count, step->owner, self->places);
        return -1;
    }
    step->src.at = at;
    step->dst.at = shift;
    step->bytes = Py_NewRef(bytes);
    return 0;
}

/* Read a number that members publish to each other. */
static int
read_number(PyObject *args, Step *step)
{
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "iK", &step->kind, &number)) {
        return -1;
    }
    step->src.at = number;
    return 0;
}

static int
read_shared(Script *self, PyObject *args, Step *step)
{
    PyObject *place;
    if (!PyArg_ParseTuple(args, "iO!p", &step->kind, &PyTuple_Type, &place, &step->way)) {
        return -1;
    }
    return read_place(self, place, &step->dst);
}

/* Add a rail to those that the script uses. */
static int
add_rail(Script *self, Rail *rail)
{
    Rails *rails = &self->rails;
    for (Py_ssize_t each = 0; each < rails->count; each++) {
        if (rails->each[each] == rail) {
            return 0;
        }
    }
    Rail **grown = PyMem_Realloc(rails->each, (size_t)(rails->count + 1) * sizeof *grown);
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    rails->each = grown;
    grown[rails->count++] = rail;
    return 0;
}

static int
read_message(Script *self, PyObject *args, Step *step)
{
    PyObject *rail, *header, *place;
    if (!PyArg_ParseTuple(args, "iO!SO!nl", &step->kind, &RailType, &rail, &header, &PyTuple_Type, &place,
                          &step->nbytes, &step->message)) {
        return -1;
    }
    if (PyBytes_GET_SIZE(header) != FRAME_BYTES) {
        PyErr_Format(PyExc_ValueError, "a header of %zd bytes", PyBytes_GET_SIZE(header));
        return -1;
    }
    if (read_place(self, place, &step->src) < 0) {
        return -1;
    }
    step->bytes = Py_NewRef(header);
    step->rail = (Rail *)Py_NewRef(rail);
    return add_rail(self, step->rail);
}

static int
read_sent(Script *self, PyObject *args, Step *step)
{
    PyObject *rail;
    if (!PyArg_ParseTuple(args, "iO!l", &step->kind, &RailType, &rail, &step->message)) {
        return -1;
    }
    step->rail = (Rail *)Py_NewRef(rail);
    return add_rail(self, step->rail);
}

int
read_step(Script *self, PyObject *args, Step *step)
{
    if (!PyTuple_Check(args) || PyTuple_GET_SIZE(args) == 0) {
        PyErr_Format(PyExc_TypeError, "a step is a tuple, got %R", args);
        return -1;
    }
    switch (PyLong_AsLong(PyTuple_GET_ITEM(args, 0))) {
    case STOP:
        return PyArg_ParseTuple(args, "i", &step->kind) ? 0 : -1;
    case COPY:
    case OWN:
    case BESIDE:
        return read_copy(self, args, step);
    case BOTH:
        return read_both(self, args, step);
    case FENCE:
        return read_fence(self, args, step);
    case FOLD:
        return read_fold(self, args, step);
    case READ:
        return read_move(self, args, step);
    case SAME:
        return read_same(args, step);
    case SHARED:
        return read_shared(self, args, step);
    case STORE:
        return read_store(self, args, step);
    case LENT:
        return read_lent(self, args, step);
    case NOTE:
    case NOTED:
        return read_number(args, step);
    case CLAIM:
        return read_claim(args, step);
    case SEND:
    case RECEIVE:
        return read_message(self, args, step);
    case SENT:
        return read_sent(self, args, step);
    default:
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_ValueError, "there is no step like %R", args);
        }
        return -1;
    }
}
