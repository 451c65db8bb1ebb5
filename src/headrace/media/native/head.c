#include "head.h"

enum { TOKEN = 1, VALUE = 2, TARGET = 4, HOST = 8, LETTER_OR_DIGIT = 16 };
enum { RANGE_DIGITS_MAX = 18 };
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

int text_is_named(struct text text, const char *expected) {
  size_t bytes = strlen(expected);
  if (text.bytes != bytes) return 0;
  for (size_t i = 0; i < bytes; i++)
    if ((text.at[i] | 0x20) != expected[i]) return 0;
  return 1;
}

/* host [":" port]; addresses in brackets are left to the control plane. */
static int is_host(struct text text) {
  const char *value = text.at;
  size_t at = 0, bytes = text.bytes;
  while (at < bytes && kinds[(uint8_t)value[at]] & HOST) at++;
  if (at == 0) return 0;
  if (at == bytes) return 1;
  if (value[at++] != ':' || bytes - at > 5) return 0;
  for (; at < bytes; at++)
    if (value[at] < '0' || value[at] > '9') return 0;
  return 1;
}

/* bytes=FIRST-[LAST] */
static int read_range(const struct field *field, struct head *head) {
  const char *at = field->value.at, *end = at + field->value.bytes;
  if (head->has_range || field->value.bytes < 8 || memcmp(at, "bytes=", 6) != 0) return 0;
  at += 6;
  head->first = text_read_number(&at, end, RANGE_DIGITS_MAX);
  if (head->first < 0 || at == end || *at++ != '-') return 0;
  head->last = -1;
  if (at < end && ((head->last = text_read_number(&at, end, RANGE_DIGITS_MAX)) < head->first || at < end)) return 0;
  head->has_range = 1;
  head->range = field->value;
  return 1;
}

/* Keep the value of a field that may come once. */
static int keep(const struct field *field, struct text *value) {
  if (value->at != NULL || field->value.bytes == 0) return 0;
  *value = field->value;
  return 1;
}

/* The first value of a field that changes no answer. */
static int note(const struct field *field, struct text *value) {
  return value->at != NULL || field->value.bytes == 0 || keep(field, value);
}

/* Whether the plane may answer a request with this field. `head` and `hosts` collect what it needs. */
static int accept_field(const struct field *field, int is_origin_relevant, struct head *head, int *hosts) {
  struct text name = field->name;
  switch (name.at[0] | 0x20) {
    case 'h': return !text_is_named(name, "host") || (++*hosts == 1 && is_host(field->value));
    case 'r':
      if (text_is_named(name, "referer")) return note(field, &head->referer);
      return !text_is_named(name, "range") || read_range(field, head);
    case 'c':
      if (text_is_named(name, "connection"))
        return text_is(field->value, "keep-alive") || text_is(field->value, "Keep-Alive");
      return !text_is_named(name, "content-length");
    case 'i':
      if (text_is_named(name, "if-match")) return keep(field, &head->if_match);
      return !text_is_named(name, "if-none-match") && !text_is_named(name, "if-range") &&
             !text_is_named(name, "if-modified-since") && !text_is_named(name, "if-unmodified-since");
    case 't':
      return !text_is_named(name, "transfer-encoding") && !text_is_named(name, "traceparent") &&
             !text_is_named(name, "trailer") && !text_is_named(name, "te");
    case 'o': return !is_origin_relevant || !text_is_named(name, "origin");
    case 'b': return !text_is_named(name, "baggage");
    case 'e': return !text_is_named(name, "expect");
    case 'p': return !text_is_named(name, "proxy-connection");
    case 'u':
      if (text_is_named(name, "user-agent")) return note(field, &head->agent);
      return !text_is_named(name, "upgrade");
    case 'x': return !text_is_named(name, "x-headrace-hop") || keep(field, &head->hop);
    default: return 1;
  }
}

/* GET SP target SP HTTP/1.1 CRLF. Returns what follows the line, or NULL. */
static const char *read_request_line(const char *data, const char *end, struct head *head) {
  static const char TAIL[] = " HTTP/1.1\r\n";
  if (end - data < 16 || memcmp(data, "GET /", 5) != 0) return NULL;
  const char *at = head->target.at = data + 4;
  while (at < end && kinds[(uint8_t)*at] & TARGET) at++;
  head->target.bytes = (size_t)(at - head->target.at);
  if (head->target.bytes > HEAD_LINE_MAX || (size_t)(end - at) < sizeof TAIL - 1) return NULL;
  return memcmp(at, TAIL, sizeof TAIL - 1) == 0 ? at + sizeof TAIL - 1 : NULL;
}

const char *field_read(const char *at, const char *end, struct field *field) {
  field->name.at = at;
  while (at < end && kinds[(uint8_t)*at] & TOKEN) at++;
  field->name.bytes = (size_t)(at - field->name.at);
  if (field->name.bytes == 0 || at == end || *at++ != ':') return NULL;
  while (at < end && (*at == ' ' || *at == '\t')) at++;
  field->value.at = at;
  while (at < end && kinds[(uint8_t)*at] & VALUE) at++;
  const char *last = at;
  while (last > field->value.at && (last[-1] == ' ' || last[-1] == '\t')) last--;
  field->value.bytes = (size_t)(last - field->value.at);
  if (at - field->name.at > HEAD_LINE_MAX || end - at < 2 || at[0] != '\r' || at[1] != '\n') return NULL;
  return at + 2;
}

static enum head_result read_complete(const char *data, const char *end, int is_origin_relevant, struct head *head) {
  const char *at = read_request_line(data, end, head);
  int hosts = 0;
  for (int fields = 0; at != NULL && at != end - 2; fields++) {
    struct field field;
    at = field_read(at, end, &field);
    if (at == NULL || fields >= HEAD_FIELDS_MAX || !accept_field(&field, is_origin_relevant, head, &hosts))
      return HEAD_OTHER;
  }
  int is_conditional = head->if_match.at != NULL && head->hop.at == NULL;
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
