/* A program selects one of several scripts for a call: by the half of the slots that is next, or by the parity of
   its first fence; with four scripts, by this and by alternating pairs. Python runs steps that a script cannot do,
   and calls without a script: dist2/backends/socket/flat.py and single_copy.py. */

#include "steps.h"

#define MOST_SCRIPTS 4

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Arrivals *arrivals;
    PyObject *first;      /* called where there is no script */
    PyObject *stopped;    /* called with the number of the step that stopped a script */
    PyObject *failed;     /* called with a script's exception, unless it is None */
    PyObject *scripts[MOST_SCRIPTS]; /* or None */
    int count; /* of scripts: 2 or 4 */
    char by_parity;
    char other; /* the last call took one of scripts 2 and 3 */
    PyObject *weakrefs;
} Program;

/* Report a script's exception, which stays set. */
static void
tell_failure(Program *self, unsigned long long phase)
{
    if (self->failed == Py_None) {
        return;
    }
    PyObject *error = raised();
    PyObject *told = PyObject_CallFunction(self->failed, "KO", phase, error);
    Py_XDECREF(told);
    go_on(error);
}

/* Run a script, and let Python continue where it stops. */
static PyObject *
run_script(Program *self, PyObject *script, int which, PyObject *const *call)
{
    unsigned long long phase = self->arrivals->phase + 1;
    int done;
    Py_ssize_t at = script_call(script, call, &done);
    if (at < 0) {
        tell_failure(self, phase);
        return NULL;
    }
    if (done) {
        Py_RETURN_NONE;
    }
    return PyObject_CallFunction(self->stopped, "OOOinK", call[0], call[1], call[2], which, at, phase);
}

static PyObject *
program_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Program *self = (Program *)object;
    if (PyVectorcall_NARGS(flags) != 3 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "a program takes an operation, inputs and outputs");
        return NULL;
    }
    if (self->first == NULL) {
        PyErr_SetString(PyExc_ReferenceError, "the program is gone");
        return NULL;
    }
    Py_INCREF(self);
    int which = self->by_parity ? (int)((self->arrivals->phase + 1) & 1) : self->arrivals->turn;
    if (self->count == MOST_SCRIPTS) {
        which += 2 * (self->other ^= 1);
    }
    PyObject *script = Py_NewRef(self->scripts[which]), *done;
    if (script == Py_None) {
        done = PyObject_Vectorcall(self->first, args, 3, NULL);
    }
    else {
        self->arrivals->turn ^= !self->by_parity;
        done = run_script(self, script, which, args);
    }
    Py_DECREF(script);
    Py_DECREF(self);
    return done;
}

static PyObject *
program_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"arrivals", "first", "stopped", "failed", "by_parity", NULL};
    PyObject *arrivals, *first, *stopped, *failed = Py_None;
    int by_parity = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!OO|Op:Program", names, &ArrivalsType, &arrivals, &first,
                                     &stopped, &failed, &by_parity)) {
        return NULL;
    }
    Program *self = (Program *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->call = program_call;
    self->arrivals = (Arrivals *)Py_NewRef(arrivals);
    self->first = Py_NewRef(first);
    self->stopped = Py_NewRef(stopped);
    self->failed = Py_NewRef(failed);
    for (int each = 0; each < MOST_SCRIPTS; each++) {
        self->scripts[each] = Py_NewRef(Py_None);
    }
    self->count = 2;
    self->by_parity = (char)by_parity;
    return (PyObject *)self;
}

static int
program_traverse(Program *self, visitproc visit, void *arg)
{
    Py_VISIT(self->arrivals);
    Py_VISIT(self->first);
    Py_VISIT(self->stopped);
    Py_VISIT(self->failed);
    for (int each = 0; each < MOST_SCRIPTS; each++) {
        Py_VISIT(self->scripts[each]);
    }
    return 0;
}

static int
program_clear(Program *self)
{
    Py_CLEAR(self->first);
    Py_CLEAR(self->stopped);
    Py_CLEAR(self->failed);
    for (int each = 0; each < MOST_SCRIPTS; each++) {
        Py_CLEAR(self->scripts[each]);
    }
    return 0;
}

static void
program_dealloc(Program *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    program_clear(self);
    Py_CLEAR(self->arrivals);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
program_get_scripts(Program *self, void *Py_UNUSED(none))
{
    if (self->first == NULL) {
        return PyTuple_New(0);
    }
    PyObject *scripts = PyTuple_New(self->count);
    for (int each = 0; scripts != NULL && each < self->count; each++) {
        PyTuple_SET_ITEM(scripts, each, Py_NewRef(self->scripts[each]));
    }
    return scripts;
}

/* Whether a value is valid as scripts of a program: two or four scripts, some of which may be None. */
static int
are_scripts(PyObject *value)
{
    if (value == NULL || !PyTuple_Check(value)) {
        return 0;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(value);
    for (Py_ssize_t each = 0; each < count; each++) {
        if (PyTuple_GET_ITEM(value, each) != Py_None && !is_script(PyTuple_GET_ITEM(value, each))) {
            return 0;
        }
    }
    return count == 2 || count == MOST_SCRIPTS;
}

static int
program_set_scripts(Program *self, PyObject *value, void *Py_UNUSED(none))
{
    if (!are_scripts(value)) {
        PyErr_Format(PyExc_TypeError, "scripts must be two or four of them or None, got %R",
                     value == NULL ? Py_None : value);
        return -1;
    }
    self->count = (int)PyTuple_GET_SIZE(value);
    for (int each = 0; each < self->count; each++) {
        Py_XSETREF(self->scripts[each], Py_NewRef(PyTuple_GET_ITEM(value, each)));
    }
    return 0;
}

static PyGetSetDef program_getset[] = {
    {"scripts", (getter)program_get_scripts, (setter)program_set_scripts, "One for each turn or parity.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject ProgramType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.steps.Program",
    .tp_doc = "A program that is run as one script or another.",
    .tp_basicsize = sizeof(Program),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = program_new,
    .tp_dealloc = (destructor)program_dealloc,
    .tp_traverse = (traverseproc)program_traverse,
    .tp_clear = (inquiry)program_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Program, call),
    .tp_weaklistoffset = offsetof(Program, weakrefs),
    .tp_getset = program_getset,
};

int
program_ready(PyObject *module)
{
    return PyModule_AddType(module, &ProgramType);
}
