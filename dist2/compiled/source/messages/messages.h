/* What the files of dist2.compiled._messages share. */

#ifndef DIST2_MESSAGES_H
#define DIST2_MESSAGES_H

#include "exceptions.h"
#include "lanes.h"
#include "names.h"
#include "places.h"
#include "waiting.h"

#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "needs the interpreter lock: without it the counterparts in Python run, which take locks"
#endif

#define HEADER_BYTES 56 /* of a frame: `wire.py` */
#define TRANSFER_AT 40  /* in it: the number of the message that it is about */
#define TOTAL_AT 48     /* the length of the message, or what was received */
#define LONG_BYTES (32 << 10) /* moved without the interpreter lock */

/* The words of a ring's first page, as `ring.py` has them. */
enum {
    HEAD = 0, BASE = 1, TAIL = 8, READER_SLEEPS = 16, WRITER_SLEEPS = 24, SLOTS_AT = 32, PAGE_WORDS = 512
};

/* One end of a ring: rings.c. `count` is how many bytes this end has written or read, `base` the number of the byte at
   the ring's beginning. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Word *words;
    char *bytes;
    uint64_t capacity;
    unsigned long long count, base;
    int pidfd; /* readable once the process of the other side has ended; -1: that is this one */
} End;

extern PyTypeObject End_Type;

/* Whether there are unread bytes. */
static inline int
has_bytes(End *end)
{
    return atomic_load_explicit(&end->words[HEAD], memory_order_acquire) != end->count;
}

/* Whether there are so many unread bytes. */
static inline int
has_all(End *end, uint64_t nbytes)
{
    return atomic_load_explicit(&end->words[HEAD], memory_order_acquire) - end->count >= nbytes;
}

/* Write a header and the payload at an address: 1, or 0 if there is no room for both, or the reader's counter cannot be
   right. A long payload is published piece by piece, for a reader that copies meanwhile. */
int push_frame(End *end, const char *header, size_t header_bytes, const char *payload, size_t nbytes, Lock *lock);

/* Copy the payload behind a header to an address: 1, or 0 if another header is next, or the payload does not come. The
   frame stays in the ring until `consume`. Without a lock the interpreter lock is kept: all of it must be here. */
int pull_frame(End *end, const char *header, size_t header_bytes, char *payload, size_t nbytes, Lock *lock);

/* Copy the next header, if it is here whole and its first `alike` bytes are those of `header`; return whether that is
   so. It stays in the ring until `consume`. */
int pull_like(End *end, const char *header, size_t alike, char *found, size_t header_bytes);

/* Wait until the frame with this header is here whole: 1, or 0 if another one is next, or it does not come. */
int await_frame(End *end, const char *header, size_t header_bytes, size_t nbytes, Lock *lock);

/* Free what was pulled. */
void consume(End *end, uint64_t nbytes);

/* What an `Express` refers to. */
enum {
    FABRIC,
    POLLER,
    MAILBOX,
    FABRIC_ID,
    RANK,
    FINGERPRINT,
    ACCOUNT,
    CROWD,
    DELIVERY,
    OUTGOING,
    RINGS,
    OUTCOMES,
    RINGED_FROM,
    POSTED,
    ARRIVED,
    ABORTERS,
    LEFT,
    TOLD,
    LOCKED,
    ACQUIRE,
    RELEASE,
    ROLE_TAKEN,
    TAKE_ROLE,
    GIVE_ROLE,
    HEADER,
    TAKEN,
    RECEIVED,
    KEY,
    KEY_OF_ANY,
    WHOLE, /* the `Express` of the same messages where they are not lent, though long; or NULL */
    REFERENCES
};

/* Whether who waits shares its core with whom it waits for: watching.c. */
typedef struct {
    int turns; /* waits in a row that ended as soon as somebody else had had the core */
    int unused; /* yields in a row that nobody else used, as far as it matters */
    long long until_ns, pause_ns; /* not to part before this, and then for so long */
    unsigned long long partings;
} Together;

