# cython: language_level=3, binding=False, boundscheck=False, wraparound=False, embedsignature=False
# distutils: sources = dist2/core/bell.c dist2/core/executor.c dist2/core/far.c dist2/core/fences.c dist2/core/memory.c dist2/core/plan.c dist2/core/reduce.c dist2/core/waiter.c
# distutils: include_dirs = dist2/core
"""The binding of the core (dist2/core): boards, plans, and scripts, which run a plan on the tensors of calls.

The core waits without Python and returns when Python is needed. `Script._go_on` is the one loop between the
two: it releases the interpreter lock for what takes long, sleeps in Python when members are late
(``host.wait``), and lets Python do the steps that only Python can do (``host.do``).
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from dist2.operation.places cimport Places
from dist2.operation.record cimport Operation
from dist2.operation.tensors cimport address_of

cdef extern from "stdatomic.h" nogil:
    void atomic_thread_fence(int)
    int memory_order_seq_cst

cdef dict table_of(const Row *rows, int count):
    return {rows[at].name.decode(): rows[at].value for at in range(count)}


WORDS_OF_CONTROL = table_of(control_words, CONTROL_WORD_COUNT)
"""The layout of control words and tables of exposed memory: see layout.h."""
CONSTANTS = table_of(constants, CONSTANT_COUNT)
"""Constants that plans are made of: see board.h and plan.h."""
FOLD_NAMES = {FOLDS[at].name.decode(): at for at in range(FOLD_COUNT)}
"""The numbers of the core's folds."""

cdef size_t UNKNOWN = <size_t>-1
cdef size_t LONG_BYTES = 32 << 10  # a plan that moves as many runs without the interpreter lock
cdef int MOST_PARTS = 512
cdef uint64_t TEXTS = 128
CALL_TEXTS = TEXTS
"""How many descriptions of calls a member keeps."""
CALL_FLAG = IS_CALL

cdef uintptr_t shared_from = 0, shared_until = 0
cdef uint64_t shared_header[HEADER_WORDS]
cdef uint64_t here_header[HEADER_WORDS]
memset(here_header, 0, sizeof(here_header))
here_header[0] = IS_MAPPED
cdef object parts_taker = None
cdef tuple PART_NAMES = (None, "copy", "wait", "reduce")


def share(uintptr_t address, size_t nbytes, header):
    """Say where the tensors of `shared_empty` lie in this process.

    Args:
        address: The first byte.
        nbytes: How many there may be.
        header: `HEADER_WORDS` words by which other members find the file.
    """
    global shared_from, shared_until
    for at in range(HEADER_WORDS):
        shared_header[at] = header[at]
    shared_from, shared_until = address, address + nbytes


def take_parts(taker):
    """Call ``taker(operation, begun_ns, parts)`` for the parts of each call from now on; None: do not."""
    global parts_taker
    parts_taker = taker


cdef Word *words_at(words) except NULL:
    """Return where the control words of a member lie; a reference to ``words`` keeps them mapped."""
    cdef Py_buffer view
    PyObject_GetBuffer(words, &view, PyBUF_WRITABLE)
    cdef uintptr_t address = <uintptr_t>view.buf
    cdef Py_ssize_t nbytes = view.len
    PyBuffer_Release(&view)
    if nbytes < 8 * WORDS_OF_CONTROL["WORDS"] or address % 8:
        raise ValueError(f"words: {nbytes} bytes, or not aligned")
    return <Word *>address


cdef class Bell:
    """Where the threads of a process sleep: see dist2/core/bell.c.

    Args:
        fd: Readable after a ring; not blocking.
    """

    cdef CBell bell

    def __cinit__(self, int fd):
        bell_open(&self.bell, fd)

    def __dealloc__(self):
        bell_close(&self.bell)

    def enter(self):
        """Count this thread among the sleepers, before it looks for the last time whether it has to sleep."""
        with nogil:
            bell_enter(&self.bell)

    def leave(self):
        """Count it no more; return what `await_reading` needs."""
        cdef unsigned before
        with nogil:
            before = bell_leave(&self.bell)
        return before

    def await_reading(self, unsigned before):
        """After a ring, before this thread enters again: wait until it was read, for a millisecond at most."""
        with nogil:
            bell_await_reading(&self.bell, before)


