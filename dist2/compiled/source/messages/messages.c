/* Messages inside a host: their short path as one call, and the module of all its files. */

#include "messages.h"

#include "parts.h"

static PyObject *str_data_ptr, *str_free_slots;
static Field field_last;

/* ---- Offers ---- */

int
enter_offer(Offer *offer, End *tx, const char *address)
{
    PyObject *slots = PyObject_GetAttr((PyObject *)tx, str_free_slots);
    if (slots == NULL || !PyList_Check(slots) || PyList_GET_SIZE(slots) == 0) {
        Py_XDECREF(slots);
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_ssize_t last = PyList_GET_SIZE(slots) - 1;
    PyObject *number = PyObject_CallNoArgs(offer->numbers);
    offer->loan[0] = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
    offer->loan[1] = (uintptr_t)address;
    offer->loan[2] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(slots, last));
    Py_XDECREF(number);
    int entered = PyErr_Occurred() ? -1 : PyList_SetSlice(slots, last, last + 1, NULL);
    Py_DECREF(slots);
    if (entered < 0 || offer->loan[2] >= PAGE_WORDS - SLOTS_AT) {
        return entered;
    }
    atomic_store_explicit(&tx->words[SLOTS_AT + offer->loan[2]], offer->loan[0], memory_order_release);
    offer->tx = (End *)Py_NewRef(tx);
    return 1;
}

/* Drop the ring end by which a message was offered. */
static void
forget_ring(Offer *offer)
{
    Py_CLEAR(offer->tx);
}

int
end_offer(Offer *offer)
{
    atomic_store_explicit(&offer->tx->words[SLOTS_AT + offer->loan[2]], 0, memory_order_release);
    PyObject *slots = PyObject_GetAttr((PyObject *)offer->tx, str_free_slots);
    PyObject *slot = PyLong_FromUnsignedLongLong(offer->loan[2]);
    int freed = slots == NULL || slot == NULL || !PyList_Check(slots) ? -1 : PyList_Append(slots, slot);
    Py_XDECREF(slots);
    Py_XDECREF(slot);
    forget_ring(offer);
    return freed;
}

int
hand_over(Offer *offer, int outcome)
{
    PyObject *error = raised();
    PyObject *number = PyLong_FromUnsignedLongLong(offer->loan[0]);
    PyObject *slot = PyLong_FromUnsignedLongLong(offer->loan[2]);
    if (number != NULL && slot != NULL) {
        offer->adopted =
            PyObject_CallFunctionObjArgs(offer->adopt, offer->tensor, number, (PyObject *)offer->tx, slot, NULL);
    }
    Py_XDECREF(number);
    Py_XDECREF(slot);
    go_on(error);
    if (offer->adopted == NULL) { /* no message refers to the memory: it must not be read any more */
        error = raised();
        end_offer(offer);
        go_on(error);
        return -1;
    }
    forget_ring(offer);
    return outcome == 0 ? 0 : take_back(offer);
}

int
take_back(Offer *offer)
{
    PyObject *error = raised();
    PyObject *cancelled = PyObject_CallOneArg(offer->cancel, offer->adopted);
    Py_CLEAR(offer->adopted);
    Py_XDECREF(cancelled);
    go_on(error);
    return -1;
}

/* ---- Carriers ---- */

/* Runs the sends or the receives of one signature: the `execute` of a plan. */
typedef struct {
    PyObject_HEAD
    PyObject *messenger;
    PyObject *otherwise;
    PyObject *resume;
    PyObject *numbers;
    PyObject *adopt;
    PyObject *cancel;
    Express *express;
    vectorcallfunc call;
    char sends;
} Carrier;

static int
carrier_traverse(Carrier *self, visitproc visit, void *arg)
{
    Py_VISIT(self->messenger);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->resume);
    Py_VISIT(self->numbers);
    Py_VISIT(self->adopt);
    Py_VISIT(self->cancel);
    Py_VISIT(self->express);
    return 0;
}

static int
carrier_clear(Carrier *self)
{
    Py_CLEAR(self->messenger);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->resume);
    Py_CLEAR(self->numbers);
    Py_CLEAR(self->adopt);
    Py_CLEAR(self->cancel);
    Py_CLEAR(self->express);
    return 0;
}

