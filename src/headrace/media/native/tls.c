#include "tls.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const struct openssl *lib; /* set before the first connection */
static BIO_METHOD *method;
static int has_kernel; /* the kernel can encrypt */
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The socket as OpenSSL sees it: reads are received, writes are collected. */

static int socket_read(BIO *bio, char *into, int bytes_max) {
  struct tls *tls = lib->BIO_get_data(bio);
  lib->BIO_clear_flags(bio, OPENSSL_BIO_RETRY_ANY);
  if (tls->unread_bytes > TLS_UNREAD_MAX) return -1;
  ssize_t got = tls->is_drained ? -1 : recv(tls->fd, into, (size_t)bytes_max, 0);
  if (got < 0 && (tls->is_drained || errno == EAGAIN || errno == EINTR)) {
    lib->BIO_set_flags(bio, OPENSSL_BIO_RETRY_READ);
    return -1;
  }
  if (got <= 0) {
    tls->is_ended = 1;
    return (int)got;
  }
  tls->is_drained = got < bytes_max;
  tls->unread_bytes += (int32_t)got;
  return (int)got;
}

static int socket_write(BIO *bio, const char *data, int bytes) {
  struct tls *tls = lib->BIO_get_data(bio);
  struct tls_buffer *buffer = tls->buffer;
  lib->BIO_clear_flags(bio, OPENSSL_BIO_RETRY_ANY);
  if (TLS_BUFFER_BYTES - buffer->count < (size_t)bytes) return -1;
  memcpy(buffer->data + buffer->count, data, (size_t)bytes);
  buffer->count += (size_t)bytes;
  return bytes;
}

static long socket_control(BIO *bio, int command, long number, void *data) {
  struct tls *tls = lib->BIO_get_data(bio);
  (void)number, (void)data;
  if (command == OPENSSL_BIO_EOF) return tls->is_ended;
  return command == OPENSSL_BIO_FLUSH;
}

static void prepare(void) {
  const char *why;
  const struct openssl *found = openssl_load(&why);
  lib = found;
  has_kernel = tls_kernel_missing() == NULL;
  if (lib == NULL || (method = lib->BIO_meth_new(OPENSSL_BIO_SOURCE_SINK, "headrace")) == NULL) return;
  lib->BIO_meth_set_read(method, socket_read);
  lib->BIO_meth_set_write(method, socket_write);
  lib->BIO_meth_set_ctrl(method, socket_control);
}

static BIO *bio_of(struct tls *tls) {
  BIO *bio = lib->BIO_new(method);
  if (bio == NULL) return NULL;
  lib->BIO_set_data(bio, tls);
  lib->BIO_set_init(bio, 1);
  return bio;
}

/* Connections */

struct tls_server *tls_server_make(const uint8_t *seed) {
  struct tls_server *server = calloc(1, sizeof *server);
  if (server != NULL) memcpy(server->seed, seed, TLS_SEED_BYTES);
  return server;
}

struct tls *tls_make(int fd) {
  struct tls *tls = calloc(1, sizeof *tls);
  if (tls != NULL) tls->fd = fd;
  return tls;
}

int tls_start(struct tls *tls, struct tls_server *server) {
  if (tls->ssl != NULL) return 1;
  pthread_once(&once, prepare);
  if (method == NULL || (tls->ssl = lib->SSL_new(server->context)) == NULL) return 0;
  lib->SSL_set_accept_state(tls->ssl);
  /* The kernel takes the keys from OpenSSL at the handshake's end, through OpenSSL's own socket. */
  if (has_kernel) return lib->SSL_set_fd(tls->ssl, tls->fd);
  BIO *bio = bio_of(tls);
  if (bio == NULL) return 0;
  lib->SSL_set_bio(tls->ssl, bio, bio);
  return 1;
}

void tls_end(struct tls *tls) {
  if (!tls->is_open || tls->is_failed) return;
  lib->SSL_shutdown(tls->ssl);
  if (tls->buffer->count) send(tls->fd, tls->buffer->data, tls->buffer->count, MSG_NOSIGNAL);
  tls->buffer->count = 0;
  lib->ERR_clear_error();
}

void tls_free(struct tls *tls) {
  if (tls == NULL) return;
  if (tls->ssl != NULL) lib->SSL_free(tls->ssl);
  bytes_free(&tls->held);
  free(tls);
}

/* Append what the socket has not taken. 0: memory is missing. */
static int keep(struct bytes *out, const uint8_t *data, size_t count) {
  uint8_t *grown = realloc(out->data, out->count + count);
  if (grown == NULL) return 0;
  memcpy(grown + out->count, data, count);
  *out = (struct bytes){grown, out->count + count};
  return 1;
}

