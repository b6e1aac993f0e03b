/* Traffic of a rail while a script runs: messages, and the credit reports of both sides. */

#include "rails.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define YIELDS 8
#define WAIT_MS 1
#define TURN_NS 2000000 /* how long a script runs before Python does its checks */
#define MOST_POLLED 64

enum { SEQ_AT = 16, TOTAL_AT = 48 };

/* Put the number of the operation into a header. */
static void
number(const Rail *self, const char *header, char *numbered)
{
    memcpy(numbered, header, FRAME_BYTES);
    memcpy(numbered + SEQ_AT, &self->seq, sizeof self->seq);
}

static int
stall(Rail *self)
{
    self->stalled = 1;
    return 1;
}

/* Whether it is time for Python's checks. */
static int
is_over(Rail *self)
{
    return monotonic_ns() - self->turn_ns > TURN_NS;
}

/* Write bytes; return how many were written, 0 if there is no room. */
static size_t
write_some(Rail *self, struct iovec *parts, size_t count)
{
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    ssize_t went = sendmsg(self->out, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (went >= 0) {
        self->moved += (size_t)went;
        return (size_t)went;
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
        self->broken = 1;
    }
    return 0;
}

/* Report received bytes, if a report is due; 0 if the frame is not written completely. */
static int
report(Rail *self)
{
    if (self->credit_done == FRAME_BYTES) {
        if (self->owed < self->reported) {
            return 1;
        }
        memcpy(self->credit, self->template, FRAME_BYTES);
        memcpy(self->credit + TOTAL_AT, &self->owed, sizeof self->owed);
        self->credit_done = 0;
    }
    struct iovec part = {self->credit + self->credit_done, FRAME_BYTES - self->credit_done};
    if (self->credit_done == 0) {
        self->owed = 0;
    }
    self->credit_done += write_some(self, &part, 1);
    if (self->credit_done == 0) { /* no byte of it is written: its value may still grow */
        memcpy(&self->owed, self->credit + TOTAL_AT, sizeof self->owed);
        self->credit_done = FRAME_BYTES;
        return 0;
    }
    return self->credit_done == FRAME_BYTES;
}

/* Write as much as room and credit allow; 1 if more is to be written once there is room. */
static int
push(Rail *self)
{
    while (!self->broken) {
        Outgoing *next = self->first < self->last ? &self->queue[self->first] : NULL;
        if ((next == NULL || next->done == 0) && !report(self)) {
            return 1;
        }
        if (next == NULL) {
            return 0;
        }
        long long cost = self->cost + (long long)next->nbytes;
        if (next->done == 0 && self->used + cost > self->limit) {
            return 0;
        }
        size_t ahead = next->done < FRAME_BYTES ? FRAME_BYTES - next->done : 0;
        size_t at = next->done > FRAME_BYTES ? next->done - FRAME_BYTES : 0;
        struct iovec parts[] = {{next->header + FRAME_BYTES - ahead, ahead}, {next->payload + at, next->nbytes - at}};
        size_t went = write_some(self, ahead ? parts : parts + 1, ahead ? 2 : 1);
        if (went == 0) {
            return 1;
        }
        if (next->done == 0) {
            self->used += cost;
        }
        next->done += went;
        if (next->done == FRAME_BYTES + next->nbytes) {
            self->first++;
        }
    }
    return 0;
}

/* Add a message to the queue; 0 where there is no memory. */
static int
enqueue(Rail *self, const Parcel *parcel)
{
    if (self->first == self->last) {
        self->first = self->last = 0;
    }
    if (self->last == self->room) {
        size_t room = 2 * self->room + 16;
        Outgoing *queue = PyMem_RawRealloc(self->queue, room * sizeof(Outgoing));
        if (queue == NULL) {
            return 0;
        }
        self->queue = queue;
        self->room = room;
    }
    Outgoing *added = &self->queue[self->last++];
    number(self, parcel->header, added->header);
    added->payload = parcel->payload;
    added->nbytes = parcel->nbytes;
    added->done = 0;
    added->number = parcel->number;
    return 1;
}

int
send_parcel(Rail *self, const Parcel *parcel)
{
    if (self->out < 0 || self->broken) {
        return 1;
    }
    if (is_over(self)) {
        return stall(self);
    }
    if (!enqueue(self, parcel)) {
        return 1;
    }
    push(self);
    return 0;
}

/* Read bytes of a frame; 1 if any came. */
static int
read_some(Rail *self, char *at, size_t missing)
{
    ssize_t count = recv(self->in, at, missing, MSG_DONTWAIT);
    if (count > 0) {
        self->filled += (size_t)count;
        self->moved += (size_t)count;
        return 1;
    }
    if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
        self->broken = 1;
    }
    return 0;
}

