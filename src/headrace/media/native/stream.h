/* Internal: the bytes of HTTP on a connection, plain or encrypted. Only the thread of the loop uses it.

   Sending returns as `send` does: bytes taken, or -1 with errno. Encrypted bytes are all taken; those that the
   socket did not take are in `out`, which is sent before anything else. */
#ifndef HEADRACE_STREAM_H
#define HEADRACE_STREAM_H

#include <sys/types.h>

#include "loop.h"
#include "tls.h"

/* Whether this process encrypts, so that bodies are copied. */
static inline int stream_encrypts(const struct connection *connection) {
  return connection->tls != NULL && !connection->tls->is_kernel;
}

/* Received bytes; 0: the client ended; -1: wait for the socket. */
ssize_t stream_receive(struct plane *plane, struct connection *connection, void *into, size_t bytes_max);
ssize_t stream_send(struct plane *plane, struct connection *connection, const void *data, size_t count);
/* Send what waits in `out`. */
ssize_t stream_send_out(struct connection *connection);

/* Bytes of a file. */
struct piece {
  int file;
  off_t at;
  int64_t count;
  int64_t sent;
};

/* Send a head, and as much of the piece as can be sent with it. Returns the bytes of the head. */
ssize_t stream_begin(struct plane *plane, struct connection *connection, const char *head, size_t head_bytes,
                     struct piece *piece);
/* The bytes of `count` that stream_send_file may send at once. */
int64_t stream_piece(const struct connection *connection, int64_t count);
ssize_t stream_send_file(struct plane *plane, struct connection *connection, int file, off_t at, size_t count);
/* Prepare a connection's TLS for the control plane, which owns it then. */
struct tls *stream_hand_over(struct plane *plane, struct connection *connection);
#endif
