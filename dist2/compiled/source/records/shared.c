/* Methods whose names c10d has too: the counterpart of `_shared` in dist2/c10d_methods.py. */

#include "records.h"

/* A method that looks how it is called. `vectorcall` takes the object as its first argument, as functions do. */
typedef struct {
    PyObject_HEAD
    PyObject *attributes;
    PyObject *modern;
    PyObject *decoded;
    PyObject *options;
    PyObject *keywords;
    Py_ssize_t list_at;
    vectorcallfunc call;
} Shared;

/* Whether an argument is one of c10d's options. */
static inline int
is_options(Shared *self, PyObject *argument)
{
    PyObject *type = (PyObject *)Py_TYPE(argument);
    if (argument == Py_None || type == (PyObject *)&PyLong_Type || type == (PyObject *)&PyList_Type ||
        type == (PyObject *)&PyTuple_Type) {
        return 0;
    }
    return PySet_Contains(self->options, type);
}

/* Whether a call is spelled as c10d does it; -1 with an exception. */
static int
is_c10d_call(Shared *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t index = 0; index < named; index++) {
        int spelled = PySet_Contains(self->keywords, PyTuple_GET_ITEM(names, index));
        if (spelled != 0) {
            return spelled;
        }
    }
    if (self->list_at >= 0 && count > self->list_at + 1 &&
        (PyList_Check(args[self->list_at + 1]) || PyTuple_Check(args[self->list_at + 1]))) {
        return 1;
    }
    for (Py_ssize_t index = 1; index < count; index++) {
        int options = is_options(self, args[index]);
        if (options != 0) {
            return options;
        }
    }
    return 0;
}

static PyObject *
shared_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Shared *self = (Shared *)object;
    int c10d = is_c10d_call(self, args, PyVectorcall_NARGS(flags), names);
    return c10d < 0 ? NULL : PyObject_Vectorcall(c10d ? self->decoded : self->modern, args, flags, names);
}

static PyObject *
shared_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"modern", "decoded", "options", "keywords", "list_at", NULL};
    PyObject *modern, *decoded, *options, *spelled;
    Py_ssize_t list_at;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO!O!n:Shared", names, &modern, &decoded, &PyFrozenSet_Type,
                                     &options, &PyFrozenSet_Type, &spelled, &list_at)) {
        return NULL;
    }
    Shared *self = (Shared *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->modern = Py_NewRef(modern);
    self->decoded = Py_NewRef(decoded);
    self->options = Py_NewRef(options);
    self->keywords = Py_NewRef(spelled);
    self->list_at = list_at;
    self->call = shared_call;
    return (PyObject *)self;
}

static int
shared_traverse(Shared *self, visitproc visit, void *arg)
{
    Py_VISIT(self->attributes);
    Py_VISIT(self->modern);
    Py_VISIT(self->decoded);
    Py_VISIT(self->options);
    Py_VISIT(self->keywords);
    return 0;
}

static int
shared_clear(Shared *self)
{
    Py_CLEAR(self->attributes);
    Py_CLEAR(self->modern);
    Py_CLEAR(self->decoded);
    Py_CLEAR(self->options);
    Py_CLEAR(self->keywords);
    return 0;
}

static void
shared_dealloc(Shared *self)
{
    PyObject_GC_UnTrack(self);
    shared_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Bind to an object, as functions do. */
static PyObject *
shared_get(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

static PyGetSetDef shared_properties[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Shared_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._records.Shared",
    .tp_basicsize = sizeof(Shared),
    .tp_flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = shared_new,
    .tp_dealloc = (destructor)shared_dealloc,
    .tp_traverse = (traverseproc)shared_traverse,
    .tp_clear = (inquiry)shared_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Shared, call),
    .tp_descr_get = shared_get,
    .tp_dictoffset = offsetof(Shared, attributes),
    .tp_getset = shared_properties,
};

int
shared_ready(PyObject *module)
{
    return PyModule_AddType(module, &Shared_Type);
}
