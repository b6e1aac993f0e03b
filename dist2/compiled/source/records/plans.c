/* Plans of calls, and the table in which they are found again: the counterpart of dist2/operation/plan_cache.py.
   Keys are made in keys.c. */

#include "keys.h"

enum { MOST_PLANS = 4096, FEWEST_ROOMS = 16 };

/* ---- Plan ---- */

/* Return the lane of a plan's `execute`; NULL if it has none. */
static const Lane *
lane_of(PyObject *execute)
{
    PyObject *capsule = PyObject_GetAttrString((PyObject *)Py_TYPE(execute), LANE_ATTRIBUTE);
    const Lane *lane = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, LANE_NAME);
    Py_XDECREF(capsule); /* its type has it */
    PyErr_Clear();
    return lane;
}

static PyObject *
plan_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"signature", "execute", NULL};
    PyObject *signature, *execute;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO:Plan", names, &signature, &execute)) {
        return NULL;
    }
    Plan *self = (Plan *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->signature = Py_NewRef(signature);
        self->execute = Py_NewRef(execute);
        self->lane = lane_of(execute);
    }
    return (PyObject *)self;
}

static int
plan_traverse(Plan *self, visitproc visit, void *arg)
{
    Py_VISIT(self->signature);
    Py_VISIT(self->execute);
    return 0;
}

