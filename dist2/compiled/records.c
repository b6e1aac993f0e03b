/* Records of operations: made at their begin, told to instruments, counted.

   Every function here has a counterpart in Python that means the same: dist2/record.py, dist2/hooks.py and
   observability/metrics.py. All of it relies on the interpreter lock: a function that calls nothing in Python
   is one step for all threads. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <time.h>

#ifdef Py_GIL_DISABLED
#error "needs the interpreter lock: without it the counterparts in Python run, which take locks"
#endif

/* Names and values that are looked up once. */
static PyObject *name_kind, *name_nbytes;

/* Return the monotonic clock in nanoseconds, as time.monotonic_ns does. */
static inline long long
monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Take the current exception as an object with its traceback. */
static PyObject *
raised(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(value, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

/* ---- Record: what is kept of one call ---- */

typedef struct {
    PyObject_HEAD
    PyObject *signature;
    PyObject *error;
    PyObject *code;
    PyObject *weakrefs;
    long long seq;
    long long deadline_ns;
    long long created_ns;
    long long started_ns;
    long long finished_ns;
    int instruction;
    int source;
    char is_async;
} Record;

static PyTypeObject Record_Type;

/* Return a record with nothing in it but defaults, unknown to the garbage collector: only an exception
   can lead back to a record, so that it is made known with its first. */
static Record *
record_blank(PyTypeObject *type)
{
    Record *self = (Record *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    PyObject_GC_UnTrack(self);
    self->error = Py_NewRef(Py_None);
    self->code = Py_NewRef(Py_None);
    self->source = -1;
    return self;
}

static PyObject *
record_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords))
{
    return (PyObject *)record_blank(type);
}

static int
record_init(Record *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"signature", "seq", "created_ns", "deadline_ns", "is_async", NULL};
    PyObject *signature;
    long long seq, created_ns, deadline_ns;
    int is_async;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OLLLp:Record", names, &signature, &seq, &created_ns,
                                     &deadline_ns, &is_async)) {
        return -1;
    }
    Py_XSETREF(self->signature, Py_NewRef(signature));
    self->seq = seq;
    self->created_ns = created_ns;
    self->deadline_ns = deadline_ns;
    self->is_async = (char)is_async;
    return 0;
}

static int
record_traverse(Record *self, visitproc visit, void *arg)
{
    Py_VISIT(self->signature);
    Py_VISIT(self->error);
    Py_VISIT(self->code);
    return 0;
}

static int
record_clear(Record *self)
{
    Py_CLEAR(self->signature);
    Py_CLEAR(self->error);
    Py_CLEAR(self->code);
    return 0;
}

static void
record_dealloc(Record *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    record_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
record_error(Record *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->error != NULL ? self->error : Py_None);
}

/* Set the error, and have the garbage collector know: its traceback may lead back here. */
static int
record_set_error(Record *self, PyObject *error, void *Py_UNUSED(closure))
{
    if (error == NULL) {
        PyErr_SetString(PyExc_AttributeError, "error cannot be deleted; None stands for none");
        return -1;
    }
    Py_XSETREF(self->error, Py_NewRef(error));
    if (error != Py_None && !PyObject_GC_IsTracked((PyObject *)self)) {
        PyObject_GC_Track(self);
    }
    return 0;
}

/* Find the innermost frame of a file whose name does not begin with `here`, and note it. */
static void
record_note_caller(Record *self, PyObject *here)
{
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame != NULL) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        PyFrameObject *back = NULL;
        if (PyUnicode_Tailmatch(code->co_filename, here, 0, PY_SSIZE_T_MAX, -1) == 1) {
            back = PyFrame_GetBack(frame);
        }
        if (back == NULL) {
            Py_XSETREF(self->code, (PyObject *)code);
            self->instruction = PyFrame_GetLasti(frame);
            Py_DECREF(frame);
            return;
        }
        Py_DECREF(code);
        Py_SETREF(frame, back);
    }
}