static void
carrier_dealloc(Carrier *self)
{
    PyObject_GC_UnTrack(self);
    carrier_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Return the one tensor of a call, borrowed. */
static PyObject *
only_tensor(PyObject *inputs, PyObject *outputs)
{
    PyObject *const sides[] = {inputs, outputs};
    for (size_t each = 0; each < Py_ARRAY_LENGTH(sides); each++) {
        if (PyTuple_Check(sides[each]) && PyTuple_GET_SIZE(sides[each]) == 1) {
            return PyTuple_GET_ITEM(sides[each], 0);
        }
        if (PyList_Check(sides[each]) && PyList_GET_SIZE(sides[each]) == 1) {
            return PyList_GET_ITEM(sides[each], 0);
        }
    }
    PyErr_Format(PyExc_TypeError, "a message is one tensor, got %R and %R", inputs, outputs);
    return NULL;
}

/* Return the address of the tensor of a call. The caller has usually read it already. */
static char *
address_of(const Places *places, PyObject *tensor)
{
    if (places != NULL && places->count == 1 && places->tensors[0] == tensor) {
        return (char *)places->spans[0].start;
    }
    PyObject *address = PyObject_CallMethodNoArgs(tensor, str_data_ptr);
    if (address == NULL) {
        return NULL;
    }
    char *at = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return at;
}

/* A call under way. */
typedef struct {
    Carrier *carrier;
    PyObject *operation;
    const Calls *calls; /* its fields */
    PyObject *tensor;
    char *address;
    long long began_ns;
    long long deadline_ns; /* 0 if the caller does not wait */
} Call;

/* Leave a call to the long path: all of it, or the remainder. */
static PyObject *
go_long(Call *call)
{
    PyObject *arguments[] = {NULL, call->operation, call->tensor};
    return PyObject_Vectorcall(call->carrier->otherwise, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* Record the source rank of a message. */
static PyObject *
received(Call *call)
{
    call->calls->set_source(call->operation, (int)call->carrier->express->rank);
    Py_RETURN_NONE;
}

static PyObject *
carry_short(Call *call)
{
    Carrier *self = call->carrier;
    int carried = self->sends         ? express_send(self->express, call->address, call->began_ns)
                  : call->deadline_ns ? express_wait(self->express, call->address, call->deadline_ns)
                                      : express_take(self->express, call->address);
    if (carried <= 0) {
        return carried < 0 ? NULL : go_long(call);
    }
    return self->sends ? Py_NewRef(Py_None) : received(call);
}

static PyObject *
carry_long_out(Call *call)
{
    Carrier *self = call->carrier;
    Offer offer = {.numbers = self->numbers, .adopt = self->adopt, .cancel = self->cancel, .tensor = call->tensor};
    int sent = express_offer(self->express, call->address, call->deadline_ns, &offer);
    if (sent != 0) {
        return sent < 0 ? NULL : Py_NewRef(Py_None);
    }
    if (offer.adopted == NULL) {
        return go_long(call);
    }
    PyObject *result =
        PyObject_CallFunctionObjArgs(self->resume, call->operation, call->tensor, offer.adopted, NULL);
    Py_DECREF(offer.adopted);
    return result;
}

static PyObject *
carry_long_in(Call *call)
{
    Carrier *self = call->carrier;
    Fetch fetch = {.link = NULL};
    int fetched = express_fetch(self->express, call->address, call->deadline_ns, &fetch);
    if (fetched != 0) {
        return fetched < 0 ? NULL : received(call);
    }
    if (fetch.link == NULL) {
        return go_long(call);
    }
    PyObject *left = Py_BuildValue("(NNi)", fetch.link, PyBytes_FromStringAndSize((char *)fetch.loan, sizeof fetch.loan),
                                   fetch.was_read);
    PyObject *done = left == NULL ? NULL
                                  : PyObject_CallFunctionObjArgs(self->resume, call->operation, call->tensor, left, NULL);
    Py_XDECREF(left);
    return done;
}

/* Carry a message with a known address and deadline. */
static PyObject *
carry(Call *call)
{
    if (call->carrier->resume == Py_None) {
        return carry_short(call);
    }
    if (call->deadline_ns == 0) {
        return go_long(call); /* a caller that does not wait cannot take part in a direct copy */
    }
    return call->carrier->sends ? carry_long_out(call) : carry_long_in(call);
}

/* Run one call: None if its message was sent or received, else the result of the long path. */
static PyObject *
carrier_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    if (PyVectorcall_NARGS(flags) != 3 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "takes an operation, inputs and outputs");
        return NULL;
    }
    Call call = {.carrier = (Carrier *)object,
                 .operation = args[0],
                 .calls = calls_of(args[0]),
                 .tensor = only_tensor(args[1], args[2])};
    if (call.calls == NULL || call.tensor == NULL || set_attribute(call.carrier->messenger, &field_last, args[0]) < 0) {
        return NULL;
    }
    CallFields fields;
    call.calls->read(args[0], &fields);
    call.deadline_ns = fields.is_async ? 0 : fields.deadline_ns;
    call.began_ns = fields.created_ns;
    Py_INCREF(call.carrier);
    Py_INCREF(call.tensor);
    call.address = address_of(fields.places, call.tensor);
    PyObject *result = call.address == NULL && PyErr_Occurred() ? NULL : carry(&call);
    Py_DECREF(call.tensor);
    Py_DECREF(call.carrier);
    return result;
}

static PyObject *
carrier_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"messenger", "express", "sends", "otherwise", "resume", "numbers", "adopt", "cancel", NULL};
    PyObject *messenger, *express, *otherwise, *resume = Py_None, *numbers = Py_None, *adopt = Py_None;
    PyObject *cancel = Py_None;
    int sends;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO!pO|OOOO:Carrier", names, &messenger, &Express_Type,
                                     &express, &sends, &otherwise, &resume, &numbers, &adopt, &cancel)) {
        return NULL;
    }
    Carrier *self = (Carrier *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->messenger = Py_NewRef(messenger);
    self->otherwise = Py_NewRef(otherwise);
    self->resume = Py_NewRef(resume);
    self->numbers = Py_NewRef(numbers);
    self->adopt = Py_NewRef(adopt);
    self->cancel = Py_NewRef(cancel);
    self->express = (Express *)Py_NewRef(express);
    self->sends = (char)sends;
    self->call = carrier_call;
    return (PyObject *)self;
}

