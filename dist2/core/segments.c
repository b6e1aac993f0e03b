/* Announced messages, from the announcement to the last segment: see stream.h. */

#include "stream.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define TURN_NS 2000000 /* how long it takes before the caller does its checks */

enum { NBYTES_AT = 4, TAG_AT = 24, TRANSFER_AT = 40 };

/* The segment that is being moved. */
typedef struct {
    char header[FRAME_BYTES];
    char *at;
    size_t length, inside; /* `inside` counts the header as well */
} Segment;

/* Find the segment that is being moved; 0 if all are done. */
static int
find_segment(const Announced *payload, Segment *segment)
{
    size_t whole = payload->longest + FRAME_BYTES, start = payload->done / whole * payload->longest;
    segment->inside = payload->done % whole;
    if (start >= payload->nbytes) {
        return 0;
    }
    size_t left = payload->nbytes - start;
    segment->length = left < payload->longest ? left : payload->longest;
    segment->at = payload->payload + start;
    uint32_t length = (uint32_t)segment->length;
    int64_t tag = (int64_t)start;
    memcpy(segment->header, payload->header, FRAME_BYTES);
    memcpy(segment->header + NBYTES_AT, &length, sizeof length);
    memcpy(segment->header + TAG_AT, &tag, sizeof tag);
    memcpy(segment->header + TRANSFER_AT, &payload->number, sizeof payload->number);
    return segment->inside < FRAME_BYTES + segment->length;
}

/* Whether it is time for the caller's checks. */
static int
is_over(const Announced *payload)
{
    return clock_ns() - payload->start_ns > TURN_NS;
}

/* Whether all of the payload has moved. */
static int
is_through(const Announced *payload)
{
    Segment segment;
    return !find_segment(payload, &segment);
}

