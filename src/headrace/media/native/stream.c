#include "stream.h"

#include <errno.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* OpenSSL's state takes about 10 KiB, so a client gets one with its first byte. */
static ssize_t receive_encrypted(struct plane *plane, struct connection *connection, void *into, size_t bytes_max) {
  struct tls *tls = connection->tls;
  tls->buffer = &plane->tls->loop;
  if (!tls_start(tls, plane->tls)) return 0;
  int64_t before = tls->sent_bytes;
  ssize_t got = tls_receive(tls, &connection->out, into, bytes_max);
  connection->sent_bytes += tls->sent_bytes - before;
  return got;
}

ssize_t stream_receive(struct plane *plane, struct connection *connection, void *into, size_t bytes_max) {
  if (connection->tls != NULL) return receive_encrypted(plane, connection, into, bytes_max);
  ssize_t got = recv(connection->fd, into, bytes_max, 0);
  if (got < 0) return errno == EAGAIN || errno == EINTR ? -1 : 0;
  return got;
}

static ssize_t send_encrypted(struct plane *plane, struct connection *connection, const void *data, size_t count) {
  struct tls *tls = connection->tls;
  int64_t before = tls->sent_bytes;
  tls->buffer = &plane->tls->loop;
  ssize_t sent = tls_send(tls, &connection->out, data, count);
  connection->sent_bytes += tls->sent_bytes - before;
  errno = EPIPE;
  return sent;
}

static ssize_t send_plain(struct connection *connection, const void *data, size_t count, int flags) {
  ssize_t sent = send(connection->fd, data, count, MSG_NOSIGNAL | flags);
  if (sent > 0) connection->sent_bytes += sent;
  return sent;
}

static ssize_t send_file_plain(struct connection *connection, int file, off_t at, size_t count) {
  ssize_t sent = sendfile(connection->fd, file, &at, count);
  if (sent > 0) connection->sent_bytes += sent;
  return sent;
}

/* Without a read from the disk. 0: the bytes are not in memory any more, or the file is shorter now. */
static int read_piece(int file, off_t at, void *into, size_t count) {
  struct iovec piece = {into, count};
  return preadv2(file, &piece, 1, at, RWF_NOWAIT) == (ssize_t)count;
}

ssize_t stream_send(struct plane *plane, struct connection *connection, const void *data, size_t count) {
  if (stream_encrypts(connection)) return send_encrypted(plane, connection, data, count);
  return send_plain(connection, data, count, 0);
}

ssize_t stream_send_out(struct connection *connection) {
  return send_plain(connection, connection->out.data, connection->out.count, connection->left ? MSG_MORE : 0);
}

static ssize_t begin_encrypted(struct plane *plane, struct connection *connection, const char *head, size_t head_bytes,
                               struct piece *piece) {
  uint8_t *both = plane->tls->piece;
  size_t count = piece->count < TLS_PIECE_BYTES ? (size_t)piece->count : TLS_PIECE_BYTES;
  memcpy(both, head, head_bytes);
  if (!read_piece(piece->file, piece->at, both + head_bytes, count)) count = 0;
  if (send_encrypted(plane, connection, both, head_bytes + count) < 0) return -1;
  piece->sent = (int64_t)count;
  return (ssize_t)head_bytes;
}

ssize_t stream_begin(struct plane *plane, struct connection *connection, const char *head, size_t head_bytes,
                     struct piece *piece) {
  if (stream_encrypts(connection)) return begin_encrypted(plane, connection, head, head_bytes, piece);
  ssize_t sent = send_plain(connection, head, head_bytes, MSG_MORE);
  if (sent != (ssize_t)head_bytes) return sent;
  ssize_t body = send_file_plain(connection, piece->file, piece->at, (size_t)piece->count);
  piece->sent = body < 0 ? 0 : body;
  return sent;
}

/* A slow client holds one record in memory, not a piece. */
int64_t stream_piece(const struct connection *connection, int64_t count) {
  if (!stream_encrypts(connection)) return count;
  int64_t most = connection->tls->is_slow ? TLS_RECORD_BYTES : TLS_PIECE_BYTES;
  return count < most ? count : most;
}

ssize_t stream_send_file(struct plane *plane, struct connection *connection, int file, off_t at, size_t count) {
  if (!stream_encrypts(connection)) return send_file_plain(connection, file, at, count);
  if (!read_piece(file, at, plane->tls->piece, count)) return 0;
  return send_encrypted(plane, connection, plane->tls->piece, count);
}

struct tls *stream_hand_over(struct plane *plane, struct connection *connection) {
  struct tls *tls = connection->tls;
  tls_start(tls, plane->tls); /* one that was refused had none; without memory every use of it fails */
  tls->buffer = &plane->tls->control;
  tls->held = connection->out;
  connection->out = (struct bytes){0};
  connection->tls = NULL;
  return tls;
}
