/* Requests in, answers out. A connection is READING until a plain head is complete, then SENDING. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <sys/epoll.h>

#include "loop.h"
#include "stream.h"

struct answer {
  struct url url;
  struct hop hop;
  int is_hop;
  struct object *object;
  struct frame frame; /* of the first block */
  int file;           /* of the plane's open files; -1: the object is in blocks */
  int64_t start, end;
  int is_part;
};

enum step connection_lose(struct plane *plane, struct connection *connection) {
  connection_cut(plane, connection, &plane->counters.cuts_client);
  return STEP_ENDED;
}

enum step connection_hand_over(struct plane *plane, struct connection *connection, int kind, const void *data,
                               size_t bytes) {
  const struct object *object = kind == PLANE_BODY ? connection->object : NULL;
  size_t texts = object != NULL ? object->key_bytes + object->version_bytes + 2 : 0;
  struct queued_event *queued = malloc(sizeof *queued + bytes + texts);
  if (queued == NULL) return connection_lose(plane, connection);
  *queued = (struct queued_event){.event = {.kind = kind, .fd = connection->fd, .file = connection->file}};
  if (bytes) memcpy(queued->bytes, data, bytes);
  queued->event.data = queued->bytes;
  queued->event.data_bytes = (int32_t)bytes;
  queued->event.sent_bytes = connection->sent_bytes;
  if (object != NULL) {
    char *key = (char *)queued->bytes + bytes, *version = key + object->key_bytes + 1;
    queued->event.key = memcpy(key, object->key, object->key_bytes + 1);
    queued->event.version = memcpy(version, object->version, object->version_bytes + 1);
    queued->event.start = connection->start;
    queued->event.left = connection->left;
    queued->event.rate = connection->rate.per_s;
    queued->event.peer = object->peer;
    queued->event.entry = connection->entry;
    if (connection->entry != NULL) connection->entry->sent = connection->start - connection->entry->start;
    connection->entry = NULL;
  }
  if (connection->tls != NULL) queued->event.tls = stream_hand_over(plane, connection);
  epoll_ctl(plane->epoll, EPOLL_CTL_DEL, connection->fd, NULL);
  connection->fd = connection->file = -1; /* they belong to the event now */
  plane->handed_over++;
  plane->counters.handed_over++;
  connection_close(plane, connection);
  plane_push_event(plane, queued);
  return STEP_ENDED;
}

/* Whether the sender may read the object: a client by its URL, another node by its hop field. */
static int admit(struct plane *plane, struct connection *connection, const struct head *head, struct answer *answer) {
  struct text target = head->target;
  answer->is_hop = head->hop.at != NULL;
  if (answer->is_hop)
    return url_read_key(target.at, target.bytes, &answer->url) && hop_read(plane->hop_keys, head, &answer->hop);
  if (!url_read(target.at, target.bytes, plane->keys, plane->config.is_signature_required, plane->now_s, &answer->url))
    return 0;
  if (answer->url.network.at != NULL && !connection->address.is_known)
    address_read(connection->fd, &connection->address);
  return url_allows(&answer->url, &connection->address);
}

/* Whether the description of the object answers this sender. */
static int may_answer(const struct plane *plane, const struct head *head, const struct answer *answer) {
  const struct object *object = answer->object;
  if (object == NULL || plane->now_ms >= object->expires_ms) return 0;
  if (!answer->is_hop) return !object->is_for_peers;
  if (object->peer) return 0; /* its blocks are not here */
  int is_matched = head->if_match.at == NULL || text_is_quoted(head->if_match, object->etag);
  return is_matched && answer->hop.generation <= object->generation;
}

/* The bytes of the answer in its first block. */
static int64_t first_bytes(const struct answer *answer) {
  int64_t count = answer->end - answer->start, room = BLOCK_BYTES - answer->start % BLOCK_BYTES;
  return count < room ? count : room;
}

