/* Declarations that the files of dist2.compiled._native.messages share. */

#ifndef DIST2_MESSAGES_H
#define DIST2_MESSAGES_H

#include "exceptions.h"
#include "lanes.h"
#include "names.h"
#include "calls.h"
#include "waiting.h"

#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "needs the interpreter lock: without it the counterparts in Python run, which take locks"
#endif

#define HEADER_BYTES 56 /* of a frame: `wire.py` */
#define TRANSFER_AT 40  /* in it: the number of its message */
#define TOTAL_AT 48     /* the length of the message, or the number of received bytes */
#define LONG_BYTES (32 << 10) /* moved without the interpreter lock */

/* The words of a ring's first page: rings.c. Those that different sides write lie a cache line apart. */
enum {
    HEAD = 0, BASE = 1, TAIL = 8, READER_SLEEPS = 16, WRITER_SLEEPS = 24, SLOTS_AT = 32, PAGE_WORDS = 512
};

/* One end of a ring: rings.c. `count` is the number of bytes that this end has written or read, `base` the number of
   the byte at the ring's beginning. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Word *words;
    char *bytes;
    uint64_t capacity;
    uint64_t count, base;
    char writes; /* which end it is */
    int pidfd; /* readable once the process of the other side has ended; -1: it is this process */
} End;

extern PyTypeObject End_Type;

/* Whether there are unread bytes. */
static inline int
has_bytes(End *end)
{
    return atomic_load_explicit(&end->words[HEAD], memory_order_acquire) != end->count;
}

/* Whether so many bytes are unread. */
static inline int
has_all(End *end, uint64_t nbytes)
{
    return atomic_load_explicit(&end->words[HEAD], memory_order_acquire) - end->count >= nbytes;
}

/* Write a header and the payload at an address: 1, or 0 if there is no room for both, or the reader's counter is
   invalid. A long payload is published piece by piece, for a reader that copies meanwhile. */
int push_frame(End *end, const char *header, size_t header_bytes, const char *payload, size_t nbytes, Lock *lock);

/* Copy the payload behind a header to an address: 1, or 0 if another header is next, or the payload does not come.
   The frame stays in the ring until `consume`. Without `lock` the interpreter lock is kept, and the whole frame must
   have come. */
int pull_frame(End *end, const char *header, size_t header_bytes, char *payload, size_t nbytes, Lock *lock);

/* Copy the next header, if it has come completely and its first `alike` bytes are those of `header`; return whether
   this holds. It stays in the ring until `consume`. */
int pull_like(End *end, const char *header, size_t alike, char *found, size_t header_bytes);

/* Wait until the frame with this header has come completely: 1, or 0 if another one is next, or it does not come. */
int await_frame(End *end, const char *header, size_t header_bytes, size_t nbytes, Lock *lock);

/* Free the bytes of frames that were pulled. */
void consume(End *end, uint64_t nbytes);

/* Indices of the objects that an `Express` refers to. */
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
    REFERENCES
};

/* State that shows whether a waiting process shares its core with the process that it waits for: watching.c. */
typedef struct {
    int turns; /* waits in a row that ended right after another thread had the core */
    int unused; /* yields in a row without another thread, counted up to a limit */
    long long until_ns, pause_ns; /* no sleep before this time, and the pause after it */
    unsigned long long partings;
} Together;

/* The short path of messages of one kind, out or in: express.c, sending.c, receiving.c. */
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

/* Access to Python objects: fields.c. Functions that return a number return -1 with an exception. */
int attribute_is_true(PyObject *object, Field *field);
int attribute_is_none(PyObject *object, Field *field);
long long attribute_number(PyObject *object, Field *field);
int set_attribute(PyObject *object, Field *field, PyObject *value);
int set_number(PyObject *object, Field *field, long long number);
int call(PyObject *callable);
int call_method(PyObject *object, PyObject *name);

/* Whether a lock is held, by its method `locked`. If it is not, a thread that keeps the interpreter lock and calls
   no Python code need not take it. */
int is_held(PyObject *locked);

/* Release a lock. An exception that is already set stays set. */
void release(PyObject *callable);

/* Return the end of a link's ring, borrowed from the link; NULL if it has none, with an exception or without. */
End *ring_of(PyObject *link, Field *field);

/* Enter a section that the fabric's lock guards. 1: the lock was taken; -1: an exception; 0: no thread holds the
   lock and it was not taken, and the caller is safe until it releases the interpreter lock or calls Python code.
   `for_long`: the caller will do one of these, and needs the lock. */
int enter(Express *self, int for_long);
void leave(Express *self, int entered);

/* Look into a ring, and yield: 1 once it has bytes, 0 if the caller has other work to do first, -1 with an
   exception. */
int watch_ring(Express *self, End *rx, long long deadline_ns);

/* Where the payload of the next frame goes. */
typedef struct {
    char *payload;
    size_t nbytes;
    PyObject *posted; /* the receive of the payload, if that is posted already; else NULL */
    int is_offer;     /* the message is still to be read: the mailbox drops the receive without completing it */
} Wanted;

/* Read the next frame if it has this express's header. Wait for it until a deadline, or not at all if that is 0. 1,
   0, or -1 with an exception. `link` is set to the link that delivered it. */
