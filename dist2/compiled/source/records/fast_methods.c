/* Methods in C for the most common form of a call: positional arguments only, except for the peer of a message,
   plain tensors, a known plan. All other calls go to the equivalent Python method of `Collectives` or
   `PointToPoint`. The counterpart of `fast_method` in dist2/c10d. */

#include "keys.h"

static PyObject *name_run, *name_run_p2p, *name_dst, *name_src;

/* The kinds of positional arguments, and how each kind is sorted: `Pattern` in dist2/c10d. */
enum { NOTHING, IN_PLACE, FROM_ROOT, TO_ROOT, OUT_AND_IN, LIST_AT_ROOT, LIST_OF_ROOT, TO_PEER, FROM_PEER, PATTERNS };

/* The number of arguments, and the index of the rank among them. */
static const struct {
    Py_ssize_t count, rank;
} spelled[PATTERNS] = {
    [NOTHING] = {0, -1},     [IN_PLACE] = {1, -1},     [FROM_ROOT] = {2, 1}, [TO_ROOT] = {2, 1},   [OUT_AND_IN] = {2, -1},
    [LIST_AT_ROOT] = {3, 2}, [LIST_OF_ROOT] = {3, 2}, [TO_PEER] = {2, 1},   [FROM_PEER] = {2, 1},
};

typedef struct {
    PyObject_HEAD
    PyObject *attributes;
    PyObject *otherwise;
    PyObject *kind;
    PyObject *agreed;
    PyObject *empty;
    int pattern;
    int is_async;
    vectorcallfunc call;
} FastMethod;

/* The sorted arguments of a call. */
typedef struct {
    PyObject *inputs;
    PyObject *outputs;
    PyObject *agreed;
} Matter;

static void
matter_drop(Matter *matter)
{
    Py_XDECREF(matter->inputs);
    Py_XDECREF(matter->outputs);
    Py_XDECREF(matter->agreed);
}

/* Return a tuple of one. */
static inline PyObject *
one(PyObject *object)
{
    return PyTuple_Pack(1, object);
}

/* Return the values that identify a message: peer and tag; the tag is 0 if none is given. */
static PyObject *
address_of(PyObject *const *args, Py_ssize_t count)
{
    static PyObject *zero;
    if (zero == NULL && (zero = PyLong_FromLong(0)) == NULL) {
        return NULL;
    }
    return PyTuple_Pack(2, args[1], count > 2 ? args[2] : zero);
}

/* Return the output of a reduction to a root: the tensor on the root, nothing on other ranks. */
static PyObject *
output_at(FastMethod *self, Runner *runner, PyObject *tensor, PyObject *root)
{
    int is_root = PyObject_RichCompareBool(root, runner->rank, Py_EQ);
    return is_root < 0 ? NULL : is_root ? one(tensor) : Py_NewRef(self->empty);
}

/* Sort the arguments of a call; -1 with an exception. */
static int
fast_sort(FastMethod *self, Runner *runner, PyObject *const *args, Py_ssize_t count, Matter *matter)
{
    switch (self->pattern) {
    case NOTHING:
        *matter = (Matter){Py_NewRef(self->empty), Py_NewRef(self->empty), Py_NewRef(self->agreed)};
        break;
    case IN_PLACE:
    case FROM_ROOT:
        matter->inputs = one(args[0]);
        matter->outputs = Py_XNewRef(matter->inputs);
        matter->agreed = Py_NewRef(self->pattern == IN_PLACE ? self->agreed : args[1]);
        break;
    case TO_ROOT:
        *matter = (Matter){one(args[0]), output_at(self, runner, args[0], args[1]), PyTuple_Pack(2, self->agreed, args[1])};
        break;
    case OUT_AND_IN:
        *matter = (Matter){one(args[1]), one(args[0]), Py_NewRef(self->agreed)};
        break;
    case LIST_AT_ROOT:
        *matter = (Matter){one(args[1]), Py_NewRef(args[0]), Py_NewRef(args[2])};
        break;
    case LIST_OF_ROOT:
        *matter = (Matter){Py_NewRef(args[1]), one(args[0]), Py_NewRef(args[2])};
        break;
    case TO_PEER:
        *matter = (Matter){one(args[0]), Py_NewRef(self->empty), address_of(args, count)};
        break;
    default:
        *matter = (Matter){Py_NewRef(self->empty), one(args[0]), address_of(args, count)};
        break;
    }
    return matter->inputs == NULL || matter->outputs == NULL || matter->agreed == NULL ? -1 : 0;
}

