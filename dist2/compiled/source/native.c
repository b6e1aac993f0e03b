/* The extension `dist2.compiled._native`: a module with its parts as attributes. */

#include "parts.h"

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dist2.compiled._native",
    .m_doc = "Steps on shared memory, messages inside a host.",
    .m_size = -1,
};

/* Add a part, whose reference is taken over; -1 with an exception. */
static int
add_part(PyObject *self, const char *name, PyObject *part)
{
    int added = part == NULL ? -1 : PyModule_AddObjectRef(self, name, part);
    Py_XDECREF(part);
    return added;
}

PyMODINIT_FUNC
PyInit__native(void)
{
    PyObject *self = PyModule_Create(&module);
    if (self == NULL || add_part(self, "messages", messages_made()) < 0 ||
        add_part(self, "steps", steps_made()) < 0) {
        Py_XDECREF(self);
        return NULL;
    }
    return self;
}
