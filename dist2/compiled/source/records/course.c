/* The course of a collective: refused or begun, its turn, the instruments, the backend, the end; asynchronous ones
   have their turn later: errands.c.

   `Course` is the counterpart of `OperationRunner.run` and `OperationRunner.run_p2p` in dist2/runner.py, to which it leaves what is
   not the usual case. */

#include "records.h"

static Field field_started, field_finished;
static PyObject *name_raised;
static PyObject *name_stumbled, *name_told, *name_hand_on, *name_release, *name_work;

static PyObject *
course_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"group", "otherwise", "otherwise_beside", "standing",
                            "turns", "dispatch",  "operation_type",   "seconds",  "here",
                            "plans", "rank",      NULL};
    PyObject *group, *otherwise, *otherwise_beside, *standing, *turns, *dispatch, *operation_type;
    PyObject *seconds, *here, *plans, *rank;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOO!O!OO!OOOO!:Course", names, &group, &otherwise,
                                     &otherwise_beside, &Standing_Type, &standing, &Turns_Type, &turns, &dispatch,
                                     &PyType_Type, &operation_type, &seconds, &here, &plans, &PyLong_Type, &rank)) {
        return NULL;
    }
    if (!PyType_IsSubtype((PyTypeObject *)operation_type, &Record_Type)) {
        return PyErr_Format(PyExc_TypeError, "operation_type must be a kind of Record, got %R", operation_type);
    }
    Course *self = (Course *)type->tp_alloc(type, 0);
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
    self->standing = (Standing *)Py_NewRef(standing);
    self->turns = (Turns *)Py_NewRef(turns);
    self->raised = PyObject_GetAttr(dispatch, name_raised);
    if (self->raised == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
course_traverse(Course *self, visitproc visit, void *arg)
{
    Py_VISIT(self->group);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->otherwise_beside);
    Py_VISIT(self->dispatch);
    Py_VISIT(self->raised);
    Py_VISIT(self->operation_type);
    Py_VISIT(self->seconds);
    Py_VISIT(self->here);
    Py_VISIT(self->plans);
    Py_VISIT(self->issuing);
    Py_VISIT(self->standing);
    Py_VISIT(self->turns);
    return 0;
}

/* Break cycles: only the group and the plans lead back here. The rest stays, for calls that a destructor may make. */
static int
course_clear(Course *self)
{
    Py_CLEAR(self->group);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->otherwise_beside);
    Py_CLEAR(self->plans);
    return 0;
}

static void
course_dealloc(Course *self)
{
    PyObject_GC_UnTrack(self);
    course_clear(self);
    Py_XDECREF(self->issuing);
    Py_XDECREF(self->dispatch);
    Py_XDECREF(self->raised);
    Py_XDECREF(self->operation_type);
    Py_XDECREF(self->seconds);
    Py_XDECREF(self->here);
    Py_XDECREF(self->rank);
    Py_XDECREF(self->standing);
    Py_XDECREF(self->turns);
    Py_TYPE(self)->tp_free(self);
}

/* Tell the instruments by what the dispatcher has in a field. */
static int
course_tell(Course *self, Field *field, PyObject *operation)
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
course_stumbled(Course *self, Record *operation, PyObject *inputs, PyObject *outputs)
{
    PyObject *error = raised();
    PyObject *result = PyObject_CallMethodObjArgs(self->group, name_stumbled, operation, error, inputs, outputs, NULL);
    Py_DECREF(error);
    if (result != NULL) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "_fail_inline returned");
    }
}

