# cython: language_level=3, binding=False, boundscheck=False, wraparound=False, embedsignature=False
# distutils: sources = dist2/core/ring.c dist2/core/ring_waiter.c
# distutils: include_dirs = dist2/core
"""`Express`: direct messages inside a host. `Carrier`: the sends or the receives of one signature by it.

All messages between two processes go through the same ring. A direct send has the effect of the queued path
(`Intake`, `Mailbox`) for a message that can be sent at once, but keeps no record of it. A send with credit
and room writes its frame. A receive whose message could match no other receive looks for exactly that frame,
and copies the payload out of the ring. In every other case they refuse without side effects, and the queued
path takes the call. So order, credit, mismatches and failures are decided in one place.

The frame of a short message is the same for every call of a lot: it is made once, and compared as bytes. Of a
long message the sender offers its memory (``loans.py``): the receiver has the kernel copy it, and each reports to
the other. What does not end in a moment goes on by ``express_long.py``.

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

from dist2.backends.socket.transport.base import ANY_SOURCE
from dist2.backends.socket.transport.messages.credit import REPORTED_BYTES
from dist2.backends.socket.wire import TAGGED, Header, Kind

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    Py_ssize_t process_vm_readv(int, const iovec *, unsigned long, const iovec *, unsigned long, unsigned long)

cdef enum:
    HEADER_BYTES = 56   # of a frame: wire.py
    TRANSFER_AT = 40    # in it: the number of its message
    TOTAL_AT = 48       # the length of the message, or the number of received bytes
    LONG_BYTES = 32 << 10  # moved without the interpreter lock
    PIECE_BYTES = 1 << 20  # read from another process at once
    YIELD_NS = 1000000  # how long a waiter yields before it sleeps
    CHECK_NS = 1000000  # between two looks whether the group has failed
    GLANCE_NS = 1000000  # between two calls of `Poller.glance`, which does periodic checks
    UNREAD, UNTOLD, TOLD  # of a loan: not read; read; and the sender knows it

assert (HEADER_BYTES, TRANSFER_AT) == (len(Header(Kind.TAKEN).encode()), HEADER_BYTES - 16)
cdef long long REPORTED = REPORTED_BYTES


cdef struct Loan:
    uint64_t number, address, slot


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
    cdef bytes header, taken, received
    cdef Account account
    cdef long long nbytes, cost, credit, glanced_ns
    cdef long rank, spins, lone_spins
    cdef bint is_told, answered
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
        self.taken = Header(Kind.TAKEN, 0, mailbox.context).encode()
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
            tx = self.way_out(link, False)
            if tx is None or not self.push(tx, payload, self.nbytes):
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
            tx = self.way_out(self.outgoing.get(self.fabric_id), False)
            if tx is None or not self.push(tx, payload, self.nbytes):
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

    cdef RingWriter way_out(self, Link link, bint is_offer):
        """Return the ring for a message, or for its offer, if nothing prevents it. With the lock."""
        if link is None or self.mailbox.fault is not None or self.aborters or (self.left and self.number in self.left):
            return None
        # The sender of an offer waits, and can answer the question which operation it is.
        self.is_told = self.is_told or self.fingerprint in self.told
        return link.tx if (is_offer or self.is_told) and link.is_clear() else None

    cdef bint push(self, RingWriter tx, const char *payload, size_t nbytes) except -1:
        """Write a frame, if there are credit and room. With the lock."""
        cdef const char *header = self.header
        cdef bint pushed
        if self.account.waiting or self.account.used + self.cost > self.credit:
            return False
        if nbytes < LONG_BYTES:
            pushed = ring_push(&tx.ring, header, HEADER_BYTES, payload, nbytes)
        else:
            with nogil:
                pushed = ring_push(&tx.ring, header, HEADER_BYTES, payload, nbytes)
        if pushed:
            self.account.used += self.cost
        return pushed

    cdef bint answer(self, bytes template, size_t at, uint64_t number) except -1:
        """Write a frame without payload to the other side; `settle` wakes it. With the lock.

        Returns:
            False, with nothing done, if the queued path has to do it.
        """
        cdef Link link = self.outgoing.get(self.fabric_id)
        cdef char header[HEADER_BYTES]
        cdef RingWriter tx
        tx = link.tx if link is not None and link.is_clear() else None
        if tx is None:
            return False
        memcpy(header, <const char *>template, HEADER_BYTES)
        memcpy(header + at, &number, sizeof(number))
        if not ring_push(&tx.ring, header, HEADER_BYTES, NULL, 0):
            return False
        self.answered = True
        return True

    cdef int wake_receiver(self) except -1:
        """Wake the other side, if it sleeps and does not look into the ring of messages to it."""
        cdef Link link = self.outgoing.get(self.fabric_id)
        if link is not None and link.tx is not None:
            wake(link, link.tx, READER_SLEEPS)
        return 0

    # Offering a long message

    cdef object offer(self, Carrier carrier, tensor, const char *address, long long deadline_ns):
        """Offer a message, and wait for a moment until the receiver has read it.

        Returns:
            True once it is; the message that the queued path goes on with; None, with nothing done.
        """
        self.glance(clock_ns())
        if not self.take_role():
            return None
        try:
            sent = self.offer_as_poller(carrier, tensor, address, deadline_ns)
        except BaseException:
            self.give_role()
            raise
        try:
            self.give_role()
        except BaseException:
            if sent is not None and sent is not True:
                carrier.cancel(sent)
            raise
        return sent

    cdef object offer_as_poller(self, Carrier carrier, tensor, const char *address, long long deadline_ns):
        cdef Link link = self.ring_in()
        cdef Loan loan
        cdef RingWriter tx
        if link is None:
            return None
        loan.number, loan.address = carrier.numbers(), <uint64_t>address
        tx = self.push_offer(&loan)
        if tx is None:
            return None
        try:
            taken = self.await_taken(link.rx, tx, &loan, deadline_ns)
        except BaseException:
            carrier.cancel(self.adopt(carrier, tensor, tx, &loan))
            raise
        if not taken:  # before the next poller reads the receiver's answer, which has to find the message
            return self.adopt(carrier, tensor, tx, &loan)
        wake(link, link.rx, WRITER_SLEEPS)
        return True

    cdef object adopt(self, Carrier carrier, tensor, RingWriter tx, Loan *loan):
        """Leave an offered message to the queued path; if that fails, its memory is not read any more."""
        try:
            return carrier.adopt(tensor, loan.number, tx, loan.slot)
        except BaseException:
            tx.revoke(loan.slot)
            raise

    cdef RingWriter push_offer(self, Loan *loan):
        """Enter a loan and write its offer; return the ring, or None with nothing done."""
        cdef Link link
        cdef long long slot
        self.lock.enter()
        try:
            link = self.outgoing.get(self.fabric_id)
            tx = self.way_out(link, True)
            slot = -1 if tx is None else tx.take_slot(loan.number)
            if slot < 0:
                return None
            loan.slot = slot
            if not self.push(tx, <const char *>loan, sizeof(Loan)):
                tx.revoke(slot)
                return None
        finally:
            self.lock.give()
        wake(link, tx, READER_SLEEPS)
        return tx

    cdef bint await_taken(self, RingReader rx, RingWriter tx, Loan *loan, long long deadline_ns) except -1:
        """Wait a moment for the receiver's answer, and read it; False if another frame is next, or none comes."""
        cdef char taken[HEADER_BYTES]
        while not ring_has(&rx.ring, 1):
            if not self.watch(rx, deadline_ns):
                return False
        memcpy(taken, <const char *>self.taken, HEADER_BYTES)
        memcpy(taken + TRANSFER_AT, &loan.number, sizeof(loan.number))
        if not ring_pull(&rx.ring, taken, HEADER_BYTES, NULL, 0):
            return False
        self.lock.enter()
        try:
            ring_consume(&rx.ring, HEADER_BYTES)
            tx.revoke(loan.slot)
        finally:
            self.lock.give()
        return True

    # Receiving

    def take(self, size_t address):
        """Receive to an address if the message is here; False, with nothing done, if not."""
        return self.take_to(<char *>address)

    def wait(self, size_t address, long long deadline_ns):
        """Receive to an address; False, with nothing done, if no message arrives soon."""
        return self.pull(<char *>address, self.nbytes, deadline_ns) is not None

    cdef bint take_to(self, char *to) except -1:
        cdef Link link = self.links_from.get(self.fabric_id)
        if link is None or not self.has_bytes(link.rx):  # without a lock: what comes now could come later
            return False
        return self.pull(to, self.nbytes, 0) is not None

    cdef bint has_bytes(self, RingReader rx) except -1:
        return rx is not None and ring_has(&rx.ring, 1)

    cdef object pull(self, char *to, size_t nbytes, long long deadline_ns):
        """Read the next frame, if it is of this lot.

        Args:
            to: Where its payload goes.
            nbytes: Its length.
            deadline_ns: Wait for it until then, but for a moment only; 0: do not wait.

        Returns:
            The link that it came by; None, with nothing done, if another frame or none is there.
        """
        cdef Link link
        cdef bint pulled
        if not self.take_role():
            return None
        try:
            self.lock.enter()
            try:
                link = self.link_in(True)
                rx = None if link is None else link.rx
                if rx is None:
                    return None
                pulled = self.pull_at_once(rx, to, nbytes)
            finally:
                self.lock.give()
            if pulled:
                self.settle(link, rx)
            else:
                pulled = self.pull_from(link, rx, to, nbytes, deadline_ns)
            return link if pulled else None
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

    cdef Link link_in(self, bint wants_next):
        """Return the link of incoming messages, if the next bytes in it begin a frame; None if not. With the lock.

        Args:
            wants_next: Only if a receive that is posted now would get the next message.
        """
        link = self.links_from.get(self.fabric_id)
        if link is None or self.mailbox.fault is not None:
            return None
        if not link.reader.between_frames():
            return None
        return link if not wants_next or self.is_free() else None

    cdef Link ring_in(self):
        """Return the link of incoming messages, if it has a ring, the next bytes in which begin a frame."""
        cdef Link link
        self.lock.enter()
        try:
            link = self.link_in(False)
            return None if link is None or link.rx is None else link
        finally:
            self.lock.give()

    cdef bint is_free(self) except -1:
        """Whether a receive posted now would get the next message of the lot. With the lock."""
        if self.arrived and self.key in self.arrived:
            return False
        return not (self.posted and (self.key in self.posted or self.key_of_any in self.posted))

    cdef bint pull_from(self, Link link, RingReader rx, char *to, size_t nbytes, long long deadline_ns) except -1:
        """Read the next frame of a link; reports of received bytes before it as well. With the role."""
        while ring_has(&rx.ring, 1) or (deadline_ns and self.watch(rx, deadline_ns)):
            if self.pull_next(link, rx, to, nbytes):
                return True
            if not self.take_received(link, rx):
                return False
        return False

    cdef bint pull_next(self, Link link, RingReader rx, char *to, size_t nbytes) except -1:
        """Read the next frame, if it is of this lot. With the role."""
        cdef const char *header = self.header
        cdef bint here = True
        if nbytes >= LONG_BYTES:  # its writer may be half way
            with nogil:
                here = ring_pull(&rx.ring, header, HEADER_BYTES, to, nbytes)
        if not here:
            return False
        self.lock.enter()
        try:
            if self.mailbox.fault is not None:  # another thread may have failed the group meanwhile
                return False
            if nbytes >= LONG_BYTES:
                self.account_for(rx, nbytes)
            elif not self.pull_whole(rx, to, nbytes):
                return False
        finally:
            self.lock.give()
        self.settle(link, rx)
        return True

    cdef bint pull_at_once(self, RingReader rx, char *to, size_t nbytes) except -1:
        """Read the next frame, if it is of this lot, short, and here. With the role and the lock."""
        return nbytes < LONG_BYTES and ring_has(&rx.ring, HEADER_BYTES + nbytes) and self.pull_whole(
            rx, to, nbytes
        )

    cdef bint pull_whole(self, RingReader rx, char *to, size_t nbytes) except -1:
        """Read the next frame, if it is of this lot; it is here completely. With the role and the lock."""
        if not ring_pull(&rx.ring, self.header, HEADER_BYTES, to, nbytes):
            return False
        self.account_for(rx, nbytes)
        return True

    cdef int account_for(self, RingReader rx, size_t nbytes) except -1:
        """Free the frame of a received message, and report received bytes if that is due. With the lock."""
        ring_consume(&rx.ring, HEADER_BYTES + nbytes)
        if self.account.owed + self.cost < REPORTED:
            self.account.owed += self.cost
        elif self.answer(self.received, TOTAL_AT, self.account.owed + self.cost):
            self.account.owed = 0
        else:
            self.delivery.account_for(self.mailbox, self.number, True, self.cost)
        return 0

    cdef int settle(self, Link link, RingReader rx) except -1:
        """Wake the writer of a ring that frames were read from, and the reader of what was answered."""
        wake(link, rx, WRITER_SLEEPS)
        if self.answered:
            self.answered = False
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

    # Receiving a long message

    cdef object fetch(self, char *to, long long deadline_ns):
        """Wait for the offer of a message, and read that.

        Returns:
            True once it is read and the sender knows it; the link, the loan and whether it was read if the queued
            path goes on with that; None, with nothing done.
        """
        cdef Loan loan
        cdef int state
        cdef Link link = self.pull(<char *>&loan, sizeof(loan), deadline_ns)
        if link is None:
            return None
        state = self.read_loan(link.rx, &loan, to)
        if state == TOLD:
            self.settle(link, link.rx)
        return True if state == TOLD else (link, (<char *>&loan)[:sizeof(loan)], state == UNTOLD)

    cdef int read_loan(self, RingReader rx, Loan *loan, char *to) except -1:
        """Have the kernel copy a message from its sender's memory, and answer; `settle` follows.

        The bytes are valid only if the loan still stands afterwards.
        """
        cdef size_t done = 0
        cdef bint fine = rx is not None and rx.pid > 0
        while fine and done < <size_t>self.nbytes:
            with nogil:
                fine = read_for_a_while(rx.pid, loan.address, to, &done, self.nbytes)
            fine = fine and (done == <size_t>self.nbytes or not self.has_failed())
        if not fine:
            return UNREAD
        self.lock.enter()
        try:
            if self.has_failed() or not rx.is_lent(loan.slot, loan.number):
                return UNTOLD
            return TOLD if self.answer(self.taken, TRANSFER_AT, loan.number) else UNTOLD
        finally:
            self.lock.give()


