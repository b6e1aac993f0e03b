/* Messages inside a host: their short way as one call, and the module of all its files. */

#include "messages.h"

static PyObject *str_data_ptr, *str_last, *str_is_async, *str_deadline_ns, *str_source;

/* Runs the sends or the receives of one signature: what a plan has for its `execute`. */
typedef struct {
    PyObject_HEAD
    PyObject *messenger;
    PyObject *otherwise;
    Express *express;
    vectorcallfunc call;
    char sends;
} Carrier;

static int
carrier_traverse(Carrier *self, visitproc visit, void *arg)
{
    Py_VISIT(self->messenger);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->express);
    return 0;
}

static int
carrier_clear(Carrier *self)
{
    Py_CLEAR(self->messenger);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->express);
    return 0;
}

static void
carrier_dealloc(Carrier *self)
{
    PyObject_GC_UnTrack(self);
    carrier_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Return the one tensor of a call, borrowed. */
static PyObject *
only_tensor(PyObject *inputs, PyObject *outputs)
{
    PyObject *const sides[] = {inputs, outputs};
    for (size_t each = 0; each < Py_ARRAY_LENGTH(sides); each++) {
        if (PyTuple_Check(sides[each]) && PyTuple_GET_SIZE(sides[each]) == 1) {
            return PyTuple_GET_ITEM(sides[each], 0);
        }
        if (PyList_Check(sides[each]) && PyList_GET_SIZE(sides[each]) == 1) {
            return PyList_GET_ITEM(sides[each], 0);
        }
    }
    PyErr_Format(PyExc_TypeError, "a message is one tensor, got %R and %R", inputs, outputs);
    return NULL;
}

/* Return where a tensor lies. */
static char *
address_of(PyObject *tensor)
{
    PyObject *address = PyObject_CallMethodNoArgs(tensor, str_data_ptr);
    if (address == NULL) {
        return NULL;
    }
    char *at = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return at;
}

/* Receive: at once if the caller does not wait. */
static int
carry_in(Carrier *self, PyObject *operation, char *address)
{
    int is_async = attribute_is_true(operation, str_is_async);
    if (is_async < 0) {
        return -1;
    }
    long long deadline_ns = is_async ? 0 : attribute_number(operation, str_deadline_ns);
    if (deadline_ns < 0) {
        return -1;
    }
    int taken = is_async ? express_take(self->express, address) : express_wait(self->express, address, deadline_ns);
    return taken > 0 && PyObject_SetAttr(operation, str_source, self->express->its[RANK]) < 0 ? -1 : taken;
}

/* Run one call: None if its message has gone or come, else what the long way returns. */
static PyObject *
carrier_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Carrier *self = (Carrier *)object;
    if (PyVectorcall_NARGS(flags) != 3 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "takes an operation, inputs and outputs");
        return NULL;
    }
    PyObject *tensor = only_tensor(args[1], args[2]);
    if (tensor == NULL || PyObject_SetAttr(self->messenger, str_last, args[0]) < 0) {
        return NULL;
    }
    Py_INCREF(self);
    Py_INCREF(tensor);
    char *address = address_of(tensor);
    int carried = address == NULL && PyErr_Occurred() ? -1
                  : self->sends                       ? express_send(self->express, address)
                                                      : carry_in(self, args[0], address);
    PyObject *result = NULL;
    if (carried > 0) {
        result = Py_NewRef(Py_None);
    }
    else if (carried == 0) {
        PyObject *again[] = {NULL, args[0], tensor};
        result = PyObject_Vectorcall(self->otherwise, again + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    Py_DECREF(tensor);
    Py_DECREF(self);
    return result;
}

static PyObject *
carrier_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"messenger", "express", "sends", "otherwise", NULL};
    PyObject *messenger, *express, *otherwise;
    int sends;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO!pO:Carrier", names, &messenger, &Express_Type, &express,
                                     &sends, &otherwise)) {
        return NULL;
    }
    Carrier *self = (Carrier *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->messenger = Py_NewRef(messenger);
    self->otherwise = Py_NewRef(otherwise);
    self->express = (Express *)Py_NewRef(express);
    self->sends = (char)sends;
    self->call = carrier_call;
    return (PyObject *)self;
}

static PyTypeObject Carrier_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._messages.Carrier",
    .tp_doc = "Runs the sends or the receives of one signature.",
    .tp_basicsize = sizeof(Carrier),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = carrier_new,
    .tp_dealloc = (destructor)carrier_dealloc,
    .tp_traverse = (traverseproc)carrier_traverse,
    .tp_clear = (inquiry)carrier_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Carrier, call),
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dist2.compiled._messages",
    .m_doc = "Messages inside a host: rings and the short way through them.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__messages(void)
{
    static const Name names[] = {
        {&str_data_ptr, "data_ptr"},       {&str_last, "last"},     {&str_is_async, "is_async"},
        {&str_deadline_ns, "deadline_ns"}, {&str_source, "source"},
    };
    if (intern(names, Py_ARRAY_LENGTH(names)) < 0 || watching_ready() < 0) {
        return NULL;
    }
    PyObject *self = PyModule_Create(&module);
    if (self == NULL) {
        return NULL;
    }
    if (rings_ready(self) < 0 || express_ready(self) < 0 || PyModule_AddType(self, &Carrier_Type) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
