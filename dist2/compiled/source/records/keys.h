/* Keys of calls: keys.c. */

#ifndef DIST2_KEYS_H
#define DIST2_KEYS_H

#include "dlpack.h"
#include "records.h"

enum { KEY_WORDS = 128 };
enum { HALF_WORDS = 22 }; /* words of the C++ half, its whole size; the set is the last one */
enum { STORE_WORDS = 9 }; /* words of its storage, its whole size: address, length and owner of memory */

/* The position of the bit set in which torch keeps properties of a tensor. */
typedef struct {
    Py_ssize_t half; /* offset in the Python object of the address of the C++ half, */
    Py_ssize_t at;   /* and offset of the set in that half; */
    uint64_t plain;  /* the bits that plain tensors may have in it. 0: the offset is not known */
    Py_ssize_t store; /* offset in that half of the storage's address; 0: it is not known */
    Py_ssize_t room;  /* offset in the storage of its length in bytes; 0: it is not known */
} Marks;

static inline uint64_t
word_at(const void *memory, Py_ssize_t at)
{
    uint64_t word;
    memcpy(&word, (const char *)memory + at, sizeof word);
    return word;
}

/* Whether a tensor has no marks other than those of plain tensors. */
static inline int
is_marked_plain(const Marks *marks, PyObject *tensor)
{
    if (marks->plain == 0) {
        return 0;
    }
    const void *half = (const void *)(uintptr_t)word_at(tensor, marks->half);
    return half != NULL && (word_at(half, marks->at) & ~marks->plain) == 0;
}

/* The objects needed to read tensors. */
typedef struct {
    PyObject *tensor_types;
    PyObject *is_odd;
    PyObject *api_owner;
    ExchangeApi *api;
    Marks marks;
} Reader;

/* A call of plain tensors: the words are its layout, the spans the addresses of the tensors. */
typedef struct {
    PyObject *kind;
    PyObject *agreed;
    Py_hash_t hash;
    int count;
    int tensors; /* how many there are */
    int on_host; /* whether all of them are in the host's memory: only such addresses are passed on */
    int64_t words[KEY_WORDS];
    Span spans[KEY_WORDS];
    PyObject *each[KEY_WORDS];
} Key;

enum { NAMES = 3, RECENT = 8, FEW_WORDS = 6 };

/* A recently called message. */
typedef struct {
    PyObject *names[NAMES];
    PyObject *plan; /* NULL: the entry is empty */
    int count;
    int64_t words[FEW_WORDS];
} Recent;

/* Read the view of a tensor by torch's function. 0, or that function's error code, or -1 if the tensor is known to
   reach beyond its storage: views.c. */
int view_of(const Reader *self, PyObject *tensor, View *view);

/* Make the key of a call. Return whether its tensors are plain: then it has references to them until `key_drop`.
   Exceptions are dropped: the Python counterpart runs next and raises its own. */
int key_make(const Reader *self, Key *key, PyObject *kind, PyObject *agreed, PyObject *inputs, PyObject *outputs);

/* Release the tensors of a key. */
void key_drop(Key *key);

/* Make the key of a call, and return the plan that was kept for such calls; NULL without an exception if there is
   none, or if `plans` is of another type: plans.c. Drop the key of a plan. */
PyObject *plan_of(PyObject *plans, Key *key, PyObject *kind, PyObject *agreed, PyObject *inputs, PyObject *outputs);

/* The same for a message of one tensor, among recent ones. Its names are its kind and the objects for its peer and
   its tag, compared by identity, or NULL if they are not given. */
PyObject *plan_of_message(PyObject *plans, Key *key, PyObject *const names[NAMES], PyObject *tensor);

/* Cache the plan of a message with a made key. */
void plan_remember(PyObject *plans, const Key *key, PyObject *const names[NAMES], PyObject *plan);

/* The same two operations on the recent messages of one `plans`, and the release of all: message_plans.c. */
PyObject *recent_find(const Recent *all, const Reader *reader, Key *key, PyObject *const names[NAMES], PyObject *tensor);
void recent_keep(Recent *all, const Key *key, PyObject *const names[NAMES], PyObject *plan);
void recent_clear(Recent *all);

/* Make the key of one tensor, which consists of its words only. */
int key_make_one(const Reader *self, Key *key, PyObject *tensor);

#endif
