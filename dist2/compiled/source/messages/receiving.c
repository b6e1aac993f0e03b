/* Receiving by the short way, for messages and for offers of long ones. */

#include "messages.h"

static Field field_closed, field_reader, field_header, field_filled, field_owed;
static PyObject *str_account_for, *str_tell_waiters;
Field field_rx, field_fault, field_aborted, field_waiters;

/* Whether a receive posted now would get the next message of its key. */
static int
is_free(Express *self)
{
    PyObject *const asked[][2] = {
        {self->its[ARRIVED], self->its[KEY]},
        {self->its[POSTED], self->its[KEY]},
        {self->its[POSTED], self->its[KEY_OF_ANY]},
    };
    for (size_t each = 0; each < Py_ARRAY_LENGTH(asked); each++) {
        int found = PyDict_GET_SIZE(asked[each][0]) ? PyDict_Contains(asked[each][0], asked[each][1]) : 0;
        if (found) {
            return found < 0 ? -1 : 0;
        }
    }
    return 1;
}

/* See `link_in`; with the fabric's lock. */
static int
is_next_in(Express *self, PyObject *link, int expects_message)
{
    int may = attribute_is_none(self->its[MAILBOX], &field_fault);
    if (may <= 0) {
        return may;
    }
    PyObject *reader = get_attribute(link, &field_reader);
    if (reader == NULL) {
        return -1;
    }
    may = attribute_is_none(reader, &field_header);
    int filled = may > 0 ? attribute_is_true(reader, &field_filled) : 0;
    Py_DECREF(reader);
    if (may <= 0 || filled) {
        return may < 0 || filled < 0 ? -1 : 0;
    }
    return expects_message ? is_free(self) : 1;
}

PyObject *
link_in(Express *self, int expects_message)
{
    int entered = enter(self, 0);
    if (entered < 0) {
        return NULL;
    }
    PyObject *link = PyDict_GetItemWithError(self->its[RINGED_FROM], self->its[FABRIC_ID]);
    if (link != NULL) {
        Py_INCREF(link);
        if (is_next_in(self, link, expects_message) <= 0) {
            Py_CLEAR(link);
        }
    }
    leave(self, entered);
    return link;
}

/* Account for a frame that was pulled and free it, with the fabric's lock: 1, 0 if the group has failed, 2 if the
   sender is to be told of it, which `report` does. */
static int
settle_locked(Express *self, End *rx, size_t nbytes)
{
    int faultless = attribute_is_none(self->its[MAILBOX], &field_fault);
    if (faultless <= 0) {
        return faultless;
    }
    long long owed = attribute_number(self->its[ACCOUNT], &field_owed);
    if (owed < 0) {
        return -1;
    }
    consume(rx, HEADER_BYTES + nbytes);
    if (owed + self->cost >= self->reported) {
        return 2;
    }
    return set_number(self->its[ACCOUNT], &field_owed, owed + self->cost) < 0 ? -1 : 1;
}

/* Tell the sender what was received, with the fabric's lock. */
static int
report(Express *self)
{
    long long owed = attribute_number(self->its[ACCOUNT], &field_owed);
    int said = owed < 0 ? -1 : answer(self, RECEIVED, TOTAL_AT, (uint64_t)(owed + self->cost));
    if (said) {
        return said < 0 || set_number(self->its[ACCOUNT], &field_owed, 0) < 0 ? -1 : 1;
    }
    PyObject *cost = PyLong_FromLongLong(self->cost);
    PyObject *told = cost == NULL ? NULL
                                  : PyObject_CallMethodObjArgs(self->its[DELIVERY], str_account_for, self->its[MAILBOX],
                                                               self->its[RANK], Py_True, cost, NULL);
    Py_XDECREF(cost);
    Py_XDECREF(told);
    return told == NULL ? -1 : 1;
}

/* Account for a frame that was pulled and free it: 1, 0 if the group has failed. `alone`: nobody has had the
   interpreter lock since the fabric's lock was free. */
static int
settle(Express *self, End *rx, size_t nbytes, int alone)
{
    int entered = alone ? 0 : enter(self, 0), settled = entered < 0 ? -1 : settle_locked(self, rx, nbytes);
    if (settled == 2 && !entered) {
        entered = enter(self, 1);
        settled = entered < 0 ? -1 : 2;
    }
    if (settled == 2) {
        settled = report(self);
    }
    leave(self, entered);
    return settled;
}

/* Read the frame that is next in a ring, if it is the one that is expected; `alone` is as for `settle`. */
static int
pull_next(Express *self, PyObject *link, End *rx, char *payload, size_t nbytes, int alone)
{
    Lock lock = {NULL};
    int here = pull_frame(rx, PyBytes_AS_STRING(self->its[HEADER]), HEADER_BYTES, payload, nbytes, &lock);
    take_lock(&lock);
    if (here > 0) {
        here = settle(self, rx, nbytes, alone && nbytes < LONG_BYTES);
    }
    return here > 0 && wake_other(link, rx, WRITER_SLEEPS) < 0 ? -1 : here;
}

