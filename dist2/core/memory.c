/* Copies. A store into a line that is not in the cache first loads the line, and evicts another one that may still be
   needed. So a destination that nobody reads soon is stored past the caches: a long result, or a slot whose readers
   get it sooner from memory than from this core's cache (far.c). */

#include "memory.h"

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

enum { LINE = 64, VECTOR = 16 };

/* Copy whole lines to an aligned destination, past the caches. */
static void
store_past(char *dst, const char *src, size_t nbytes)
{
    for (size_t line = 0; line < nbytes; line += LINE) {
        for (size_t at = line; at < line + LINE; at += VECTOR) {
            _mm_stream_si128((__m128i *)(dst + at), _mm_loadu_si128((const __m128i *)(src + at)));
        }
    }
    _mm_sfence(); /* a store-release orders no such stores */
}
#endif

void
copy(void *dst, const void *src, size_t nbytes)
{
    if (dst != src) {
        memmove(dst, src, nbytes);
    }
}

void
copy_past(void *dst, const void *src, size_t nbytes)
{
#if defined(__SSE2__)
    uintptr_t ahead = (uintptr_t)dst - (uintptr_t)src;
    if (ahead >= nbytes && -ahead >= nbytes) { /* they do not overlap */
        char *to = dst;
        const char *from = src;
        size_t ragged = -(uintptr_t)dst % LINE, head = ragged < nbytes ? ragged : nbytes;
        size_t lines = (nbytes - head) / LINE * LINE;
        memcpy(to, from, head);
        store_past(to + head, from + head, lines);
        memcpy(to + head + lines, from + head + lines, nbytes - head - lines);
        return;
    }
#endif
    copy(dst, src, nbytes);
}
