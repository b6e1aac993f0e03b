/* Folds: from left to right, each element in a register or in a block that stays in the cache. The order is part of
   the contract: all ranks get the same bits, and torch, which folds what these functions cannot, uses the same order.
   To add a dtype that is summed in itself: a DEFINE_FOLD, a row in FOLDS, and one in the tables of reduction.py. */

#include "reduce.h"

#include <stdint.h>
#include <string.h>

/* The choice of a clone runs before the runtime of the thread sanitizer does. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define FOR_EACH_CPU __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define FOR_EACH_CPU
#endif
#define FOLD_BLOCK 4096 /* bytes */

/* Sums of `count` vectors; the compiler must know `count`. `dst` may be any of them. The pragma asserts that no
   iteration reads the result of another, which holds because vectors are equal or disjoint. Signed sums wrap, so
   they are computed as unsigned ones. */
#define DEFINE_SOME(name, type, finish)                                                                       \
    static inline __attribute__((always_inline)) void name##_some(                                            \
        type *dst, const type *const *srcs, const int count, size_t numel, type divisor)               \
    {                                                                                                         \
        (void)divisor;                                                                                        \
        _Pragma("GCC ivdep") for (size_t at = 0; at < numel; at++)                                            \
        {                                                                                                     \
            type sum = srcs[0][at];                                                                           \
            for (int each = 1; each < count; each++)                                                   \
                sum += srcs[each][at];                                                                        \
            dst[at] = finish(sum, divisor);                                                                   \
        }                                                                                                     \
    }                                                                                                         \
    static inline __attribute__((always_inline)) void name##_few(                                             \
        type *dst, const type *const *srcs, int count, size_t numel, type divisor)                     \
    {                                                                                                         \
        if (count == 2)                                                                                       \
            name##_some(dst, srcs, 2, numel, divisor);                                                        \
        else if (count == 3)                                                                                  \
            name##_some(dst, srcs, 3, numel, divisor);                                                        \
        else if (count == 4)                                                                                  \
            name##_some(dst, srcs, 4, numel, divisor);                                                        \
        else if (count == FEW)                                                                                \
            name##_some(dst, srcs, FEW, numel, divisor);                                                      \
        else                                                                                                  \
            name##_some(dst, srcs, 1, numel, divisor);                                                        \
    }
#define FEW 5

/* Sums of any number of vectors: block by block, a few vectors at a time. Partial sums stay in the cache, and not in
   `dst`, which may be a vector that is still to be added. */
#define DEFINE_SUM(name, partial, type)                                                                       \
    FOR_EACH_CPU static void name(                                                                            \
        void *dst, const void *const *srcs, int count, size_t numel, double divisor)                   \
    {                                                                                                         \
        if (count <= FEW) {                                                                                   \
            name##_few(dst, (const type *const *)srcs, count, numel, (type)divisor);                          \
            return;                                                                                           \
        }                                                                                                     \
        type block[FOLD_BLOCK / sizeof(type)];                                                                \
        for (size_t start = 0; start < numel; start += FOLD_BLOCK / sizeof(type)) {                           \
            size_t left = numel - start;                                                                      \
            size_t length = left < FOLD_BLOCK / sizeof(type) ? left : FOLD_BLOCK / sizeof(type);              \
            const type *few[FEW];                                                                             \
            int next = 0, taken = 0;                                                                   \
            for (; next < FEW; next++)                                                                        \
                few[taken++] = (const type *)srcs[next] + start;                                              \
            partial##_some(block, few, FEW, length, (type)divisor);                                           \
            while (next < count) {                                                                            \
                few[0] = block;                                                                               \
                for (taken = 1; taken < FEW && next < count; next++)                                          \
                    few[taken++] = (const type *)srcs[next] + start;                                          \
                if (next < count)                                                                             \
                    partial##_some(block, few, FEW, length, (type)divisor);                                   \
                else                                                                                          \
                    name##_few((type *)dst + start, few, taken, length, (type)divisor);                       \
            }                                                                                                 \
        }                                                                                                     \
    }

#define AS_IT_IS(sum, divisor) (sum)
#define DIVIDED(sum, divisor) ((sum) / (divisor))
#define DEFINE_FOLD(name, partial, type, finish) DEFINE_SOME(name, type, finish) DEFINE_SUM(name, partial, type)

DEFINE_FOLD(sum_float32, sum_float32, float, AS_IT_IS)
DEFINE_FOLD(sum_float64, sum_float64, double, AS_IT_IS)
DEFINE_FOLD(sum_int32, sum_int32, uint32_t, AS_IT_IS)
DEFINE_FOLD(sum_int64, sum_int64, uint64_t, AS_IT_IS)
DEFINE_FOLD(average_float32, sum_float32, float, DIVIDED)
DEFINE_FOLD(average_float64, sum_float64, double, DIVIDED)

const Fold FOLDS[] = {
    {"sum_float32", sum_float32, 4},         {"sum_float64", sum_float64, 8},
    {"sum_int32", sum_int32, 4},             {"sum_int64", sum_int64, 8},
    {"average_float32", average_float32, 4}, {"average_float64", average_float64, 8},
};
const int FOLD_COUNT = sizeof FOLDS / sizeof FOLDS[0];
