/* Counters of operations that ended: counters.c, counting.c, tallying.c, ring.c. */

#ifndef DIST2_COUNTING_H
#define DIST2_COUNTING_H

#include "records.h"

/* The same places as in observability/metrics.py. */
enum { DURATIONS = 64, SUM_NS = DURATIONS, BYTES, MAX_NS, FAILED, LAST_SEQ, PLACES };

/* The numbers of one series: counters.c. */
typedef struct {
    PyObject_HEAD
    long long values[PLACES];
    long long carries[PLACES];
} Counters;

extern PyTypeObject Counters_Type;

/* Add one operation that succeeded to the numbers of its series. Return 0 if a value is implausible, and -1 with an
   exception. */
int counters_add(Counters *counters, Record *operation);

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

#endif
