/* Access to Python objects, for sending and receiving: their attributes, and locks. */

#include "messages.h"

/* ---- Attributes ---- */

int
attribute_is_true(PyObject *object, Field *field)
{
    const char *flag = field_at(object, field, T_BOOL);
    if (flag != NULL) {
        return *flag;
    }
    PyObject *value = get_attribute(object, field);
    if (value == NULL) {
        return -1;
    }
    int truth = value == Py_None || value == Py_False ? 0 : value == Py_True ? 1 : PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth;
}

/* Whether an attribute is None; -1 with an exception. An identity test: the truth value of an error is never
   computed. */
int
attribute_is_none(PyObject *object, Field *field)
{
    PyObject *value = get_attribute(object, field);
    if (value == NULL) {
        return -1;
    }
    Py_DECREF(value);
    return value == Py_None;
}

/* Read a number; -1 with an exception, or if the number is -1. */
long long
attribute_number(PyObject *object, Field *field)
{
    const long long *place = field_at(object, field, T_LONGLONG);
    if (place != NULL) {
        return *place;
    }
    PyObject *value = get_attribute(object, field);
    if (value == NULL) {
        return -1;
    }
    long long number = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return number;
}

int
set_attribute(PyObject *object, Field *field, PyObject *value)
{
    PyObject **slot = field_at(object, field, T_OBJECT_EX);
    if (slot == NULL || field->fixed) {
        return PyObject_SetAttr(object, field->name, value);
    }
    Py_XSETREF(*slot, Py_NewRef(value));
    return 0;
}

int
set_number(PyObject *object, Field *field, long long number)
{
    int *place = field_at(object, field, T_INT);
    if (place != NULL && !field->fixed) {
        *place = (int)number;
        return 0;
    }
    PyObject *value = PyLong_FromLongLong(number);
    int set = value == NULL ? -1 : set_attribute(object, field, value);
    Py_XDECREF(value);
    return set;
}

End *
ring_of(PyObject *link, Field *field)
{
    PyObject *end = get_attribute(link, field);
    if (end == NULL) {
        return NULL;
    }
    Py_DECREF(end);
    return PyObject_TypeCheck(end, &End_Type) ? (End *)end : NULL;
}

/* ---- Calls ---- */

/* Call a callable without arguments, and drop its result. */
int
call(PyObject *callable)
{
    PyObject *result = PyObject_CallNoArgs(callable);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

int
call_method(PyObject *object, PyObject *name)
{
    PyObject *result = PyObject_CallMethodNoArgs(object, name);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* ---- Locks ---- */

/* Call a method of a lock. */
static PyObject *
call_lock(PyObject *method)
{
    if (PyCFunction_CheckExact(method) && PyCFunction_GET_FLAGS(method) == METH_NOARGS) {
        return PyCFunction_GET_FUNCTION(method)(PyCFunction_GET_SELF(method), NULL);
    }
    return PyObject_CallNoArgs(method);
}

int
is_held(PyObject *locked)
{
    PyObject *held = call_lock(locked);
    Py_XDECREF(held);
    return held == NULL ? -1 : held != Py_False;
}

void
release(PyObject *callable)
{
    PyObject *error = raised();
    PyObject *released = call_lock(callable);
    if (released == NULL) {
        PyErr_WriteUnraisable(callable);
    }
    Py_XDECREF(released);
    go_on(error);
}
