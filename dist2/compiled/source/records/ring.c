/* `Ring`: the operations begun last. Of a group that it watches it also
   keeps the last ones that later operations of other groups have displaced. */

#include "counting.h"

static Field field_group;

typedef struct {
    PyObject_HEAD
    PyObject **slots;
    Py_ssize_t capacity;
    Py_ssize_t next;   /* the slot to fill */
    Py_ssize_t filled;
    Py_ssize_t kept;   /* displaced operations of each watched group; 0 keeps none */
    PyObject *tails;   /* a Ring for each watched group */
    PyObject *last_group; /* borrowed: of the entry of `tails` that was used last */
    PyObject *last_tail;
    vectorcallfunc call;
} Ring;

static PyTypeObject Ring_Type;
static PyObject *ring_call(PyObject *self, PyObject *const *args, size_t count, PyObject *names);

static Ring *
ring_make(PyTypeObject *type, Py_ssize_t capacity, Py_ssize_t kept)
{
    Ring *self = (Ring *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->slots = PyMem_Calloc((size_t)capacity, sizeof(PyObject *));
    self->tails = PyDict_New();
    if (self->slots == NULL || self->tails == NULL) {
        Py_DECREF(self);
        return (Ring *)PyErr_NoMemory();
    }
    self->capacity = capacity;
    self->kept = kept;
    self->call = ring_call;
    return self;
}

static PyObject *
ring_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"capacity", "kept", NULL};
    Py_ssize_t capacity, kept;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "nn:Ring", names, &capacity, &kept)) {
        return NULL;
    }
    if (capacity < 1 || kept < 0) {
        return PyErr_Format(PyExc_ValueError, "capacity must be at least 1 and kept at least 0, got %zd and %zd", capacity,
                            kept);
    }
    return (PyObject *)ring_make(type, capacity, kept);
}

static int
ring_traverse(Ring *self, visitproc visit, void *arg)
{
    for (Py_ssize_t index = 0; index < self->filled; index++) {
        Py_VISIT(self->slots[index]);
    }
    Py_VISIT(self->tails);
    return 0;
}

static int
ring_clear(Ring *self)
{
    self->last_group = self->last_tail = NULL;
    Py_ssize_t filled = self->filled;
    self->filled = self->next = 0;
    for (Py_ssize_t index = 0; index < filled; index++) {
        Py_CLEAR(self->slots[index]);
    }
    if (self->tails != NULL) {
        PyDict_Clear(self->tails);
    }
    return 0;
}

static void
ring_dealloc(Ring *self)
{
    PyObject_GC_UnTrack(self);
    if (self->slots != NULL) {
        ring_clear(self);
    }
    Py_CLEAR(self->tails);
    PyMem_Free(self->slots);
    Py_TYPE(self)->tp_free(self);
}

/* Add an operation; return the displaced one, or NULL. */
static PyObject *
ring_push(Ring *self, PyObject *operation)
{
    PyObject *displaced = self->slots[self->next];
    self->slots[self->next] = Py_NewRef(operation);
    self->next = self->next + 1 == self->capacity ? 0 : self->next + 1;
    if (self->filled < self->capacity) {
        self->filled++;
    }
    return displaced;
}

/* Find the tail of an operation's group, borrowed; NULL without an exception if the group is not watched. */
static Ring *
ring_tail_of(Ring *self, Record *operation)
{
    if (operation->signature == NULL) {
        return NULL;
    }
    PyObject *group = get_attribute(operation->signature, &field_group);
    if (group == NULL) {
        return NULL;
    }
    Py_DECREF(group); /* the signature has it */
    if (group != self->last_group) {
        PyObject *tail = PyDict_GetItemWithError(self->tails, group);
        if (tail == NULL) {
            return NULL;
        }
        self->last_group = group;
        self->last_tail = tail;
    }
    return (Ring *)self->last_tail;
}

static PyObject *
ring_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names)
{
    Ring *self = (Ring *)object;
    if (PyVectorcall_NARGS(count) != 1 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "Ring takes one operation");
        return NULL;
    }
    if (as_record(args[0]) == NULL) {
        return NULL;
    }
    PyObject *displaced = ring_push(self, args[0]);
    if (displaced != NULL && self->kept > 0) {
        Ring *tail = ring_tail_of(self, (Record *)displaced);
        if (tail != NULL) {
            Py_SETREF(displaced, ring_push(tail, displaced));
        }
        else if (PyErr_Occurred()) {
            Py_DECREF(displaced);
            return NULL;
        }
    }
    Py_XDECREF(displaced); /* last: it may run code of the program */
    Py_RETURN_NONE;
}

