/* Self-tests of the core, without Python: `make core-test` runs them under the sanitizers.

   Ranks are threads with boards of their own on shared regions, as processes have them. They run plans that move
   data through slots in loops, with readers behind the writers, and check every byte. Two threads exchange frames
   through a ring, and an announced message over a socket. Threads sleep on one doorbell. A member that shares its
   core with others is played by one thread: the linker replaces `sched_yield`. */

#define _GNU_SOURCE
#include "plan.h"
#include "ring.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { REGION_BYTES = 4 << 20, TINY_AT = 8192, LONGER_AT = 65536, HALVES_AT = 1310720, HALF_BYTES = 1 << 20, MOST_RANKS = 4 };

typedef struct {
    long rank, ranks;
    char **regions;
    int (*bells)[2]; /* of each rank: where it listens, and where others ring */
    Bell bell;
    Board board;
    int failures;
} Rank;

#define EXPECT(who, condition)                                                                               \
    do {                                                                                                      \
        if (!(condition)) {                                                                                   \
            fprintf(stderr, "rank %ld: line %d: %s\n", (who)->rank, __LINE__, #condition);                   \
            (who)->failures++;                                                                               \
        }                                                                                                     \
    } while (0)

static void
open_board(Rank *self)
{
    Board *board = &self->board;
    bell_open(&self->bell, self->bells[self->rank][0]);
    board_open(board, (Word *)self->regions[self->rank], self->rank, &self->bell);
    board->halves[0] = HALVES_AT;
    board->halves[1] = HALVES_AT + HALF_BYTES;
    board->pieces[TINY] = (Pieces){.base = TINY_AT, .stride = 1088, .count = 32};
    board->pieces[LONGER] = (Pieces){.base = LONGER_AT, .stride = 135168, .count = 8};
    board->spins = 100;
    board->yields = 16;
    board->slow_ns = 200000;
    for (long rank = 0; rank < self->ranks; rank++) {
        if (rank != self->rank) {
            board_add(board, (Word *)self->regions[rank], rank, self->bells[rank][1]);
        }
    }
}

/* Run a plan; sleep on the doorbell as Python would. */
static void
run_whole(Rank *self, const Plan *plan, char **tensors, uint64_t print)
{
    Run run = {.plan = plan, .board = &self->board, .tensors = tensors, .print = print, .wait.moved = plan->moved};
    Status status;
    while ((status = run_plan(&run)) != DONE) {
        EXPECT(self, status == SLOW);
        Board *board = &self->board;
        int index = peer_index(board, board->whom);
        int first = index == ALL ? 0 : index, absent = index == ALL ? board->count : index + 1;
        while (index != NOBODY && !have_come(board, first, &absent, board->sought)) {
            bell_enter(board->bell);
            write_word(&board->own[SLEEPING], sleeping_word(board, board->sought));
            atomic_thread_fence(memory_order_seq_cst); /* the nap is out before the words are read again */
            if (!have_come(board, first, &absent, board->sought)) {
                bell_sleep(board->bell, 20);
            }
            write_word(&board->own[SLEEPING], 0);
            bell_leave(board->bell);
        }
    }
}

static void
add(Plan *plan, Step step)
{
    plan_add(plan, &step);
}

static void
seal(Rank *self, Plan *plan)
{
    int at;
    const char *complaint = plan_check(plan, &at);
    if (complaint != NULL) {
        fprintf(stderr, "step %d %s\n", at, complaint);
    }
    EXPECT(self, complaint == NULL);
}

/* Sums of float32 through the halves, in a loop of blocks. */
static void
reduce_all(Rank *self, size_t blocks, size_t nbytes)
{
    size_t whole = blocks * nbytes, numel = whole / sizeof(float);
    float *values = malloc(whole);
    char *tensors[] = {(char *)values};
    Plan plan;
    plan_open(&plan, self->rank, 0, 1, &whole, HALF_BYTES);
    Place tensor = {TENSOR, 0, 0}, own = {SLOT, (int)self->rank, 0}, slots[MOST_RANKS];
    for (int rank = 0; rank < self->ranks; rank++) {
        slots[rank] = (Place){SLOT, rank, 0};
    }
    add(&plan, (Step){.kind = LOOP, .number = blocks, .nbytes = nbytes});
    add(&plan, (Step){.kind = CLAIM, .number = HALVES});
    add(&plan, (Step){.kind = COPY, .way = FILL, .dst = own, .src = tensor, .nbytes = nbytes});
    add(&plan, (Step){.kind = FENCE, .whom = ALL});
    add(&plan, (Step){.kind = FOLD, .dst = tensor, .srcs = slots, .count = (int)self->ranks, .nbytes = nbytes});
    add(&plan, (Step){.kind = END});
    seal(self, &plan);
    for (int turn = 0; turn < 20; turn++) {
        for (size_t at = 0; at < numel; at++) {
            values[at] = (float)(self->rank + (long)(at % 7) + turn);
        }
        run_whole(self, &plan, tensors, 17);
        int right = 1;
        for (size_t at = 0; at < numel; at++) {
            float expected = 0;
            for (long rank = 0; rank < self->ranks; rank++) {
                expected += (float)(rank + (long)(at % 7) + turn);
            }
            right &= values[at] == expected;
        }
        EXPECT(self, right);
    }
    plan_close(&plan);
    free(values);
}

/* Broadcasts through pieces: the root is ahead of its readers. */
static void
broadcast_all(Rank *self, int kind, size_t nbytes)
{
    unsigned char *values = malloc(nbytes);
    char *tensors[] = {(char *)values};
    Plan plan;
    plan_open(&plan, self->rank, 0, 1, &nbytes, HALF_BYTES);
    Place tensor = {TENSOR, 0, 0}, slot = {SLOT, 0, 0};
    add(&plan, (Step){.kind = CLAIM, .number = (uint64_t)kind});
    if (self->rank == 0) {
        add(&plan, (Step){.kind = COPY, .way = FILL, .dst = slot, .src = tensor, .nbytes = nbytes});
        add(&plan, (Step){.kind = FENCE, .whom = NOBODY});
    } else {
        add(&plan, (Step){.kind = FENCE, .whom = 0});
        add(&plan, (Step){.kind = COPY, .way = PAST, .dst = tensor, .src = slot, .nbytes = nbytes});
    }
    seal(self, &plan);
    for (int turn = 0; turn < 300; turn++) {
        memset(values, self->rank == 0 ? turn % 251 : 255, nbytes);
        run_whole(self, &plan, tensors, 18);
        EXPECT(self, values[0] == turn % 251 && values[nbytes - 1] == turn % 251);
    }
    plan_close(&plan);
    free(values);
}

/* Refusals of `plan_check`. */
static void
refuse(Rank *self)
{
    size_t sizes[] = {64, 64};
    Place input = {TENSOR, 0, 0}, output = {TENSOR, 1, 0}, foreign = {SLOT, (int)self->rank + 1, 0};
    Step bad[] = {
        {.kind = COPY, .dst = output, .src = input, .nbytes = 65},
        {.kind = COPY, .dst = input, .src = output, .nbytes = 8},
        {.kind = COPY, .dst = foreign, .src = input, .nbytes = 8},
        {.kind = COPY, .dst = {TENSOR, 2, 0}, .src = input, .nbytes = 8},
        {.kind = COPY, .dst = {TENSOR, 1, 60}, .src = input, .nbytes = 8},
        {.kind = COPY, .dst = {SLOT, (int)self->rank, 0}, .src = input, .nbytes = 8}, /* nothing is claimed */
        {.kind = SEND, .src = {TENSOR, 0, 60}, .nbytes = 8},
        {.kind = RECV, .dst = input, .nbytes = 8},
        {.kind = FOLD, .number = 99, .dst = output, .srcs = &input, .count = 1, .nbytes = 8},
        {.kind = FOLD, .dst = output, .nbytes = 8},
        {.kind = CLAIM, .number = 3},
        {.kind = LOOP, .number = 0},
        {.kind = LOOP, .number = 2},
        {.kind = END},
    };
    for (size_t each = 0; each < sizeof bad / sizeof bad[0]; each++) {
        Plan plan;
        int at;
        plan_open(&plan, self->rank, 1, 1, sizes, HALF_BYTES);
        plan_add(&plan, &bad[each]);
        EXPECT(self, plan_check(&plan, &at) != NULL);
        plan_close(&plan);
    }
}

static void *
rank_main(void *argument)
{
    Rank *self = argument;
    open_board(self);
    refuse(self);
    reduce_all(self, 1, 8);
    reduce_all(self, 3, 40000);
    broadcast_all(self, TINY, 1000);
    broadcast_all(self, LONGER, 100000);
    reduce_all(self, 1, 8); /* behind it nobody reads pieces any more */
    return NULL;
}

static int
test_ranks(long ranks)
{
    char *regions[MOST_RANKS];
    int bells[MOST_RANKS][2], failures = 0;
    pthread_t threads[MOST_RANKS];
    Rank each[MOST_RANKS];
    for (long rank = 0; rank < ranks; rank++) {
        regions[rank] = aligned_alloc(4096, REGION_BYTES);
        memset(regions[rank], 0, REGION_BYTES);
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, bells[rank]);
        each[rank] = (Rank){.rank = rank, .ranks = ranks, .regions = regions, .bells = bells};
    }
    for (long rank = 0; rank < ranks; rank++) {
        pthread_create(&threads[rank], NULL, rank_main, &each[rank]);
    }
    for (long rank = 0; rank < ranks; rank++) {
        pthread_join(threads[rank], NULL);
        failures += each[rank].failures;
    }
    for (long rank = 0; rank < ranks; rank++) {
        board_close(&each[rank].board);
        close(bells[rank][0]);
        close(bells[rank][1]);
        free(regions[rank]);
    }
    return failures;
}

