/* Express: the counterpart of `ExpressSend` and `ExpressReceive` in transport/messages/express.py. */

#include "messages.h"

#define GLANCE_NS 1000000 /* `Fabric.glance` is called so often, which counts calls and looks around now and then */

static PyObject *str_closed, *str_reader, *str_header, *str_filled, *str_writing, *str_frames, *str_bulk, *str_broken;
static PyObject *str_waiting, *str_used, *str_owed, *str_glance, *str_account_for, *str_give_role;
PyObject *str_tx, *str_rx, *str_fault, *str_aborted, *str_waiters, *str_wake_peer;

/* ---- What an express refers to ---- */

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

/* Find all that is used at each call. */
static int
express_bind(Express *self, long rank)
{
    static const struct {
        int which, of;
        const char *path;
    } found[] = {
        {CROWD, FABRIC, "crowd"},
        {DELIVERY, FABRIC, "delivery"},
        {OUTGOING, FABRIC, "linkage.outgoing"},
        {RINGS, FABRIC, "linkage.rings"},
        {RINGED_FROM, RINGS, "links_from"},
        {ACQUIRE, FABRIC, "lock.acquire"},
        {RELEASE, FABRIC, "lock.release"},
        {TAKE_ROLE, FABRIC, "_role.acquire"},
        {GIVE_ROLE, FABRIC, "_role.release"},
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
    self->its[RANK] = PyLong_FromLong(rank);
    return self->its[RANK] == NULL ? -1 : 0;
}

static int
express_init(Express *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"fabric",   "mailbox", "rank", "fingerprint", "header", "key", "key_of_any",
                            "nbytes",   "cost",    "credit", "reported",  "spins",  "taken", NULL};
    PyObject *fabric, *mailbox, *fingerprint, *header, *key, *key_of_any, *taken;
    long rank;
    if (self->its[FABRIC] != NULL) {
        PyErr_SetString(PyExc_TypeError, "an Express is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOlOSO!O!LLLLlS:Express", names, &fabric, &mailbox, &rank,
                                     &fingerprint, &header, &PyTuple_Type, &key, &PyTuple_Type, &key_of_any,
                                     &self->nbytes, &self->cost, &self->credit, &self->reported, &self->spins, &taken)) {
        return -1;
    }
    if (PyBytes_GET_SIZE(header) != HEADER_BYTES || PyBytes_GET_SIZE(taken) != HEADER_BYTES || self->nbytes < 0) {
        PyErr_Format(PyExc_ValueError, "a header of %zd bytes for %lld", PyBytes_GET_SIZE(header), self->nbytes);
        return -1;
    }
    self->its[FABRIC] = Py_NewRef(fabric);
    self->its[MAILBOX] = Py_NewRef(mailbox);
    self->its[FINGERPRINT] = Py_NewRef(fingerprint);
    self->its[HEADER] = Py_NewRef(header);
    self->its[TAKEN] = Py_NewRef(taken);
    self->its[KEY] = Py_NewRef(key);
    self->its[KEY_OF_ANY] = Py_NewRef(key_of_any);
    return express_bind(self, rank);
}

/* ---- Out ---- */

int
is_clear(PyObject *link)
{
    PyObject *const names[] = {str_writing, str_frames, str_bulk, str_broken};
    for (size_t each = 0; each < Py_ARRAY_LENGTH(names); each++) {
        int is_true = attribute_is_true(link, names[each]);
        if (is_true) {
            return is_true < 0 ? -1 : 0;
        }
    }
    return 1;
}

/* Whether the receiver has been told what the fingerprint means. */
static int
is_told(Express *self)
{
    if (!self->is_told) {
        int told = PySet_Contains(self->its[TOLD], self->its[FINGERPRINT]);
        if (told <= 0) {
            return told;
        }
        self->is_told = 1;
    }
    return 1;
}