static PyObject *
ring_recent(Ring *self, PyObject *Py_UNUSED(nothing))
{
    PyObject *found = PyList_New(self->filled);
    Py_ssize_t first = self->filled < self->capacity ? 0 : self->next;
    for (Py_ssize_t index = 0; found != NULL && index < self->filled; index++) {
        PyList_SET_ITEM(found, index, Py_NewRef(self->slots[(first + index) % self->capacity]));
    }
    return found;
}

static PyObject *
ring_displaced(Ring *self, PyObject *Py_UNUSED(nothing))
{
    PyObject *found = PyList_New(0), *group, *tail;
    Py_ssize_t place = 0;
    while (found != NULL && PyDict_Next(self->tails, &place, &group, &tail)) {
        PyObject *of_group = ring_recent((Ring *)tail, NULL);
        Py_ssize_t end = PyList_GET_SIZE(found);
        if (of_group == NULL || PyList_SetSlice(found, end, end, of_group) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(of_group);
    }
    return found;
}

static PyObject *
ring_watch(Ring *self, PyObject *group)
{
    if (self->kept > 0 && PyDict_Contains(self->tails, group) == 0) {
        PyObject *tail = (PyObject *)ring_make(&Ring_Type, self->kept, 0);
        if (tail != NULL) {
            (void)PyDict_SetItem(self->tails, group, tail);
            Py_DECREF(tail);
        }
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *
ring_forget(Ring *self, PyObject *group)
{
    self->last_group = self->last_tail = NULL;
    if (PyDict_Contains(self->tails, group) == 1) {
        (void)PyDict_DelItem(self->tails, group);
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Put an operation in the place of another one; return whether that was there. */
static int
ring_put(Ring *self, PyObject *old, PyObject *new)
{
    for (Py_ssize_t index = 0; index < self->filled; index++) {
        if (self->slots[index] == old) {
            Py_SETREF(self->slots[index], Py_NewRef(new));
            return 1;
        }
    }
    return 0;
}

static PyObject *
ring_replace(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        return PyErr_Format(PyExc_TypeError, "replace takes 2 arguments, got %zd", count);
    }
    if (as_record(args[0]) == NULL || as_record(args[1]) == NULL) {
        return NULL;
    }
    int is_found = ring_put(self, args[0], args[1]);
    if (!is_found) {
        Ring *tail = ring_tail_of(self, (Record *)args[0]);
        is_found = tail != NULL && ring_put(tail, args[0], args[1]);
    }
    return PyErr_Occurred() ? NULL : PyBool_FromLong(is_found);
}

static PyObject *
ring_forget_all(Ring *self, PyObject *Py_UNUSED(nothing))
{
    ring_clear(self);
    Py_RETURN_NONE;
}

static PyObject *
ring_is_full(Ring *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->filled == self->capacity);
}

static PyMethodDef ring_methods[] = {
    {"recent", (PyCFunction)ring_recent, METH_NOARGS, "recent()\n--\n\nReturn the operations begun last, in order."},
    {"displaced", (PyCFunction)ring_displaced, METH_NOARGS,
     "displaced()\n--\n\nReturn earlier operations of the watched groups, group by group, in order."},
    {"watch", (PyCFunction)ring_watch, METH_O, "watch(group)\n--\n\nKeep displaced operations of a group."},
    {"forget", (PyCFunction)ring_forget, METH_O, "forget(group)\n--\n\nKeep none of them any more."},
    {"replace", (PyCFunction)(void (*)(void))ring_replace, METH_FASTCALL,
     "replace(old, new)\n--\n\nPut an operation in the place of another; return whether that was there."},
    {"clear", (PyCFunction)ring_forget_all, METH_NOARGS, "clear()\n--\n\nForget all operations and groups."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ring_properties[] = {
    {"is_full", (getter)ring_is_full, NULL, "Whether earlier operations may have been displaced.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Ring_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.Ring",
    .tp_doc = "The operations begun last, and the last ones of each watched group.",
    .tp_basicsize = sizeof(Ring),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = ring_new,
    .tp_dealloc = (destructor)ring_dealloc,
    .tp_traverse = (traverseproc)ring_traverse,
    .tp_clear = (inquiry)ring_clear,
    .tp_methods = ring_methods,
    .tp_getset = ring_properties,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Ring, call),
};

int
ring_ready(PyObject *module)
{
    static const Name names[] = {{&field_group.name, "group"}};
    return intern(names, Py_ARRAY_LENGTH(names)) < 0 ? -1 : PyModule_AddType(module, &Ring_Type);
}
