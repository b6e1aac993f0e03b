/* Works of complete operations, and reuse of dropped Works.

   Most Works are dropped by the statement that made the call. Making and destroying the C++ half of one costs more
   than the rest of a call, so a few dropped Works are kept, without the objects that they held. A Work is kept only
   if no C++ code refers to its C++ half: if the reference count of that half is the count of a new one. torch
   publishes no access to the count, so `adopt` searches for it next to the first word of the C++ half, and tests it:
   the count must change as `Work.boxed()` takes and returns a reference, and new Works must be equal in all of
   pybind's bookkeeping. If a test fails, each Work is made anew. */

#include "records.h"

#include <unistd.h>

enum { OPERATION, OUTPUTS, PENDING, HELPER, PROCESS, SLOTS };
enum { SPARES = 8, MOST_NOTES = 64 };

static const char *const slot_names[SLOTS] = {"operation", "outputs", "_pending", "helper", "_process"};

/* The only type of Works, after `adopt`. */
static struct {
    PyTypeObject *type;
    PyObject *prepare;
    Py_ssize_t slots[SLOTS];
    int keeps;                       /* whether Works are used again */
    uint64_t unshared;               /* the count of a new one */
    unsigned char notes[MOST_NOTES]; /* pybind's bookkeeping of a new one, behind the addresses of its C++ half */
    Py_ssize_t notes_at, notes_end;
    PyObject *spare[SPARES]; /* with empty slots, untracked by the garbage collector */
    int spares;
} works;

static inline PyObject **
work_slot(PyObject *work, int slot)
{
    return (PyObject **)((char *)work + works.slots[slot]);
}

/* Return the reference count of the C++ half of a Work; 0 if it has none. */
static inline uint64_t
work_count(PyObject *work)
{
    char *half = *(char **)((char *)work + sizeof(PyObject));
    return half == NULL ? 0 : __atomic_load_n((uint64_t *)(half + sizeof(void *)), __ATOMIC_ACQUIRE);
}

/* Whether a Work looks like a new one to torch and pybind. */
static inline int
work_is_unshared(PyObject *work)
{
    return work_count(work) == works.unshared &&
           memcmp((char *)work + works.notes_at, works.notes, (size_t)(works.notes_end - works.notes_at)) == 0;
}

/* Whether a Work may be reused. One with a called `__del__` may not: Python calls that once in an object's life. */
static inline int
work_is_spare(PyObject *work)
{
    return works.keeps && works.spares < SPARES && work_is_unshared(work) && !PyObject_GC_IsFinalized(work);
}

/* Deallocate a Work, or keep it. */
static void
work_dealloc(PyObject *work)
{
    PyObject *held[SLOTS];
    int exact = Py_IS_TYPE(work, works.type); /* else its type has called `__del__`, and calls this for the rest */
    int keep = exact && work_is_spare(work);
    if (exact && !keep && PyObject_CallFinalizerFromDealloc(work) < 0) {
        return; /* C++ has a reference to its C++ half, so it lives on: see `Work.__del__` */
    }
    PyObject_GC_UnTrack(work);
    for (int slot = 0; slot < SLOTS; slot++) {
        held[slot] = *work_slot(work, slot);
        *work_slot(work, slot) = NULL;
    }
    if (keep) {
        Py_SET_REFCNT(work, 1);
        works.spare[works.spares++] = work;
    }
    else {
        works.type->tp_base->tp_dealloc(work);
    }
    for (int slot = 0; slot < SLOTS; slot++) {
        Py_XDECREF(held[slot]);
    }
}

/* Return a new Work with empty slots. */
static PyObject *
work_blank(void)
{
    PyObject *none = PyTuple_New(0);
    PyObject *work = none == NULL ? NULL : works.type->tp_new(works.type, none, NULL);
    Py_XDECREF(none);
    if (work == NULL) {
        return NULL;
    }
    PyObject *prepared = PyObject_CallOneArg(works.prepare, work);
    if (prepared == NULL) {
        Py_DECREF(work);
        return NULL;
    }
    Py_DECREF(prepared);
    return work;
}

