/* Payloads over stream sockets that do not block. Functions: stream.c, segments.c.

   Each returns when nothing has moved for about two milliseconds, other work is possible, or it is time for the
   caller's checks; the caller calls it again. `writes`: return as soon as there is room to write. */

#ifndef DIST2_CORE_STREAM_H
#define DIST2_CORE_STREAM_H

#include "base.h"

enum { FRAME_BYTES = 56, STREAM_WAIT_MS = 1 }; /* of a frame's header: wire.py */

/* A wait for a socket: by yields first. */
typedef struct {
    int64_t since_ns; /* the time since when nothing has moved; 0: bytes have just moved */
    int slow;         /* yields in a row */
} Yielding;

/* Yield the core; 0, with nothing done, if it is time to sleep: nothing has moved for long, or another process uses
   the core. */
int give_way(Yielding *yielding);

/* Whether a failed call means the end of the stream, and not merely no bytes or no room. */
int is_stream_end(void);

/* Read bytes: return 1 if the stream has ended or failed. `missing` is lowered by their number. */
int stream_read(int fd, char *to, size_t *missing, int writes);

/* An announced message on its way. `done` counts all headers and segments together. */
typedef struct {
    int fd, back;             /* descriptor of the payload, and that of the opposite direction */
    const char *announcement; /* its header, with the sender's number; the receiver accepts any number */
    const char *consent;      /* the receiver's answer, */
    const char *header;       /* and the header of each segment, without its offset and length */
    char *payload;
    size_t nbytes, longest, done;
    size_t asked;   /* sent bytes of the announcement on the one side, of the consent on the other */
    uint64_t number; /* the receiver knows it once it is announced */
    int agreed;     /* it was accepted; on the receiver's side: announced */
    char *staged;   /* an incomplete or unexpected header, */
    size_t filled;  /* and the number of its bytes that have come */
    int64_t start_ns;
} Announced;

/* Announce a message, await the consent and write it; or await the announcement, consent and read it. Return 1 if a
   stream has ended or failed. */
int announced_move(Announced *message, int sends, int writes);

#endif
