#include "access_log.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BUFFER_BYTES = 2 * 1024 * 1024, LINE_REST_MAX = 512, ESCAPE_MAX = 6 };

struct access_log {
  pthread_mutex_t lock; /* answers may end in the control plane */
  int is_json;
  char *buffers[2];
  int current;
  size_t bytes;
  int64_t dropped;
  int64_t second; /* of `date` */
  char date[40];
};

struct access_log *access_log_open(int is_json) {
  struct access_log *log = calloc(1, sizeof *log);
  if (log == NULL) return NULL;
  pthread_mutex_init(&log->lock, NULL);
  log->is_json = is_json;
  for (int i = 0; i < 2; i++)
    if ((log->buffers[i] = malloc(BUFFER_BYTES)) == NULL) {
      access_log_close(log);
      return NULL;
    }
  return log;
}

void access_log_close(struct access_log *log) {
  free(log->buffers[0]);
  free(log->buffers[1]);
  pthread_mutex_destroy(&log->lock);
  free(log);
}

struct log_entry *log_entry_make(struct access_log *log, const struct head *head) {
  struct text texts[4] = {head->target, head->range, head->referer, head->agent};
  size_t all = 0;
  if (log == NULL) return NULL;
  for (int i = 0; i < 4; i++) {
    if (texts[i].bytes > LOG_TEXT_MAX) texts[i].bytes = LOG_TEXT_MAX;
    all += texts[i].bytes;
  }
  struct log_entry *entry = malloc(sizeof *entry + all);
  if (entry == NULL) return NULL;
  memset(entry, 0, sizeof *entry);
  char *at = entry->texts;
  for (int i = 0; i < 4; i++) {
    entry->counts[i] = (uint16_t)texts[i].bytes;
    if (texts[i].bytes) memcpy(at, texts[i].at, texts[i].bytes);
    at += texts[i].bytes;
  }
  return entry;
}

void log_entry_free(struct log_entry *entry) { free(entry); }

static char *put(char *at, const char *text) {
  size_t count = strlen(text);
  memcpy(at, text, count);
  return at + count;
}

/* Escape what could end a value or a line. The value of a query parameter `s`, the signature, becomes `*`. */
static char *put_escaped(char *at, const char *text, size_t count, int is_json) {
  static const char DIGITS[] = "0123456789abcdef";
  int is_query = 0;
  for (size_t i = 0; i < count; i++) {
    unsigned char c = (unsigned char)text[i];
    if (c >= ' ' && c < 0x7f && c != '"' && c != '\\') {
      *at++ = (char)c;
    } else if (is_json && (c == '"' || c == '\\')) {
      *at++ = '\\';
      *at++ = (char)c;
    } else {
      at = put(at, is_json ? "\\u00" : "\\x");
      *at++ = DIGITS[c >> 4];
      *at++ = DIGITS[c & 15];
    }
    is_query |= c == '?';
    if (is_query && (c == '?' || c == '&') && i + 2 < count && text[i + 1] == 's' && text[i + 2] == '=') {
      at = put(at, "s=*");
      for (i += 2; i + 1 < count && text[i + 1] != '&';) i++;
    }
  }
  return at;
}

/* The value of a combined log: - for none. */
static char *put_field(char *at, const char *text, size_t count, int is_json) {
  return count == 0 && !is_json ? put(at, "-") : put_escaped(at, text, count, is_json);
}

static void set_date(struct access_log *log, int64_t second) {
  if (second == log->second) return;
  time_t now = (time_t)second;
  struct tm utc;
  gmtime_r(&now, &utc);
  strftime(log->date, sizeof log->date, log->is_json ? "%Y-%m-%dT%H:%M:%S" : "%d/%b/%Y:%H:%M:%S +0000", &utc);
  log->second = second;
}

static void write_address(const struct address *address, char into[INET6_ADDRSTRLEN]) {
  static const uint8_t IPV4[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  int is_ipv4 = memcmp(address->bytes, IPV4, sizeof IPV4) == 0;
  strcpy(into, "-");
  if (address->is_known)
    inet_ntop(is_ipv4 ? AF_INET : AF_INET6, address->bytes + (is_ipv4 ? 12 : 0), into, INET6_ADDRSTRLEN);
}

static char *write_line(struct access_log *log, const struct log_entry *entry, int64_t bytes, int64_t now_ns, char *at) {
  const char *target = entry->texts, *range = target + entry->counts[0], *referer = range + entry->counts[1],
             *agent = referer + entry->counts[2];
  char client[INET6_ADDRSTRLEN];
  int status = entry->is_part ? 206 : 200, is_json = log->is_json;
  write_address(&entry->address, client);
  set_date(log, entry->unix_ms / 1000);
  if (is_json)
    at += sprintf(at, "{\"time\":\"%s.%03dZ\",\"client\":\"%s\",\"method\":\"GET\",\"path\":\"", log->date,
                  (int)(entry->unix_ms % 1000), client);
  else
    at += sprintf(at, "%s - - [%s] \"GET ", client, log->date);
  at = put_escaped(at, target, entry->counts[0], is_json);
  if (!is_json) {
    at += sprintf(at, " HTTP/1.1\" %d %lld \"", status, (long long)bytes);
    at = put(put_field(at, referer, entry->counts[2], 0), "\" \"");
    return put(put_field(at, agent, entry->counts[3], 0), "\"\n");
  }
  at += sprintf(at, "\",\"status\":%d,\"bytes\":%lld,\"range\":\"", status, (long long)bytes);
  at = put(put_field(at, range, entry->counts[1], 1), "\",\"referer\":\"");
  at = put(put_field(at, referer, entry->counts[2], 1), "\",\"user_agent\":\"");
  at = put_field(at, agent, entry->counts[3], 1);
  int64_t spent_us = (now_ns - entry->began_ns) / 1000;
  return at + sprintf(at, "\",\"duration_s\":%lld.%06d,\"cache\":\"%s\",\"plane\":\"native\"}\n", (long long)(spent_us / 1000000),
                      (int)(spent_us % 1000000), entry->is_of_peer ? "headrace; fwd=miss; detail=peer" : "headrace; hit");
}

void access_log_end(struct access_log *log, struct log_entry *entry, int64_t bytes) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  size_t texts = 0;
  for (int i = 0; i < 4; i++) texts += entry->counts[i];
  pthread_mutex_lock(&log->lock);
  if (log->bytes + texts * ESCAPE_MAX + LINE_REST_MAX <= BUFFER_BYTES) {
    char *buffer = log->buffers[log->current];
    int64_t now_ns = now.tv_sec * 1000000000ll + now.tv_nsec;
    log->bytes = (size_t)(write_line(log, entry, entry->sent + bytes, now_ns, buffer + log->bytes) - buffer);
  } else {
    log->dropped++;
  }
  pthread_mutex_unlock(&log->lock);
  free(entry);
}

const char *access_log_take(struct access_log *log, int64_t *bytes, int64_t *dropped) {
  pthread_mutex_lock(&log->lock);
  const char *taken = log->buffers[log->current];
  *bytes = (int64_t)log->bytes;
  *dropped = log->dropped;
  log->current = !log->current;
  log->bytes = 0;
  log->dropped = 0;
  pthread_mutex_unlock(&log->lock);
  return taken;
}
