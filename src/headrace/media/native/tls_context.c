/* The settings of TLS, the certificate, and the keys of session tickets. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "digest.h"
#include "tls.h"

#ifndef TCP_ULP
#define TCP_ULP 31
#endif
enum { NAME_BYTES = 16, IV_BYTES = 16, PERIOD_S = 4 * 3600, TICKET_S = PERIOD_S };
/* As Mozilla's "intermediate" without its suites of finite-field DH, which need parameters. AES-128 first: it costs
   less. A client that prefers ChaCha20, as those without AES in hardware do, gets it. */
static const char CIPHERS[] =
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384:"
    "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305";
static const char CIPHERS_1_3[] = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
static const uint64_t OPTIONS = OPENSSL_OP_SERVER_PREFERENCE | OPENSSL_OP_PRIORITIZE_CHACHA | OPENSSL_OP_NO_RENEGOTIATION |
                                OPENSSL_OP_NO_COMPRESSION | OPENSSL_OP_IGNORE_UNEXPECTED_EOF;

const char *tls_missing(void) {
  const char *why;
  openssl_load(&why);
  return why;
}

const char *tls_kernel_missing(void) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "no socket can be opened";
  int result = setsockopt(fd, IPPROTO_TCP, TCP_ULP, "tls", 4), error = errno;
  close(fd);
  /* With the module it fails because the socket is not connected. */
  return result == 0 || error == ENOTCONN ? NULL : "the kernel has no module tls";
}

/* Session tickets. Each period has keys of its own, all from the node's seed, so every worker accepts the
   tickets of the others without exchanging anything. Those of the last period are accepted and renewed. */

struct ticket_keys {
  uint8_t name[NAME_BYTES], cipher[SHA256_BYTES], mac[SHA256_BYTES];
};

static void ticket_keys_of(const uint8_t *seed, int64_t period, struct ticket_keys *keys) {
  uint8_t message[9], digest[SHA256_BYTES];
  struct hmac_key key;
  hmac_key_set(&key, seed, TLS_SEED_BYTES);
  memcpy(message + 1, &period, sizeof period);
  message[0] = 'n';
  hmac_sha256(&key, message, sizeof message, digest);
  memcpy(keys->name, digest, NAME_BYTES);
  message[0] = 'c';
  hmac_sha256(&key, message, sizeof message, keys->cipher);
  message[0] = 'm';
  hmac_sha256(&key, message, sizeof message, keys->mac);
}

/* 1: the keys are set; 2: the client gets a new ticket besides; 0: the ticket is of neither period; -1: a fault. */
static int on_ticket(SSL *ssl, unsigned char *name, unsigned char *iv, EVP_CIPHER_CTX *cipher, EVP_MAC_CTX *mac, int is_new) {
  const char *why;
  const struct openssl *lib = openssl_load(&why);
  const uint8_t *seed = lib->SSL_CTX_get_ex_data(lib->SSL_get_SSL_CTX(ssl), 0);
  int64_t period = time(NULL) / PERIOD_S;
  struct ticket_keys keys;
  /* Clients of TLS 1.3 use a ticket once (RFC 8446, appendix C.4). */
  int result = lib->SSL_version(ssl) == OPENSSL_TLS_1_3 ? 2 : 1;
  ticket_keys_of(seed, period, &keys);
  if (is_new) {
    memcpy(name, keys.name, NAME_BYTES);
    if (lib->RAND_bytes(iv, IV_BYTES) != 1) return -1;
  } else if (memcmp(name, keys.name, NAME_BYTES) != 0) {
    ticket_keys_of(seed, period - 1, &keys);
    if (memcmp(name, keys.name, NAME_BYTES) != 0) return 0;
    result = 2;
  }
  char digest[] = "SHA256";
  struct openssl_param params[] = {
      {"key", OPENSSL_PARAM_BYTES, keys.mac, sizeof keys.mac, 0},
      {"digest", OPENSSL_PARAM_TEXT, digest, sizeof digest - 1, 0},
      {0},
  };
  int is_set = lib->EVP_MAC_CTX_set_params(mac, params) == 1 &&
               lib->EVP_CipherInit_ex(cipher, lib->EVP_aes_256_cbc(), NULL, keys.cipher, iv, is_new) == 1;
  return is_set ? result : -1;
}

