/* `Script`: the steps of one program with their addresses bound.

   A run executes them in order. A step that it cannot do stops it: it returns the number of that step, its caller
   does the step in Python, and the run continues behind it. */

#include "dlpack.h"
#include "script.h"

static PyObject *str_data_ptr;
static PyTypeObject ScriptType;

/* The type of tensors that these functions read. Asking Python costs more, above all if its code is not in the
   caches. */
static PyObject *plain_type;
static ExchangeApi *plain_api;

static void
clear_step(Step *step)
{
    PyMem_Free(step->srcs);
    step->srcs = NULL;
    PyMem_Free(step->many);
    step->many = NULL;
    Py_CLEAR(step->check);
    Py_CLEAR(step->bytes);
    Py_CLEAR(step->code);
    Py_CLEAR(step->rail);
}

static int
script_clear(Script *self)
{
    for (Py_ssize_t each = 0; each < self->count; each++) {
        clear_step(&self->steps[each]);
    }
    self->count = 0;
    Py_CLEAR(self->arrivals);
    Py_CLEAR(self->wait);
    Py_CLEAR(self->log_call);
    Py_CLEAR(self->printed.signature);
    return 0;
}

static int
script_traverse(Script *self, visitproc visit, void *arg)
{
    Py_VISIT(self->arrivals);
    Py_VISIT(self->wait);
    Py_VISIT(self->log_call);
    Py_VISIT(self->printed.signature);
    for (Py_ssize_t each = 0; each < self->count; each++) {
        Py_VISIT(self->steps[each].check);
    }
    return 0;
}

static void
script_dealloc(Script *self)
{
    PyObject_GC_UnTrack(self);
    script_clear(self);
    PyMem_Free(self->steps);
    PyMem_Free(self->used);
    PyMem_Free(self->rails.each);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Return how many bytes the program moves: other members move about as many. */
static size_t
moved_by(const Script *self)
{
    size_t nbytes = 0;
    for (Py_ssize_t each = 0; each < self->count; each++) {
        const Step *step = &self->steps[each];
        nbytes += step->kind == FOLD ? step->nbytes * (size_t)step->count : step->nbytes;
    }
    return nbytes;
}

/* Refuse steps in an order in which they would never run. */
static int
check_order(const Script *self)
{
    for (Py_ssize_t each = 0; each < self->count; each++) {
        int kind = self->steps[each].kind, behind = each + 1 < self->count ? self->steps[each + 1].kind : STOP;
        if (kind == OWN && behind != FENCE) {
            PyErr_Format(PyExc_ValueError, "step %zd, an OWN, has no FENCE behind it", each);
            return -1;
        }
        if (kind == BESIDE && behind != COPY && behind != BOTH) {
            PyErr_Format(PyExc_ValueError, "step %zd, a BESIDE, has no copy behind it", each);
            return -1;
        }
    }
    return 0;
}

static int
script_init(Script *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"arrivals", "steps", "wait", "log_call", "inputs", "outputs", "lent", NULL};
    PyObject *arrivals, *steps, *wait, *log_call;
    Py_ssize_t outputs = 0, lent = 0;
    if (self->arrivals != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Script is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OO|nnn", names, &ArrivalsType, &arrivals, &PyTuple_Type,
                                     &steps, &wait, &log_call, &self->inputs, &outputs, &lent)) {
        return -1;
    }
    self->arrivals = (Arrivals *)Py_NewRef(arrivals);
    self->wait = Py_NewRef(wait);
    self->log_call = Py_NewRef(log_call);
    self->tensors = self->inputs + outputs;
    self->places = self->tensors + lent;
    self->used = PyMem_Calloc((size_t)self->places + 1, 1);
    Py_ssize_t count = PyTuple_GET_SIZE(steps);
    self->steps = PyMem_Calloc((size_t)count + 1, sizeof(Step));
    if (self->used == NULL || self->steps == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; self->count < count; self->count++) {
        if (read_step(self, PyTuple_GET_ITEM(steps, self->count), &self->steps[self->count]) < 0) {
            clear_step(&self->steps[self->count]);
            return -1;
        }
    }
    self->moved = moved_by(self);
    return check_order(self);
}

/* Return the address of a tensor, if the caller has read it; `at` is its likely index. NULL if not. */
static inline const Span *
find_span(const Places *places, PyObject *tensor, Py_ssize_t at)
{
    if (places == NULL) {
        return NULL;
    }
    if (at < places->count && places->tensors[at] == tensor) {
        return &places->spans[at];
    }
    for (Py_ssize_t each = 0; each < places->count; each++) {
        if (places->tensors[each] == tensor) {
            return &places->spans[each];
        }
    }
    return NULL;
}

/* Find the address of a tensor's elements. */
static int
find_base(const Run *run, PyObject *tensor, Py_ssize_t at, uint64_t *base)
{
    View view;
    const Span *span = find_span(run->places, tensor, at);
    if (span != NULL) {
        *base = span->start;
        return 0;
    }
    if ((PyObject *)Py_TYPE(tensor) == plain_type) {
        if (plain_api->read(tensor, &view) == 0) {
            *base = (uintptr_t)view.data + view.offset;
            return 0;
        }
        PyErr_Clear(); /* only Python can describe its state */
    }
    PyObject *address = PyObject_CallMethodNoArgs(tensor, str_data_ptr);
    if (address == NULL) {
        return -1;
    }
    *base = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    return PyErr_Occurred() ? -1 : 0;
}

