/* The parts of the extension `dist2.compiled._native`, each a module: made once, when the extension is imported. */

#ifndef DIST2_PARTS_H
#define DIST2_PARTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Return a new part; NULL with an exception. */
PyObject *messages_made(void);
PyObject *steps_made(void);

#endif
