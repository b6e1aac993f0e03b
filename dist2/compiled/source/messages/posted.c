/* Posted receives: served by a thread that posts another receive behind them, and by their own waiters. */

#include "messages.h"

#define FETCH_NS 2000000 /* long messages are read for so long before other work gets a turn */
#define MOST_AT_ONCE (8 << 20) /* longer ones are left to the poller */

static PyObject *str_tell_finished, *str_data, *str_done, *str_fingerprint;

/* Return the receive of this key that was posted first, if it is of this kind; NULL if not, with an exception or
   without. */
static PyObject *
first_posted(Express *self)
{
    int entered = enter(self, 0);
    PyObject *queue = entered < 0 ? NULL : PyDict_GetItemWithError(self->its[POSTED], self->its[KEY]);
    PyObject *first = queue == NULL ? NULL : PySequence_GetItem(queue, 0);
    PyObject *fingerprint = first == NULL ? NULL : PyObject_GetAttr(first, str_fingerprint);
    if (fingerprint == NULL || PyObject_RichCompareBool(fingerprint, self->its[FINGERPRINT], Py_EQ) <= 0) {
        Py_CLEAR(first);
    }
    Py_XDECREF(fingerprint);
    leave(self, entered);
    return first;
}

/* Let the poller read a message that was offered. An exception that is already set stays set. */
static int
adopt_offer(PyObject *adopt, PyObject *posted, PyObject *link, const Fetch *fetch)
{
    PyObject *error = raised();
    PyObject *loan = PyBytes_FromStringAndSize((const char *)fetch->loan, sizeof fetch->loan);
    PyObject *adopted = loan == NULL ? NULL : PyObject_CallFunctionObjArgs(adopt, posted, link, loan, NULL);
    Py_XDECREF(loan);
    Py_XDECREF(adopted);
    go_on(error);
    return PyErr_Occurred() ? -1 : 0;
}

/* Read the next message, which is offered, into the buffer of a posted receive. The caller has the role of the
   poller, so that no other thread handles later frames of the sender meanwhile. 1; 0 if the message belongs to
   another receive or could not be read; -1 with an exception. */
static int
fetch_for(Express *self, PyObject *link, End *rx, PyObject *posted, char *address, PyObject *adopt)
{
    Fetch fetch = {.link = NULL};
    Wanted offer = {.payload = (char *)fetch.loan, .nbytes = sizeof fetch.loan, .posted = posted, .is_offer = 1};
    int pulled = pull_next(self, link, rx, &offer, 0);
    if (pulled <= 0) {
        return pulled;
    }
    int read = self->nbytes <= MOST_AT_ONCE ? fetch_from(self, link, address, &fetch) : 0;
    if (read <= 0) {
        return adopt_offer(adopt, posted, link, &fetch);
    }
    int entered = enter(self, 0), ended = entered < 0 ? -1 : end_posted(self, posted);
    leave(self, entered);
    return ended;
}

/* Serve the receive that was posted first, if both it and the next message belong to this express: 1, 0, or -1 with
   an exception. `adopt` is not NULL if its messages are long, and offered. */
static int
serve_first(Express *self, PyObject *link, End *rx, PyObject *adopt)
{
    Py_buffer data;
    PyObject *first = first_posted(self);
    PyObject *memory = first == NULL ? NULL : PyObject_GetAttr(first, str_data);
    int served = PyErr_Occurred() ? -1 : 0;
    if (memory != NULL && memory != Py_None) { /* else it ended a moment ago */
        served = PyObject_GetBuffer(memory, &data, PyBUF_WRITABLE);
        if (served == 0) {
            Wanted wanted = {.payload = data.buf, .nbytes = (size_t)data.len, .posted = first};
            served = data.len != self->nbytes ? 0
                     : adopt != NULL          ? fetch_for(self, link, rx, first, data.buf, adopt)
                                              : pull_next(self, link, rx, &wanted, 0);
            PyBuffer_Release(&data);
        }
    }
    Py_XDECREF(memory);
    Py_XDECREF(first);
    return served;
}

/* ---- Short ones ---- */

int
serve_posted(Express *self)
{
    int posted = PyDict_GET_SIZE(self->its[POSTED]) ? PyDict_Contains(self->its[POSTED], self->its[KEY]) : 0;
    int role = posted > 0 ? take_role(self) : posted;
    if (role <= 0) {
        return role;
    }
    PyObject *link = link_in(self, NULL);
    End *rx = link == NULL ? NULL : ring_of(link, &field_rx);
    int pulled = PyErr_Occurred() ? -1 : 0, served = 0;
    if (rx != NULL) {
        Py_INCREF(rx);
        while ((pulled = serve_first(self, link, rx, NULL)) > 0) {
            served = 1;
        }
        Py_DECREF(rx);
    }
    Py_XDECREF(link);
    pulled = give_role(self, pulled);
    return served && pulled >= 0 ? call_method(self->its[POLLER], str_tell_finished) : pulled;
}

int
express_wait_posted(Express *self, PyObject *receiving, char *payload, long long deadline_ns)
{
    PyObject *link = NULL;
    Wanted wanted = {.payload = payload, .nbytes = (size_t)self->nbytes, .posted = receiving};
    int taken = express_pull(self, &wanted, deadline_ns, &link);
    Py_XDECREF(link);
    return taken;
}

/* ---- Long ones ---- */

/* Whether a message has ended. */
static int
is_done(PyObject *message)
{
    PyObject *done = PyObject_GetAttr(message, str_done);
    int is_true = done == NULL ? -1 : PyObject_IsTrue(done);
    Py_XDECREF(done);
    return is_true;
}

/* Wait and read, with the role of the poller. Messages behind the awaited one that have arrived are read as well, so
   that their senders can continue. */
static int
fetch_until(Express *self, PyObject *link, End *rx, PyObject *receiving, PyObject *adopt, long long deadline_ns)
{
    long long end_ns = monotonic_ns() + FETCH_NS;
    int fetched = 1, done = is_done(receiving);
    while (fetched > 0 && done >= 0 && monotonic_ns() < end_ns) {
        fetched = has_bytes(rx) ? 1 : done ? 0 : watch_ring(self, rx, deadline_ns);
        fetched = fetched > 0 ? serve_first(self, link, rx, adopt) : fetched;
        fetched = fetched == 0 && has_bytes(rx) ? take_received(self, rx) : fetched;
        done = is_done(receiving);
    }
    return fetched < 0 || done < 0 ? -1 : 0;
}

int
express_fetch_posted(Express *self, PyObject *receiving, PyObject *adopt, long long deadline_ns)
{
    int fetched = take_role(self);
    if (fetched <= 0) {
        return fetched;
    }
    PyObject *link = link_in(self, NULL);
    End *rx = link == NULL ? NULL : ring_of(link, &field_rx);
    fetched = PyErr_Occurred() ? -1 : 0;
    if (rx != NULL) {
        Py_INCREF(rx);
        fetched = fetch_until(self, link, rx, receiving, adopt, deadline_ns);
        Py_DECREF(rx);
    }
    Py_XDECREF(link);
    return give_role(self, fetched);
}

int
posted_ready(void)
{
    static const Name names[] = {
        {&str_tell_finished, "tell_finished"},
        {&str_data, "data"},
        {&str_done, "done"},
        {&str_fingerprint, "fingerprint"},
    };
    return intern(names, Py_ARRAY_LENGTH(names));
}
