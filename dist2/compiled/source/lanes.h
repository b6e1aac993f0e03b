/* What one extension offers another beside a callable: messages that are sent before anything is noted of them, so that
   who waits for one waits for nothing else. */

#ifndef DIST2_LANES_H
#define DIST2_LANES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define LANE_NAME "dist2.operation.queue"
#define LANE_ATTRIBUTE "_lane" /* of the type of what a plan has for its `execute`: a capsule */

typedef struct {
    /* Send what lies at an address, if nothing at all stands in the way: 1, 2 if the receiver is to be woken, or 0 with
       nothing done. It calls nothing in Python, and raises nothing; `now` is when the call began. */
    int (*send)(PyObject *execute, const char *address, long long now);
    /* After that: note which operation it was, and wake the receiver if `sent` was 2; 0, or -1 with an exception. */
    int (*sent)(PyObject *execute, PyObject *operation, int sent);
} Lane;

#endif
