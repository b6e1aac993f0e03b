/* Queued asynchronous collectives: `AsyncCall`, the counterpart of `_issue`, `_start` and `_settle` of
   `OperationRunner` for one call, and of its `Completion`.

   An async call has three roles. It is a job of the queue: called without arguments, it runs once. It is the helper
   of its Work: called with a monotonic time in nanoseconds, it runs queued jobs until it is done, as `help_out`
   does. And its Work waits on it; a thread that has to sleep sleeps on a `Completion`, which is made then. The
   interpreter lock is held during each step, so no other lock is needed. */

#include "records.h"

static PyObject *name_put, *name_help, *name_hurry, *name_start, *name_broke_off, *name_follow, *name_done;
static PyObject *name_set_result, *name_set_exception, *name_exception, *name_add_done_callback;

typedef struct {
    PyObject_HEAD
    Runner *runner;
    Plan *plan;
    Record *operation;
    PyObject *inputs;
    PyObject *outputs;
    PyObject *work;       /* until it is done */
    PyObject *error;      /* NULL for none */
    PyObject *completion; /* NULL before somebody sleeps */
    long long ends_ns;    /* the latest time at which timeouts end all jobs queued up to this */
    char done;
    vectorcallfunc call;
} AsyncCall;

static PyTypeObject AsyncCall_Type;

/* Complete the call: drop the Work and the tensors, and wake sleeping threads. -1 with an exception. */
static int
async_call_end(AsyncCall *self, PyObject *error)
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
    PyObject *failure = raised();
    if (self->work != NULL) {
        work_forget_helper(self->work); /* the two would keep each other alive */
        if (self->runner != NULL && PySet_Discard(runner_in_flight(self->runner), self->work) < 0) {
            outcome = -1;
        }
    }
    Py_CLEAR(self->work);
    Py_CLEAR(self->plan);
    Py_CLEAR(self->inputs);
    Py_CLEAR(self->outputs);
    go_on(failure);
    return outcome;
}

/* ---- As a job of the queue ---- */

/* Let the group handle a case of this call that is not the usual one. */
static PyObject *
async_call_ask_group(AsyncCall *self, PyObject *name, PyObject *what)
{
    PyObject *group = self->runner->group, *work = self->work;
    if (group == NULL || work == NULL) {
        PyErr_SetString(PyExc_ReferenceError, "the group is gone");
        return NULL;
    }
    return PyObject_CallMethodObjArgs(group, name, what, work, self, self->inputs, self->outputs, NULL);
}

/* Deliver the raised exception to the waiters. Return it if it concerns this thread as well, else None. */
static PyObject *
async_call_broke_off(AsyncCall *self)
{
    PyObject *error = raised();
    PyObject *concerning = async_call_ask_group(self, name_broke_off, error);
    if (concerning == NULL) {
        go_on(error);
        return NULL;
    }
    Py_DECREF(error);
    return concerning;
}

