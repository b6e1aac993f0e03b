/* Steps of programs on shared memory: copies, folds, fences, and what the kernel moves between processes.

   `Arrivals` is the counterpart of `dist2.backends.socket.transport.arrivals.Arrivals`, and means the same. `Script`
   runs the steps of one program with their addresses bound. Whatever it cannot do stops it: it returns the
   number of that step, which its caller does in Python, and goes on behind it. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* The words of a member's control page, as `arrivals.py` has them. */
enum { SLEEPING = 2, SEQ = 7, GAVE_UP = 8, WORDS = 9 };
#define PRINT_BITS 40
#define PRINT_MASK ((UINT64_C(1) << PRINT_BITS) - 1)
#define PHASES (UINT64_C(1) << (64 - PRINT_BITS))

#define YIELD_BUDGET_NS INT64_C(2000000)
#define DOZE_NS INT64_C(4000000) /* from the beginning of the wait; after that Python sleeps */
#define SHORT_NAP 8
#define LONG_NAP 512
#define FEW_LOOKS 8           /* with the interpreter lock: giving it up costs as much as they do */
#define LONG_BYTES (32 << 10) /* copies from here on are made without the interpreter lock */

typedef _Atomic uint64_t Word;

static PyObject *str_data_ptr, *str_fingerprint, *str_seq, *str_signature;

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

/* Return the monotonic clock. */
static inline int64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The interpreter lock, which a waiter gives up at most once, and takes again when it must. */
typedef struct {
    PyThreadState *state;
} Lock;

static inline void
give_up_lock(Lock *lock)
{
    if (lock->state == NULL)
        lock->state = PyEval_SaveThread();
}

static inline void
take_lock(Lock *lock)
{
    if (lock->state != NULL) {
        PyEval_RestoreThread(lock->state);
        lock->state = NULL;
    }
}

/* ---- Arrivals ---- */

typedef struct {
    Py_buffer memory;
    Word *words;
    long rank;
    int bell;
    PyObject *doorbell; /* holds the descriptor open */
} Peer;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Word *own;
    Py_ssize_t count;
    Peer *peers;
    unsigned long long phase;
    long long slow_ns;
    long spins, yields, sleepy, nap;
    int bell;
    PyObject *doorbell;
    _Atomic char stopped;
    PyObject *at, *before;
} Arrivals;

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

/* What a call publishes at its fences. */
typedef struct {
    uint64_t print;
    uint64_t seq;
} Label;

/* Read what a call publishes. */
static int
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

