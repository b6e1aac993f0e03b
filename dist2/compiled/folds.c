/* Folds: left to right, each element in a register or a block that stays in the cache. */

#include "steps.h"

#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__)
#define FOR_EACH_CPU __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define FOR_EACH_CPU
#endif
#define FOLD_BLOCK 2048 /* bytes */

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

const Fold FOLDS[] = {
    {"sum_float32", sum_float32, 4},         {"sum_float64", sum_float64, 8},
    {"sum_int32", sum_int32, 4},             {"sum_int64", sum_int64, 8},
    {"average_float32", average_float32, 4}, {"average_float64", average_float64, 8},
};
const Py_ssize_t FOLD_COUNT = sizeof FOLDS / sizeof FOLDS[0];

int
folds_ready(PyObject *module)
{
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
