/* Sending by the short path, of messages and of offers of long ones. */

#include "messages.h"

#include <string.h>

#define GLANCE_NS 1000000 /* the interval of `Poller.glance`, which counts calls and does periodic checks */

static Field field_writing, field_frames, field_bulk, field_broken, field_waiting, field_used;
static PyObject *str_glance, *str_wake_peer;
Field field_tx;

int
is_clear(PyObject *link)
{
    Field *const names[] = {&field_writing, &field_frames, &field_bulk, &field_broken};
    for (size_t each = 0; each < Py_ARRAY_LENGTH(names); each++) {
        int is_true = attribute_is_true(link, names[each]);
        if (is_true) {
            return is_true < 0 ? -1 : 0;
        }
    }
    return 1;
}

int
wake_other(PyObject *link, End *end, int sleeps)
{
    return atomic_load_explicit(&end->words[sleeps], memory_order_relaxed) ? call_method(link, str_wake_peer) : 0;
}

int
answer(Express *self, int what, size_t at, uint64_t number)
{
    PyObject *link = PyDict_GetItemWithError(self->its[OUTGOING], self->its[FABRIC_ID]);
    if (link == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(link);
    End *tx = ring_of(link, &field_tx);
    int said = tx != NULL ? is_clear(link) : PyErr_Occurred() ? -1 : 0;
    if (said > 0) {
        char header[HEADER_BYTES];
        Lock lock = {NULL};
        memcpy(header, PyBytes_AS_STRING(self->its[what]), HEADER_BYTES);
        memcpy(header + at, &number, sizeof number);
        said = push_frame(tx, header, HEADER_BYTES, NULL, 0, &lock);
        if (said && wake_other(link, tx, READER_SLEEPS) < 0) {
            said = -1;
        }
    }
    Py_DECREF(link);
    return said;
}

/* Whether the receiver knows the description of this fingerprint. */
static int
is_told(Express *self)
{
    if (!self->is_told) {
        int told = PySet_Contains(self->its[TOLD], self->its[FINGERPRINT]);
        if (told <= 0) {
            return told;
        }
        self->is_told = 1;
    }
    return 1;
}

/* Whether neither the group nor the member has ended. */
static int
takes_messages(Express *self)
{
    if (PySet_GET_SIZE(self->its[ABORTERS])) {
        return 0;
    }
    int left = PySet_GET_SIZE(self->its[LEFT]) ? PySet_Contains(self->its[LEFT], self->its[RANK]) : 0;
    if (left) {
        return left < 0 ? -1 : 0;
    }
    return attribute_is_none(self->its[MAILBOX], &field_fault);
}

/* Return the used credit after a message that is sent now; 0 if the message has to wait, -1 with an exception. */
static long long
credit_after(Express *self)
{
    int waiting = attribute_is_true(self->its[ACCOUNT], &field_waiting);
    if (waiting) {
        return waiting < 0 ? -1 : 0;
    }
    long long used = attribute_number(self->its[ACCOUNT], &field_used);
    if (used < 0) {
        return -1;
    }
    return used + self->cost <= self->credit ? used + self->cost : 0;
}

/* Write a frame and its payload to a ring, with the fabric's lock. */
static int
push_to(Express *self, End *tx, const char *payload, Offer *offer)
{
    Lock lock = {NULL};
    const char *header = PyBytes_AS_STRING(self->its[HEADER]);
    if (offer == NULL) {
        int pushed = push_frame(tx, header, HEADER_BYTES, payload, (size_t)self->nbytes, &lock);
        take_lock(&lock);
        return pushed;
    }
    int entered = enter_offer(offer, tx, payload);
    if (entered <= 0) {
        return entered;
    }
    int pushed = push_frame(tx, header, HEADER_BYTES, (const char *)offer->loan, sizeof offer->loan, &lock);
    if (!pushed && end_offer(offer) < 0) {
        return -1;
    }
    return pushed;
}

/* Return the ring end for a message, or for its offer, borrowed from its link, if no condition prevents it; else
   NULL, with an exception or without. Calls no Python code. */
static End *
way_out(Express *self, PyObject *link, Offer *offer)
{
    int may = takes_messages(self);
    if (may > 0 && offer == NULL) { /* the sender of an offer waits, and can answer a question */
        may = is_told(self);
    }
    may = may > 0 ? is_clear(link) : may;
    return may > 0 ? ring_of(link, &field_tx) : NULL;
}

/* Account for the credit of a message, and write its frame; no step after that can fail. 1, 0 with nothing done, or
   -1 with an exception. */
static int
push_paid(Express *self, End *tx, const char *payload, Offer *offer)
{
    long long used = credit_after(self);
    if (used <= 0 || set_number(self->its[ACCOUNT], &field_used, used) < 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    int pushed = push_to(self, tx, payload, offer);
    if (pushed > 0) {
        return pushed;
    }
    PyObject *error = raised();
    int restored = set_number(self->its[ACCOUNT], &field_used, used - self->cost);
    go_on(error);
    return restored < 0 ? -1 : pushed;
}

/* Write the frame of a message, or of an offer, with the fabric's lock; waking the receiver needs no lock. */
static int
send_locked(Express *self, PyObject *link, const char *payload, Offer *offer)
{
    End *tx = way_out(self, link, offer);
    if (tx == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(tx);
    int pushed = push_paid(self, tx, payload, offer);
    if (pushed > 0 && wake_other(link, tx, READER_SLEEPS) < 0) {
        pushed = -1;
    }
    Py_DECREF(tx);
    return pushed;
}

int
glance(Express *self, long long now)
{
    if (now - self->glanced_ns <= GLANCE_NS) {
        return 0;
    }
    self->glanced_ns = now;
    return call_method(self->its[POLLER], str_glance);
}

int
send_frame(Express *self, const char *payload, Offer *offer)
{
    int entered = enter(self, offer != NULL || self->nbytes >= LONG_BYTES);
    if (entered < 0) {
        return -1;
    }
    PyObject *link = PyDict_GetItemWithError(self->its[OUTGOING], self->its[FABRIC_ID]);
    int sent = link == NULL && PyErr_Occurred() ? -1 : 0;
    if (link != NULL) {
        Py_INCREF(link);
        sent = send_locked(self, link, payload, offer);
        Py_DECREF(link);
    }
    leave(self, entered);
    return sent;
}

int
express_send(Express *self, const char *payload, long long now)
{
    return glance(self, now) < 0 ? -1 : send_frame(self, payload, NULL);
}

int
express_send_first(Express *self, const char *payload, long long now)
{
    if (self->nbytes >= LONG_BYTES || now - self->glanced_ns > GLANCE_NS || is_held(self->its[LOCKED])) {
        PyErr_Clear();
        return 0;
    }
    PyObject *link = PyDict_GetItemWithError(self->its[OUTGOING], self->its[FABRIC_ID]);
    End *tx = link == NULL ? NULL : way_out(self, link, NULL);
    int sent = tx == NULL ? 0 : push_paid(self, tx, payload, NULL);
    if (sent <= 0) {
        PyErr_Clear();
        return 0;
    }
    return atomic_load_explicit(&tx->words[READER_SLEEPS], memory_order_relaxed) ? 2 : 1;
}

int
express_wake(Express *self)
{
    PyObject *link = PyDict_GetItemWithError(self->its[OUTGOING], self->its[FABRIC_ID]);
    if (link == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(link);
    int woken = call_method(link, str_wake_peer);
    Py_DECREF(link);
    return woken;
}

int
sending_ready(void)
{
    static const Name names[] = {
        {&field_writing.name, "_writing"}, {&field_frames.name, "_frames"},   {&field_bulk.name, "_bulk"},
        {&field_broken.name, "_broken"},   {&field_waiting.name, "waiting"}, {&field_used.name, "used"},
        {&field_tx.name, "tx"},            {&str_glance, "glance"},          {&str_wake_peer, "wake_peer"},
    };
    return intern(names, Py_ARRAY_LENGTH(names));
}