cdef class Arrivals:
    """How one member comes to the fences of a board: see `dist2.backends.socket.transport.boards.board`."""

    cdef CBoard board
    cdef Known *known
    cdef long known_ranks
    cdef list held
    cdef readonly object at, before  # the operation that runs, or ran last, and the one before
    cdef public uint64_t texts       # descriptions of calls so far: `call_log.py`
    cdef public bint one_process     # all members are threads of this process: all memory is mapped

    def __cinit__(
        self, long rank, words, Bell bell not None, long spins, long yields, int64_t slow_ns, halves, rows
    ):
        if board_open(&self.board, words_at(words), rank, &bell.bell):
            raise MemoryError
        self.held = [(words, bell)]
        self.board.spins, self.board.yields, self.board.slow_ns = spins, yields, slow_ns
        self.board.halves[0], self.board.halves[1] = halves
        for kind, (base, stride, count) in enumerate(rows):
            if not 2 <= count <= MOST_PIECES:  # with one, it would be claimed again before the next fence
                raise ValueError(f"pieces: need 2 to {MOST_PIECES}, got {count}")
            self.board.pieces[kind].base, self.board.pieces[kind].stride = base, stride
            self.board.pieces[kind].count = count

    def __dealloc__(self):
        board_close(&self.board)
        PyMem_Free(self.known)

    def add(self, long rank, words, doorbell):
        """Add another member."""
        if board_add(&self.board, words_at(words), rank, doorbell.fileno()):
            raise MemoryError
        self.held.append((words, doorbell))

    cdef int make_known(self) except -1:
        """Have room for what is known of each member's exposed memory."""
        cdef long before = self.known_ranks
        if before < self.board.ranks:
            known = <Known *>PyMem_Realloc(self.known, self.board.ranks * sizeof(Known))
            if known == NULL:
                raise MemoryError
            self.known, self.known_ranks = known, self.board.ranks
            memset(&known[before], 0xFF, (self.known_ranks - before) * sizeof(Known))
        return 0

    def know(self, long rank, header, uint64_t shift):
        """Say how memory is accessed that another member exposes with a header: by adding ``shift``."""
        self.make_known()
        for at in range(HEADER_WORDS):
            self.known[rank].header[at] = header[at]
        self.known[rank].shift = shift

    cdef int begin(self, Operation operation) except -1:
        """Record the call that runs."""
        if operation is not self.at:
            self.before, self.at = self.at, operation
            write_word(&self.board.own[SEQ], <uint64_t>operation.seq)
        return 0

    def cross(self, Operation operation not None, waiter, long whom=ALL, attend=None, uint64_t number=0):
        """Come to the next fence, and await members there.

        Args:
            operation: The call.
            waiter: Has ``wait(operation)``, which sleeps until the members of `whom` are at the fence `sought`.
            whom: A rank, ALL or NOBODY.
            attend: Called with it between two yields.
            number: Published with the fence.
        """
        cdef Step step = step_of(FENCE)
        cdef CPlan plan
        cdef Run run
        if peer_index(&self.board, whom) < NOBODY:
            raise ValueError(f"rank {whom} is no other member")
        self.begin(operation)
        memset(&plan, 0, sizeof(plan))
        memset(&run, 0, sizeof(run))
        step.whom, step.number, run.called = whom, number, number
        plan.steps, plan.count = &step, 1
        run.plan, run.board = &plan, &self.board
        run.print, run.wait.attended = operation.signature.fingerprint & <uint64_t>-1, attend is not None
        self.go_on(&run, attend is not None, operation, waiter, attend)

    cdef Status go_on(self, Run *run, bint is_long, operation, waiter, attend) except *:
        """Run until the plan is DONE, or a step is the caller's, or the members have to take their other plan."""
        cdef Status status
        run.wait.brief = not is_long
        run.wait.moved = run.plan.moved
        if is_long:
            with nogil:
                status = run_plan(run)
        else:
            status = run_plan(run)
        while status == AGAIN or status == SLOW:
            if status == SLOW:
                waiter.wait(operation)
            elif attend is not None:
                attend(operation)
            run.wait.brief = 0
            with nogil:
                status = run_plan(run)
        return status

    def order(self):
        """Have what was written be seen before what is read next."""
        atomic_thread_fence(memory_order_seq_cst)

    def sleeping_word(self):
        """Begin a nap until the members of `whom` are at the fence `sought`; return the value of SLEEPING."""
        return sleeping_word(&self.board, self.board.sought)

    @property
    def phase(self):
        """Number of the last fence to which this member has come."""
        return self.board.phase

    @property
    def sought(self):
        """The fence that ``wait`` is to await,"""
        return self.board.sought

    @property
    def whom(self):
        """and the awaited members: a rank, ALL or NOBODY."""
        return self.board.whom

    @property
    def slot(self):
        """Offset of the half or piece in use, in each region."""
        return self.board.slot

    @property
    def waited_ns(self):
        """How long this member has waited for others."""
        return self.board.waited_ns

    @property
    def naps(self):
        """How often this member has gone to sleep."""
        return self.board.naps

    @property
    def sleepy(self):
        """At how many fences it sleeps at once."""
        return self.board.sleepy

    @sleepy.setter
    def sleepy(self, long fences):
        self.board.sleepy = fences

    @property
    def nap(self):
        """At how many it does after the next slow yield."""
        return self.board.nap

    @nap.setter
    def nap(self, long fences):
        self.board.nap = fences

    @property
    def turn(self):
        """Which half of the slots is next."""
        return self.board.turn

    @turn.setter
    def turn(self, int turn):
        self.board.turn = turn

    @property
    def far(self):
        """A score of the distance of the others' caches."""
        return self.board.far

    @far.setter
    def far(self, int score):
        self.board.far = score

    @property
    def stopped(self):
        """Whether waiting is over."""
        return bool(self.board.stopped)

    @stopped.setter
    def stopped(self, bint stopped):
        self.board.stopped = stopped


