/* The control words at the beginning of a member's region: the only table of them. Python reads it from the binding.

   Only its owner writes a region; all members of the board read it. */

#ifndef DIST2_CORE_LAYOUT_H
#define DIST2_CORE_LAYOUT_H

#define PRINT_BITS 40 /* a word of a fence: its number, above so many bits of the operation's fingerprint */
#define PHASE_BITS (64 - PRINT_BITS)
#define PHASES (UINT64_C(1) << PHASE_BITS)
#define PRINT_MASK ((UINT64_C(1) << PRINT_BITS) - 1)
#define WHOM_BITS 20 /* of SLEEPING: see `sleeping_word` in fences.c */
#define IS_CALL (UINT64_C(1) << 63) /* in a number published with a fence: it names a call; see call_log.py */

/* How many there are of what, then positions. */
#define CONTROL_WORDS(_)                                                                                      \
    _(RING, 32)     /* entries of the ring of fences, from word 0 on, by number of the fence: see fences.c */ \
    _(ENTRY, 2)     /* words of an entry: the arrival, and the number that was published with it */           \
    _(WINDOW, 16)   /* a member is ahead of another by fewer fences */                                        \
    _(WORDS, 97)    /* all control words */                                                                   \
    _(SLEEPING, 64) /* the number of a nap, the fence that it awaits, and whom; 0: it is awake */             \
    _(STATE, 72)    /* not 0: it has closed, aborted or revoked the group, or timed out */                    \
    _(DESCRIBED, 73) /* the fence at which it found a mismatch, and the length of its call's description */   \
    _(GAVE_UP, 74)  /* it has given up an operation in which it exposed memory */                             \
    _(MET, 75)      /* it has found the regions of all members */                                             \
    _(CORE, 76)     /* the core on which it waits, plus 1; 0: unknown */                                      \
    _(CROWDED, 77)  /* not 0: another process uses its core as well */                                        \
    _(SEQ, 80)      /* number of its operation; apart from words that others read at each fence */            \
    _(RANG, 81)     /* monotonic nanosecond at which it last rang a doorbell */                               \
    _(RAN, 82)      /* monotonic nanosecond at which it was last known to run */                              \
    _(PROBE, 96)    /* alone in its cache line: the time to read it shows the distance of its caches */

#define AS_CONSTANT(name, value) name = value,
enum { CONTROL_WORDS(AS_CONSTANT) };
#undef AS_CONSTANT

/* The awaited members of a fence, if not one rank. */
enum { ALL = -1, NOBODY = -2 };

/* The tables of exposed memory, two by parity of the fence: a header, then addresses. */
enum {
    TABLE_AT = 3072,     /* bytes from the beginning of a region */
    TABLE_BYTES = 2560,  /* of each */
    HEADER_WORDS = 7,    /* flags, number of addresses, descriptor, size, address and token (two) of the file */
    COUNT_AT = 1,
    IS_MAPPED = 2,       /* of the flags: other members can map the memory */
};

#endif
