/* Records of operations: made when they begin, passed to instruments. All of this part of the extension relies on the
   interpreter lock: a function that calls no Python code is atomic for all threads. */

#include "records.h"

#include "parts.h"

/* ---- Record: the record of one call ---- */

/* Return a record with default values, untracked by the garbage collector: only an exception can lead back to a
   record, so that tracking starts with its first exception. */
static Record *
record_blank(PyTypeObject *type)
{
    Record *self = (Record *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    PyObject_GC_UnTrack(self);
    self->error = Py_NewRef(Py_None);
    self->code = Py_NewRef(Py_None);
    self->source = -1;
    return self;
}

static PyObject *
record_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords))
{
    return (PyObject *)record_blank(type);
}

static int
record_init(Record *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"signature", "seq", "created_ns", "deadline_ns", "is_async", NULL};
    PyObject *signature;
    long long seq, created_ns, deadline_ns;
    int is_async;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OLLLp:Record", names, &signature, &seq, &created_ns,
                                     &deadline_ns, &is_async)) {
        return -1;
    }
    Py_XSETREF(self->signature, Py_NewRef(signature));
    self->seq = seq;
    self->created_ns = created_ns;
    self->deadline_ns = deadline_ns;
    self->is_async = (char)is_async;
    return 0;
}

static int
record_traverse(Record *self, visitproc visit, void *arg)
{
    Py_VISIT(self->signature);
    Py_VISIT(self->error);
    Py_VISIT(self->code);
    return 0;
}

static int
record_clear(Record *self)
{
    Py_CLEAR(self->signature);
    Py_CLEAR(self->error);
    Py_CLEAR(self->code);
    return 0;
}

static void
record_dealloc(Record *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    record_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
record_error(Record *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->error != NULL ? self->error : Py_None);
}

/* Set the error, and track the record in the garbage collector: the traceback may lead back to it. */
static int
record_set_error(Record *self, PyObject *error, void *Py_UNUSED(closure))
{
    if (error == NULL) {
        PyErr_SetString(PyExc_AttributeError, "error cannot be deleted; None stands for none");
        return -1;
    }
    Py_XSETREF(self->error, Py_NewRef(error));
    if (error != Py_None && !PyObject_GC_IsTracked((PyObject *)self)) {
        PyObject_GC_Track(self);
    }
    return 0;
}

/* Whether a file name begins with `here`, a str, or with one of a tuple of them. */
static int
is_inside(PyObject *name, PyObject *here)
{
    if (PyUnicode_Check(here)) {
        return PyUnicode_Tailmatch(name, here, 0, PY_SSIZE_T_MAX, -1) == 1;
    }
    for (Py_ssize_t index = 0; PyTuple_Check(here) && index < PyTuple_GET_SIZE(here); index++) {
        PyObject *one = PyTuple_GET_ITEM(here, index);
        if (PyUnicode_Check(one) && PyUnicode_Tailmatch(name, one, 0, PY_SSIZE_T_MAX, -1) == 1) {
            return 1;
        }
    }
    return 0;
}

/* Whether code belongs to a file with a name that does not begin with `here`. The last such code is cached: mostly
   the same code calls again. */
static int
is_outside(PyCodeObject *code, PyObject *here)
{
    static PyObject *last_code, *last_here;
    if ((PyObject *)code == last_code && here == last_here) {
        return 1;
    }
    if (is_inside(code->co_filename, here)) {
        return 0;
    }
    Py_XSETREF(last_code, Py_NewRef(code));
    Py_XSETREF(last_here, Py_NewRef(here));
    return 1;
}

/* Find the innermost frame of a file with a name that does not begin with `here`, and record it. */
static void
record_note_caller(Record *self, PyObject *here)
{
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame != NULL) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        PyFrameObject *back = NULL;
        if (!is_outside(code, here)) {
            back = PyFrame_GetBack(frame);
        }
        if (back == NULL) {
            Py_XSETREF(self->code, (PyObject *)code);
            self->instruction = PyFrame_GetLasti(frame);
            Py_DECREF(frame);
            return;
        }
        Py_DECREF(code);
        Py_SETREF(frame, back);
    }
}

Record *
record_begin(PyTypeObject *type, PyObject *signature, long long limit_ns, int is_async, PyObject *here)
{
    return record_begun_at(type, signature, monotonic_ns(), limit_ns, is_async, here);
}

Record *
record_begun_at(PyTypeObject *type, PyObject *signature, long long created_ns, long long limit_ns, int is_async,
                PyObject *here)
{
    Record *self = record_blank(type);
    if (self == NULL) {
        return NULL;
    }
    self->signature = Py_NewRef(signature);
    self->created_ns = created_ns;
    self->deadline_ns = created_ns + limit_ns;
    self->is_async = (char)is_async;
    if (here != Py_None) {
        record_note_caller(self, here);
    }
    return self;
}