/* Write as much as there is room for; 1 if the stream has ended. */
static int
push(Announced *payload)
{
    Segment segment;
    while (find_segment(payload, &segment) && !is_over(payload)) {
        size_t headed = segment.inside < FRAME_BYTES ? segment.inside : FRAME_BYTES;
        size_t passed = segment.inside - headed;
        struct iovec parts[2] = {{segment.header + headed, FRAME_BYTES - headed},
                                 {segment.at + passed, segment.length - passed}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        ssize_t count = sendmsg(payload->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count < 0) {
            return is_stream_end();
        }
        payload->done += (size_t)count;
    }
    return 0;
}

/* Accept a header that has come; 0 if it is incomplete or unexpected. */
static int
take_header(Announced *payload)
{
    Segment segment;
    if (payload->filled < FRAME_BYTES || !find_segment(payload, &segment)) {
        return 0;
    }
    if (memcmp(payload->staged, segment.header, FRAME_BYTES)) {
        return 0;
    }
    payload->done += FRAME_BYTES;
    payload->filled = 0;
    return 1;
}

/* Read the bytes that have come; 1 if the stream has ended. The header behind a segment is read with it. */
static int
pull(Announced *payload)
{
    Segment segment;
    while (find_segment(payload, &segment) && payload->filled < FRAME_BYTES && !is_over(payload)) {
        size_t left = segment.inside ? FRAME_BYTES + segment.length - segment.inside : 0;
        int last = segment.at + segment.length == payload->payload + payload->nbytes;
        struct iovec parts[2] = {{segment.at + segment.length - left, left},
                                 {payload->staged + payload->filled, FRAME_BYTES - payload->filled}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = left && last ? 1 : 2};
        ssize_t count = recvmsg(payload->fd, &message, MSG_DONTWAIT);
        if (count <= 0) {
            return count == 0 || is_stream_end();
        }
        size_t came = (size_t)count < left ? (size_t)count : left;
        payload->done += came;
        payload->filled += (size_t)count - came;
        take_header(payload);
    }
    return 0;
}

/* Write a frame without payload, as far as there is room; 1 if the stream has ended. */
static int
ask(Announced *payload, int fd, const char *frame)
{
    ssize_t count = send(fd, frame + payload->asked, FRAME_BYTES - payload->asked, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0) {
        return is_stream_end();
    }
    payload->asked += (size_t)count;
    return 0;
}

/* Read a header; 1 if the stream has ended. */
static int
stage(Announced *payload, int fd)
{
    ssize_t count = recv(fd, payload->staged + payload->filled, FRAME_BYTES - payload->filled, MSG_DONTWAIT);
    if (count <= 0) {
        return count == 0 || is_stream_end();
    }
    payload->filled += (size_t)count;
    return 0;
}

/* Make a frame for the message of this number. */
static void
about(char *frame, const char *template, uint64_t number)
{
    memcpy(frame, template, FRAME_BYTES);
    memcpy(frame + TRANSFER_AT, &number, sizeof number);
}

/* Announce a message, read the consent, and write the payload, as far as possible; 1 if a stream has ended. */
static int
hand_over(Announced *payload)
{
    char frame[FRAME_BYTES];
    if (payload->asked < FRAME_BYTES) {
        about(frame, payload->announcement, payload->number);
        if (ask(payload, payload->fd, frame)) {
            return 1;
        }
        if (payload->asked < FRAME_BYTES) {
            return 0;
        }
    }
    if (!payload->agreed) {
        if (stage(payload, payload->back)) {
            return 1;
        }
        if (payload->filled < FRAME_BYTES) {
            return 0;
        }
        about(frame, payload->consent, payload->number);
        if (memcmp(payload->staged, frame, FRAME_BYTES)) {
            return 0;
        }
        payload->agreed = 1;
        payload->filled = 0;
    }
    return push(payload);
}

/* Read the number of a message, consent to it, and read its payload, as far as bytes have come; 1 if a stream has
   ended. */
static int
take_over(Announced *payload)
{
    char frame[FRAME_BYTES];
    if (!payload->agreed) {
        if (stage(payload, payload->fd)) {
            return 1;
        }
        if (payload->filled < FRAME_BYTES) {
            return 0;
        }
        memcpy(&payload->number, payload->staged + TRANSFER_AT, sizeof payload->number);
        about(frame, payload->announcement, payload->number);
        if (memcmp(payload->staged, frame, FRAME_BYTES)) {
            return 0;
        }
        payload->agreed = 1;
        payload->filled = 0;
    }
    if (payload->asked < FRAME_BYTES) {
        about(frame, payload->consent, payload->number);
        if (ask(payload, payload->back, frame)) {
            return 1;
        }
        if (payload->asked < FRAME_BYTES) {
            return 0;
        }
    }
    return pull(payload);
}

int
announced_move(Announced *payload, int sends, int writes)
{
    int (*move)(Announced *) = sends ? hand_over : take_over;
    Yielding yielding = {0};
    payload->start_ns = clock_ns();
    while (1) {
        size_t before = payload->done + payload->asked;
        if (move(payload)) {
            return 1;
        }
        if (is_through(payload) || payload->filled == FRAME_BYTES || is_over(payload)) {
            return 0;
        }
        if (payload->done + payload->asked > before) {
            yielding.since_ns = 0;
        }
        /* Before the consent the sender waits for the receiver's frame, as the receiver does for the sender's. */
        int pushes = sends && payload->agreed;
        struct pollfd event = {sends && !pushes ? payload->back : payload->fd, 0, 0};
        short other = pushes ? POLLIN : writes ? POLLOUT : 0;
        event.events = (short)((pushes ? POLLOUT : POLLIN) | other);
        if (give_way(&yielding)) {
            if (other && poll(&event, 1, 0) > 0 && event.revents & other) {
                return 0;
            }
        }
        else if (poll(&event, 1, STREAM_WAIT_MS) <= 0 || event.revents & other) {
            return 0;
        }
    }
}