/* HTTP/1.1 before HTTP/1.0; a client that offers neither is refused (RFC 7301, section 3.2). */
static int on_alpn(SSL *ssl, const unsigned char **chosen, unsigned char *chosen_bytes, const unsigned char *offered,
                   unsigned int offered_bytes, void *unused) {
  static const char *const OURS[] = {"http/1.1", "http/1.0"};
  enum { OURS_BYTES = 8 };
  (void)ssl;
  (void)unused;
  for (size_t ours = 0; ours < sizeof OURS / sizeof *OURS; ours++)
    for (unsigned int at = 0; at < offered_bytes && at + offered[at] < offered_bytes; at += 1u + offered[at])
      if (offered[at] == OURS_BYTES && memcmp(offered + at + 1, OURS[ours], OURS_BYTES) == 0) {
        *chosen = offered + at + 1;
        *chosen_bytes = OURS_BYTES;
        return OPENSSL_ALPN_OK;
      }
  return OPENSSL_ALPN_FATAL;
}

/* Without this OpenSSL would read a password from the terminal. */
static int on_password(char *into, int bytes, int is_writing, void *unused) {
  (void)into, (void)bytes, (void)is_writing, (void)unused;
  return -1;
}

static void explain(const struct openssl *lib, const char *what, const char *file, char *why, size_t why_bytes) {
  const char *reason = lib->ERR_reason_error_string(lib->ERR_get_error());
  snprintf(why, why_bytes, "%s %s: %s", what, file, reason != NULL ? reason : "it cannot be read");
  lib->ERR_clear_error();
}

static int load_certificate(const struct openssl *lib, SSL_CTX *context, const char *certificate, const char *key, char *why,
                            size_t why_bytes) {
  if (lib->SSL_CTX_use_certificate_chain_file(context, certificate) != 1)
    explain(lib, "certificate", certificate, why, why_bytes);
  else if (lib->SSL_CTX_use_PrivateKey_file(context, key, OPENSSL_FILE_PEM) != 1 ||
           lib->SSL_CTX_check_private_key(context) != 1)
    explain(lib, "private key", key, why, why_bytes);
  else return 1;
  return 0;
}

SSL_CTX *tls_context_make(const char *certificate, const char *key, const uint8_t *seed, char *why, size_t why_bytes) {
  static const unsigned char SESSIONS[] = "headrace";
  const char *missing;
  const struct openssl *lib = openssl_load(&missing);
  SSL_CTX *context = lib != NULL ? lib->SSL_CTX_new(lib->TLS_server_method()) : NULL;
  if (context == NULL) {
    snprintf(why, why_bytes, "%s", missing != NULL ? missing : "memory is missing");
    return NULL;
  }
  lib->SSL_CTX_set_options(context, OPTIONS | (tls_kernel_missing() == NULL ? OPENSSL_OP_KERNEL_TLS : 0));
  lib->SSL_CTX_ctrl(context, OPENSSL_CTRL_MIN_VERSION, OPENSSL_TLS_1_2, NULL);
  lib->SSL_CTX_ctrl(context, OPENSSL_CTRL_MODE, OPENSSL_MODE_RELEASE_BUFFERS, NULL);
  lib->SSL_CTX_ctrl(context, OPENSSL_CTRL_READ_AHEAD, 1, NULL);
  lib->SSL_CTX_ctrl(context, OPENSSL_CTRL_SESSION_CACHE, 0, NULL); /* the clients keep their sessions */
  lib->SSL_CTX_set_timeout(context, TICKET_S);
  lib->SSL_CTX_set_session_id_context(context, SESSIONS, sizeof SESSIONS - 1);
  lib->SSL_CTX_set_ex_data(context, 0, (void *)(uintptr_t)seed);
  lib->SSL_CTX_set_tlsext_ticket_key_evp_cb(context, on_ticket);
  lib->SSL_CTX_set_alpn_select_cb(context, on_alpn, NULL);
  lib->SSL_CTX_set_default_passwd_cb(context, on_password);
  if (lib->SSL_CTX_set_cipher_list(context, CIPHERS) != 1 || lib->SSL_CTX_set_ciphersuites(context, CIPHERS_1_3) != 1)
    explain(lib, "ciphers", CIPHERS, why, why_bytes);
  else if (load_certificate(lib, context, certificate, key, why, why_bytes)) return context;
  lib->SSL_CTX_free(context);
  return NULL;
}

void tls_context_free(SSL_CTX *context) {
  const char *why;
  if (context != NULL) openssl_load(&why)->SSL_CTX_free(context);
}
