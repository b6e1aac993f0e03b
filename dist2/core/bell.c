/* The doorbell of a process: a ring is a byte in a pipe, for any of the threads that sleep on it.

   A ring wakes all of them, and each looks whether it is what it waits for. `poll` looks at the pipe again before it
   returns: a thread that read the rings at once would take them from those that the kernel has not run yet, and these
   would sleep on. So the last one to wake reads them. A thread that has to sleep again first waits for that, uncounted:
   otherwise none would be the last one.

   A thread is counted before it looks for the last time whether it has to sleep. So a ring is in the pipe until that
   thread has looked, or has come from poll; or it was read before, and then the thread sees what it announced. */

#define _GNU_SOURCE
#include "bell.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#define READ_NS INT64_C(1000000)

void
bell_open(Bell *bell, int fd)
{
    bell->fd = fd;
    bell->asleep = 0;
    atomic_init(&bell->read, 0);
    pthread_mutex_init(&bell->lock, NULL);
}

void
bell_close(Bell *bell)
{
    pthread_mutex_destroy(&bell->lock);
}

void
bell_enter(Bell *bell)
{
    pthread_mutex_lock(&bell->lock);
    bell->asleep++;
    pthread_mutex_unlock(&bell->lock);
}

int
bell_sleep(Bell *bell, int timeout_ms)
{
    struct pollfd rings = {.fd = bell->fd, .events = POLLIN};
    return poll(&rings, 1, timeout_ms) > 0;
}

unsigned
bell_leave(Bell *bell)
{
    char rings[256];
    pthread_mutex_lock(&bell->lock);
    unsigned before = atomic_load_explicit(&bell->read, memory_order_relaxed);
    if (--bell->asleep == 0) {
        while (read(bell->fd, rings, sizeof rings) == sizeof rings) {
            ;
        }
        atomic_store_explicit(&bell->read, before + 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&bell->lock);
    return before;
}

int
bell_was_read(const Bell *bell, unsigned before)
{
    return atomic_load_explicit(&bell->read, memory_order_relaxed) != before;
}

void
bell_await_reading(const Bell *bell, unsigned before)
{
    int64_t end = clock_ns() + READ_NS;
    while (!bell_was_read(bell, before) && clock_ns() < end) {
        sched_yield();
    }
}
