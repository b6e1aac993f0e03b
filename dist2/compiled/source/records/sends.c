/* Messages that are sent first, and then noted: what a call does before its message is out, the receiver waits for.

   It means the same as the usual course of one (course.c), which does everything that stands in the way of this: nothing
   in Python runs between the send and the notes. */

#include "records.h"

/* Have the group say what became of a message that was sent, where something raised then; return NULL. */
static PyObject *
stumble(Course *self, Record *operation, PyObject *tensor)
{
    PyObject *error = raised();
    PyObject *inputs = PyTuple_Pack(1, tensor), *outputs = PyTuple_New(0);
    if (inputs != NULL && outputs != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        course_stumbled(self, operation, inputs, outputs);
    }
    Py_XDECREF(inputs);
    Py_XDECREF(outputs);
    Py_DECREF(error);
    return NULL;
}

/* Note a message that was sent; return its Work. */
static PyObject *
note(Course *self, Plan *plan, Record *operation, PyObject *tensor, int sent)
{
    if (course_started(self, operation) < 0) {
        return NULL;
    }
    operation->started_ns = operation->created_ns;
    if (plan->lane->sent(plan->execute, (PyObject *)operation, sent) < 0) {
        return stumble(self, operation, tensor);
    }
    if (course_finished(self, operation) < 0) {
        return NULL;
    }
    PyObject *outputs = PyTuple_New(0);
    PyObject *work = outputs == NULL ? NULL : work_of((PyObject *)operation, outputs);
    Py_XDECREF(outputs);
    return work;
}

PyObject *
course_send(Course *self, Plan *plan, PyObject *tensor, uintptr_t address, int is_async)
{
    if (plan->lane == NULL || !course_takes_calls(self)) {
        return NULL;
    }
    long long now = monotonic_ns(), limit_ns = self->standing->limit_ns;
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
    operation->seq = ++self->turns->messages;
    self->turns->beside++;
    PyObject *work = note(self, plan, operation, tensor, sent);
    self->turns->beside--;
    if (course_left(self, 0) < 0) {
        Py_CLEAR(work);
    }
    Py_DECREF(operation);
    Py_DECREF(self);
    return work;
}
