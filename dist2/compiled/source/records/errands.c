/* Asynchronous collectives whose turn is to come: `Errand`, the counterpart of what `_issue`, `_start`
   and `_settle` of `OperationRunner` do for one, and of its `Completion`.

   An errand is a job of the lane: called without arguments it runs, once. It is the helper of its Work: called with
   a monotonic nanosecond it works on the lane until it is done, as `help_out` does. And it is what the Work waits on;
   whoever has to sleep until it is done sleeps on a `Completion`, which is made then. Each step holds the interpreter
   lock, so there is no other. */

#include "records.h"

static PyObject *name_put, *name_help, *name_hurry, *name_start, *name_broke_off, *name_follow, *name_done;
static PyObject *name_set_result, *name_set_exception, *name_exception, *name_add_done_callback;

typedef struct {
    PyObject_HEAD
    Course *course;
    Plan *plan;
    Record *operation;
    PyObject *inputs;
    PyObject *outputs;
    PyObject *work;       /* until it is done */
    PyObject *error;      /* NULL for none */
    PyObject *completion; /* NULL before somebody sleeps */
    long long ends_ns;    /* when limits end all that is queued up to this */
    char done;
    vectorcallfunc call;
} Errand;

static PyTypeObject Errand_Type;

/* Be done: the Work and the tensors are let go, and those that sleep are woken. -1 with an exception. */
static int
errand_end(Errand *self, PyObject *error)
{
    if (self->done) {
        PyErr_SetString(PyExc_RuntimeError, "it is done already");
        return -1;
    }
    self->error = Py_XNewRef(error);
    self->done = 1;
    PyObject *completion = Py_XNewRef(self->completion), *told = NULL;
    if (completion != NULL) {
        told = error == NULL ? PyObject_CallMethodOneArg(completion, name_set_result, Py_None)
                             : PyObject_CallMethodOneArg(completion, name_set_exception, error);
    }
    int outcome = completion != NULL && told == NULL ? -1 : 0;
    Py_XDECREF(told);
    Py_XDECREF(completion);
    if (self->work != NULL) {
        work_forget_helper(self->work); /* the two would keep each other */
        if (self->course != NULL && PySet_Discard(course_in_flight(self->course), self->work) < 0) {
            outcome = -1;
        }
    }
    Py_CLEAR(self->work);
    Py_CLEAR(self->plan);
    Py_CLEAR(self->inputs);
    Py_CLEAR(self->outputs);
    return outcome;
}

/* ---- As a job of the lane ---- */

/* Have the group do something with this errand that is not the usual case. */
static PyObject *
errand_ask_group(Errand *self, PyObject *name, PyObject *what)
{
    PyObject *group = self->course->group, *work = self->work;
    if (group == NULL || work == NULL) {
        PyErr_SetString(PyExc_ReferenceError, "the group is gone");
        return NULL;
    }
    return PyObject_CallMethodObjArgs(group, name, what, work, self, self->inputs, self->outputs, NULL);
}

/* Deliver what it raised to whoever waits; return it if it concerns this thread as well, or else None. */
static PyObject *
errand_broke_off(Errand *self)
{
    PyObject *error = raised();
    PyObject *concerning = errand_ask_group(self, name_broke_off, error);
    Py_DECREF(error);
    return concerning;
}