static PyTypeObject Carrier_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.messages.Carrier",
    .tp_doc = "Runs the sends or the receives of one signature.",
    .tp_basicsize = sizeof(Carrier),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = carrier_new,
    .tp_dealloc = (destructor)carrier_dealloc,
    .tp_traverse = (traverseproc)carrier_traverse,
    .tp_clear = (inquiry)carrier_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Carrier, call),
};

/* ---- The lane ---- */

static int
carrier_send(PyObject *object, const char *address, long long now)
{
    Carrier *self = (Carrier *)object;
    return self->sends && self->resume == Py_None ? express_send_first(self->express, address, now) : 0;
}

static int
carrier_sent(PyObject *object, PyObject *operation, int sent)
{
    Carrier *self = (Carrier *)object;
    if (set_attribute(self->messenger, &field_last, operation) < 0) {
        return -1;
    }
    return sent > 1 ? express_wake(self->express) : 0;
}

static const Lane lane = {carrier_send, carrier_sent};

/* Set the attribute of the type that holds its lane; -1 with an exception. */
static int
carrier_ready(PyObject *module)
{
    if (PyModule_AddType(module, &Carrier_Type) < 0) {
        return -1;
    }
    PyObject *capsule = PyCapsule_New((void *)&lane, LANE_NAME, NULL);
    int told = capsule == NULL ? -1 : PyDict_SetItemString(Carrier_Type.tp_dict, LANE_ATTRIBUTE, capsule);
    PyType_Modified(&Carrier_Type);
    Py_XDECREF(capsule);
    return told;
}

/* ---- The module ---- */

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dist2.compiled._native.messages",
    .m_doc = "Messages inside a host: rings and the short way through them.",
    .m_size = -1,
};

PyObject *
messages_made(void)
{
    static const Name names[] = {
        {&str_data_ptr, "data_ptr"},
        {&field_last.name, "last"},
        {&str_free_slots, "_free_slots"},
    };
    if (intern(names, Py_ARRAY_LENGTH(names)) < 0 || watching_ready() < 0 || loans_ready() < 0 ||
        sending_ready() < 0 || credit_ready() < 0 || receiving_ready() < 0 || posted_ready() < 0) {
        return NULL;
    }
    PyObject *self = PyModule_Create(&module);
    if (self == NULL) {
        return NULL;
    }
    if (rings_ready(self) < 0 || express_ready(self) < 0 || carrier_ready(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
