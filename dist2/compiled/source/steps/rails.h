/* Messages of scripts: rails.c opens and closes rails, parcels.c sends and receives over them. */

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

/* A connection for messages of a script to and from one member on another host. */
typedef struct {
    PyObject_HEAD
    int out, in; /* its own descriptors; -1: it is closed */
    uint64_t seq;
    long long used, owed, limit, reported, cost;
    char template[FRAME_BYTES]; /* of a frame that reports credit, */
    char credit[FRAME_BYTES];   /* the credit report that is being written, */
    size_t credit_done;         /* and how many of its bytes are; FRAME_BYTES: no report */
    Outgoing *queue;
    size_t first, last, room;
    char staged[FRAME_BYTES]; /* the incoming header, */
    size_t filled;            /* and how many bytes have come, of header and payload */
    char known;               /* the header is that of the awaited message */
    long kept;                /* messages that Python has, which come before those in the socket */
    unsigned long long moved;    /* bytes, in both directions */
    unsigned long long received; /* messages, since it was opened */
    long long turn_ns;
    char stalled; /* it stopped the script, but can continue */
    char broken;  /* the other side is gone, or an unknown frame came */
} Rail;

extern PyTypeObject RailType;

/* A message: its header without the number of the operation, and the address of its payload. */
typedef struct {
    const char *header;
    char *payload;
    size_t nbytes;
    long number; /* among the messages of the plan */
} Parcel;

/* The rails of a script. A wait for one of them continues the writes on all of them. */
typedef struct {
    Rail **each;
    Py_ssize_t count;
} Rails;

/* Send a message as soon as the socket and the credit allow; 0, or 1 if that stops the script. */
int send_parcel(Rail *rail, const Parcel *parcel);

/* Receive a message; 0, or 1 if that stops the script. */
int receive_parcel(Rail *rail, const Parcel *parcel, const Rails *rails);

/* Wait until the kernel has all messages up to a number; 0, or 1 if that stops the script. */
int see_off(Rail *rail, long number, const Rails *rails);

#endif
