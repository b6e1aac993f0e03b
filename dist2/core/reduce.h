/* Folds of vectors: reduce.c. */

#ifndef DIST2_CORE_REDUCE_H
#define DIST2_CORE_REDUCE_H

#include <stddef.h>

/* Combine `count` vectors of `numel` elements, from left to right; `dst` may be any of them. */
typedef void FoldFunction(void *dst, const void *const *srcs, int count, size_t numel, double divisor);

typedef struct {
    const char *name;
    FoldFunction *function;
    size_t itemsize;
} Fold;

extern const Fold FOLDS[];
extern const int FOLD_COUNT;

#endif
