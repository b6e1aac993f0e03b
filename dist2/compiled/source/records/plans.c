/* Plans of calls, and how they are found again: the counterpart of dist2/plans.py.

   Tensors are read by the function that torch publishes for that purpose (dlpack.h): shape, strides, element type
   and device in one call, without a Python object for each. */

#include "dlpack.h"
#include "records.h"

enum { CPU = 1, INTEGER = 0, UNSIGNED = 1, FLOATING = 2, BFLOAT = 4, BOOLEAN = 6 };
enum { KEY_WORDS = 128, MOST_PLANS = 4096, FEWEST_ROOMS = 16 };

/* ---- Plan ---- */

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

/* Without tp_clear: a plan cannot be changed, so that it is never the only thing in a cycle; `Plans` breaks it. */
PyTypeObject Plan_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._records.Plan",
    .tp_doc = "What is known about all calls of one signature.",
    .tp_basicsize = sizeof(Plan),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = plan_new,
    .tp_dealloc = (destructor)plan_dealloc,
    .tp_traverse = (traverseproc)plan_traverse,
    .tp_members = plan_members,
};

/* ---- Keys: what tells calls apart ---- */

/* Where a tensor lies: its first byte, and the one behind its last. */
typedef struct {
    uintptr_t start, end;
} Span;

/* A call of plain tensors: the words are its layout, and the spans where its tensors lie. */
typedef struct {
    PyObject *kind;
    PyObject *agreed;
    Py_hash_t hash;
    int count;
    int tensors;
    int64_t words[KEY_WORDS];
    Span spans[KEY_WORDS];
} Key;

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
    PyObject *is_negated;
    PyObject *tensor_types;
    PyObject *api_owner;
    ExchangeApi *api;
    Room *rooms;
    size_t room_count;
    size_t used;
} Plans;

/* Whether elements lie one after the other; as torch has it, strides of extents of one do not matter. */
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

/* Add a tensor to a key; whether it is plain: on the CPU, dense, real, not lazily negated, and no subclass that
   may hide what it is. */
static int
key_add(Plans *self, Key *key, PyObject *tensor)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    int known = 0;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->tensor_types); index++) {
        known = known || PyTuple_GET_ITEM(self->tensor_types, index) == type;
    }
    View view;
    if (!known || self->api->read(tensor, &view) != 0 || view.device_type != CPU ||
        key->count + 1 + view.ndim > KEY_WORDS || !is_dense(&view)) {
        return 0;
    }
    if (view.code != FLOATING && view.code != INTEGER && view.code != UNSIGNED && view.code != BFLOAT &&
        view.code != BOOLEAN) {
        return 0;
    }
    PyObject *negated = PyObject_CallOneArg(self->is_negated, tensor);
    Py_XDECREF(negated);
    if (negated != Py_False) {
        return 0;
    }
    key->words[key->count++] =
        (int64_t)view.ndim << 32 | (int64_t)view.lanes << 16 | (int64_t)view.bits << 8 | view.code;
    int64_t bits = (int64_t)view.lanes * view.bits;
    for (int axis = 0; axis < view.ndim; axis++) {
        key->words[key->count++] = view.shape[axis];
        bits *= view.shape[axis];
    }
    if (view.data == NULL && bits != 0) {
        return 0; /* its storage was freed, or it stands for another */
    }
    uintptr_t start = (uintptr_t)view.data + view.offset;
    key->spans[key->tensors++] = (Span){start, start + (uintptr_t)(bits + 7) / 8};
    return 1;
}

/* Add to a key which tensors share memory with one that is written, and where: the spans from `written` on are
   written. Whether it has room. As -1 or less is no layout's word, no other call has these words. */
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
key_add_all(Plans *self, Key *key, PyObject *tensors)
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

/* Make the key of a call; whether it is one of plain tensors. Exceptions are dropped: the counterpart, which is
   asked then, raises its own. */
static int
key_make(Plans *self, Key *key, PyObject *kind, PyObject *agreed, PyObject *inputs, PyObject *outputs)
{
    key->kind = kind;
    key->agreed = agreed;
    key->count = 1;
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

/* Whether a room has the plan of a key; an exception of the comparison is dropped, and means no. */
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
    PyObject *agreed = Py_NewRef(room->agreed); /* what compares may be Python, and may empty the rooms */
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
            return NULL; /* they were emptied or moved meanwhile: as if the plan was not there */
        }
        if (fits) {
            return rooms[place].plan;
        }
    }
    return NULL;
}

