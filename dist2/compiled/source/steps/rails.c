/* Rails: messages of a script to and from one member on another host, over a socket. The counterpart for single
   messages is `SocketSend` and `SocketTake`; see transport/messages/rails.py.

   A rail is open while a script runs. It then has exclusive use of the sockets, and keeps the account of the credit.
   If it cannot do a step, or a message does not come within a moment, the script stops: Python closes the rail,
   takes over unfinished messages, and continues on the long path. */

#include "rails.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static PyObject *
rail_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"credit", "limit", "reported", "cost", NULL};
    Py_buffer credit;
    long long limit, reported, cost;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "y*LLL", names, &credit, &limit, &reported, &cost)) {
        return NULL;
    }
    if (credit.len != FRAME_BYTES) {
        PyErr_Format(PyExc_ValueError, "credit: %zd bytes are no header", credit.len);
        PyBuffer_Release(&credit);
        return NULL;
    }
    Rail *self = (Rail *)type->tp_alloc(type, 0);
    if (self != NULL) {
        memcpy(self->template, credit.buf, FRAME_BYTES);
        self->out = self->in = -1;
        self->limit = limit;
        self->reported = reported;
        self->cost = cost;
        self->credit_done = FRAME_BYTES;
    }
    PyBuffer_Release(&credit);
    return (PyObject *)self;
}

static void
close_descriptors(Rail *self)
{
    if (self->in >= 0 && self->in != self->out) {
        close(self->in);
    }
    if (self->out >= 0) {
        close(self->out);
    }
    self->in = self->out = -1;
}

static void
rail_dealloc(Rail *self)
{
    close_descriptors(self);
    PyMem_RawFree(self->queue);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
rail_open(Rail *self, PyObject *args)
{
    int out, in;
    unsigned long long seq;
    long long used, owed;
    long kept = 0;
    if (!PyArg_ParseTuple(args, "iiKLL|l", &out, &in, &seq, &used, &owed, &kept)) {
        return NULL;
    }
    if (self->out >= 0) {
        PyErr_SetString(PyExc_RuntimeError, "the rail is open");
        return NULL;
    }
    self->out = fcntl(out, F_DUPFD_CLOEXEC, 0); /* the owner of the link may drop it meanwhile */
    self->in = in == out ? self->out : fcntl(in, F_DUPFD_CLOEXEC, 0);
    if (self->out < 0 || self->in < 0) {
        close_descriptors(self);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    self->seq = seq;
    self->used = used;
    self->owed = owed;
    self->kept = kept;
    self->first = self->last = self->filled = 0;
    self->received = 0;
    self->credit_done = FRAME_BYTES;
    self->stalled = self->broken = self->known = 0;
    self->turn_ns = monotonic_ns();
    Py_RETURN_NONE;
}

static PyObject *
rail_took(Rail *self, PyObject *cost)
{
    long long owed = PyLong_AsLongLong(cost);
    if (owed == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (self->kept == 0) {
        PyErr_SetString(PyExc_RuntimeError, "no messages are kept");
        return NULL;
    }
    self->kept--;
    self->owed += owed;
    Py_RETURN_NONE;
}

static PyObject *
rail_go_on(Rail *self, PyObject *Py_UNUSED(none))
{
    self->stalled = 0;
    self->turn_ns = monotonic_ns();
    Py_RETURN_NONE;
}

/* List the unsent messages: the written bytes of each, header included, and its number. */
static PyObject *
unsent(const Rail *self)
{
    PyObject *found = PyList_New(0);
    for (size_t each = self->first; found != NULL && each < self->last; each++) {
        const Outgoing *left = &self->queue[each];
        PyObject *item = Py_BuildValue("ln", left->number, (Py_ssize_t)left->done);
        if (item == NULL || PyList_Append(found, item) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(item);
    }
    return found;
}

static PyObject *
rail_close(Rail *self, PyObject *Py_UNUSED(none))
{
    PyObject *left = unsent(self);
    if (left == NULL) {
        return NULL;
    }
    size_t header = self->filled < FRAME_BYTES ? self->filled : FRAME_BYTES;
    self->first = self->last = 0;
    close_descriptors(self);
    return Py_BuildValue("LLNy#y#n", self->used, self->owed, left, self->credit + self->credit_done,
                         (Py_ssize_t)(FRAME_BYTES - self->credit_done), self->staged, (Py_ssize_t)header,
                         (Py_ssize_t)(self->filled - header));
}

static PyMethodDef methods[] = {
    {"open", (PyCFunction)rail_open, METH_VARARGS, "Begin to use sockets."},
    {"took", (PyCFunction)rail_took, METH_O, "Have one message less that Python has."},
    {"go_on", (PyCFunction)rail_go_on, METH_NOARGS, "Let a script that was stalled go on."},
    {"close", (PyCFunction)rail_close, METH_NOARGS, "Stop using the sockets; tell what is under way."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"kept", T_LONG, offsetof(Rail, kept), READONLY, "How many messages Python has, which come first."},
    {"stalled", T_BOOL, offsetof(Rail, stalled), READONLY, "It stopped a script, but may go on."},
    {"moved", T_ULONGLONG, offsetof(Rail, moved), READONLY, "How many bytes it has moved so far."},
    {"received", T_ULONGLONG, offsetof(Rail, received), READONLY, "How many messages came since it was opened."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject RailType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.steps.Rail",
    .tp_doc = "The messages of scripts with one member on another host.",
    .tp_basicsize = sizeof(Rail),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = rail_new,
    .tp_dealloc = (destructor)rail_dealloc,
    .tp_methods = methods,
    .tp_members = members,
};

int
rails_ready(PyObject *module)
{
    return PyModule_AddType(module, &RailType);
}
