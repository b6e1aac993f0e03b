/* `Tallying`: counts messages between two ranks; the counterpart of that part of observability/flight_recorder.py. */

#include "counting.h"

static Field field_kind;

/* ---- Tally: the number of messages in one direction ---- */

typedef struct {
    PyObject_HEAD
    long long count;
} Tally;

static PyMemberDef tally_members[] = {
    {"count", T_LONGLONG, offsetof(Tally, count), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject Tally_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.Tally",
    .tp_doc = "A count, 0 at first.",
    .tp_basicsize = sizeof(Tally),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_members = tally_members,
};

/* ---- Tallying: counts messages, and passes unusual ones on ---- */

typedef struct {
    PyObject_HEAD
    PyObject *kinds;
    PyObject *by_signature;
    PyObject *rare;
    vectorcallfunc call;
} Tallying;

static PyObject *tallying_call(PyObject *self, PyObject *const *args, size_t count, PyObject *names);

static PyObject *
tallying_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"kinds", "by_signature", "rare", NULL};
    PyObject *kinds, *by_signature, *rare;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!O:Tallying", names, &PyTuple_Type, &kinds, &PyDict_Type,
                                     &by_signature, &rare)) {
        return NULL;
    }
    Tallying *self = (Tallying *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->kinds = Py_NewRef(kinds);
    self->by_signature = Py_NewRef(by_signature);
    self->rare = Py_NewRef(rare);
    self->call = tallying_call;
    return (PyObject *)self;
}

static int
tallying_traverse(Tallying *self, visitproc visit, void *arg)
{
    Py_VISIT(self->kinds);
    Py_VISIT(self->by_signature);
    Py_VISIT(self->rare);
    return 0;
}

static int
tallying_clear(Tallying *self)
{
    Py_CLEAR(self->kinds);
    Py_CLEAR(self->by_signature);
    Py_CLEAR(self->rare);
    return 0;
}

static void
tallying_dealloc(Tallying *self)
{
    PyObject_GC_UnTrack(self);
    tallying_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Whether an operation is of one of the kinds; -1 with an exception. */
static int
tallying_is_message(Tallying *self, Record *operation)
{
    PyObject *kind = get_attribute(operation->signature, &field_kind);
    if (kind == NULL) {
        return -1;
    }
    int found = 0;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->kinds); index++) {
        found = found || PyTuple_GET_ITEM(self->kinds, index) == kind;
    }
    Py_DECREF(kind);
    return found;
}

/* Count an operation that succeeded, if it is a message: 1; 0 if that is left to Python; -1 with an exception. */
static int
tallying_count(Tallying *self, Record *operation)
{
    if (operation->error != Py_None || operation->signature == NULL) {
        return 0;
    }
    int is_message = tallying_is_message(self, operation);
    if (is_message <= 0) {
        return is_message < 0 ? -1 : 1;
    }
    PyObject *tally = PyDict_GetItemWithError(self->by_signature, operation->signature);
    if (tally == NULL || !Py_IS_TYPE(tally, &Tally_Type)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    ((Tally *)tally)->count++;
    return 1;
}

static PyObject *
tallying_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names)
{
    Tallying *self = (Tallying *)object;
    if (PyVectorcall_NARGS(count) != 1 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "Tallying takes one operation");
        return NULL;
    }
    Record *operation = as_record(args[0]);
    int counted = operation == NULL ? -1 : tallying_count(self, operation);
    if (counted < 0) {
        return NULL;
    }
    if (!counted) {
        return PyObject_CallOneArg(self->rare, args[0]);
    }
    Py_RETURN_NONE;
}

static PyTypeObject Tallying_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.Tallying",
    .tp_doc = "Counts messages; passes on operations that failed, and messages that nobody has a tally for.",
    .tp_basicsize = sizeof(Tallying),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = tallying_new,
    .tp_dealloc = (destructor)tallying_dealloc,
    .tp_traverse = (traverseproc)tallying_traverse,
    .tp_clear = (inquiry)tallying_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Tallying, call),
};

int
tallying_ready(PyObject *module)
{
    static const Name names[] = {{&field_kind.name, "kind"}};
    if (intern(names, Py_ARRAY_LENGTH(names)) < 0 || PyModule_AddType(module, &Tally_Type) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &Tallying_Type);
}
