/* Sweeps: copies of what is longer than the caches, a block at a time, by way of memory that stays in them.

   What is read from memory is read from several pages in turn, as the processor looks ahead within a page alone, and
   asked for before it is wanted. What nobody reads again soon is stored past the caches: to store into a line that is
   in none would mean to fetch it first, and it would put out what is wanted. */

#include "script.h"

#include <string.h>

#ifdef __SSE2__
#include <immintrin.h>

#define LINE 64
#define PAGE 4096
#define PAGES 4                  /* that are read in turn, */
#define LINES 4                  /* so many lines of each, */
#define AHEAD (PAGES * PAGE)     /* and asked for so many bytes before */
#define NEAR_AHEAD 512           /* the same for what another core has in its cache: it comes line by line */

static inline __attribute__((always_inline)) void
ask_for(const char *src)
{
    for (int line = 0; line < LINES * LINE; line += LINE) {
        _mm_prefetch(src + line, _MM_HINT_T0);
    }
}

/* Read lines of several pages in turn, and do something with each; return how many bytes that were. */
#define SWEEP_LINES(src, nbytes, line, use)                                                                   \
    size_t done = 0;                                                                                          \
    for (; nbytes - done >= PAGES * PAGE; done += PAGES * PAGE) {                                             \
        for (size_t at = done; at < done + PAGE; at += LINES * LINE) {                                        \
            for (size_t page = at; page < at + PAGES * PAGE; page += PAGE) {                                  \
                ask_for(src + page + AHEAD);                                                                  \
                for (size_t line = page; line < page + LINES * LINE; line += LINE) {                          \
                    use;                                                                                      \
                }                                                                                             \
            }                                                                                                 \
        }                                                                                                     \
    }                                                                                                         \
    return done
                                                                                                              \
/* The sweeps with vectors of one kind; what is stored past the caches begins a line. */
#define DEFINE_SWEEPS(level, attributes, vector, load, keep, pass)                                            \
    attributes static inline void level##_keep_line(char *dst, const char *src)                               \
    {                                                                                                         \
        for (size_t at = 0; at < LINE; at += sizeof(vector)) {                                                \
            keep((vector *)(dst + at), load((const vector *)(src + at)));                                     \
        }                                                                                                     \
    }                                                                                                         \
    attributes static inline void level##_pass_line(char *dst, const char *src)                               \
    {                                                                                                         \
        for (size_t at = 0; at < LINE; at += sizeof(vector)) {                                                \
            pass((vector *)(dst + at), load((const vector *)(src + at)));                                     \
        }                                                                                                     \
    }                                                                                                         \
    attributes static size_t level##_in(char *dst, const char *src, size_t nbytes)                            \
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line, level##_keep_line(dst + line, src + line));                            \
    }                                                                                                         \
    attributes static size_t level##_past(char *dst, const char *src, size_t nbytes)                          \
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line, level##_pass_line(dst + line, src + line));                            \
    }                                                                                                         \
    attributes static size_t level##_both(char *kept, char *passed, const char *src, size_t nbytes)           \
    {                                                                                                         \
        SWEEP_LINES(src, nbytes, line,                                                                        \
                    (level##_keep_line(kept + line, src + line), level##_pass_line(passed + line, src + line)));\
    }                                                                                                         \
    attributes static size_t level##_out(char *dst, const char *src, size_t nbytes)                           \
    {                                                                                                         \
        size_t done = 0;                                                                                      \
        for (; nbytes - done >= LINE; done += LINE) {                                                         \
            _mm_prefetch(src + done + NEAR_AHEAD, _MM_HINT_T0);                                               \
            level##_pass_line(dst + done, src + done);                                                        \
        }                                                                                                     \
        return done;                                                                                          \
    }

#define WIDE __attribute__((target("avx512f")))
DEFINE_SWEEPS(sse2, , __m128i, _mm_loadu_si128, _mm_storeu_si128, _mm_stream_si128)
DEFINE_SWEEPS(avx512, WIDE, __m512i, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512)

#define BEST(sweep) (__builtin_cpu_supports("avx512f") ? avx512_##sweep : sse2_##sweep)

void
sweep(char *dst, const char *src, size_t nbytes, int way)
{
    size_t ragged = -(uintptr_t)dst % LINE; /* before the first whole line */
    ragged = ragged < nbytes ? ragged : nbytes;
    memcpy(dst, src, ragged);
    dst += ragged, src += ragged, nbytes -= ragged;
    size_t done = (way == IN ? BEST(in) : way == OUT ? BEST(out) : BEST(past))(dst, src, nbytes);
    memcpy(dst + done, src + done, nbytes - done);
    _mm_sfence();
}

void
sweep_both(char *kept, char *passed, const char *src, size_t nbytes)
{
    size_t ragged = -(uintptr_t)passed % LINE;
    ragged = ragged < nbytes ? ragged : nbytes;
    memcpy(kept, src, ragged);
    memcpy(passed, src, ragged);
    kept += ragged, passed += ragged, src += ragged, nbytes -= ragged;
    size_t done = BEST(both)(kept, passed, src, nbytes);
    memcpy(kept + done, src + done, nbytes - done);
    memcpy(passed + done, src + done, nbytes - done);
    _mm_sfence();
}
#else
void
sweep(char *dst, const char *src, size_t nbytes, int way)
{
    (void)way;
    memcpy(dst, src, nbytes);
}

void
sweep_both(char *kept, char *passed, const char *src, size_t nbytes)
{
    memcpy(kept, src, nbytes);
    memcpy(passed, src, nbytes);
}
#endif
