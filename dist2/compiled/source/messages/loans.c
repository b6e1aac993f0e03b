/* Long messages: the sender offers memory, the receiver reads it, and each reports to the other. What cannot end here
   goes on in dist2/backends/socket/transport/messages/express_long.py. */

#include "messages.h"

#include <poll.h>
#include <string.h>
#include <sys/uio.h>

#define PIECE_BYTES (1 << 20) /* read at once */
#define CHECK_NS 1000000      /* between two looks whether the group has failed */

static Field field_pid;

/* ---- The sender ---- */

/* Read the receiver's answer: 1, 0 if another frame is next, or -1 with an exception. */
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

/* Wait a moment for the receiver. */
static int
await_taken(Express *self, End *rx, PyObject *link, long long deadline_ns, Offer *offer)
{
    while (!has_bytes(rx)) {
        int here = watch_ring(self, rx, deadline_ns);
        if (here <= 0) {
            return here;
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
    Py_INCREF(rx);
    int offered = send_frame(self, address, offer);
    if (offered > 0) {
        offered = await_taken(self, rx, link, deadline_ns, offer);
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
    if (offer->tx != NULL) { /* before the next poller reads the receiver's word, which has to find the message */
        taken = hand_over(offer, taken);
    }
    taken = give_role(self, taken);
    return taken < 0 && offer->adopted != NULL ? take_back(offer) : taken;
}

/* ---- The receiver ---- */

/* Look whether the group has failed: 1, 0, or -1 with an exception. */
static int
has_failed(Express *self, Lock *lock)
{
    take_lock(lock);
    int none = attribute_is_none(self->its[MAILBOX], &field_aborted);
    none = none > 0 ? attribute_is_none(self->its[MAILBOX], &field_fault) : none;
    give_up_lock(lock);
    return none < 0 ? -1 : !none;
}

/* Let the kernel read a message piece by piece: 1, 0 if it refuses or the group has failed, -1 with an exception.
   The bytes are valid only if the loan still stands afterwards: see `say_taken`. */
static int
read_loan(Express *self, pid_t pid, uint64_t there, char *here, size_t nbytes)
{
    Lock lock = {NULL};
    give_up_lock(&lock);
    long long checked_ns = monotonic_ns();
    int read = 1;
    for (size_t done = 0; read > 0 && done < nbytes;) {
        size_t piece = nbytes - done < PIECE_BYTES ? nbytes - done : PIECE_BYTES;
        struct iovec local = {here + done, piece}, remote = {(char *)(uintptr_t)there + done, piece};
        read = process_vm_readv(pid, &local, 1, &remote, 1, 0) == (ssize_t)piece;
        done += piece;
        long long now = monotonic_ns();
        if (read && now - checked_ns >= CHECK_NS) {
            checked_ns = now;
            int failed = has_failed(self, &lock);
            read = failed < 0 ? -1 : !failed;
        }
    }
    take_lock(&lock);
    return read;
}

/* Whether the sender's process has ended. Its process id may then belong to another process, and the bytes be that
   one's. */
static int
has_ended(const End *rx)
{
    struct pollfd process = {.fd = rx->pidfd, .events = POLLIN};
    return rx->pidfd >= 0 && poll(&process, 1, 0) != 0;
}

/* Report that a loan was read, if it still stands, with the fabric's lock: 1, 0 if the long path has to do it. */
static int
say_taken(Express *self, End *rx, const uint64_t loan[3])
{
    int fine = attribute_is_none(self->its[MAILBOX], &field_aborted);
    fine = fine > 0 ? attribute_is_none(self->its[MAILBOX], &field_fault) : fine;
    if (fine <= 0 || loan[2] >= PAGE_WORDS - SLOTS_AT ||
        atomic_load_explicit(&rx->words[SLOTS_AT + loan[2]], memory_order_acquire) != loan[0] || has_ended(rx)) {
        return fine < 0 ? -1 : 0;
    }
    return answer(self, TAKEN, TRANSFER_AT, loan[0]);
}

int
fetch_from(Express *self, PyObject *link, char *address, Fetch *fetch)
{
    End *rx = ring_of(link, &field_rx);
    fetch->was_read = 0;
    if (rx == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(rx);
    long long pid = attribute_number((PyObject *)rx, &field_pid);
    int said = pid < 0 ? -1 : 0;
    if (pid > 0) {
        said = read_loan(self, (pid_t)pid, fetch->loan[1], address, (size_t)self->nbytes);
        fetch->was_read = said > 0;
    }
    if (said > 0) {
        said = call(self->its[ACQUIRE]);
        if (said == 0) {
            said = say_taken(self, rx, fetch->loan);
            release(self->its[RELEASE]);
        }
    }
    Py_DECREF(rx);
    return said;
}

int
express_fetch(Express *self, char *address, long long deadline_ns, Fetch *fetch)
{
    Wanted offer = {.payload = (char *)fetch->loan, .nbytes = sizeof fetch->loan};
    int pulled = express_pull(self, &offer, deadline_ns, &fetch->link);
    if (pulled <= 0) {
        return pulled;
    }
    pulled = fetch_from(self, fetch->link, address, fetch);
    if (pulled) {
        Py_CLEAR(fetch->link);
    }
    return pulled;
}

int
loans_ready(void)
{
    static const Name names[] = {{&field_pid.name, "pid"}};
    return intern(names, Py_ARRAY_LENGTH(names));
}
