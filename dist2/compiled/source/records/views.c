/* Views: the cached description of a tensor, valid while the tensor is unchanged.

   torch takes 0.17 us to describe a tensor, more than any other part of the call of a short operation. It reads two
   C++ objects: the tensor's C++ half, which has shape, strides, element type and device, and the storage, which has
   the address. So a description is kept with a copy of both objects except their reference counts, and is valid as
   long as both are equal to the copy bit by bit: whether the tensor lies in its storage is asked once. A description that refers to other memory, as the shape of a tensor
   with many dimensions does, is not kept; nor is any kept if the position of these objects is unknown. */

#include "keys.h"

enum { SEEN = 32, COUNT = 1 }; /* number of cached views; index of the reference count in a C++ object */

typedef struct {
    const ExchangeApi *api; /* the function that read it; NULL: the entry is empty */
    const char *half;
    View view;
    uint64_t words[HALF_WORDS], store[STORE_WORDS];
} Seen;

static Seen all_seen[SEEN];

/* Whether a C++ object has these words, except for the reference count. */
static inline int
has_words(const char *object, const uint64_t *words, size_t count)
{
    return memcmp(object, words, COUNT * sizeof *words) == 0 &&
           memcmp(object + (COUNT + 1) * sizeof *words, words + COUNT + 1, (count - COUNT - 1) * sizeof *words) == 0;
}

/* Return the storage of a tensor's C++ half, borrowed from the half. */
static inline const char *
store_of(const Marks *marks, const char *half)
{
    return (const char *)(uintptr_t)word_at(half, marks->store);
}

/* Whether an address lies in a tensor's C++ half. */
static inline int
lies_in(const void *part, const char *half)
{
    return (const char *)part >= half && (const char *)part < half + HALF_WORDS * sizeof(uint64_t);
}

/* Keep the description of a tensor, if all of it lies in its C++ half and its storage. */
static void
keep(const Reader *self, Seen *seen, PyObject *tensor, const char *half, const View *view)
{
    const char *store = store_of(&self->marks, half);
    seen->api = NULL;
    if (store == NULL || !is_marked_plain(&self->marks, tensor) || !lies_in(view->shape, half) ||
        (view->strides != NULL && !lies_in(view->strides, half))) {
        return;
    }
    seen->half = half;
    seen->view = *view;
    memcpy(seen->words, half, sizeof seen->words);
    memcpy(seen->store, store, sizeof seen->store);
    seen->api = self->api;
}

/* Whether the elements of a dense tensor lie in its storage; those of others are not asked for. */
static int
lies_in_store(const Marks *marks, const char *half, const View *view)
{
    const char *store = store_of(marks, half);
    uint64_t bits = (uint64_t)view->lanes * view->bits;
    for (int axis = 0; axis < view->ndim; axis++) {
        bits *= (uint64_t)view->shape[axis];
    }
    if (bits == 0 || store == NULL) {
        return bits == 0;
    }
    uint64_t data = word_at(store, 2 * sizeof(uint64_t)), start = (uint64_t)(uintptr_t)view->data + view->offset;
    return data <= start && start - data + (bits + 7) / 8 <= word_at(store, marks->room);
}

int
view_of(const Reader *self, PyObject *tensor, View *view)
{
    if (self->marks.plain == 0 || self->marks.store == 0) {
        return self->api->read(tensor, view);
    }
    const char *half = (const char *)(uintptr_t)word_at(tensor, self->marks.half);
    Seen *seen = &all_seen[((uintptr_t)half >> 6 ^ (uintptr_t)half >> 11) % SEEN];
    if (seen->api == self->api && seen->half == half && has_words(half, seen->words, HALF_WORDS) &&
        has_words(store_of(&self->marks, half), seen->store, STORE_WORDS)) {
        *view = seen->view;
        return 0;
    }
    int failed = self->api->read(tensor, view);
    if (!failed && half != NULL) {
        if (self->marks.room != 0 && !lies_in_store(&self->marks, half, view)) {
            return -1;
        }
        keep(self, seen, tensor, half, view);
    }
    return failed;
}
