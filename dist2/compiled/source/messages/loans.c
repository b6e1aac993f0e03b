/* Long messages: offered by their sender, taken by their receiver, and what both say of it. The counterpart of
   dist2/backends/socket/transport/messages/express_long.py. */

#include "messages.h"

#include <string.h>

static Field field_pid;
static PyObject *str_data;

/* ---- The sender ---- */

/* Read the receiver's word: 1, 0 if something else is next, or -1 with an exception. */
static int
pull_taken(Express *self, End *rx, PyObject *link, Offer *offer)
{
    char taken[HEADER_BYTES];
    Lock lock = {NULL};
    memcpy(taken, PyBytes_AS_STRING(self->its[TAKEN]), HEADER_BYTES);
    memcpy(taken + TRANSFER_AT, &offer->loan[0], sizeof offer->loan[0]);
    if (!pull_frame(rx, taken, HEADER_BYTES, NULL, 0, &lock)) {
        return 0;
    }
    if (call(self->its[ACQUIRE]) < 0) {
        return -1;
    }
    consume(rx, HEADER_BYTES);
    int ended = end_offer(offer);
    release(self->its[RELEASE]);
    return ended < 0 || wake_other(link, rx, WRITER_SLEEPS) < 0 ? -1 : 1;
}

/* Wait a moment for the receiver, and help it. */
static int
await_taken(Express *self, End *rx, PyObject *link, const char *address, long long deadline_ns, Offer *offer)
{
    const Word *desk = desk_of(offer->tx);
    while (!has_bytes(rx)) {
        int here = watch_ring(self, rx, desk, offer->loan[0], deadline_ns);
        if (here <= 0) {
            return here;
        }
        if (desk != NULL && !has_bytes(rx)) {
            desk = NULL;
            if (write_loan(self, offer->tx, offer->pid, offer->loan[0], address, (size_t)self->nbytes) < 0) {
                return -1;
            }
        }
    }
    return pull_taken(self, rx, link, offer);
}