static void
plan_dealloc(Plan *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->signature);
    Py_XDECREF(self->execute);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef plan_members[] = {
    {"signature", T_OBJECT_EX, offsetof(Plan, signature), READONLY, NULL},
    {"execute", T_OBJECT_EX, offsetof(Plan, execute), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* Without tp_clear: a plan is immutable, so a cycle always contains another object too; `Plans` breaks it. */
PyTypeObject Plan_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.Plan",
    .tp_doc = "What is known about all calls of one signature.",
    .tp_basicsize = sizeof(Plan),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = plan_new,
    .tp_dealloc = (destructor)plan_dealloc,
    .tp_traverse = (traverseproc)plan_traverse,
    .tp_members = plan_members,
};

/* ---- Plans ---- */

typedef struct {
    PyObject *kind;
    PyObject *agreed;
    PyObject *plan;
    Py_hash_t hash;
    int count;
    int64_t *words;
} Room;

typedef struct {
    PyObject_HEAD
    PyObject *others;
    Reader reader;
    Room *rooms;
    size_t room_count;
    size_t used;
    Recent recent[RECENT];
} Plans;

/* Whether a table entry has the plan of a key; an exception of the comparison is dropped, and means no. */
static int
room_fits(const Room *room, const Key *key)
{
    if (room->hash != key->hash || room->kind != key->kind || room->count != key->count ||
        memcmp(room->words, key->words, sizeof(int64_t) * (size_t)key->count) != 0) {
        return 0;
    }
    if (room->agreed == key->agreed) {
        return 1;
    }
    PyObject *agreed = Py_NewRef(room->agreed); /* the comparison may call Python, which may empty the table */
    int equal = PyObject_RichCompareBool(agreed, key->agreed, Py_EQ);
    Py_DECREF(agreed);
    if (equal < 0) {
        PyErr_Clear();
    }
    return equal > 0;
}

/* Return the plan of a key, borrowed; NULL where there is none. */
static PyObject *
plans_of_key(Plans *self, const Key *key)
{
    const Room *rooms = self->rooms;
    size_t mask = self->room_count - 1;
    for (size_t place = (size_t)key->hash & mask; rooms[place].plan != NULL; place = (place + 1) & mask) {
        int fits = room_fits(&rooms[place], key);
        if (self->rooms != rooms) {
            return NULL; /* the table was emptied or moved meanwhile: as if the plan was absent */
        }
        if (fits) {
            return rooms[place].plan;
        }
    }
    return NULL;
}

static PyTypeObject Plans_Type;

/* Let go of rooms. */
static void
rooms_free(Room *rooms, size_t count)
{
    for (size_t place = 0; place < count; place++) {
        if (rooms[place].plan != NULL) {
            PyMem_Free(rooms[place].words);
            Py_DECREF(rooms[place].kind);
            Py_DECREF(rooms[place].agreed);
            Py_DECREF(rooms[place].plan);
        }
    }
    PyMem_Free(rooms);
}

/* Start over with an empty table. */
static int
plans_reset(Plans *self)
{
    Room *fresh = PyMem_Calloc(FEWEST_ROOMS, sizeof(Room)), *old = self->rooms;
    if (fresh == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    size_t count = self->room_count;
    self->rooms = fresh;
    self->room_count = FEWEST_ROOMS;
    self->used = 0;
    recent_clear(self->recent);
    rooms_free(old, count);
    return 0;
}

/* Insert an entry at the place of its hash. */
static void
rooms_place(Room *rooms, size_t count, Room room)
{
    size_t place = (size_t)room.hash & (count - 1);
    while (rooms[place].plan != NULL) {
        place = (place + 1) & (count - 1);
    }
    rooms[place] = room;
}

/* Keep the table less than half full. */
static int
plans_grow(Plans *self)
{
    if (self->used >= MOST_PLANS) {
        return plans_reset(self);
    }
    if (2 * (self->used + 1) < self->room_count) {
        return 0;
    }
    size_t count = 2 * self->room_count;
    Room *more = PyMem_Calloc(count, sizeof(Room));
    if (more == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t place = 0; place < self->room_count; place++) {
        if (self->rooms[place].plan != NULL) {
            rooms_place(more, count, self->rooms[place]);
        }
    }
    PyMem_Free(self->rooms);
    self->rooms = more;
    self->room_count = count;
    return 0;
}

static PyObject *
plans_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"others", "api", "tensor_types", "is_odd", "marks", NULL};
    PyObject *others, *api, *tensor_types, *is_odd;
    Marks marks = {0};
    unsigned long long plain = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO!O|(nnKnn):Plans", names, &others, &api, &PyTuple_Type,
                                     &tensor_types, &is_odd, &marks.half, &marks.at, &plain, &marks.store, &marks.room)) {
        return NULL;
    }
    ExchangeApi *functions = exchange_api(api);
    if (functions == NULL) {
        return NULL;
    }
    Plans *self = (Plans *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->others = Py_NewRef(others);
    marks.plain = plain;
    self->reader = (Reader){Py_NewRef(tensor_types), Py_NewRef(is_odd), Py_NewRef(api), functions, marks};
    if (plans_reset(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
plans_traverse(Plans *self, visitproc visit, void *arg)
{
    Py_VISIT(self->others);
    for (size_t place = 0; place < self->room_count; place++) {
        Py_VISIT(self->rooms[place].agreed);
        Py_VISIT(self->rooms[place].plan);
    }
    for (int each = 0; each < RECENT; each++) {
        Py_VISIT(self->recent[each].plan);
    }
    return 0;
}

static int
plans_clear(Plans *self)
{
    Room *rooms = self->rooms;
    size_t count = self->room_count;
    self->rooms = NULL;
    self->room_count = self->used = 0;
    recent_clear(self->recent);
    rooms_free(rooms, count);
    Py_CLEAR(self->others);
    return 0;
}

static void
plans_dealloc(Plans *self)
{
    PyObject_GC_UnTrack(self);
    plans_clear(self);
    Py_XDECREF(self->reader.api_owner);
    Py_XDECREF(self->reader.tensor_types);
    Py_XDECREF(self->reader.is_odd);
    Py_TYPE(self)->tp_free(self);
}

/* Check the number of arguments, and that the garbage collector has not taken the plans. */
static int
plans_ready_for(Plans *self, const char *name, Py_ssize_t wanted, Py_ssize_t count)
{
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, count);
        return -1;
    }
    if (self->rooms == NULL) {
        PyErr_SetString(PyExc_ReferenceError, "the group is gone");
        return -1;
    }
    return 0;
}

/* Return the plan that was kept for such calls; None if there is none. */
static PyObject *
plans_find(Plans *self, PyObject *const *args, Py_ssize_t count)
{
    Key key;
    if (plans_ready_for(self, "find", 4, count) < 0) {
        return NULL;
    }
    if (!key_make(&self->reader, &key, args[0], args[1], args[2], args[3])) {
        return PyObject_CallMethod(self->others, "find", "OOOO", args[0], args[1], args[2], args[3]);
    }
    PyObject *plan = plans_of_key(self, &key);
    key_drop(&key);
    return Py_NewRef(plan != NULL ? plan : Py_None);
}

PyObject *
plan_of(PyObject *plans, Key *key, PyObject *kind, PyObject *agreed, PyObject *inputs, PyObject *outputs)
{
    Plans *self = (Plans *)plans;
    if (!Py_IS_TYPE(plans, &Plans_Type) || self->rooms == NULL ||
        !key_make(&self->reader, key, kind, agreed, inputs, outputs)) {
        return NULL;
    }
    PyObject *plan = Py_XNewRef(plans_of_key(self, key));
    if (plan == NULL) {
        key_drop(key);
    }
    return plan;
}

PyObject *
plan_of_message(PyObject *plans, Key *key, PyObject *const names[NAMES], PyObject *tensor)
{
    Plans *self = (Plans *)plans;
    return Py_IS_TYPE(plans, &Plans_Type) ? recent_find(self->recent, &self->reader, key, names, tensor) : NULL;
}

void
plan_remember(PyObject *plans, const Key *key, PyObject *const names[NAMES], PyObject *plan)
{
    Plans *self = (Plans *)plans;
    if (Py_IS_TYPE(plans, &Plans_Type) && self->rooms != NULL) {
        recent_keep(self->recent, key, names, plan);
    }
}

/* Return whether the tensors of a call are plain: only such calls get a key here, and are found again. */
static PyObject *
plans_plain(Plans *self, PyObject *const *args, Py_ssize_t count)
{
    Key key;
    if (plans_ready_for(self, "plain", 2, count) < 0) {
        return NULL;
    }
    int plain = key_make(&self->reader, &key, Py_None, Py_None, args[0], args[1]);
    if (plain) {
        key_drop(&key);
    }
    return PyBool_FromLong(plain);
}

/* Add a plan to the table. */
static int
plans_add(Plans *self, const Key *key, PyObject *plan)
{
    int64_t *words = PyMem_Malloc(sizeof(int64_t) * (size_t)key->count);
    if (words == NULL || plans_grow(self) < 0) {
        PyMem_Free(words);
        PyErr_NoMemory();
        return -1;
    }
    memcpy(words, key->words, sizeof(int64_t) * (size_t)key->count);
    Room room = {Py_NewRef(key->kind), Py_NewRef(key->agreed), Py_NewRef(plan), key->hash, key->count, words};
    rooms_place(self->rooms, self->room_count, room);
    self->used++;
    return 0;
}

/* Keep a plan for calls of this kind. */
static PyObject *
plans_keep(Plans *self, PyObject *const *args, Py_ssize_t count)
{
    Key key;
    if (plans_ready_for(self, "keep", 5, count) < 0) {
        return NULL;
    }
    if (!key_make(&self->reader, &key, args[0], args[1], args[2], args[3])) {
        return PyObject_CallMethod(self->others, "keep", "OOOOO", args[0], args[1], args[2], args[3], args[4]);
    }
    int outcome = plans_of_key(self, &key) == NULL ? plans_add(self, &key, args[4]) : 0; /* another thread was faster */
    key_drop(&key);
    if (outcome < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Let go of all. */
static PyObject *
plans_empty(Plans *self, PyObject *Py_UNUSED(none))
{
    if (self->others == NULL) {
        Py_RETURN_NONE;
    }
    return plans_reset(self) < 0 ? NULL : PyObject_CallMethod(self->others, "clear", NULL);
}

static Py_ssize_t
plans_length(Plans *self)
{
    Py_ssize_t others = self->others == NULL ? 0 : PyObject_Length(self->others);
    return others < 0 ? -1 : others + (Py_ssize_t)self->used;
}

static PySequenceMethods plans_sequence = {.sq_length = (lenfunc)plans_length};

static PyMethodDef plans_methods[] = {
    {"find", (PyCFunction)(void (*)(void))plans_find, METH_FASTCALL, NULL},
    {"keep", (PyCFunction)(void (*)(void))plans_keep, METH_FASTCALL, NULL},
    {"clear", (PyCFunction)plans_empty, METH_NOARGS, NULL},
    {"plain", (PyCFunction)(void (*)(void))plans_plain, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Plans_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.records.Plans",
    .tp_doc = "Plans of calls, and how they are found again.",
    .tp_basicsize = sizeof(Plans),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = plans_new,
    .tp_dealloc = (destructor)plans_dealloc,
    .tp_traverse = (traverseproc)plans_traverse,
    .tp_clear = (inquiry)plans_clear,
    .tp_as_sequence = &plans_sequence,
    .tp_methods = plans_methods,
};

int
plans_ready(PyObject *module)
{
    return PyModule_AddType(module, &Plan_Type) < 0 ? -1 : PyModule_AddType(module, &Plans_Type);
}