static PyObject *
record_begun(PyObject *type, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4) {
        return PyErr_Format(PyExc_TypeError, "begun takes 4 arguments, got %zd", count);
    }
    long long limit_ns = PyLong_AsLongLong(args[1]);
    int is_async = PyObject_IsTrue(args[2]);
    if ((limit_ns == -1 && PyErr_Occurred()) || is_async < 0) {
        return NULL;
    }
    if (!PyUnicode_Check(args[3]) && !PyTuple_Check(args[3])) {
        return PyErr_Format(PyExc_TypeError, "here must be a str or a tuple of them, got %R", args[3]);
    }
    return (PyObject *)record_begin((PyTypeObject *)type, args[0], limit_ns, is_async, args[3]);
}

static PyMemberDef record_members[] = {
    {"signature", T_OBJECT_EX, offsetof(Record, signature), 0, NULL},
    {"code", T_OBJECT_EX, offsetof(Record, code), 0, NULL},
    {"seq", T_LONGLONG, offsetof(Record, seq), 0, NULL},
    {"deadline_ns", T_LONGLONG, offsetof(Record, deadline_ns), 0, NULL},
    {"created_ns", T_LONGLONG, offsetof(Record, created_ns), 0, NULL},
    {"started_ns", T_LONGLONG, offsetof(Record, started_ns), 0, NULL},
    {"finished_ns", T_LONGLONG, offsetof(Record, finished_ns), 0, NULL},
    {"places", T_ULONGLONG, offsetof(Record, places), READONLY, NULL},
    {"instruction", T_INT, offsetof(Record, instruction), 0, NULL},
    {"source", T_INT, offsetof(Record, source), 0, NULL},
    {"is_async", T_BOOL, offsetof(Record, is_async), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef record_properties[] = {
    {"error", (getter)record_error, (setter)record_set_error, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef record_methods[] = {
    {"begun", (PyCFunction)(void (*)(void))record_begun, METH_FASTCALL | METH_CLASS,
     "begun(signature, limit_ns, is_async, here)\n--\n\nReturn the record of a call that begins now."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject Record_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.Record",
    .tp_doc = "What is kept of one call.",
    .tp_basicsize = sizeof(Record),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = record_new,
    .tp_init = (initproc)record_init,
    .tp_dealloc = (destructor)record_dealloc,
    .tp_traverse = (traverseproc)record_traverse,
    .tp_clear = (inquiry)record_clear,
    .tp_members = record_members,
    .tp_getset = record_properties,
    .tp_methods = record_methods,
    .tp_weaklistoffset = offsetof(Record, weakrefs),
};

/* ---- Telling instruments ---- */

/* Pass the exception of a callable to `failed(callable, error)`, if it is an Exception; -1 if it is not. */
static int
hand_over(PyObject *callable, PyObject *failed)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *error = raised();
    PyObject *result = PyObject_CallFunctionObjArgs(failed, callable, error, NULL);
    if (result == NULL) {
        go_on(error);
        return -1;
    }
    Py_DECREF(error);
    Py_DECREF(result);
    return 0;
}

int
tell_all(PyObject *told, PyObject *operation, PyObject *failed)
{
    int outcome = 0;
    Py_INCREF(told);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(told) && outcome == 0; index++) {
        PyObject *callable = PyTuple_GET_ITEM(told, index);
        PyObject *result = PyObject_CallOneArg(callable, operation);
        if (result == NULL) {
            outcome = hand_over(callable, failed);
        }
        else {
            Py_DECREF(result);
        }
    }
    Py_DECREF(told);
    return outcome;
}

static PyObject *
tell(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "tell takes a tuple, an operation and what takes failures");
        return NULL;
    }
    if (tell_all(args[0], args[1], args[2]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- The module ---- */

static PyMethodDef functions[] = {
    {"tell", (PyCFunction)(void (*)(void))tell, METH_FASTCALL,
     "tell(told, operation, failed)\n--\n\nCall each of a tuple with an operation."},
    {"adopt", (PyCFunction)(void (*)(void))works_adopt, METH_FASTCALL,
     "adopt(work_type, prepare)\n--\n\nMake Works of a type from now on; return whether they are used again."},
    {"find_marks", find_marks, METH_O,
     "find_marks(samples)\n--\n\nFind where tensors have the bits by which torch tells what they are."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dist2.compiled._native.records",
    .m_doc = "Records of operations: made at their begin, told to instruments, counted.",
    .m_size = -1,
    .m_methods = functions,
};

PyObject *
records_made(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddType(made, &Record_Type) < 0 || counters_ready(made) < 0 ||
        counting_ready(made) < 0 || tallying_ready(made) < 0 || ring_ready(made) < 0 || plans_ready(made) < 0 || queue_ready(made) < 0 ||
        runner_ready(made) < 0 || async_calls_ready(made) < 0 || overloads_ready(made) < 0 || fast_methods_ready(made) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