cdef bint read_for_a_while(int pid, uint64_t there, char *to, size_t *done, size_t nbytes) noexcept nogil:
    """Read on from another process's memory, for a moment; False if the kernel refuses."""
    cdef long long end_ns = clock_ns() + CHECK_NS
    cdef iovec local, remote
    while done[0] < nbytes and clock_ns() < end_ns:
        local.iov_len = remote.iov_len = min(nbytes - done[0], <size_t>PIECE_BYTES)
        local.iov_base, remote.iov_base = to + done[0], <char *>there + done[0]
        if process_vm_readv(pid, &local, 1, &remote, 1, 0) != <Py_ssize_t>local.iov_len:
            return False
        done[0] += local.iov_len
    return True


cdef class Carrier(Lane):
    """Runs the sends or the receives of one signature, with plain tensors: the ``execute`` of a plan.

    Args:
        messenger: The group's messenger.
        express: The direct path of the messages.
        sends: Whether it sends them.
        otherwise: The queued path.
        resume: For long messages: goes on with one that the direct path has begun.
        numbers: Likewise, to send: makes their numbers.
        adopt: Likewise: takes over a message that was offered and not read in a moment.
        cancel: Likewise: cancels one.
    """

    cdef object messenger, otherwise, resume, numbers, adopt, cancel
    cdef Express express
    cdef bint sends

    def __init__(
        self, messenger, Express express not None, bint sends, otherwise, resume=None, numbers=None, adopt=None,
        cancel=None,
    ):
        self.messenger, self.express, self.sends, self.otherwise = messenger, express, sends, otherwise
        self.resume, self.numbers, self.adopt, self.cancel = resume, numbers, adopt, cancel

    def __call__(self, Operation operation not None, inputs, outputs):
        cdef size_t address
        (tensor,) = inputs or outputs
        self.messenger.last = operation
        if operation._places != NULL and operation._places.count == 1 and operation._places.tensors[0] == <void *>tensor:
            address = operation._places.spans[0].start
        else:
            address = tensor.data_ptr()
        if self.resume is None:
            return self.carry_short(operation, tensor, <char *>address)
        if operation._is_async:  # the caller does not wait, and so takes no part in a direct copy
            return self.otherwise(operation, tensor)
        return self.carry_long(operation, tensor, <char *>address)

    cdef object carry_short(self, Operation operation, tensor, char *address):
        cdef bint carried
        if self.sends:
            carried = self.express.send_from(address, operation.created_ns)
        elif operation._is_async:
            carried = self.express.take_to(address)
        else:
            carried = self.express.pull(address, self.express.nbytes, operation.deadline_ns) is not None
        if not carried:
            return self.otherwise(operation, tensor)
        if not self.sends:
            operation.source = self.express.rank
        return None

    cdef object carry_long(self, Operation operation, tensor, char *address):
        if self.sends:
            done = self.express.offer(self, tensor, address, operation.deadline_ns)
        else:
            done = self.express.fetch(address, operation.deadline_ns)
        if done is None:
            return self.otherwise(operation, tensor)
        if done is not True:
            return self.resume(operation, tensor, done)
        if not self.sends:
            operation.source = self.express.rank
        return None

    cdef int send(self, const char *address, long long now) except -1:
        return self.express.send_first(address, now) if self.sends and self.resume is None else 0

    cdef int sent(self, Operation operation, int sent) except -1:
        self.messenger.last = operation
        if sent > 1:
            self.express.wake_receiver()
        return 0