/* The short way of the messages of a lot, out or in: express.c, sending.c, receiving.c. */
typedef struct {
    PyObject_HEAD
    PyObject *its[REFERENCES];
    long long nbytes, cost, credit, reported;
    long long glanced_ns;
    long rank, spins, lone_spins;
    char is_told;
    Together together;
} Express;

extern PyTypeObject Express_Type;

extern Field field_tx, field_rx, field_fault, field_aborted, field_waiters;

/* Objects in Python: fields.c. What returns a number returns -1 with an exception. */
int attribute_is_true(PyObject *object, Field *field);
int attribute_is_none(PyObject *object, Field *field);
long long attribute_number(PyObject *object, Field *field);
const Places *attribute_places(PyObject *object, Field *field);
int set_attribute(PyObject *object, Field *field, PyObject *value);
int set_number(PyObject *object, Field *field, long long number);
int call(PyObject *callable);
int call_method(PyObject *object, PyObject *name);

/* Whether a lock is held, by its method `locked`. If it is not, a thread that keeps the interpreter lock and calls
   nothing in Python need not take it. */
int is_held(PyObject *locked);

/* Release a lock, whatever exception is on its way: that one goes on. */
void release(PyObject *callable);

/* Return the end of a link's ring, borrowed from the link; NULL if it has none, with an exception or without. */
End *ring_of(PyObject *link, Field *field);

/* Enter what the fabric's lock guards: 1 with the lock; -1 with an exception; 0 without the lock, which nobody has: the
   caller may go on until it gives up the interpreter lock or calls anything in Python. `for_long`: it will do so, and
   needs the lock. */
int enter(Express *self, int for_long);
void leave(Express *self, int entered);

/* Look into a ring, and yield: 1 once something is there, 0 if it is time for something else, -1 with an exception. */
int watch_ring(Express *self, End *rx, long long deadline_ns);

/* A long message that came whole, in place of the offer of it. */
typedef struct {
    char *address; /* where to */
    int came;
} Whole;

/* Where the payload of the next frame goes. */
typedef struct {
    char *payload;
    size_t nbytes;
    PyObject *posted; /* the receive that it is for, if that is posted already; else NULL */
    int is_offer;     /* the message is yet to be read: the mailbox forgets the receive, which does not end */
    Whole *whole;     /* taken in place of an offer, where that may be; else NULL */
} Wanted;

/* Read the next frame if it has this express's header, and wait for it until a deadline, or not at all if that is 0:
   1, 0, or -1 with an exception. `link` is what it came over. */
int express_pull(Express *self, const Wanted *wanted, long long deadline_ns, PyObject **link);

/* Read the frame that is next in a ring, if it is the one that is expected: 1, 0, or -1 with an exception. `alone`:
   nobody has had the interpreter lock since the fabric's lock was free. */
int pull_next(Express *self, PyObject *link, End *rx, const Wanted *wanted, int alone);

/* Give the messages that are here to receives that were posted before, and tell those who wait for them: 0, or -1 with
   an exception. So a receive whose message is here as well need not be posted behind them. */
int serve_posted(Express *self);

/* A long message that is offered: messages.c. */
typedef struct {
    PyObject *numbers; /* returns the next number of a message */
    PyObject *adopt;   /* has an offered message go the long way */
    PyObject *cancel;  /* takes one back that does */
    PyObject *tensor;
    PyObject *adopted;
    End *tx;          /* what it was offered through; NULL where it was not, or has ended */
    uint64_t loan[3]; /* number, address, slot */
} Offer;

/* Enter a loan in a slot of a ring: 1, 0 if there is none, or -1 with an exception. */
int enter_offer(Offer *offer, End *tx, const char *address);

/* Free the slot of a loan. */
int end_offer(Offer *offer);

/* Have a message that was offered and not taken go the long way; return 0, or -1 with an exception. */
int hand_over(Offer *offer, int outcome);

