#include "peer_head.h"

#include <stdio.h>

#include "head.h"

static const char STATUS_LINE[] = "HTTP/1.1 206 Partial Content\r\n";

/* Keep the value of a field that must come once. */
static int keep(struct text *value, const struct field *field) {
  if (value->at != NULL) return 0;
  *value = field->value;
  return 1;
}

static int accept_field(struct peer_head *head, const struct field *field) {
  if (text_is_named(field->name, "etag")) return keep(&head->etag, field);
  if (text_is_named(field->name, "content-length")) return keep(&head->length, field);
  if (text_is_named(field->name, "content-range")) return keep(&head->range, field);
  if (text_is_named(field->name, "x-headrace-reply")) return keep(&head->reply, field);
  if (text_is_named(field->name, "transfer-encoding")) return 0;
  if (text_is_named(field->name, "connection")) head->is_last |= text_is_named(field->value, "close");
  return 1;
}

enum peer_head_result peer_head_read(const char *data, size_t bytes, struct peer_head *head) {
  size_t start = sizeof STATUS_LINE - 1;
  struct field field;
  memset(head, 0, sizeof *head);
  if (memcmp(data, STATUS_LINE, bytes < start ? bytes : start) != 0) return PEER_HEAD_OTHER;
  const char *end = memmem(data, bytes < PEER_HEAD_MAX ? bytes : PEER_HEAD_MAX, "\r\n\r\n", 4);
  if (end == NULL) return bytes < PEER_HEAD_MAX ? PEER_HEAD_INCOMPLETE : PEER_HEAD_OTHER;
  head->bytes = (size_t)(end - data) + 4;
  for (const char *at = data + start; at != end + 2;) {
    at = field_read(at, end + 2, &field);
    if (at == NULL || !accept_field(head, &field)) return PEER_HEAD_OTHER;
  }
  return PEER_HEAD_PART;
}

int peer_head_is_for(const struct peer_head *head, const char *etag, int64_t size_bytes, int64_t start, int64_t bytes,
                     const char *reply) {
  char range[80], length[24];
  snprintf(range, sizeof range, "bytes %lld-%lld/%lld", (long long)start, (long long)(start + bytes - 1),
           (long long)size_bytes);
  snprintf(length, sizeof length, "%lld", (long long)bytes);
  return text_is_quoted(head->etag, etag) && text_is(head->range, range) && text_is(head->length, length) &&
         text_is(head->reply, reply);
}
