/* What tells calls apart: keys.c. */

#ifndef DIST2_KEYS_H
#define DIST2_KEYS_H

#include "dlpack.h"
#include "records.h"

enum { KEY_WORDS = 128 };
enum { HALF_WORDS = 22 }; /* of a tensor's other half, in which the set is looked for: it has as many, and the set last */
enum { STORE_WORDS = 9 }; /* of its storage, which has as many: they say where it lies, how long it is, and whose it is */

/* Where a tensor has the set of bits by which torch tells what it is. */
typedef struct {
    Py_ssize_t half; /* where the object of Python has the address of the other half, in C++, */
    Py_ssize_t at;   /* and where that has the set; */
    uint64_t plain;  /* in which a plain tensor has no other bits than these. 0: it is not known where the set is */
    Py_ssize_t store; /* where that half has the address of the storage; 0: it is not known */
} Marks;

static inline uint64_t
word_at(const void *memory, Py_ssize_t at)
{
    uint64_t word;
    memcpy(&word, (const char *)memory + at, sizeof word);
    return word;
}

/* Whether a tensor has no marks but those of plain ones. */
static inline int
is_marked_plain(const Marks *marks, PyObject *tensor)
{
    if (marks->plain == 0) {
        return 0;
    }
    const void *half = (const void *)(uintptr_t)word_at(tensor, marks->half);
    return half != NULL && (word_at(half, marks->at) & ~marks->plain) == 0;
}

/* What tensors are read with. */
typedef struct {
    PyObject *tensor_types;
    PyObject *is_negated;
    PyObject *api_owner;
    ExchangeApi *api;
    Marks marks;
} Reader;

/* A call of plain tensors: the words are its layout, and the spans where each tensor lies. */
typedef struct {
    PyObject *kind;
    PyObject *agreed;
    Py_hash_t hash;
    int count;
    int tensors; /* how many there are */
    int64_t words[KEY_WORDS];
    Span spans[KEY_WORDS];
    PyObject *each[KEY_WORDS];
} Key;

enum { NAMES = 3, RECENT = 8, FEW_WORDS = 6 };

/* A message that was called lately. */
typedef struct {
    PyObject *names[NAMES];
    PyObject *plan; /* NULL: there is none here */
    int count;
    int64_t words[FEW_WORDS];
} Recent;

/* Read a tensor as torch says that it is; 0, or what torch returns: views.c. */
int view_of(const Reader *self, PyObject *tensor, View *view);

/* Make the key of a call; whether it is one of plain tensors: then it has references to them until `key_drop`.
   Exceptions are dropped: the counterpart, which is asked then, raises its own. */
int key_make(const Reader *self, Key *key, PyObject *kind, PyObject *agreed, PyObject *inputs, PyObject *outputs);

/* Let go of the tensors of a key that was made. */
void key_drop(Key *key);

/* Make the key of a call, and return the plan of a call like one that was kept; NULL without an exception where there is
   none, or `plans` are none of these: plans.c. Drop the key of a plan. */
PyObject *plan_of(PyObject *plans, Key *key, PyObject *kind, PyObject *agreed, PyObject *inputs, PyObject *outputs);

/* The same for a message of one tensor, among those that were called lately. Its names are its kind and the very objects
   for its peer and its tag, or NULL where none is given. */
PyObject *plan_of_message(PyObject *plans, Key *key, PyObject *const names[NAMES], PyObject *tensor);

/* Remember the plan of a message, whose key was made. */
void plan_remember(PyObject *plans, const Key *key, PyObject *const names[NAMES], PyObject *plan);

/* What these two do with those of one `plans`; and let go of all: recent.c. */
PyObject *recent_find(const Recent *all, const Reader *reader, Key *key, PyObject *const names[NAMES], PyObject *tensor);
void recent_keep(Recent *all, const Key *key, PyObject *const names[NAMES], PyObject *plan);
void recent_clear(Recent *all);

/* Make the key of one tensor, which is only its words. */
int key_make_one(const Reader *self, Key *key, PyObject *tensor);

#endif
