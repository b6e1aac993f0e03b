/* Messages of scripts: rails.c. */

#ifndef DIST2_RAILS_H
#define DIST2_RAILS_H

#include "steps.h"

enum { FRAME_BYTES = 56 }; /* of a header: `wire.py` */

typedef struct Rail Rail;

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
