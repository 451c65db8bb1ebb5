/* The client's side of an answer with bytes of another node; see peers.h. */
#ifndef HEADRACE_FETCH_H
#define HEADRACE_FETCH_H

#include "loop.h"

/* Begin the answer of `connection`, whose object, range and rate are set. `head` goes before its
   first bytes. 0: it must be handed over. */
int fetch_begin(struct plane *plane, struct connection *connection, const char *head, size_t head_bytes,
                size_t request_bytes, int is_part);
/* Send received bytes, and request the next block. */
enum step fetch_send(struct plane *plane, struct connection *connection);
/* The peer failed: hand the client over. */
void fetch_fail(struct plane *plane, struct connection *connection);
#endif
