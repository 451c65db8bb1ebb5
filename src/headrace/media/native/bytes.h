/* Internal: bytes on the heap. */
#ifndef HEADRACE_BYTES_H
#define HEADRACE_BYTES_H

#include <stddef.h>
#include <stdint.h>

struct bytes {
  uint8_t *data;
  size_t count;
};

int bytes_set(struct bytes *bytes, const void *data, size_t count);
void bytes_free(struct bytes *bytes);
#endif
