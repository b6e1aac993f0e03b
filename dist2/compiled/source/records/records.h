/* Declarations that the files of dist2.compiled._native.records share. */

#ifndef DIST2_RECORDS_H
#define DIST2_RECORDS_H

#include "exceptions.h"
#include "lanes.h"
#include "names.h"
#include "places.h"
#include "waiting.h"

#include <pthread.h>

#ifdef Py_GIL_DISABLED
#error "needs the interpreter lock: without it the counterparts in Python run, which take locks"
#endif

/* The record of one call: records.c. */
typedef struct {
    PyObject_HEAD
    PyObject *signature;
    PyObject *error;
    PyObject *code;
    PyObject *weakrefs;
    long long seq;
    long long deadline_ns;
    long long created_ns;
    long long started_ns;
    long long finished_ns;
    unsigned long long places; /* the address of Places while the call is under way, or 0 */
    int instruction;
    int source;
    char is_async;
} Record;

/* The plan of all calls of one signature: plans.c. */
typedef struct {
    PyObject_HEAD
    PyObject *signature;
    PyObject *execute;
    const Lane *lane; /* of `execute`; NULL if it has none */
} Plan;

/* Calls inside a group, and the numbers of its collectives: queue_state.c. Atomic fields are also read without the
   interpreter lock. */
typedef struct {
    PyObject_HEAD
    long long seq;
    long long messages;
    atomic_int queued;
    atomic_int busy;
    atomic_int ending;
    atomic_int asleep;        /* the queue's thread sleeps */
    atomic_llong ready_ns;    /* time since when the oldest queued job can run */
    atomic_llong patience_ns; /* for how long other threads may run it first */
    int beside;
    int drainers;
    char retired;
    pthread_t holder; /* the thread that took the turn last, and has it while `busy` */
} QueueState;

/* The fault, hooks and timeout of a group: queue_state.c. */
typedef struct {
    PyObject_HEAD
    PyObject *fault;
    PyObject *hooks;
    PyObject *batches;
    long long limit_ns;
    char aborted;
} GroupState;

/* How a group's operations are run: runner.c. */
typedef struct {
    PyObject_HEAD
    PyObject *group;
    PyObject *otherwise;
    PyObject *otherwise_beside;
    PyObject *dispatch;
    PyObject *raised;
    PyObject *profiler; /* names in torch's profiler */
    PyObject *operation_type;
    PyObject *seconds;
    PyObject *here;
    PyObject *plans;
    PyObject *rank;
    PyObject *issuing; /* NULL before the group's first asynchronous collective: see _records.pyi */
    GroupState *state;
    QueueState *queue;
    int natively_async; /* the backend returns before the end of an asynchronous operation: no thread has to run it */
} Runner;

enum { ISSUING_IN_FLIGHT, ISSUING_LEFT, ISSUING_COMPLETION, ISSUING_PARTS };

static inline PyObject *
runner_in_flight(Runner *self)
{
    return PyTuple_GET_ITEM(self->issuing, ISSUING_IN_FLIGHT);
}

static inline PyObject *
runner_completion_type(Runner *self)
{
    return PyTuple_GET_ITEM(self->issuing, ISSUING_COMPLETION);
}

extern PyTypeObject Record_Type, Plan_Type, QueueState_Type, GroupState_Type;

/* Return the runner of a bound method `Runner.run`, or, beside the queue, `Runner.run_beside`; NULL for other
   methods. */
Runner *runner_of(PyObject *method, int beside);

/* Run one of these methods, with the known addresses of tensors. */
PyObject *runner_call(Runner *self, int beside, PyObject *const *args, const Places *places);

/* Take the turn if no thread has it and no job is queued: return the operation's number, or 0. */
long long queue_take(QueueState *self);

/* Release the turn; return whether a thread waits for that. */
int queue_give_back(QueueState *self);

/* Make the record of a call that begins now; if `here` is None, the calling frame is not recorded. */
Record *record_begin(PyTypeObject *type, PyObject *signature, long long limit_ns, int is_async, PyObject *here);

/* Make the record of a call that began at a given time. */
Record *record_begun_at(PyTypeObject *type, PyObject *signature, long long created_ns, long long limit_ns, int is_async,
                        PyObject *here);

/* Call each callable of a tuple with an operation. `failed(callable, error)` gets any Exception that one raises. */
int tell_all(PyObject *told, PyObject *operation, PyObject *failed);

/* Return a Work of an operation that is complete; call `adopt` first. */
PyObject *work_of(PyObject *operation, PyObject *outputs);

/* Return a Work of an operation that is not complete; `pending` is its completion and its helper. */
PyObject *work_pending(PyObject *operation, PyObject *outputs, PyObject *pending);

/* Remove the helper of a Work. */
void work_forget_helper(PyObject *work);

/* Tell instruments that an operation begins, and pass it to the backend; return the backend's result. */
PyObject *runner_start(Runner *self, Plan *plan, Record *operation, PyObject *inputs, PyObject *outputs);

/* Report the end of a complete operation. */
int runner_finished(Runner *self, Record *operation);

/* Tell instruments that an operation begins; -1 with an exception. */
int runner_started(Runner *self, Record *operation);

/* Let the group report an operation that raised; the exception is raised again. */
void runner_stumbled(Runner *self, Record *operation, PyObject *inputs, PyObject *outputs);

/* Whether a group neither refuses nor defers calls. */
int runner_takes_calls(Runner *self);

/* After a thread has left: if `waited`, wake the threads that wait for that; after an abort the last thread cleans
   up. An exception that is already set stays set. -1 if this raised one. */
int runner_left(Runner *self, int waited);

/* Send the tensor at an address by the lane of a plan, and return the Work; NULL without an exception if nothing was
   done: sends.c. */
PyObject *runner_send(Runner *self, Plan *plan, PyObject *tensor, uintptr_t address, int is_async);

/* Queue an asynchronous collective; return its Work. `left` is called after each release of the queue. */
PyObject *async_call_issue(Runner *runner, Plan *plan, Record *operation, PyObject *inputs, PyObject *outputs,
                       PyObject *left);

/* adopt(work_type, prepare): see _records.pyi. */
PyObject *works_adopt(PyObject *module, PyObject *const *args, Py_ssize_t count);

/* find_marks(samples): see _records.pyi; keys.c. */
PyObject *find_marks(PyObject *module, PyObject *samples);

/* Add the types of a file to the module; -1 with an exception. */
int counters_ready(PyObject *module);
int counting_ready(PyObject *module);
int tallying_ready(PyObject *module);
int ring_ready(PyObject *module);
int plans_ready(PyObject *module);
int runner_ready(PyObject *module);
int async_calls_ready(PyObject *module);
int overloads_ready(PyObject *module);
int fast_methods_ready(PyObject *module);
int queue_ready(PyObject *module);

#endif
