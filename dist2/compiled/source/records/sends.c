/* Messages that are sent before they are recorded: the receiver waits for each step of the sender before the send.

   The effect is that of the usual runner of a message (runner.c), which handles all other cases. No Python code runs
   between the send and the records. */

#include "records.h"

/* Let the group report a message that was sent, if a later step raised; return NULL. */
static PyObject *
stumble(Runner *self, Record *operation, PyObject *tensor)
{
    PyObject *error = raised();
    PyObject *inputs = PyTuple_Pack(1, tensor), *outputs = PyTuple_New(0);
    go_on(error);
    if (inputs != NULL && outputs != NULL) {
        runner_stumbled(self, operation, inputs, outputs);
    }
    Py_XDECREF(inputs);
    Py_XDECREF(outputs);
    return NULL;
}

/* Record a message that was sent; return its Work. */
static PyObject *
note(Runner *self, Plan *plan, Record *operation, PyObject *tensor, int sent)
{
    if (runner_started(self, operation) < 0) {
        return NULL;
    }
    operation->started_ns = operation->created_ns;
    if (plan->lane->sent(plan->execute, (PyObject *)operation, sent) < 0) {
        return stumble(self, operation, tensor);
    }
    if (runner_finished(self, operation) < 0) {
        return NULL;
    }
    PyObject *outputs = PyTuple_New(0);
    PyObject *work = outputs == NULL ? NULL : work_of((PyObject *)operation, outputs);
    Py_XDECREF(outputs);
    return work;
}

PyObject *
runner_send(Runner *self, Plan *plan, PyObject *tensor, uintptr_t address, int is_async)
{
    if (plan->lane == NULL || !runner_takes_calls(self)) {
        return NULL;
    }
    long long now = monotonic_ns(), limit_ns = self->state->limit_ns;
    int sent = plan->lane->send(plan->execute, (const char *)address, now);
    if (!sent) {
        return NULL;
    }
    PyTypeObject *type = (PyTypeObject *)self->operation_type;
    Record *operation = record_begun_at(type, plan->signature, now, limit_ns, is_async, self->here);
    if (operation == NULL) {
        return NULL;
    }
    Py_INCREF(self);
    operation->seq = ++self->queue->messages;
    self->queue->beside++;
    PyObject *work = note(self, plan, operation, tensor, sent);
    self->queue->beside--;
    if (runner_left(self, 0) < 0) {
        Py_CLEAR(work);
    }
    Py_DECREF(operation);
    Py_DECREF(self);
    return work;
}