/* Whether calls are of messages, which may have a tag. */
static inline int
is_message(const FastMethod *self)
{
    return self->pattern == TO_PEER || self->pattern == FROM_PEER;
}

/* Whether the only keyword argument is the last one, and is the peer of a message. */
static inline int
names_peer(const FastMethod *self, PyObject *names)
{
    PyObject *name = self->pattern == TO_PEER ? name_dst : self->pattern == FROM_PEER ? name_src : NULL;
    return PyTuple_GET_SIZE(names) == 1 && PyTuple_GET_ITEM(names, 0) == name;
}

/* Whether a call has this form. Ranks are exactly an int: True and 1.0 would find the plan of 1. */
static inline int
fast_fits(const FastMethod *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    if (names != NULL && PyTuple_GET_SIZE(names) > 0) {
        if (!names_peer(self, names)) {
            return 0;
        }
        count++;
    }
    if (names == NULL && is_message(self) && count == 4) {
        return PyLong_CheckExact(args[2]) && PyLong_CheckExact(args[3]);
    }
    if (count != 1 + spelled[self->pattern].count) {
        return 0;
    }
    Py_ssize_t rank = spelled[self->pattern].rank;
    return rank < 0 || PyLong_CheckExact(args[1 + rank]);
}

/* Run a call if its plan is known, and cache the plan of a message by its names; NULL without an exception if no
   plan is known. */
static PyObject *
fast_run(FastMethod *self, Runner *runner, const Matter *matter, PyObject *const *names)
{
    Key key;
    PyObject *plans = Py_XNewRef(runner->plans);
    PyObject *plan =
        plans == NULL ? NULL : plan_of(plans, &key, self->kind, matter->agreed, matter->inputs, matter->outputs);
    Py_XDECREF(plans);
    if (plan == NULL) {
        return NULL;
    }
    PyObject *arguments[] = {plan, matter->inputs, matter->outputs, self->is_async ? Py_True : Py_False, Py_None};
    const Places *places = key.on_host ? &(Places){key.tensors, key.each, key.spans} : NULL;
    if (names != NULL) {
        plan_remember((PyObject *)runner->plans, &key, names, plan);
    }
    PyObject *work = runner_call(runner, is_message(self), arguments, places);
    key_drop(&key);
    Py_DECREF(plan);
    return work;
}

/* Send or receive a tensor by a cached plan, after its key was made. */
static PyObject *
fast_carry(FastMethod *self, Runner *runner, Plan *plan, const Key *key)
{
    int sends = self->pattern == TO_PEER;
    PyObject *tensor = key->each[0];
    PyObject *work = sends && key->on_host ? runner_send(runner, plan, tensor, key->spans[0].start, self->is_async) : NULL;
    if (work != NULL || PyErr_Occurred()) {
        return work;
    }
    PyObject *tensors = one(tensor);
    if (tensors != NULL) {
        PyObject *arguments[] = {(PyObject *)plan, sends ? tensors : self->empty, sends ? self->empty : tensors,
                                 self->is_async ? Py_True : Py_False, Py_None};
        const Places *places = key->on_host ? &(Places){key->tensors, key->each, key->spans} : NULL;
        work = runner_call(runner, 1, arguments, places);
        Py_DECREF(tensors);
    }
    return work;
}

/* Run a call of a message if its plan is cached; as `fast_run`. */
static PyObject *
fast_recall(FastMethod *self, Runner *runner, PyObject *const names[NAMES], PyObject *tensor)
{
    Key key;
    PyObject *plans = Py_XNewRef(runner->plans);
    PyObject *plan = plans == NULL ? NULL : plan_of_message(plans, &key, names, tensor);
    Py_XDECREF(plans);
    if (plan == NULL) {
        return NULL;
    }
    PyObject *work = fast_carry(self, runner, (Plan *)plan, &key);
    key_drop(&key);
    Py_DECREF(plan);
    return work;
}

