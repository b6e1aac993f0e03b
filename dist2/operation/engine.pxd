"""C types of the core (dist2/core) for its binding, engine.pyx."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t

cdef extern from "plan.h" nogil:
    ctypedef struct Word:
        pass
    ctypedef enum Status:
        DONE, AGAIN, SLOW, CALL, OTHER
    ctypedef struct CBell "Bell":
        pass
    ctypedef struct Pieces:
        uint64_t base, stride
        int count
    ctypedef struct Wait:
        int brief, attended
        size_t moved
    ctypedef struct CBoard "Board":
        Word *own
        long rank, ranks
        uint64_t phase, sought, slot, naps, waited_ns
        uint64_t halves[2]
        long whom, spins, yields, sleepy, nap
        int64_t slow_ns
        int turn, far
        Pieces *pieces
        char stopped
    uint64_t IS_CALL
    int MOST_PIECES, HALVES, SEQ, IS_MAPPED
    enum:
        HEADER_WORDS  # the length of arrays
    int ALL, NOBODY
    void bell_open(CBell *, int)
    void bell_close(CBell *)
    void bell_enter(CBell *)
    unsigned bell_leave(CBell *)
    void bell_await_reading(const CBell *, unsigned)
    int board_open(CBoard *, Word *, long, CBell *)
    int board_add(CBoard *, Word *, long, int)
    void board_close(CBoard *)
    int peer_index(const CBoard *, long)
    uint64_t sleeping_word(CBoard *, uint64_t)
    void write_word(Word *, uint64_t)
    int64_t clock_ns()
    ctypedef enum Base:
        TENSOR, SLOT, MAPPED
    ctypedef struct CPlace "Place":
        Base base
        int index
        uint64_t at
    ctypedef enum Kind:
        COPY, FOLD, FENCE, CLAIM, LOOP, END, NOTED, SHARED, OFFER, TAKE, SEND, RECV, CALLER
    ctypedef enum Way:
        THROUGH, PAST, FILL
    ctypedef struct Step:
        Kind kind
        Way way
        int checked, count
        long whom
        uint64_t number
        size_t nbytes
        double divisor
        CPlace dst, src
        CPlace *srcs
    ctypedef struct CPlan "Plan":
        long rank
        int inputs, tensors, mapped, count, fences, leaving
        char *used
        Step *steps
        size_t moved
    int plan_open(CPlan *, long, int, int, const size_t *, size_t)
    void plan_close(CPlan *)
    int plan_add(CPlan *, const Step *)
    const char *plan_check(CPlan *, int *)
    bint plan_fits(const CPlan *, const CBoard *)
    ctypedef struct Known:
        uint64_t *header
        uint64_t shift
    ctypedef enum PartKind:
        NO_PART, COPYING, WAITING, REDUCING
    ctypedef struct Part:
        PartKind kind
        int64_t begun_ns, ended_ns
    ctypedef struct Run:
        const CPlan *plan
        CBoard *board
        char **tensors
        char **mapped
        const Known *known
        const uint64_t *header
        uintptr_t shared_from, shared_until
        uint64_t print "print"
        uint64_t called
        int at, stage
        uint64_t offset
        Wait wait
        Part *parts
        int part_count, part_room
        int64_t part_ns
    Status run_plan(Run *)
    char *place_address(const Run *, const CPlace *)

cdef extern from *:
    """
    #include "plan.h"
    typedef struct { const char *name; long value; } Row;
    static const Row control_words[] = {
    #define AS_ROW(name, value) {#name, value},
        CONTROL_WORDS(AS_ROW) AS_ROW(PHASE_BITS, PHASE_BITS) AS_ROW(PRINT_BITS, PRINT_BITS)
        AS_ROW(WHOM_BITS, WHOM_BITS) AS_ROW(TABLE_AT, TABLE_AT) AS_ROW(TABLE_BYTES, TABLE_BYTES)
        AS_ROW(HEADER_WORDS, HEADER_WORDS) AS_ROW(IS_MAPPED, IS_MAPPED)
    };
    enum { CONTROL_WORD_COUNT = sizeof control_words / sizeof control_words[0] };
    #define AS_CONSTANT(name) {#name, name}
    static const Row constants[] = {
        AS_CONSTANT(ALL), AS_CONSTANT(NOBODY), AS_CONSTANT(TENSOR), AS_CONSTANT(SLOT), AS_CONSTANT(MAPPED),
        AS_CONSTANT(THROUGH), AS_CONSTANT(PAST), AS_CONSTANT(FILL), AS_CONSTANT(TINY), AS_CONSTANT(LONGER),
        AS_CONSTANT(HALVES), AS_CONSTANT(TINY_BYTES), AS_CONSTANT(LONGER_BYTES)
    };
    enum { CONSTANT_COUNT = sizeof constants / sizeof constants[0] };
    """
    ctypedef struct Row:
        const char *name
        long value
    const Row control_words[], constants[]
    int CONTROL_WORD_COUNT, CONSTANT_COUNT

cdef extern from "reduce.h" nogil:
    ctypedef struct Fold:
        const char *name
    const Fold FOLDS[]
    const int FOLD_COUNT
