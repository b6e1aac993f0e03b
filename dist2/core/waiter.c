/* The one policy of waiting for members of a board: spin, yield, doze, sleep. How often it spins and yields is set by
   boards/arrivals.py; rings and messages between hosts have policies of their own: ring_waiter.c, spinning.py.

   Spin: a member that has a core comes within microseconds. Not at all where members outnumber the cores: the awaited
   one probably needs this very core.
   Yield: lets another member in, and costs little if no one wants the core. A yield that takes long shows that another
   process needs the core: then this member sleeps at once at its next fences (`sleepy`, `nap`), as two processes that
   poll against each other both lose. While no other process uses the cores it yields for long. If each member has a
   session of its own, and the kernel shares the cores among sessions (autogroups), it returns the core to a yielding
   member until that one has used as much time as the others; a member that slept instead would stay behind in that count, and be woken at fence after fence.
   Doze: a sleep on the doorbell of a few milliseconds, in here.
   Sleep: the caller's, on the doorbell, on processes that may die and on deadlines: SLOW.

   If the kernel wakes a member late (on a virtual machine that first has to get its core back), yields are better
   than sleep: slow yields cause no sleep for a while (`awake_until_ns`).
   Members publish the core on which they wait and when they ran (CORE, RAN), so that the others on that core can tell
   a slow yield caused by a member from one caused by another process. */

#define _GNU_SOURCE
#include "board.h"

#include <limits.h>
#include <sched.h>

#define FEW_LOOKS 8 /* of a brief wait: releasing the interpreter lock costs as much as they do */
#define YIELD_BUDGET_NS INT64_C(2000000) /* the longest time to yield, whatever the numbers below say */
#define DOZE_NS INT64_C(4000000) /* after that the caller sleeps */
#define LONG_NAP 512          /* the most fences at which a member sleeps at once; */
#define LONG_NAP_IN_CROWDS 64 /* where more than CROWD share a core: a useless sleep delays all of them */
#define CROWD 4
#define LASTING_NS INT64_C(20000000) /* within which two yields have to be slow: one may be a thread of the system */
#define TURN_NS INT64_C(1000000)     /* the longest turn of a member between fences; a computation's is about 4 ms */
#define SLOW_WAKE_NS INT64_C(200000) /* from the wake-up call until it runs: */
#define SLOW_WAKES 3                 /* after so many in a row slow yields cause no sleep, */
#define AWAKE_NS INT64_C(20000000)   /* for this time; twice as long if wake-ups are still slow, and so on, */
#define LONG_AWAKE_NS INT64_C(2000000000) /* up to this time */
#define PATIENT 25               /* factor on the yields while no other process is known to use the cores */
#define YIELD_BYTES 512          /* one more yield before sleeping for each so many bytes that others move */
#define SLOW_BYTES (768.0 * 1024) /* bytes that members move in the time of a slow yield */

void
tell_running(Board *board, int64_t now_ns)
{
    write_word(&board->own[RAN], (uint64_t)now_ns);
}

/* Publish the core on which this member waits. */
static void
tell_core(Board *board)
{
    int core = sched_getcpu();
    if (core != board->core && core >= 0) {
        board->core = core;
        write_word(&board->own[CORE], (uint64_t)core + 1);
    }
}

/* Return the first known time, in an interval, at which another member ran on this core; the interval's end if none
   did. */
static int64_t
ran_between(const Board *board, int64_t since, int64_t until)
{
    int64_t first = until;
    for (int each = 0; each < board->count; each++) {
        const Word *words = board->peers[each].words;
        int64_t ran = (int64_t)read_word(&words[RAN]);
        if (ran > since && ran < first && read_word(&words[CORE]) == (uint64_t)board->core + 1) {
            first = ran;
        }
    }
    return first;
}

/* Whether, between two times further apart than a yield should take, another process had this core for longer than a
   member would. A yield is also slow if many members each had a short turn, as members with cold caches do. */
static int
had_long_turn(const Board *board, int64_t since, int64_t until, int64_t slow_ns)
{
    int64_t most = slow_ns < TURN_NS ? slow_ns : TURN_NS;
    while (since < until) {
        int64_t next = ran_between(board, since, until);
        if (next - since > most) {
            return 1;
        }
        since = next;
    }
    return 0;
}

/* Return how often to yield: longer while others move much data. A member that slept meanwhile would wake late,
   because an idle core goes to sleep as well. */
static long
yields_for(const Board *board, size_t moved)
{
    size_t more = moved / YIELD_BYTES;
    return more < (size_t)(LONG_MAX - board->yields) ? board->yields + (long)more : LONG_MAX;
}

/* Record whether slow yields show another user of this member's core, and publish it. */
static void
note_crowd(Board *board, long nap)
{
    char crowded = nap > SHORT_NAP;
    board->nap = nap;
    if (crowded != board->crowded) {
        board->crowded = crowded;
        write_word(&board->own[CROWDED], (uint64_t)crowded);
    }
}

/* Whether an awaited member is known to share its core with another process. */
static int
waits_for_crowded(const Board *board, int first, int absent)
{
    for (int each = first; each < absent; each++) {
        if (read_word(&board->peers[each].words[CROWDED])) {
            return 1;
        }
    }
    return 0;
}

/* Return for how many fences this member sleeps at once after one more slow yield. */
static long
longer_nap(const Board *board)
{
    long most = board->slow_ns > CROWD * SLOW_YIELD_NS ? LONG_NAP_IN_CROWDS : LONG_NAP;
    return 2 * board->nap < most ? 2 * board->nap : most;
}

