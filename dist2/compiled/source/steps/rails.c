/* Rails: what a script sends to one member on another host, and receives of it, over a socket. The counterpart, one
   message at a time, is `SocketSend` and `SocketTake`; see transport/messages/rails.py.

   A rail is open while a script runs. It then has the sockets for itself, and keeps the account of the credit. What
   it cannot do, or what does not come in a moment, stops the script: Python closes the rail, which hands over what
   is under way, and goes on by the long way. */

#include "rails.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <structmember.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define YIELDS 8
#define WAIT_MS 1
#define TURN_NS 2000000 /* how long a script runs before Python looks around */
#define MOST_POLLED 64

enum { SEQ_AT = 16, TOTAL_AT = 48 };

/* A message on its way out. */
typedef struct {
    char header[FRAME_BYTES];
    char *payload;
    size_t nbytes, done; /* `done` counts the header as well */
    long number;
} Outgoing;

struct Rail {
    PyObject_HEAD
    int out, in; /* descriptors of its own; -1: it is closed */
    uint64_t seq;
    long long used, owed, limit, reported, cost;
    char template[FRAME_BYTES]; /* of a frame that reports credit, */
    char credit[FRAME_BYTES];   /* one that is on its way, */
    size_t credit_done;         /* and how much of it is; FRAME_BYTES: there is none */
    Outgoing *queue;
    size_t first, last, room;
    char staged[FRAME_BYTES]; /* the header of what is coming in, */
    size_t filled;            /* and how much has come, of header and payload */
    char known;               /* it is that of the message that is received */
    long kept;                /* messages that Python has, which come before what the socket has */
    unsigned long long moved;    /* bytes, in both directions */
    unsigned long long received; /* messages, since it was opened */
    long long turn_ns;
    char stalled; /* it stopped the script, but may go on */
    char broken;  /* the other side is gone, or something else comes than what it knows */
};

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

/* Whether Python is to look around. */
static int
is_over(Rail *self)
{
    return monotonic_ns() - self->turn_ns > TURN_NS;
}

/* Write something; return how many bytes went, 0 where there is no room. */
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

/* Report what was received, if it is time to; 0 if the frame is not out. */
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
    if (self->credit_done == 0) { /* no byte of it is out: what it says may still grow */
        memcpy(&self->owed, self->credit + TOTAL_AT, sizeof self->owed);
        self->credit_done = FRAME_BYTES;
        return 0;
    }
    return self->credit_done == FRAME_BYTES;
}

/* Write what there is room and credit for; 1 if more is to be written once there is room. */
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

/* Read something of a frame; 1 if something came. */
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

/* Act on a header: 1 if it is that of the message, 0 if it was a report of credit, -1 if it is another. */
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

/* Read a header, whose message is to be this one (if one is given), and what credit is reported before it: 1 if it is
   here, 0 if nothing more has come, -1 if it is another. */
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

/* Look whether credit is reported, where that is what is waited for; 1 if it may still come. */
static int
look_for_credit(Rail *self)
{
    if (self->first == self->last || self->queue[self->first].done || self->known) {
        return 0;
    }
    return take_header(self, NULL) == 0 && !self->broken;
}

/* Read what has come of a message: 1 if it is all here, -1 if it is another. */
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

/* Wait for a moment until something comes on a rail (if one is given), or can be written on any; 1 if nothing does. */
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
    if (self->out < 0) { /* Python has what is under way */
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

static PyObject *
rail_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"credit", "limit", "reported", "cost", NULL};
    Py_buffer credit;
    long long limit, reported, cost;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "y*LLL", names, &credit, &limit, &reported, &cost)) {
        return NULL;
    }
    if (credit.len != FRAME_BYTES) {
        PyErr_Format(PyExc_ValueError, "credit: %zd bytes are no header", credit.len);
        PyBuffer_Release(&credit);
        return NULL;
    }
    Rail *self = (Rail *)type->tp_alloc(type, 0);
    if (self != NULL) {
        memcpy(self->template, credit.buf, FRAME_BYTES);
        self->out = self->in = -1;
        self->limit = limit;
        self->reported = reported;
        self->cost = cost;
        self->credit_done = FRAME_BYTES;
    }
    PyBuffer_Release(&credit);
    return (PyObject *)self;
}

