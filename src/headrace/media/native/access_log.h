/* The access log: one line for each answer that the plane began (media/worker/access_log.py).

   A line is formatted when its answer ends, into one of two buffers; the control plane writes the
   other one to the file. When a buffer is full, lines are dropped and counted: the loop never waits
   for a disk. */
#ifndef HEADRACE_ACCESS_LOG_H
#define HEADRACE_ACCESS_LOG_H

#include "head.h"
#include "url.h"

#define LOG_TEXT_MAX 1024 /* characters of a target or a field; the rest is cut */

struct access_log;

/* An answer that has not ended. Its texts follow: target, range, referer, user agent. */
struct log_entry {
  int64_t began_ns, unix_ms;
  int64_t start; /* of the body */
  int64_t sent;  /* bytes of the body that another thread has sent before the end */
  struct address address;
  uint8_t is_begun; /* its first byte was sent: otherwise it is no answer */
  uint8_t is_part, is_of_peer;
  uint16_t counts[4];
  char texts[];
};

/* NULL: without a log, or without memory. */
struct log_entry *log_entry_make(struct access_log *log, const struct head *head);
/* Drop an entry that has no line. */
void log_entry_free(struct log_entry *entry);

/* Functions for the control plane. */
struct access_log *access_log_open(int is_json);
void access_log_close(struct access_log *log);
/* Write the line of an answer whose last `bytes` of the body were sent now, and free the entry. */
void access_log_end(struct access_log *log, struct log_entry *entry, int64_t bytes);
/* The lines since the last call, valid until the next one; sets `bytes` and the number of `dropped` ones. */
const char *access_log_take(struct access_log *log, int64_t *bytes, int64_t *dropped);
#endif
