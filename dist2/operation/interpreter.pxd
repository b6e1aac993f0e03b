"""What the call path asks of the interpreter, and of the clock: functions of C."""

cdef extern from *:
    """
    static inline PyObject *innermost_frame(void)
    {
        PyObject *frame = (PyObject *)PyEval_GetFrame();
        return Py_NewRef(frame != NULL ? frame : Py_None);
    }
    static inline PyObject *frame_before(PyObject *frame)
    {
        PyObject *before = (PyObject *)PyFrame_GetBack((PyFrameObject *)frame);
        return before != NULL ? before : Py_NewRef(Py_None);
    }
    #define place_of(object, count) ((Py_ssize_t)(((uintptr_t)(object) >> 5 ^ (uintptr_t)(object) >> 11) % (size_t)(count)))
    #define code_of_frame(frame) ((PyObject *)PyFrame_GetCode((PyFrameObject *)(frame)))
    #define instruction_of_frame(frame) PyFrame_GetLasti((PyFrameObject *)(frame))
    static inline int bits_of(long long number)
    {
        return number == 0 ? 0 : 64 - __builtin_clzll((unsigned long long)number);
    }
    """
    object innermost_frame()  # in Python, or None: functions in Cython have no frames
    object frame_before(object frame)  # the one that called, or None
    object code_of_frame(object frame)
    int instruction_of_frame(object frame)
    Py_ssize_t place_of(object thing, Py_ssize_t count)  # a place in a table, by its address
    int bits_of(long long number)  # which is not negative


cdef extern from "base.h" nogil:
    long long monotonic_ns "clock_ns"()
