/* Keys of calls with plain tensors.

   Tensors are read by the function that torch publishes for that purpose (dlpack.h): shape, strides, element type
   and device in one call, without a Python object for each. It does not tell whether a tensor is lazily negated, or
   whether its storage, which may have been made smaller, still has all of its elements. Asking torch for that takes
   longer than everything else, because torch releases and takes the interpreter lock.
   torch keeps these properties in a bit set of each tensor, and in the storage. It publishes no access to them from
   C, but tells them to Python. So `find_marks` searches for their positions in sample tensors with known contents. A
   tensor with no bit other than those of known plain tensors, inside of its storage, is plain, and torch is not
   asked. If a position is not found, torch is asked each time. */

#include "keys.h"

enum { CPU = 1, CUDA = 2, ROCM = 10, INTEGER = 0, UNSIGNED = 1, FLOATING = 2, BFLOAT = 4, BOOLEAN = 6 };

/* ---- Marks: the bit set in which torch keeps properties of a tensor ---- */

/* A tensor, the address of its C++ half, its marks, and of its storage the address, that of the values, and the length. */
typedef struct {
    PyObject *tensor;
    unsigned long long half, marks;
    int plain;
    unsigned long long store, data, room;
} Sample;

static int
read_sample(PyObject *source, Sample *sample)
{
    static const char format[] = "OKKpKKK;a sample is a tensor, an address, marks, a bool and three more";
    if (!PyTuple_Check(source)) {
        PyErr_SetString(PyExc_TypeError, "a sample is a tuple");
        return 0;
    }
    return PyArg_ParseTuple(source, format, &sample->tensor, &sample->half, &sample->marks, &sample->plain,
                            &sample->store, &sample->data, &sample->room);
}

/* The searched values of a sample: in the Python object the address of the C++ half; in the C++ half the marks, or
   the address of the storage. */
enum { THE_HALF, THE_MARKS, THE_STORE };

/* Whether a sample has the value at an offset. */
static inline int
has_at(const Sample *sample, int what, Py_ssize_t at)
{
    if (what == THE_HALF) {
        return word_at(sample->tensor, at) == sample->half;
    }
    return word_at((const void *)(uintptr_t)sample->half, at) == (what == THE_MARKS ? sample->marks : sample->store);
}

/* Find the only offset at which all samples have the expected value; -1 if there is none, or more than one. */
static Py_ssize_t
find_place(const Sample *samples, Py_ssize_t count, Py_ssize_t first, Py_ssize_t end, int what)
{
    Py_ssize_t found = -1;
    for (Py_ssize_t at = first; at + (Py_ssize_t)sizeof(uint64_t) <= end; at += sizeof(uint64_t)) {
        Py_ssize_t alike = 0;
        for (Py_ssize_t each = 0; each < count; each++) {
            alike += has_at(&samples[each], what, at);
        }
        if (alike == count && found >= 0) {
            return -1;
        }
        found = alike == count ? at : found;
    }
    return found;
}

/* Find the offset of the storage's address in the C++ halves. 0 if it is not found, or if the third word of a
   storage is not the address of the tensor's values. */
static Py_ssize_t
find_store(const Sample *samples, Py_ssize_t count)
{
    for (Py_ssize_t each = 0; each < count; each++) {
        const void *store = (const void *)(uintptr_t)samples[each].store;
        if (store == NULL || samples[each].data == 0 || word_at(store, 2 * sizeof(uint64_t)) != samples[each].data) {
            return 0;
        }
    }
    Py_ssize_t found = find_place(samples, count, 2 * sizeof(uint64_t), HALF_WORDS * sizeof(uint64_t), THE_STORE);
    return found < 0 ? 0 : found;
}

/* Find the only offset in storages behind the address of the values at which the length is; 0 if there is none, or
   more than one. */
static Py_ssize_t
find_room(const Sample *samples, Py_ssize_t count)
{
    Py_ssize_t found = 0;
    for (Py_ssize_t at = 3 * sizeof(uint64_t); at < STORE_WORDS * (Py_ssize_t)sizeof(uint64_t); at += sizeof(uint64_t)) {
        Py_ssize_t alike = 0;
        for (Py_ssize_t each = 0; each < count; each++) {
            alike += word_at((const void *)(uintptr_t)samples[each].store, at) == samples[each].room;
        }
        if (alike == count && found != 0) {
            return 0;
        }
        found = alike == count ? at : found;
    }
    return found;
}

