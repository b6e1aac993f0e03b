/* `Express`: direct sends and receives: see transport/messages/express.py. sending.c and
   receiving.c implement the two directions. */

#include "messages.h"

/* ---- The objects that an express refers to ---- */

static int
express_traverse(Express *self, visitproc visit, void *arg)
{
    for (int each = 0; each < REFERENCES; each++) {
        Py_VISIT(self->its[each]);
    }
    return 0;
}

static int
express_clear(Express *self)
{
    for (int each = 0; each < REFERENCES; each++) {
        Py_CLEAR(self->its[each]);
    }
    return 0;
}

static void
express_dealloc(Express *self)
{
    PyObject_GC_UnTrack(self);
    express_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Follow attributes, as "lock.acquire" from a fabric. */
static PyObject *
follow(PyObject *object, const char *path)
{
    char name[32];
    Py_INCREF(object);
    while (object != NULL && *path) {
        size_t length = 0;
        while (path[length] && path[length] != '.') {
            name[length] = path[length];
            length++;
        }
        name[length] = 0;
        path += length + (path[length] == '.');
        Py_SETREF(object, PyObject_GetAttrString(object, name));
    }
    return object;
}

/* Bind the objects that each call uses. */
static int
express_bind(Express *self, long rank)
{
    static const struct {
        int which, of;
        const char *path;
    } found[] = {
        {POLLER, FABRIC, "poller"},
        {CROWD, POLLER, "crowd"},
        {DELIVERY, FABRIC, "delivery"},
        {OUTCOMES, FABRIC, "outcomes"},
        {OUTGOING, FABRIC, "linkage.outgoing"},
        {RINGS, FABRIC, "linkage.rings"},
        {RINGED_FROM, RINGS, "links_from"},
        {LOCKED, FABRIC, "lock.locked"},
        {ACQUIRE, FABRIC, "lock.acquire"},
        {RELEASE, FABRIC, "lock.release"},
        {ROLE_TAKEN, POLLER, "role.locked"},
        {TAKE_ROLE, POLLER, "role.acquire"},
        {GIVE_ROLE, POLLER, "role.release"},
        {POSTED, MAILBOX, "_posted"},
        {ARRIVED, MAILBOX, "_arrived"},
        {ABORTERS, MAILBOX, "aborters"},
        {LEFT, MAILBOX, "left"},
        {TOLD, MAILBOX, "calls.told"},
        {FABRIC_ID, MAILBOX, "fabric_ids"},
        {ACCOUNT, MAILBOX, "accounts"},
    };
    for (size_t each = 0; each < Py_ARRAY_LENGTH(found); each++) {
        self->its[found[each].which] = follow(self->its[found[each].of], found[each].path);
        if (self->its[found[each].which] == NULL) {
            return -1;
        }
    }
    Py_SETREF(self->its[ACCOUNT], PySequence_GetItem(self->its[ACCOUNT], 1)); /* those of tagged messages */
    static const int of_rank[] = {FABRIC_ID, TOLD, ACCOUNT};
    for (size_t each = 0; each < Py_ARRAY_LENGTH(of_rank); each++) {
        PyObject *all = self->its[of_rank[each]];
        if (all == NULL) {
            return -1;
        }
        self->its[of_rank[each]] = PySequence_GetItem(all, rank);
        Py_DECREF(all);
        if (self->its[of_rank[each]] == NULL) {
            return -1;
        }
    }
    self->rank = rank;
    self->its[RANK] = PyLong_FromLong(rank);
    return self->its[RANK] == NULL ? -1 : 0;
}

static int
express_init(Express *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"fabric", "mailbox", "rank",     "fingerprint", "header", "key",      "key_of_any",
                            "nbytes", "cost",    "credit",   "reported",    "spins",  "lone_spins",
                            "taken",  "received", NULL};
    PyObject *fabric, *mailbox, *fingerprint, *header, *key, *key_of_any, *taken, *received;
    long rank;
    if (self->its[FABRIC] != NULL) {
        PyErr_SetString(PyExc_TypeError, "an Express is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOlOSO!O!LLLLllSS:Express", names, &fabric, &mailbox, &rank,
                                     &fingerprint, &header, &PyTuple_Type, &key, &PyTuple_Type, &key_of_any,
                                     &self->nbytes, &self->cost, &self->credit, &self->reported, &self->spins,
                                     &self->lone_spins, &taken, &received)) {
        return -1;
    }
    if (PyBytes_GET_SIZE(header) != HEADER_BYTES || PyBytes_GET_SIZE(taken) != HEADER_BYTES ||
        PyBytes_GET_SIZE(received) != HEADER_BYTES || self->nbytes < 0) {
        PyErr_Format(PyExc_ValueError, "a header of %zd bytes for %lld", PyBytes_GET_SIZE(header), self->nbytes);
        return -1;
    }
    self->its[FABRIC] = Py_NewRef(fabric);
    self->its[MAILBOX] = Py_NewRef(mailbox);
    self->its[FINGERPRINT] = Py_NewRef(fingerprint);
    self->its[HEADER] = Py_NewRef(header);
    self->its[TAKEN] = Py_NewRef(taken);
    self->its[RECEIVED] = Py_NewRef(received);
    self->its[KEY] = Py_NewRef(key);
    self->its[KEY_OF_ANY] = Py_NewRef(key_of_any);
    return express_bind(self, rank);
}