/* Read the next frame from a link, or what was received and then that, with the role of the poller. */
static int
pull_from(Express *self, PyObject *link, char *payload, size_t nbytes, long long deadline_ns)
{
    End *rx = ring_of(link, &field_rx);
    if (rx == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(rx);
    int pulled, received;
    do {
        pulled = has_bytes(rx) ? 1 : deadline_ns ? watch_ring(self, rx, NULL, 0, deadline_ns) : 0;
        int here = pulled > 0;
        pulled = here ? pull_next(self, link, rx, payload, nbytes, 0) : pulled;
        received = here && pulled == 0 ? take_received(self, rx) : 0;
        if (received > 0 && wake_other(link, rx, WRITER_SLEEPS) < 0) {
            received = -1;
        }
    } while (received > 0);
    Py_DECREF(rx);
    return received < 0 ? -1 : pulled;
}

int
take_role(Express *self)
{
    int closed = attribute_is_true(self->its[POLLER], &field_closed);
    if (closed) {
        return closed < 0 ? -1 : 0;
    }
    PyObject *taken = PyObject_CallOneArg(self->its[TAKE_ROLE], Py_False);
    Py_XDECREF(taken);
    return taken == NULL ? -1 : taken == Py_True;
}

int
give_role(Express *self, int outcome)
{
    release(self->its[GIVE_ROLE]);
    int waited = outcome < 0 ? 0 : attribute_is_true(self->its[POLLER], &field_waiters);
    /* What this raises, a signal handler does. Where something was raised before, waiters look by themselves soon. */
    return waited && (waited < 0 || call_method(self->its[POLLER], str_tell_waiters) < 0) ? -1 : outcome;
}

/* Read the next frame of a link if it is here whole, which takes no role where nobody has it: nobody else looks before
   this is done. 1, 0 with nothing done, or -1 with an exception. */
static int
pull_at_once(Express *self, char *payload, size_t nbytes, PyObject **link)
{
    PyObject *from = PyDict_GetItemWithError(self->its[RINGED_FROM], self->its[FABRIC_ID]);
    if (from == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    End *rx = ring_of(from, &field_rx);
    if (rx == NULL || !has_all(rx, HEADER_BYTES + nbytes) || nbytes >= LONG_BYTES) {
        return PyErr_Occurred() ? -1 : 0;
    }
    int others = attribute_is_true(self->its[POLLER], &field_closed);
    others = others ? others : is_held(self->its[ROLE_TAKEN]);
    others = others ? others : is_held(self->its[LOCKED]);
    if (others) {
        return others < 0 ? -1 : 0;
    }
    *link = Py_NewRef(from);
    Py_INCREF(rx);
    int pulled = is_next_in(self, from, 1);
    pulled = pulled > 0 ? pull_next(self, from, rx, payload, nbytes, 1) : pulled;
    Py_DECREF(rx);
    if (pulled <= 0) {
        Py_CLEAR(*link);
    }
    return pulled;
}

int
express_pull(Express *self, char *payload, size_t nbytes, long long deadline_ns, PyObject **link)
{
    int pulled = pull_at_once(self, payload, nbytes, link);
    if (pulled) {
        return pulled;
    }
    pulled = take_role(self);
    if (pulled <= 0) {
        return pulled;
    }
    *link = link_in(self, 1);
    pulled = *link != NULL ? pull_from(self, *link, payload, nbytes, deadline_ns) : PyErr_Occurred() ? -1 : 0;
    pulled = give_role(self, pulled);
    if (pulled <= 0) {
        Py_CLEAR(*link);
    }
    return pulled;
}

/* Whether the ring that the messages come through has anything: looked at without any lock, as what comes now may as
   well come later. */
static int
is_anything_in(Express *self)
{
    PyObject *link = PyDict_GetItemWithError(self->its[RINGED_FROM], self->its[FABRIC_ID]);
    if (link == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(link);
    End *rx = ring_of(link, &field_rx);
    int here = rx != NULL ? has_bytes(rx) : PyErr_Occurred() ? -1 : 0;
    Py_DECREF(link);
    return here;
}

int
express_take(Express *self, char *payload)
{
    PyObject *link = NULL;
    int here = is_anything_in(self);
    int taken = here > 0 ? express_pull(self, payload, (size_t)self->nbytes, 0, &link) : here;
    Py_XDECREF(link);
    return taken;
}

int
express_wait(Express *self, char *payload, long long deadline_ns)
{
    PyObject *link = NULL;
    int taken = express_pull(self, payload, (size_t)self->nbytes, deadline_ns, &link);
    Py_XDECREF(link);
    return taken;
}

int
receiving_ready(void)
{
    static const Name names[] = {
        {&field_closed.name, "closed"},  {&field_reader.name, "reader"},     {&field_header.name, "_header"},
        {&field_filled.name, "_filled"}, {&field_owed.name, "owed"},         {&field_rx.name, "rx"},
        {&field_fault.name, "fault"},    {&field_aborted.name, "aborted"},   {&field_waiters.name, "_waiters"},
        {&str_account_for, "account_for"},
        {&str_tell_waiters, "tell_waiters"},
    };
    return intern(names, Py_ARRAY_LENGTH(names));
}
