# cython: language_level=3, binding=False, boundscheck=False, wraparound=False, embedsignature=False
# distutils: sources = dist2/core/far.c dist2/core/memory.c dist2/core/ring.c dist2/core/ring_waiter.c
# distutils: include_dirs = dist2/core
"""`Express`: direct messages inside a host. `Carrier`: the sends or the receives of one signature by it.

All messages between two processes go through the same ring. A direct send has the effect of the queued path
(`Intake`, `Mailbox`) for a message that can be sent at once, but keeps no record of it. A send with credit
and room writes its frame. A receive whose message could match no other receive looks for exactly that frame,
and copies the payload out of the ring. In every other case they refuse, and the queued path takes the call: a
refused receive may have written a part of the payload to its tensor, which the queued path writes again. So order, credit, mismatches and failures are decided in one place.

The header of a frame is the same for every call of a lot: it is made once, and compared as bytes. Messages that
do not fit into a ring at once are announced, by the queued path.

The fabric's lock guards links, credit and mailboxes; the poller's role makes this thread the only reader of the
rings. Functions that need the lock say so; a signal handler may raise wherever Python code runs.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memcpy, memset

from dist2.backends.socket.transport.links.link cimport Link
from dist2.backends.socket.transport.links.ring cimport (
    MOST_READERS, READER_SLEEPS, WRITER_SLEEPS, End, RingReader, RingWait, RingWriter, Together, clock_ns,
    read_word, ring_consume, ring_has, ring_look, ring_pull, ring_pull_like, ring_push, ring_yield,
)
from dist2.backends.socket.transport.messages.credit cimport Account
from dist2.operation.plan_cache cimport Lane
from dist2.operation.record cimport Operation
from dist2.runtime.lock cimport Lock

from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE
from dist2.backends.socket.transport.messages.credit import REPORTED_BYTES
from dist2.backends.socket.wire import TAGGED, Header, Kind

cdef enum:
    HEADER_BYTES = 56   # of a frame: wire.py
    TOTAL_AT = 48       # in it: the length of the message, or the number of received bytes
    LONG_BYTES = 32 << 10  # moved without the interpreter lock
    YIELD_NS = 1000000  # how long a waiter yields before it sleeps
    GLANCE_NS = 1000000  # between two calls of `Poller.glance`, which does periodic checks

assert (HEADER_BYTES, TOTAL_AT) == (len(Header(Kind.CREDIT).encode()), HEADER_BYTES - 8)
cdef long long REPORTED = REPORTED_BYTES


cdef int wake(Link link, End end, int sleeper) except -1:
    """Wake the other side of a ring if it sleeps."""
    if read_word(&end.ring.words[sleeper]):
        link.wake_peer()
    return 0


cdef class Express:
    """The direct messages of a lot, out and in.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        lot: The messages.
        spins: How often to look before yielding the core,
        lone_spins: and if that is 0, while no other process needs the core.
    """

    cdef object poller, crowd, mailbox, delivery, rings, fingerprint, fabric_id, number
    cdef Lock lock, role
    cdef dict outgoing, links_from, posted, arrived
    cdef set told, aborters, left
    cdef tuple key, key_of_any
    cdef bytes header, received
    cdef Account account
    cdef long long nbytes, cost, credit, glanced_ns
    cdef long rank, spins, lone_spins
    cdef bint is_told, reported
    cdef Together together

    def __init__(self, fabric, mailbox, lot, long spins, long lone_spins):
        self.poller, self.crowd, self.rings = fabric.poller, fabric.poller.crowd, fabric.linkage.rings
        self.mailbox, self.delivery = mailbox, fabric.delivery
        self.outgoing, self.links_from = fabric.linkage.outgoing, fabric.linkage.rings.links_from
        self.posted, self.arrived = mailbox._posted, mailbox._arrived
        self.aborters, self.left = mailbox.aborters, mailbox.left
        self.lock, self.role = fabric.lock, fabric.poller.role
        self.rank, self.fingerprint, self.nbytes = lot.peer, lot.fingerprint, lot.nbytes
        self.cost, self.credit, self.spins, self.lone_spins = lot.cost, lot.credit, spins, lone_spins
        self.number, self.fabric_id = lot.peer, mailbox.fabric_ids[lot.peer]
        self.account, self.told = mailbox.accounts[True][lot.peer], mailbox.calls.told[lot.peer]
        self.key, self.key_of_any = (True, lot.peer, 0, lot.tag), (True, ANY_SOURCE, 0, lot.tag)
        self.header = lot.header(mailbox.context)
        self.received = Header(Kind.CREDIT, TAGGED, mailbox.context).encode()

    @property
    def unused_yields(self):
        """Consecutive yields, up to a limit, in which no other thread ran."""
        return self.together.unused

    @property
    def partings(self):
        """How often it slept to get a core other than the awaited process's."""
        return self.together.partings

    # Sending

    def send(self, size_t address):
        """Send memory by its address; False, with nothing done, if it must be queued or announced."""
        return self.send_from(<const char *>address, clock_ns())

    cdef bint send_from(self, const char *payload, long long now) except -1:
        """Send a message; ``now`` is the start of the call."""
        cdef Link link
        self.glance(now)
        self.lock.enter()
        try:
            link = self.outgoing.get(self.fabric_id)
            tx = self.way_out(link)
            if tx is None or not self.push(tx, payload):
                return False
        finally:
            self.lock.give()
        wake(link, tx, READER_SLEEPS)
        return True

    cdef int send_first(self, const char *payload, long long now) except -1:
        """Send a short message without Python code: as `Lane.send`."""
        if self.nbytes >= LONG_BYTES or now - self.glanced_ns > GLANCE_NS or not self.lock.take():
            return 0
        try:
            tx = self.way_out(self.outgoing.get(self.fabric_id))
            if tx is None or not self.push(tx, payload):
                return 0
        finally:
            self.lock.give()
        return 2 if read_word(&tx.ring.words[READER_SLEEPS]) else 1

    cdef int glance(self, long long now) except -1:
        """Let the poller do its periodic checks, which operations that never wait have to call."""
        if now - self.glanced_ns > GLANCE_NS:
            self.glanced_ns = now
            self.poller.glance()
        return 0

    cdef RingWriter way_out(self, Link link):
        """Return the ring for a message, if nothing prevents it. With the lock."""
        if link is None or self.mailbox.fault is not None or self.aborters or (self.left and self.number in self.left):
            return None
        self.is_told = self.is_told or self.fingerprint in self.told
        return link.tx if self.is_told and link.is_clear() else None

    cdef bint push(self, RingWriter tx, const char *payload) except -1:
        """Write a frame, if there are credit and room. With the lock."""
        cdef const char *header = self.header
        cdef bint pushed
        if self.account.waiting or self.account.used + self.cost > self.credit:
            return False
        if self.nbytes < LONG_BYTES:
            pushed = ring_push(&tx.ring, header, HEADER_BYTES, payload, self.nbytes)
        else:
            with nogil:
                pushed = ring_push(&tx.ring, header, HEADER_BYTES, payload, self.nbytes)
        if pushed:
            self.account.used += self.cost
        return pushed

    cdef int wake_receiver(self) except -1:
        """Wake the other side, if it sleeps and does not look into the ring of messages to it."""
        cdef Link link = self.outgoing.get(self.fabric_id)
        if link is not None and link.tx is not None:
            wake(link, link.tx, READER_SLEEPS)
        return 0

    # Receiving

    def take(self, size_t address):
        """Receive to an address if the message is here; False, with the message still there, if not."""
        return self.take_to(<char *>address)

    def wait(self, size_t address, long long deadline_ns):
        """Receive to an address; False, with the message still there, if it does not arrive soon."""
        return self.pull(<char *>address, deadline_ns)

    cdef bint take_to(self, char *to) except -1:
        cdef Link link = self.links_from.get(self.fabric_id)
        # Without a lock: what comes now could come later.
        if link is None or link.rx is None or not ring_has(&link.rx.ring, 1):
            return False
        return self.pull(to, 0)

    cdef bint pull(self, char *to, long long deadline_ns) except -1:
        """Read the next message, if it is of this lot; False, with the frame still there, if it is another or none.

        Args:
            to: Where its payload goes.
            deadline_ns: Wait for it until then, but for a moment only; 0: do not wait.
        """
        cdef Link link
        if not self.take_role():
            return False
        try:
            self.lock.enter()
            try:
                link = self.link_in()
                rx = None if link is None else link.rx
            finally:
                self.lock.give()
            return rx is not None and self.pull_from(link, rx, to, deadline_ns)
        finally:
            self.give_role()

    cdef bint take_role(self) except -1:
        """Take the role of the poller, if it is free."""
        return not self.poller.closed and self.role.take()

    cdef int give_role(self) except -1:
        self.role.give()
        if self.poller._waiters:
            self.poller.tell_waiters()
        return 0

    cdef Link link_in(self):
        """Return the link of incoming messages, if a receive that is posted now would get the next message of the
        lot, and the next bytes of the link begin a frame. With the lock."""
        cdef Link link = self.links_from.get(self.fabric_id)
        if link is None or self.mailbox.fault is not None or not link.reader.between_frames():
            return None
        if self.arrived and self.key in self.arrived:
            return None
        if self.posted and (self.key in self.posted or self.key_of_any in self.posted):
            return None
        return link

    cdef bint pull_from(self, Link link, RingReader rx, char *to, long long deadline_ns) except -1:
        """Read the next frame of a link; reports of received bytes before it as well. With the role."""
        while ring_has(&rx.ring, 1) or (deadline_ns and self.watch(rx, deadline_ns)):
            if self.pull_next(link, rx, to):
                return True
            if not self.take_received(link, rx):
                return False
        return False

    cdef bint pull_next(self, Link link, RingReader rx, char *to) except -1:
        """Read the next frame, if it is of this lot. With the role."""
        cdef const char *header = self.header
        cdef bint here
        if self.nbytes < LONG_BYTES:
            here = ring_pull(&rx.ring, header, HEADER_BYTES, to, self.nbytes)
        else:
            with nogil:
                here = ring_pull(&rx.ring, header, HEADER_BYTES, to, self.nbytes)
        if not here:
            return False
        self.lock.enter()
        try:
            if self.mailbox.fault is not None:  # another thread may have failed the group meanwhile
                return False
            self.account_for(rx)
        finally:
            self.lock.give()
        self.settle(link, rx)
        return True

    cdef int account_for(self, RingReader rx) except -1:
        """Free the frame of a received message, and report received bytes if that is due. With the lock."""
        ring_consume(&rx.ring, HEADER_BYTES + self.nbytes)
        if self.account.owed + self.cost < REPORTED:
            self.account.owed += self.cost
        elif self.report(self.account.owed + self.cost):
            self.account.owed = 0
        else:
            self.delivery.account_for(self.mailbox, self.number, True, self.cost)
        return 0

    cdef bint report(self, uint64_t total) except -1:
        """Write a report of received bytes; `settle` wakes its reader. With the lock.

        Returns:
            False, with nothing done, if the queued path has to do it.
        """
        cdef Link link = self.outgoing.get(self.fabric_id)
        cdef char header[HEADER_BYTES]
        if link is None or link.tx is None or not link.is_clear():
            return False
        memcpy(header, <const char *>self.received, TOTAL_AT)
        memcpy(header + TOTAL_AT, &total, sizeof(total))
        self.reported = ring_push(&link.tx.ring, header, HEADER_BYTES, NULL, 0)
        return self.reported

    cdef int settle(self, Link link, RingReader rx) except -1:
        """Wake the writer of a ring that frames were read from, and the reader of a report."""
        wake(link, rx, WRITER_SLEEPS)
        if self.reported:
            self.reported = False
            self.wake_receiver()
        return 0

    cdef bint take_received(self, Link link, RingReader rx) except -1:
        """Read a report of received bytes, if that is the next frame: as `Dispatch.on_credit`. With the role."""
        cdef char found[HEADER_BYTES]
        cdef uint64_t total
        self.lock.enter()
        try:
            if not ring_pull_like(&rx.ring, self.received, TOTAL_AT, found, HEADER_BYTES):
                return False
            if self.mailbox.fault is not None or self.account.waiting:  # which the queued path then sends
                return False
            memcpy(&total, found + TOTAL_AT, sizeof(total))
            self.account.used = 0 if total > <uint64_t>self.account.used else self.account.used - <long long>total
            ring_consume(&rx.ring, HEADER_BYTES)
        finally:
            self.lock.give()
        wake(link, rx, WRITER_SLEEPS)
        return True

    cdef bint watch(self, RingReader rx, long long deadline_ns) except -1:
        """Look into a ring, and yield; False if the caller has other work to do first. With the role."""
        cdef RingWait wait
        cdef RingReader other
        cdef long long now
        cdef bint here
        if ring_look(&rx.ring, &self.together, self.spins, self.lone_spins):
            return True
        now = clock_ns()
        memset(&wait, 0, sizeof(wait))
        wait.ring, wait.together, wait.end_ns = &rx.ring, &self.together, min(now + YIELD_NS, deadline_ns)
        if now < <long long>self.crowd._until or now >= wait.end_ns:
            return False
        readers = self.rings.readers
        for other in readers:
            if other is not rx and wait.count < MOST_READERS:
                wait.others[wait.count] = &other.ring
                wait.count += 1
        while not (self.has_failed() or self.poller._waiters):
            with nogil:
                here = ring_yield(&wait)
                now = clock_ns()
            if here or now >= wait.end_ns:
                return here
            if wait.slow > 1:
                self.crowd._note(now)
                return False
        return False

    cdef bint has_failed(self) except -1:
        return self.mailbox.aborted is not None or self.mailbox.fault is not None