/* Note which call is under way. */
static void
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
    int64_t start = now_ns(), now = start, budget = self->sleepy ? 0 : YIELD_BUDGET_NS;
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
        now = now_ns();
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
    int64_t end = now_ns() + DOZE_NS, now;
    give_up_lock(lock);
    while (!atomic_load_explicit(&self->stopped, memory_order_relaxed) && (now = now_ns()) < end) {
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

/* Publish the next fence and wait for the others: by looking, by yielding, and by sleeping for a moment. 1 if all
   are here, 0 if it is time to sleep in Python, -1 with an exception. */
static int
cross(Arrivals *self, const Label *label, PyObject *attend, Lock *lock)
{
    uint64_t phase = ++self->phase;
    int parity = phase & 1;
    uint64_t word = (phase % PHASES) << PRINT_BITS | label->print;
    atomic_store_explicit(&self->own[parity], word, memory_order_release);
    /* The word must be out before a peer's sleep flag is read. */
    atomic_thread_fence(memory_order_seq_cst);
    Py_ssize_t absent = still_absent(self, self->count, parity, word);
    if (!absent) {
        ring_sleepers(self);
        return 1;
    }
    for (long look = 0; look < self->spins; look++) {
        if (look == FEW_LOOKS)
            give_up_lock(lock);
        pause_core();
        absent = still_absent(self, absent, parity, word);
        if (!absent)
            return 1;
    }
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
    int crossed = cross(self, &label, attend, &lock);
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
    {"at", T_OBJECT, offsetof(Arrivals, at), READONLY, NULL},
    {"before", T_OBJECT, offsetof(Arrivals, before), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef arrivals_getset[] = {
    {"stopped", (getter)arrivals_get_stopped, (setter)arrivals_set_stopped, "Whether waiting is over.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject ArrivalsType = {
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

/* ---- Folds: left to right, each element in a register or a block that stays in the cache ---- */

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__)
#define FOR_EACH_CPU __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define FOR_EACH_CPU
#endif
#define FOLD_BLOCK 2048 /* bytes */
#define MOST_SOURCES 64

typedef void FoldFunction(void *dst, const void *const *srcs, Py_ssize_t count, size_t numel, double divisor);

/* Sums of `count` vectors. `dst` may be any of them. The pragma says that no iteration needs what another one
   writes: so it is, as vectors are the same or apart. Signed sums wrap, so they are made without sign. */
#define DEFINE_SUM(name, type, finish)                                                                        \
    static inline __attribute__((always_inline)) void name##_some(                                            \
        type *dst, const type *const *srcs, const Py_ssize_t count, size_t numel, type divisor)               \
    {                                                                                                         \
        (void)divisor;                                                                                        \
        _Pragma("GCC ivdep") for (size_t at = 0; at < numel; at++)                                            \
        {                                                                                                     \
            type sum = srcs[0][at];                                                                           \
            for (Py_ssize_t each = 1; each < count; each++)                                                   \
                sum += srcs[each][at];                                                                        \
            dst[at] = finish(sum, divisor);                                                                   \
        }                                                                                                     \
    }                                                                                                         \
    FOR_EACH_CPU static void name(                                                                            \
        void *dst, const void *const *srcs, Py_ssize_t count, size_t numel, double divisor)                   \
    {                                                                                                         \
        const type *const *from = (const type *const *)srcs;                                                  \
        if (count == 2)                                                                                       \
            name##_some(dst, from, 2, numel, (type)divisor);                                                  \
        else if (count == 3)                                                                                  \
            name##_some(dst, from, 3, numel, (type)divisor);                                                  \
        else if (count == 4)                                                                                  \
            name##_some(dst, from, 4, numel, (type)divisor);                                                  \
        else                                                                                                  \
            name##_many(dst, from, count, numel, (type)divisor);                                              \
    }

/* Sums of many vectors: block by block, as their number is not known to the compiler. */
#define DEFINE_MANY(name, type, finish)                                                                       \
    static inline __attribute__((always_inline)) void name##_many(                                            \
        type *dst, const type *const *srcs, Py_ssize_t count, size_t numel, type divisor)                     \
    {                                                                                                         \
        type block[FOLD_BLOCK / sizeof(type)];                                                                \
        (void)divisor;                                                                                        \
        for (size_t start = 0; start < numel; start += FOLD_BLOCK / sizeof(type)) {                           \
            size_t left = numel - start;                                                                      \
            size_t length = left < FOLD_BLOCK / sizeof(type) ? left : FOLD_BLOCK / sizeof(type);              \
            memcpy(block, srcs[0] + start, length * sizeof(type));                                            \
            for (Py_ssize_t each = 1; each < count; each++)                                                   \
                for (size_t at = 0; at < length; at++)                                                        \
                    block[at] += srcs[each][start + at];                                                      \
            for (size_t at = 0; at < length; at++)                                                            \
                dst[start + at] = finish(block[at], divisor);                                                 \
        }                                                                                                     \
    }

#define AS_IT_IS(sum, divisor) (sum)
#define DIVIDED(sum, divisor) ((sum) / (divisor))
#define DEFINE_FOLD(name, type, finish) DEFINE_MANY(name, type, finish) DEFINE_SUM(name, type, finish)

DEFINE_FOLD(sum_float32, float, AS_IT_IS)
DEFINE_FOLD(sum_float64, double, AS_IT_IS)
DEFINE_FOLD(sum_int32, uint32_t, AS_IT_IS)
DEFINE_FOLD(sum_int64, uint64_t, AS_IT_IS)
DEFINE_FOLD(average_float32, float, DIVIDED)
DEFINE_FOLD(average_float64, double, DIVIDED)

static const struct {
    const char *name;
    FoldFunction *function;
    size_t itemsize;
} FOLDS[] = {
    {"sum_float32", sum_float32, 4},         {"sum_float64", sum_float64, 8},
    {"sum_int32", sum_int32, 4},             {"sum_int64", sum_int64, 8},
    {"average_float32", average_float32, 4}, {"average_float64", average_float64, 8},
};
#define FOLD_COUNT ((Py_ssize_t)(sizeof FOLDS / sizeof FOLDS[0]))

/* ---- Script ---- */

enum { STOP, COPY, FENCE, FOLD, READ, WRITE, SAME, AT, KINDS };

/* Where a step reads or writes: at an address, or so far into a tensor of the call. */
typedef struct {
    Py_ssize_t tensor; /* -1: none, `at` is the address */
    uint64_t at;
} Place;

/* One step. */
typedef struct {
    int kind;
    int fold;
    long pid;
    Py_ssize_t owner; /* index of the peer that a WRITE writes to */
    size_t nbytes;
    double divisor;
    Place dst, src;
    Py_ssize_t count; /* of `srcs` */
    Place *srcs;
    PyObject *wait;  /* of a FENCE: called if not all have come in time */
    PyObject *check; /* of a FENCE among those that lend: called if somebody has given up */
    PyObject *bytes; /* of a SAME */
} Step;

typedef struct {
    PyObject_HEAD
    Arrivals *arrivals;
    Py_ssize_t count;
    Step *steps;
    Py_ssize_t tensors; /* how many of the call's are used: the inputs, then the outputs */
    Py_ssize_t inputs;
    char *used;
    int fences;
} Script;

static void
clear_step(Step *step)
{
    PyMem_Free(step->srcs);
    step->srcs = NULL;
    Py_CLEAR(step->wait);
    Py_CLEAR(step->check);
    Py_CLEAR(step->bytes);
}

static int
script_clear(Script *self)
{
    for (Py_ssize_t each = 0; each < self->count; each++)
        clear_step(&self->steps[each]);
    self->count = 0;
    Py_CLEAR(self->arrivals);
    return 0;
}

static int
script_traverse(Script *self, visitproc visit, void *arg)
{
    Py_VISIT(self->arrivals);
    for (Py_ssize_t each = 0; each < self->count; each++) {
        Py_VISIT(self->steps[each].wait);
        Py_VISIT(self->steps[each].check);
    }
    return 0;
}

static void
script_dealloc(Script *self)
{
    PyObject_GC_UnTrack(self);
    script_clear(self);
    PyMem_Free(self->steps);
    PyMem_Free(self->used);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Read a place, and note which tensor it lies in. */
static int
read_place(Script *self, PyObject *source, Place *place)
{
    unsigned long long at;
    if (!PyArg_ParseTuple(source, "nK;a place is a tensor and a number of bytes", &place->tensor, &at))
        return -1;
    place->at = at;
    if (place->tensor < -1 || place->tensor >= self->tensors) {
        PyErr_Format(PyExc_IndexError, "tensor %zd of %zd", place->tensor, self->tensors);
        return -1;
    }
    if (place->tensor >= 0)
        self->used[place->tensor] = 1;
    return 0;
}

static int
read_copy(Script *self, PyObject *args, Step *step)
{
    PyObject *dst, *src;
    if (!PyArg_ParseTuple(args, "iO!O!n", &step->kind, &PyTuple_Type, &dst, &PyTuple_Type, &src, &step->nbytes))
        return -1;
    return read_place(self, dst, &step->dst) < 0 || read_place(self, src, &step->src) < 0 ? -1 : 0;
}

static int
read_fence(Script *self, PyObject *args, Step *step)
{
    PyObject *wait, *check;
    if (!PyArg_ParseTuple(args, "iOO", &step->kind, &wait, &check))
        return -1;
    step->wait = Py_NewRef(wait);
    step->check = check == Py_None ? NULL : Py_NewRef(check);
    self->fences++;
    return 0;
}

/* Find a fold by its name. */
static int
find_fold(const char *name)
{
    for (int each = 0; each < FOLD_COUNT; each++)
        if (strcmp(FOLDS[each].name, name) == 0)
            return each;
    PyErr_Format(PyExc_ValueError, "there is no fold %s", name);
    return -1;
}

static int
read_fold(Script *self, PyObject *args, Step *step)
{
    const char *name;
    PyObject *dst, *srcs;
    if (!PyArg_ParseTuple(args, "isdO!O!n", &step->kind, &name, &step->divisor, &PyTuple_Type, &dst,
                          &PyTuple_Type, &srcs, &step->nbytes))
        return -1;
    step->fold = find_fold(name);
    if (step->fold < 0 || read_place(self, dst, &step->dst) < 0)
        return -1;
    step->count = PyTuple_GET_SIZE(srcs);
    if (step->count < 1 || step->count > MOST_SOURCES || step->nbytes % FOLDS[step->fold].itemsize) {
        PyErr_Format(PyExc_ValueError, "cannot fold %zd vectors of %zd bytes", step->count, step->nbytes);
        return -1;
    }
    step->srcs = PyMem_Calloc((size_t)step->count, sizeof(Place));
    if (step->srcs == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t each = 0; each < step->count; each++)
        if (read_place(self, PyTuple_GET_ITEM(srcs, each), &step->srcs[each]) < 0)
            return -1;
    return 0;
}

static int
read_move(Script *self, PyObject *args, Step *step)
{
    unsigned long long dst, src;
    long owner;
    if (!PyArg_ParseTuple(args, "illKKn", &step->kind, &owner, &step->pid, &dst, &src, &step->nbytes))
        return -1;
    step->dst.at = dst;
    step->src.at = src;
    for (step->owner = 0; step->owner < self->arrivals->count; step->owner++)
        if (self->arrivals->peers[step->owner].rank == owner)
            return 0;
    PyErr_Format(PyExc_ValueError, "rank %ld is no other member", owner);
    return -1;
}

static int
read_same(PyObject *args, Step *step)
{
    PyObject *bytes;
    unsigned long long at;
    if (!PyArg_ParseTuple(args, "iKS", &step->kind, &at, &bytes))
        return -1;
    step->src.at = at;
    step->bytes = Py_NewRef(bytes);
    return 0;
}

static int
read_at(Script *self, PyObject *args, Step *step)
{
    PyObject *place;
    unsigned long long at;
    if (!PyArg_ParseTuple(args, "iO!K", &step->kind, &PyTuple_Type, &place, &at))
        return -1;
    step->src.at = at;
    return read_place(self, place, &step->dst);
}

/* Read one step: a tuple that begins with its kind. */
static int
read_step(Script *self, PyObject *args, Step *step)
{
    if (!PyTuple_Check(args) || PyTuple_GET_SIZE(args) == 0) {
        PyErr_Format(PyExc_TypeError, "a step is a tuple, got %R", args);
        return -1;
    }
    switch (PyLong_AsLong(PyTuple_GET_ITEM(args, 0))) {
    case STOP:
        return PyArg_ParseTuple(args, "i", &step->kind) ? 0 : -1;
    case COPY:
        return read_copy(self, args, step);
    case FENCE:
        return read_fence(self, args, step);
    case FOLD:
        return read_fold(self, args, step);
    case READ:
    case WRITE:
        return read_move(self, args, step);
    case SAME:
        return read_same(args, step);
    case AT:
        return read_at(self, args, step);
    default:
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "there is no step like %R", args);
        return -1;
    }
}

static int
script_init(Script *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"arrivals", "steps", "inputs", "outputs", NULL};
    PyObject *arrivals, *steps;
    Py_ssize_t outputs = 0;
    if (self->arrivals != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Script is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!|nn", names, &ArrivalsType, &arrivals, &PyTuple_Type, &steps,
                                     &self->inputs, &outputs))
        return -1;
    self->arrivals = (Arrivals *)Py_NewRef(arrivals);
    self->tensors = self->inputs + outputs;
    self->used = PyMem_Calloc((size_t)self->tensors + 1, 1);
    Py_ssize_t count = PyTuple_GET_SIZE(steps);
    self->steps = PyMem_Calloc((size_t)count + 1, sizeof(Step));
    if (self->used == NULL || self->steps == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; self->count < count; self->count++)
        if (read_step(self, PyTuple_GET_ITEM(steps, self->count), &self->steps[self->count]) < 0) {
            clear_step(&self->steps[self->count]);
            return -1;
        }
    return 0;
}

