/* Declarations that the files of dist2.compiled._native.steps share. */

#ifndef DIST2_STEPS_H
#define DIST2_STEPS_H

#include "exceptions.h"
#include "names.h"
#include "waiting.h"

#include <structmember.h>

enum { FRAME_BYTES = 56 }; /* of a header: `wire.py` */

/* Add the Python names of a file to the module; -1 with an exception. */
int streams_ready(PyObject *module);
int segments_ready(PyObject *module);

#endif