/* Make the record of a call that begins now. */
static Record *
record_begin(PyTypeObject *type, PyObject *signature, long long limit_ns, int is_async, PyObject *here)
{
    Record *self = record_blank(type);
    if (self == NULL) {
        return NULL;
    }
    self->signature = Py_NewRef(signature);
    self->created_ns = monotonic_ns();
    self->deadline_ns = self->created_ns + limit_ns;
    self->is_async = (char)is_async;
    record_note_caller(self, here);
    return self;
}

static PyObject *
record_begun(PyObject *type, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4) {
        return PyErr_Format(PyExc_TypeError, "begun takes 4 arguments, got %zd", count);
    }
    long long limit_ns = PyLong_AsLongLong(args[1]);
    int is_async = PyObject_IsTrue(args[2]);
    if ((limit_ns == -1 && PyErr_Occurred()) || is_async < 0) {
        return NULL;
    }
    if (!PyUnicode_Check(args[3])) {
        return PyErr_Format(PyExc_TypeError, "here must be a str, got %R", args[3]);
    }
    return (PyObject *)record_begin((PyTypeObject *)type, args[0], limit_ns, is_async, args[3]);
}

static PyMemberDef record_members[] = {
    {"signature", T_OBJECT_EX, offsetof(Record, signature), 0, NULL},
    {"code", T_OBJECT_EX, offsetof(Record, code), 0, NULL},
    {"seq", T_LONGLONG, offsetof(Record, seq), 0, NULL},
    {"deadline_ns", T_LONGLONG, offsetof(Record, deadline_ns), 0, NULL},
    {"created_ns", T_LONGLONG, offsetof(Record, created_ns), 0, NULL},
    {"started_ns", T_LONGLONG, offsetof(Record, started_ns), 0, NULL},
    {"finished_ns", T_LONGLONG, offsetof(Record, finished_ns), 0, NULL},
    {"instruction", T_INT, offsetof(Record, instruction), 0, NULL},
    {"source", T_INT, offsetof(Record, source), 0, NULL},
    {"is_async", T_BOOL, offsetof(Record, is_async), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef record_properties[] = {
    {"error", (getter)record_error, (setter)record_set_error, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef record_methods[] = {
    {"begun", (PyCFunction)(void (*)(void))record_begun, METH_FASTCALL | METH_CLASS,
     "begun(signature, limit_ns, is_async, here)\n--\n\nReturn the record of a call that begins now."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Record_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._records.Record",
    .tp_doc = "What is kept of one call.",
    .tp_basicsize = sizeof(Record),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = record_new,
    .tp_init = (initproc)record_init,
    .tp_dealloc = (destructor)record_dealloc,
    .tp_traverse = (traverseproc)record_traverse,
    .tp_clear = (inquiry)record_clear,
    .tp_members = record_members,
    .tp_getset = record_properties,
    .tp_methods = record_methods,
    .tp_weaklistoffset = offsetof(Record, weakrefs),
};

/* Return an argument as a record; NULL with TypeError if it is none. */
static inline Record *
as_record(PyObject *object)
{
    if (!PyObject_TypeCheck(object, &Record_Type)) {
        PyErr_Format(PyExc_TypeError, "operation must be a Record, got %R", object);
        return NULL;
    }
    return (Record *)object;
}

/* ---- Telling instruments ---- */

/* Give what a callable raised to `failed(callable, error)`, if it is an Exception; -1 if it is not. */
static int
hand_over(PyObject *callable, PyObject *failed)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *error = raised();
    PyObject *result = PyObject_CallFunctionObjArgs(failed, callable, error, NULL);
    Py_DECREF(error);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Call each of a tuple with an operation. */
static int
tell_all(PyObject *told, PyObject *operation, PyObject *failed)
{
    int outcome = 0;
    Py_INCREF(told);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(told) && outcome == 0; index++) {
        PyObject *callable = PyTuple_GET_ITEM(told, index);
        PyObject *result = PyObject_CallOneArg(callable, operation);
        if (result == NULL) {
            outcome = hand_over(callable, failed);
        }
        else {
            Py_DECREF(result);
        }
    }
    Py_DECREF(told);
    return outcome;
}

static PyObject *
tell(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "tell takes a tuple, an operation and what takes failures");
        return NULL;
    }
    if (tell_all(args[0], args[1], args[2]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- Counters: the numbers of one series ---- */

/* The same places as in observability/metrics.py. */
enum { DURATIONS = 64, SUM_NS = DURATIONS, BYTES, MAX_NS, FAILED, LAST_SEQ, PLACES };

typedef struct {
    PyObject_HEAD
    long long values[PLACES];
} Counters;

static PyTypeObject Counters_Type;

static Py_ssize_t
counters_length(PyObject *Py_UNUSED(self))
{
    return PLACES;
}

static PyObject *
counters_item(Counters *self, Py_ssize_t index)
{
    if (index < 0 || index >= PLACES) {
        return PyErr_Format(PyExc_IndexError, "place %zd of %d", index, PLACES);
    }
    return PyLong_FromLongLong(self->values[index]);
}

static int
counters_set(Counters *self, Py_ssize_t index, PyObject *value)
{
    if (index < 0 || index >= PLACES || value == NULL) {
        PyErr_Format(PyExc_IndexError, "place %zd of %d", index, PLACES);
        return -1;
    }
    long long number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    self->values[index] = number;
    return 0;
}

static PySequenceMethods counters_sequence = {
    .sq_length = counters_length,
    .sq_item = (ssizeargfunc)counters_item,
    .sq_ass_item = (ssizeobjargproc)counters_set,
};

static PyTypeObject Counters_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._records.Counters",
    .tp_doc = "The numbers of one series: a list of integers of fixed length, all 0 at first.",
    .tp_basicsize = sizeof(Counters),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_as_sequence = &counters_sequence,
};

/* Return how many bits a duration has, as int.bit_length does. */
static inline int
bit_length(long long number)
{
    unsigned long long magnitude = number < 0 ? 0ULL - (unsigned long long)number : (unsigned long long)number;
    return magnitude == 0 ? 0 : 64 - __builtin_clzll(magnitude);
}

/* ---- Counting: called with every operation that ended ---- */

typedef struct {
    PyObject_HEAD
    PyObject *in_flight;
    PyObject *by_signature;
    PyObject *rare;
    vectorcallfunc call;
} Counting;

static PyObject *counting_call(PyObject *self, PyObject *const *args, size_t count, PyObject *names);

static PyObject *
counting_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"in_flight", "by_signature", "rare", NULL};
    PyObject *in_flight, *by_signature, *rare;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!O:Counting", names, &PySet_Type, &in_flight, &PyDict_Type,
                                     &by_signature, &rare)) {
        return NULL;
    }
    Counting *self = (Counting *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->in_flight = Py_NewRef(in_flight);
    self->by_signature = Py_NewRef(by_signature);
    self->rare = Py_NewRef(rare);
    self->call = counting_call;
    return (PyObject *)self;
}

static int
counting_traverse(Counting *self, visitproc visit, void *arg)
{
    Py_VISIT(self->in_flight);
    Py_VISIT(self->by_signature);
    Py_VISIT(self->rare);
    return 0;
}

static int
counting_clear(Counting *self)
{
    Py_CLEAR(self->in_flight);
    Py_CLEAR(self->by_signature);
    Py_CLEAR(self->rare);
    return 0;
}

static void
counting_dealloc(Counting *self)
{
    PyObject_GC_UnTrack(self);
    counting_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Add one operation that succeeded to the numbers of its series. */
static int
counters_add(Counters *counters, Record *operation)
{
    PyObject *nbytes = PyObject_GetAttr(operation->signature, name_nbytes);
    if (nbytes == NULL) {
        return -1;
    }
    long long payload = PyLong_AsLongLong(nbytes);
    Py_DECREF(nbytes);
    if (payload == -1 && PyErr_Occurred()) {
        return -1;
    }
    long long elapsed = operation->finished_ns - operation->created_ns - 1;
    long long *values = counters->values;
    values[bit_length(elapsed)] += 1;
    values[SUM_NS] += elapsed;
    values[BYTES] += payload;
    if (elapsed > values[MAX_NS]) {
        values[MAX_NS] = elapsed;
    }
    values[LAST_SEQ] = operation->seq;
    return 0;
}

/* Count an operation: here if it succeeded and its signature is known, by `rare(operation)` otherwise. */
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
    PyObject *counters = PyDict_GetItemWithError(self->by_signature, operation->signature);
    if (counters == NULL || !Py_IS_TYPE(counters, &Counters_Type)) {
        return PyErr_Occurred() ? NULL : PyObject_CallOneArg(self->rare, args[0]);
    }
    Py_INCREF(counters);
    int outcome = counters_add((Counters *)counters, operation);
    Py_DECREF(counters);
    if (outcome < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyTypeObject Counting_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._records.Counting",
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

/* ---- Unless: passes on what is unusual ---- */

typedef struct {
    PyObject_HEAD
    PyObject *kinds;
    PyObject *rare;
    vectorcallfunc call;
} Unless;

static PyObject *unless_call(PyObject *self, PyObject *const *args, size_t count, PyObject *names);

static PyObject *
unless_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"kinds", "rare", NULL};
    PyObject *kinds, *rare;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O:Unless", names, &PyTuple_Type, &kinds, &rare)) {
        return NULL;
    }
    Unless *self = (Unless *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->kinds = Py_NewRef(kinds);
    self->rare = Py_NewRef(rare);
    self->call = unless_call;
    return (PyObject *)self;
}

static int
unless_traverse(Unless *self, visitproc visit, void *arg)
{
    Py_VISIT(self->kinds);
    Py_VISIT(self->rare);
    return 0;
}

static int
unless_clear(Unless *self)
{
    Py_CLEAR(self->kinds);
    Py_CLEAR(self->rare);
    return 0;
}

static void
unless_dealloc(Unless *self)
{
    PyObject_GC_UnTrack(self);
    unless_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Whether an operation succeeded and is of none of the kinds; -1 with an exception. */
static int
unless_is_usual(Unless *self, Record *operation)
{
    if (operation->error != Py_None || operation->signature == NULL) {
        return 0;
    }
    PyObject *kind = PyObject_GetAttr(operation->signature, name_kind);
    if (kind == NULL) {
        return -1;
    }
    int usual = 1;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->kinds); index++) {
        usual = usual && PyTuple_GET_ITEM(self->kinds, index) != kind;
    }
    Py_DECREF(kind);
    return usual;
}

