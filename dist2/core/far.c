/* Distances: whether data in another process's caches arrives later than data in memory, as between cores without a
   common cache. On virtual machines no table of the system tells that, and it changes from one second to the next.
   So processes that move much data write a word now and then, each in its own cache line, and measure the time to read
   a word that another one has just written: the clock is read again only once the word is there. */

#include "far.h"

#define FAR_BYTES (16 << 10) /* where so many are moved, the distance is measured: */
#define SELDOM 5             /* once in so many times, */
#define LONG_BYTES (1 << 20) /* and each time that so many are moved */
#define FAR_NS 70            /* to read a line: up to 40 from a core with a common cache, 80 and more from others */
#define FAR_STEP 2           /* one far process counts for two near ones: some of the others share this core */
#define MOST_FAR 16
#define AWAY_BYTES (4 << 10) /* less is soon read from anywhere */

int
is_probed(size_t nbytes, uint64_t number)
{
    return nbytes >= LONG_BYTES || (nbytes >= FAR_BYTES && number % SELDOM == 0);
}

void
measure(const Word *probe, uint64_t *seen, int *far)
{
    int64_t before = clock_ns();
    uint64_t found = read_word(probe);
    int64_t behind = clock_ns();
    if (found == *seen) { /* not written since: it is in this core's cache */
        return;
    }
    *seen = found;
    if (behind - before - (clock_ns() - behind) > FAR_NS) {
        *far = *far + FAR_STEP < MOST_FAR ? *far + FAR_STEP : MOST_FAR;
    }
    else if (*far > 0) {
        --*far;
    }
}

int
is_away(size_t nbytes, int far)
{
    return nbytes >= AWAY_BYTES && far > MOST_FAR / 2;
}
