/* The part `steps` of the extension: payloads over sockets. */

#include "parts.h"
#include "steps.h"

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dist2.compiled._native.steps",
    .m_doc = "Payloads over sockets.",
    .m_size = -1,
};

PyObject *
steps_made(void)
{
    PyObject *self = PyModule_Create(&module);
    if (self == NULL) {
        return NULL;
    }
    if (streams_ready(self) < 0 || segments_ready(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
