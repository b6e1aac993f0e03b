/* The part `steps` of the extension: arrivals, folds, scripts and programs. */

#include "parts.h"
#include "steps.h"

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dist2.compiled._native.steps",
    .m_doc = "Steps of programs on shared memory: copies, folds and fences.",
    .m_size = -1,
};

PyObject *
steps_made(void)
{
    PyObject *self = PyModule_Create(&module);
    if (self == NULL) {
        return NULL;
    }
    if (operations_ready() < 0 || arrivals_ready(self) < 0 || folds_ready(self) < 0 || script_ready(self) < 0 ||
        program_ready(self) < 0 || streams_ready(self) < 0 || segments_ready(self) < 0 || rails_ready(self) < 0 ||
        sweeping_ready(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
