/* Sweeps: copies of data longer than the caches, a block at a time, through memory that stays in them.

   A source in memory is read from several pages in turn, because the processor's prefetcher works within one page,
   and is prefetched. A destination that no rank reads soon is stored past the caches: a store into an uncached line
   would first load the line, and would evict useful ones. A slot is stored past the caches if its reader gets it
   sooner from memory than from the writer's caches. */

#include "script.h"

#include <string.h>

#define LINE 64

/* The sweeps of one kind of processor. Each returns the number of bytes that it has copied; `memcpy` copies the
   rest. */
typedef size_t Sweep(char *dst, const char *src, size_t nbytes);
typedef struct {
    Sweep *in;
    size_t (*both)(char *slot, char *passed, const char *src, size_t nbytes);
    size_t (*in_beside)(char *slot, const char *src, char *out, const char *emptied, size_t nbytes);
    size_t (*both_beside)(char *slot, char *passed, const char *src, char *out, const char *emptied, size_t nbytes);
} Fills; /* into a slot, or past one */
typedef struct {
    const char *name;
    Sweep *out;
    Fills near, away; /* slot lines that stay in the caches, or go past them */
} Sweeps;

static size_t
no_sweep(char *Py_UNUSED(dst), const char *Py_UNUSED(src), size_t Py_UNUSED(nbytes))
{
    return 0;
}

static size_t
no_both(char *Py_UNUSED(slot), char *Py_UNUSED(passed), const char *Py_UNUSED(src), size_t Py_UNUSED(nbytes))
{
    return 0;
}

static size_t
no_in_beside(char *slot, const char *src, char *Py_UNUSED(out), const char *Py_UNUSED(emptied), size_t nbytes)
{
    return no_sweep(slot, src, nbytes);
}

static size_t
no_both_beside(char *slot, char *passed, const char *src, char *Py_UNUSED(out), const char *Py_UNUSED(emptied),
               size_t nbytes)
{
    return no_both(slot, passed, src, nbytes);
}

#define NO_FILLS {no_sweep, no_both, no_in_beside, no_both_beside}

#ifdef __SSE2__
#include <immintrin.h>

#define PAGE 4096
#define PAGES 4                  /* that are read in turn, */
#define LINES 4                  /* so many lines of each, */
#define AHEAD (PAGES * PAGE)     /* and prefetched so many bytes ahead */
#define NEAR_AHEAD 512           /* the same for data in another core's cache: it comes line by line */

static inline __attribute__((always_inline)) void
ask_for(const char *src)
{
    for (int line = 0; line < LINES * LINE; line += LINE) {
        _mm_prefetch(src + line, _MM_HINT_T0);
    }
}

/* Read lines of several pages in turn, and use each; return the number of bytes. */
#define SWEEP_LINES(src, nbytes, line, use)                                                                   \
    size_t done = 0;                                                                                          \
    for (; nbytes - done >= PAGES * PAGE; done += PAGES * PAGE) {                                             \
        for (size_t at = done; at < done + PAGE; at += LINES * LINE) {                                        \
            for (size_t page = at; page < at + PAGES * PAGE; page += PAGE) {                                  \
                ask_for(src + page + AHEAD);                                                                  \
                for (size_t line = page; line < page + LINES * LINE; line += LINE) {                          \
                    use;                                                                                      \
                }                                                                                             \
            }                                                                                                 \
        }                                                                                                     \
    }                                                                                                         \
    return done
                                                                                                              \