/* A run of a script. */
typedef struct {
    Script *script;
    PyObject *operation;
    Label label;
    Lock lock;
    uint64_t *bases; /* where the tensors lie, a shift included */
} Run;

/* Have Python go on with a fence. */
static int
call_python(Run *run, PyObject *callable)
{
    take_lock(&run->lock);
    PyObject *done = PyObject_CallOneArg(callable, run->operation);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    return 0;
}

static inline void *
address_of(const Run *run, const Place *place)
{
    return (void *)(uintptr_t)(place->tensor < 0 ? place->at : run->bases[place->tensor] + place->at);
}

static int
run_copy(Run *run, const Step *step)
{
    void *dst = address_of(run, &step->dst), *src = address_of(run, &step->src);
    if (step->nbytes >= LONG_BYTES)
        give_up_lock(&run->lock);
    memmove(dst, src, step->nbytes);
    return 0;
}

static int
run_fence(Run *run, const Step *step)
{
    Arrivals *arrivals = run->script->arrivals;
    int crossed = cross(arrivals, &run->label, NULL, &run->lock);
    if (crossed < 0 || (!crossed && call_python(run, step->wait) < 0))
        return -1;
    if (step->check == NULL)
        return 0;
    for (Py_ssize_t each = 0; each < arrivals->count; each++)
        if (atomic_load_explicit(&arrivals->peers[each].words[GAVE_UP], memory_order_acquire))
            return call_python(run, step->check);
    return 0;
}