/* Find the offset of the marks in tensors, and the marks of plain tensors; `plain` is 0 if they cannot be found. */
static Marks
marks_of(const Sample *samples, Py_ssize_t count)
{
    Marks none = {0}, marks = none;
    Py_ssize_t end = PY_SSIZE_T_MAX, others = 0;
    for (Py_ssize_t each = 0; each < count; each++) {
        Py_ssize_t size = Py_TYPE(samples[each].tensor)->tp_basicsize;
        end = size < end ? size : end;
        marks.plain |= samples[each].plain ? samples[each].marks : 0;
    }
    for (Py_ssize_t each = 0; each < count; each++) {
        if (!samples[each].plain && (samples[each].marks & ~marks.plain) == 0) {
            return none; /* no mark tells this tensor from a plain one */
        }
        others += !samples[each].plain;
    }
    marks.half = count == 0 ? -1 : find_place(samples, count, sizeof(PyObject), end, THE_HALF);
    if (marks.half < 0 || others == 0) {
        return none;
    }
    marks.at = find_place(samples, count, sizeof(uint64_t), HALF_WORDS * sizeof(uint64_t), THE_MARKS);
    if (marks.at < 0) {
        return none;
    }
    marks.store = find_store(samples, count);
    marks.room = marks.store == 0 ? 0 : find_room(samples, count);
    return marks;
}

enum { MOST_SAMPLES = 16 };

PyObject *
find_marks(PyObject *Py_UNUSED(module), PyObject *source)
{
    Sample samples[MOST_SAMPLES];
    if (!PyTuple_Check(source) || PyTuple_GET_SIZE(source) > MOST_SAMPLES) {
        return PyErr_Format(PyExc_TypeError, "samples must be a tuple of %d at most, got %R", MOST_SAMPLES, source);
    }
    for (Py_ssize_t each = 0; each < PyTuple_GET_SIZE(source); each++) {
        if (!read_sample(PyTuple_GET_ITEM(source, each), &samples[each])) {
            return NULL;
        }
    }
    Marks marks = marks_of(samples, PyTuple_GET_SIZE(source));
    return Py_BuildValue("nnKnn", marks.half, marks.at, (unsigned long long)marks.plain, marks.store, marks.room);
}

/* ---- Keys ---- */

/* Whether elements are contiguous; as in torch, strides of extents of one do not matter. */
static int
is_dense(const View *view)
{
    int64_t expected = 1;
    for (int axis = view->ndim - 1; axis >= 0; axis--) {
        if (view->shape[axis] == 0) {
            return 1;
        }
    }
    for (int axis = view->ndim - 1; axis >= 0; axis--) {
        if (view->shape[axis] != 1) {
            if (view->strides != NULL && view->strides[axis] != expected) {
                return 0;
            }
            expected *= view->shape[axis];
        }
    }
    return 1;
}

/* Ask torch whether a tensor's memory holds its values, all of them, and not their negatives. */
static int
is_as_it_lies(const Reader *self, PyObject *tensor)
{
    PyObject *odd = PyObject_CallOneArg(self->is_odd, tensor);
    Py_XDECREF(odd);
    return odd == Py_False;
}

/* Return the word that identifies the device of a tensor; -1 for one whose tensors have no keys here. */
static inline int64_t
device_word(const View *view)
{
    if (view->device_type == CPU) {
        return 0;
    }
    int is_gpu = view->device_type == CUDA || view->device_type == ROCM;
    return is_gpu ? (int64_t)view->device_type << 56 | (int64_t)(view->device_id & 0xFF) << 48 : -1;
}

/* Add a tensor to a key. Return whether it is plain: on the CPU or a GPU, dense, real, not lazily negated, inside of
   its storage, and of no unknown subclass. */