/* Find the addresses of the inputs or of the outputs. */
static int
find_bases(Run *run, PyObject *tensors, Py_ssize_t first, Py_ssize_t stop, uint64_t shift)
{
    PyObject *fast = PySequence_Fast(tensors, "tensors come in a sequence");
    if (fast == NULL) {
        return -1;
    }
    if (PySequence_Fast_GET_SIZE(fast) < stop - first) {
        PyErr_Format(PyExc_ValueError, "%zd tensors, not %zd", PySequence_Fast_GET_SIZE(fast), stop - first);
        Py_DECREF(fast);
        return -1;
    }
    for (Py_ssize_t each = first; each < stop; each++) {
        if (!run->script->used[each]) {
            continue;
        }
        if (find_base(run, PySequence_Fast_GET_ITEM(fast, each - first), each, &run->bases[each]) < 0) {
            Py_DECREF(fast);
            return -1;
        }
        run->bases[each] += shift;
    }
    Py_DECREF(fast);
    return 0;
}

/* Run with the tensors' addresses found. */
static Py_ssize_t
run_on(Run *run, PyObject *inputs, PyObject *outputs, uint64_t shift, Py_ssize_t at)
{
    Script *script = run->script;
    uint64_t few[16];
    Py_ssize_t stopped = -1;
    run->bases = script->places <= 16 ? few : PyMem_Calloc((size_t)script->places, sizeof(uint64_t));
    if (run->bases == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (find_bases(run, inputs, 0, script->inputs, shift) == 0 &&
        find_bases(run, outputs, script->inputs, script->tensors, shift) == 0) {
        stopped = run_steps(run, at);
    }
    if (run->bases != few) {
        PyMem_Free(run->bases);
    }
    return stopped;
}

/* Run a call from a step on; return the number of the step that stopped it, or the number of steps, or -1 with an
   exception. */
static Py_ssize_t
run_call(Script *self, PyObject *const *call, uint64_t shift, Py_ssize_t at)
{
    Run run = {.script = self, .operation = call[0], .places = read_places(call[0])};
    if (self->fences) {
        if (read_label(run.operation, &run.label, &self->printed) < 0) {
            return -1;
        }
        note_call(self->arrivals, run.operation, &run.label);
    }
    return self->places ? run_on(&run, call[1], call[2], shift, at) : run_steps(&run, at);
}

int
is_script(PyObject *object)
{
    return Py_IS_TYPE(object, &ScriptType);
}

Py_ssize_t
script_call(PyObject *script, PyObject *const *call, int *done)
{
    Py_ssize_t at = run_call((Script *)script, call, 0, 0);
    *done = at == ((Script *)script)->count;
    return at;
}

static PyObject *
script_run(Script *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 5) {
        PyErr_Format(PyExc_TypeError, "run takes 5 arguments, got %zd", count);
        return NULL;
    }
    uint64_t shift = PyLong_AsUnsignedLongLong(args[3]);
    Py_ssize_t at = PyErr_Occurred() ? -1 : PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (at < 0 || at > self->count) {
        PyErr_Format(PyExc_IndexError, "step %zd of %zd", at, self->count);
        return NULL;
    }
    Py_ssize_t stopped = run_call(self, args, shift, at);
    return stopped < 0 ? NULL : PyLong_FromSsize_t(stopped);
}

static PyMethodDef script_methods[] = {
    {"run", (PyCFunction)(void (*)(void))script_run, METH_FASTCALL, "Run the steps from one on."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject ScriptType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.steps.Script",
    .tp_doc = "The steps of one program, with their addresses bound.",
    .tp_basicsize = sizeof(Script),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)script_init,
    .tp_dealloc = (destructor)script_dealloc,
    .tp_traverse = (traverseproc)script_traverse,
    .tp_clear = (inquiry)script_clear,
    .tp_methods = script_methods,
};

static PyObject *
read_tensors(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *type, *capsule;
    if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &capsule)) {
        return NULL;
    }
    ExchangeApi *api = exchange_api(capsule);
    if (api == NULL) {
        return NULL;
    }
    plain_api = api;
    Py_XSETREF(plain_type, Py_NewRef(type));
    Py_RETURN_NONE;
}

static PyObject *
share(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long from, nbytes;
    if (!PyArg_ParseTuple(args, "KK", &from, &nbytes)) {
        return NULL;
    }
    tell_shared((uintptr_t)from, (uintptr_t)(from + nbytes));
    Py_RETURN_NONE;
}

static PyObject *
take_parts_by(PyObject *Py_UNUSED(module), PyObject *taker)
{
    take_parts(taker == Py_None ? NULL : taker);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"take_parts", take_parts_by, METH_O, "Say by what to take the parts of calls; None: by nothing."},
    {"share", share, METH_VARARGS, "Say from where on tensors of `shared_empty` lie, and in how many bytes."},
    {"read_tensors", read_tensors, METH_VARARGS, "Say by what tensors of exactly one type are read."},
    {NULL, NULL, 0, NULL},
};

int
script_ready(PyObject *module)
{
    if (PyModule_AddFunctions(module, functions) < 0) {
        return -1;
    }
    static const char *const kinds[KINDS] = {"STOP", "COPY",  "FENCE", "FOLD",  "READ", "SAME",
                                             "SHARED", "STORE", "LENT", "NOTE", "NOTED", "OWN", "CLAIM",
                                             "SEND", "RECEIVE", "SENT", "BOTH", "BESIDE"};
    for (int each = 0; each < KINDS; each++) {
        if (PyModule_AddIntConstant(module, kinds[each], each) < 0) {
            return -1;
        }
    }
    static const Name names[] = {{&str_data_ptr, "data_ptr"}};
    return intern(names, Py_ARRAY_LENGTH(names)) < 0 ? -1 : PyModule_AddType(module, &ScriptType);
}
