/* A C interface that one extension offers to another beside its Python callable: it sends a message before the
   operation is recorded, so that the receiver does not wait for the bookkeeping. */

#ifndef DIST2_LANES_H
#define DIST2_LANES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define LANE_NAME "dist2.operation.queue"
#define LANE_ATTRIBUTE "_lane" /* of the type of a plan's `execute`: a capsule */

typedef struct {
    /* Send the bytes at an address if no condition prevents it. Return 1, 2 if the receiver has to be woken, or 0 if
       nothing was done. Calls no Python code and raises no exception; `now` is the start time of the call. */
    int (*send)(PyObject *execute, const char *address, long long now);
    /* After `send`: record the operation of the message, and wake the receiver if `sent` is 2. 0, or -1 with an
       exception. */
    int (*sent)(PyObject *execute, PyObject *operation, int sent);
} Lane;

#endif
