/* Rings: byte pipes through shared memory, with one writer and one reader, in place of a socket.

   A ring lies in the writer's arena: a page with five words and the slots of loans (see ``loans.py``), then the bytes.
   HEAD counts bytes written, TAIL bytes read; each has one writer, so neither needs a lock. The writer stores HEAD
   (release) after the bytes, the reader loads it (acquire) before it reads them; likewise TAIL, for the free space.
   A reader without data, or a writer without room, sets its flag before it sleeps and looks once more; the other side
   publishes its counter before it reads the flag. Both sides therefore have a fence (seq_cst) between the two.

   Positions are counted from BASE. While nothing is unread, the writer may set it to its next position, so that the
   next bytes are written at the beginning again: in memory that both sides have in their caches. BASE is stored before
   HEAD, and read after it.

   Each end keeps its own counter in private memory and accepts the other's only within bounds: shared memory written
   by a peer is untrusted input.

   Source: Lamport, "Proving the Correctness of Multiprocess Programs", 1977 (the two-counter queue). */

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
    static char *names[] = {"memory", "writes", NULL};
    PyObject *memory;
    int writes;
    if (self->words != NULL) {
        PyErr_SetString(PyExc_TypeError, "an End is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Op:End", names, &memory, &writes) ||
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
    self->count = atomic_load_explicit(&self->words[writes ? HEAD : TAIL], memory_order_relaxed);
    self->base = atomic_load_explicit(&self->words[BASE], memory_order_relaxed);
    self->writes = (char)writes;
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

/* Publish a counter of this end; the fence comes before the look at the other end's flag. */
static void
publish_count(End *end, int word, uint64_t count)
{
    end->count = count;
    atomic_store_explicit(&end->words[word], count, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
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
    publish_count(end, HEAD, at);
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
    publish_count(end, TAIL, end->count + nbytes);
}

/* ---- As a stream: the methods of a socket that links use ---- */

/* Return how many bytes are unread; -1 with an exception where the other end's counter cannot be right. */
static long long
unread_in(End *end)
{
    uint64_t other = atomic_load_explicit(&end->words[end->writes ? TAIL : HEAD], memory_order_acquire);
    uint64_t unread = end->writes ? end->count - other : other - end->count;
    if (unread > end->capacity) {
        PyErr_Format(PyExc_ConnectionError, "the %s of a ring of %llu bytes says that %llu are unread",
                     end->writes ? "reader" : "writer", (unsigned long long)end->capacity, (unsigned long long)unread);
        return -1;
    }
    return (long long)unread;
}

/* Write a sequence of buffers, as much as there is room for. */
static PyObject *
end_sendmsg(End *self, PyObject *buffers)
{
    long long unread = unread_in(self);
    PyObject *all = unread < 0 ? NULL : PySequence_Fast(buffers, "buffers: no sequence");
    if (all == NULL) {
        return NULL;
    }
    size_t room = (size_t)(self->capacity - (uint64_t)unread);
    if (unread == 0) {
        restart(self, 0, 0);
    }
    uint64_t at = self->count;
    for (Py_ssize_t each = 0; each < PySequence_Fast_GET_SIZE(all) && room; each++) {
        Py_buffer data;
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(all, each), &data, PyBUF_SIMPLE) < 0) {
            Py_DECREF(all);
            return NULL;
        }
        size_t count = (size_t)data.len < room ? (size_t)data.len : room;
        put(self, at, data.buf, count);
        PyBuffer_Release(&data);
        at += count;
        room -= count;
    }
    Py_DECREF(all);
    uint64_t written = at - self->count;
    if (written == 0 && room == 0) {
        return PyErr_SetNone(PyExc_BlockingIOError), NULL;
    }
    publish_count(self, HEAD, at);
    return PyLong_FromUnsignedLongLong(written);
}

/* Read what is there into a buffer, up to its length. */
static PyObject *
end_recv_into(End *self, PyObject *buffer)
{
    Py_buffer data;
    long long unread = unread_in(self);
    if (unread <= 0) {
        return unread < 0 ? NULL : (PyErr_SetNone(PyExc_BlockingIOError), NULL);
    }
    if (PyObject_GetBuffer(buffer, &data, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    size_t count = (size_t)data.len < (size_t)unread ? (size_t)data.len : (size_t)unread;
    self->base = atomic_load_explicit(&self->words[BASE], memory_order_relaxed);
    get(self, self->count, data.buf, count);
    PyBuffer_Release(&data);
    publish_count(self, TAIL, self->count + count);
    return PyLong_FromSize_t(count);
}

/* Set whether this end sleeps until the other one wakes it. */
static PyObject *
end_doze(End *self, PyObject *sleeping)
{
    int sleeps = PyObject_IsTrue(sleeping);
    if (sleeps < 0) {
        return NULL;
    }
    atomic_store_explicit(&self->words[self->writes ? WRITER_SLEEPS : READER_SLEEPS], (uint64_t)sleeps,
                          memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* set the flag before looking at the other end's counter again */
    Py_RETURN_NONE;
}

static PyObject *
end_other_sleeps(End *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(
        atomic_load_explicit(&self->words[self->writes ? READER_SLEEPS : WRITER_SLEEPS], memory_order_relaxed) != 0);
}

static PyObject *
end_has_bytes(End *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(has_bytes(self));
}

static PyObject *
end_has_room(End *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(self->count - atomic_load_explicit(&self->words[TAIL], memory_order_acquire) <
                           self->capacity);
}

static PyMethodDef end_methods[] = {
    {"sendmsg", (PyCFunction)end_sendmsg, METH_O, "Write buffers, as much as there is room for."},
    {"recv_into", (PyCFunction)end_recv_into, METH_O, "Read available bytes, up to the length of a buffer."},
    {"doze", (PyCFunction)end_doze, METH_O, "Set whether this end sleeps until the other one wakes it."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef end_properties[] = {
    {"other_sleeps", (getter)end_other_sleeps, NULL, "Whether the other end wants to be woken.", NULL},
    {"has_bytes", (getter)end_has_bytes, NULL, "Whether there is something to read.", NULL},
    {"has_room", (getter)end_has_room, NULL, "Whether there is room to write.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef end_members[] = {
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
    .tp_methods = end_methods,
    .tp_members = end_members,
    .tp_getset = end_properties,
};

int
rings_ready(PyObject *module)
{
    return PyModule_AddType(module, &End_Type);
}