/* ---- Messages between two threads ---- */

enum { RING_BYTES = 32768, FRAMES = 4000, LONGEST_FRAME = 20000, PAYLOAD_BYTES = 3 << 20, SEGMENT = 262144 };

/* One of the two: rank 0 sends. */
typedef struct {
    long rank;
    char *memory; /* of the ring */
    int fd;
    int failures;
} Side;

/* The header of a frame, and the length of its payload. */
static size_t
describe_frame(uint64_t number, char header[8])
{
    static const size_t lengths[] = {0, 1, 100, 9000, LONGEST_FRAME};
    memcpy(header, &number, sizeof number);
    return lengths[number % 5];
}

static void
exchange_frames(Side *self)
{
    static const char nothing[8] = "nothing";
    char *payload = malloc(LONGEST_FRAME), header[8], found[8];
    Together together = {0};
    Ring ring;
    ring_open(&ring, self->memory, RING_PAGE_WORDS * sizeof(Word) + RING_BYTES, self->rank == 0);
    for (uint64_t number = 1; number <= FRAMES; number++) {
        size_t nbytes = describe_frame(number, header);
        if (self->rank == 0) {
            memset(payload, (int)number, nbytes);
            ring.far = number % 2 ? 99 : 0; /* past the caches, and through them */
            while (!ring_push(&ring, header, sizeof header, payload, nbytes)) {
                sched_yield();
            }
            continue;
        }
        while (!ring_has(&ring, 1) && !ring_look(&ring, &together, 10, 0)) {
            RingWait wait = {.ring = &ring, .end_ns = clock_ns() + 1000000, .together = &together};
            ring_yield(&wait);
        }
        EXPECT(self, !ring_pull(&ring, nothing, sizeof nothing, payload, nbytes));
        while (!ring_pull(&ring, header, sizeof header, payload, nbytes)) {
            sched_yield();
        }
        EXPECT(self, ring_pull_like(&ring, header, 4, found, sizeof found) && !memcmp(found, header, sizeof found));
        EXPECT(self, nbytes == 0 || (payload[0] == (char)number && payload[nbytes - 1] == (char)number));
        ring_consume(&ring, sizeof header + nbytes);
    }
    free(payload);
}

