/* Arrivals: the counterpart of `dist2.backends.socket.transport.arrivals.Arrivals`, which means the same. */

#include "clock.h"
#include "steps.h"

#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#define PRINT_BITS 40
#define PRINT_MASK ((UINT64_C(1) << PRINT_BITS) - 1)
#define PHASES (UINT64_C(1) << (64 - PRINT_BITS))

#define YIELD_BUDGET_NS INT64_C(2000000)
#define DOZE_NS INT64_C(4000000) /* from the beginning of the wait; after that Python sleeps */
#define SHORT_NAP 8
#define LONG_NAP 512
#define FEW_LOOKS 8 /* with the interpreter lock: giving it up costs as much as they do */

static PyObject *str_fingerprint, *str_seq, *str_signature;

/* Let the other thread of this core run, and save power, while looking at memory. */
static inline void
pause_core(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Bind a buffer of control words. */
static Word *
bind_words(PyObject *source, Py_buffer *memory)
{
    if (PyObject_GetBuffer(source, memory, PyBUF_WRITABLE) < 0)
        return NULL;
    if (memory->len < (Py_ssize_t)(WORDS * sizeof(Word)) || (uintptr_t)memory->buf % sizeof(Word)) {
        PyErr_Format(PyExc_ValueError, "words: need %d aligned ones, got %zd bytes", WORDS, memory->len);
        PyBuffer_Release(memory);
        return NULL;
    }
    return memory->buf;
}

static int
arrivals_init(Arrivals *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"own", "doorbell", "spins", "yields", "slow_ns", NULL};
    PyObject *own, *doorbell;
    if (self->own != NULL) {
        PyErr_SetString(PyExc_TypeError, "Arrivals are made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOllL", names, &own, &doorbell, &self->spins, &self->yields,
                                     &self->slow_ns))
        return -1;
    self->bell = PyObject_AsFileDescriptor(doorbell);
    if (self->bell < 0)
        return -1;
    self->doorbell = Py_NewRef(doorbell);
    self->nap = SHORT_NAP;
    self->own = bind_words(own, &self->memory);
    return self->own == NULL ? -1 : 0;
}

static int
arrivals_traverse(Arrivals *self, visitproc visit, void *arg)
{
    Py_VISIT(self->at);
    Py_VISIT(self->before);
    Py_VISIT(self->doorbell);
    for (Py_ssize_t each = 0; each < self->count; each++)
        Py_VISIT(self->peers[each].doorbell);
    return 0;
}

static int
arrivals_clear(Arrivals *self)
{
    Py_CLEAR(self->at);
    Py_CLEAR(self->before);
    return 0;
}