/* Whether the object, its range and its first block can be sent now. */
static int prepare(struct plane *plane, struct connection *connection, const struct head *head,
                   struct answer *answer) {
  int is_open = plane->config.folder != NULL || (plane->blocks != NULL && !plane->is_outdated);
  answer->file = -1;
  if (plane->is_stopping || !is_open || plane->keys == NULL) return 0;
  if (!admit(plane, connection, head, answer)) return 0;
  struct object *object = answer->object = objects_find(&plane->objects, answer->url.key.at, answer->url.key.bytes);
  if (!may_answer(plane, head, answer)) return 0;
  answer->is_part = head->has_range;
  answer->start = head->has_range ? head->first : 0;
  answer->end = head->has_range && head->last >= 0 && head->last < object->size_bytes ? head->last + 1 : object->size_bytes;
  if (answer->start >= answer->end) return 0;
  if (object->peer) return 1;
  int64_t count = first_bytes(answer);
  if (plane->config.folder != NULL) {
    answer->file = files_open(&plane->files, plane->config.folder, object, plane->now_ms);
    return answer->file >= 0 && file_is_resident(answer->file, answer->start, count);
  }
  return blocks_find(plane->blocks, object, answer->start / BLOCK_BYTES, &answer->frame) &&
         answer->frame.length >= answer->start % BLOCK_BYTES + count &&
         frame_is_resident(&answer->frame, answer->start % BLOCK_BYTES, count);
}

/* The same lines in the same order as `object_head` of media/answers.py. */
static size_t write_head(struct plane *plane, const struct answer *answer, char *into) {
  const struct object *object = answer->object;
  int64_t fresh_s = object->fresh_s;
  int is_signed = answer->url.expires_s > 0;
  if (is_signed && answer->url.expires_s - plane->now_s < fresh_s) fresh_s = answer->url.expires_s - plane->now_s;
  char fresh[64];
  snprintf(fresh, sizeof fresh, "%s, max-age=%lld%s", is_signed ? "private" : "public", (long long)fresh_s,
           object->is_immutable ? ", immutable" : "");
  int bytes = snprintf(into, HEAD_OUT_MAX, "HTTP/1.1 %s\r\nDate: %s\r\n%sCache-Control: %s\r\n%sContent-Length: %lld\r\n",
                       answer->is_part ? "206 Partial Content" : "200 OK", plane->date, object->lines,
                       is_signed || !*object->cache_control ? fresh : object->cache_control, object->tail,
                       (long long)(answer->end - answer->start));
  if (bytes <= 0 || bytes >= HEAD_OUT_MAX) return 0;
  size_t at = (size_t)bytes;
  if (answer->is_part)
    at += (size_t)snprintf(into + at, HEAD_OUT_MAX - at, "Content-Range: bytes %lld-%lld/%lld\r\n", (long long)answer->start,
                           (long long)answer->end - 1, (long long)object->size_bytes);
  if (answer->is_hop && at < HEAD_OUT_MAX) {
    char reply[HOP_MAC + 1];
    hop_sign_reply(&answer->hop, object->etag, answer->start, answer->end - answer->start, reply);
    at += (size_t)snprintf(into + at, HEAD_OUT_MAX - at, "X-Headrace-Reply: %s\r\n", reply);
  }
  if (at + 3 > HEAD_OUT_MAX) return 0;
  memcpy(into + at, "\r\n", 2);
  return at + 2;
}

void count_time(uint64_t *buckets, uint64_t *sum_ns, int64_t waited_ns) {
  static const int64_t BOUNDS_NS[PLANE_BUCKETS] = {25000,    50000,    100000,    250000,    500000,     1000000,    2500000,
                                                   5000000, 10000000, 25000000, 100000000, 500000000, 2500000000, 10000000000};
  int bucket = 0;
  while (bucket < PLANE_BUCKETS && waited_ns > BOUNDS_NS[bucket]) bucket++;
  buckets[bucket]++;
  *sum_ns += (uint64_t)waited_ns;
}

void answer_count(struct plane *plane, int is_part, int64_t began_ns) {
  count_time(plane->counters.first_bytes, &plane->counters.first_bytes_ns, loop_now_ns() - began_ns);
  if (is_part) plane->counters.answers_206++;
  else plane->counters.answers_200++;
}

/* A quarter of a second, but enough for a small answer without a pause. */
int64_t rate_burst(const struct rate *rate) {
  int64_t burst = rate->per_s / 4;
  return burst > BURST_BYTES_MIN ? burst : BURST_BYTES_MIN;
}

/* The bytes that may be sent now; 0: the connection pauses until half a burst may be sent. */
int64_t rate_allow(struct plane *plane, struct connection *connection, int64_t count) {
  struct rate *rate = &connection->rate;
  if (rate->per_s == 0) return count;
  int64_t burst = rate_burst(rate), waited_ms = plane->now_ms - rate->seen_ms;
  int64_t earned = waited_ms > 1000 ? burst : waited_ms * rate->per_s / 1000;
  rate->left = rate->left + earned < burst ? rate->left + earned : burst;
  rate->seen_ms = plane->now_ms;
  /* Less than a quarter of a burst is not worth a turn of its own. */
  if (rate->left >= burst / 4) return rate->left < count ? rate->left : count;
  connection_pause(plane, connection, (burst / 2 - rate->left) * 1000 / rate->per_s + 1);
  return 0;
}

