#include "head.h"

#include <string.h>

enum { TOKEN = 1, VALUE = 2, TARGET = 4, HOST = 8, LETTER_OR_DIGIT = 16 };
static uint8_t kinds[256];

__attribute__((constructor)) static void kinds_fill(void) {
  for (int c = 0x21; c < 0x7f; c++) kinds[c] |= VALUE | TARGET;
  kinds[' '] |= VALUE;
  kinds['\t'] |= VALUE;
  kinds['#'] &= (uint8_t)~TARGET;
  for (int c = '0'; c <= 'z'; c++) {
    int is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (is_letter || (c >= '0' && c <= '9')) kinds[c] |= TOKEN | HOST | LETTER_OR_DIGIT;
  }
  for (const char *c = "!#$%&'*+-.^_`|~"; *c; c++) kinds[(uint8_t)*c] |= TOKEN;
  for (const char *c = "._~%!$&'()*+,;=-"; *c; c++) kinds[(uint8_t)*c] |= HOST;
}

struct field {
  const char *name;
  size_t name_bytes;
  const char *value;
  size_t value_bytes;
};

static int is_named(const struct field *field, const char *name) {
  size_t bytes = strlen(name);
  if (field->name_bytes != bytes) return 0;
  for (size_t i = 0; i < bytes; i++)
    if ((field->name[i] | 0x20) != name[i]) return 0; /* `name` has lower case letters and '-' only */
  return 1;
}

static int has_value(const struct field *field, const char *value) {
  return field->value_bytes == strlen(value) && memcmp(field->value, value, field->value_bytes) == 0;
}

/* host [":" port]; addresses in brackets are left to the control plane. */
static int is_host(const char *value, size_t bytes) {
  size_t at = 0;
  while (at < bytes && kinds[(uint8_t)value[at]] & HOST) at++;
  if (at == 0) return 0;
  if (at == bytes) return 1;
  if (value[at++] != ':' || bytes - at > 5) return 0;
  for (; at < bytes; at++)
    if (value[at] < '0' || value[at] > '9') return 0;
  return 1;
}

/* Up to 18 digits; -1: none, or too many. Moves `*at`. */
static int64_t read_number(const char **at, const char *end) {
  int64_t number = 0;
  const char *start = *at;
  for (; *at < end && **at >= '0' && **at <= '9'; ++*at) {
    if (*at - start >= 18) return -1;
    number = number * 10 + (**at - '0');
  }
  return *at == start ? -1 : number;
}

/* bytes=FIRST-[LAST] */
static int read_range(const struct field *field, struct head *head) {
  const char *at = field->value, *end = at + field->value_bytes;
  if (head->has_range || field->value_bytes < 8 || memcmp(at, "bytes=", 6) != 0) return 0;
  at += 6;
  head->first = read_number(&at, end);
  if (head->first < 0 || at == end || *at++ != '-') return 0;
  head->last = -1;
  if (at < end && ((head->last = read_number(&at, end)) < head->first || at < end)) return 0;
  head->has_range = 1;
  head->range = field->value;
  head->range_bytes = field->value_bytes;
  return 1;
}

/* Keep the value of a field that may come once. */
static int keep(const struct field *field, const char **value, size_t *bytes) {
  if (*value != NULL || field->value_bytes == 0) return 0;
  *value = field->value;
  *bytes = field->value_bytes;
  return 1;
}

/* The first value of a field that changes no answer. */
static int note(const struct field *field, const char **value, size_t *bytes) {
  return *value != NULL || field->value_bytes == 0 || keep(field, value, bytes);
}

