/* A replacement of libnccl.so.2 that moves host memory between processes or threads: for tests without a GPU.

   streams.c   streams and events that run work on threads, delayed on request
   board.c     the shared memory of one communicator: a ring of bytes for each ordered pair of ranks
   folds.c     reductions, in rank order
   launch.c    operations and groups: the work of NCCL's kernels, run by a stream; connections, which first messages make
   nccl.c      NCCL's functions, with its signatures and result codes

   Ranks that do not come are waited for until the communicator is aborted, as NCCL does. */

#ifndef STUB_H
#define STUB_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    SUCCESS = 0,
    UNHANDLED_CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INTERNAL_ERROR = 3,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    IN_PROGRESS = 7,
} Result;

enum { MAX_RANKS = 16, RING_BYTES = 1 << 16, MAX_CUSTOM_OPS = 64, FIRST_CUSTOM_OP = 5, ID_BYTES = 128 };

typedef struct {
    char internal[ID_BYTES];
} UniqueId;

/* streams.c */
typedef struct Stream Stream;
typedef struct Event Event;
void stream_run(Stream *stream, void (*work)(void *), void *argument);

/* board.c */
typedef struct {
    _Atomic uint64_t written, read;
    char bytes[RING_BYTES];
} Ring;

typedef struct {
    _Atomic int attached;
    _Atomic int pid[MAX_RANKS];
    _Atomic int gone[MAX_RANKS];      /* destroyed or aborted its end */
    _Atomic int split_round[MAX_RANKS];
    int color[2][MAX_RANKS], key[2][MAX_RANKS];
    _Atomic char sends[MAX_RANKS][MAX_RANKS], receives[MAX_RANKS][MAX_RANKS]; /* [src][dst]: has issued a message */
    Ring rings[];                     /* rings[src * size + dst] */
} Board;

typedef struct {
    int is_set, datatype;
    double factor;
} CustomOp;

typedef struct Comm {
    int rank, size;
    char name[64];                    /* of the shared memory */
    Board *board;
    size_t mapped;
    _Atomic int aborted, async_error, making;
    _Atomic int blocked;              /* calls that use this one until they return */
    struct Comm *_Atomic child;       /* the communicator that such a call makes */
    _Atomic uint64_t issued, finished; /* launches: they run in the order of their issue on any streams */
    CustomOp custom[MAX_CUSTOM_OPS];
} Comm;

Result board_attach(Comm *comm);
void board_leave(Comm *comm);
int board_alive(Comm *comm, int rank);
void pause_briefly(int *spins);

/* folds.c */
size_t size_of(int datatype);
int has_type(int datatype);
Result fold(void *result, void *const *parts, int count, size_t numel, int datatype, int op);
void scale(void *values, size_t numel, int datatype, double factor);

/* launch.c */
typedef enum { ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, SEND, RECV } Kind;

typedef struct {
    Kind kind;
    Comm *comm;
    Stream *stream;
    const void *source;
    void *target;
    size_t count;
    int datatype, op, peer;           /* peer: or root */
} Op;

Result enqueue(Op op);
Result group_start(void);
Result group_end(void);

#endif