/* At random steps, so that regular patterns of requests do not bias the sample (xorshift32). */
void answer_sample(struct plane *plane, const struct object *object) {
  if (--plane->sample_left) return;
  uint32_t random = plane->random;
  random ^= random << 13;
  random ^= random >> 17;
  random ^= random << 5;
  plane->random = random;
  plane->sample_left = 1 + random % (2 * SAMPLED_EVERY - 1);
  plane_add_sample(plane, object);
}

void answer_finish(struct plane *plane, struct connection *connection) {
  if (connection->out.count) { /* encrypted bytes: send_out finishes it */
    connection->state = SENDING;
    connection_watch(plane, connection, DEADLINE_SEND);
    return;
  }
  if (connection->entry != NULL)
    access_log_end(plane->config.log, connection->entry, connection->start - connection->entry->start);
  connection->entry = NULL;
  if (connection->file >= 0) close(connection->file);
  connection->file = -1;
  if (connection->object != NULL) object_release(connection->object);
  connection->object = NULL;
  connection->state = READING;
  connection_watch(plane, connection, DEADLINE_IDLE);
}

static void begin_sending(struct plane *plane, struct connection *connection, const struct answer *answer) {
  connection->state = SENDING;
  connection->rate = (struct rate){.per_s = answer->url.rate, .seen_ms = plane->now_ms};
  connection->rate.left = rate_burst(&connection->rate);
  connection->object = object_hold(answer->object);
  connection_watch(plane, connection, DEADLINE_SEND);
}

/* What the socket took of head and body; the rest is sent by later turns. */
static enum step note_sent(struct plane *plane, struct connection *connection, const struct answer *answer,
                           const char *head, size_t head_bytes, size_t sent, int64_t body) {
  answer_count(plane, answer->is_part, plane->began_ns);
  if (connection->entry != NULL) connection->entry->is_begun = 1;
  if (!answer->is_hop) answer_sample(plane, answer->object);
  plane->counters.sent_bytes += (uint64_t)body;
  if (answer->file < 0) {
    plane->counters.hits++;
    frame_note_visit(&answer->frame);
  }
  connection->start = answer->start + body;
  connection->left = answer->end - connection->start;
  if (connection->left == 0) {
    answer_finish(plane, connection);
    return STEP_MORE;
  }
  /* An own descriptor, closed with the answer or the connection: the plane may close its file meanwhile. */
  if (answer->file >= 0 && (connection->file = fcntl(answer->file, F_DUPFD_CLOEXEC, 0)) < 0)
    return connection_lose(plane, connection);
  begin_sending(plane, connection, answer);
  connection->rate.left -= body;
  connection->is_visited = connection->start % BLOCK_BYTES != 0 || body == 0;
  if (sent == head_bytes) return STEP_MORE;
  if (bytes_set(&connection->out, head + sent, head_bytes - sent) != 0) return connection_lose(plane, connection);
  return STEP_WAIT;
}

/* The bytes that may follow the head at once. */
static int64_t count_first(const struct answer *answer) {
  int64_t count = first_bytes(answer), burst = rate_burst(&(struct rate){.per_s = answer->url.rate});
  return answer->url.rate && burst < count ? burst : count;
}

/* Send the head, and the bytes that `prepare` found without a second look at their block. A fault of the file shows in
   the next turn. */
static enum step begin_answer(struct plane *plane, struct connection *connection, const struct answer *answer,
                              const char *head, size_t head_bytes) {
  struct piece piece = {.file = answer->file, .at = answer->start, .count = count_first(answer)};
  if (piece.file < 0) {
    piece.file = answer->frame.disk->reader;
    piece.at = answer->frame.offset + answer->start % BLOCK_BYTES;
  }
  ssize_t sent = stream_begin(plane, connection, head, head_bytes, &piece);
  if (sent < 0 && errno != EAGAIN) return connection_lose(plane, connection);
  return note_sent(plane, connection, answer, head, head_bytes, sent < 0 ? 0 : (size_t)sent, piece.sent);
}

