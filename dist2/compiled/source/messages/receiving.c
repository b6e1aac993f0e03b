/* Receiving by the short path, of messages and of offers of long ones. */

#include "messages.h"

static Field field_closed, field_reader, field_header, field_filled, field_owed, field_finished;
static PyObject *str_account_for, *str_tell_waiters, *str_popleft, *str_done, *str_data;
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

/* Whether a receive that is posted would get the next message of its key. */
static int
is_first(Express *self, PyObject *posted)
{
    int from_any = PyDict_Contains(self->its[POSTED], self->its[KEY_OF_ANY]);
    PyObject *queue = from_any ? NULL : PyDict_GetItemWithError(self->its[POSTED], self->its[KEY]);
    if (queue == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *first = PySequence_GetItem(queue, 0);
    Py_XDECREF(first);
    return first == NULL ? -1 : first == posted;
}

/* See `link_in`; with the fabric's lock. */
static int
is_next_in(Express *self, PyObject *link, const Wanted *wanted)
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
    return wanted == NULL ? 1 : wanted->posted != NULL ? is_first(self, wanted->posted) : is_free(self);
}

PyObject *
link_in(Express *self, const Wanted *wanted)
{
    int entered = enter(self, 0);
    if (entered < 0) {
        return NULL;
    }
    PyObject *link = PyDict_GetItemWithError(self->its[RINGED_FROM], self->its[FABRIC_ID]);
    if (link != NULL) {
        Py_INCREF(link);
        if (is_next_in(self, link, wanted) <= 0) {
            Py_CLEAR(link);
        }
    }
    leave(self, entered);
    return link;
}

/* Account for a frame that was pulled and free it, with the fabric's lock: 1, 0 if the group has failed, 2 if a
   report to the sender is due, which `report` sends. */
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

/* Report received bytes to the sender, with the fabric's lock. */
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

/* Account for a frame that was pulled and free it: 1, 0 if the group has failed. `alone`: no other thread has had
   the interpreter lock since the fabric's lock was free. */
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

/* Remove the receive that was posted first from the mailbox. */
static int
forget_posted(Express *self)
{
    PyObject *queue = Py_NewRef(PyDict_GetItem(self->its[POSTED], self->its[KEY])); /* `is_first` has found it */
    PyObject *first = PyObject_CallMethodNoArgs(queue, str_popleft);
    int forgotten = first == NULL ? -1 : 1;
    if (first != NULL && PyObject_Size(queue) == 0 && PyDict_DelItem(self->its[POSTED], self->its[KEY]) < 0) {
        forgotten = -1;
    }
    Py_XDECREF(first);
    Py_DECREF(queue);
    return forgotten;
}

int
end_posted(Express *self, PyObject *posted)
{
    PyObject *finished = get_attribute(self->its[OUTCOMES], &field_finished);
    int ended = finished != NULL && PyList_Check(finished) ? PyList_Append(finished, posted) : -1;
    if (ended == 0) {
        ended = PyObject_SetAttr(posted, str_data, Py_None) < 0 ? -1 : PyObject_SetAttr(posted, str_done, Py_True);
    }
    Py_XDECREF(finished);
    return ended < 0 ? -1 : 1;
}

/* `pull_next` for a posted receive. Other threads may have completed it, or read its message, while this thread was
   without the interpreter lock. It keeps that lock from this check until the receive is complete. */
static int
pull_posted(Express *self, End *rx, const Wanted *wanted)
{
    int entered = enter(self, 0);
    if (entered < 0) {
        return -1;
    }
    int here = attribute_is_none(self->its[MAILBOX], &field_fault);
    here = here > 0 ? is_first(self, wanted->posted) : here;
    if (here > 0) {
        here = has_all(rx, HEADER_BYTES + wanted->nbytes) &&
               pull_frame(rx, PyBytes_AS_STRING(self->its[HEADER]), HEADER_BYTES, wanted->payload, wanted->nbytes, NULL);
    }
    here = here > 0 ? forget_posted(self) : here;
    if (here > 0 && !wanted->is_offer) {
        here = end_posted(self, wanted->posted);
    }
    if (here > 0) {
        here = settle_locked(self, rx, wanted->nbytes);
    }
    if (here == 2 && !entered) {
        entered = enter(self, 1);
        here = entered < 0 ? -1 : 2;
    }
    here = here == 2 ? report(self) : here;
    leave(self, entered);
    return here;
}