/* Take such a message back: an exception is on its way, which is kept. Return -1. */
int take_back(Offer *offer);

/* A long message that is read where it lies. */
typedef struct {
    uint64_t loan[3];
    PyObject *link; /* what it was offered through, where something is left to do */
    int was_read;
} Fetch;

/* Whether a frame that is written to a link now would be the next to go out: 1, 0, or -1 with an exception. */
int is_clear(PyObject *link);

/* Wake the other side of a ring if it sleeps there, which a word of the ring tells; 0, or -1 with an exception. */
int wake_other(PyObject *link, End *end, int sleeps);

/* Answer the other side about messages that come: a header (which of `its`), with a number at a place of it. With
   the fabric's lock: 1, 0 if that takes more, or -1 with an exception. */
int answer(Express *self, int what, size_t at, uint64_t number);

/* Have the fabric look around, as operations that never wait have to now and then; `now` is when the call began. */
int glance(Express *self, long long now);

/* Send the frame of a message, or of an offer: 1, 0 with nothing done, or -1 with an exception. */
int send_frame(Express *self, const char *payload, Offer *offer);

/* Return the link that messages come over, if what is next is the beginning of a frame; and if the next message would
   go to whom it is wanted for, where one is. NULL if not, with an exception or without. */
PyObject *link_in(Express *self, const Wanted *wanted);

/* Become the one who polls: 1, 0, or -1 with an exception. */
int take_role(Express *self);

/* Let somebody else poll; return the outcome of the turn, or -1 if an exception comes now. */
int give_role(Express *self, int outcome);

/* Offer a message, and wait a moment until it is taken; or wait for an offer, or for the message itself, and take it.
   1; -1 with an exception; 0 if nothing was done, or the long way is to go on with what was `adopted`, or with the
   `link`. */
int express_offer(Express *self, const char *address, long long deadline_ns, Offer *offer);
int express_fetch(Express *self, char *address, long long deadline_ns, Fetch *fetch);

/* Read a message where it lies, and say so: 1, 0 if that could not be, or -1 with an exception. */
int fetch_from(Express *self, PyObject *link, char *address, Fetch *fetch);

/* Take in what the receiver says that it has received, if that is next: 1, 0, or -1 with an exception. Whoever reads
   the ring calls this, without the fabric's lock. */
int take_received(Express *self, End *rx);

/* Send a message (`now` is as for `glance`), take one that is here, wait for one: 1, 0 with nothing done, or -1 with an
   exception. */
int express_send(Express *self, const char *payload, long long now);

/* Send a long message whole, or take one that came so: as above; 0 where those of the lot are all lent. */
int express_send_whole(Express *self, const char *payload, long long now);
int express_take_whole(Express *self, char *payload);

/* Send a message that nothing at all stands in the way of: as `Lane.send`. Wake the receiver. */
int express_send_first(Express *self, const char *payload, long long now);
int express_wake(Express *self);

int express_take(Express *self, char *payload);
int express_wait(Express *self, char *payload, long long deadline_ns);

/* End a receive whose message was read, with the fabric's lock: if this thread is interrupted, the next thread that
   polls tells of it. 1, or -1 with an exception. */
int end_posted(Express *self, PyObject *posted);

/* Read long messages of the lot where they lie for the receives that are posted, until one receive is done; a message
   that cannot be read so is left to the poller, by `adopt`. 0, or -1 with an exception. */
int express_fetch_posted(Express *self, PyObject *receiving, PyObject *adopt, long long deadline_ns);

/* Wait for the message of a receive that is posted, and end that: 1, 0 with nothing done, or -1 with an exception. */
int express_wait_posted(Express *self, PyObject *receiving, char *payload, long long deadline_ns);

/* Make names, or add the types of a file to the module; -1 with an exception. */
int watching_ready(void);
int loans_ready(void);
int sending_ready(void);
int credit_ready(void);
int receiving_ready(void);
int posted_ready(void);
int rings_ready(PyObject *module);
int express_ready(PyObject *module);

#endif
