/* Exceptions that are set aside while other code is called, which may raise as well. No exception may be lost, and
   none may leak. `raised` takes the current exception and hands over its reference; every path from there ends in
   `go_on`, or in a delivery to Python and one Py_DECREF. If the code in between raised another exception, that one
   is current afterwards, with the first in its chain of contexts: as if the code ran in an `except` block. */

#ifndef DIST2_EXCEPTIONS_H
#define DIST2_EXCEPTIONS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define LONGEST_CHAIN 1000 /* contexts may form a circle */

/* Take the current exception; NULL if there is none. */
static inline PyObject *
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

/* Raise an exception with its traceback, and take over the reference. */
static inline void
raise_again(PyObject *error)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(Py_NewRef(Py_TYPE(error)), error, PyException_GetTraceback(error));
#endif
}

/* Return the context of an exception, borrowed from it. */
static inline PyObject *
context_of(PyObject *error)
{
    PyObject *context = PyException_GetContext(error);
    Py_XDECREF(context);
    return context;
}

/* Return the exception in the chain of `error` whose context is `context`, borrowed; NULL if there is none. */
static inline PyObject *
raised_after(PyObject *error, PyObject *context)
{
    for (int steps = 0; error != NULL && steps < LONGEST_CHAIN; steps++) {
        PyObject *next = context_of(error);
        if (next == context) {
            return error;
        }
        error = next;
    }
    return NULL;
}

/* Append an exception to the end of the context chain of a newer one, and take over the reference. The two chains
   may share exceptions: those that were being handled when both were raised. No cycle is created. */
static inline void
chain_exceptions(PyObject *newer, PyObject *older)
{
    PyObject *last = newer, *next;
    if (newer == older) {
        Py_DECREF(older);
        return;
    }
    PyObject *after = raised_after(older, newer);
    if (after != NULL) {
        PyException_SetContext(after, NULL);
    }
    for (int steps = 0; steps < LONGEST_CHAIN; steps++) {
        next = context_of(last);
        if (next == NULL || next == older || raised_after(older, next) != NULL) {
            break;
        }
        last = next;
    }
    PyException_SetContext(last, older);
}

/* Raise again an exception that was set aside, unless it is NULL, and take over the reference. */
static inline void
go_on(PyObject *error)
{
    if (error == NULL) {
        return;
    }
    PyObject *newer = raised();
    if (newer != NULL) {
        chain_exceptions(newer, error);
        error = newer;
    }
    raise_again(error);
}

#endif
