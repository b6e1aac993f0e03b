/* Where the tensors of a call lie: what one extension has found out and tells another, while the call is under way. */

#ifndef DIST2_PLACES_H
#define DIST2_PLACES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* Where a tensor lies: its first byte, and the one behind its last. */
typedef struct {
    uintptr_t start, end;
} Span;

/* Some tensors, which whoever made this keeps alive, and where each of them lies. */
typedef struct {
    Py_ssize_t count;
    PyObject *const *tensors;
    const Span *spans;
} Places;

#endif
