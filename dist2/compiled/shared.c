#include "records.h"

int
shared_ready(PyObject *Py_UNUSED(module))
{
    return 0;
}
