#include "peer_head.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static const char STATUS_LINE[] = "HTTP/1.1 206 Partial Content\r\n";

static int is_named(const char *name, size_t bytes, const char *expected) {
  return bytes == strlen(expected) && strncasecmp(name, expected, bytes) == 0;
}

static int is_text(const struct peer_text *text, const char *expected) {
  return text->at != NULL && text->bytes == strlen(expected) && memcmp(text->at, expected, text->bytes) == 0;
}

/* Keep the value of a field that must come once. */
static int keep(struct peer_text *text, const char *value, size_t bytes) {
  if (text->at != NULL) return 0;
  *text = (struct peer_text){value, bytes};
  return 1;
}

static int accept_field(struct peer_head *head, const char *name, size_t name_bytes, const char *value, size_t bytes) {
  if (is_named(name, name_bytes, "etag")) return keep(&head->etag, value, bytes);
  if (is_named(name, name_bytes, "content-length")) return keep(&head->length, value, bytes);
  if (is_named(name, name_bytes, "content-range")) return keep(&head->range, value, bytes);
  if (is_named(name, name_bytes, "x-headrace-reply")) return keep(&head->reply, value, bytes);
  if (is_named(name, name_bytes, "transfer-encoding")) return 0;
  if (is_named(name, name_bytes, "connection")) head->is_last |= is_named(value, bytes, "close");
  return 1;
}

/* One field line of visible characters and spaces; NULL: it is none. */
static const char *read_field(const char *at, const char *end, struct peer_head *head) {
  const char *stop = memchr(at, '\r', (size_t)(end - at)), *colon = memchr(at, ':', (size_t)(end - at));
  if (stop == NULL || end - stop < 2 || stop[1] != '\n' || colon == NULL || colon >= stop || colon == at) return NULL;
  for (const char *c = at; c < stop; c++)
    if (*c < ' ' || *c == 0x7f) return NULL;
  const char *value = colon + 1;
  while (value < stop && *value == ' ') value++;
  return accept_field(head, at, (size_t)(colon - at), value, (size_t)(stop - value)) ? stop + 2 : NULL;
}

enum peer_head_result peer_head_read(const char *data, size_t bytes, struct peer_head *head) {
  size_t start = sizeof STATUS_LINE - 1;
  memset(head, 0, sizeof *head);
  if (memcmp(data, STATUS_LINE, bytes < start ? bytes : start) != 0) return PEER_HEAD_OTHER;
  const char *end = memmem(data, bytes < PEER_HEAD_MAX ? bytes : PEER_HEAD_MAX, "\r\n\r\n", 4);
  if (end == NULL) return bytes < PEER_HEAD_MAX ? PEER_HEAD_INCOMPLETE : PEER_HEAD_OTHER;
  head->bytes = (size_t)(end - data) + 4;
  for (const char *at = data + start; at != end + 2;)
    if ((at = read_field(at, end + 2, head)) == NULL) return PEER_HEAD_OTHER;
  return PEER_HEAD_PART;
}

int peer_head_is_for(const struct peer_head *head, const char *etag, int64_t size_bytes, int64_t start, int64_t bytes,
                     const char *reply) {
  char range[80], length[24];
  size_t count = strlen(etag);
  snprintf(range, sizeof range, "bytes %lld-%lld/%lld", (long long)start, (long long)(start + bytes - 1),
           (long long)size_bytes);
  snprintf(length, sizeof length, "%lld", (long long)bytes);
  int is_version = head->etag.at != NULL && head->etag.bytes == count + 2 && head->etag.at[0] == '"' &&
                   memcmp(head->etag.at + 1, etag, count) == 0 && head->etag.at[count + 1] == '"';
  return is_version && is_text(&head->range, range) && is_text(&head->length, length) && is_text(&head->reply, reply);
}