/* Whether a slow yield shows another process that needs this core for longer, so that sleeping helps. */
static int
is_wanted(Board *board, int64_t now)
{
    int lasting = now - board->wanted_ns < LASTING_NS;
    board->wanted_ns = now;
    return lasting && now > board->awake_until_ns;
}

/* Begin to yield. */
static void
begin_yields(Board *board, Wait *wait)
{
    wait->yields_ns = clock_ns();
    wait->left = wait->attended ? LONG_MAX : yields_for(board, wait->moved);
    wait->turns = board->crowded ? 1 : PATIENT;
    tell_core(board);
    if (board->sleepy) {
        board->sleepy--;
        board->wanted_ns = wait->yields_ns; /* one slow yield behind these fences is enough to sleep again */
        wait->left = 0;
    }
}

/* Yield until the awaited members have come: DONE; or it is time to sleep: SLOW; or, if attended, once: AGAIN. */
static Status
yield_until(Board *board, Wait *wait, int first, int *absent, uint64_t phase)
{
    double more = (double)wait->moved / SLOW_BYTES; /* at most twice: another user must be noticed */
    int64_t slow_ns = board->slow_ns + (int64_t)((double)board->slow_ns * (more < 1.0 ? more : 1.0));
    int64_t now = clock_ns(); /* the caller's work between two yields was no slow yield, but counts as time */
    while (now - wait->yields_ns < YIELD_BUDGET_NS && wait->left-- > 0) {
        if (have_come(board, first, absent, phase)) {
            note_crowd(board, board->nap - (board->nap > SHORT_NAP));
            return DONE;
        }
        if (wait->left == 0 && --wait->turns > 0 && !waits_for_crowded(board, first, *absent)) {
            wait->left = board->yields;
        }
        if (atomic_load_explicit(&board->stopped, memory_order_relaxed)) {
            return SLOW;
        }
        sched_yield();
        int64_t before = now;
        now = clock_ns();
        tell_running(board, now);
        if (now - before > slow_ns && had_long_turn(board, before, now, slow_ns) && is_wanted(board, now)) {
            board->sleepy = board->nap; /* do not compete by polling */
            note_crowd(board, longer_nap(board));
            return SLOW;
        }
        if (wait->attended) {
            return AGAIN;
        }
    }
    return SLOW;
}

/* Return the time since the last wake-up call after a given time; 0 if there was none. */
static int64_t
rung_for(const Board *board, int64_t since_ns, int64_t now)
{
    int64_t rang = 0;
    for (int each = 0; each < board->count; each++) {
        int64_t when = (int64_t)read_word(&board->peers[each].words[RANG]);
        if (when > rang && when < now) {
            rang = when;
        }
    }
    return rang < since_ns ? 0 : now - rang;
}

/* Record how long it took to wake. If members share cores (and do not spin), a woken member may just have to wait for
   another one. */
static void
note_wake(Board *board, int64_t slept_ns)
{
    if (board->spins == 0) {
        return;
    }
    int64_t now = clock_ns();
    board->slow_wakes = rung_for(board, slept_ns, now) > SLOW_WAKE_NS ? board->slow_wakes + 1 : 0;
    if (board->slow_wakes < SLOW_WAKES) {
        return;
    }
    int lasting = now - board->awake_until_ns < board->awake_ns;
    board->awake_ns = lasting ? 2 * board->awake_ns : AWAKE_NS;
    if (board->awake_ns > LONG_AWAKE_NS) {
        board->awake_ns = LONG_AWAKE_NS;
    }
    board->awake_until_ns = now + board->awake_ns;
    board->slow_wakes = 0;
    board->sleepy = 0;
    note_crowd(board, SHORT_NAP);
}

/* Sleep on the doorbell for a few milliseconds: DONE, or SLOW if the caller has to continue the wait. */
static Status
doze_until(Board *board, int first, int *absent, uint64_t phase)
{
    int64_t start = clock_ns(), end = start + DOZE_NS, now;
    int rung = 0;
    unsigned before = 0;
    while (!atomic_load_explicit(&board->stopped, memory_order_relaxed) && (now = clock_ns()) < end) {
        if (have_come(board, first, absent, phase)) {
            note_wake(board, start);
            return DONE;
        }
        if (rung && !bell_was_read(board->bell, before)) {
            sched_yield(); /* to another thread of this process */
            continue;
        }
        bell_enter(board->bell);
        write_word(&board->own[SLEEPING], sleeping_word(board, phase));
        atomic_thread_fence(memory_order_seq_cst); /* the nap is out before the words are read again */
        rung = !have_come(board, first, absent, phase) && bell_sleep(board->bell, 1 + (int)((end - now) / 1000000));
        write_word(&board->own[SLEEPING], 0);
        before = bell_leave(board->bell);
        tell_running(board, clock_ns());
    }
    return SLOW;
}

Status
wait_longer(Board *board, Wait *wait, int first, int absent, uint64_t phase)
{
    if (wait->yields_ns == 0) {
        for (long look = 0; look < board->spins; look++) {
            if (wait->brief && look == FEW_LOOKS) {
                return AGAIN;
            }
            pause_core();
            if (have_come(board, first, &absent, phase)) {
                return DONE;
            }
        }
        if (wait->brief) {
            return AGAIN;
        }
        begin_yields(board, wait);
    }
    Status status = yield_until(board, wait, first, &absent, phase);
    if (status == SLOW && !wait->attended) {
        status = doze_until(board, first, &absent, phase);
    }
    if (status == SLOW) {
        wait->yields_ns = 0; /* the caller sleeps; a wait behind that begins anew */
    }
    return status;
}