/* `pull_next` for a receive that is not posted. */
static int
pull_unposted(Express *self, End *rx, const Wanted *wanted, int alone)
{
    Lock lock = {NULL};
    size_t nbytes = wanted->nbytes;
    int here = pull_frame(rx, PyBytes_AS_STRING(self->its[HEADER]), HEADER_BYTES, wanted->payload, nbytes, &lock);
    take_lock(&lock);
    return here > 0 ? settle(self, rx, nbytes, alone && nbytes < LONG_BYTES) : here;
}

int
pull_next(Express *self, PyObject *link, End *rx, const Wanted *wanted, int alone)
{
    int here = 1;
    if (wanted->posted != NULL && wanted->nbytes >= LONG_BYTES) { /* its writer may be half way */
        Lock lock = {NULL};
        here = await_frame(rx, PyBytes_AS_STRING(self->its[HEADER]), HEADER_BYTES, wanted->nbytes, &lock);
        take_lock(&lock);
    }
    if (here) {
        here = wanted->posted != NULL ? pull_posted(self, rx, wanted) : pull_unposted(self, rx, wanted, alone);
    }
    return here > 0 && wake_other(link, rx, WRITER_SLEEPS) < 0 ? -1 : here;
}

/* Read the next frame from a link, with the role of the poller. A report of received bytes before it is read first. */
static int
pull_from(Express *self, PyObject *link, const Wanted *wanted, long long deadline_ns)
{
    End *rx = ring_of(link, &field_rx);
    if (rx == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(rx);
    int pulled, received;
    do {
        pulled = has_bytes(rx) ? 1 : deadline_ns ? watch_ring(self, rx, deadline_ns) : 0;
        int here = pulled > 0;
        pulled = here ? pull_next(self, link, rx, wanted, 0) : pulled;
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
    /* Only a signal handler raises here. If an exception was set before, waiters look by themselves soon. */
    return waited && (waited < 0 || call_method(self->its[POLLER], str_tell_waiters) < 0) ? -1 : outcome;
}

/* Read the next frame of a link if it has come completely. If no thread has the role of the poller this takes none:
   no other thread can run meanwhile. 1, 0 with nothing done, or -1 with an exception. */
static int
pull_at_once(Express *self, const Wanted *wanted, PyObject **link)
{
    PyObject *from = PyDict_GetItemWithError(self->its[RINGED_FROM], self->its[FABRIC_ID]);
    if (from == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    End *rx = ring_of(from, &field_rx);
    if (rx == NULL || !has_all(rx, HEADER_BYTES + wanted->nbytes) || wanted->nbytes >= LONG_BYTES) {
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
    int pulled = is_next_in(self, from, wanted);
    pulled = pulled > 0 ? pull_next(self, from, rx, wanted, 1) : pulled;
    Py_DECREF(rx);
    if (pulled <= 0) {
        Py_CLEAR(*link);
    }
    return pulled;
}

int
express_pull(Express *self, const Wanted *wanted, long long deadline_ns, PyObject **link)
{
    int pulled = pull_at_once(self, wanted, link);
    if (pulled) {
        return pulled;
    }
    pulled = take_role(self);
    if (pulled <= 0) {
        return pulled;
    }
    *link = link_in(self, wanted);
    pulled = *link != NULL ? pull_from(self, *link, wanted, deadline_ns) : PyErr_Occurred() ? -1 : 0;
    pulled = give_role(self, pulled);
    if (pulled <= 0) {
        Py_CLEAR(*link);
    }
    return pulled;
}

/* Whether the ring of the incoming messages has any bytes. Read without a lock: bytes that arrive now could equally
   arrive later. */
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
    Wanted wanted = {.payload = payload, .nbytes = (size_t)self->nbytes};
    int here = is_anything_in(self);
    if (here > 0 && serve_posted(self) < 0) {
        return -1;
    }
    int taken = here > 0 ? express_pull(self, &wanted, 0, &link) : here;
    Py_XDECREF(link);
    return taken;
}

int
express_wait(Express *self, char *payload, long long deadline_ns)
{
    PyObject *link = NULL;
    Wanted wanted = {.payload = payload, .nbytes = (size_t)self->nbytes};
    int taken = express_pull(self, &wanted, deadline_ns, &link);
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
        {&field_finished.name, "finished"},
        {&str_popleft, "popleft"},
        {&str_done, "done"},
        {&str_data, "data"},
    };
    return intern(names, Py_ARRAY_LENGTH(names));
}
