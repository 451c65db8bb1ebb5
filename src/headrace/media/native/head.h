/* The heads that the plane answers itself: a strict subset of HTTP/1.1.

   A head is plain if every reading of RFC 9112 agrees on it: GET, an origin-form target, one valid
   Host, fields of token names and visible ASCII values. Whatever else it has (a body, a condition, a
   trace, an unusual range, a fault) is not judged here: the control plane answers it. A request of
   another node has a hop field and may have an If-Match. */
#ifndef HEADRACE_HEAD_H
#define HEADRACE_HEAD_H

#include <stdint.h>

#include "text.h"

#define HEAD_BYTES_MAX (16 * 1024)
#define HEAD_LINE_MAX (8 * 1024)
#define HEAD_FIELDS_MAX 100

enum head_result { HEAD_INCOMPLETE, HEAD_PLAIN, HEAD_OTHER };

struct head {
  struct text target; /* from "/" on */
  size_t bytes;      /* of the whole head with its empty line */
  int has_range;     /* `first` and `last` are set */
  int64_t first;
  int64_t last; /* -1: up to the end */
  struct text range; /* the value of the field */
  struct text hop;   /* the value of X-Headrace-Hop; none: a client's request */
  struct text if_match;
  struct text referer, agent; /* for the access log */
};

struct field {
  struct text name, value;
};

/* Read one head at the start of `data`. With `is_origin_relevant` a head with an Origin field is
   HEAD_OTHER. */
enum head_result head_read(const char *data, size_t bytes, int is_origin_relevant, struct head *head);
/* Read the field line at `at`. Returns what follows it; NULL: it is not plain. */
const char *field_read(const char *at, const char *end, struct field *field);
/* Whether a name or value is `expected`, which has lower case letters and '-' only, in any case. */
int text_is_named(struct text text, const char *expected);
#endif