cdef class Carrier(Lane):
    """Runs the sends or the receives of one signature, with plain tensors: the ``execute`` of a plan.

    Args:
        messenger: The group's messenger.
        express: The direct path of the messages.
        sends: Whether it sends them.
        otherwise: The queued path.
    """

    cdef object messenger, otherwise
    cdef Express express
    cdef bint sends

    def __init__(self, messenger, Express express not None, bint sends, otherwise):
        self.messenger, self.express, self.sends, self.otherwise = messenger, express, sends, otherwise

    def __call__(self, Operation operation not None, inputs, outputs):
        cdef size_t address
        cdef bint carried
        (tensor,) = inputs or outputs
        self.messenger.last = operation
        if operation._places != NULL and operation._places.count == 1 and operation._places.tensors[0] == <void *>tensor:
            address = operation._places.spans[0].start
        else:
            address = tensor.data_ptr()
        if self.sends:
            carried = self.express.send_from(<char *>address, operation.created_ns)
        elif operation._is_async:
            carried = self.express.take_to(<char *>address)
        else:
            carried = self.express.pull(<char *>address, operation.deadline_ns)
        if not carried:
            return self.otherwise(operation, tensor)
        if not self.sends:
            operation.source = self.express.rank
        return None

    cdef int send(self, const char *address, long long now) except -1:
        return self.express.send_first(address, now) if self.sends else 0

    cdef int sent(self, Operation operation, int sent) except -1:
        self.messenger.last = operation
        if sent > 1:
            self.express.wake_receiver()
        return 0