static int
run_fold(Run *run, const Step *step)
{
    const void *srcs[MOST_SOURCES];
    size_t itemsize = FOLDS[step->fold].itemsize;
    void *dst = address_of(run, &step->dst);
    uintptr_t bits = (uintptr_t)dst;
    for (Py_ssize_t each = 0; each < step->count; each++) {
        srcs[each] = address_of(run, &step->srcs[each]);
        bits |= (uintptr_t)srcs[each];
    }
    if (bits % itemsize) /* elements across words: torch knows how to add them */
        return 1;
    if (step->nbytes * (size_t)step->count >= LONG_BYTES)
        give_up_lock(&run->lock);
    FOLDS[step->fold].function(dst, srcs, step->count, step->nbytes / itemsize, step->divisor);
    return 0;
}

/* Have the kernel move memory; it moves less than 2 GiB at a time. */
static int
move(const Step *step)
{
    char *here = (char *)(uintptr_t)(step->kind == READ ? step->dst.at : step->src.at);
    char *there = (char *)(uintptr_t)(step->kind == READ ? step->src.at : step->dst.at);
    size_t left = step->nbytes;
    while (left) {
        struct iovec local = {here, left}, remote = {there, left};
        ssize_t moved = step->kind == READ ? process_vm_readv((pid_t)step->pid, &local, 1, &remote, 1, 0)
                                           : process_vm_writev((pid_t)step->pid, &local, 1, &remote, 1, 0);
        if (moved <= 0)
            return -1;
        here += moved;
        there += moved;
        left -= (size_t)moved;
    }
    return 0;
}

