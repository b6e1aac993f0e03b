/* Counting operations that ended: the counterpart of observability/metrics.py, and of what
   observability/flight_recorder.py does with them. */

#include "records.h"


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

/* ---- Counters: the numbers of one series ---- */

/* The same places as in observability/metrics.py. */
enum { DURATIONS = 64, SUM_NS = DURATIONS, BYTES, MAX_NS, FAILED, LAST_SEQ, PLACES };

/* Numbers grow without bound, as in Python: each is its carry times 2**62 and its value, which is less. */
enum { VALUE_BITS = 62 };
static const long long VALUE_END = 1LL << VALUE_BITS;

/* Signatures without labels, and all, before Python sees to them; the latter as in observability/metrics.py. */
enum { MOST_FRESH = 64, MOST_SIGNATURES = 4096 };

typedef struct {
    PyObject_HEAD
    long long values[PLACES];
    long long carries[PLACES];
} Counters;

static PyTypeObject Counters_Type;

/* Add less than 2**62 to a number that is not negative. */
static inline void
counters_grow(Counters *self, int place, long long amount)
{
    self->values[place] += amount;
    if (self->values[place] >= VALUE_END) {
        self->values[place] -= VALUE_END;
        self->carries[place] += 1;
    }
}

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
    PyObject *value = PyLong_FromLongLong(self->values[index]);
    if (value == NULL || self->carries[index] == 0) {
        return value;
    }
    PyObject *carry = PyLong_FromLongLong(self->carries[index]), *bits = PyLong_FromLong(VALUE_BITS);
    PyObject *high = carry == NULL || bits == NULL ? NULL : PyNumber_Lshift(carry, bits);
    PyObject *sum = high == NULL ? NULL : PyNumber_Add(high, value);
    Py_XDECREF(carry);
    Py_XDECREF(bits);
    Py_XDECREF(high);
    Py_DECREF(value);
    return sum;
}

static int
counters_set(Counters *self, Py_ssize_t index, PyObject *value)
{
    if (index < 0 || index >= PLACES || value == NULL) {
        PyErr_Format(PyExc_IndexError, "place %zd of %d", index, PLACES);
        return -1;
    }
    PyObject *bits = PyLong_FromLong(VALUE_BITS), *mask = PyLong_FromLongLong(VALUE_END - 1);
    PyObject *high = bits == NULL ? NULL : PyNumber_Rshift(value, bits);
    PyObject *low = mask == NULL ? NULL : PyNumber_And(value, mask);
    if (high != NULL && low != NULL) {
        long long carry = PyLong_AsLongLong(high);
        if (carry != -1 || !PyErr_Occurred()) {
            self->carries[index] = carry;
            self->values[index] = PyLong_AsLongLong(low);
        }
    }
    Py_XDECREF(bits);
    Py_XDECREF(mask);
    Py_XDECREF(high);
    Py_XDECREF(low);
    return PyErr_Occurred() ? -1 : 0;
}

static PySequenceMethods counters_sequence = {
    .sq_length = counters_length,
    .sq_item = (ssizeargfunc)counters_item,
    .sq_ass_item = (ssizeobjargproc)counters_set,
};

/* Add what other counters have, of another series or from before, in one step. */
static PyObject *
counters_add_all(Counters *self, PyObject *object)
{
    if (!Py_IS_TYPE(object, &Counters_Type)) {
        return PyErr_Format(PyExc_TypeError, "counters must be Counters, got %R", object);
    }
    const Counters *other = (Counters *)object;
    int other_is_longer = other->carries[MAX_NS] > self->carries[MAX_NS] ||
                          (other->carries[MAX_NS] == self->carries[MAX_NS] &&
                           other->values[MAX_NS] > self->values[MAX_NS]);
    for (int place = 0; place < PLACES; place++) {
        if (place != MAX_NS && place != LAST_SEQ) {
            self->carries[place] += other->carries[place];
            counters_grow(self, place, other->values[place]);
        }
    }
    if (other_is_longer) {
        self->carries[MAX_NS] = other->carries[MAX_NS];
        self->values[MAX_NS] = other->values[MAX_NS];
    }
    if (other->values[LAST_SEQ] > self->values[LAST_SEQ]) {
        self->values[LAST_SEQ] = other->values[LAST_SEQ];
    }
    Py_RETURN_NONE;
}

