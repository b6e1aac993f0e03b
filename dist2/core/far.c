/* Distances: whether data in another member's caches arrives later than data in memory, as between cores without a
   common cache. On virtual machines no table of the system tells that, and it changes from one second to the next.
   So members that move much data write a word now and then, each in its own cache line, and measure the time to read
   a word that another member has just written: the clock is read again only once the word is there. */

#include "board.h"

#define FAR_BYTES (16 << 10) /* calls that move so many measure the distance of the caches: */
#define SELDOM 5             /* members look at one fence in so many, */
#define LONG_BYTES (1 << 20) /* and at each of a call that moves so many */
#define FAR_NS 70            /* to read a line: up to 40 from a core with a common cache, 80 and more from others */
#define FAR_STEP 2           /* one far member counts for two near ones: some of the others share this core */
#define MOST_FAR 16

static int
is_probed(const Board *board, size_t moved)
{
    return moved >= LONG_BYTES || (moved >= FAR_BYTES && board->phase % SELDOM == 0);
}

void
tell_distance(Board *board, size_t moved)
{
    if (is_probed(board, moved)) {
        write_word(&board->own[PROBE], board->phase);
    }
}

void
note_distance(Board *board, size_t moved)
{
    if (!is_probed(board, moved) || board->count == 0) {
        return;
    }
    Peer *peer = &board->peers[board->looks++ % (unsigned)board->count];
    int64_t before = clock_ns();
    uint64_t probe = read_word(&peer->words[PROBE]);
    int64_t behind = clock_ns();
    if (probe == peer->probe) { /* not written since: it is in this core's cache */
        return;
    }
    peer->probe = probe;
    if (behind - before - (clock_ns() - behind) > FAR_NS) {
        board->far = board->far + FAR_STEP < MOST_FAR ? board->far + FAR_STEP : MOST_FAR;
    }
    else if (board->far > 0) {
        board->far--;
    }
}

int
are_far(const Board *board)
{
    return board->far > MOST_FAR / 2;
}
