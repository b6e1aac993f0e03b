/* Reductions, from the contributions of all ranks, in rank order. */

#include "stub.h"

#include <stdlib.h>
#include <string.h>

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16, E4M3, E5M2 };
enum { SUM, PROD, MAX, MIN, AVG };

size_t
size_of(int datatype)
{
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[datatype];
}

int
has_type(int datatype)
{
    return datatype >= INT8 && datatype <= E5M2;
}

static float
widened(uint16_t bits, int datatype)
{
    if (datatype == HALF) {
        _Float16 half;
        memcpy(&half, &bits, sizeof half);
        return (float)half;
    }
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t
narrowed(float value, int datatype)
{
    uint16_t bits;
    if (datatype == HALF) {
        _Float16 half = (_Float16)value;
        memcpy(&bits, &half, sizeof bits);
        return bits;
    }
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if ((wide & 0x7fffffff) > 0x7f800000) {
        return 0x7fc0;
    }
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

#define FOLD(type)                                                                                                    \
    for (size_t i = 0; i < numel; i++) {                                                                              \
        type total = ((type *)parts[0])[i];                                                                           \
        for (int rank = 1; rank < count; rank++) {                                                                    \
            type value = ((type *)parts[rank])[i];                                                                    \
            total = op == PROD  ? (type)(total * value)                                                               \
                    : op == MAX ? (value > total ? value : total)                                                     \
                    : op == MIN ? (value < total ? value : total)                                                     \
                                : (type)(total + value);                                                              \
        }                                                                                                             \
        ((type *)result)[i] = op == AVG ? (type)(total / (type)count) : total;                                        \
    }                                                                                                                 \
    return SUCCESS

Result
fold(void *result, void *const *parts, int count, size_t numel, int datatype, int op)
{
    switch (datatype) {
    case INT8: FOLD(int8_t);
    case UINT8: FOLD(uint8_t);
    case INT32: FOLD(int32_t);
    case UINT32: FOLD(uint32_t);
    case INT64: FOLD(int64_t);
    case UINT64: FOLD(uint64_t);
    case FLOAT: FOLD(float);
    case DOUBLE: FOLD(double);
    }
    if (datatype != HALF && datatype != BFLOAT16) {
        return INVALID_ARGUMENT;
    }
    for (size_t i = 0; i < numel; i++) {
        float values[MAX_RANKS], total;
        void *pointers[MAX_RANKS] = {NULL};
        for (int rank = 0; rank < count; rank++) {
            values[rank] = widened(((uint16_t *)parts[rank])[i], datatype);
            pointers[rank] = &values[rank];
        }
        fold(&total, pointers, count, 1, FLOAT, op);
        ((uint16_t *)result)[i] = narrowed(total, datatype);
    }
    return SUCCESS;
}

#define SCALE(type)                                                                                                   \
    for (size_t i = 0; i < numel; i++) {                                                                              \
        ((type *)values)[i] = (type)(((type *)values)[i] * (type)factor);                                             \
    }                                                                                                                 \
    break

void
scale(void *values, size_t numel, int datatype, double factor)
{
    switch (datatype) {
    case INT8: SCALE(int8_t);
    case UINT8: SCALE(uint8_t);
    case INT32: SCALE(int32_t);
    case UINT32: SCALE(uint32_t);
    case INT64: SCALE(int64_t);
    case UINT64: SCALE(uint64_t);
    case FLOAT: SCALE(float);
    case DOUBLE: SCALE(double);
    default:
        for (size_t i = 0; i < numel; i++) {
            uint16_t *value = (uint16_t *)values + i;
            *value = narrowed(widened(*value, datatype) * (float)factor, datatype);
        }
    }
}