/* Return a Work with empty slots: a reused one, or a new one. */
static PyObject *
work_spare(void)
{
    if (works.spares > 0) {
        PyObject *work = works.spare[--works.spares];
        PyObject_GC_Track(work);
        return work;
    }
    if (works.type == NULL) {
        PyErr_SetString(PyExc_SystemError, "no type of Works was adopted");
        return NULL;
    }
    return work_blank();
}

PyObject *
work_of(PyObject *operation, PyObject *outputs)
{
    PyObject *work = work_spare();
    if (work == NULL) {
        return NULL;
    }
    *work_slot(work, OPERATION) = Py_NewRef(operation);
    *work_slot(work, OUTPUTS) = Py_NewRef(outputs);
    *work_slot(work, PENDING) = Py_NewRef(Py_None);
    *work_slot(work, HELPER) = Py_NewRef(Py_None);
    return work;
}

PyObject *
work_pending(PyObject *operation, PyObject *outputs, PyObject *pending)
{
    PyObject *process = PyLong_FromLong(getpid());
    PyObject *work = process == NULL ? NULL : work_of(operation, outputs);
    if (work == NULL) {
        Py_XDECREF(process);
        return NULL;
    }
    *work_slot(work, PROCESS) = process;
    Py_SETREF(*work_slot(work, PENDING), Py_NewRef(pending));
    Py_SETREF(*work_slot(work, HELPER), Py_NewRef(pending));
    return work;
}

void
work_forget_helper(PyObject *work)
{
    Py_XSETREF(*work_slot(work, HELPER), Py_NewRef(Py_None));
}

/* Find the offsets of the slots of a type. */
static int
find_slots(PyObject *type)
{
    for (int slot = 0; slot < SLOTS; slot++) {
        PyObject *member = PyObject_GetAttrString(type, slot_names[slot]);
        if (member == NULL) {
            return -1;
        }
        if (!Py_IS_TYPE(member, &PyMemberDescr_Type)) {
            PyErr_Format(PyExc_TypeError, "%s must be a slot of %R", slot_names[slot], type);
            Py_DECREF(member);
            return -1;
        }
        works.slots[slot] = ((PyMemberDescrObject *)member)->d_member->offset;
        Py_DECREF(member);
    }
    return 0;
}

/* Whether the reference count of a Work grows with each box around its C++ half, and shrinks again. */
static int
counts_boxes(PyObject *work)
{
    PyObject *first = PyObject_CallMethod(work, "boxed", NULL);
    int grows = first != NULL && work_count(work) == works.unshared + 1;
    PyObject *second = grows ? PyObject_CallMethod(work, "boxed", NULL) : NULL;
    grows = second != NULL && work_count(work) == works.unshared + 2;
    Py_XDECREF(second);
    Py_XDECREF(first);
    PyErr_Clear(); /* a torch whose Works cannot be boxed */
    return grows && work_count(work) == works.unshared;
}

/* Test whether the count can be read: two new Works must look alike, and boxes must change it. */
static int
try_out(PyObject *first, PyObject *second)
{
    works.notes_at = (Py_ssize_t)(sizeof(PyObject) + 2 * sizeof(void *));
    works.notes_end = works.type->tp_base->tp_basicsize;
    if (works.notes_end <= works.notes_at || works.notes_end - works.notes_at > MOST_NOTES) {
        return 0;
    }
    memcpy(works.notes, (char *)first + works.notes_at, (size_t)(works.notes_end - works.notes_at));
    works.unshared = work_count(first);
    return works.unshared != 0 && work_is_unshared(second) && counts_boxes(first) && counts_boxes(second);
}

PyObject *
works_adopt(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyType_Check(args[0]) || works.type != NULL) {
        PyErr_SetString(PyExc_TypeError, "adopt takes a type and what prepares its objects, once");
        return NULL;
    }
    if (find_slots(args[0]) < 0) {
        return NULL;
    }
    works.type = (PyTypeObject *)Py_NewRef(args[0]);
    works.prepare = Py_NewRef(args[1]);
    PyObject *first = work_blank();
    PyObject *second = first == NULL ? NULL : work_blank();
    int keeps = second != NULL && try_out(first, second);
    if (second != NULL) {
        works.type->tp_dealloc = work_dealloc;
    }
    Py_XDECREF(first);
    Py_XDECREF(second);
    if (second == NULL) {
        return NULL;
    }
    works.keeps = keeps;
    return PyBool_FromLong(keeps);
}
