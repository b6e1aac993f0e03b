/* Addresses of the tensors of a call, which one extension has read and passes to another for the time of the call. */

#ifndef DIST2_PLACES_H
#define DIST2_PLACES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* Where a tensor lies: its first byte, and the one behind its last. */
typedef struct {
    uintptr_t start, end;
} Span;

/* Tensors and their addresses. The creator of this struct keeps the tensors alive. */
typedef struct {
    Py_ssize_t count;
    PyObject *const *tensors;
    const Span *spans;
} Places;

#endif