static PyMethodDef counters_methods[] = {
    {"add", (PyCFunction)counters_add_all, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Counters_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._records.Counters",
    .tp_doc = "The numbers of one series: a list of integers of fixed length, all 0 at first.",
    .tp_basicsize = sizeof(Counters),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_as_sequence = &counters_sequence,
    .tp_methods = counters_methods,
};

/* Return how many bits a duration has, which is not negative. */
static inline int
bit_length(long long number)
{
    return number == 0 ? 0 : 64 - __builtin_clzll((unsigned long long)number);
}

/* ---- Counting: called with every operation that ended ---- */

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

/* An attribute of signatures, which are of one type mostly. */
typedef struct {
    PyObject *name;
    PyTypeObject *last;
    Py_ssize_t at;
} Field;

static Field kind_field, nbytes_field;

/* Return an attribute of a signature. */
static PyObject *
of_signature(PyObject *signature, Field *field)
{
    if (Py_TYPE(signature) != field->last) {
        Py_XSETREF(field->last, (PyTypeObject *)Py_NewRef(Py_TYPE(signature)));
        field->at = member_offset(field->last, field->name, T_OBJECT_EX);
    }
    return read_attribute(signature, field->name, field->at);
}

/* Add one operation that succeeded to the numbers of its series. Return 0 if it is out of all proportion, and -1
   with an exception. */
static int
counters_add(Counters *counters, Record *operation)
{
    PyObject *nbytes = of_signature(operation->signature, &nbytes_field);
    if (nbytes == NULL) {
        return -1;
    }
    long long payload = PyLong_AsLongLong(nbytes);
    Py_DECREF(nbytes);
    if (payload == -1 && PyErr_Occurred()) {
        return -1;
    }
    long long elapsed = operation->finished_ns - operation->created_ns - 1;
    if (elapsed < 0 || elapsed >= VALUE_END || payload < 0 || payload >= VALUE_END || operation->seq >= VALUE_END) {
        return 0;
    }
    counters_grow(counters, bit_length(elapsed), 1);
    counters_grow(counters, SUM_NS, elapsed);
    counters_grow(counters, BYTES, payload);
    if (elapsed > counters->values[MAX_NS] && counters->carries[MAX_NS] == 0) {
        counters->values[MAX_NS] = elapsed;
    }
    counters->values[LAST_SEQ] = operation->seq;
    return 1;
}

/* Return the counters of a signature, new ones if it is new; borrowed. NULL without an exception: Python has to see
   to what is new first. */
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

/* Count an operation: here if it succeeded, by `rare(operation)` if not, or if there is much that is new. */
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

PyTypeObject Counting_Type = {
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

/* ---- Tally: how many messages went one way between two ranks ---- */

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
    .tp_name = "dist2.compiled._records.Tally",
    .tp_doc = "A count, 0 at first.",
    .tp_basicsize = sizeof(Tally),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_members = tally_members,
};

/* ---- Tallying: counts messages, and passes on what is unusual ---- */

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
    PyObject *kind = of_signature(operation->signature, &kind_field);
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
    .tp_name = "dist2.compiled._records.Tallying",
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
counting_ready(PyObject *module)
{
    static const Name names[] = {{&kind_field.name, "kind"}, {&nbytes_field.name, "nbytes"}};
    if (intern(names, Py_ARRAY_LENGTH(names)) < 0 || PyModule_AddType(module, &Counters_Type) < 0 ||
        PyModule_AddType(module, &Counting_Type) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &Tally_Type) < 0 ? -1 : PyModule_AddType(module, &Tallying_Type);
}
