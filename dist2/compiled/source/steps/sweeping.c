/* Sweeps: copies of what is longer than the caches, a block at a time, by way of memory that stays in them.

   What is read from memory is read from several pages in turn, as the processor looks ahead within a page alone, and
   asked for before it is wanted. What nobody reads again soon is stored past the caches: to store into a line that is
   in none would mean to fetch it first, and it would put out what is wanted. */

#include "script.h"

#include <string.h>

#define LINE 64

/* The sweeps of one kind of processors. Each returns how many bytes it has copied: `memcpy` does the rest. */
typedef size_t Sweep(char *dst, const char *src, size_t nbytes);
typedef struct {
    const char *name;
    Sweep *in, *out, *past;
    size_t (*both)(char *kept, char *passed, const char *src, size_t nbytes);
    size_t (*in_beside)(char *dst, const char *src, char *out, const char *slot, size_t nbytes);
    size_t (*both_beside)(char *kept, char *passed, const char *src, char *out, const char *slot, size_t nbytes);
} Sweeps;

static size_t
no_sweep(char *Py_UNUSED(dst), const char *Py_UNUSED(src), size_t Py_UNUSED(nbytes))
{
    return 0;
}

static size_t
no_sweep_both(char *Py_UNUSED(kept), char *Py_UNUSED(passed), const char *Py_UNUSED(src), size_t Py_UNUSED(nbytes))
{
    return 0;
}

static size_t
no_in_beside(char *dst, const char *src, char *Py_UNUSED(out), const char *Py_UNUSED(slot), size_t nbytes)
{
    return no_sweep(dst, src, nbytes);
}

static size_t
no_both_beside(char *kept, char *passed, const char *src, char *Py_UNUSED(out), const char *Py_UNUSED(slot),
               size_t nbytes)
{
    return no_sweep_both(kept, passed, src, nbytes);
}

#ifdef __SSE2__
#include <immintrin.h>

#define PAGE 4096
#define PAGES 4                  /* that are read in turn, */
#define LINES 4                  /* so many lines of each, */
#define AHEAD (PAGES * PAGE)     /* and asked for so many bytes before */
#define NEAR_AHEAD 512           /* the same for what another core has in its cache: it comes line by line */

static inline __attribute__((always_inline)) void
ask_for(const char *src)
{
    for (int line = 0; line < LINES * LINE; line += LINE) {
        _mm_prefetch(src + line, _MM_HINT_T0);
    }
}

/* Read lines of several pages in turn, and do something with each; return how many bytes that were. */
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
/* The sweeps with vectors of one kind; what is stored past the caches begins a line. */
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
    attributes static size_t level##_in(char *dst, const char *src, size_t nbytes)                            \
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line, level##_keep_line(dst + line, src + line));                            \
    }                                                                                                         \
    attributes static size_t level##_past(char *dst, const char *src, size_t nbytes)                          \
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line, level##_pass_line(dst + line, src + line));                            \
    }                                                                                                         \
    attributes static size_t level##_both(char *kept, char *passed, const char *src, size_t nbytes)           \
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line,                                                                        \
                    (level##_keep_line(kept + line, src + line), level##_pass_line(passed + line, src + line)));\
    }                                                                                                         \
    attributes static size_t level##_in_beside(char *dst, const char *src, char *out, const char *slot, size_t nbytes)\
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line,                                                                        \
                    (level##_keep_line(dst + line, src + line), _mm_prefetch(slot + NEAR_AHEAD, _MM_HINT_T0), \
                     level##_pass_line(out, slot), out += LINE, slot += LINE));                               \
    }                                                                                                         \
    attributes static size_t level##_both_beside(char *kept, char *passed, const char *src, char *out,        \
                                                 const char *slot, size_t nbytes)                             \
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line,                                                                        \
                    (level##_keep_line(kept + line, src + line), level##_pass_line(passed + line, src + line),\
                     _mm_prefetch(slot + NEAR_AHEAD, _MM_HINT_T0), level##_pass_line(out, slot),              \
                     out += LINE, slot += LINE));                                                             \
    }                                                                                                         \
    attributes static size_t level##_out(char *dst, const char *src, size_t nbytes)                           \
    {                                                                                                         \
        size_t done = 0;                                                                                      \
        for (; nbytes - done >= LINE; done += LINE) {                                                         \
            _mm_prefetch(src + done + NEAR_AHEAD, _MM_HINT_T0);                                               \
            level##_pass_line(dst + done, src + done);                                                        \
        }                                                                                                     \
        return done;                                                                                          \
    }

#define WIDE __attribute__((target("avx512f")))
DEFINE_SWEEPS(sse2, , __m128i, _mm_loadu_si128, _mm_storeu_si128, _mm_stream_si128)
DEFINE_SWEEPS(avx512, WIDE, __m512i, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512)

#define KIND(level)                                                                                           \
    {#level, level##_in, level##_out, level##_past, level##_both, level##_in_beside, level##_both_beside}
#define SETTLE() _mm_sfence()
#define HAS_AVX512() __builtin_cpu_supports("avx512f")
#else
#define SETTLE()
#define HAS_AVX512() 0
#endif

/* From the plainest to the widest. */
static const Sweeps SWEEPS[] = {
    {"none", no_sweep, no_sweep, no_sweep, no_sweep_both, no_in_beside, no_both_beside},
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

void
sweep(char *dst, const char *src, size_t nbytes, int way)
{
    size_t ragged = -(uintptr_t)dst % LINE; /* before the first whole line */
    ragged = ragged < nbytes ? ragged : nbytes;
    memcpy(dst, src, ragged);
    dst += ragged, src += ragged, nbytes -= ragged;
    size_t done = (way == IN ? sweeps->in : way == OUT ? sweeps->out : sweeps->past)(dst, src, nbytes);
    memcpy(dst + done, src + done, nbytes - done);
    SETTLE();
}

void
sweep_both(char *kept, char *passed, const char *src, size_t nbytes)
{
    size_t ragged = -(uintptr_t)passed % LINE;
    ragged = ragged < nbytes ? ragged : nbytes;
    memcpy(kept, src, ragged);
    memcpy(passed, src, ragged);
    kept += ragged, passed += ragged, src += ragged, nbytes -= ragged;
    size_t done = sweeps->both(kept, passed, src, nbytes);
    memcpy(kept + done, src + done, nbytes - done);
    memcpy(passed + done, src + done, nbytes - done);
    SETTLE();
}

void
sweep_beside(char *out, const char *slot, size_t emptied, char *kept, char *passed, const char *src, size_t nbytes)
{
    size_t ragged = -(uintptr_t)out % LINE;
    ragged = ragged < emptied ? ragged : emptied;
    memcpy(out, slot, ragged);
    out += ragged, slot += ragged, emptied -= ragged;
    if (passed != NULL) {
        ragged = -(uintptr_t)passed % LINE;
        ragged = ragged < nbytes ? ragged : nbytes;
        memcpy(kept, src, ragged);
        memcpy(passed, src, ragged);
        kept += ragged, passed += ragged, src += ragged, nbytes -= ragged;
    }
    size_t most = emptied < nbytes ? emptied : nbytes;
    size_t done = passed == NULL ? sweeps->in_beside(kept, src, out, slot, most)
                                 : sweeps->both_beside(kept, passed, src, out, slot, most);
    sweep(out + done, slot + done, emptied - done, OUT);
    if (passed == NULL) {
        sweep(kept + done, src + done, nbytes - done, IN);
    }
    else {
        sweep_both(kept + done, passed + done, src + done, nbytes - done);
    }
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
