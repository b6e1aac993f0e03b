"""The turn and the numbers of a group's operations, in C."""

cdef extern from "turn.h" nogil:
    const long long PATIENCE_NS
    ctypedef struct Turn:
        long long seq, messages
        int queued, busy, beside, drainers, retired
    bint is_idle(Turn *self)
    bint is_held_here(Turn *self)
    long long enter_turn(Turn *self)
    bint take_next(Turn *self)
    bint enter_queued(Turn *self)
    long long add_job(Turn *self)
    bint give_back(Turn *self, long long patience_ns)
    void hurry_turn(Turn *self)
    void end_turn(Turn *self)
    bint await_job(Turn *self, long long idle_ns)
