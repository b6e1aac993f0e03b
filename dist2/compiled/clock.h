/* The clock of both extensions. */

#ifndef DIST2_CLOCK_H
#define DIST2_CLOCK_H

#include <time.h>

/* Return the monotonic clock in nanoseconds, as time.monotonic_ns does. */
static inline long long
monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

#endif