/* Sort the arguments of a call and run it; as `fast_run`. */
static PyObject *
fast_search(FastMethod *self, Runner *runner, PyObject *const *args, Py_ssize_t count, PyObject *const *names)
{
    Matter matter = {NULL, NULL, NULL};
    int sorted = fast_sort(self, runner, args, count, &matter);
    PyObject *work = sorted < 0 ? NULL : fast_run(self, runner, &matter, names);
    matter_drop(&matter);
    return work;
}

/* Run a call of this form; as `fast_run`. */
static PyObject *
fast_try(FastMethod *self, Runner *runner, PyObject *const *args, Py_ssize_t count)
{
    if (is_message(self)) {
        PyObject *const names[] = {self->kind, args[1], count > 2 ? args[2] : NULL};
        PyObject *work = fast_recall(self, runner, names, args[0]);
        return work != NULL || PyErr_Occurred() ? work : fast_search(self, runner, args, count, names);
    }
    return fast_search(self, runner, args, count, NULL);
}

static PyObject *
fast_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    FastMethod *self = (FastMethod *)object;
    if (fast_fits(self, args, PyVectorcall_NARGS(flags), names)) {
        PyObject *run = PyObject_GetAttr(args[0], is_message(self) ? name_run_p2p : name_run);
        Runner *runner = run == NULL ? NULL : runner_of(run, is_message(self));
        PyObject *work = runner == NULL ? NULL : fast_try(self, runner, args + 1, PyVectorcall_NARGS(flags) - 1);
        Py_XDECREF(run);
        if (work != NULL || PyErr_Occurred()) {
            return work;
        }
    }
    return PyObject_Vectorcall(self->otherwise, args, flags, names);
}

static PyObject *
fast_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"otherwise", "pattern", "kind", "agreed", "async_op", NULL};
    PyObject *otherwise, *kind, *agreed = Py_None;
    int pattern, is_async = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OiO|Op:FastMethod", names, &otherwise, &pattern, &kind, &agreed,
                                     &is_async)) {
        return NULL;
    }
    if (pattern < 0 || pattern >= PATTERNS) {
        return PyErr_Format(PyExc_ValueError, "there is no pattern %d", pattern);
    }
    FastMethod *self = (FastMethod *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->otherwise = Py_NewRef(otherwise);
    self->kind = Py_NewRef(kind);
    self->agreed = Py_NewRef(agreed);
    self->empty = PyTuple_New(0);
    self->pattern = pattern;
    self->is_async = is_async;
    self->call = fast_call;
    if (self->empty == NULL) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int
fast_traverse(FastMethod *self, visitproc visit, void *arg)
{
    Py_VISIT(self->attributes);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->kind);
    Py_VISIT(self->agreed);
    return 0;
}

static int
fast_clear(FastMethod *self)
{
    Py_CLEAR(self->attributes);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->kind);
    Py_CLEAR(self->agreed);
    return 0;
}

static void
fast_dealloc(FastMethod *self)
{
    PyObject_GC_UnTrack(self);
    fast_clear(self);
    Py_XDECREF(self->empty);
    Py_TYPE(self)->tp_free(self);
}

/* Bind to an object, as functions do. */
static PyObject *
fast_get(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

static PyGetSetDef fast_properties[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject FastMethod_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.FastMethod",
    .tp_basicsize = sizeof(FastMethod),
    .tp_flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = fast_new,
    .tp_dealloc = (destructor)fast_dealloc,
    .tp_traverse = (traverseproc)fast_traverse,
    .tp_clear = (inquiry)fast_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(FastMethod, call),
    .tp_descr_get = fast_get,
    .tp_dictoffset = offsetof(FastMethod, attributes),
    .tp_getset = fast_properties,
};

int
fast_methods_ready(PyObject *module)
{
    static const Name names[] = {{&name_run, "_run"}, {&name_run_p2p, "_run_p2p"}, {&name_dst, "dst"}, {&name_src, "src"}};
    return intern(names, Py_ARRAY_LENGTH(names)) < 0 ? -1 : PyModule_AddType(module, &FastMethod_Type);
}