static void
close_descriptors(Rail *self)
{
    if (self->in >= 0 && self->in != self->out) {
        close(self->in);
    }
    if (self->out >= 0) {
        close(self->out);
    }
    self->in = self->out = -1;
}

static void
rail_dealloc(Rail *self)
{
    close_descriptors(self);
    PyMem_RawFree(self->queue);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
rail_open(Rail *self, PyObject *args)
{
    int out, in;
    unsigned long long seq;
    long long used, owed;
    long kept = 0;
    if (!PyArg_ParseTuple(args, "iiKLL|l", &out, &in, &seq, &used, &owed, &kept)) {
        return NULL;
    }
    if (self->out >= 0) {
        PyErr_SetString(PyExc_RuntimeError, "the rail is open");
        return NULL;
    }
    self->out = fcntl(out, F_DUPFD_CLOEXEC, 0); /* whoever drops the link may do so meanwhile */
    self->in = in == out ? self->out : fcntl(in, F_DUPFD_CLOEXEC, 0);
    if (self->out < 0 || self->in < 0) {
        close_descriptors(self);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    self->seq = seq;
    self->used = used;
    self->owed = owed;
    self->kept = kept;
    self->first = self->last = self->filled = 0;
    self->received = 0;
    self->credit_done = FRAME_BYTES;
    self->stalled = self->broken = self->known = 0;
    self->turn_ns = monotonic_ns();
    Py_RETURN_NONE;
}

static PyObject *
rail_took(Rail *self, PyObject *cost)
{
    long long owed = PyLong_AsLongLong(cost);
    if (owed == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (self->kept == 0) {
        PyErr_SetString(PyExc_RuntimeError, "no messages are kept");
        return NULL;
    }
    self->kept--;
    self->owed += owed;
    Py_RETURN_NONE;
}

static PyObject *
rail_go_on(Rail *self, PyObject *Py_UNUSED(none))
{
    self->stalled = 0;
    self->turn_ns = monotonic_ns();
    Py_RETURN_NONE;
}

/* List the messages that are not out: how many bytes of each are, header included, and which it is. */
static PyObject *
unsent(const Rail *self)
{
    PyObject *found = PyList_New(0);
    for (size_t each = self->first; found != NULL && each < self->last; each++) {
        const Outgoing *left = &self->queue[each];
        PyObject *item = Py_BuildValue("ln", left->number, (Py_ssize_t)left->done);
        if (item == NULL || PyList_Append(found, item) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(item);
    }
    return found;
}

static PyObject *
rail_close(Rail *self, PyObject *Py_UNUSED(none))
{
    PyObject *left = unsent(self);
    if (left == NULL) {
        return NULL;
    }
    size_t header = self->filled < FRAME_BYTES ? self->filled : FRAME_BYTES;
    self->first = self->last = 0;
    close_descriptors(self);
    return Py_BuildValue("LLNy#y#n", self->used, self->owed, left, self->credit + self->credit_done,
                         (Py_ssize_t)(FRAME_BYTES - self->credit_done), self->staged, (Py_ssize_t)header,
                         (Py_ssize_t)(self->filled - header));
}

static PyMethodDef methods[] = {
    {"open", (PyCFunction)rail_open, METH_VARARGS, "Begin to use sockets."},
    {"took", (PyCFunction)rail_took, METH_O, "Have one message less that Python has."},
    {"go_on", (PyCFunction)rail_go_on, METH_NOARGS, "Let a script that was stalled go on."},
    {"close", (PyCFunction)rail_close, METH_NOARGS, "Stop using the sockets; tell what is under way."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"kept", T_LONG, offsetof(Rail, kept), READONLY, "How many messages Python has, which come first."},
    {"stalled", T_BOOL, offsetof(Rail, stalled), READONLY, "It stopped a script, but may go on."},
    {"moved", T_ULONGLONG, offsetof(Rail, moved), READONLY, "How many bytes it has moved so far."},
    {"received", T_ULONGLONG, offsetof(Rail, received), READONLY, "How many messages came since it was opened."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject RailType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._steps.Rail",
    .tp_doc = "The messages of scripts with one member on another host.",
    .tp_basicsize = sizeof(Rail),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = rail_new,
    .tp_dealloc = (destructor)rail_dealloc,
    .tp_methods = methods,
    .tp_members = members,
};

int
rails_ready(PyObject *module)
{
    return PyModule_AddType(module, &RailType);
}
