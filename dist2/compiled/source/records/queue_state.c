/* `QueueState`: the turn and the numbers of a group's operations. `GroupState`: what its calls depend on. */

#include "records.h"

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PATIENCE_NS 250000 /* after this time without a waiting caller, the queue's thread runs a job */
#define ALERT_NS 1000000  /* how long the queue's thread polls for the next job before it sleeps */

/* ---- QueueState: calls inside a group, and the numbers of collectives ---- */

/* Tell the queue's thread that a job is ready to run. The thread leaves it to other threads for `patience_ns`. */
static void
rouse(QueueState *self, long long patience_ns)
{
    atomic_store_explicit(&self->ready_ns, monotonic_ns(), memory_order_relaxed);
    atomic_store_explicit(&self->patience_ns, patience_ns, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* publish the queued job or the returned turn before reading `asleep` */
    if (atomic_load_explicit(&self->asleep, memory_order_relaxed)) {
        atomic_store_explicit(&self->asleep, 0, memory_order_relaxed);
        syscall(SYS_futex, &self->asleep, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
}

static inline int
is_set(atomic_int *flag)
{
    return atomic_load_explicit(flag, memory_order_relaxed);
}

static inline void
set(atomic_int *flag, int value)
{
    atomic_store_explicit(flag, value, memory_order_relaxed);
}

/* Whether no thread has the turn and no job is queued. */
static inline int
is_idle(QueueState *self)
{
    return !is_set(&self->busy) && !is_set(&self->queued);
}

/* Whether no call is inside the group, and none is queued. */
static inline int
is_empty(QueueState *self)
{
    return is_idle(self) && !self->beside;
}

/* Remove the oldest job from the queue, if there is one, for the thread that has the turn or takes it now. */
static inline int
take_next(QueueState *self)
{
    int queued = is_set(&self->queued);
    if (queued) {
        set(&self->queued, queued - 1);
    }
    return queued > 0;
}

/* Let the calling thread take the free turn. */
static inline void
take_turn(QueueState *self)
{
    self->holder = pthread_self(); /* first, for a signal handler that finds it busy */
    set(&self->busy, 1);
}

long long
queue_take(QueueState *self)
{
    if (!is_idle(self)) {
        return 0;
    }
    take_turn(self);
    return ++self->seq;
}

/* Release the turn, for the queue's thread to take it after a while; return whether a thread waits for that. */
static inline int
give_back(QueueState *self, long long patience_ns)
{
    set(&self->busy, 0);
    if (is_set(&self->queued)) {
        rouse(self, patience_ns);
        return 1;
    }
    return self->drainers;
}

int
queue_give_back(QueueState *self)
{
    return give_back(self, 0);
}

static PyObject *
queue_enter(QueueState *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromLongLong(queue_take(self));
}

static PyObject *
queue_left(QueueState *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(queue_give_back(self));
}

static PyObject *
queue_enter_beside(QueueState *self, PyObject *Py_UNUSED(none))
{
    self->beside++;
    Py_RETURN_NONE;
}

static PyObject *
queue_number_message(QueueState *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromLongLong(++self->messages);
}

static PyObject *
queue_leave_beside(QueueState *self, PyObject *Py_UNUSED(none))
{
    self->beside--;
    Py_RETURN_NONE;
}

static PyObject *
queue_issue(QueueState *self, PyObject *Py_UNUSED(none))
{
    set(&self->queued, is_set(&self->queued) + 1);
    if (!is_set(&self->busy)) { /* else the thread that has the turn runs it when it leaves */
        rouse(self, PATIENCE_NS);
    }
    return PyLong_FromLongLong(++self->seq);
}

static PyObject *
queue_enter_queued(QueueState *self, PyObject *Py_UNUSED(none))
{
    int taken = !is_set(&self->busy) && take_next(self);
    if (taken) {
        take_turn(self);
    }
    return PyBool_FromLong(taken);
}

static PyObject *
queue_pass_on(QueueState *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(take_next(self));
}

static PyObject *
queue_lay_down(QueueState *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(give_back(self, PATIENCE_NS));
}

static PyObject *
queue_hurry(QueueState *self, PyObject *Py_UNUSED(none))
{
    if (is_set(&self->queued) && !is_set(&self->busy)) {
        rouse(self, 0);
    }
    Py_RETURN_NONE;
}

static PyObject *
queue_end(QueueState *self, PyObject *Py_UNUSED(none))
{
    set(&self->ending, 1);
    rouse(self, 0);
    Py_RETURN_NONE;
}

/* ---- Awaiting jobs, without the interpreter lock ---- */

/* Sleep for some time. */
static void
nap(long long nap_ns)
{
    struct timespec time = {nap_ns / 1000000000, nap_ns % 1000000000};
    nanosleep(&time, NULL);
}

/* Sleep until a wake-up, or for some time; return whether there was one, or a job is queued. */
static int
sleep_until_roused(QueueState *self, long long idle_ns)
{
    struct timespec time = {idle_ns / 1000000000, idle_ns % 1000000000};
    set(&self->asleep, 1);
    atomic_thread_fence(memory_order_seq_cst); /* publish `asleep` before reading the queue */
    if (is_set(&self->queued) ? !is_set(&self->busy) : is_set(&self->ending)) {
        set(&self->asleep, 0);
        return 1;
    }
    syscall(SYS_futex, &self->asleep, FUTEX_WAIT_PRIVATE, 1, &time, NULL, 0);
    if (is_set(&self->asleep) == 0 || is_set(&self->queued)) {
        return 1;
    }
    set(&self->asleep, 0);
    return 0;
}

/* Let this thread sleep with little timer slack: the kernel may otherwise double the time. */
static void
sleep_lightly(void)
{
    static _Thread_local char does;
    if (!does) {
        does = 1;
        prctl(PR_SET_TIMERSLACK, 1000UL);
    }
}

/* Wait until a queued job is ready and no other thread has come to run it; 0 if none is for some time. */
static int
await_job(QueueState *self, long long idle_ns)
{
    for (;;) {
        int queued = is_set(&self->queued);
        long long ready_ns = atomic_load_explicit(&self->ready_ns, memory_order_relaxed), now = monotonic_ns();
        if (queued && !is_set(&self->busy)) {
            long long left_ns = ready_ns + atomic_load_explicit(&self->patience_ns, memory_order_relaxed) - now;
            if (left_ns <= 0) {
                return 1;
            }
            nap(left_ns);
        }
        else if (!queued && is_set(&self->ending)) {
            return 0;
        }
        else if (now - ready_ns < ALERT_NS) {
            nap(PATIENCE_NS);
        }
        else if (!sleep_until_roused(self, idle_ns)) {
            return 0;
        }
    }
}

static PyObject *
queue_await_job(QueueState *self, PyObject *idle)
{
    double idle_s = PyFloat_AsDouble(idle);
    if (idle_s == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    Lock lock = {NULL};
    give_up_lock(&lock);
    sleep_lightly();
    int found = await_job(self, (long long)(idle_s * 1e9));
    take_lock(&lock);
    return PyBool_FromLong(found);
}

/* ---- The rest ---- */

static PyObject *
queue_close(QueueState *self, PyObject *Py_UNUSED(none))
{
    if (!is_empty(self) || self->retired) {
        Py_RETURN_FALSE;
    }
    self->retired = 1;
    Py_RETURN_TRUE;
}

static PyObject *
queue_idle(QueueState *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(is_idle(self));
}

static PyObject *
queue_is_held_here(QueueState *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(is_set(&self->busy) && pthread_equal(self->holder, pthread_self()));
}

static PyObject *
queue_empty(QueueState *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(is_empty(self));
}

static PyMemberDef queue_members[] = {
    {"seq", T_LONGLONG, offsetof(QueueState, seq), READONLY, NULL},
    {"messages", T_LONGLONG, offsetof(QueueState, messages), READONLY, NULL},
    {"drainers", T_INT, offsetof(QueueState, drainers), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef queue_properties[] = {
    {"idle", (getter)queue_idle, NULL, NULL, NULL},
    {"is_held_here", (getter)queue_is_held_here, NULL, NULL, NULL},
    {"empty", (getter)queue_empty, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef queue_methods[] = {
    {"enter", (PyCFunction)queue_enter, METH_NOARGS, NULL},
    {"left", (PyCFunction)queue_left, METH_NOARGS, NULL},
    {"enter_beside", (PyCFunction)queue_enter_beside, METH_NOARGS, NULL},
    {"leave_beside", (PyCFunction)queue_leave_beside, METH_NOARGS, NULL},
    {"number_message", (PyCFunction)queue_number_message, METH_NOARGS, NULL},
    {"issue", (PyCFunction)queue_issue, METH_NOARGS, NULL},
    {"enter_queued", (PyCFunction)queue_enter_queued, METH_NOARGS, NULL},
    {"pass_on", (PyCFunction)queue_pass_on, METH_NOARGS, NULL},
    {"lay_down", (PyCFunction)queue_lay_down, METH_NOARGS, NULL},
    {"hurry", (PyCFunction)queue_hurry, METH_NOARGS, NULL},
    {"end", (PyCFunction)queue_end, METH_NOARGS, NULL},
    {"await_job", (PyCFunction)queue_await_job, METH_O, NULL},
    {"close", (PyCFunction)queue_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject QueueState_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.QueueState",
    .tp_doc = "Who is inside, and the numbers of collectives.",
    .tp_basicsize = sizeof(QueueState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = queue_members,
    .tp_getset = queue_properties,
    .tp_methods = queue_methods,
};

/* ---- GroupState: the fault, hooks and timeout of a group ---- */

static PyObject *
group_state_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"limit_ns", NULL};
    long long limit_ns;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "L:GroupState", names, &limit_ns)) {
        return NULL;
    }
    GroupState *self = (GroupState *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->limit_ns = limit_ns;
    self->fault = Py_NewRef(Py_None);
    self->hooks = PyTuple_New(0);
    self->batches = PyDict_New();
    if (self->hooks == NULL || self->batches == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
group_state_traverse(GroupState *self, visitproc visit, void *arg)
{
    Py_VISIT(self->fault);
    Py_VISIT(self->hooks);
    Py_VISIT(self->batches);
    return 0;
}

static int
group_state_clear(GroupState *self)
{
    Py_CLEAR(self->fault);
    Py_CLEAR(self->hooks);
    Py_CLEAR(self->batches);
    return 0;
}

static void
group_state_dealloc(GroupState *self)
{
    PyObject_GC_UnTrack(self);
    group_state_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef group_state_members[] = {
    {"fault", T_OBJECT_EX, offsetof(GroupState, fault), 0, NULL},
    {"hooks", T_OBJECT_EX, offsetof(GroupState, hooks), 0, NULL},
    {"batches", T_OBJECT_EX, offsetof(GroupState, batches), READONLY, NULL},
    {"limit_ns", T_LONGLONG, offsetof(GroupState, limit_ns), 0, NULL},
    {"aborted", T_BOOL, offsetof(GroupState, aborted), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject GroupState_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.GroupState",
    .tp_doc = "What a group may do.",
    .tp_basicsize = sizeof(GroupState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = group_state_new,
    .tp_dealloc = (destructor)group_state_dealloc,
    .tp_traverse = (traverseproc)group_state_traverse,
    .tp_clear = (inquiry)group_state_clear,
    .tp_members = group_state_members,
};

int
queue_ready(PyObject *module)
{
    if (PyModule_AddType(module, &QueueState_Type) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &GroupState_Type);
}
