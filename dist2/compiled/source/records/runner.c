/* The runner of a collective: refused or begun, queued, instruments, backend, end. Asynchronous ones run later:
   async_calls.c.

   `Runner` is the counterpart of `OperationRunner.run` and `OperationRunner.run_p2p` in dist2/operation/runner.py,
   which handle all cases other than the usual one. */

#include "records.h"

static Field field_started, field_finished;
static PyObject *name_raised, *name_profiler, *name_profiled, *name_runs;
static PyObject *name_stumbled, *name_told, *name_hand_on, *name_release, *name_work;

static PyObject *
runner_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"group", "otherwise", "otherwise_beside", "state",
                            "queue", "dispatch",  "operation_type",   "seconds",  "here",
                            "plans", "rank",      "natively_async", NULL};
    PyObject *group, *otherwise, *otherwise_beside, *state, *queue, *dispatch, *operation_type;
    PyObject *seconds, *here, *plans, *rank;
    int natively_async;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOO!O!OO!OOOO!p:OperationRunner", names, &group, &otherwise,
                                     &otherwise_beside, &GroupState_Type, &state, &QueueState_Type, &queue, &dispatch,
                                     &PyType_Type, &operation_type, &seconds, &here, &plans, &PyLong_Type, &rank, &natively_async)) {
        return NULL;
    }
    if (!PyType_IsSubtype((PyTypeObject *)operation_type, &Record_Type)) {
        return PyErr_Format(PyExc_TypeError, "operation_type must be a kind of Record, got %R", operation_type);
    }
    Runner *self = (Runner *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->group = Py_NewRef(group);
    self->otherwise = Py_NewRef(otherwise);
    self->otherwise_beside = Py_NewRef(otherwise_beside);
    self->dispatch = Py_NewRef(dispatch);
    self->operation_type = Py_NewRef(operation_type);
    self->seconds = Py_NewRef(seconds);
    self->here = Py_NewRef(here);
    self->plans = Py_NewRef(plans);
    self->rank = Py_NewRef(rank);
    self->natively_async = natively_async;
    self->state = (GroupState *)Py_NewRef(state);
    self->queue = (QueueState *)Py_NewRef(queue);
    self->raised = PyObject_GetAttr(dispatch, name_raised);
    self->profiler = self->raised == NULL ? NULL : PyObject_GetAttr(dispatch, name_profiler);
    if (self->profiler == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
runner_traverse(Runner *self, visitproc visit, void *arg)
{
    Py_VISIT(self->group);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->otherwise_beside);
    Py_VISIT(self->dispatch);
    Py_VISIT(self->raised);
    Py_VISIT(self->profiler);
    Py_VISIT(self->operation_type);
    Py_VISIT(self->seconds);
    Py_VISIT(self->here);
    Py_VISIT(self->plans);
    Py_VISIT(self->issuing);
    Py_VISIT(self->state);
    Py_VISIT(self->queue);
    return 0;
}

/* Break cycles: only the group and the plans refer back to this object. The other references stay, for calls from
   destructors. */
static int
runner_clear(Runner *self)
{
    Py_CLEAR(self->group);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->otherwise_beside);
    Py_CLEAR(self->plans);
    return 0;
}

static void
runner_dealloc(Runner *self)
{
    PyObject_GC_UnTrack(self);
    runner_clear(self);
    Py_XDECREF(self->issuing);
    Py_XDECREF(self->dispatch);
    Py_XDECREF(self->raised);
    Py_XDECREF(self->profiler);
    Py_XDECREF(self->operation_type);
    Py_XDECREF(self->seconds);
    Py_XDECREF(self->here);
    Py_XDECREF(self->rank);
    Py_XDECREF(self->state);
    Py_XDECREF(self->queue);
    Py_TYPE(self)->tp_free(self);
}

/* Call the instruments in a field of the dispatcher. */
static int
runner_tell(Runner *self, Field *field, PyObject *operation)
{
    PyObject *told = get_attribute(self->dispatch, field);
    if (told == NULL) {
        return -1;
    }
    int outcome = -1;
    if (!PyTuple_Check(told)) {
        PyErr_Format(PyExc_TypeError, "dispatch.%U must be a tuple, got %R", field->name, told);
    }
    else {
        outcome = tell_all(told, operation, self->raised);
    }
    Py_DECREF(told);
    return outcome;
}