cdef Step step_of(Kind kind) noexcept:
    """Return a step of a kind, with nothing else set."""
    cdef Step step
    memset(&step, 0, sizeof(step))
    step.kind = kind
    return step


cdef int as_place(CPlace *into, place) except -1:
    into.base, into.index, into.at = place
    return 0


cdef class Plan:
    """The steps of one rank in one operation; see plan.h. Steps are added, then `seal` checks them.

    A place is (base, index, offset in bytes), as `dist2.backends.socket.lowering.Place`.

    Args:
        rank: The rank.
        inputs: Bytes of each tensor that a call reads; None where that is not known.
        outputs: Bytes of each that it writes.
        half: Bytes of a half of a slot.
    """

    cdef CPlan plan
    cdef readonly list payloads  # what `host.do` gets for a step: see `Script`
    cdef public bint gathers  # at its first fence all members wait for all
    cdef bint sealed, offers

    def __cinit__(self, long rank, inputs, outputs, size_t half=1 << 20):
        cdef size_t *sizes
        both = [*inputs, *outputs]
        sizes = <size_t *>PyMem_Malloc((len(both) + 1) * sizeof(size_t))
        if sizes == NULL:
            raise MemoryError
        for at, size in enumerate(both):
            sizes[at] = UNKNOWN if size is None else size
        failed = plan_open(&self.plan, rank, len(inputs), len(outputs), sizes, half)
        PyMem_Free(sizes)
        if failed:
            raise MemoryError
        self.payloads = []

    def __dealloc__(self):
        plan_close(&self.plan)

    def __len__(self):
        return self.plan.count

    @property
    def fences(self):
        """How many fences it has, once it is sealed."""
        return self.plan.fences

    cdef int add(self, Step *step, payload, srcs) except -1:
        cdef int at
        if self.sealed:
            raise ValueError("the plan is sealed")
        step.count = len(srcs)
        step.srcs = <CPlace *>PyMem_Malloc((step.count + 1) * sizeof(CPlace))
        if step.srcs == NULL:
            raise MemoryError
        try:
            for at, place in enumerate(srcs):
                as_place(&step.srcs[at], place)
            if plan_add(&self.plan, step):
                raise MemoryError
        finally:
            PyMem_Free(step.srcs)
        self.payloads.append(payload)
        return 0

    def copy(self, dst, src, size_t nbytes, int way=THROUGH):
        """Copy bytes: through the caches, past them, or into a slot."""
        cdef Step step = step_of(COPY)
        step.nbytes, step.way = nbytes, <Way>way
        as_place(&step.dst, dst)
        as_place(&step.src, src)
        self.add(&step, None, ())

    def fold(self, long number, double divisor, dst, srcs, size_t nbytes, payload=None):
        """Combine vectors by a fold of the core; ``payload`` where their elements are not aligned."""
        cdef Step step = step_of(FOLD)
        step.nbytes, step.number, step.divisor = nbytes, number, divisor
        as_place(&step.dst, dst)
        self.add(&step, payload, srcs)

    def fence(self, long whom=ALL, own=None, checked=None, uint64_t number=0):
        """Come to a fence.

        Args:
            whom: The members to await: a rank, ALL or NOBODY.
            own: Destination, source and bytes of a copy that is made while others come.
            checked: The payload if a member has given up an operation in which it exposed memory.
            number: Published with the fence.
        """
        cdef Step step = step_of(FENCE)
        step.whom, step.checked, step.number = whom, checked is not None, number
        if own is not None:
            as_place(&step.dst, own[0])
            as_place(&step.src, own[1])
            step.nbytes = own[2]
        self.add(&step, checked, ())

    def claim(self, uint64_t kind):
        """Claim the next half or piece of the slots."""
        cdef Step step = step_of(CLAIM)
        step.number = kind
        self.add(&step, None, ())

    def loop(self, uint64_t turns, size_t stride):
        """Run the steps up to `end` several times; places in tensors move on by ``stride`` bytes each time."""
        cdef Step step = step_of(LOOP)
        step.number, step.nbytes = turns, stride
        self.add(&step, None, ())

    def end(self):
        """End a loop."""
        cdef Step step = step_of(END)
        self.add(&step, None, ())

    def noted(self, uint64_t number, payload):
        """Go on if all others have published this number with the last fence."""
        cdef Step step = step_of(NOTED)
        step.number = number
        self.add(&step, payload, ())

    def expect_shared(self, places):
        """Run the other plan, unless places in tensors lie in shared memory of this process."""
        cdef Step step = step_of(SHARED)
        self.add(&step, None, places)

    def offer(self, places):
        """Expose places in tensors from the next fence on."""
        cdef Step step = step_of(OFFER)
        self.offers = True
        self.add(&step, None, places)

    def take(self, wanted, payload):
        """Find what members exposed with the last fence: places of the base MAPPED from now on.

        Args:
            wanted: A rank and a part each.
            payload: Of the step that maps memory that is not known.
        """
        cdef Step step = step_of(TAKE)
        self.add(&step, payload, [(MAPPED, rank, part) for rank, part in wanted])

    def fold_elsewhere(self, dst, srcs, size_t nbytes, payload):
        """Have Python combine vectors; see `Script.addresses`."""
        cdef Step step = step_of(CALLER)
        step.nbytes = nbytes
        as_place(&step.dst, dst)
        self.add(&step, payload, srcs)

    def send(self, src, size_t nbytes, payload):
        """Have Python send bytes; see `Script.address`."""
        cdef Step step = step_of(SEND)
        step.nbytes = nbytes
        as_place(&step.src, src)
        self.add(&step, payload, ())

    def recv(self, dst, size_t nbytes, payload):
        """Have Python receive bytes; see `Script.address`."""
        cdef Step step = step_of(RECV)
        step.nbytes = nbytes
        as_place(&step.dst, dst)
        self.add(&step, payload, ())

    def call(self, payload):
        """Have Python do something that concerns no memory."""
        cdef Step step = step_of(CALLER)
        self.add(&step, payload, ())

    def seal(self):
        """Check the plan, and return it.

        Raises:
            ValueError: A step cannot be, or would access memory that it was not given.
        """
        cdef int at
        cdef const char *complaint = plan_check(&self.plan, &at)
        if complaint != NULL:
            raise ValueError(f"step {at} of the plan {complaint.decode()}")
        self.sealed = True
        return self