/* Whether a group and a member take messages as ever. */
static int
takes_messages(Express *self)
{
    if (PySet_GET_SIZE(self->its[ABORTERS])) {
        return 0;
    }
    int left = PySet_GET_SIZE(self->its[LEFT]) ? PySet_Contains(self->its[LEFT], self->its[RANK]) : 0;
    if (left) {
        return left < 0 ? -1 : 0;
    }
    return attribute_is_none(self->its[MAILBOX], str_fault);
}

/* What a message that goes now leaves used of the credit; 0 if it has to wait, -1 with an exception. */
static long long
credit_after(Express *self)
{
    int waiting = attribute_is_true(self->its[ACCOUNT], str_waiting);
    if (waiting) {
        return waiting < 0 ? -1 : 0;
    }
    long long used = attribute_number(self->its[ACCOUNT], str_used);
    if (used < 0) {
        return -1;
    }
    return used + self->cost <= self->credit ? used + self->cost : 0;
}

/* Write a frame to a ring, and what goes with it; with the fabric's lock. */
static int
push_to(Express *self, End *tx, const char *payload, Offer *offer)
{
    Lock lock = {NULL};
    const char *header = PyBytes_AS_STRING(self->its[HEADER]);
    if (offer == NULL) {
        int pushed = push_frame(tx, header, HEADER_BYTES, payload, (size_t)self->nbytes, &lock);
        take_lock(&lock);
        return pushed;
    }
    int entered = enter_offer(offer, tx, payload);
    if (entered <= 0) {
        return entered;
    }
    int pushed = push_frame(tx, header, HEADER_BYTES, (const char *)offer->loan, sizeof offer->loan, &lock);
    if (!pushed && end_offer(offer) < 0) {
        return -1;
    }
    return pushed;
}

