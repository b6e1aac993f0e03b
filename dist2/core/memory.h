/* Copies inside this process's address space: memory.c. */

#ifndef DIST2_CORE_MEMORY_H
#define DIST2_CORE_MEMORY_H

#include <stddef.h>

/* Copy memory that may overlap. */
void copy(void *dst, const void *src, size_t nbytes);

/* The same; the destination is stored past the caches. */
void copy_past(void *dst, const void *src, size_t nbytes);

#endif