/* Run, and settle it or have the group follow it. */
static PyObject *
errand_run(Errand *self)
{
    Course *course = self->course;
    if (self->done || self->plan == NULL) {
        Py_RETURN_NONE;
    }
    if (course->standing->fault != Py_None) {
        return errand_ask_group(self, name_start, (PyObject *)self->plan);
    }
    PyObject *pending = course_start(course, self->plan, self->operation, self->inputs, self->outputs);
    if (pending == NULL) {
        return errand_broke_off(self);
    }
    if (pending != Py_None) {
        PyObject *group = course->group;
        PyObject *followed =
            group == NULL ? NULL : PyObject_CallMethodObjArgs(group, name_follow, pending, self->work, self, NULL);
        Py_DECREF(pending);
        return followed;
    }
    Py_DECREF(pending);
    if (course_finished(course, self->operation) < 0 || errand_end(self, NULL) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- As a helper of its Work ---- */

/* Work on the lane until it is done, if nobody minds that it may take as long as limits allow; at 0, say that nobody
   will come. */
static PyObject *
errand_help(Errand *self, PyObject *until)
{
    long long until_ns = PyLong_AsLongLong(until);
    if (until_ns == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (until_ns == 0) {
        return PyObject_CallMethodNoArgs((PyObject *)self->course->turns, name_hurry);
    }
    if (until_ns < self->ends_ns || self->done) {
        Py_RETURN_NONE;
    }
    PyObject *done = PyObject_GetAttr((PyObject *)self, name_done);
    PyObject *helped =
        done == NULL ? NULL : PyObject_CallMethodOneArg((PyObject *)self->course->turns, name_help, done);
    Py_XDECREF(done);
    return helped;
}

static PyObject *
errand_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Errand *self = (Errand *)object;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    if (count > 1 || names != NULL || self->course == NULL) {
        PyErr_SetString(PyExc_TypeError, "an errand takes a time or nothing");
        return NULL;
    }
    Py_INCREF(self);
    PyObject *result = count == 0 ? errand_run(self) : errand_help(self, args[0]);
    Py_DECREF(self);
    return result;
}

/* ---- As what its Work waits on: see dist2/completion.py ---- */

static PyObject *
errand_done(Errand *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(self->done);
}

static PyObject *
errand_set_result(Errand *self, PyObject *Py_UNUSED(result))
{
    if (errand_end(self, NULL) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
errand_set_exception(Errand *self, PyObject *error)
{
    if (errand_end(self, error) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Return what sleepers sleep on, borrowed; NULL without an exception if it is done meanwhile. */
static PyObject *
errand_completion(Errand *self)
{
    if (self->completion == NULL && !self->done && self->course != NULL) {
        PyObject *made = PyObject_CallNoArgs(course_completion_type(self->course));
        if (made == NULL) {
            return NULL;
        }
        if (self->completion == NULL && !self->done) { /* another thread may have had its turn */
            self->completion = Py_NewRef(made);
        }
        Py_DECREF(made);
    }
    return self->done ? NULL : self->completion;
}

static PyObject *
errand_exception(Errand *self, PyObject *const *args, Py_ssize_t count)
{
    PyObject *completion = errand_completion(self);
    if (completion != NULL) {
        Py_INCREF(completion);
        PyObject *limit = count == 1 ? args[0] : Py_None;
        PyObject *error = PyObject_CallMethodOneArg(completion, name_exception, limit);
        Py_DECREF(completion);
        return error;
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    return Py_NewRef(self->error != NULL ? self->error : Py_None);
}

static PyObject *
errand_result(Errand *self, PyObject *Py_UNUSED(none))
{
    PyObject *error = errand_exception(self, NULL, 0);
    if (error == NULL || error == Py_None) {
        return error;
    }
    PyErr_Restore(Py_NewRef(Py_TYPE(error)), error, PyException_GetTraceback(error));
    return NULL;
}

static PyObject *
errand_add_done_callback(Errand *self, PyObject *callback)
{
    PyObject *completion = errand_completion(self);
    if (completion != NULL) {
        return PyObject_CallMethodOneArg(completion, name_add_done_callback, callback);
    }
    return PyErr_Occurred() ? NULL : PyObject_CallOneArg(callback, (PyObject *)self);
}

/* ---- The type ---- */

PyObject *
errand_issue(Course *course, Plan *plan, Record *operation, PyObject *inputs, PyObject *outputs, PyObject *left)
{
    Errand *self = (Errand *)Errand_Type.tp_alloc(&Errand_Type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->call = errand_call;
    self->course = (Course *)Py_NewRef(course);
    self->plan = (Plan *)Py_NewRef(plan);
    self->operation = (Record *)Py_NewRef(operation);
    self->inputs = Py_NewRef(inputs);
    self->outputs = Py_NewRef(outputs);
    self->ends_ns = LLONG_MAX; /* nobody helps before it is queued */
    PyObject *work = work_pending((PyObject *)operation, outputs, (PyObject *)self), *ends = NULL;
    if (work != NULL && PySet_Add(course_in_flight(course), work) == 0) {
        self->work = Py_NewRef(work);
        ends = PyObject_CallMethodObjArgs((PyObject *)course->turns, name_put, operation, self, left, NULL);
    }
    if (ends != NULL) {
        self->ends_ns = PyLong_AsLongLong(ends);
        Py_DECREF(ends);
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(work);
    }
    Py_DECREF(self);
    return work;
}

static int
errand_traverse(Errand *self, visitproc visit, void *arg)
{
    Py_VISIT(self->course);
    Py_VISIT(self->plan);
    Py_VISIT(self->operation);
    Py_VISIT(self->inputs);
    Py_VISIT(self->outputs);
    Py_VISIT(self->work);
    Py_VISIT(self->error);
    Py_VISIT(self->completion);
    return 0;
}

static int
errand_clear(Errand *self)
{
    Py_CLEAR(self->course);
    Py_CLEAR(self->plan);
    Py_CLEAR(self->operation);
    Py_CLEAR(self->inputs);
    Py_CLEAR(self->outputs);
    Py_CLEAR(self->work);
    Py_CLEAR(self->error);
    Py_CLEAR(self->completion);
    return 0;
}

static void
errand_dealloc(Errand *self)
{
    PyObject_GC_UnTrack(self);
    errand_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef errand_methods[] = {
    {"done", (PyCFunction)errand_done, METH_NOARGS, NULL},
    {"set_result", (PyCFunction)errand_set_result, METH_O, NULL},
    {"set_exception", (PyCFunction)errand_set_exception, METH_O, NULL},
    {"exception", (PyCFunction)(void (*)(void))errand_exception, METH_FASTCALL, NULL},
    {"result", (PyCFunction)errand_result, METH_NOARGS, NULL},
    {"add_done_callback", (PyCFunction)errand_add_done_callback, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Errand_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._records.Errand",
    .tp_doc = "An asynchronous collective whose turn is to come.",
    .tp_basicsize = sizeof(Errand),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)errand_dealloc,
    .tp_traverse = (traverseproc)errand_traverse,
    .tp_clear = (inquiry)errand_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Errand, call),
    .tp_methods = errand_methods,
};

int
errands_ready(PyObject *module)
{
    static const Name names[] = {
        {&name_put, "put"},
        {&name_help, "help"},
        {&name_hurry, "hurry"},
        {&name_start, "_start"},
        {&name_broke_off, "_fail_async"},
        {&name_follow, "_follow"},
        {&name_done, "done"},
        {&name_set_result, "set_result"},
        {&name_set_exception, "set_exception"},
        {&name_exception, "exception"},
        {&name_add_done_callback, "add_done_callback"},
    };
    if (intern(names, Py_ARRAY_LENGTH(names)) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &Errand_Type);
}