static int accept_hop(struct plane *plane, const struct hop *hop) {
  int64_t away_ms = plane->unix_ms - hop->moment_ms;
  if (away_ms > HOP_WINDOW_MS || away_ms < -HOP_WINDOW_MS) return 0;
  return hop_advance(&plane->hop_counters, hop->connection, hop->counter, plane->unix_ms);
}

/* Request the first bytes of the answer from the node that keeps the object. */
static enum step answer_from_peer(struct plane *plane, struct connection *connection, const struct answer *answer,
                                  const uint8_t *data, size_t bytes, size_t request_bytes) {
  char out[HEAD_OUT_MAX];
  size_t head_bytes = write_head(plane, answer, out);
  connection->start = answer->start;
  connection->left = answer->end - answer->start;
  begin_sending(plane, connection, answer);
  /* The whole request stays in `in` until the first byte is sent. */
  if (head_bytes && bytes_set(&connection->in, data, bytes) == 0 &&
      fetch_begin(plane, connection, out, head_bytes, request_bytes, answer->is_part))
    return STEP_WAIT;
  return connection_hand_over(plane, connection, PLANE_REQUEST, data, bytes);
}

static void begin_entry(struct plane *plane, struct connection *connection, const struct head *head,
                        const struct answer *answer) {
  struct log_entry *entry = connection->entry = log_entry_make(plane->config.log, head);
  if (entry == NULL) return;
  if (!connection->address.is_known) address_read(connection->fd, &connection->address);
  entry->address = connection->address;
  entry->began_ns = plane->began_ns;
  entry->unix_ms = plane->unix_ms;
  entry->start = answer->start;
  entry->is_part = (uint8_t)answer->is_part;
  entry->is_of_peer = answer->object->peer != 0;
}

/* Answer the head at the start of `data`, or hand the connection over. */
static enum step answer_head(struct plane *plane, struct connection *connection, const struct head *head,
                             const uint8_t *data, size_t bytes) {
  struct answer answer;
  char out[HEAD_OUT_MAX];
  size_t head_bytes = 0;
  int is_prepared = prepare(plane, connection, head, &answer);
  if (is_prepared) begin_entry(plane, connection, head, &answer);
  if (is_prepared && answer.object->peer)
    return answer_from_peer(plane, connection, &answer, data, bytes, head->bytes);
  if (is_prepared) head_bytes = write_head(plane, &answer, out);
  /* Last, since a counter is used up even if the control plane answers: it would see a replay. */
  if (head_bytes != 0 && answer.is_hop && !accept_hop(plane, &answer.hop)) head_bytes = 0;
  if (head_bytes == 0) return connection_hand_over(plane, connection, PLANE_REQUEST, data, bytes);
  /* `data` may be the connection's own buffer, so the rest is kept before anything is freed. */
  if (bytes_set(&connection->in, data + head->bytes, bytes - head->bytes) != 0) return connection_lose(plane, connection);
  return begin_answer(plane, connection, &answer, out, head_bytes);
}

/* Receive into the plane's buffer behind what was received before. -1: wait; 0: the client ended. */
static ssize_t receive(struct plane *plane, struct connection *connection) {
  size_t before = connection->in.count;
  if (before) memcpy(plane->input, connection->in.data, before);
  ssize_t got = stream_receive(plane, connection, plane->input + before, sizeof plane->input - before);
  return got <= 0 ? got : got + (ssize_t)before;
}

static enum step read_head(struct plane *plane, struct connection *connection, int *is_drained) {
  struct head head;
  ssize_t bytes = (ssize_t)connection->in.count;
  int is_pipelined = bytes > 0 && head_read((const char *)connection->in.data, (size_t)bytes,
                                            plane->config.is_origin_relevant, &head) != HEAD_INCOMPLETE;
  if (is_pipelined) {
    memcpy(plane->input, connection->in.data, (size_t)bytes);
  } else {
    if (*is_drained) return STEP_WAIT;
    size_t before = connection->in.count;
    bytes = receive(plane, connection);
    if (bytes < 0) return STEP_WAIT;
    if (bytes == 0) {
      connection_close(plane, connection);
      return STEP_ENDED;
    }
    *is_drained = (size_t)bytes < sizeof plane->input;
    if (before == 0 && connection->deadline == DEADLINE_IDLE) connection_watch(plane, connection, DEADLINE_HEADER);
  }
  plane->began_ns = loop_now_ns();
  switch (head_read((const char *)plane->input, (size_t)bytes, plane->config.is_origin_relevant, &head)) {
    case HEAD_PLAIN: return answer_head(plane, connection, &head, plane->input, (size_t)bytes);
    case HEAD_OTHER: return connection_hand_over(plane, connection, PLANE_REQUEST, plane->input, (size_t)bytes);
    default: break;
  }
  if (bytes_set(&connection->in, plane->input, (size_t)bytes) != 0) return connection_lose(plane, connection);
  return STEP_MORE;
}

