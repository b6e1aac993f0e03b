/* Credit: the sender reads the receiver's report of received bytes. The counterpart of `Dispatch.on_credit`, for the
   case in which no message waits for credit. */

#include "messages.h"

#include <string.h>

static Field field_used, field_waiting;

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
    if (waiting) { /* the long path then sends the waiting messages */
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
