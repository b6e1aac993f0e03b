/* Methods with names that c10d uses too: the counterpart of `_shared` in dist2/c10d/methods.py. */

#include "records.h"

/* A method that examines its arguments. `vectorcall` takes the object as its first argument, as functions do. */
typedef struct {
    PyObject_HEAD
    PyObject *attributes;
    PyObject *modern;
    PyObject *decoded;
    PyObject *options;
    PyObject *keywords;
    Py_ssize_t list_at;
    vectorcallfunc call;
} Overload;

/* Whether an argument is one of c10d's options. */
static inline int
is_options(Overload *self, PyObject *argument)
{
    PyObject *type = (PyObject *)Py_TYPE(argument);
    if (argument == Py_None || type == (PyObject *)&PyLong_Type || type == (PyObject *)&PyList_Type ||
        type == (PyObject *)&PyTuple_Type) {
        return 0;
    }
    return PySet_Contains(self->options, type);
}

/* Whether a call has c10d's form; -1 with an exception. */
static int
is_c10d_call(Overload *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
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
overload_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Overload *self = (Overload *)object;
    int c10d = is_c10d_call(self, args, PyVectorcall_NARGS(flags), names);
    return c10d < 0 ? NULL : PyObject_Vectorcall(c10d ? self->decoded : self->modern, args, flags, names);
}

static PyObject *
overload_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"modern", "decoded", "options", "keywords", "list_at", NULL};
    PyObject *modern, *decoded, *options, *spelled;
    Py_ssize_t list_at;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO!O!n:C10dOverload", names, &modern, &decoded, &PyFrozenSet_Type,
                                     &options, &PyFrozenSet_Type, &spelled, &list_at)) {
        return NULL;
    }
    Overload *self = (Overload *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->modern = Py_NewRef(modern);
    self->decoded = Py_NewRef(decoded);
    self->options = Py_NewRef(options);
    self->keywords = Py_NewRef(spelled);
    self->list_at = list_at;
    self->call = overload_call;
    return (PyObject *)self;
}

static int
overload_traverse(Overload *self, visitproc visit, void *arg)
{
    Py_VISIT(self->attributes);
    Py_VISIT(self->modern);
    Py_VISIT(self->decoded);
    Py_VISIT(self->options);
    Py_VISIT(self->keywords);
    return 0;
}

static int
overload_clear(Overload *self)
{
    Py_CLEAR(self->attributes);
    Py_CLEAR(self->modern);
    Py_CLEAR(self->decoded);
    Py_CLEAR(self->options);
    Py_CLEAR(self->keywords);
    return 0;
}

static void
overload_dealloc(Overload *self)
{
    PyObject_GC_UnTrack(self);
    overload_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Bind to an object, as functions do. */
static PyObject *
overload_get(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

static PyGetSetDef overload_properties[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Overload_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.C10dOverload",
    .tp_basicsize = sizeof(Overload),
    .tp_flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = overload_new,
    .tp_dealloc = (destructor)overload_dealloc,
    .tp_traverse = (traverseproc)overload_traverse,
    .tp_clear = (inquiry)overload_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Overload, call),
    .tp_descr_get = overload_get,
    .tp_dictoffset = offsetof(Overload, attributes),
    .tp_getset = overload_properties,
};

int
overloads_ready(PyObject *module)
{
    return PyModule_AddType(module, &Overload_Type);
}