/* ---- The fabric's lock ---- */

int
enter(Express *self, int for_long)
{
    int locks = for_long ? 1 : is_held(self->its[LOCKED]);
    return locks > 0 && call(self->its[ACQUIRE]) < 0 ? -1 : locks;
}

void
leave(Express *self, int entered)
{
    if (entered > 0) {
        release(self->its[RELEASE]);
    }
}

/* ---- The type ---- */

static PyObject *
method_send(Express *self, PyObject *args)
{
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K:send", &address)) {
        return NULL;
    }
    int sent = express_send(self, (const char *)(uintptr_t)address, monotonic_ns());
    return sent < 0 ? NULL : PyBool_FromLong(sent);
}

static PyObject *
method_take(Express *self, PyObject *args)
{
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K:take", &address)) {
        return NULL;
    }
    int taken = express_take(self, (char *)(uintptr_t)address);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static PyObject *
method_wait(Express *self, PyObject *args)
{
    unsigned long long address;
    long long deadline_ns;
    if (!PyArg_ParseTuple(args, "KL:wait", &address, &deadline_ns)) {
        return NULL;
    }
    int taken = express_wait(self, (char *)(uintptr_t)address, deadline_ns);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static PyObject *
method_wait_posted(Express *self, PyObject *args)
{
    PyObject *receiving;
    unsigned long long address;
    long long deadline_ns;
    if (!PyArg_ParseTuple(args, "OKL:wait_posted", &receiving, &address, &deadline_ns)) {
        return NULL;
    }
    int taken = express_wait_posted(self, receiving, (char *)(uintptr_t)address, deadline_ns);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static PyObject *
method_fetch_posted(Express *self, PyObject *args)
{
    PyObject *receiving, *adopt;
    long long deadline_ns;
    if (!PyArg_ParseTuple(args, "OOL:fetch_posted", &receiving, &adopt, &deadline_ns)) {
        return NULL;
    }
    return express_fetch_posted(self, receiving, adopt, deadline_ns) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef express_methods[] = {
    {"send", (PyCFunction)method_send, METH_VARARGS, "Send what lies at an address."},
    {"take", (PyCFunction)method_take, METH_VARARGS, "Receive to an address if the message is here."},
    {"wait", (PyCFunction)method_wait, METH_VARARGS, "Receive to an address."},
    {"wait_posted", (PyCFunction)method_wait_posted, METH_VARARGS, "Do so for a receive that is posted, and end it."},
    {"fetch_posted", (PyCFunction)method_fetch_posted, METH_VARARGS, "Wait for the long message of a posted receive."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef express_members[] = {
    {"unused_yields", T_INT, offsetof(Express, together.unused), READONLY, "Yields in a row that nobody else used."},
    {"partings", T_ULONGLONG, offsetof(Express, together.partings), READONLY, "Naps to get to a core of its own."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject Express_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._native.messages.Express",
    .tp_doc = "The short way of the messages of a lot.",
    .tp_basicsize = sizeof(Express),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)express_init,
    .tp_dealloc = (destructor)express_dealloc,
    .tp_traverse = (traverseproc)express_traverse,
    .tp_clear = (inquiry)express_clear,
    .tp_methods = express_methods,
    .tp_members = express_members,
};

int
express_ready(PyObject *module)
{
    return PyModule_AddType(module, &Express_Type);
}
