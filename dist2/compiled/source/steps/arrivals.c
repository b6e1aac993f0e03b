/* Arrivals: the counterpart of `transport.boards.arrivals.Arrivals`, with the same behaviour. Its fences are in
   fences.c. */

#include "steps.h"

/* Bind a buffer of control words. */
static Word *
bind_words(PyObject *source, Py_buffer *memory)
{
    if (PyObject_GetBuffer(source, memory, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    if (memory->len < (Py_ssize_t)(WORDS * sizeof(Word)) || (uintptr_t)memory->buf % sizeof(Word)) {
        PyErr_Format(PyExc_ValueError, "words: need %d aligned ones, got %zd bytes", WORDS, memory->len);
        PyBuffer_Release(memory);
        return NULL;
    }
    return memory->buf;
}

/* Read the offsets of the pieces of one kind. */
static int
read_pieces(Pieces *pieces, PyObject *source)
{
    unsigned long long base, stride;
    if (!PyArg_ParseTuple(source, "KKn;pieces have a base, a stride and a count", &base, &stride, &pieces->count)) {
        return -1;
    }
    if (pieces->count < 2) { /* two in a row: a wait for the second is never a wait for a waiter of the first */
        PyErr_Format(PyExc_ValueError, "pieces: need at least 2, got %zd", pieces->count);
        return -1;
    }
    pieces->base = base;
    pieces->stride = stride;
    pieces->last = PyMem_Calloc((size_t)pieces->count, sizeof(uint64_t));
    if (pieces->last == NULL) {
        PyErr_NoMemory();
    }
    return pieces->last == NULL ? -1 : 0;
}

static int
arrivals_init(Arrivals *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rank", "own",  "doorbell", "spins",  "yields",
                            "slow_ns", "tiny", "pieces", NULL};
    PyObject *own, *doorbell, *kinds[PIECE_KINDS];
    if (self->own != NULL) {
        PyErr_SetString(PyExc_TypeError, "Arrivals are made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "lOOllLO!O!", names, &self->rank, &own, &doorbell, &self->spins,
                                     &self->yields, &self->slow_ns, &PyTuple_Type, &kinds[0], &PyTuple_Type,
                                     &kinds[1])) {
        return -1;
    }
    for (int kind = 0; kind < PIECE_KINDS; kind++) {
        if (read_pieces(&self->pieces[kind], kinds[kind]) < 0) {
            return -1;
        }
    }
    self->bell = PyObject_AsFileDescriptor(doorbell);
    if (self->bell < 0) {
        return -1;
    }
    self->doorbell = Py_NewRef(doorbell);
    self->nap = SHORT_NAP;
    self->core = -1;
    self->own = bind_words(own, &self->memory);
    return self->own == NULL ? -1 : 0;
}

static int
arrivals_traverse(Arrivals *self, visitproc visit, void *arg)
{
    Py_VISIT(self->at);
    Py_VISIT(self->before);
    Py_VISIT(self->doorbell);
    for (Py_ssize_t each = 0; each < self->count; each++) {
        Py_VISIT(self->peers[each].doorbell);
    }
    return 0;
}

static int
arrivals_clear(Arrivals *self)
{
    Py_CLEAR(self->at);
    Py_CLEAR(self->before);
    return 0;
}

static void
arrivals_dealloc(Arrivals *self)
{
    PyObject_GC_UnTrack(self);
    arrivals_clear(self);
    Py_CLEAR(self->doorbell);
    for (Py_ssize_t each = 0; each < self->count; each++) {
        Py_CLEAR(self->peers[each].doorbell);
        PyBuffer_Release(&self->peers[each].memory);
    }
    PyMem_Free(self->peers);
    for (int kind = 0; kind < PIECE_KINDS; kind++) {
        PyMem_Free(self->pieces[kind].last);
    }
    if (self->own != NULL) {
        PyBuffer_Release(&self->memory);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
arrivals_add(Arrivals *self, PyObject *args)
{
    PyObject *words, *doorbell;
    Peer peer = {.agreed = 0};
    if (!PyArg_ParseTuple(args, "lOO", &peer.rank, &words, &doorbell)) {
        return NULL;
    }
    peer.bell = PyObject_AsFileDescriptor(doorbell);
    if (peer.bell < 0) {
        return NULL;
    }
    Peer *peers = PyMem_Realloc(self->peers, (size_t)(self->count + 1) * sizeof(Peer));
    if (peers == NULL) {
        return PyErr_NoMemory();
    }
    self->peers = peers;
    peer.words = bind_words(words, &peer.memory);
    if (peer.words == NULL) {
        return NULL;
    }
    peer.doorbell = Py_NewRef(doorbell);
    peers[self->count++] = peer;
    Py_RETURN_NONE;
}

void
note_call(Arrivals *self, PyObject *operation, const Label *label)
{
    if (operation == self->at) {
        return;
    }
    Py_XSETREF(self->before, self->at);
    self->at = Py_NewRef(operation);
    atomic_store_explicit(&self->own[SEQ], label->seq, memory_order_relaxed);
}

/* Find the index of another member. */
Py_ssize_t
find_peer(const Arrivals *self, long rank)
{
    for (Py_ssize_t each = 0; each < self->count; each++) {
        if (self->peers[each].rank == rank) {
            return each;
        }
    }
    PyErr_Format(PyExc_ValueError, "rank %ld is no other member", rank);
    return -1;
}

/* Read a rank to wait for, ALL or NOBODY. */
int
read_whom(const Arrivals *self, long whom, Py_ssize_t *index)
{
    *index = whom == ALL || whom == NOBODY ? whom : find_peer(self, whom);
    return *index == -1 && whom != ALL ? -1 : 0;
}

static PyObject *
arrivals_cross(Arrivals *self, PyObject *const *args, Py_ssize_t count)
{
    Label label;
    Lock lock = {NULL};
    Py_ssize_t whom = ALL;
    if (count < 2 || count > 4) {
        PyErr_Format(PyExc_TypeError, "cross takes 2 to 4 arguments, got %zd", count);
        return NULL;
    }
    long rank = count > 2 ? PyLong_AsLong(args[2]) : ALL;
    if (PyErr_Occurred() || read_whom(self, rank, &whom) < 0 || read_label(args[0], &label, NULL) < 0) {
        return NULL;
    }
    note_call(self, args[0], &label);
    PyObject *attend = count == 4 && args[3] != Py_None ? args[3] : NULL;
    Waiter waiter = {.operation = args[0], .wait = args[1], .attend = attend, .lock = &lock};
    int crossed = come(self, &label, whom, &waiter) < 0 ? -1 : wait_for(self, whom, self->phase, &waiter);
    take_lock(&lock);
    return crossed < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
arrivals_reach(Arrivals *self, PyObject *args)
{
    Lock lock = {NULL};
    Waiter waiter = {.lock = &lock};
    unsigned long long phase;
    if (!PyArg_ParseTuple(args, "OOK", &waiter.operation, &waiter.wait, &phase)) {
        return NULL;
    }
    int reached = reach(self, phase, 0, &waiter);
    take_lock(&lock);
    return reached < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
arrivals_claim(Arrivals *self, PyObject *args)
{
    Lock lock = {NULL};
    Waiter waiter = {.lock = &lock};
    int kind;
    if (!PyArg_ParseTuple(args, "OOi", &waiter.operation, &waiter.wait, &kind)) {
        return NULL;
    }
    if (kind < 0 || kind >= PIECE_KINDS) {
        return PyErr_Format(PyExc_ValueError, "there are no pieces of kind %d", kind);
    }
    int claimed = claim(self, kind, &waiter);
    take_lock(&lock);
    return claimed < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
arrivals_order(Arrivals *Py_UNUSED(self), PyObject *Py_UNUSED(none))
{
    atomic_thread_fence(memory_order_seq_cst);
    Py_RETURN_NONE;
}

static PyObject *
arrivals_get_stopped(Arrivals *self, void *Py_UNUSED(none))
{
    return PyBool_FromLong(atomic_load(&self->stopped));
}

static int
arrivals_set_stopped(Arrivals *self, PyObject *value, void *Py_UNUSED(none))
{
    int stopped = value == NULL ? 0 : PyObject_IsTrue(value);
    if (stopped < 0) {
        return -1;
    }
    atomic_store(&self->stopped, (char)stopped);
    return 0;
}

static PyMethodDef arrivals_methods[] = {
    {"add", (PyCFunction)arrivals_add, METH_VARARGS, "Add another member."},
    {"cross", (PyCFunction)(void (*)(void))arrivals_cross, METH_FASTCALL, "Come to the next fence."},
    {"reach", (PyCFunction)arrivals_reach, METH_VARARGS, "Wait until all have come to an earlier fence."},
    {"claim", (PyCFunction)arrivals_claim, METH_VARARGS, "Claim the next piece of one kind."},
    {"order", (PyCFunction)arrivals_order, METH_NOARGS, "Have what was written seen before what is read next."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef arrivals_members[] = {
    {"phase", T_ULONGLONG, offsetof(Arrivals, phase), READONLY, NULL},
    {"sought", T_ULONGLONG, offsetof(Arrivals, sought), READONLY, NULL},
    {"whom", T_LONG, offsetof(Arrivals, whom), READONLY, NULL},
    {"slot", T_ULONGLONG, offsetof(Arrivals, slot), READONLY, NULL},
    {"called", T_ULONGLONG, offsetof(Arrivals, called), 0, NULL},
    {"texts", T_ULONGLONG, offsetof(Arrivals, texts), 0, NULL},
    {"waited_ns", T_ULONGLONG, offsetof(Arrivals, waited_ns), READONLY, NULL},
    {"naps", T_ULONGLONG, offsetof(Arrivals, naps), 0, NULL},
    {"sleepy", T_LONG, offsetof(Arrivals, sleepy), 0, NULL},
    {"nap", T_LONG, offsetof(Arrivals, nap), 0, NULL},
    {"turn", T_INT, offsetof(Arrivals, turn), 0, NULL},
    {"far", T_INT, offsetof(Arrivals, far), 0, NULL},
    {"at", T_OBJECT, offsetof(Arrivals, at), READONLY, NULL},
    {"before", T_OBJECT, offsetof(Arrivals, before), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef arrivals_getset[] = {
    {"stopped", (getter)arrivals_get_stopped, (setter)arrivals_set_stopped, "Whether waiting is over.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject ArrivalsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.steps.Arrivals",
    .tp_doc = "Comes to fences of a board, and waits by looking, yielding and dozing.",
    .tp_basicsize = sizeof(Arrivals),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)arrivals_init,
    .tp_dealloc = (destructor)arrivals_dealloc,
    .tp_traverse = (traverseproc)arrivals_traverse,
    .tp_clear = (inquiry)arrivals_clear,
    .tp_methods = arrivals_methods,
    .tp_members = arrivals_members,
    .tp_getset = arrivals_getset,
};

int
arrivals_ready(PyObject *module)
{
    return PyModule_AddType(module, &ArrivalsType);
}
