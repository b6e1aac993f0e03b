/* `Counting`: counts operations that ended; the counterpart of that part of observability/metrics.py. */

#include "counting.h"

/* Limits on signatures without labels, and on all, before Python handles them; the latter as in
   observability/metrics.py. */
enum { MOST_FRESH = 64, MOST_SIGNATURES = 4096 };

typedef struct {
    PyObject_HEAD
    PyObject *in_flight;
    PyObject *by_signature;
    PyObject *rare;
    PyObject *fresh;
    vectorcallfunc call;
} Counting;

static PyObject *counting_call(PyObject *self, PyObject *const *args, size_t count, PyObject *names);

static PyObject *
counting_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"in_flight", "by_signature", "rare", "fresh", NULL};
    PyObject *in_flight, *by_signature, *rare, *fresh;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!OO!:Counting", names, &PySet_Type, &in_flight, &PyDict_Type,
                                     &by_signature, &rare, &PyList_Type, &fresh)) {
        return NULL;
    }
    Counting *self = (Counting *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->in_flight = Py_NewRef(in_flight);
    self->by_signature = Py_NewRef(by_signature);
    self->rare = Py_NewRef(rare);
    self->fresh = Py_NewRef(fresh);
    self->call = counting_call;
    return (PyObject *)self;
}

static int
counting_traverse(Counting *self, visitproc visit, void *arg)
{
    Py_VISIT(self->in_flight);
    Py_VISIT(self->by_signature);
    Py_VISIT(self->rare);
    Py_VISIT(self->fresh);
    return 0;
}

static int
counting_clear(Counting *self)
{
    Py_CLEAR(self->in_flight);
    Py_CLEAR(self->by_signature);
    Py_CLEAR(self->rare);
    Py_CLEAR(self->fresh);
    return 0;
}

static void
counting_dealloc(Counting *self)
{
    PyObject_GC_UnTrack(self);
    counting_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Return the counters of a signature, borrowed; made if the signature is new. NULL without an exception: Python
   first has to handle the new signatures. */
static PyObject *
counting_of(Counting *self, PyObject *signature)
{
    PyObject *counters = PyDict_GetItemWithError(self->by_signature, signature);
    if (counters != NULL || PyErr_Occurred() || PyList_GET_SIZE(self->fresh) >= MOST_FRESH ||
        PyDict_GET_SIZE(self->by_signature) >= MOST_SIGNATURES) {
        return counters;
    }
    PyObject *made = PyType_GenericAlloc(&Counters_Type, 0);
    PyObject *pair = made == NULL ? NULL : PyTuple_Pack(2, signature, made);
    if (pair != NULL && PyDict_SetItem(self->by_signature, signature, made) == 0 &&
        PyList_Append(self->fresh, pair) == 0) {
        counters = made;
    }
    Py_XDECREF(pair);
    Py_XDECREF(made); /* the two have it */
    return counters;
}

/* Count an operation: here if it succeeded, by `rare(operation)` if it failed or too many signatures are new. */
static PyObject *
counting_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names)
{
    Counting *self = (Counting *)object;
    if (PyVectorcall_NARGS(count) != 1 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "Counting takes one operation");
        return NULL;
    }
    Record *operation = as_record(args[0]);
    if (operation == NULL || PySet_Discard(self->in_flight, args[0]) < 0) {
        return NULL;
    }
    if (operation->signature == NULL || operation->error != Py_None) {
        return PyObject_CallOneArg(self->rare, args[0]);
    }
    PyObject *counters = counting_of(self, operation->signature);
    if (counters == NULL || !Py_IS_TYPE(counters, &Counters_Type)) {
        return PyErr_Occurred() ? NULL : PyObject_CallOneArg(self->rare, args[0]);
    }
    Py_INCREF(counters);
    int outcome = counters_add((Counters *)counters, operation);
    Py_DECREF(counters);
    if (outcome < 0) {
        return NULL;
    }
    return outcome ? Py_NewRef(Py_None) : PyObject_CallOneArg(self->rare, args[0]);
}

static PyTypeObject Counting_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.Counting",
    .tp_doc = "Counts operations that ended.",
    .tp_basicsize = sizeof(Counting),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = counting_new,
    .tp_dealloc = (destructor)counting_dealloc,
    .tp_traverse = (traverseproc)counting_traverse,
    .tp_clear = (inquiry)counting_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Counting, call),
};

int
counting_ready(PyObject *module)
{
    return PyModule_AddType(module, &Counting_Type);
}
