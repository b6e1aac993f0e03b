/* Whether data in another process's caches arrives later than data in memory: far.c. */

#ifndef DIST2_CORE_FAR_H
#define DIST2_CORE_FAR_H

#include "base.h"

/* Whether the distance is measured where so many bytes are moved; `number`: of the fence or the message. */
int is_probed(size_t nbytes, uint64_t number);

/* Read a word that another process writes from time to time. If it has done so since the value was `seen`, note in the
   score `far` how long that took. */
void measure(const Word *probe, uint64_t *seen, int *far);

/* Whether so many bytes that the other process reads should be stored past the caches. */
int is_away(size_t nbytes, int far);

#endif