static void *
exchange(void *argument)
{
    exchange_frames(argument);
    return NULL;
}

static int
test_messages(void)
{
    size_t nbytes = RING_PAGE_WORDS * sizeof(Word) + RING_BYTES;
    char *memory = aligned_alloc(4096, nbytes);
    pthread_t threads[2];
    Side sides[2];
    memset(memory, 0, nbytes);
    for (long rank = 0; rank < 2; rank++) {
        sides[rank] = (Side){.rank = rank, .memory = memory};
        pthread_create(&threads[rank], NULL, exchange, &sides[rank]);
    }
    for (long rank = 0; rank < 2; rank++) {
        pthread_join(threads[rank], NULL);
    }
    free(memory);
    return sides[0].failures + sides[1].failures;
}

/* ---- A member whose core others use whenever it yields ---- */

enum { OTHERS = 4, TRIES = 50 }; /* again if the thread was kept from its core */

typedef struct {
    Board board;
    char *regions[OTHERS + 1];
    int64_t turn_ns, longest_ns; /* of each of the others, per fence; and the longest that one took */
    int tells;                   /* they publish that they ran */
    int yields;                  /* before they come to the fence */
} Crowd;

static _Thread_local Crowd *crowd;

static void
compute(int64_t for_ns)
{
    int64_t end = clock_ns() + for_ns;
    while (clock_ns() < end) {
        ;
    }
}

static void
have_turns(void)
{
    for (int each = 0; each < OTHERS; each++) {
        Word *words = crowd->board.peers[each].words;
        int64_t start = clock_ns();
        compute(crowd->turn_ns);
        int64_t now = clock_ns();
        if (now - start > crowd->longest_ns) {
            crowd->longest_ns = now - start;
        }
        if (crowd->tells) {
            write_word(&words[CORE], read_word(&crowd->board.own[CORE]));
            write_word(&words[RAN], (uint64_t)now);
        }
    }
}

static void
come(void)
{
    size_t at = crowd->board.phase % RING * ENTRY;
    for (int each = 0; each < OTHERS; each++) {
        publish(&crowd->board.peers[each].words[at], read_word(&crowd->board.own[at]));
    }
}