static int
key_add(const Reader *self, Key *key, PyObject *tensor)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    int known = 0;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->tensor_types); index++) {
        known = known || PyTuple_GET_ITEM(self->tensor_types, index) == type;
    }
    View view;
    if (!known || view_of(self, tensor, &view) != 0 || device_word(&view) < 0 ||
        key->count + 1 + view.ndim > KEY_WORDS || !is_dense(&view)) {
        return 0;
    }
    if (view.code != FLOATING && view.code != INTEGER && view.code != UNSIGNED && view.code != BFLOAT &&
        view.code != BOOLEAN) {
        return 0;
    }
    if (!(self->marks.room != 0 && is_marked_plain(&self->marks, tensor)) && !is_as_it_lies(self, tensor)) {
        return 0;
    }
    key->words[key->count++] =
        device_word(&view) | (int64_t)view.ndim << 32 | (int64_t)view.lanes << 16 | (int64_t)view.bits << 8 | view.code;
    int64_t bits = (int64_t)view.lanes * view.bits;
    for (int axis = 0; axis < view.ndim; axis++) {
        key->words[key->count++] = view.shape[axis];
        bits *= view.shape[axis];
    }
    if (view.data == NULL && bits != 0) {
        return 0; /* its storage was freed, or it wraps another tensor */
    }
    key->on_host = key->on_host && view.device_type == CPU;
    uintptr_t start = (uintptr_t)view.data + view.offset;
    key->spans[key->tensors] = (Span){start, start + (uintptr_t)(bits + 7) / 8};
    key->each[key->tensors++] = Py_NewRef(tensor);
    return 1;
}

/* Add to a key which tensors share memory with a written one, and at which offsets: the spans from `written` on are
   written. Return whether the key has room. No layout has words of -1 or less, so no other call has these words. */
static int
key_add_overlaps(Key *key, int written)
{
    for (int first = 0; first < key->tensors; first++) {
        Span one = key->spans[first];
        for (int second = first < written ? written : first + 1; second < key->tensors; second++) {
            Span other = key->spans[second];
            if (one.start >= other.end || other.start >= one.end) {
                continue;
            }
            if (key->count + 2 > KEY_WORDS) {
                return 0;
            }
            key->words[key->count++] = -1 - (first * KEY_WORDS + second);
            key->words[key->count++] = (int64_t)(one.start - other.start);
        }
    }
    return 1;
}

/* Add a list or tuple of tensors to a key; whether all are plain. */
static int
key_add_all(const Reader *self, Key *key, PyObject *tensors)
{
    if (!PyTuple_CheckExact(tensors) && !PyList_CheckExact(tensors)) {
        return 0;
    }
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(tensors); index++) {
        PyObject *tensor = Py_NewRef(PySequence_Fast_GET_ITEM(tensors, index));
        int plain = key_add(self, key, tensor);
        Py_DECREF(tensor);
        if (!plain) {
            return 0;
        }
    }
    return 1;
}

void
key_drop(Key *key)
{
    while (key->tensors > 0) {
        Py_DECREF(key->each[--key->tensors]);
    }
}

int
key_make_one(const Reader *self, Key *key, PyObject *tensor)
{
    key->count = key->tensors = 0;
    key->on_host = 1;
    return key_add(self, key, tensor);
}

int
key_make(const Reader *self, Key *key, PyObject *kind, PyObject *agreed, PyObject *inputs, PyObject *outputs)
{
    key->kind = kind;
    key->agreed = agreed;
    key->count = key->on_host = 1;
    key->tensors = 0;
    int plain = key_add_all(self, key, inputs), written = inputs == outputs ? 0 : key->tensors;
    key->words[0] = inputs == outputs ? -1 : key->count;
    if (plain && inputs != outputs) {
        plain = key_add_all(self, key, outputs);
    }
    plain = plain && key_add_overlaps(key, written);
    key->hash = plain ? PyObject_Hash(agreed) : -1;
    if (key->hash == -1) {
        PyErr_Clear();
        key_drop(key);
        return 0;
    }
    uint64_t mixed = (uint64_t)key->hash ^ (uint64_t)(uintptr_t)kind;
    for (int index = 0; index < key->count; index++) {
        mixed = (mixed ^ (uint64_t)key->words[index]) * 0x9E3779B97F4A7C15ULL;
        mixed ^= mixed >> 29;
    }
    key->hash = (Py_hash_t)mixed;
    return 1;
}