int
course_finished(Course *self, Record *operation)
{
    operation->finished_ns = monotonic_ns();
    if (course_tell(self, &field_finished, (PyObject *)operation) < 0) {
        return -1;
    }
    if (self->standing->hooks == NULL || PyObject_IsTrue(self->standing->hooks) == 0) {
        return 0;
    }
    PyObject *result = PyObject_CallMethodObjArgs(self->group, name_told, operation, NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

int
course_started(Course *self, Record *operation)
{
    return course_tell(self, &field_started, (PyObject *)operation);
}

PyObject *
course_start(Course *self, Plan *plan, Record *operation, PyObject *inputs, PyObject *outputs)
{
    if (course_started(self, operation) < 0) {
        return NULL;
    }
    operation->started_ns = monotonic_ns();
    PyObject *arguments[] = {NULL, (PyObject *)operation, inputs, outputs};
    return PyObject_Vectorcall(plan->execute, arguments + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* Hand an operation to the backend; where it completes here, tell what became of it. Return what it returned. */
static PyObject *
course_execute(Course *self, Plan *plan, Record *operation, PyObject *inputs, PyObject *outputs)
{
    if (course_started(self, operation) < 0) {
        return NULL;
    }
    operation->started_ns = operation->created_ns;
    PyObject *arguments[] = {NULL, (PyObject *)operation, inputs, outputs};
    PyObject *pending = PyObject_Vectorcall(plan->execute, arguments + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    if (pending == NULL) {
        course_stumbled(self, operation, inputs, outputs);
        return NULL;
    }
    if (pending == Py_None && course_finished(self, operation) < 0) {
        Py_CLEAR(pending);
    }
    return pending;
}

int
course_left(Course *self, int waited)
{
    if (!waited && !self->standing->aborted) {
        return 0;
    }
    PyObject *error = PyErr_Occurred() ? raised() : NULL;
    PyObject *result = Py_NewRef(Py_None);
    if (waited) {
        Py_SETREF(result, PyObject_CallMethodNoArgs((PyObject *)self->turns, name_hand_on));
    }
    if (result != NULL && self->standing->aborted) {
        Py_SETREF(result, PyObject_CallMethodNoArgs(self->group, name_release));
    }
    Py_XDECREF(result);
    if (result == NULL || error == NULL) {
        Py_XDECREF(error);
        return result == NULL ? -1 : 0;
    }
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(Py_NewRef(Py_TYPE(error)), error, PyException_GetTraceback(error));
#endif
    return 0;
}

/* Return the Work of an operation that the backend completed, or completes later. Takes over both. */
static PyObject *
course_returned(Course *self, Record *operation, PyObject *outputs, PyObject *pending)
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
course_limit(Course *self, PyObject *timeout)
{
    if (timeout == Py_None) {
        return self->standing->limit_ns;
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
course_begin(Course *self, PyObject *const *args, long long limit_ns)
{
    PyTypeObject *type = (PyTypeObject *)self->operation_type;
    return record_begin(type, ((Plan *)args[0])->signature, limit_ns, args[3] == Py_True, self->here);
}

int
course_takes_calls(Course *self)
{
    const Standing *standing = self->standing;
    return standing->fault == Py_None && PyDict_GET_SIZE(standing->batches) == 0 && self->group != NULL;
}

/* Whether a call is none that a group refuses or puts off. */
static inline int
course_is_usual(Course *self, PyObject *const *args, Py_ssize_t count)
{
    return count == 5 && Py_IS_TYPE(args[0], &Plan_Type) && course_takes_calls(self);
}

/* Leave a call to the counterpart in Python. */
static PyObject *
course_otherwise(PyObject *otherwise, PyObject *const *args, Py_ssize_t count)
{
    if (otherwise == NULL) {
        PyErr_SetString(PyExc_ReferenceError, "the group is gone");
        return NULL;
    }
    return PyObject_Vectorcall(otherwise, args, count, NULL);
}

/* Queue an asynchronous collective. */
static PyObject *
course_issue(Course *self, PyObject *const *args)
{
    long long limit_ns = course_limit(self, args[4]);
    Record *operation = limit_ns < 0 ? NULL : course_begin(self, args, limit_ns);
    if (operation == NULL) {
        return NULL;
    }
    PyObject *issuing = Py_NewRef(self->issuing);
    PyObject *left = PyTuple_GET_ITEM(issuing, ISSUING_LEFT);
    PyObject *work = errand_issue(self, (Plan *)args[0], operation, args[1], args[2], left);
    Py_DECREF(issuing);
    Py_DECREF(operation);
    return work;
}

/* Hand an operation to the backend, which may read where its tensors lie meanwhile. */
static inline PyObject *
course_execute_at(Course *self, PyObject *const *args, Record *operation, const Places *places)
{
    operation->places = (uintptr_t)places;
    PyObject *pending = course_execute(self, (Plan *)args[0], operation, args[1], args[2]);
    operation->places = 0;
    return pending;
}

/* Run a synchronous collective if nobody is inside or queued, or queue one; others are left to Python. */
static PyObject *
course_run_at(Course *self, PyObject *const *args, Py_ssize_t count, const Places *places)
{
    int usual = course_is_usual(self, args, count);
    if (usual && args[3] == Py_True && self->issuing != NULL) {
        return course_issue(self, args);
    }
    if (!usual || args[3] != Py_False) {
        return course_otherwise(self->otherwise, args, count);
    }
    long long limit_ns = course_limit(self, args[4]), seq = limit_ns < 0 ? 0 : turns_take(self->turns);
    if (seq == 0) {
        return limit_ns < 0 ? NULL : course_otherwise(self->otherwise, args, count);
    }
    PyObject *pending = NULL;
    Py_INCREF(self);
    Record *operation = course_begin(self, args, limit_ns);
    if (operation != NULL) {
        operation->seq = seq;
        pending = course_execute_at(self, args, operation, places);
    }
    if (course_left(self, turns_give_back(self->turns)) < 0) {
        Py_CLEAR(pending);
    }
    PyObject *work = course_returned(self, operation, args[2], pending);
    Py_DECREF(self);
    return work;
}

/* Run or start a point-to-point operation, beside the lane. */
static PyObject *
course_run_beside_at(Course *self, PyObject *const *args, Py_ssize_t count, const Places *places)
{
    if (!course_is_usual(self, args, count) || !PyBool_Check(args[3])) {
        return course_otherwise(self->otherwise_beside, args, count);
    }
    long long limit_ns = course_limit(self, args[4]);
    Record *operation = limit_ns < 0 ? NULL : course_begin(self, args, limit_ns);
    if (operation == NULL) {
        return NULL;
    }
    Py_INCREF(self);
    operation->seq = ++self->turns->messages;
    self->turns->beside++;
    PyObject *pending = course_execute_at(self, args, operation, places);
    self->turns->beside--;
    if (course_left(self, 0) < 0) {
        Py_CLEAR(pending);
    }
    PyObject *work = course_returned(self, operation, args[2], pending);
    Py_DECREF(self);
    return work;
}

static PyObject *
course_run(Course *self, PyObject *const *args, Py_ssize_t count)
{
    return course_run_at(self, args, count, NULL);
}

static PyObject *
course_run_beside(Course *self, PyObject *const *args, Py_ssize_t count)
{
    return course_run_beside_at(self, args, count, NULL);
}

Course *
course_of(PyObject *method, int beside)
{
    PyCFunction own = (PyCFunction)(void (*)(void))(beside ? course_run_beside : course_run);
    return PyCFunction_CheckExact(method) && PyCFunction_GET_FUNCTION(method) == own
               ? (Course *)PyCFunction_GET_SELF(method)
               : NULL;
}

PyObject *
course_call(Course *self, int beside, PyObject *const *args, const Places *places)
{
    return (beside ? course_run_beside_at : course_run_at)(self, args, 5, places);
}

static PyObject *
course_get_issuing(Course *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->issuing != NULL ? self->issuing : Py_None);
}

/* Set it once: errands use it. */
static int
course_set_issuing(Course *self, PyObject *value, void *Py_UNUSED(closure))
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

static PyGetSetDef course_properties[] = {
    {"issuing", (getter)course_get_issuing, (setter)course_set_issuing, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef course_members[] = {
    {"here", T_OBJECT_EX, offsetof(Course, here), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef course_methods[] = {
    {"run", (PyCFunction)(void (*)(void))course_run, METH_FASTCALL,
     "run(plan, inputs, outputs, async_op, timeout)\n--\n\nRun or issue a collective."},
    {"run_beside", (PyCFunction)(void (*)(void))course_run_beside, METH_FASTCALL,
     "run_beside(plan, inputs, outputs, async_op, timeout)\n--\n\nRun or issue a point-to-point operation."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Course_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._records.Course",
    .tp_doc = "The course of a group's operations.",
    .tp_basicsize = sizeof(Course),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = course_new,
    .tp_dealloc = (destructor)course_dealloc,
    .tp_traverse = (traverseproc)course_traverse,
    .tp_clear = (inquiry)course_clear,
    .tp_members = course_members,
    .tp_getset = course_properties,
    .tp_methods = course_methods,
};

int
course_ready(PyObject *module)
{
    static const Name names[] = {
        {&field_started.name, "operation_started"},
        {&field_finished.name, "operation_finished"},
        {&name_raised, "raised"},
        {&name_stumbled, "_fail_inline"},
        {&name_told, "_tell_hooks"},
        {&name_hand_on, "hand_on"},
        {&name_release, "release"},
        {&name_work, "_work"},
    };
    if (intern(names, Py_ARRAY_LENGTH(names)) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &Course_Type);
}
