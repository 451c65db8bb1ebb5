/* A part of a received head: not terminated, and in memory of its owner. */
#ifndef HEADRACE_TEXT_H
#define HEADRACE_TEXT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct text {
  const char *at; /* NULL: there is none */
  size_t bytes;
};

static inline int text_is(struct text text, const char *expected) {
  return text.bytes == strlen(expected) && memcmp(text.at, expected, text.bytes) == 0;
}

/* Whether it is `etag` in quotation marks. */
static inline int text_is_quoted(struct text text, const char *etag) {
  size_t bytes = strlen(etag);
  return text.bytes == bytes + 2 && text.at[0] == '"' && memcmp(text.at + 1, etag, bytes) == 0 && text.at[bytes + 1] == '"';
}

/* The number of 1 to `digits_max` digits (at most 18) at `*at`, which moves behind it; -1: there is none. */
static inline int64_t text_read_number(const char **at, const char *end, int digits_max) {
  const char *start = *at;
  int64_t number = 0;
  for (; *at < end && **at >= '0' && **at <= '9'; ++*at) {
    if (*at - start == digits_max) return -1;
    number = number * 10 + (**at - '0');
  }
  return *at == start ? -1 : number;
}

/* Whether both are equal, in a time that does not depend on their first difference. */
static inline int is_equal_secret(const char *left, const char *right, size_t bytes) {
  unsigned char differs = 0;
  for (size_t i = 0; i < bytes; i++) differs |= (unsigned char)(left[i] ^ right[i]);
  return differs == 0;
}
#endif
