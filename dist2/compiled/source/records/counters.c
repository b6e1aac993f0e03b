/* `Counters`: the numbers of one series, in the layout of observability/metrics.py. */

#include "counting.h"

static Field field_nbytes;

/* Numbers are unbounded, as in Python: each is carry * 2**62 + value, with value below 2**62. */
enum { VALUE_BITS = 62 };
static const long long VALUE_END = 1LL << VALUE_BITS;

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

/* Add all values of other counters, of another series or of an earlier time, in one step. */
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

PyTypeObject Counters_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.Counters",
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

int
counters_add(Counters *counters, Record *operation)
{
    PyObject *nbytes = get_attribute(operation->signature, &field_nbytes);
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

int
counters_ready(PyObject *module)
{
    static const Name names[] = {{&field_nbytes.name, "nbytes"}};
    return intern(names, Py_ARRAY_LENGTH(names)) < 0 ? -1 : PyModule_AddType(module, &Counters_Type);
}
