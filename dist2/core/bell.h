/* The doorbell of a process, on which the threads of all its boards sleep. */

#ifndef DIST2_CORE_BELL_H
#define DIST2_CORE_BELL_H

#include "base.h"

#include <pthread.h>

typedef struct {
    int fd; /* readable after a ring; not blocking */
    pthread_mutex_t lock;
    int asleep;            /* threads that sleep on it, or are about to; with the lock */
    _Atomic unsigned read; /* how often rings were read; changed with the lock, and looked at without: relaxed, as only
                              the value matters, and a thread that sleeps again takes the lock before it looks */
} Bell;

void bell_open(Bell *bell, int fd);
void bell_close(Bell *bell);

/* Count this thread among the sleepers: before it looks for the last time whether it has to sleep. */
void bell_enter(Bell *bell);

/* Sleep until a ring, for so many milliseconds at most; return whether there was one. */
int bell_sleep(Bell *bell, int timeout_ms);

/* Count this thread no more, and read the rings if it was the last. Return `read` as it was before. */
unsigned bell_leave(Bell *bell);

/* Whether a thread that a ring woke, and that has to sleep again, may do so: the rings were read since it left. */
int bell_was_read(const Bell *bell, unsigned before);

/* Wait until it may, for a millisecond at most: a thread that was woken may not have a core yet. */
void bell_await_reading(const Bell *bell, unsigned before);

#endif
