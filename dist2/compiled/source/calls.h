/* Records of calls, as C reads them: `Operation` of dist2/operation/record.py is a type in Cython. This is the only
   way by which C looks into one. */

#ifndef DIST2_CALLS_H
#define DIST2_CALLS_H

#include "places.h"

#define CALLS_MODULE "dist2.operation.record_in_c"
#define CALLS_NAME "CALLS" /* a capsule in that module */

/* Fields of a record. */
typedef struct {
    long long created_ns;
    long long deadline_ns;
    const Places *places; /* of its tensors while the call is under way, or NULL */
    int is_async;
} CallFields;

typedef struct {
    PyTypeObject *type;
    void (*read)(PyObject *operation, CallFields *fields);
    void (*set_source)(PyObject *operation, int source);
} Calls;

/* Import the functions; NULL with an exception. */
static inline const Calls *
import_calls(void)
{
    PyObject *module = PyImport_ImportModule(CALLS_MODULE);
    PyObject *capsule = module == NULL ? NULL : PyObject_GetAttrString(module, CALLS_NAME);
    const Calls *calls = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, CALLS_NAME);
    Py_XDECREF(capsule);
    Py_XDECREF(module);
    return calls;
}

/* Return the functions; NULL with an exception if an object is no record. */
static inline const Calls *
calls_of(PyObject *operation)
{
    static const Calls *calls;
    if (calls == NULL && (calls = import_calls()) == NULL) {
        return NULL;
    }
    if (!PyObject_TypeCheck(operation, calls->type)) {
        PyErr_Format(PyExc_TypeError, "not an Operation: %R", operation);
        return NULL;
    }
    return calls;
}

#endif