static ssize_t send_raw(struct tls *tls, const uint8_t *data, size_t count) {
  ssize_t sent = send(tls->fd, data, count, MSG_NOSIGNAL);
  if (sent < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
  tls->sent_bytes += sent;
  return sent;
}

static int send_buffer(struct tls *tls, struct bytes *out) {
  struct tls_buffer *buffer = tls->buffer;
  size_t count = buffer->count;
  buffer->count = 0;
  if (count == 0) return 1;
  ssize_t sent = out->count ? 0 : send_raw(tls, buffer->data, count);
  if (sent < 0) return 0;
  return (size_t)sent == count || keep(out, buffer->data + sent, count - (size_t)sent);
}

int tls_flush(struct tls *tls, struct bytes *out) {
  if (out->count == 0) return 1;
  ssize_t sent = send_raw(tls, out->data, out->count);
  if (sent < 0) return 0;
  if ((size_t)sent == out->count) bytes_free(out);
  else memmove(out->data, out->data + sent, out->count -= (size_t)sent);
  return 1;
}

static void fail(struct tls *tls) {
  tls->is_ended = tls->is_failed = 1;
  lib->ERR_clear_error();
}

/* Without kernel TLS everything after the handshake is collected. */
static void note_open(struct tls *tls) {
  tls->is_open = 1;
  if (!has_kernel) return;
  tls->is_kernel = lib->BIO_ctrl(lib->SSL_get_wbio(tls->ssl), OPENSSL_BIO_KERNEL_SEND, 0, NULL) > 0;
  BIO *bio = tls->is_kernel ? NULL : bio_of(tls);
  if (bio != NULL) lib->SSL_set0_wbio(tls->ssl, bio);
}

static void note_result(struct tls *tls, int result) {
  int error = lib->SSL_get_error(tls->ssl, result);
  if (error == OPENSSL_ERROR_ENDED) tls->is_ended = 1;
  else if (error != OPENSSL_ERROR_WANT_READ && error != OPENSSL_ERROR_WANT_WRITE) fail(tls);
  if (!tls->is_open && !tls->is_failed && lib->SSL_is_init_finished(tls->ssl)) note_open(tls);
}

ssize_t tls_receive(struct tls *tls, struct bytes *out, void *into, size_t bytes_max) {
  size_t got = 0;
  tls->is_drained = 0;
  while (got < bytes_max && !tls->is_ended) {
    int result = lib->SSL_read(tls->ssl, (uint8_t *)into + got, (int)(bytes_max - got));
    if (result <= 0) {
      note_result(tls, result);
      break;
    }
    if (!tls->is_open) note_open(tls);
    tls->unread_bytes = 0;
    got += (size_t)result;
  }
  /* Also an alert that tells the client why its handshake failed. */
  if (!send_buffer(tls, out)) fail(tls);
  if (got) return (ssize_t)got;
  return tls->is_ended ? 0 : -1;
}

ssize_t tls_send(struct tls *tls, struct bytes *out, const void *data, size_t count) {
  tls->is_drained = 0; /* a handshake that is not complete receives here */
  int result = lib->SSL_write(tls->ssl, data, (int)count);
  if (result <= 0) note_result(tls, result);
  if (!tls->is_failed && !send_buffer(tls, out)) fail(tls);
  if (tls->is_failed) return -1;
  if (result <= 0) return -2;
  tls->is_slow = out->count > 0;
  return result;
}

/* Connections that were passed on */

int64_t plane_tls_receive(struct tls *tls, uint8_t *into, int64_t bytes_max) {
  if (tls->ssl == NULL || !tls_flush(tls, &tls->held)) return -2;
  ssize_t got = tls_receive(tls, &tls->held, into, (size_t)bytes_max);
  return got == 0 && tls->is_failed ? -2 : got;
}

static int64_t send_by_kernel(struct tls *tls, const uint8_t *data, int64_t bytes) {
  ssize_t sent = send_raw(tls, data, (size_t)bytes);
  return sent < 0 ? -2 : sent == 0 ? -1 : sent;
}

int64_t plane_tls_send(struct tls *tls, const uint8_t *data, int64_t bytes) {
  if (tls->ssl == NULL || tls->is_failed || !tls_flush(tls, &tls->held)) return -2;
  if (tls->held.count) return -1;
  if (tls->is_kernel) return send_by_kernel(tls, data, bytes);
  int64_t sent = (int64_t)tls->begun;
  tls->begun = 0;
  if (sent) return sent;
  sent = tls_send(tls, &tls->held, data, bytes < TLS_PIECE_BYTES ? (size_t)bytes : TLS_PIECE_BYTES);
  if (sent < 0) return sent == -2 ? -1 : -2;
  if (tls->held.count == 0) return sent;
  tls->begun = (size_t)sent;
  return -1;
}
