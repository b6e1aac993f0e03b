/* Movers: what plans between hosts move, as the executor of the core calls them (`Outside` in dist2/core/plan.h):
   messages, and memory of other processes of this host, which the kernel reads. */

#define _GNU_SOURCE
#include "plan.h"
#include "rails.h"

#include <poll.h>
#include <string.h>
#include <sys/uio.h>

enum { SEND, RECEIVE, SENT };

/* The movers of one plan share its rails: a wait for one of them continues the writes on all. */
typedef struct {
    PyObject_HEAD
    Rails rails;
} Movers;

typedef struct {
    PyObject_HEAD
    Outside outside;
    int kind;
    Rail *rail;
    Movers *movers;
    char header[FRAME_BYTES];
} Mover;

static PyTypeObject MoverType, MoversType;

/* The beginning of a Mover and of a Reader. */
typedef struct {
    PyObject_HEAD
    Outside outside;
} Moving;

static PyObject *
address_of_outside(Moving *self, void *Py_UNUSED(none))
{
    return PyLong_FromVoidPtr(&self->outside);
}

static PyGetSetDef getset[] = {
    {"outside", (getter)address_of_outside, NULL, "The address of its `Outside`.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* Runs without the interpreter lock. */
static int
move(const Outside *outside, void *memory, const void *Py_UNUSED(source), size_t nbytes, long number)
{
    const Mover *self = (const Mover *)((const char *)outside - offsetof(Mover, outside));
    Parcel parcel = {self->header, memory, nbytes, number};
    switch (self->kind) {
    case SEND:
        return send_parcel(self->rail, &parcel);
    case RECEIVE:
        return receive_parcel(self->rail, &parcel, &self->movers->rails);
    default:
        return see_off(self->rail, number, &self->movers->rails);
    }
}

/* Add a rail to those of the plan; -1 with an exception. */
static int
add_rail(Movers *self, Rail *rail)
{
    Rails *rails = &self->rails;
    for (Py_ssize_t each = 0; each < rails->count; each++) {
        if (rails->each[each] == rail) {
            return 0;
        }
    }
    Rail **more = PyMem_Realloc(rails->each, (size_t)(rails->count + 1) * sizeof(Rail *));
    if (more == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    rails->each = more;
    rails->each[rails->count++] = (Rail *)Py_NewRef(rail);
    return 0;
}

static PyObject *
mover(Movers *self, int kind, PyObject *rail, Py_buffer *header)
{
    if (header != NULL && header->len != FRAME_BYTES) {
        return PyErr_Format(PyExc_ValueError, "header: %zd bytes are no header", header->len);
    }
    Mover *made = add_rail(self, (Rail *)rail) < 0 ? NULL : PyObject_New(Mover, &MoverType);
    if (made == NULL) {
        return NULL;
    }
    made->outside = (Outside){move};
    made->kind = kind;
    made->rail = (Rail *)Py_NewRef(rail);
    made->movers = (Movers *)Py_NewRef(self);
    if (header != NULL) {
        memcpy(made->header, header->buf, FRAME_BYTES);
    }
    return (PyObject *)made;
}

/* Return a mover of messages with a header, which are all alike but for their numbers. */
static PyObject *
mover_of(Movers *self, int kind, PyObject *args)
{
    PyObject *rail;
    Py_buffer header;
    if (!PyArg_ParseTuple(args, "O!y*", &RailType, &rail, &header)) {
        return NULL;
    }
    PyObject *made = mover(self, kind, rail, &header);
    PyBuffer_Release(&header);
    return made;
}

static PyObject *
movers_send(Movers *self, PyObject *args)
{
    return mover_of(self, SEND, args);
}

static PyObject *
movers_receive(Movers *self, PyObject *args)
{
    return mover_of(self, RECEIVE, args);
}

static PyObject *
movers_sent(Movers *self, PyObject *args)
{
    PyObject *rail;
    return PyArg_ParseTuple(args, "O!", &RailType, &rail) ? mover(self, SENT, rail, NULL) : NULL;
}

static void
movers_dealloc(Movers *self)
{
    for (Py_ssize_t each = 0; each < self->rails.count; each++) {
        Py_DECREF(self->rails.each[each]);
    }
    PyMem_Free(self->rails.each);
    Py_TYPE(self)->tp_free(self);
}

static void
mover_dealloc(Mover *self)
{
    Py_DECREF(self->rail);
    Py_DECREF(self->movers);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef movers_methods[] = {
    {"send", (PyCFunction)movers_send, METH_VARARGS, "Return a mover that sends a message."},
    {"receive", (PyCFunction)movers_receive, METH_VARARGS, "Return a mover that receives a message."},
    {"sent", (PyCFunction)movers_sent, METH_VARARGS, "Return a mover that waits until messages are sent, up to one."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject MoversType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.steps.Movers",
    .tp_doc = "The messages of one plan.",
    .tp_basicsize = sizeof(Movers),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)movers_dealloc,
    .tp_methods = movers_methods,
};

static PyTypeObject MoverType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.steps.Mover",
    .tp_doc = "Moves a message of a plan.",
    .tp_basicsize = sizeof(Mover),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)mover_dealloc,
    .tp_getset = getset,
};

/* Reads the memory of a process. */
typedef struct {
    PyObject_HEAD
    Outside outside;
    long pid;
    int pidfd; /* readable once the process has ended */
} Reader;

/* Runs without the interpreter lock. The kernel moves less than 2 GiB at a time. */
static int
read_memory(const Outside *outside, void *memory, const void *source, size_t nbytes, long Py_UNUSED(number))
{
    const Reader *self = (const Reader *)((const char *)outside - offsetof(Reader, outside));
    for (size_t done = 0; done < nbytes;) {
        struct iovec here = {(char *)memory + done, nbytes - done}, there = {(char *)source + done, nbytes - done};
        ssize_t moved = process_vm_readv((pid_t)self->pid, &here, 1, &there, 1, 0);
        if (moved <= 0) {
            return 1;
        }
        done += (size_t)moved;
    }
    /* After the end of a process its id may belong to another one, and the bytes be that one's. */
    struct pollfd process = {.fd = self->pidfd, .events = POLLIN};
    return poll(&process, 1, 0) != 0;
}

static PyObject *
reader_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    long pid;
    int pidfd;
    if (!PyArg_ParseTuple(args, "li", &pid, &pidfd)) {
        return NULL;
    }
    Reader *self = (Reader *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->outside = (Outside){read_memory};
        self->pid = pid;
        self->pidfd = pidfd;
    }
    return (PyObject *)self;
}

static PyTypeObject ReaderType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.steps.Reader",
    .tp_doc = "Reads the memory of a process, given its id and a descriptor that shows its end.",
    .tp_basicsize = sizeof(Reader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = reader_new,
    .tp_getset = getset,
};

int
movers_ready(PyObject *module)
{
    if (PyModule_AddType(module, &ReaderType) < 0) {
        return -1;
    }
    return PyType_Ready(&MoverType) < 0 ? -1 : PyModule_AddType(module, &MoversType);
}