/* The sweeps with vectors of one kind; stores past the caches start at a line. */
#define DEFINE_SWEEPS(level, attributes, vector, load, keep, pass)                                            \
    attributes static inline void level##_keep_line(char *dst, const char *src)                               \
    {                                                                                                         \
        for (size_t at = 0; at < LINE; at += sizeof(vector)) {                                                \
            keep((vector *)(dst + at), load((const vector *)(src + at)));                                     \
        }                                                                                                     \
    }                                                                                                         \
    attributes static inline void level##_pass_line(char *dst, const char *src)                               \
    {                                                                                                         \
        for (size_t at = 0; at < LINE; at += sizeof(vector)) {                                                \
            pass((vector *)(dst + at), load((const vector *)(src + at)));                                     \
        }                                                                                                     \
    }                                                                                                         \
    attributes static size_t level##_out(char *dst, const char *src, size_t nbytes)                           \
    {                                                                                                         \
        size_t done = 0;                                                                                      \
        for (; nbytes - done >= LINE; done += LINE) {                                                         \
            _mm_prefetch(src + done + NEAR_AHEAD, _MM_HINT_T0);                                               \
            level##_pass_line(dst + done, src + done);                                                        \
        }                                                                                                     \
        return done;                                                                                          \
    }                                                                                                         \
    DEFINE_FILLS(level, attributes, near, level##_keep_line)                                                  \
    DEFINE_FILLS(level, attributes, away, level##_pass_line)

/* Those that fill a slot; stores past the caches start at a line. */
#define DEFINE_FILLS(level, attributes, where, fill_line)                                                     \
    attributes static size_t level##_in_##where(char *slot, const char *src, size_t nbytes)                   \
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line, fill_line(slot + line, src + line));                                   \
    }                                                                                                         \
    attributes static size_t level##_both_##where(char *slot, char *passed, const char *src, size_t nbytes)   \
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line,                                                                        \
                    (fill_line(slot + line, src + line), level##_pass_line(passed + line, src + line)));      \
    }                                                                                                         \
    attributes static size_t level##_in_beside_##where(char *slot, const char *src, char *out,                \
                                                       const char *emptied, size_t nbytes)                    \
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line,                                                                        \
                    (fill_line(slot + line, src + line), _mm_prefetch(emptied + NEAR_AHEAD, _MM_HINT_T0),     \
                     level##_pass_line(out, emptied), out += LINE, emptied += LINE));                         \
    }                                                                                                         \
    attributes static size_t level##_both_beside_##where(char *slot, char *passed, const char *src, char *out,\
                                                         const char *emptied, size_t nbytes)                  \
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line,                                                                        \
                    (fill_line(slot + line, src + line), level##_pass_line(passed + line, src + line),        \
                     _mm_prefetch(emptied + NEAR_AHEAD, _MM_HINT_T0), level##_pass_line(out, emptied),        \
                     out += LINE, emptied += LINE));                                                          \
    }

#define WIDE __attribute__((target("avx512f")))
DEFINE_SWEEPS(sse2, , __m128i, _mm_loadu_si128, _mm_storeu_si128, _mm_stream_si128)
DEFINE_SWEEPS(avx512, WIDE, __m512i, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512)

