/* Messages of scripts: rails.c opens and closes what they travel on, parcels.c sends and receives them. */

#ifndef DIST2_RAILS_H
#define DIST2_RAILS_H

#include "steps.h"

enum { FRAME_BYTES = 56 }; /* of a header: `wire.py` */

/* A message on its way out. */
typedef struct {
    char header[FRAME_BYTES];
    char *payload;
    size_t nbytes, done; /* `done` counts the header as well */
    long number;
} Outgoing;

/* What a script sends to one member on another host, and receives of it. */
typedef struct {
    PyObject_HEAD
    int out, in; /* descriptors of its own; -1: it is closed */
    uint64_t seq;
    long long used, owed, limit, reported, cost;
    char template[FRAME_BYTES]; /* of a frame that reports credit, */
    char credit[FRAME_BYTES];   /* one that is on its way, */
    size_t credit_done;         /* and how much of it is; FRAME_BYTES: there is none */
    Outgoing *queue;
    size_t first, last, room;
    char staged[FRAME_BYTES]; /* the header of what is coming in, */
    size_t filled;            /* and how much has come, of header and payload */
    char known;               /* it is that of the message that is received */
    long kept;                /* messages that Python has, which come before what the socket has */
    unsigned long long moved;    /* bytes, in both directions */
    unsigned long long received; /* messages, since it was opened */
    long long turn_ns;
    char stalled; /* it stopped the script, but may go on */
    char broken;  /* the other side is gone, or something else comes than what it knows */
} Rail;

extern PyTypeObject RailType;

/* A message: what its header is but for the number of the operation, and where its payload lies. */
typedef struct {
    const char *header;
    char *payload;
    size_t nbytes;
    long number; /* among the messages of the plan */
} Parcel;

/* The rails that a script uses: who waits for one writes on on all of them. */
typedef struct {
    Rail **each;
    Py_ssize_t count;
} Rails;

/* Have a message sent, as soon as the socket and the credit allow; 0, or 1 if that stops the script. */
int send_parcel(Rail *rail, const Parcel *parcel);

/* Receive a message; 0, or 1 if that stops the script. */
int receive_parcel(Rail *rail, const Parcel *parcel, const Rails *rails);

/* Wait until the kernel has all messages up to a number; 0, or 1 if that stops the script. */
int see_off(Rail *rail, long number, const Rails *rails);

#endif