NEXT, RETRY, RESTART, LEAVE = range(4)
"""Answers of ``host.do``: go on with the next step, with this one, with the first; or run the other plan."""


cdef class Script:
    """A plan on a board: runs it on the tensors of calls.

    Args:
        arrivals: The board.
        plan: A sealed plan.
        host: Has ``prepare(operation, script)``, called before the first run; ``wait(operation)``, which sleeps;
            ``attend(operation)``, which is called between two yields, or None; ``log_call(operation)``, which
            returns the number that names the call;
            ``do(operation, script, at, payload)``, which does a step that is the
            caller's and returns an answer; ``fail(first, error)``, if the plan exposes memory: called with the
            number of the call's first fence.
        other: The script that runs where not all members expose mapped memory.
    """

    cdef readonly Arrivals arrivals
    cdef readonly Plan plan
    cdef object host, attend
    cdef Script other
    cdef Run state
    cdef bint is_ready, is_long
    cdef object signature, code  # of the last call
    cdef long instruction
    cdef uint64_t text
    cdef public int extra_turns  # that other ranks have, with nothing to move for this one

    def __cinit__(self, Arrivals arrivals, Plan plan, host, Script other=None):
        if not plan.sealed:
            raise ValueError("the plan is not sealed")
        self.arrivals, self.plan, self.host, self.other = arrivals, plan, host, other
        self.attend = host.attend
        self.is_long = plan.plan.moved >= LONG_BYTES
        self.state.plan, self.state.board = &plan.plan, &arrivals.board
        self.state.tensors = <char **>PyMem_Malloc((plan.plan.tensors + 1) * sizeof(char *))
        self.state.mapped = <char **>PyMem_Malloc((plan.plan.mapped + 1) * sizeof(char *))
        if self.state.tensors == NULL or self.state.mapped == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.state.tensors)
        PyMem_Free(self.state.mapped)

    def __len__(self):
        return self.plan.plan.count

    def run(self, Operation operation not None, inputs, outputs):
        """Run a call to its end."""
        cdef uint64_t first = self.arrivals.board.phase + 1
        if not self.is_ready:
            self.host.prepare(operation, self)
            self._check_members()
        if not self.plan.offers:
            self._run(operation, inputs, outputs)
            return
        try:
            left = self._run(operation, inputs, outputs)
        except BaseException as error:
            self.host.fail(first, error)
            raise
        if left:
            self.other.run(operation, inputs, outputs)

    cdef bint _run(self, Operation operation, inputs, outputs) except -1:
        """Run a call; return whether the other plan has to be run."""
        cdef Status status
        self._begin(operation, inputs, outputs)
        status = self._go_on(operation)
        while status == CALL:
            answer = self.host.do(operation, self, self.state.at, self.plan.payloads[self.state.at])
            if answer == NEXT:
                self.state.at += 1
                self.state.stage = 0
            elif answer == RESTART:
                self.state.at = self.state.stage = 0
                self.state.offset = 0
            elif answer == LEAVE:
                return True
            status = self._go_on(operation)
        if self.extra_turns:
            turns, self.extra_turns = self.extra_turns, 0
            self.host.do_extra(operation, turns)
        return status == OTHER

    cdef int _check_members(self) except -1:
        """Check that the members whom the plan names are on the board, before its first run."""
        if not plan_fits(&self.plan.plan, &self.arrivals.board):
            raise ValueError("the plan names a rank that is no member of the board")
        self.is_ready = True
        return 0

    cdef int _begin(self, Operation operation, inputs, outputs) except -1:
        """Set up a run: the label that the call publishes, and the addresses of its tensors."""
        cdef Run *run = &self.state
        cdef Arrivals arrivals = self.arrivals
        run.at = run.stage = 0
        run.offset = 0  # the last call may have failed in a loop
        memset(&run.wait, 0, sizeof(run.wait))
        run.wait.attended = self.attend is not None
        if self.plan.plan.mapped or self.plan.offers:
            arrivals.make_known()
            run.known = arrivals.known
            run.header, run.shared_from, run.shared_until = shared_header, shared_from, shared_until
            if arrivals.one_process:
                run.header, run.shared_from, run.shared_until = here_header, 0, <uintptr_t>-1
        if self.plan.plan.fences:
            signature = operation.signature
            if signature is not self.signature:
                run.print = signature.fingerprint & <uint64_t>-1
                self.signature = signature
            arrivals.begin(operation)
            if self.plan.plan.leaving:
                self._log(operation)
        if self.plan.plan.tensors:
            self._find(operation, inputs, 0, self.plan.plan.inputs)
            self._find(operation, outputs, self.plan.plan.inputs, self.plan.plan.tensors)
        return 0

    cdef int _log(self, Operation operation) except -1:
        """Log the call, as others may ask for it when this member has gone on: once for each line of user code."""
        cdef Arrivals arrivals = self.arrivals
        code = operation.code
        if code is not self.code or operation.instruction != self.instruction or arrivals.texts - self.text >= TEXTS:
            self.text = self.host.log_call(operation) & 0xFFFFFFFF
            self.code, self.instruction = code, operation.instruction
        self.state.called = IS_CALL | <uint64_t>operation.seq << 32 | self.text
        return 0

    cdef int _find(self, Operation operation, tensors, int first, int stop) except -1:
        """Find the addresses of the inputs or of the outputs."""
        cdef const Places *places = operation._places
        cdef int at
        for at in range(first, stop):
            if not self.plan.plan.used[at]:
                continue
            tensor = tensors[at - first]
            if places != NULL and at < places.count and places.tensors[at] == <void *>tensor:
                self.state.tensors[at] = <char *>places.spans[at].start
            elif places != NULL and places.count == 1 and places.tensors[0] == <void *>tensor:
                self.state.tensors[at] = <char *>places.spans[0].start
            else:
                self.state.tensors[at] = address_of(tensor)
        return 0

    cdef Status _go_on(self, operation) except *:
        taker = parts_taker  # another thread may stop recording meanwhile
        if taker is None:
            return self.arrivals.go_on(&self.state, self.is_long, operation, self.host, self.attend)
        return self._go_on_timed(operation, taker)

    cdef Status _go_on_timed(self, operation, taker) except *:
        """Do as `_go_on`, and report what took how long."""
        cdef Run *run = &self.state
        cdef int64_t begun_ns = clock_ns()
        cdef Status status
        run.parts = <Part *>PyMem_Malloc(MOST_PARTS * sizeof(Part))
        if run.parts == NULL:
            raise MemoryError
        run.part_count, run.part_room, run.part_ns = 0, MOST_PARTS, begun_ns
        try:
            status = self.arrivals.go_on(run, self.is_long, operation, self.host, self.attend)
            parts = [
                (PART_NAMES[run.parts[at].kind], run.parts[at].begun_ns, run.parts[at].ended_ns)
                for at in range(run.part_count)
            ]
        finally:
            PyMem_Free(run.parts)
            run.parts = NULL
        if status == CALL and self.plan.plan.steps[run.at].count:
            parts.append((PART_NAMES[REDUCING], run.part_ns, run.part_ns))  # lasts until the next ones begin
        taker(operation, begun_ns, parts)
        return status

    def address(self, int at):
        """Return where the bytes lie that a step sends or receives."""
        cdef Step *step = &self.plan.plan.steps[at]
        return <uintptr_t>place_address(&self.state, &step.src if step.kind == SEND else &step.dst)

    def addresses(self, int at):
        """Return where the destination and the sources of a step lie in the run that it stopped."""
        cdef Step *step = &self.plan.plan.steps[at]
        found = [<uintptr_t>place_address(&self.state, &step.dst)]
        for each in range(step.count):
            found.append(<uintptr_t>place_address(&self.state, &step.srcs[each]))
        return found
