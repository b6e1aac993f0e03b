/* Credit: the receiver says what it has received, and the sender takes that in. The counterpart of what
   `Delivery.account_for` and `Dispatch.on_credit` do where nothing stands in the way. */

#include "messages.h"

#include <string.h>

static Field field_used, field_waiting;

int
say_received(Express *self, long long owed)
{
    PyObject *link = PyDict_GetItemWithError(self->its[OUTGOING], self->its[FABRIC_ID]);
    if (link == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(link);
    End *tx = ring_of(link, &field_tx);
    int said = tx != NULL ? is_clear(link) : PyErr_Occurred() ? -1 : 0;
    if (said > 0) {
        char received[HEADER_BYTES];
        uint64_t total = (uint64_t)owed;
        Lock lock = {NULL};
        memcpy(received, PyBytes_AS_STRING(self->its[RECEIVED]), HEADER_BYTES);
        memcpy(received + TOTAL_AT, &total, sizeof total);
        said = push_frame(tx, received, HEADER_BYTES, NULL, 0, &lock);
        if (said && atomic_load_explicit(&tx->words[READER_SLEEPS], memory_order_relaxed) &&
            call_method(link, str_wake_peer) < 0) {
            said = -1;
        }
    }
    Py_DECREF(link);
    return said;
}

/* Take the frame out of the ring, with the fabric's lock. */
static int
take_locked(Express *self, End *rx)
{
    char found[HEADER_BYTES];
    if (!pull_like(rx, PyBytes_AS_STRING(self->its[RECEIVED]), TOTAL_AT, found, HEADER_BYTES)) {
        return 0;
    }
    int fine = attribute_is_none(self->its[MAILBOX], &field_fault);
    if (fine <= 0) {
        return fine;
    }
    int waiting = attribute_is_true(self->its[ACCOUNT], &field_waiting);
    if (waiting) { /* the long way sends what could not go before */
        return waiting < 0 ? -1 : 0;
    }
    long long used = attribute_number(self->its[ACCOUNT], &field_used);
    uint64_t total;
    memcpy(&total, found + TOTAL_AT, sizeof total);
    if (used < 0 || set_number(self->its[ACCOUNT], &field_used, total > (uint64_t)used ? 0 : used - (long long)total) < 0) {
        return -1;
    }
    consume(rx, HEADER_BYTES);
    return 1;
}

int
take_received(Express *self, End *rx)
{
    int entered = enter(self, 0), taken = entered < 0 ? -1 : take_locked(self, rx);
    leave(self, entered);
    return taken;
}

int
credit_ready(void)
{
    static const Name names[] = {{&field_used.name, "used"}, {&field_waiting.name, "waiting"}};
    return intern(names, Py_ARRAY_LENGTH(names));
}