static int
run_move(Run *run, const Step *step)
{
    /* What is written to after its owner has given up may not be what it was: Python looks and tells. */
    Word *owner = run->script->arrivals->peers[step->owner].words;
    if (step->kind == WRITE && atomic_load_explicit(&owner[GAVE_UP], memory_order_acquire))
        return 1;
    give_up_lock(&run->lock);
    return move(step) < 0;
}

/* Return whether memory holds what it is to hold. */
static int
is_same(const Step *step)
{
    const void *here = (const void *)(uintptr_t)step->src.at;
    return memcmp(here, PyBytes_AS_STRING(step->bytes), (size_t)PyBytes_GET_SIZE(step->bytes)) == 0;
}

/* Run one step: 0, 1 if it stops the script, -1 with an exception. */
static int
run_step(Run *run, const Step *step)
{
    switch (step->kind) {
    case STOP:
        return 1;
    case COPY:
        return run_copy(run, step);
    case FENCE:
        return run_fence(run, step);
    case FOLD:
        return run_fold(run, step);
    case SAME:
        return !is_same(step);
    case AT:
        return (uintptr_t)address_of(run, &step->dst) != step->src.at;
    default:
        return run_move(run, step);
    }
}

/* Find where the tensors of one side lie. */
static int
find_bases(Run *run, PyObject *tensors, Py_ssize_t first, Py_ssize_t stop, uint64_t shift)
{
    PyObject *fast = PySequence_Fast(tensors, "tensors come in a sequence");
    if (fast == NULL)
        return -1;
    if (PySequence_Fast_GET_SIZE(fast) < stop - first) {
        PyErr_Format(PyExc_ValueError, "%zd tensors, not %zd", PySequence_Fast_GET_SIZE(fast), stop - first);
        Py_DECREF(fast);
        return -1;
    }
    for (Py_ssize_t each = first; each < stop; each++) {
        if (!run->script->used[each])
            continue;
        PyObject *address = PyObject_CallMethodNoArgs(PySequence_Fast_GET_ITEM(fast, each - first), str_data_ptr);
        if (address != NULL) {
            run->bases[each] = PyLong_AsUnsignedLongLong(address) + shift;
            Py_DECREF(address);
        }
        if (PyErr_Occurred()) {
            Py_DECREF(fast);
            return -1;
        }
    }
    Py_DECREF(fast);
    return 0;
}

