/* Records of operations: made at their begin, told to instruments, counted. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dist2.compiled._records",
    .m_doc = "Records of operations: made at their begin, told to instruments, counted.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__records(void)
{
    return PyModule_Create(&module);
}
