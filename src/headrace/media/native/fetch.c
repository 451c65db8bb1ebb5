#include <errno.h>
#include <string.h>

#include "loop.h"
#include "stream.h"

int fetch_begin(struct plane *plane, struct connection *connection, const char *head, size_t head_bytes,
                size_t request_bytes, int is_part) {
  struct fetch *fetch = fetch_start(plane, connection, head, head_bytes);
  if (fetch == NULL) return 0;
  fetch->request_bytes = request_bytes;
  fetch->is_part = (uint8_t)is_part;
  return 1;
}

static enum step hand_over(struct plane *plane, struct connection *connection, int kind) {
  struct bytes in = connection->in;
  connection->in = (struct bytes){0};
  connection_hand_over(plane, connection, kind, in.data, in.count);
  bytes_free(&in);
  return STEP_ENDED;
}

void fetch_fail(struct plane *plane, struct connection *connection) {
  struct fetch *fetch = connection->fetch;
  int is_begun = fetch->is_begun || fetch->request_bytes == 0, result = 0;
  plane->counters.hop_faults++;
  /* What is left of a begun head goes first; then the next fetch fails too, or continues. */
  if (is_begun && fetch->head_left)
    result = bytes_set(&connection->out, fetch->buffer + fetch->at, fetch->head_left);
  fetch_end(plane, connection);
  if (result != 0) connection_lose(plane, connection);
  else if (!is_begun) hand_over(plane, connection, PLANE_REQUEST);
  else if (connection->out.count == 0) hand_over(plane, connection, PLANE_BODY);
  else connection_enqueue(plane, connection);
}

/* The first bytes of the answer were sent. */
static int note_begun(struct plane *plane, struct connection *connection, struct fetch *fetch) {
  struct bytes *in = &connection->in;
  fetch->is_begun = 1;
  if (connection->entry != NULL) connection->entry->is_begun = 1;
  answer_count(plane, fetch->is_part, fetch->began_ns);
  answer_sample(plane, connection->object);
  return bytes_set(in, in->data + fetch->request_bytes, in->count - fetch->request_bytes);
}

/* Everything of the block was sent. */
static enum step end_block(struct plane *plane, struct connection *connection) {
  fetch_end(plane, connection);
  plane->counters.passed++;
  if (connection->left > 0) return STEP_MORE;
  answer_finish(plane, connection);
  loop_refresh_time(plane); /* the next request may have been sent after this batch began */
  return STEP_MORE;
}

static enum step send_received(struct plane *plane, struct connection *connection) {
  struct fetch *fetch = connection->fetch;
  int64_t body_max = stream_piece(connection, (int64_t)(fetch->end - fetch->at - fetch->head_left));
  /* The first answer never pauses: its burst is unused. */
  size_t count = fetch->head_left + (size_t)rate_allow(plane, connection, body_max);
  if (count == 0) return STEP_WAIT;
  ssize_t sent = stream_send(plane, connection, fetch->buffer + fetch->at, count);
  if (sent < 0) return errno == EAGAIN ? STEP_WAIT : connection_lose(plane, connection);
  if (sent > 0 && !fetch->is_begun && fetch->request_bytes && note_begun(plane, connection, fetch) != 0)
    return connection_lose(plane, connection);
  size_t head = (size_t)sent < fetch->head_left ? (size_t)sent : fetch->head_left;
  int64_t body = sent - (int64_t)head;
  fetch->at += (size_t)sent;
  fetch->head_left -= head;
  connection->start += body;
  connection->left -= body;
  connection->rate.left -= body;
  plane->counters.peer_bytes += (uint64_t)body;
  return (size_t)sent < count || connection->out.count ? STEP_WAIT : STEP_MORE;
}

enum step fetch_send(struct plane *plane, struct connection *connection) {
  struct fetch *fetch = connection->fetch;
  if (fetch == NULL) {
    if (fetch_start(plane, connection, NULL, 0) != NULL) return STEP_WAIT;
    return hand_over(plane, connection, PLANE_BODY);
  }
  if (fetch->at < fetch->end) return send_received(plane, connection);
  if (fetch->missing > 0) return STEP_WAIT;
  return end_block(plane, connection);
}
