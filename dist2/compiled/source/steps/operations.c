/* Attributes of an operation that fences and the log of calls need. If its type has members in C, as `Record` has,
   they are read from its memory: asking for five attributes, each through its type, took an eighth of a small call. */

#include "steps.h"

static PyObject *str_fingerprint;

enum { SEQ_OF, SIGNATURE_OF, CODE_OF, INSTRUCTION_OF, PLACES_OF, MEMBERS };

static struct {
    const char *text;
    int kind;
    PyObject *name;
} members[MEMBERS] = {
    [SEQ_OF] = {"seq", T_LONGLONG, NULL},
    [SIGNATURE_OF] = {"signature", T_OBJECT_EX, NULL},
    [CODE_OF] = {"code", T_OBJECT_EX, NULL},
    [INSTRUCTION_OF] = {"instruction", T_INT, NULL},
    [PLACES_OF] = {"places", T_ULONGLONG, NULL},
};

/* The type of the last operation, and the offsets of its members. */
static struct {
    PyTypeObject *type;
    int knows; /* has all of them in C */
    Py_ssize_t at[MEMBERS];
} last;

/* Whether `last` has the offsets of an operation's members. */
static int
is_known(PyObject *operation)
{
    PyTypeObject *type = Py_TYPE(operation);
    if (type == last.type) {
        return last.knows;
    }
    Py_XSETREF(last.type, (PyTypeObject *)Py_NewRef(type));
    last.knows = 1;
    for (int which = 0; which < MEMBERS; which++) {
        const PyMemberDef *slot = find_slot(type, members[which].name);
        last.knows = last.knows && slot != NULL && slot->type == members[which].kind;
        last.at[which] = slot != NULL ? slot->offset : 0;
    }
    return last.knows;
}

static inline void *
member_of(PyObject *operation, int which)
{
    return (char *)operation + last.at[which];
}

/* Read the fingerprint of a signature. */
static int
read_print(PyObject *signature, uint64_t *print)
{
    PyObject *number = PyObject_GetAttr(signature, str_fingerprint);
    if (number == NULL) {
        return -1;
    }
    *print = PyLong_AsUnsignedLongLongMask(number) & PRINT_MASK;
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* Ask an operation for the label that its call publishes. */
static int
ask_for_label(PyObject *operation, Label *label)
{
    PyObject *seq = PyObject_GetAttr(operation, members[SEQ_OF].name);
    if (seq == NULL) {
        return -1;
    }
    label->seq = PyLong_AsUnsignedLongLongMask(seq);
    Py_DECREF(seq);
    PyObject *signature = PyErr_Occurred() ? NULL : PyObject_GetAttr(operation, members[SIGNATURE_OF].name);
    if (signature == NULL) {
        return -1;
    }
    int outcome = read_print(signature, &label->print);
    Py_DECREF(signature);
    return outcome;
}

int
read_label(PyObject *operation, Label *label, Printed *printed)
{
    PyObject *signature = is_known(operation) ? *(PyObject **)member_of(operation, SIGNATURE_OF) : NULL;
    if (signature == NULL) {
        return ask_for_label(operation, label);
    }
    label->seq = (uint64_t) * (long long *)member_of(operation, SEQ_OF);
    if (printed != NULL && printed->signature == signature) {
        label->print = printed->print;
        return 0;
    }
    if (read_print(signature, &label->print) < 0) {
        return -1;
    }
    if (printed != NULL) {
        printed->print = label->print;
        Py_XSETREF(printed->signature, Py_NewRef(signature));
    }
    return 0;
}

const Places *
read_places(PyObject *operation)
{
    return is_known(operation) ? (const Places *)(uintptr_t) * (uint64_t *)member_of(operation, PLACES_OF) : NULL;
}

PyObject *
read_place_of_call(PyObject *operation, long *instruction)
{
    PyObject *code = is_known(operation) ? *(PyObject **)member_of(operation, CODE_OF) : NULL;
    if (code != NULL) {
        *instruction = *(int *)member_of(operation, INSTRUCTION_OF);
        return Py_NewRef(code);
    }
    PyObject *number = PyObject_GetAttr(operation, members[INSTRUCTION_OF].name);
    *instruction = number == NULL ? -1 : PyLong_AsLong(number);
    Py_XDECREF(number);
    return PyErr_Occurred() ? NULL : PyObject_GetAttr(operation, members[CODE_OF].name);
}

int
operations_ready(void)
{
    for (int which = 0; which < MEMBERS; which++) {
        members[which].name = PyUnicode_InternFromString(members[which].text);
        if (members[which].name == NULL) {
            return -1;
        }
    }
    str_fingerprint = PyUnicode_InternFromString("fingerprint");
    return str_fingerprint == NULL ? -1 : 0;
}
