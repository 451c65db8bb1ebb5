#include "hop.h"

#include <stdio.h>

enum { KEY_ID = 1, FROM, TO, MOMENT, CONNECTION, COUNTER, GENERATION, MAC, PARTS };
enum { DIGITS_MAX = 16, CONNECTION_DIGITS = 16, MESSAGE_MAX = 12 * 1024, PROBES = 16 };

/* The HMAC of a message as 64 hex digits. */
static void sign(const struct hmac_key *key, const char *message, int bytes, char out[HOP_MAC]) {
  uint8_t digest[SHA256_BYTES];
  hmac_sha256(key, (const uint8_t *)message, (size_t)bytes, digest);
  for (int i = 0; i < SHA256_BYTES; i++) {
    out[2 * i] = "0123456789abcdef"[digest[i] >> 4];
    out[2 * i + 1] = "0123456789abcdef"[digest[i] & 15];
  }
}

static int read_decimal(struct text part, int64_t *number) {
  const char *at = part.at, *end = at + part.bytes;
  *number = text_read_number(&at, end, DIGITS_MAX);
  return *number >= 0 && at == end;
}

static int read_connection(struct text part, uint64_t *number) {
  *number = 0;
  if (part.bytes != CONNECTION_DIGITS) return 0;
  for (size_t i = 0; i < part.bytes; i++) {
    char c = part.at[i];
    int is_digit = c >= '0' && c <= '9';
    if (!is_digit && !(c >= 'a' && c <= 'f')) return 0;
    *number = *number << 4 | (uint64_t)(is_digit ? c - '0' : c - 'a' + 10);
  }
  return 1;
}

/* Split the value at its semicolons; 0: there are not nine parts. */
static int split(struct text value, struct text parts[PARTS]) {
  int count = 0;
  parts[0] = (struct text){value.at, 0};
  for (const char *at = value.at; at < value.at + value.bytes; at++) {
    if (*at != ';') parts[count].bytes++;
    else if (++count == PARTS) return 0;
    else parts[count] = (struct text){at + 1, 0};
  }
  return count == PARTS - 1;
}

static int is_signed(const struct hmac_key *key, const struct head *head, struct text mac) {
  char message[MESSAGE_MAX], expected[HOP_MAC];
  int text_bytes = (int)(mac.at - head->hop.at) - 1;
  int bytes = snprintf(message, sizeof message, "hop\n%.*s\nGET\n%.*s\n%.*s\n%.*s", text_bytes, head->hop.at,
                       (int)head->target.bytes, head->target.at, (int)head->range.bytes,
                       head->range.bytes ? head->range.at : "", (int)head->if_match.bytes,
                       head->if_match.bytes ? head->if_match.at : "");
  if (bytes <= 0 || (size_t)bytes >= sizeof message || mac.bytes != HOP_MAC) return 0;
  sign(key, message, bytes, expected);
  return is_equal_secret(expected, mac.at, HOP_MAC);
}

int hop_read(const struct hop_keys *keys, const struct head *head, struct hop *hop) {
  struct text parts[PARTS];
  int64_t counter;
  if (keys == NULL || !split(head->hop, parts) || !text_is(parts[0], "1")) return 0;
  if (!read_decimal(parts[MOMENT], &hop->moment_ms) || !read_connection(parts[CONNECTION], &hop->connection) ||
      !read_decimal(parts[COUNTER], &counter) || !read_decimal(parts[GENERATION], &hop->generation))
    return 0;
  hop->counter = (uint64_t)counter;
  hop->mac = parts[MAC].at;
  hop->key = parts[KEY_ID].bytes == URL_KEY_ID ? url_find_key(&keys->keys, parts[KEY_ID].at) : NULL;
  /* A sender of the same name is a fault that the control plane reports. */
  return hop->key != NULL && text_is(parts[TO], keys->name) && !text_is(parts[FROM], keys->name) &&
         is_signed(hop->key, head, parts[MAC]);
}

int hop_advance(struct hop_counters *counters, uint64_t connection, uint64_t counter, int64_t now_ms) {
  struct hop_counter *found = NULL, *unused = NULL;
  pthread_mutex_lock(&counters->lock);
  /* `connection` is random, so its low bits spread evenly. */
  for (uint64_t i = 0; i < PROBES && found == NULL; i++) {
    struct hop_counter *entry = &counters->table[(connection + i) % HOP_CONNECTIONS];
    /* Twice the window covers both clocks: older requests are refused by their time. */
    int is_unused = entry->seen_ms == 0 || now_ms - entry->seen_ms > 2 * HOP_WINDOW_MS;
    if (entry->seen_ms != 0 && entry->connection == connection) found = entry;
    else if (is_unused && unused == NULL) unused = entry;
  }
  struct hop_counter *entry = found != NULL ? found : unused;
  int is_accepted = entry != NULL && counter > (found != NULL ? found->counter : 0);
  if (is_accepted) *entry = (struct hop_counter){connection, counter, now_ms};
  pthread_mutex_unlock(&counters->lock);
  return is_accepted;
}

int hop_sign(const struct hop_keys *keys, const char *to, const char *target, const char *range,
             const char *if_match, struct hop *hop, char out[HOP_VALUE_MAX]) {
  char message[MESSAGE_MAX];
  if (keys == NULL || keys->keys.count == 0) return 0;
  int bytes = snprintf(out, HOP_VALUE_MAX, "1;%.*s;%s;%s;%lld;%016llx;%llu;%lld", URL_KEY_ID, keys->keys.ids[0],
                       keys->name, to, (long long)hop->moment_ms, (unsigned long long)hop->connection,
                       (unsigned long long)hop->counter, (long long)hop->generation);
  if (bytes <= 0 || bytes + HOP_MAC + 2 > HOP_VALUE_MAX) return 0;
  int covered = snprintf(message, sizeof message, "hop\n%s\nGET\n%s\n%s\n%s", out, target, range, if_match);
  if (covered <= 0 || (size_t)covered >= sizeof message) return 0;
  hop->key = &keys->keys.keys[0];
  out[bytes] = ';';
  hop->mac = out + bytes + 1;
  sign(hop->key, message, covered, out + bytes + 1);
  out[bytes + 1 + HOP_MAC] = 0;
  return 1;
}

void hop_sign_reply(const struct hop *hop, const char *etag, int64_t start, int64_t bytes, char out[HOP_MAC + 1]) {
  char message[MESSAGE_MAX];
  int count = snprintf(message, sizeof message, "reply\n%.*s\n%s\n%lld\n%lld", HOP_MAC, hop->mac, etag, (long long)start,
                       (long long)bytes);
  sign(hop->key, message, count, out);
  out[HOP_MAC] = 0;
}