void
runner_stumbled(Runner *self, Record *operation, PyObject *inputs, PyObject *outputs)
{
    PyObject *error = raised();
    PyObject *result = PyObject_CallMethodObjArgs(self->group, name_stumbled, operation, error, inputs, outputs, NULL);
    if (result != NULL) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "_fail_inline returned");
    }
    go_on(error);
}

int
runner_finished(Runner *self, Record *operation)
{
    operation->finished_ns = monotonic_ns();
    if (runner_tell(self, &field_finished, (PyObject *)operation) < 0) {
        return -1;
    }
    if (self->state->hooks == NULL || PyObject_IsTrue(self->state->hooks) == 0) {
        return 0;
    }
    PyObject *result = PyObject_CallMethodObjArgs(self->group, name_told, operation, NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Show an operation that was called or begins to torch's profiler, if that is active; -1 with an exception. */
static inline int
runner_notice(Runner *self, Record *operation)
{
    PyObject *runs = PyDict_GetItemWithError(self->profiler, name_runs);
    if (runs != Py_True) {
        return runs == NULL && PyErr_Occurred() ? -1 : 0;
    }
    PyObject *shown = PyObject_CallMethodOneArg(self->dispatch, name_profiled, (PyObject *)operation);
    Py_XDECREF(shown);
    return shown == NULL ? -1 : 0;
}

int
runner_started(Runner *self, Record *operation)
{
    return runner_notice(self, operation) < 0 ? -1 : runner_tell(self, &field_started, (PyObject *)operation);
}

PyObject *
runner_start(Runner *self, Plan *plan, Record *operation, PyObject *inputs, PyObject *outputs)
{
    if (runner_started(self, operation) < 0) {
        return NULL;
    }
    operation->started_ns = monotonic_ns();
    PyObject *arguments[] = {NULL, (PyObject *)operation, inputs, outputs};
    return PyObject_Vectorcall(plan->execute, arguments + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* Pass an operation to the backend, and report its end if it completes here. Return the backend's result. */
static PyObject *
runner_execute(Runner *self, Plan *plan, Record *operation, PyObject *inputs, PyObject *outputs)
{
    if (runner_started(self, operation) < 0) {
        return NULL;
    }
    operation->started_ns = operation->created_ns;
    PyObject *arguments[] = {NULL, (PyObject *)operation, inputs, outputs};
    PyObject *pending = PyObject_Vectorcall(plan->execute, arguments + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    if (pending == NULL) {
        runner_stumbled(self, operation, inputs, outputs);
        return NULL;
    }
    if (pending == Py_None && runner_finished(self, operation) < 0) {
        Py_CLEAR(pending);
    }
    return pending;
}

/* Call a method while an exception may be set, which stays set; -1 if the method raised one. */
static int
call_aside(PyObject *object, PyObject *method)
{
    PyObject *error = raised();
    PyObject *result = PyObject_CallMethodNoArgs(object, method);
    Py_XDECREF(result);
    go_on(error);
    return result == NULL ? -1 : 0;
}

int
runner_left(Runner *self, int waited)
{
    if (!waited && !self->state->aborted) {
        return 0;
    }
    int left = waited ? call_aside((PyObject *)self->queue, name_hand_on) : 0;
    int released = self->state->aborted ? call_aside(self->group, name_release) : 0;
    return left < 0 || released < 0 ? -1 : 0;
}

/* Return the Work of an operation that the backend completed, or completes later. Takes over both. */
static PyObject *
runner_returned(Runner *self, Record *operation, PyObject *outputs, PyObject *pending)
{
    PyObject *work = NULL;
    if (pending == Py_None) {
        work = work_of((PyObject *)operation, outputs);
    }
    else if (pending != NULL) {
        work = PyObject_CallMethodObjArgs(self->group, name_work, operation, outputs, pending, NULL);
    }
    Py_XDECREF(pending);
    Py_XDECREF(operation);
    return work;
}

/* Return the limit of a call in nanoseconds; -1 with an exception. */
static inline long long
runner_limit(Runner *self, PyObject *timeout)
{
    if (timeout == Py_None) {
        return self->state->limit_ns;
    }
    if (PyFloat_CheckExact(timeout) && PyFloat_AS_DOUBLE(timeout) > 0 && PyFloat_AS_DOUBLE(timeout) < 1e9) {
        return (long long)(PyFloat_AS_DOUBLE(timeout) * 1e9); /* as `seconds` has it */
    }
    PyObject *limit = PyObject_CallOneArg(self->seconds, timeout);
    if (limit == NULL) {
        return -1;
    }
    double limit_s = PyFloat_AsDouble(limit);
    Py_DECREF(limit);
    return PyErr_Occurred() ? -1 : (long long)(limit_s * 1e9);
}

/* Begin the record of a call: plan, inputs, outputs, async_op, timeout. */
static inline Record *
runner_begin(Runner *self, PyObject *const *args, long long limit_ns)
{
    PyTypeObject *type = (PyTypeObject *)self->operation_type;
    return record_begin(type, ((Plan *)args[0])->signature, limit_ns, args[3] == Py_True, self->here);
}

int
runner_takes_calls(Runner *self)
{
    const GroupState *state = self->state;
    return state->fault == Py_None && PyDict_GET_SIZE(state->batches) == 0 && self->group != NULL;
}

/* Whether the group neither refuses nor defers a call, and its arguments have the usual form. */
static inline int
runner_is_usual(Runner *self, PyObject *const *args, Py_ssize_t count)
{
    return count == 5 && Py_IS_TYPE(args[0], &Plan_Type) && runner_takes_calls(self);
}

/* Leave a call to the counterpart in Python. */
static PyObject *
runner_otherwise(PyObject *otherwise, PyObject *const *args, Py_ssize_t count)
{
    if (otherwise == NULL) {
        PyErr_SetString(PyExc_ReferenceError, "the group is gone");
        return NULL;
    }
    return PyObject_Vectorcall(otherwise, args, count, NULL);
}

/* Queue an asynchronous collective. */
static PyObject *
runner_issue(Runner *self, PyObject *const *args)
{
    long long limit_ns = runner_limit(self, args[4]);
    Record *operation = limit_ns < 0 ? NULL : runner_begin(self, args, limit_ns);
    if (operation == NULL) {
        return NULL;
    }
    if (runner_notice(self, operation) < 0) {
        Py_DECREF(operation);
        return NULL;
    }
    PyObject *issuing = Py_NewRef(self->issuing);
    PyObject *left = PyTuple_GET_ITEM(issuing, ISSUING_LEFT);
    PyObject *work = async_call_issue(self, (Plan *)args[0], operation, args[1], args[2], left);
    Py_DECREF(issuing);
    Py_DECREF(operation);
    return work;
}

/* Pass an operation to the backend, which can read the addresses of its tensors meanwhile. */
static inline PyObject *
runner_execute_at(Runner *self, PyObject *const *args, Record *operation, const Places *places)
{
    operation->places = (uintptr_t)places;
    PyObject *pending = runner_execute(self, (Plan *)args[0], operation, args[1], args[2]);
    operation->places = 0;
    return pending;
}

/* Run a collective in the calling thread if the group is idle and the call is synchronous, or its backend returns
   before the operation ends. Queue another asynchronous one. Python runs the rest. */
static PyObject *
runner_run_at(Runner *self, PyObject *const *args, Py_ssize_t count, const Places *places)
{
    int usual = runner_is_usual(self, args, count);
    if (usual && args[3] == Py_True && self->issuing != NULL) {
        return runner_issue(self, args);
    }
    if (!usual || (args[3] != Py_False && !(args[3] == Py_True && self->natively_async))) {
        return runner_otherwise(self->otherwise, args, count);
    }
    long long limit_ns = runner_limit(self, args[4]), seq = limit_ns < 0 ? 0 : queue_take(self->queue);
    if (seq == 0) {
        return limit_ns < 0 ? NULL : runner_otherwise(self->otherwise, args, count);
    }
    PyObject *pending = NULL;
    Py_INCREF(self);
    Record *operation = runner_begin(self, args, limit_ns);
    if (operation != NULL) {
        operation->seq = seq;
        pending = runner_execute_at(self, args, operation, places);
    }
    if (runner_left(self, queue_give_back(self->queue)) < 0) {
        Py_CLEAR(pending);
    }
    PyObject *work = runner_returned(self, operation, args[2], pending);
    Py_DECREF(self);
    return work;
}

/* Run or start a point-to-point operation, beside the queue. */
static PyObject *
runner_run_beside_at(Runner *self, PyObject *const *args, Py_ssize_t count, const Places *places)
{
    if (!runner_is_usual(self, args, count) || !PyBool_Check(args[3])) {
        return runner_otherwise(self->otherwise_beside, args, count);
    }
    long long limit_ns = runner_limit(self, args[4]);
    Record *operation = limit_ns < 0 ? NULL : runner_begin(self, args, limit_ns);
    if (operation == NULL) {
        return NULL;
    }
    Py_INCREF(self);
    operation->seq = ++self->queue->messages;
    self->queue->beside++;
    PyObject *pending = runner_execute_at(self, args, operation, places);
    self->queue->beside--;
    if (runner_left(self, 0) < 0) {
        Py_CLEAR(pending);
    }
    PyObject *work = runner_returned(self, operation, args[2], pending);
    Py_DECREF(self);
    return work;
}

static PyObject *
runner_run(Runner *self, PyObject *const *args, Py_ssize_t count)
{
    return runner_run_at(self, args, count, NULL);
}

static PyObject *
runner_run_beside(Runner *self, PyObject *const *args, Py_ssize_t count)
{
    return runner_run_beside_at(self, args, count, NULL);
}

Runner *
runner_of(PyObject *method, int beside)
{
    PyCFunction own = (PyCFunction)(void (*)(void))(beside ? runner_run_beside : runner_run);
    return PyCFunction_CheckExact(method) && PyCFunction_GET_FUNCTION(method) == own
               ? (Runner *)PyCFunction_GET_SELF(method)
               : NULL;
}

PyObject *
runner_call(Runner *self, int beside, PyObject *const *args, const Places *places)
{
    return (beside ? runner_run_beside_at : runner_run_at)(self, args, 5, places);
}

static PyObject *
runner_get_issuing(Runner *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->issuing != NULL ? self->issuing : Py_None);
}

/* Set it once: async calls use it. */
static int
runner_set_issuing(Runner *self, PyObject *value, void *Py_UNUSED(closure))
{
    if (value == NULL || !PyTuple_Check(value) || PyTuple_GET_SIZE(value) != ISSUING_PARTS ||
        !PySet_Check(PyTuple_GET_ITEM(value, ISSUING_IN_FLIGHT))) {
        PyErr_Format(PyExc_TypeError, "issuing must be a set and two callables, got %R", value ? value : Py_None);
        return -1;
    }
    if (self->issuing == NULL) {
        self->issuing = Py_NewRef(value);
    }
    return 0;
}

static PyGetSetDef runner_properties[] = {
    {"issuing", (getter)runner_get_issuing, (setter)runner_set_issuing, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef runner_members[] = {
    {"here", T_OBJECT_EX, offsetof(Runner, here), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef runner_methods[] = {
    {"run", (PyCFunction)(void (*)(void))runner_run, METH_FASTCALL,
     "run(plan, inputs, outputs, async_op, timeout)\n--\n\nRun or issue a collective."},
    {"run_beside", (PyCFunction)(void (*)(void))runner_run_beside, METH_FASTCALL,
     "run_beside(plan, inputs, outputs, async_op, timeout)\n--\n\nRun or issue a point-to-point operation."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Runner_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.OperationRunner",
    .tp_doc = "The runner of a group's operations.",
    .tp_basicsize = sizeof(Runner),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = runner_new,
    .tp_dealloc = (destructor)runner_dealloc,
    .tp_traverse = (traverseproc)runner_traverse,
    .tp_clear = (inquiry)runner_clear,
    .tp_members = runner_members,
    .tp_getset = runner_properties,
    .tp_methods = runner_methods,
};

int
runner_ready(PyObject *module)
{
    static const Name names[] = {
        {&field_started.name, "operation_started"},
        {&field_finished.name, "operation_finished"},
        {&name_raised, "raised"},
        {&name_profiler, "profiler"},
        {&name_profiled, "profiled"},
        {&name_runs, "_is_profiler_enabled"},
        {&name_stumbled, "_fail_inline"},
        {&name_told, "_tell_hooks"},
        {&name_hand_on, "hand_on"},
        {&name_release, "release"},
        {&name_work, "_work"},
    };
    if (intern(names, Py_ARRAY_LENGTH(names)) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &Runner_Type);
}
