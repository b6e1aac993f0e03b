/* What the files of dist2.compiled._records share. */

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

/* What is known about all calls of one signature: plans.c. */
typedef struct {
    PyObject_HEAD
    PyObject *signature;
    PyObject *execute;
    const Lane *lane; /* of `execute`; NULL if it has none */
} Plan;

/* Who is inside a group, and the numbers of its collectives: queue.c. What is atomic is also read without the
   interpreter lock. */
typedef struct {
    PyObject_HEAD
    long long seq;
    long long messages;
    atomic_int queued;
    atomic_int busy;
    atomic_int ending;
    atomic_int asleep;        /* whoever awaits jobs is */
    atomic_llong ready_ns;    /* since when the oldest that is queued could run */
    atomic_llong patience_ns; /* for how long somebody else may come and run it */
    int beside;
    int drainers;
    char retired;
    pthread_t holder; /* the thread that took the turn last: it has it while `busy` */
} QueueState;

/* What a group may do: queue.c. */
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

/* Return what a method is bound to, if it is `Runner.run` or, beside the lane, `Runner.run_beside`; NULL if it is
   neither. */
Runner *runner_of(PyObject *method, int beside);

/* Run one of these, with what is known of where the tensors lie. */
PyObject *runner_call(Runner *self, int beside, PyObject *const *args, const Places *places);

/* Take the turn if nobody has it or waits for it: return the operation's number, or 0. */
long long queue_take(QueueState *self);

/* Give the turn back; whether somebody waits for that. */
int queue_give_back(QueueState *self);

/* Make the record of a call that begins now; `here` may be None: then the frame that called is not noted. */
Record *record_begin(PyTypeObject *type, PyObject *signature, long long limit_ns, int is_async, PyObject *here);

/* Do so for one that began at some time. */
Record *record_begun_at(PyTypeObject *type, PyObject *signature, long long created_ns, long long limit_ns, int is_async,
                        PyObject *here);

/* Call each of a tuple with an operation; `failed(callable, error)` gets what raises an Exception. */
int tell_all(PyObject *told, PyObject *operation, PyObject *failed);

/* Return a Work of an operation that is complete; `adopt` first. */
PyObject *work_of(PyObject *operation, PyObject *outputs);

/* Return a Work of an operation that is not complete, with what it waits on, which is its helper as well. */
PyObject *work_pending(PyObject *operation, PyObject *outputs, PyObject *pending);

/* Have a Work know no helper any more. */
void work_forget_helper(PyObject *work);

/* Tell instruments that an operation begins, and hand it to the backend; return what that returned. */
PyObject *runner_start(Runner *self, Plan *plan, Record *operation, PyObject *inputs, PyObject *outputs);

/* Tell what became of an operation that is complete. */
int runner_finished(Runner *self, Record *operation);

/* Tell instruments that an operation begins; -1 with an exception. */
int runner_started(Runner *self, Record *operation);

/* Have the group say what became of an operation that raised; it raises again. */
void runner_stumbled(Runner *self, Record *operation, PyObject *inputs, PyObject *outputs);

/* Whether a group neither refuses calls nor puts them off. */
int runner_takes_calls(Runner *self);

/* After a thread has left: whoever waits for that (`waited`) is woken, and after an abort the last to leave cleans up. An
   exception that is on its way goes on. -1 if this raised one. */
int runner_left(Runner *self, int waited);

/* Send a tensor that lies at an address by the lane of a plan, and return the Work; NULL without an exception if nothing
   was done: sends.c. */
PyObject *runner_send(Runner *self, Plan *plan, PyObject *tensor, uintptr_t address, int is_async);

/* Queue an asynchronous collective; return its Work. `left` is called whenever the lane was left. */
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
int plans_ready(PyObject *module);
int runner_ready(PyObject *module);
int async_calls_ready(PyObject *module);
int overloads_ready(PyObject *module);
int fast_methods_ready(PyObject *module);
int queue_ready(PyObject *module);

#endif
