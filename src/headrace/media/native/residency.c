#include "residency.h"

#include <errno.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif
enum { PAGE_BYTES = 4096 };

static int is_byte_resident(int file, int64_t offset) {
  char byte;
  struct iovec into = {&byte, 1};
  return preadv2(file, &into, 1, offset, RWF_NOWAIT) >= 0 || errno != EAGAIN;
}

int residency_probe(int file, int64_t offset, int64_t bytes) {
  struct { uint64_t offset, length; } span = {(uint64_t)offset, (uint64_t)bytes};
  struct { uint64_t cached, dirty, writeback, evicted, recently_evicted; } found;
  if (syscall(SYS_cachestat, file, &span, &found, 0) == 0)
    return found.cached > (uint64_t)((offset + bytes - 1) / PAGE_BYTES - offset / PAGE_BYTES);
  return is_byte_resident(file, offset) && is_byte_resident(file, offset + bytes - 1);
}