/* Do nothing with an operation that succeeded and is of none of the kinds; pass on others. */
static PyObject *
unless_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names)
{
    Unless *self = (Unless *)object;
    if (PyVectorcall_NARGS(count) != 1 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "Unless takes one operation");
        return NULL;
    }
    Record *operation = as_record(args[0]);
    int usual = operation == NULL ? -1 : unless_is_usual(self, operation);
    if (usual < 0) {
        return NULL;
    }
    if (!usual) {
        return PyObject_CallOneArg(self->rare, args[0]);
    }
    Py_RETURN_NONE;
}

static PyTypeObject Unless_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._records.Unless",
    .tp_doc = "Passes on operations that failed or are of some kinds.",
    .tp_basicsize = sizeof(Unless),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = unless_new,
    .tp_dealloc = (destructor)unless_dealloc,
    .tp_traverse = (traverseproc)unless_traverse,
    .tp_clear = (inquiry)unless_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Unless, call),
};

/* ---- The module ---- */

static PyMethodDef functions[] = {
    {"tell", (PyCFunction)(void (*)(void))tell, METH_FASTCALL,
     "tell(told, operation, failed)\n--\n\nCall each of a tuple with an operation."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dist2.compiled._records",
    .m_doc = "Records of operations: made at their begin, told to instruments, counted.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__records(void)
{
    name_kind = PyUnicode_InternFromString("kind");
    name_nbytes = PyUnicode_InternFromString("nbytes");
    PyObject *made = PyModule_Create(&module);
    if (name_kind == NULL || name_nbytes == NULL || made == NULL || PyModule_AddType(made, &Record_Type) < 0 ||
        PyModule_AddType(made, &Counters_Type) < 0 || PyModule_AddType(made, &Counting_Type) < 0 ||
        PyModule_AddType(made, &Unless_Type) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
