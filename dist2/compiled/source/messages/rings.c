/* Rings: one end of a byte pipe in shared memory, the counterpart of `dist2.backends.socket.transport.links.ring`. */

#include "messages.h"

#include <sched.h>
#include <string.h>

#define PIECE_BYTES (8 << 10) /* published at once */
#define PATIENT_NS 200000     /* how long a reader waits for the rest of a frame */
#define FEW_LOOKS 64
#define LINE_BYTES 64 /* of a cache */

static int
end_init(End *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"memory", NULL};
    PyObject *memory;
    if (self->words != NULL) {
        PyErr_SetString(PyExc_TypeError, "an End is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O:End", names, &memory) ||
        PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) {
        return -1;
    }
    Py_ssize_t page = PAGE_WORDS * sizeof(Word);
    if (self->memory.len <= page || (uintptr_t)self->memory.buf % sizeof(Word)) {
        PyErr_Format(PyExc_ValueError, "memory: need an aligned page and more, got %zd bytes", self->memory.len);
        PyBuffer_Release(&self->memory);
        return -1;
    }
    self->words = self->memory.buf;
    self->bytes = (char *)self->memory.buf + page;
    self->capacity = (uint64_t)(self->memory.len - page);
    self->pidfd = -1;
    return 0;
}

static void
end_dealloc(End *self)
{
    if (self->words != NULL) {
        PyBuffer_Release(&self->memory);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Copy into the ring, and continue at its beginning. */
static void
put(End *end, uint64_t at, const char *from, size_t nbytes)
{
    uint64_t place = (at - end->base) % end->capacity;
    size_t first = nbytes < end->capacity - place ? nbytes : end->capacity - place;
    memcpy(end->bytes + place, from, first);
    memcpy(end->bytes, from + first, nbytes - first);
}

/* Copy out of the ring, and continue at its beginning. */
static void
get(End *end, uint64_t at, char *to, size_t nbytes)
{
    uint64_t place = (at - end->base) % end->capacity;
    size_t first = nbytes < end->capacity - place ? nbytes : end->capacity - place;
    memcpy(to, end->bytes + place, first);
    memcpy(to + first, end->bytes, nbytes - first);
}

/* Start a frame at the beginning of the ring, which both sides have in their caches; possible while no byte is
   unread. A payload that does not fit into one cache line with its header starts at a line of its own. */
static void
restart(End *end, size_t header_bytes, size_t nbytes)
{
    size_t spare = LINE_BYTES - header_bytes % LINE_BYTES;
    end->base = end->count - (nbytes > spare ? spare : 0);
    atomic_store_explicit(&end->words[BASE], end->base, memory_order_relaxed); /* the head is published later */
}

/* Whether the next unread bytes are this header; the remaining unread bytes lie behind it. */
static int
is_next(End *end, const char *header, size_t header_bytes)
{
    end->base = atomic_load_explicit(&end->words[BASE], memory_order_relaxed);
    uint64_t place = (end->count - end->base) % end->capacity;
    size_t first = header_bytes < end->capacity - place ? header_bytes : end->capacity - place;
    return memcmp(end->bytes + place, header, first) == 0 &&
           memcmp(end->bytes, header + first, header_bytes - first) == 0;
}

int
push_frame(End *end, const char *header, size_t header_bytes, const char *payload, size_t nbytes, Lock *lock)
{
    uint64_t at = end->count, unread = at - atomic_load_explicit(&end->words[TAIL], memory_order_acquire);
    if (unread > end->capacity || end->capacity - unread < header_bytes + nbytes) {
        return 0;
    }
    if (unread == 0) {
        restart(end, header_bytes, nbytes);
    }
    if (nbytes >= LONG_BYTES) {
        give_up_lock(lock);
    }
    put(end, at, header, header_bytes);
    at += header_bytes;
    for (size_t done = 0; done < nbytes;) {
        size_t piece = nbytes - done < PIECE_BYTES ? nbytes - done : PIECE_BYTES;
        put(end, at, payload + done, piece);
        at += piece;
        done += piece;
        atomic_store_explicit(&end->words[HEAD], at, memory_order_release);
    }
    atomic_store_explicit(&end->words[HEAD], at, memory_order_release);
    end->count = at;
    atomic_thread_fence(memory_order_seq_cst); /* publish the bytes before reading the reader's flag */
    return 1;
}

/* Wait for bytes beyond a position: return their number, or 0 if none come. */
static uint64_t
await_more(End *end, uint64_t at, Lock *lock)
{
    long long start = 0;
    for (long look = 0;; look++) {
        uint64_t more = atomic_load_explicit(&end->words[HEAD], memory_order_acquire) - at;
        if (more) {
            return more;
        }
        if (look < FEW_LOOKS) {
            pause_core();
            continue;
        }
        give_up_lock(lock);
        long long now = monotonic_ns();
        start = start ? start : now;
        if (now - start > PATIENT_NS) {
            return 0;
        }
        sched_yield();
    }
}

int
pull_frame(End *end, const char *header, size_t header_bytes, char *payload, size_t nbytes, Lock *lock)
{
    uint64_t unread = atomic_load_explicit(&end->words[HEAD], memory_order_acquire) - end->count;
    if (unread < header_bytes || unread > end->capacity || !is_next(end, header, header_bytes)) {
        return 0;
    }
    if (nbytes >= LONG_BYTES && lock != NULL) {
        give_up_lock(lock);
    }
    uint64_t at = end->count + header_bytes;
    for (size_t done = 0; done < nbytes;) {
        uint64_t more = await_more(end, at, lock);
        if (more == 0 || at + more - end->count > end->capacity) {
            return 0;
        }
        size_t piece = nbytes - done < more ? nbytes - done : more;
        get(end, at, payload + done, piece);
        at += piece;
        done += piece;
    }
    return 1;
}

int
await_frame(End *end, const char *header, size_t header_bytes, size_t nbytes, Lock *lock)
{
    uint64_t unread = atomic_load_explicit(&end->words[HEAD], memory_order_acquire) - end->count;
    if (unread < header_bytes || unread > end->capacity || !is_next(end, header, header_bytes)) {
        return 0;
    }
    while (unread < header_bytes + nbytes) {
        uint64_t more = await_more(end, end->count + unread, lock);
        if (more == 0) {
            return 0;
        }
        unread += more;
    }
    return 1;
}

int
pull_like(End *end, const char *header, size_t alike, char *found, size_t header_bytes)
{
    uint64_t unread = atomic_load_explicit(&end->words[HEAD], memory_order_acquire) - end->count;
    if (unread < header_bytes || unread > end->capacity || !is_next(end, header, alike)) {
        return 0;
    }
    get(end, end->count, found, header_bytes);
    return 1;
}

void
consume(End *end, uint64_t nbytes)
{
    end->count += nbytes;
    atomic_store_explicit(&end->words[TAIL], end->count, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst); /* publish the free space before reading the writer's flag */
}

static PyMemberDef end_members[] = {
    {"_count", T_ULONGLONG, offsetof(End, count), 0, "Bytes that this end has written or read."},
    {"_base", T_ULONGLONG, offsetof(End, base), 0, "Which of them lies at the beginning."},
    {"_pidfd", T_INT, offsetof(End, pidfd), 0, "Readable once the process of the other side has ended."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject End_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.messages.End",
    .tp_doc = "One end of a ring.",
    .tp_basicsize = sizeof(End),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)end_init,
    .tp_dealloc = (destructor)end_dealloc,
    .tp_members = end_members,
};

int
rings_ready(PyObject *module)
{
    return PyModule_AddType(module, &End_Type);
}