/* Offer a message and wait for a moment, with the role of the poller. */
static int
offer_over(Express *self, PyObject *link, const char *address, long long deadline_ns, Offer *offer)
{
    End *rx = ring_of(link, &field_rx);
    if (rx == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    long long pid = attribute_number((PyObject *)rx, &field_pid);
    if (pid < 0) {
        return -1;
    }
    offer->pid = (pid_t)pid;
    Py_INCREF(rx);
    int offered = send_frame(self, address, offer);
    if (offered > 0) {
        offered = await_taken(self, rx, link, address, deadline_ns, offer);
    }
    Py_DECREF(rx);
    return offered;
}

int
express_offer(Express *self, const char *address, long long deadline_ns, Offer *offer)
{
    if (glance(self, monotonic_ns()) < 0) {
        return -1;
    }
    int taken = take_role(self);
    if (taken <= 0) {
        return taken;
    }
    PyObject *link = link_in(self, NULL);
    taken = link != NULL ? offer_over(self, link, address, deadline_ns, offer) : PyErr_Occurred() ? -1 : 0;
    Py_XDECREF(link);
    if (offer->tx != NULL) { /* whoever polls next may read the receiver's word: it must find the message */
        taken = hand_over(offer, taken);
    }
    taken = give_role(self, taken);
    return taken < 0 && offer->adopted != NULL ? take_back(offer) : taken;
}

/* ---- The sender of several, while it waits for any of them ---- */

/* Write a part of a message to its receiver, if it is one of the group's that are lent. */
static int
help_with(Express *self, End *tx, pid_t pid, uint64_t number)
{
    PyObject *key = PyLong_FromUnsignedLongLong(number);
    PyObject *sending = key == NULL ? NULL : PyDict_GetItemWithError(self->its[LENT], key);
    Py_XDECREF(key);
    PyObject *memory = sending == NULL ? NULL : PyObject_GetAttr(sending, str_data);
    if (memory == NULL || memory == Py_None) {
        Py_XDECREF(memory);
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_buffer data;
    int got = PyObject_GetBuffer(memory, &data, PyBUF_SIMPLE);
    Py_DECREF(memory);
    if (got < 0) {
        return -1;
    }
    int written = write_loan(self, tx, pid, number, data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return written;
}

/* Write parts of what is read, and watch, with the role of the poller. */
static int
help_over(Express *self, End *tx, End *rx, long long deadline_ns)
{
    const Word *desk = desk_of(tx);
    uint64_t number = 0;
    long long pid = attribute_number((PyObject *)rx, &field_pid);
    int here = pid < 0 ? -1 : pid > 0;
    if (here > 0) {
        wait_at_desk(tx, ALL_LOANS);
    }
    while (here > 0) {
        uint64_t open = atomic_load_explicit(desk, memory_order_acquire);
        if (open != number) {
            number = open;
            here = help_with(self, tx, (pid_t)pid, number) < 0 ? -1 : 1;
        }
        else if (has_bytes(rx)) {
            return 1;
        }
        else {
            here = watch_change(self, rx, desk, number, deadline_ns);
        }
    }
    return here;
}

int
express_help(Express *self, long long deadline_ns)
{
    int here = take_role(self);
    if (here <= 0) {
        return here;
    }
    PyObject *in = link_in(self, NULL), *out = NULL;
    if (in != NULL) {
        out = Py_XNewRef(PyDict_GetItemWithError(self->its[OUTGOING], self->its[FABRIC_ID]));
    }
    End *rx = out == NULL ? NULL : ring_of(in, &field_rx), *tx = rx == NULL ? NULL : ring_of(out, &field_tx);
    if (tx != NULL) {
        Py_INCREF(tx);
        Py_INCREF(rx);
        here = help_over(self, tx, rx, deadline_ns);
        Py_DECREF(rx);
        Py_DECREF(tx);
    }
    else {
        here = PyErr_Occurred() ? -1 : 0;
    }
    Py_XDECREF(out);
    Py_XDECREF(in);
    return give_role(self, here);
}

/* ---- The receiver ---- */

/* Say that a loan was read if it stood until now, with the fabric's lock: 1, 0 if that takes more. */
static int
say_taken(Express *self, End *rx, const uint64_t loan[3])
{
    int fine = attribute_is_none(self->its[MAILBOX], &field_aborted);
    fine = fine > 0 ? attribute_is_none(self->its[MAILBOX], &field_fault) : fine;
    if (fine <= 0 || loan[2] >= DESK_AT - SLOTS_AT ||
        atomic_load_explicit(&rx->words[SLOTS_AT + loan[2]], memory_order_acquire) != loan[0]) {
        return fine < 0 ? -1 : 0;
    }
    return answer(self, TAKEN, TRANSFER_AT, loan[0]);
}

int
fetch_from(Express *self, PyObject *link, char *address, Fetch *fetch)
{
    End *rx = ring_of(link, &field_rx);
    fetch->outcome = REFUSED;
    if (rx == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(rx);
    long long pid = attribute_number((PyObject *)rx, &field_pid);
    int said = pid < 0 ? -1 : 0;
    if (pid > 0) {
        said = fetch->outcome = read_loan(self, rx, (pid_t)pid, fetch->loan, address, (size_t)self->nbytes);
    }
    if (said == READ) {
        said = call(self->its[ACQUIRE]);
        if (said == 0) {
            said = say_taken(self, rx, fetch->loan);
            release(self->its[RELEASE]);
        }
    }
    Py_DECREF(rx);
    return said < 0 ? -1 : said && fetch->outcome == READ;
}

int
express_fetch(Express *self, char *address, long long deadline_ns, Fetch *fetch)
{
    Whole whole = {.address = address};
    Wanted offer = {.payload = (char *)fetch->loan, .nbytes = sizeof fetch->loan, .whole = &whole};
    int pulled = express_pull(self, &offer, deadline_ns, &fetch->link);
    if (pulled <= 0) {
        return pulled;
    }
    pulled = whole.came ? 1 : fetch_from(self, fetch->link, address, fetch);
    if (pulled) {
        Py_CLEAR(fetch->link);
    }
    return pulled;
}

int
loans_ready(void)
{
    static const Name names[] = {{&field_pid.name, "pid"}, {&str_data, "data"}};
    return intern(names, Py_ARRAY_LENGTH(names));
}
