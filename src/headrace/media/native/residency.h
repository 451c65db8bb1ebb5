/* Whether parts of a file are in the page cache. */
#ifndef HEADRACE_RESIDENCY_H
#define HEADRACE_RESIDENCY_H

#include <stdint.h>

/* By cachestat, which has no side effect; without it the first and last byte are read with
   RWF_NOWAIT. A file system without both counts as resident: a fault shows when bytes are sent. */
int residency_probe(int file, int64_t offset, int64_t bytes);
#endif