/* Send the rest of the head, or encrypted bytes. */
static enum step send_out(struct plane *plane, struct connection *connection) {
  struct bytes *out = &connection->out;
  ssize_t sent = stream_send_out(connection);
  if (sent < 0) return errno == EAGAIN ? STEP_WAIT : connection_lose(plane, connection);
  if ((size_t)sent == out->count) {
    bytes_free(out);
    if (connection->state == SENDING && connection->left == 0) answer_finish(plane, connection);
    return STEP_MORE;
  }
  memmove(out->data, out->data + sent, out->count -= (size_t)sent);
  return STEP_WAIT;
}

/* Where `count` bytes of the current block can be sent from; 0: not from here any more. */
static int find_source(struct plane *plane, struct connection *connection, int64_t count, int *file, off_t *at) {
  struct frame frame;
  int64_t offset = connection->start % BLOCK_BYTES;
  if (connection->file >= 0) {
    *file = connection->file;
    *at = connection->start;
    /* Probed once for each block: the rest of it is sent soon. */
    return connection->is_visited || file_is_resident(*file, *at, count);
  }
  if (plane->blocks == NULL || plane->is_outdated) return 0;
  if (!blocks_find(plane->blocks, connection->object, connection->start / BLOCK_BYTES, &frame)) return 0;
  if (frame.length < offset + count || !frame_is_resident(&frame, offset, count)) return 0;
  if (!connection->is_visited) {
    plane->counters.hits++;
    frame_note_visit(&frame);
    connection->is_visited = 1;
  }
  *file = frame.disk->reader;
  *at = frame.offset + offset;
  return 1;
}

/* Send the rest of the current block as far as the socket takes it. */
static enum step send_block(struct plane *plane, struct connection *connection) {
  int64_t offset = connection->start % BLOCK_BYTES, count = connection->left;
  int file = -1;
  off_t at = 0;
  if (count > BLOCK_BYTES - offset) count = BLOCK_BYTES - offset;
  count = stream_piece(connection, count);
  int is_here = find_source(plane, connection, count, &file, &at);
  if (is_here && (count = rate_allow(plane, connection, count)) == 0) return STEP_WAIT;
  ssize_t sent = is_here ? stream_send_file(plane, connection, file, at, (size_t)count) : 0;
  if (sent < 0 && errno == EAGAIN) return STEP_WAIT;
  if (sent < 0 && errno != EIO) return connection_lose(plane, connection);
  if (sent <= 0) /* the bytes are not here any more, or the disk failed */
    return connection_hand_over(plane, connection, PLANE_BODY, connection->in.data, connection->in.count);
  connection->start += sent;
  connection->left -= sent;
  connection->rate.left -= sent;
  plane->counters.sent_bytes += (uint64_t)sent;
  connection->is_visited = connection->start % BLOCK_BYTES != 0;
  if (connection->left == 0) answer_finish(plane, connection);
  /* Also after a short count: if the file was truncated, the socket is not full and no edge would follow. */
  return connection->out.count ? STEP_WAIT : STEP_MORE;
}

void connection_advance(struct plane *plane, struct connection *connection) {
  int64_t share = QUANTUM_BYTES;
  int is_drained = 0;
  for (;;) {
    if (share <= 0) {
      connection_enqueue(plane, connection);
      return;
    }
    int64_t before = connection->sent_bytes;
    enum step step;
    if (connection->out.count) {
      step = send_out(plane, connection);
    } else if (connection->state == READING) {
      step = read_head(plane, connection, &is_drained);
      share -= REQUEST_COST_BYTES;
    } else if (connection->object->peer) {
      step = fetch_send(plane, connection);
    } else {
      step = send_block(plane, connection);
    }
    if (step == STEP_ENDED) return;
    share -= connection->sent_bytes - before;
    if (step == STEP_WAIT) break;
  }
  if (plane->is_stopping && connection->state == READING && connection->in.count == 0) connection_close(plane, connection);
}
