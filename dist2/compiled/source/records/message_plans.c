/* Messages that were called lately, and their plans. Their kinds, peers and tags are told by which objects they are, so that
   they are found without making others. */

#include "keys.h"

/* Let go of one. */
static void
drop(const Recent *old)
{
    for (int each = 0; each < NAMES; each++) {
        Py_XDECREF(old->names[each]);
    }
    Py_XDECREF(old->plan);
}

/* Return where the plan of a message is, if it is here. */
static inline int
place_of(PyObject *const names[NAMES])
{
    uintptr_t mixed = (uintptr_t)names[0] ^ (uintptr_t)names[1] >> 1 ^ (uintptr_t)names[2] >> 2;
    return (int)((mixed >> 4 ^ mixed >> 7) % RECENT);
}

/* Whether one has a plan for these names. */
static inline int
has_names(const Recent *recent, PyObject *const names[NAMES])
{
    return recent->plan != NULL && recent->names[0] == names[0] && recent->names[1] == names[1] &&
           recent->names[2] == names[2];
}

PyObject *
recent_find(const Recent *all, const Reader *reader, Key *key, PyObject *const names[NAMES], PyObject *tensor)
{
    const Recent *recent = &all[place_of(names)];
    if (!has_names(recent, names) || !key_make_one(reader, key, tensor)) {
        return NULL;
    }
    /* to read a tensor may have called Python, which may have changed what is here */
    if (!has_names(recent, names) || key->count != recent->count ||
        memcmp(key->words, recent->words, sizeof(int64_t) * (size_t)key->count) != 0) {
        key_drop(key);
        return NULL;
    }
    return Py_NewRef(recent->plan);
}

void
recent_keep(Recent *all, const Key *key, PyObject *const names[NAMES], PyObject *plan)
{
    int count = key->count - 1; /* but for the word that tells inputs from outputs */
    if (key->tensors != 1 || count > FEW_WORDS) {
        return;
    }
    Recent *place = &all[place_of(names)], old = *place;
    *place = (Recent){{Py_NewRef(names[0]), Py_NewRef(names[1]), Py_XNewRef(names[2])}, Py_NewRef(plan), count, {0}};
    memcpy(place->words, key->words + 1, sizeof(int64_t) * (size_t)count);
    drop(&old);
}

void
recent_clear(Recent *all)
{
    for (int each = 0; each < RECENT; each++) {
        Recent old = all[each];
        all[each] = (Recent){.plan = NULL};
        drop(&old);
    }
}