static void
arrivals_dealloc(Arrivals *self)
{
    PyObject_GC_UnTrack(self);
    arrivals_clear(self);
    Py_CLEAR(self->doorbell);
    for (Py_ssize_t each = 0; each < self->count; each++) {
        Py_CLEAR(self->peers[each].doorbell);
        PyBuffer_Release(&self->peers[each].memory);
    }
    PyMem_Free(self->peers);
    if (self->own != NULL)
        PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
arrivals_add(Arrivals *self, PyObject *args)
{
    PyObject *words, *doorbell;
    Peer peer;
    if (!PyArg_ParseTuple(args, "lOO", &peer.rank, &words, &doorbell))
        return NULL;
    peer.bell = PyObject_AsFileDescriptor(doorbell);
    if (peer.bell < 0)
        return NULL;
    Peer *peers = PyMem_Realloc(self->peers, (size_t)(self->count + 1) * sizeof(Peer));
    if (peers == NULL)
        return PyErr_NoMemory();
    self->peers = peers;
    peer.words = bind_words(words, &peer.memory);
    if (peer.words == NULL)
        return NULL;
    peer.doorbell = Py_NewRef(doorbell);
    peers[self->count++] = peer;
    Py_RETURN_NONE;
}

int
read_label(PyObject *operation, Label *label)
{
    PyObject *seq = PyObject_GetAttr(operation, str_seq);
    if (seq == NULL)
        return -1;
    label->seq = PyLong_AsUnsignedLongLongMask(seq);
    Py_DECREF(seq);
    PyObject *signature = PyObject_GetAttr(operation, str_signature);
    if (signature == NULL)
        return -1;
    PyObject *print = PyObject_GetAttr(signature, str_fingerprint);
    Py_DECREF(signature);
    if (print == NULL)
        return -1;
    label->print = PyLong_AsUnsignedLongLongMask(print) & PRINT_MASK;
    Py_DECREF(print);
    return PyErr_Occurred() ? -1 : 0;
}

void
note_call(Arrivals *self, PyObject *operation, const Label *label)
{
    if (operation == self->at)
        return;
    Py_XSETREF(self->before, self->at);
    self->at = Py_NewRef(operation);
    atomic_store_explicit(&self->own[SEQ], label->seq, memory_order_relaxed);
}

/* Wake the members that sleep. Whoever sleeps waits for all, so only the last to come has to. */
static void
ring_sleepers(Arrivals *self)
{
    for (Py_ssize_t each = 0; each < self->count; each++)
        if (atomic_load_explicit(&self->peers[each].words[SLEEPING], memory_order_relaxed) &&
            write(self->peers[each].bell, "!", 1) < 0)
            continue; /* full: it is about to wake anyway; broken: it is dead, which its watchers tell */
}

/* Return how many of the first members may be absent: those behind them are here. */
static inline Py_ssize_t
still_absent(Arrivals *self, Py_ssize_t absent, int parity, uint64_t word)
{
    while (absent && atomic_load_explicit(&self->peers[absent - 1].words[parity], memory_order_acquire) == word)
        absent--;
    return absent;
}

/* Have somebody's turn come between two yields; 0, or -1 with an exception. */
static int
give_turn(PyObject *attend, Lock *lock)
{
    if (attend == NULL)
        return 0;
    take_lock(lock);
    PyObject *attended = PyObject_CallNoArgs(attend);
    if (attended == NULL)
        return -1;
    Py_DECREF(attended);
    return 0;
}

/* Yield until all are here or it is time to sleep: 1, 0, or -1 with an exception. */
static int
yield_until(Arrivals *self, Py_ssize_t *absent, int parity, uint64_t word, PyObject *attend, Lock *lock)
{
    int64_t start = monotonic_ns(), now = start, budget = self->sleepy ? 0 : YIELD_BUDGET_NS;
    long left = attend == NULL ? self->yields : LONG_MAX;
    self->sleepy -= self->sleepy > 0;
    while (now - start < budget && left-- > 0) {
        *absent = still_absent(self, *absent, parity, word);
        if (!*absent) {
            self->nap -= self->nap > SHORT_NAP;
            return 1;
        }
        if (atomic_load_explicit(&self->stopped, memory_order_relaxed))
            return 0;
        if (give_turn(attend, lock) < 0)
            return -1;
        give_up_lock(lock);
        sched_yield();
        int64_t before = now;
        now = monotonic_ns();
        if (now - before > self->slow_ns) { /* somebody else uses the core: do not compete by polling */
            self->sleepy = self->nap;
            self->nap = 2 * self->nap < LONG_NAP ? 2 * self->nap : LONG_NAP;
            break;
        }
    }
    return 0;
}

/* Sleep on the doorbell for a few milliseconds: 1 if all are here, 0 if Python has to look after the rest. */
static int
doze_until(Arrivals *self, Py_ssize_t absent, int parity, uint64_t word, Lock *lock)
{
    char rings[256];
    int64_t end = monotonic_ns() + DOZE_NS, now;
    give_up_lock(lock);
    while (!atomic_load_explicit(&self->stopped, memory_order_relaxed) && (now = monotonic_ns()) < end) {
        atomic_store_explicit(&self->own[SLEEPING], 1, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst); /* the flag must be out before the words are read again */
        absent = still_absent(self, absent, parity, word);
        if (absent) {
            struct pollfd bell = {.fd = self->bell, .events = POLLIN};
            poll(&bell, 1, 1 + (int)((end - now) / 1000000));
            while (read(self->bell, rings, sizeof rings) == sizeof rings)
                ;
            absent = still_absent(self, absent, parity, word);
        }
        atomic_store_explicit(&self->own[SLEEPING], 0, memory_order_relaxed);
        if (!absent)
            return 1;
    }
    return 0;
}

int
come(Arrivals *self, const Label *label, Waiting *waiting)
{
    uint64_t phase = ++self->phase;
    waiting->parity = phase & 1;
    waiting->word = (phase % PHASES) << PRINT_BITS | label->print;
    atomic_store_explicit(&self->own[waiting->parity], waiting->word, memory_order_release);
    /* The word must be out before a peer's sleep flag is read. */
    atomic_thread_fence(memory_order_seq_cst);
    waiting->absent = still_absent(self, self->count, waiting->parity, waiting->word);
    if (!waiting->absent)
        ring_sleepers(self);
    return !waiting->absent;
}

int
wait_for(Arrivals *self, Waiting *waiting, PyObject *attend, Lock *lock)
{
    int parity = waiting->parity;
    uint64_t word = waiting->word;
    Py_ssize_t absent = still_absent(self, waiting->absent, parity, word);
    for (long look = 0; absent && look < self->spins; look++) {
        if (look == FEW_LOOKS)
            give_up_lock(lock);
        pause_core();
        absent = still_absent(self, absent, parity, word);
    }
    if (!absent)
        return 1;
    int crossed = yield_until(self, &absent, parity, word, attend, lock);
    return crossed || attend != NULL ? crossed : doze_until(self, absent, parity, word, lock);
}

static PyObject *
arrivals_cross(Arrivals *self, PyObject *const *args, Py_ssize_t count)
{
    Label label;
    Lock lock = {NULL};
    if (count < 1 || count > 2) {
        PyErr_Format(PyExc_TypeError, "cross takes an operation and who attends, got %zd arguments", count);
        return NULL;
    }
    if (read_label(args[0], &label) < 0)
        return NULL;
    note_call(self, args[0], &label);
    PyObject *attend = count == 2 && args[1] != Py_None ? args[1] : NULL;
    Waiting waiting;
    int crossed = come(self, &label, &waiting) ? 1 : wait_for(self, &waiting, attend, &lock);
    take_lock(&lock);
    return crossed < 0 ? NULL : PyBool_FromLong(crossed);
}

static PyObject *
arrivals_order(Arrivals *Py_UNUSED(self), PyObject *Py_UNUSED(none))
{
    atomic_thread_fence(memory_order_seq_cst);
    Py_RETURN_NONE;
}

static PyObject *
arrivals_get_stopped(Arrivals *self, void *Py_UNUSED(none))
{
    return PyBool_FromLong(atomic_load(&self->stopped));
}

static int
arrivals_set_stopped(Arrivals *self, PyObject *value, void *Py_UNUSED(none))
{
    int stopped = value == NULL ? 0 : PyObject_IsTrue(value);
    if (stopped < 0)
        return -1;
    atomic_store(&self->stopped, (char)stopped);
    return 0;
}

static PyMethodDef arrivals_methods[] = {
    {"add", (PyCFunction)arrivals_add, METH_VARARGS, "Add another member."},
    {"cross", (PyCFunction)(void (*)(void))arrivals_cross, METH_FASTCALL, "Come to the next fence."},
    {"order", (PyCFunction)arrivals_order, METH_NOARGS, "Have what was written seen before what is read next."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef arrivals_members[] = {
    {"phase", T_ULONGLONG, offsetof(Arrivals, phase), READONLY, NULL},
    {"sleepy", T_LONG, offsetof(Arrivals, sleepy), 0, NULL},
    {"nap", T_LONG, offsetof(Arrivals, nap), 0, NULL},
    {"turn", T_INT, offsetof(Arrivals, turn), 0, NULL},
    {"at", T_OBJECT, offsetof(Arrivals, at), READONLY, NULL},
    {"before", T_OBJECT, offsetof(Arrivals, before), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef arrivals_getset[] = {
    {"stopped", (getter)arrivals_get_stopped, (setter)arrivals_set_stopped, "Whether waiting is over.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject ArrivalsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._steps.Arrivals",
    .tp_doc = "Comes to fences of a board, and waits by looking, yielding and dozing.",
    .tp_basicsize = sizeof(Arrivals),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)arrivals_init,
    .tp_dealloc = (destructor)arrivals_dealloc,
    .tp_traverse = (traverseproc)arrivals_traverse,
    .tp_clear = (inquiry)arrivals_clear,
    .tp_methods = arrivals_methods,
    .tp_members = arrivals_members,
    .tp_getset = arrivals_getset,
};

int
arrivals_ready(PyObject *module)
{
    str_fingerprint = PyUnicode_InternFromString("fingerprint");
    str_seq = PyUnicode_InternFromString("seq");
    str_signature = PyUnicode_InternFromString("signature");
    if (!str_fingerprint || !str_seq || !str_signature)
        return -1;
    return PyModule_AddType(module, &ArrivalsType);
}