int express_pull(Express *self, const Wanted *wanted, long long deadline_ns, PyObject **link);

/* Read the next frame of a ring, if it is the expected one: 1, 0, or -1 with an exception. `alone`: no other thread
   has had the interpreter lock since the fabric's lock was free. */
int pull_next(Express *self, PyObject *link, End *rx, const Wanted *wanted, int alone);

/* Deliver messages that have arrived to receives that were posted before, and wake their waiters. 0, or -1 with an
   exception. A following receive with a message that has arrived then need not be posted behind them. */
int serve_posted(Express *self);

/* A long message that is offered: messages.c. */
typedef struct {
    PyObject *numbers; /* returns the next number of a message */
    PyObject *adopt;   /* leaves an offered message to the long path */
    PyObject *cancel;  /* cancels a message of the long path */
    PyObject *tensor;
    PyObject *adopted;
    End *tx;          /* the ring end of the offer; NULL without an offer, or after its end */
    uint64_t loan[3]; /* number, address, slot */
} Offer;

/* Enter a loan in a slot of a ring: 1, 0 if there is none, or -1 with an exception. */
int enter_offer(Offer *offer, End *tx, const char *address);

/* Free the slot of a loan. */
int end_offer(Offer *offer);

/* Leave a message that was offered and not read to the long path; return 0, or -1 with an exception. */
int hand_over(Offer *offer, int outcome);

/* Cancel such a message; the exception that is set stays set. Return -1. */
int take_back(Offer *offer);

/* A long message that is read from the sender's memory. */
typedef struct {
    uint64_t loan[3];
    PyObject *link; /* the link of the offer, if work on the message remains */
    int was_read;
} Fetch;

/* Whether a frame that is written to a link now would be the next to go out: 1, 0, or -1 with an exception. */
int is_clear(PyObject *link);

/* Wake the other side of a ring if a word of the ring says that it sleeps; 0, or -1 with an exception. */
int wake_other(PyObject *link, End *end, int sleeps);

/* Answer the sender of messages: a header (its index in `its`), with a number at an offset. With the fabric's lock:
   1, 0 if the long path has to do it, or -1 with an exception. */
int answer(Express *self, int what, size_t at, uint64_t number);

/* Let the fabric do its periodic checks, which operations that never wait have to call; `now` is the start of the
   call. */
int glance(Express *self, long long now);

/* Send the frame of a message, or of an offer: 1, 0 with nothing done, or -1 with an exception. */
int send_frame(Express *self, const char *payload, Offer *offer);

/* Return the link of this express's messages, if the next bytes in it begin a frame, and, where a receive is given,
   if that receive would get the next message. Else NULL, with or without an exception. */
PyObject *link_in(Express *self, const Wanted *wanted);

/* Take the role of the poller: 1, 0, or -1 with an exception. */
int take_role(Express *self);

/* Give the role of the poller back; return the outcome of the turn, or -1 if an exception is raised now. */
int give_role(Express *self, int outcome);

/* Offer a message, and wait a moment until the receiver reads it; or wait for an offer, and read the message. 1; -1 with an exception; 0 if nothing was done, or if the long path has to continue with `adopted` or
   `link`. */
int express_offer(Express *self, const char *address, long long deadline_ns, Offer *offer);
int express_fetch(Express *self, char *address, long long deadline_ns, Fetch *fetch);

/* Read a message from the sender's memory, and report it: 1, 0 if that is not possible, or -1 with an exception. */
int fetch_from(Express *self, PyObject *link, char *address, Fetch *fetch);

/* Read the receiver's report of received bytes, if that is the next frame: 1, 0, or -1 with an exception. The reader
   of the ring calls this, without the fabric's lock. */
int take_received(Express *self, End *rx);

/* Send a message (`now` as for `glance`), take one that has come, or wait for one: 1, 0 with nothing done, or -1
   with an exception. */
int express_send(Express *self, const char *payload, long long now);

/* Send a message if no condition prevents it: as `Lane.send`. Wake the receiver. */
int express_send_first(Express *self, const char *payload, long long now);
int express_wake(Express *self);

int express_take(Express *self, char *payload);
int express_wait(Express *self, char *payload, long long deadline_ns);

/* Complete a receive after its message was read, with the fabric's lock: if this thread is interrupted, the next
   poller reports it. 1, or -1 with an exception. */
int end_posted(Express *self, PyObject *posted);

/* Read long messages from their senders' memory for posted receives, until one receive is done. `adopt` leaves a
   message that cannot be read so to the poller. 0, or -1 with an exception. */
int express_fetch_posted(Express *self, PyObject *receiving, PyObject *adopt, long long deadline_ns);

/* Wait for the message of a posted receive, and complete it: 1, 0 with nothing done, or -1 with an exception. */
int express_wait_posted(Express *self, PyObject *receiving, char *payload, long long deadline_ns);

/* Create the names of a file, or add its types to the module; -1 with an exception. */
int watching_ready(void);
int loans_ready(void);
int sending_ready(void);
int credit_ready(void);
int receiving_ready(void);
int posted_ready(void);
int rings_ready(PyObject *module);
int express_ready(PyObject *module);

#endif