/* Write the frame of a message, or of an offer, with the fabric's lock. */
static int
send_locked(Express *self, PyObject *link, const char *payload, Offer *offer)
{
    int may = takes_messages(self);
    if (may > 0 && offer == NULL) { /* who offers waits, and can be asked */
        may = is_told(self);
    }
    may = may > 0 ? is_clear(link) : may;
    if (may <= 0) {
        return may;
    }
    End *tx = ring_of(link, str_tx);
    if (tx == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    long long used = credit_after(self);
    if (used <= 0) {
        return used < 0 ? -1 : 0;
    }
    Py_INCREF(tx);
    int pushed = push_to(self, tx, payload, offer);
    if (pushed > 0 && set_number(self->its[ACCOUNT], str_used, used) < 0) {
        pushed = -1;
    }
    if (pushed > 0 && atomic_load_explicit(&tx->words[READER_SLEEPS], memory_order_relaxed) &&
        call_method(link, str_wake_peer) < 0) {
        pushed = -1;
    }
    Py_DECREF(tx);
    return pushed;
}

int
glance(Express *self)
{
    long long now = monotonic_ns();
    if (now - self->glanced_ns <= GLANCE_NS) {
        return 0;
    }
    self->glanced_ns = now;
    return call_method(self->its[FABRIC], str_glance);
}

int
send_frame(Express *self, const char *payload, Offer *offer)
{
    if (call(self->its[ACQUIRE]) < 0) {
        return -1;
    }
    PyObject *link = PyDict_GetItemWithError(self->its[OUTGOING], self->its[FABRIC_ID]);
    int sent = link == NULL && PyErr_Occurred() ? -1 : 0;
    if (link != NULL) {
        Py_INCREF(link);
        sent = send_locked(self, link, payload, offer);
        Py_DECREF(link);
    }
    release(self->its[RELEASE]);
    return sent;
}

int
express_send(Express *self, const char *payload)
{
    return glance(self) < 0 ? -1 : send_frame(self, payload, NULL);
}

/* ---- In ---- */

/* Whether a receive posted now would get the next message of its key. */
static int
is_free(Express *self)
{
    PyObject *const asked[][2] = {
        {self->its[ARRIVED], self->its[KEY]},
        {self->its[POSTED], self->its[KEY]},
        {self->its[POSTED], self->its[KEY_OF_ANY]},
    };
    for (size_t each = 0; each < Py_ARRAY_LENGTH(asked); each++) {
        int found = PyDict_GET_SIZE(asked[each][0]) ? PyDict_Contains(asked[each][0], asked[each][1]) : 0;
        if (found) {
            return found < 0 ? -1 : 0;
        }
    }
    return 1;
}

/* See `link_in`; with the fabric's lock. */
static int
is_next_in(Express *self, PyObject *link, int expects_message)
{
    int may = attribute_is_none(self->its[MAILBOX], str_fault);
    if (may <= 0) {
        return may;
    }
    PyObject *reader = PyObject_GetAttr(link, str_reader);
    if (reader == NULL) {
        return -1;
    }
    may = attribute_is_none(reader, str_header);
    int filled = may > 0 ? attribute_is_true(reader, str_filled) : 0;
    Py_DECREF(reader);
    if (may <= 0 || filled) {
        return may < 0 || filled < 0 ? -1 : 0;
    }
    return expects_message ? is_free(self) : 1;
}

PyObject *
link_in(Express *self, int expects_message)
{
    if (call(self->its[ACQUIRE]) < 0) {
        return NULL;
    }
    PyObject *link = PyDict_GetItemWithError(self->its[RINGED_FROM], self->its[FABRIC_ID]);
    if (link != NULL) {
        Py_INCREF(link);
        if (is_next_in(self, link, expects_message) <= 0) {
            Py_CLEAR(link);
        }
    }
    release(self->its[RELEASE]);
    return link;
}

/* Account for a frame that was pulled and free it, with the fabric's lock. */
static int
settle(Express *self, End *rx, size_t nbytes)
{
    int faultless = attribute_is_none(self->its[MAILBOX], str_fault);
    if (faultless <= 0) {
        return faultless;
    }
    long long owed = attribute_number(self->its[ACCOUNT], str_owed);
    if (owed < 0) {
        return -1;
    }
    consume(rx, HEADER_BYTES + nbytes);
    if (owed + self->cost < self->reported) {
        return set_number(self->its[ACCOUNT], str_owed, owed + self->cost) < 0 ? -1 : 1;
    }
    PyObject *cost = PyLong_FromLongLong(self->cost);
    PyObject *told = cost == NULL ? NULL
                                  : PyObject_CallMethodObjArgs(self->its[DELIVERY], str_account_for, self->its[MAILBOX],
                                                               self->its[RANK], Py_True, cost, NULL);
    Py_XDECREF(cost);
    Py_XDECREF(told);
    return told == NULL ? -1 : 1;
}

/* Read the next frame from a link, with the role of the poller. */
static int
pull_from(Express *self, PyObject *link, char *payload, size_t nbytes, long long deadline_ns)
{
    End *rx = ring_of(link, str_rx);
    if (rx == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(rx);
    int here = has_bytes(rx) ? 1 : deadline_ns ? watch_ring(self, rx, NULL, 0, deadline_ns) : 0;
    if (here > 0) {
        Lock lock = {NULL};
        here = pull_frame(rx, PyBytes_AS_STRING(self->its[HEADER]), HEADER_BYTES, payload, nbytes, &lock);
        take_lock(&lock);
    }
    if (here > 0) {
        here = call(self->its[ACQUIRE]);
        if (here == 0) {
            here = settle(self, rx, nbytes);
            release(self->its[RELEASE]);
        }
    }
    if (here > 0 && atomic_load_explicit(&rx->words[WRITER_SLEEPS], memory_order_relaxed) &&
        call_method(link, str_wake_peer) < 0) {
        here = -1;
    }
    Py_DECREF(rx);
    return here;
}

int
take_role(Express *self)
{
    int closed = attribute_is_true(self->its[FABRIC], str_closed);
    if (closed) {
        return closed < 0 ? -1 : 0;
    }
    PyObject *taken = PyObject_CallOneArg(self->its[TAKE_ROLE], Py_False);
    Py_XDECREF(taken);
    return taken == NULL ? -1 : taken == Py_True;
}

void
give_role(Express *self)
{
    PyObject *error[3];
    set_aside(error);
    int waited = attribute_is_true(self->its[FABRIC], str_waiters);
    int given = waited ? call_method(self->its[FABRIC], str_give_role) : call(self->its[GIVE_ROLE]);
    if (given < 0) {
        PyErr_WriteUnraisable((PyObject *)self);
    }
    go_on(error);
}

int
express_pull(Express *self, char *payload, size_t nbytes, long long deadline_ns, PyObject **link)
{
    int pulled = take_role(self);
    if (pulled <= 0) {
        return pulled;
    }
    *link = link_in(self, 1);
    pulled = *link != NULL ? pull_from(self, *link, payload, nbytes, deadline_ns) : PyErr_Occurred() ? -1 : 0;
    give_role(self);
    if (pulled <= 0) {
        Py_CLEAR(*link);
    }
    return pulled;
}

/* ---- The type ---- */

/* Whether the ring that the messages come through has anything: looked at without any lock, as what comes now may as
   well come later. */
static int
is_anything_in(Express *self)
{
    PyObject *link = PyDict_GetItemWithError(self->its[RINGED_FROM], self->its[FABRIC_ID]);
    if (link == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(link);
    End *rx = ring_of(link, str_rx);
    int here = rx != NULL ? has_bytes(rx) : PyErr_Occurred() ? -1 : 0;
    Py_DECREF(link);
    return here;
}

int
express_take(Express *self, char *payload)
{
    PyObject *link = NULL;
    int here = is_anything_in(self);
    int taken = here > 0 ? express_pull(self, payload, (size_t)self->nbytes, 0, &link) : here;
    Py_XDECREF(link);
    return taken;
}

int
express_wait(Express *self, char *payload, long long deadline_ns)
{
    PyObject *link = NULL;
    int taken = express_pull(self, payload, (size_t)self->nbytes, deadline_ns, &link);
    Py_XDECREF(link);
    return taken;
}

static PyObject *
method_send(Express *self, PyObject *args)
{
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K:send", &address)) {
        return NULL;
    }
    int sent = express_send(self, (const char *)(uintptr_t)address);
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

static PyMethodDef express_methods[] = {
    {"send", (PyCFunction)method_send, METH_VARARGS, "Send what lies at an address."},
    {"take", (PyCFunction)method_take, METH_VARARGS, "Receive to an address if the message is here."},
    {"wait", (PyCFunction)method_wait, METH_VARARGS, "Receive to an address."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef express_members[] = {
    {"partings", T_ULONGLONG, offsetof(Express, together.partings), READONLY, "Naps to get to a core of its own."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject Express_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dist2.compiled._messages.Express",
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
    static const Name names[] = {
        {&str_closed, "_closed"},   {&str_reader, "reader"},       {&str_header, "_header"},
        {&str_filled, "_filled"},   {&str_writing, "_writing"},    {&str_frames, "_frames"},
        {&str_bulk, "_bulk"},       {&str_broken, "_broken"},      {&str_waiting, "waiting"},
        {&str_used, "used"},        {&str_owed, "owed"},           {&str_glance, "glance"},
        {&str_tx, "tx"},            {&str_rx, "rx"},               {&str_fault, "fault"},
        {&str_aborted, "aborted"},  {&str_waiters, "_waiters"},    {&str_wake_peer, "wake_peer"},
        {&str_give_role, "give_role"}, {&str_account_for, "account_for"},
    };
    if (intern(names, Py_ARRAY_LENGTH(names)) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &Express_Type);
}
