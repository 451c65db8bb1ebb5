/* Requests of other nodes of the cluster, authenticated in both directions (media/cluster/hop.py).

     X-Headrace-Hop: 1;<key id>;<from>;<to>;<Unix ms>;<connection>;<counter>;<generation>;<HMAC>

   The field is checked here and its answer is signed. A field that is not valid is passed on to the
   control plane, which refuses and reports it. Both planes share the counters that reject replays. */
#ifndef HEADRACE_HOP_H
#define HEADRACE_HOP_H

#include <pthread.h>
#include <stdint.h>

#include "head.h"
#include "url.h"

#define HOP_NAME_MAX 64
#define HOP_MAC 64
#define HOP_VALUE_MAX 400
#define HOP_WINDOW_MS 30000
#define HOP_CONNECTIONS 16384 /* remembered; a power of two */

struct hop_keys {
  struct url_keys keys;
  char name[HOP_NAME_MAX + 1]; /* of this node */
};

struct hop_counter {
  uint64_t connection;
  uint64_t counter;
  int64_t seen_ms;
};

/* The newest counter of each connection of a peer. */
struct hop_counters {
  pthread_mutex_t lock;
  struct hop_counter table[HOP_CONNECTIONS];
};

struct hop {
  const struct hmac_key *key;
  const char *mac;
  uint64_t connection, counter;
  int64_t moment_ms, generation;
};

/* Whether the hop field of `head` is signed by a peer for this node. */
int hop_read(const struct hop_keys *keys, const struct head *head, struct hop *hop);
/* Record a counter; 0: it was used before, or too many connections are in use at once. */
int hop_advance(struct hop_counters *counters, uint64_t connection, uint64_t counter, int64_t now_ms);
/* Write the field's value for a request of this node to `to` into `out`, signed with the first key. The
   hop then knows what its answer must be signed with; its `mac` points into `out`. 0: too long. */
int hop_sign(const struct hop_keys *keys, const char *to, const char *target, const char *range,
             const char *if_match, struct hop *hop, char out[HOP_VALUE_MAX]);
/* The value of X-Headrace-Reply, 64 hex digits and a terminator. */
void hop_sign_reply(const struct hop *hop, const char *etag, int64_t start, int64_t bytes, char out[HOP_MAC + 1]);
#endif