/* Run the steps from one on; return the number of the one that stopped it, or of all. */
static PyObject *
run_steps(Run *run, Py_ssize_t at)
{
    Script *script = run->script;
    int outcome = 0;
    for (; at < script->count && !outcome; at += !outcome)
        outcome = run_step(run, &script->steps[at]);
    take_lock(&run->lock);
    return outcome < 0 ? NULL : PyLong_FromSsize_t(at);
}

/* Run with the tensors' addresses found. */
static PyObject *
run_on(Run *run, PyObject *inputs, PyObject *outputs, uint64_t shift, Py_ssize_t at)
{
    Script *script = run->script;
    uint64_t few[16];
    PyObject *stopped = NULL;
    run->bases = script->tensors <= 16 ? few : PyMem_Calloc((size_t)script->tensors, sizeof(uint64_t));
    if (run->bases == NULL)
        return PyErr_NoMemory();
    if (find_bases(run, inputs, 0, script->inputs, shift) == 0 &&
        find_bases(run, outputs, script->inputs, script->tensors, shift) == 0)
        stopped = run_steps(run, at);
    if (run->bases != few)
        PyMem_Free(run->bases);
    return stopped;
}

static PyObject *
script_run(Script *self, PyObject *const *args, Py_ssize_t count)
{
    Run run = {.script = self};
    if (count != 5) {
        PyErr_Format(PyExc_TypeError, "run takes 5 arguments, got %zd", count);
        return NULL;
    }
    run.operation = args[0];
    uint64_t shift = PyLong_AsUnsignedLongLong(args[3]);
    Py_ssize_t at = PyErr_Occurred() ? -1 : PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (at < 0 || at > self->count) {
        PyErr_Format(PyExc_IndexError, "step %zd of %zd", at, self->count);
        return NULL;
    }
    if (self->fences) {
        if (read_label(run.operation, &run.label) < 0)
            return NULL;
        note_call(self->arrivals, run.operation, &run.label);
    }
    return self->tensors ? run_on(&run, args[1], args[2], shift, at) : run_steps(&run, at);
}

static PyMethodDef script_methods[] = {
    {"run", (PyCFunction)(void (*)(void))script_run, METH_FASTCALL, "Run the steps from one on."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject ScriptType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._steps.Script",
    .tp_doc = "The steps of one program, with their addresses bound.",
    .tp_basicsize = sizeof(Script),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)script_init,
    .tp_dealloc = (destructor)script_dealloc,
    .tp_traverse = (traverseproc)script_traverse,
    .tp_clear = (inquiry)script_clear,
    .tp_methods = script_methods,
};

/* ---- Module ---- */

/* Add what Python names: the kinds of steps, the folds, the words of a page. */
static int
add_names(PyObject *module)
{
    static const char *const kinds[KINDS] = {"STOP", "COPY", "FENCE", "FOLD", "READ", "WRITE", "SAME", "AT"};
    for (int each = 0; each < KINDS; each++)
        if (PyModule_AddIntConstant(module, kinds[each], each) < 0)
            return -1;
    PyObject *folds = PyTuple_New(FOLD_COUNT);
    if (folds == NULL)
        return -1;
    for (Py_ssize_t each = 0; each < FOLD_COUNT; each++) {
        PyObject *name = PyUnicode_FromString(FOLDS[each].name);
        if (name == NULL) {
            Py_DECREF(folds);
            return -1;
        }
        PyTuple_SET_ITEM(folds, each, name);
    }
    int added = PyModule_AddObjectRef(module, "FOLDS", folds);
    Py_DECREF(folds);
    return added;
}

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dist2.compiled._steps",
    .m_doc = "Steps of programs on shared memory: copies, folds and fences.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__steps(void)
{
    str_data_ptr = PyUnicode_InternFromString("data_ptr");
    str_fingerprint = PyUnicode_InternFromString("fingerprint");
    str_seq = PyUnicode_InternFromString("seq");
    str_signature = PyUnicode_InternFromString("signature");
    if (!str_data_ptr || !str_fingerprint || !str_seq || !str_signature)
        return NULL;
    PyObject *self = PyModule_Create(&module);
    if (self == NULL)
        return NULL;
    if (PyModule_AddType(self, &ArrivalsType) < 0 || PyModule_AddType(self, &ScriptType) < 0 || add_names(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