/* Whether the plane may answer a request with this field. `head` and `hosts` collect what it needs. */
static int accept_field(const struct field *field, int is_origin_relevant, struct head *head, int *hosts) {
  switch (field->name[0] | 0x20) {
    case 'h': return !is_named(field, "host") || (++*hosts == 1 && is_host(field->value, field->value_bytes));
    case 'r':
      if (is_named(field, "referer")) return note(field, &head->referer, &head->referer_bytes);
      return !is_named(field, "range") || read_range(field, head);
    case 'c':
      if (is_named(field, "connection"))
        return has_value(field, "keep-alive") || has_value(field, "Keep-Alive");
      return !is_named(field, "content-length");
    case 'i':
      if (is_named(field, "if-match")) return keep(field, &head->if_match, &head->if_match_bytes);
      return !is_named(field, "if-none-match") && !is_named(field, "if-range") &&
             !is_named(field, "if-modified-since") && !is_named(field, "if-unmodified-since");
    case 't':
      return !is_named(field, "transfer-encoding") && !is_named(field, "traceparent") &&
             !is_named(field, "trailer") && !is_named(field, "te");
    case 'o': return !is_origin_relevant || !is_named(field, "origin");
    case 'b': return !is_named(field, "baggage");
    case 'e': return !is_named(field, "expect");
    case 'p': return !is_named(field, "proxy-connection");
    case 'u':
      if (is_named(field, "user-agent")) return note(field, &head->agent, &head->agent_bytes);
      return !is_named(field, "upgrade");
    case 'x': return !is_named(field, "x-headrace-hop") || keep(field, &head->hop, &head->hop_bytes);
    default: return 1;
  }
}

/* GET SP target SP HTTP/1.1 CRLF. Returns what follows the line, or NULL. */
static const char *read_request_line(const char *data, const char *end, struct head *head) {
  static const char TAIL[] = " HTTP/1.1\r\n";
  if (end - data < 16 || memcmp(data, "GET /", 5) != 0) return NULL;
  const char *at = head->target = data + 4;
  while (at < end && kinds[(uint8_t)*at] & TARGET) at++;
  head->target_bytes = (size_t)(at - head->target);
  if (head->target_bytes > HEAD_LINE_MAX || (size_t)(end - at) < sizeof TAIL - 1) return NULL;
  return memcmp(at, TAIL, sizeof TAIL - 1) == 0 ? at + sizeof TAIL - 1 : NULL;
}

/* One field line; NULL: not plain. */
static const char *read_field(const char *at, const char *end, struct field *field) {
  field->name = at;
  while (at < end && kinds[(uint8_t)*at] & TOKEN) at++;
  field->name_bytes = (size_t)(at - field->name);
  if (field->name_bytes == 0 || at == end || *at++ != ':') return NULL;
  while (at < end && (*at == ' ' || *at == '\t')) at++;
  field->value = at;
  while (at < end && kinds[(uint8_t)*at] & VALUE) at++;
  const char *last = at;
  while (last > field->value && (last[-1] == ' ' || last[-1] == '\t')) last--;
  field->value_bytes = (size_t)(last - field->value);
  if (at - field->name > HEAD_LINE_MAX || end - at < 2 || at[0] != '\r' || at[1] != '\n') return NULL;
  return at + 2;
}

static enum head_result read_complete(const char *data, const char *end, int is_origin_relevant, struct head *head) {
  const char *at = read_request_line(data, end, head);
  int hosts = 0;
  for (int fields = 0; at != NULL && at != end - 2; fields++) {
    struct field field;
    at = read_field(at, end, &field);
    if (at == NULL || fields >= HEAD_FIELDS_MAX || !accept_field(&field, is_origin_relevant, head, &hosts))
      return HEAD_OTHER;
  }
  int is_conditional = head->if_match != NULL && head->hop == NULL;
  return at != NULL && hosts == 1 && !is_conditional ? HEAD_PLAIN : HEAD_OTHER;
}

enum head_result head_read(const char *data, size_t bytes, int is_origin_relevant, struct head *head) {
  const char *end = memmem(data, bytes, "\r\n\r\n", 4);
  memset(head, 0, sizeof *head);
  if (end != NULL) {
    head->bytes = (size_t)(end - data) + 4;
    return read_complete(data, end + 4, is_origin_relevant, head);
  }
  /* What can not become plain any more is passed on at once: its sender may wait for an answer. */
  size_t start = bytes < 5 ? bytes : 5;
  if (bytes >= HEAD_BYTES_MAX || memcmp(data, "GET /", start) != 0) return HEAD_OTHER;
  if (bytes > HEAD_LINE_MAX && memmem(data, HEAD_LINE_MAX, "\r\n", 2) == NULL) return HEAD_OTHER;
  for (size_t i = 0; i < bytes; i++) {
    int is_return = data[i] == '\r' && (i + 1 == bytes || data[i + 1] == '\n');
    int is_feed = data[i] == '\n' && i > 0 && data[i - 1] == '\r';
    if (!(kinds[(uint8_t)data[i]] & VALUE) && !is_return && !is_feed) return HEAD_OTHER;
  }
  return HEAD_INCOMPLETE;
}
