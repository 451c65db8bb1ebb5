/* TLS of client connections: handshakes, encryption, session tickets, kernel TLS. No HTTP.

   Encrypted bytes never wait inside OpenSSL: it writes into a buffer of the calling thread, which is
   sent at once. What the socket does not take is appended to `out` of the caller, who sends it before
   anything else. So SSL_write never has to be repeated, and many records are sent by one call.

   Where the kernel encrypts (kernel TLS), `is_kernel` is set after the handshake: plain `send` and
   `sendfile` on the socket then send records.

   A connection is used by one thread at a time: the plane's, or after a hand-over the control plane's. */
#ifndef HEADRACE_TLS_H
#define HEADRACE_TLS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "bytes.h"
#include "openssl.h"
#include "plane.h"

#define TLS_SEED_BYTES 32
#define TLS_PIECE_BYTES (128 * 1024) /* of a file, encrypted and sent by one call */
#define TLS_CLEAR_BYTES (TLS_PIECE_BYTES + 4096) /* with the head of its answer */
#define TLS_RECORD_BYTES (16 * 1024)
/* Of a piece and its records' overhead, or of a handshake with a long chain of certificates. */
#define TLS_BUFFER_BYTES (TLS_CLEAR_BYTES + 64 * 1024)
/* Bytes that a client may send without any for HTTP: its handshake, or messages of TLS. */
#define TLS_UNREAD_MAX (64 * 1024)

struct tls_buffer {
  size_t count;
  uint8_t data[TLS_BUFFER_BYTES];
};

/* The TLS of a plane. */
struct tls_server {
  uint8_t seed[TLS_SEED_BYTES]; /* of the keys of tickets */
  SSL_CTX *context; /* of new connections */
  struct tls_buffer loop, control; /* one for each thread */
  uint8_t piece[TLS_CLEAR_BYTES]; /* to be encrypted, in the loop */
};

struct tls {
  SSL *ssl; /* NULL: nothing was received yet */
  struct tls_buffer *buffer;
  int fd;
  int32_t unread_bytes; /* received since the last byte for HTTP */
  int64_t sent_bytes;   /* taken by the socket, encrypted */
  size_t begun;         /* see plane_tls_send */
  struct bytes held;    /* of a connection that was passed on: encrypted bytes that wait for the socket */
  uint8_t is_open;      /* the handshake is complete */
  uint8_t is_kernel;
  uint8_t is_drained; /* the socket had no more bytes */
  uint8_t is_ended;   /* by the client, or by a fault */
  uint8_t is_failed;
  uint8_t is_slow; /* the socket did not take the last piece */
};

/* A context with a certificate; NULL: `why` (of `why_bytes`) holds the reason. `seed` of the ticket keys
   must outlive every connection. */
SSL_CTX *tls_context_make(const char *certificate, const char *key, const uint8_t *seed, char *why, size_t why_bytes);
void tls_context_free(SSL_CTX *context);

struct tls_server *tls_server_make(const uint8_t *seed);
struct tls *tls_make(int fd);
/* Before the first use. 0: memory is missing. */
int tls_start(struct tls *tls, struct tls_server *server);

/* Received bytes for HTTP; 0: the client ended or broke the protocol; -1: wait for the socket. */
ssize_t tls_receive(struct tls *tls, struct bytes *out, void *into, size_t bytes_max);
/* Encrypt and send up to TLS_CLEAR_BYTES. Returns `count`; -1: broken; -2: the handshake is not complete. */
ssize_t tls_send(struct tls *tls, struct bytes *out, const void *data, size_t count);
/* Send what waits in `out`. 0: the socket failed. */
int tls_flush(struct tls *tls, struct bytes *out);
#endif
