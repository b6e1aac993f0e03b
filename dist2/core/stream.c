/* Waiting for stream sockets, and reading a known number of bytes: see stream.h. */

#include "stream.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#define YIELD_NS 1000000 /* how long a waiter yields before it sleeps, unless yields are slow, one after the other */

int
give_way(Yielding *yielding)
{
    int64_t before = clock_ns();
    if (yielding->since_ns == 0) {
        yielding->since_ns = before;
    }
    if (before - yielding->since_ns > YIELD_NS || yielding->slow > 1) {
        return 0;
    }
    sched_yield();
    yielding->slow = clock_ns() - before > SLOW_YIELD_NS ? yielding->slow + 1 : 0;
    return 1;
}

int
is_stream_end(void)
{
    return errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR;
}

/* Read the bytes that have come; 1 if the stream has ended or failed, 0 if all is here or nothing more has come. */
static int
read_some(int fd, char *end, size_t *missing)
{
    while (*missing) {
        ssize_t count = recv(fd, end - *missing, *missing, MSG_DONTWAIT);
        if (count <= 0) {
            return count == 0 || is_stream_end();
        }
        *missing -= (size_t)count;
    }
    return 0;
}

int
stream_read(int fd, char *to, size_t *missing, int writes)
{
    Yielding yielding = {0};
    char *end = to + *missing;
    while (1) {
        size_t before = *missing;
        if (read_some(fd, end, missing)) {
            return 1;
        }
        if (!*missing) {
            return 0;
        }
        if (*missing < before) {
            yielding.since_ns = 0;
        }
        struct pollfd event = {fd, (short)(writes ? POLLIN | POLLOUT : POLLIN), 0};
        if (give_way(&yielding)) {
            if (writes && poll(&event, 1, 0) > 0 && event.revents & POLLOUT) {
                return 0;
            }
        }
        else if (poll(&event, 1, STREAM_WAIT_MS) <= 0 || event.revents & POLLOUT) {
            return 0;
        }
    }
}