/* Act on a header: 1 if it is that of the message, 0 if it was a credit report, -1 if it is another. */
static int
act_on_header(Rail *self, const Parcel *parcel)
{
    char expected[FRAME_BYTES];
    if (parcel != NULL) {
        number(self, parcel->header, expected);
        if (memcmp(self->staged, expected, FRAME_BYTES) == 0) {
            return 1;
        }
    }
    if (memcmp(self->staged, self->template, TOTAL_AT) != 0) {
        return -1;
    }
    uint64_t total;
    memcpy(&total, self->staged + TOTAL_AT, sizeof total);
    self->used = total < (uint64_t)self->used ? self->used - (long long)total : 0;
    self->filled = 0;
    return 0;
}

/* Read the header of a given message, or NULL for none, and any credit reports before it: 1 if it is here, 0 if
   nothing more has come, -1 if it is another. */
static int
take_header(Rail *self, const Parcel *parcel)
{
    while (!self->known) {
        if (self->filled < FRAME_BYTES) {
            if (!read_some(self, self->staged + self->filled, FRAME_BYTES - self->filled)) {
                return 0;
            }
            continue;
        }
        int found = act_on_header(self, parcel);
        if (found < 0) {
            return found;
        }
        self->known = (char)found;
    }
    return 1;
}

/* Read a credit report, if the next message waits for credit; 1 if one may still come. */
static int
look_for_credit(Rail *self)
{
    if (self->first == self->last || self->queue[self->first].done || self->known) {
        return 0;
    }
    return take_header(self, NULL) == 0 && !self->broken;
}

/* Read the bytes of a message that have come: 1 if it is complete, -1 if it is another. */
static int
take(Rail *self, const Parcel *parcel)
{
    int found = take_header(self, parcel);
    while (found == 1 && self->filled < FRAME_BYTES + parcel->nbytes) {
        size_t came = self->filled - FRAME_BYTES;
        found = read_some(self, parcel->payload + came, parcel->nbytes - came);
    }
    return found;
}

/* Wait for a moment until bytes come on a rail (if one is given), or any rail can be written; 1 if nothing does. */
static int
wait_some(const Rail *incoming, const Rails *rails, int *yields)
{
    struct pollfd events[MOST_POLLED + 1];
    nfds_t count = 0;
    for (Py_ssize_t each = 0; each < rails->count && count < MOST_POLLED; each++) {
        Rail *rail = rails->each[each];
        int awaits_credit = rail != incoming && look_for_credit(rail);
        if (push(rail)) {
            events[count++] = (struct pollfd){rail->out, POLLOUT, 0};
        }
        else if (awaits_credit && rail->first < rail->last) {
            events[count++] = (struct pollfd){rail->in, POLLIN, 0};
        }
    }
    if (incoming != NULL) {
        events[count++] = (struct pollfd){incoming->in, POLLIN, 0};
    }
    if ((*yields)++ < YIELDS) {
        sched_yield();
        return 0;
    }
    return poll(events, count, WAIT_MS) <= 0;
}

int
see_off(Rail *self, long last, const Rails *rails)
{
    int yields = 0;
    if (self->out < 0) { /* Python has the unfinished messages */
        return 1;
    }
    while (self->first < self->last && self->queue[self->first].number <= last) {
        if (self->broken) {
            return 1;
        }
        if (wait_some(NULL, rails, &yields)) {
            return stall(self);
        }
    }
    return 0;
}

int
receive_parcel(Rail *self, const Parcel *parcel, const Rails *rails)
{
    int yields = 0;
    if (self->out < 0 || self->broken || self->kept) {
        return 1;
    }
    if (self->filled == 0 && is_over(self)) {
        return stall(self);
    }
    while (1) {
        unsigned long long before = self->moved;
        int found = take(self, parcel);
        if (found == 1) {
            break;
        }
        if (found < 0) {
            self->broken = 1;
        }
        if (self->broken) {
            return 1;
        }
        if (self->moved != before) {
            yields = 0;
        }
        if (wait_some(self, rails, &yields)) {
            return stall(self);
        }
    }
    self->filled = 0;
    self->known = 0;
    self->received++;
    self->owed += self->cost + (long long)parcel->nbytes;
    push(self);
    return 0;
}