/* Run the call, and complete it or let the group follow it. */
static PyObject *
async_call_run(AsyncCall *self)
{
    Runner *runner = self->runner;
    if (self->done || self->plan == NULL) {
        Py_RETURN_NONE;
    }
    if (runner->state->fault != Py_None) {
        return async_call_ask_group(self, name_start, (PyObject *)self->plan);
    }
    PyObject *pending = runner_start(runner, self->plan, self->operation, self->inputs, self->outputs);
    if (pending == NULL) {
        return async_call_broke_off(self);
    }
    if (pending != Py_None) {
        PyObject *group = runner->group;
        PyObject *followed =
            group == NULL ? NULL : PyObject_CallMethodObjArgs(group, name_follow, pending, self->work, self, NULL);
        Py_DECREF(pending);
        return followed;
    }
    Py_DECREF(pending);
    if (runner_finished(runner, self->operation) < 0 || async_call_end(self, NULL) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- As a helper of its Work ---- */

/* Run queued jobs until this one is done, if the caller can wait until the timeouts of all of them; at 0, report
   that no thread will come. */
static PyObject *
async_call_help(AsyncCall *self, PyObject *until)
{
    long long until_ns = PyLong_AsLongLong(until);
    if (until_ns == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (until_ns == 0) {
        return PyObject_CallMethodNoArgs((PyObject *)self->runner->queue, name_hurry);
    }
    if (until_ns < self->ends_ns || self->done) {
        Py_RETURN_NONE;
    }
    PyObject *done = PyObject_GetAttr((PyObject *)self, name_done);
    PyObject *helped =
        done == NULL ? NULL : PyObject_CallMethodOneArg((PyObject *)self->runner->queue, name_help, done);
    Py_XDECREF(done);
    return helped;
}

static PyObject *
async_call_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    AsyncCall *self = (AsyncCall *)object;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    if (count > 1 || names != NULL || self->runner == NULL) {
        PyErr_SetString(PyExc_TypeError, "an async call takes a time or nothing");
        return NULL;
    }
    Py_INCREF(self);
    PyObject *result = count == 0 ? async_call_run(self) : async_call_help(self, args[0]);
    Py_DECREF(self);
    return result;
}

/* ---- As the completion of its Work: see dist2/runtime/completion.py ---- */

static PyObject *
async_call_done(AsyncCall *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(self->done);
}

static PyObject *
async_call_set_result(AsyncCall *self, PyObject *Py_UNUSED(result))
{
    if (async_call_end(self, NULL) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
async_call_set_exception(AsyncCall *self, PyObject *error)
{
    if (async_call_end(self, error) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Return the completion that threads sleep on, borrowed; NULL without an exception if the call is done meanwhile. */
static PyObject *
async_call_completion(AsyncCall *self)
{
    if (self->completion == NULL && !self->done && self->runner != NULL) {
        PyObject *made = PyObject_CallNoArgs(runner_completion_type(self->runner));
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
async_call_exception(AsyncCall *self, PyObject *const *args, Py_ssize_t count)
{
    PyObject *completion = async_call_completion(self);
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
async_call_result(AsyncCall *self, PyObject *Py_UNUSED(none))
{
    PyObject *error = async_call_exception(self, NULL, 0);
    if (error == NULL || error == Py_None) {
        return error;
    }
    raise_again(error);
    return NULL;
}

static PyObject *
async_call_add_done_callback(AsyncCall *self, PyObject *callback)
{
    PyObject *completion = async_call_completion(self);
    if (completion != NULL) {
        return PyObject_CallMethodOneArg(completion, name_add_done_callback, callback);
    }
    return PyErr_Occurred() ? NULL : PyObject_CallOneArg(callback, (PyObject *)self);
}

/* ---- The type ---- */

PyObject *
async_call_issue(Runner *runner, Plan *plan, Record *operation, PyObject *inputs, PyObject *outputs, PyObject *left)
{
    AsyncCall *self = (AsyncCall *)AsyncCall_Type.tp_alloc(&AsyncCall_Type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->call = async_call_call;
    self->runner = (Runner *)Py_NewRef(runner);
    self->plan = (Plan *)Py_NewRef(plan);
    self->operation = (Record *)Py_NewRef(operation);
    self->inputs = Py_NewRef(inputs);
    self->outputs = Py_NewRef(outputs);
    self->ends_ns = LLONG_MAX; /* nobody helps before it is queued */
    PyObject *work = work_pending((PyObject *)operation, outputs, (PyObject *)self), *ends = NULL;
    if (work != NULL && PySet_Add(runner_in_flight(runner), work) == 0) {
        self->work = Py_NewRef(work);
        ends = PyObject_CallMethodObjArgs((PyObject *)runner->queue, name_put, operation, self, left, NULL);
    }
    if (ends != NULL) {
        self->ends_ns = PyLong_AsLongLong(ends);
        Py_DECREF(ends);
    }
    if (work != NULL && PyErr_Occurred()) { /* it is not queued: no thread will complete it */
        PyObject *error = raised();
        work_forget_helper(work);
        PySet_Discard(runner_in_flight(runner), work);
        Py_CLEAR(self->work);
        Py_CLEAR(work);
        go_on(error);
    }
    Py_DECREF(self);
    return work;
}

static int
async_call_traverse(AsyncCall *self, visitproc visit, void *arg)
{
    Py_VISIT(self->runner);
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
async_call_clear(AsyncCall *self)
{
    Py_CLEAR(self->runner);
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
async_call_dealloc(AsyncCall *self)
{
    PyObject_GC_UnTrack(self);
    async_call_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef async_call_methods[] = {
    {"done", (PyCFunction)async_call_done, METH_NOARGS, NULL},
    {"set_result", (PyCFunction)async_call_set_result, METH_O, NULL},
    {"set_exception", (PyCFunction)async_call_set_exception, METH_O, NULL},
    {"exception", (PyCFunction)(void (*)(void))async_call_exception, METH_FASTCALL, NULL},
    {"result", (PyCFunction)async_call_result, METH_NOARGS, NULL},
    {"add_done_callback", (PyCFunction)async_call_add_done_callback, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject AsyncCall_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.AsyncCall",
    .tp_doc = "An asynchronous collective whose turn is to come.",
    .tp_basicsize = sizeof(AsyncCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)async_call_dealloc,
    .tp_traverse = (traverseproc)async_call_traverse,
    .tp_clear = (inquiry)async_call_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(AsyncCall, call),
    .tp_methods = async_call_methods,
};

int
async_calls_ready(PyObject *module)
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
    return PyModule_AddType(module, &AsyncCall_Type);
}
