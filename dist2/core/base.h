/* What every file of the core needs: words of shared memory, the clock, outcomes.

   Memory order. A word of shared memory has one writer, so there is no atomic read-modify-write. `publish` is a
   store-release: a reader that observes the new value finds everything that was written before. `observe` is a
   load-acquire: nothing after it starts earlier. `read_word` and `write_word` are relaxed: for words whose value is
   all that matters. A decision that depends on the order of two words, such as "I have arrived" and "is it
   asleep?", has a full fence between them, and says so. */

#ifndef DIST2_CORE_BASE_H
#define DIST2_CORE_BASE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define SLOW_YIELD_NS INT64_C(200000) /* a yield of the core that takes longer: another process may need it */

/* A word of shared memory. */
typedef _Atomic uint64_t Word;

/* How a call of the core ends. The caller continues it by the same call again. */
typedef enum {
    DONE,
    AGAIN, /* it waited for a moment only, as told: continue, without the interpreter lock if there is one */
    SLOW,  /* nothing came for long: the caller sleeps until the members that `Board.whom` names have come; if that is
              NOBODY, it looks after the health of all and goes on */
    CALL,  /* the step that `Run.at` names is the caller's */
    OTHER, /* some memory is not mapped: this member runs its other plan */
} Status;

static inline void
publish(Word *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static inline uint64_t
observe(const Word *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

static inline void
write_word(Word *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_relaxed);
}

static inline uint64_t
read_word(const Word *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

/* Return the monotonic clock in nanoseconds. */
static inline int64_t
clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Let the other thread of this core run, and save power, between two looks at memory. */
static inline void
pause_core(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