#define FILLS(level, where)                                                                                   \
    {level##_in_##where, level##_both_##where, level##_in_beside_##where, level##_both_beside_##where}
#define KIND(level) {#level, level##_out, FILLS(level, near), FILLS(level, away)}
#define SETTLE() _mm_sfence()
#define HAS_AVX512() __builtin_cpu_supports("avx512f")
#else
#define SETTLE()
#define HAS_AVX512() 0
#endif

/* From the plainest to the widest. */
static const Sweeps SWEEPS[] = {
    {"none", no_sweep, NO_FILLS, NO_FILLS},
#ifdef __SSE2__
    KIND(sse2),
    KIND(avx512),
#endif
};
static const Sweeps *sweeps = SWEEPS; /* in use: at first the widest that this processor has */

static Py_ssize_t
count_sweeps(void)
{
    return (Py_ssize_t)Py_ARRAY_LENGTH(SWEEPS) - (Py_ARRAY_LENGTH(SWEEPS) > 1 && !HAS_AVX512());
}

static const Fills *
fills_of(int into)
{
    return into == IN ? &sweeps->near : &sweeps->away;
}

void
sweep(char *dst, const char *src, size_t nbytes, int way)
{
    size_t ragged = -(uintptr_t)dst % LINE; /* before the first whole line */
    ragged = ragged < nbytes ? ragged : nbytes;
    memcpy(dst, src, ragged);
    dst += ragged, src += ragged, nbytes -= ragged;
    size_t done = (way == OUT ? sweeps->out : fills_of(way)->in)(dst, src, nbytes);
    memcpy(dst + done, src + done, nbytes - done);
    SETTLE();
}

/* Whether a slot cannot be stored past the caches together with `passed`, because its lines are offset from those of
   `passed`. */
static int
is_askew(const char *slot, const char *passed, int into)
{
    return into == AWAY && ((uintptr_t)slot - (uintptr_t)passed) % LINE != 0;
}

void
sweep_both(char *slot, char *passed, const char *src, size_t nbytes, int into)
{
    if (is_askew(slot, passed, into)) { /* the second read hits a cache */
        sweep(slot, src, nbytes, into);
        sweep(passed, src, nbytes, PAST);
        return;
    }
    size_t ragged = -(uintptr_t)passed % LINE;
    ragged = ragged < nbytes ? ragged : nbytes;
    memcpy(slot, src, ragged);
    memcpy(passed, src, ragged);
    slot += ragged, passed += ragged, src += ragged, nbytes -= ragged;
    size_t done = fills_of(into)->both(slot, passed, src, nbytes);
    memcpy(slot + done, src + done, nbytes - done);
    memcpy(passed + done, src + done, nbytes - done);
    SETTLE();
}

/* Fill a slot, and `passed` if it is not NULL. */
static void
fill(char *slot, char *passed, const char *src, size_t nbytes, int into)
{
    if (passed == NULL) {
        sweep(slot, src, nbytes, into);
    }
    else {
        sweep_both(slot, passed, src, nbytes, into);
    }
}

void
sweep_beside(char *out, const char *emptied, size_t length, char *slot, char *passed, const char *src, size_t nbytes,
             int into)
{
    if (is_askew(slot, passed, into)) {
        sweep(out, emptied, length, OUT);
        fill(slot, passed, src, nbytes, into);
        return;
    }
    size_t ragged = -(uintptr_t)out % LINE;
    ragged = ragged < length ? ragged : length;
    memcpy(out, emptied, ragged);
    out += ragged, emptied += ragged, length -= ragged;
    if (passed != NULL) {
        ragged = -(uintptr_t)passed % LINE;
        ragged = ragged < nbytes ? ragged : nbytes;
        memcpy(slot, src, ragged);
        memcpy(passed, src, ragged);
        slot += ragged, passed += ragged, src += ragged, nbytes -= ragged;
    }
    size_t most = length < nbytes ? length : nbytes;
    const Fills *fills = fills_of(into);
    size_t done = passed == NULL ? fills->in_beside(slot, src, out, emptied, most)
                                 : fills->both_beside(slot, passed, src, out, emptied, most);
    sweep(out + done, emptied + done, length - done, OUT);
    fill(slot + done, passed == NULL ? NULL : passed + done, src + done, nbytes - done, into);
}

static PyObject *
sweep_by(PyObject *Py_UNUSED(module), PyObject *name)
{
    const char *wanted = PyUnicode_AsUTF8(name);
    for (Py_ssize_t each = 0; wanted != NULL && each < count_sweeps(); each++) {
        if (strcmp(SWEEPS[each].name, wanted) == 0) {
            sweeps = &SWEEPS[each];
            Py_RETURN_NONE;
        }
    }
    return wanted == NULL ? NULL : PyErr_Format(PyExc_ValueError, "no sweeps by %R here", name);
}

static PyMethodDef methods[] = {
    {"sweep_by", sweep_by, METH_O, "Choose by what vectors memory is swept: one of SWEEPS."},
    {NULL, NULL, 0, NULL},
};

int
sweeping_ready(PyObject *module)
{
    Py_ssize_t count = count_sweeps();
    PyObject *names = PyTuple_New(count);
    for (Py_ssize_t each = 0; names != NULL && each < count; each++) {
        PyObject *name = PyUnicode_FromString(SWEEPS[each].name);
        if (name == NULL) {
            Py_CLEAR(names);
        }
        else {
            PyTuple_SET_ITEM(names, each, name);
        }
    }
    sweeps = &SWEEPS[count - 1];
    int added = names == NULL ? -1 : PyModule_AddObjectRef(module, "SWEEPS", names);
    Py_XDECREF(names);
    return added < 0 ? -1 : PyModule_AddFunctions(module, methods);
}