int __real_sched_yield(void);

int
__wrap_sched_yield(void)
{
    if (crowd == NULL) {
        return __real_sched_yield();
    }
    if (crowd->turn_ns) {
        have_turns();
    }
    if (--crowd->yields <= 0) {
        come();
    }
    return 0;
}

/* Meet the others at two fences; return whether the member is to sleep at the next ones. */
static int
would_sleep(int64_t turn_ns, int tells, int yields, int64_t work_ns)
{
    Crowd self = {.turn_ns = turn_ns, .tells = tells};
    for (int rank = 0; rank <= OTHERS; rank++) {
        self.regions[rank] = aligned_alloc(4096, 4096);
        memset(self.regions[rank], 0, 4096);
    }
    board_open(&self.board, (Word *)self.regions[0], 0, NULL);
    self.board.yields = 1 << 30;
    self.board.slow_ns = turn_ns ? OTHERS * turn_ns : SLOW_YIELD_NS;
    for (int rank = 1; rank <= OTHERS; rank++) {
        board_add(&self.board, (Word *)self.regions[rank], rank, -1);
    }
    crowd = &self;
    for (int fence = 0; fence < 2; fence++) {
        Wait wait = {.attended = work_ns > 0};
        self.yields = yields;
        arrive(&self.board, 1, 0, ALL, 0);
        Status status;
        while ((status = await(&self.board, &wait, ALL, self.board.phase)) != DONE) {
            compute(work_ns);
            if (status == SLOW) {
                come();
            }
        }
    }
    crowd = NULL;
    int kept = self.longest_ns < turn_ns + turn_ns / 2;
    int answer = kept || turn_ns == 0 ? self.board.sleepy > 0 : -1;
    board_close(&self.board);
    for (int rank = 0; rank <= OTHERS; rank++) {
        free(self.regions[rank]);
    }
    return answer;
}

static int
expect_sleep(const char *what, int expected, int64_t turn_ns, int tells, int yields, int64_t work_ns)
{
    for (int once = 0; once < TRIES; once++) {
        if (would_sleep(turn_ns, tells, yields, work_ns) == expected) {
            return 0;
        }
    }
    fprintf(stderr, "%s: not %d\n", what, expected);
    return 1;
}

static int
test_crowds(void)
{
    return expect_sleep("many short turns of members", 0, 400000, 1, 1, 0) +
           expect_sleep("a time of which no member tells", 1, 400000, 0, 1, 0) +
           expect_sleep("the caller's own work between quick yields", 0, 0, 0, 3, 2 * SLOW_YIELD_NS);
}

/* ---- Threads of one process on its doorbell ---- */

enum { SLEEPERS = 3, RINGS = 300, PATIENCE_MS = 5000 };

typedef struct {
    Bell bell;
    int ring[2];
    _Atomic int entered, missed;
} Sleepers;

static void *
sleeper_main(void *argument)
{
    Sleepers *self = argument;
    for (int ring = 1; ring <= RINGS && !self->missed; ring++) {
        bell_enter(&self->bell);
        atomic_fetch_add(&self->entered, 1);
        self->missed += !bell_sleep(&self->bell, PATIENCE_MS);
        unsigned before = bell_leave(&self->bell);
        while (!bell_was_read(&self->bell, before) && !self->missed) {
            sched_yield();
        }
    }
    return NULL;
}

/* Each of some threads that sleep hears each ring. */
static int
test_doorbell(void)
{
    static Sleepers self;
    pthread_t threads[SLEEPERS];
    socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, self.ring);
    bell_open(&self.bell, self.ring[0]);
    for (int each = 0; each < SLEEPERS; each++) {
        pthread_create(&threads[each], NULL, sleeper_main, &self);
    }
    for (int ring = 1; ring <= RINGS; ring++) {
        while (atomic_load(&self.entered) < ring * SLEEPERS && !self.missed) {
            sched_yield();
        }
        if (write(self.ring[1], "!", 1) != 1) {
            return 1;
        }
    }
    for (int each = 0; each < SLEEPERS; each++) {
        pthread_join(threads[each], NULL);
    }
    bell_close(&self.bell);
    close(self.ring[0]);
    close(self.ring[1]);
    if (self.missed) {
        fprintf(stderr, "%d of %d threads missed a ring\n", self.missed, SLEEPERS);
    }
    return self.missed != 0;
}

int
main(void)
{
    int failures = test_messages() + test_crowds() + test_doorbell();
    for (long ranks = 1; ranks <= MOST_RANKS; ranks++) {
        failures += test_ranks(ranks);
    }
    printf("core: %d failures\n", failures);
    return failures != 0;
}
