/* The heads with which other nodes answer requests of this plane.

   Only one answer is valid: 206 with one ETag, Content-Length, Content-Range and signature. Any other
   one is left to the control plane, which repeats the request and judges what comes then. */
#ifndef HEADRACE_PEER_HEAD_H
#define HEADRACE_PEER_HEAD_H

#include <stdint.h>

#include "text.h"

#define PEER_HEAD_MAX 4096

enum peer_head_result { PEER_HEAD_INCOMPLETE, PEER_HEAD_PART, PEER_HEAD_OTHER };

struct peer_head {
  size_t bytes; /* with the empty line */
  struct text etag, length, range, reply; /* the values of the fields */
  int is_last; /* the peer closes the connection after this answer */
};

enum peer_head_result peer_head_read(const char *data, size_t bytes, struct peer_head *head);
/* Whether the head is the answer with `bytes` bytes from `start` of this version, signed as `reply`. */
int peer_head_is_for(const struct peer_head *head, const char *etag, int64_t size_bytes, int64_t start, int64_t bytes,
                     const char *reply);
#endif