static PyTypeObject Plans_Type;

/* ---- Plans ---- */

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

/* Start over with empty rooms. */
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
    rooms_free(old, count);
    return 0;
}

/* Put a room where its key is looked for. */
static void
rooms_place(Room *rooms, size_t count, Room room)
{
    size_t place = (size_t)room.hash & (count - 1);
    while (rooms[place].plan != NULL) {
        place = (place + 1) & (count - 1);
    }
    rooms[place] = room;
}

/* See to it that less than half of the rooms are used. */
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
    static char *names[] = {"others", "api", "tensor_types", "is_negated", NULL};
    PyObject *others, *api, *tensor_types, *is_negated;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO!O:Plans", names, &others, &api, &PyTuple_Type,
                                     &tensor_types, &is_negated)) {
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
    self->api_owner = Py_NewRef(api);
    self->tensor_types = Py_NewRef(tensor_types);
    self->is_negated = Py_NewRef(is_negated);
    self->api = functions;
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
    return 0;
}

static int
plans_clear(Plans *self)
{
    Room *rooms = self->rooms;
    size_t count = self->room_count;
    self->rooms = NULL;
    self->room_count = self->used = 0;
    rooms_free(rooms, count);
    Py_CLEAR(self->others);
    return 0;
}

static void
plans_dealloc(Plans *self)
{
    PyObject_GC_UnTrack(self);
    plans_clear(self);
    Py_XDECREF(self->api_owner);
    Py_XDECREF(self->tensor_types);
    Py_XDECREF(self->is_negated);
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

/* Return the plan of a call like one that was kept; None where there is none. */
static PyObject *
plans_find(Plans *self, PyObject *const *args, Py_ssize_t count)
{
    Key key;
    if (plans_ready_for(self, "find", 4, count) < 0) {
        return NULL;
    }
    if (!key_make(self, &key, args[0], args[1], args[2], args[3])) {
        return PyObject_CallMethod(self->others, "find", "OOOO", args[0], args[1], args[2], args[3]);
    }
    PyObject *plan = plans_of_key(self, &key);
    return Py_NewRef(plan != NULL ? plan : Py_None);
}

PyObject *
plan_of(PyObject *plans, PyObject *kind, PyObject *agreed, PyObject *inputs, PyObject *outputs)
{
    Key key;
    Plans *self = (Plans *)plans;
    if (!Py_IS_TYPE(plans, &Plans_Type) || self->rooms == NULL || !key_make(self, &key, kind, agreed, inputs, outputs)) {
        return NULL;
    }
    return Py_XNewRef(plans_of_key(self, &key));
}

/* Whether calls are told apart here, and so only found again with plain tensors. */
static PyObject *
plans_plain(Plans *self, PyObject *const *args, Py_ssize_t count)
{
    Key key;
    if (plans_ready_for(self, "plain", 2, count) < 0) {
        return NULL;
    }
    return PyBool_FromLong(key_make(self, &key, Py_None, Py_None, args[0], args[1]));
}

/* Keep a plan for calls like this one. */
static PyObject *
plans_keep(Plans *self, PyObject *const *args, Py_ssize_t count)
{
    Key key;
    if (plans_ready_for(self, "keep", 5, count) < 0) {
        return NULL;
    }
    if (!key_make(self, &key, args[0], args[1], args[2], args[3])) {
        return PyObject_CallMethod(self->others, "keep", "OOOOO", args[0], args[1], args[2], args[3], args[4]);
    }
    if (plans_of_key(self, &key) != NULL) {
        Py_RETURN_NONE; /* another thread was faster */
    }
    int64_t *words = PyMem_Malloc(sizeof(int64_t) * (size_t)key.count);
    if (words == NULL || plans_grow(self) < 0) {
        PyMem_Free(words);
        return PyErr_NoMemory();
    }
    memcpy(words, key.words, sizeof(int64_t) * (size_t)key.count);
    Room room = {Py_NewRef(key.kind), Py_NewRef(key.agreed), Py_NewRef(args[4]), key.hash, key.count, words};
    rooms_place(self->rooms, self->room_count, room);
    self->used++;
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
    .tp_name = "dist2.compiled._records.Plans",
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
