/* Names of attributes, as objects that are made once. */

#ifndef DIST2_NAMES_H
#define DIST2_NAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* A name, and where its object is kept. */
typedef struct {
    PyObject **name;
    const char *text;
} Name;

/* Make names; -1 with an exception. */
static inline int
intern(const Name *names, size_t count)
{
    for (size_t each = 0; each < count; each++) {
        *names[each].name = PyUnicode_InternFromString(names[each].text);
        if (*names[each].name == NULL) {
            return -1;
        }
    }
    return 0;
}

#endif
