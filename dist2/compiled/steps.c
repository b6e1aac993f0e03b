/* Steps of programs on shared memory: copies, folds and fences. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dist2.compiled._steps",
    .m_doc = "Steps of programs on shared memory: copies, folds and fences.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__steps(void)
{
    return PyModule_Create(&module);
}
