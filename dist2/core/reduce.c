/* Folds: from left to right, each element in a register or in a block that stays in the cache. The order is part of
   the contract: all ranks get the same bits, and torch, which folds what these functions cannot, uses the same order.
   A bfloat16 is folded as float32, and rounded once. NaN wins over every number, as in torch.
   The order of the ranks is that of a step's sources, which schedules give (algorithms/).
   To add a dtype: a DEFINE_FOLDS, rows in FOLDS, and the tables of reduction.py: _ORDERED and _SUMS; for one that is new
   to dist2 also _FLOATS, _HALVES or _INTEGERS. */

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

/* The fold of `count` vectors; the compiler must know `count`. `dst` may be any of them. The pragma asserts that no
   iteration reads the result of another, which holds because vectors are equal or disjoint. Signed sums wrap, so
   they are computed as unsigned ones. */
#define DEFINE_SOME(name, type, join, finish)                                                                 \
    static inline __attribute__((always_inline)) void name##_some(                                            \
        type *dst, const type *const *srcs, const int count, size_t numel, type divisor)                      \
    {                                                                                                         \
        (void)divisor;                                                                                        \
        _Pragma("GCC ivdep") for (size_t at = 0; at < numel; at++)                                            \
        {                                                                                                     \
            type folded = srcs[0][at];                                                                        \
            for (int each = 1; each < count; each++)                                                          \
                folded = join(folded, srcs[each][at]);                                                        \
            dst[at] = finish(folded, divisor);                                                                \
        }                                                                                                     \
    }                                                                                                         \
    static inline __attribute__((always_inline)) void name##_few(                                             \
        type *dst, const type *const *srcs, int count, size_t numel, type divisor)                            \
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

/* The fold of any number of vectors: block by block, a few vectors at a time. Partial results stay in the cache, and
   not in `dst`, which may be a vector that is still to be folded. */
#define DEFINE_ALL(name, partial, type)                                                                       \
    FOR_EACH_CPU static void name(                                                                            \
        void *dst, const void *const *srcs, int count, size_t numel, double divisor)                          \
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
            int next = 0, taken = 0;                                                                          \
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

#define AS_IT_IS(folded, divisor) (folded)
#define DIVIDED(folded, divisor) ((folded) / (divisor))
#define ADDED(a, b) ((a) + (b))
#define SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define DEFINE_FOLD(name, partial, type, join, finish) DEFINE_SOME(name, type, join, finish) DEFINE_ALL(name, partial, type)
#define DEFINE_FOLDS(dtype, type, summed)                                                                     \
    DEFINE_FOLD(sum_##dtype, sum_##dtype, summed, ADDED, AS_IT_IS)                                            \
    DEFINE_FOLD(min_##dtype, min_##dtype, type, SMALLER, AS_IT_IS)                                            \
    DEFINE_FOLD(max_##dtype, max_##dtype, type, LARGER, AS_IT_IS)

DEFINE_FOLDS(float32, float, float)
DEFINE_FOLDS(float64, double, double)
DEFINE_FOLDS(int32, int32_t, uint32_t)
DEFINE_FOLDS(int64, int64_t, uint64_t)
DEFINE_FOLD(average_float32, sum_float32, float, ADDED, DIVIDED)
DEFINE_FOLD(average_float64, sum_float64, double, ADDED, DIVIDED)

/* A bfloat16 is the upper half of a float32. */
static inline __attribute__((always_inline)) float
widened(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline __attribute__((always_inline)) uint16_t
rounded(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; /* ties to even */
    return (uint16_t)(value != value ? 0x7FC0 : nearest);
}

#define DEFINE_WIDE(name, join, finish)                                                                       \
    FOR_EACH_CPU static void name(                                                                            \
        void *dst, const void *const *srcs, int count, size_t numel, double divisor)                          \
    {                                                                                                         \
        float block[FOLD_BLOCK / sizeof(float)];                                                              \
        (void)divisor;                                                                                        \
        for (size_t start = 0; start < numel; start += FOLD_BLOCK / sizeof(float)) {                          \
            size_t left = numel - start;                                                                      \
            size_t length = left < FOLD_BLOCK / sizeof(float) ? left : FOLD_BLOCK / sizeof(float);            \
            const uint16_t *src = (const uint16_t *)srcs[0] + start;                                          \
            for (size_t at = 0; at < length; at++)                                                            \
                block[at] = widened(src[at]);                                                                 \
            for (int each = 1; each < count; each++) {                                                        \
                src = (const uint16_t *)srcs[each] + start;                                                   \
                for (size_t at = 0; at < length; at++)                                                        \
                    block[at] = join(block[at], widened(src[at]));                                            \
            }                                                                                                 \
            for (size_t at = 0; at < length; at++)                                                            \
                ((uint16_t *)dst)[start + at] = rounded(finish(block[at], (float)divisor));                   \
        }                                                                                                     \
    }

DEFINE_WIDE(sum_bfloat16, ADDED, AS_IT_IS)
DEFINE_WIDE(min_bfloat16, SMALLER, AS_IT_IS)
DEFINE_WIDE(max_bfloat16, LARGER, AS_IT_IS)
DEFINE_WIDE(average_bfloat16, ADDED, DIVIDED)

#define FOLD(name, itemsize) {#name, name, itemsize}
#define FOLDS_OF(dtype, itemsize) FOLD(sum_##dtype, itemsize), FOLD(min_##dtype, itemsize), FOLD(max_##dtype, itemsize)

const Fold FOLDS[] = {
    FOLDS_OF(float32, 4), FOLDS_OF(float64, 8), FOLDS_OF(int32, 4), FOLDS_OF(int64, 8), FOLDS_OF(bfloat16, 2),
    FOLD(average_float32, 4), FOLD(average_float64, 8), FOLD(average_bfloat16, 2),
};
const int FOLD_COUNT = sizeof FOLDS / sizeof FOLDS[0];
