/* Views: what torch says of a tensor, for as long as nothing in it has changed.

   Torch takes 0.17 us to say it, more than anything else in the call of a short operation. It reads it from two objects
   in C++: the tensor's other half, which has its shape, strides, element type and device, and the storage that this
   leads to, which has the address. So what it has said is kept with what was in both then, but for how many refer to
   them, and holds as long as they are the same to the bit. What leads out of them, as the shape of a tensor with
   many dimensions does, is not kept; nor is anything kept where it is not known where they are. */

#include "keys.h"

enum { SEEN = 32, COUNT = 1 }; /* how many are kept; which word of an object in C++ says how many refer to it */

typedef struct {
    const ExchangeApi *api; /* who said it; NULL: nobody */
    const char *half;
    View view;
    uint64_t words[HALF_WORDS], store[STORE_WORDS];
} Seen;

static Seen all_seen[SEEN];

/* Whether an object in C++ has words that it had, but for the count. */
static inline int
has_words(const char *object, const uint64_t *words, size_t count)
{
    return memcmp(object, words, COUNT * sizeof *words) == 0 &&
           memcmp(object + (COUNT + 1) * sizeof *words, words + COUNT + 1, (count - COUNT - 1) * sizeof *words) == 0;
}

/* Return the storage of a tensor's other half, which has it for as long as that is so. */
static inline const char *
store_of(const Marks *marks, const char *half)
{
    return (const char *)(uintptr_t)word_at(half, marks->store);
}

/* Whether something lies in a tensor's other half. */
static inline int
lies_in(const void *part, const char *half)
{
    return (const char *)part >= half && (const char *)part < half + HALF_WORDS * sizeof(uint64_t);
}

/* Keep what was said of a tensor, if all of it is in its other half and its storage. */
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
        keep(self, seen, tensor, half, view);
    }
    return failed;
}
