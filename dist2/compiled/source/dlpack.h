/* DLPack's C exchange API, which torch publishes from 2.10 on: it reads a tensor in one C call. This file declares
   the used part of DLPack 1.x, in the layout of its specification. */

#ifndef DIST2_DLPACK_H
#define DIST2_DLPACK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

typedef struct {
    uint32_t major, minor;
    void *older;
    void *allocate, *owned_of, *tensor_of;
    int (*read)(void *tensor, void *into);
    void *stream_of;
} ExchangeApi;

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} View;

/* Return the functions in a capsule that torch publishes; NULL with an exception. */
static inline ExchangeApi *
exchange_api(PyObject *capsule)
{
    ExchangeApi *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (api != NULL && (api->major != 1 || api->read == NULL)) {
        PyErr_Format(PyExc_ValueError, "cannot read tensors by DLPack %u.%u", api->major, api->minor);
        return NULL;
    }
    return api;
}

#endif
