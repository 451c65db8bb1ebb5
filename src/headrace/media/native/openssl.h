/* The functions of OpenSSL 3 that TLS uses, found at run time: building needs no headers of it.

   A worker's Python has usually loaded libssl already; that copy is used. The prototypes and numbers
   below belong to OpenSSL's stable interface of version 3 (openssl/ssl.h, bio.h, core.h). */
#ifndef HEADRACE_OPENSSL_H
#define HEADRACE_OPENSSL_H

#include <stddef.h>
#include <stdint.h>

typedef struct ssl_st SSL;
typedef struct ssl_ctx_st SSL_CTX;
typedef struct bio_st BIO;
typedef struct bio_method_st BIO_METHOD;
typedef struct evp_cipher_ctx_st EVP_CIPHER_CTX;
typedef struct evp_mac_ctx_st EVP_MAC_CTX;

struct openssl_param {
  const char *key;
  unsigned int data_type;
  void *data;
  size_t data_size, return_size;
};

enum {
  OPENSSL_MODE_RELEASE_BUFFERS = 0x10,
  OPENSSL_CTRL_MODE = 33,
  OPENSSL_CTRL_READ_AHEAD = 41,
  OPENSSL_CTRL_SESSION_CACHE = 44,
  OPENSSL_CTRL_MIN_VERSION = 123,
  OPENSSL_TLS_1_2 = 0x0303,
  OPENSSL_TLS_1_3 = 0x0304,
  OPENSSL_FILE_PEM = 1,
  OPENSSL_ALPN_OK = 0,
  OPENSSL_ALPN_FATAL = 2,
  OPENSSL_ERROR_WANT_READ = 2,
  OPENSSL_ERROR_WANT_WRITE = 3,
  OPENSSL_ERROR_ENDED = 6,
  OPENSSL_BIO_EOF = 2,
  OPENSSL_BIO_FLUSH = 11,
  OPENSSL_BIO_KERNEL_SEND = 73,
  OPENSSL_BIO_SOURCE_SINK = 0x400,
  OPENSSL_BIO_RETRY_READ = 0x01 | 0x08,
  OPENSSL_BIO_RETRY_ANY = 0x0f,
  OPENSSL_PARAM_TEXT = 4,
  OPENSSL_PARAM_BYTES = 5,
};
#define OPENSSL_OP_KERNEL_TLS (1ull << 3)
#define OPENSSL_OP_IGNORE_UNEXPECTED_EOF (1ull << 7)
#define OPENSSL_OP_NO_COMPRESSION (1ull << 17)
#define OPENSSL_OP_PRIORITIZE_CHACHA (1ull << 21)
#define OPENSSL_OP_SERVER_PREFERENCE (1ull << 22)
#define OPENSSL_OP_NO_RENEGOTIATION (1ull << 30)

typedef int openssl_alpn(SSL *, const unsigned char **, unsigned char *, const unsigned char *, unsigned int, void *);
typedef int openssl_ticket(SSL *, unsigned char *, unsigned char *, EVP_CIPHER_CTX *, EVP_MAC_CTX *, int);
typedef int openssl_password(char *, int, int, void *);

/* F(result, name, arguments) */
#define OPENSSL_SSL(F)                                                                              \
  F(const void *, TLS_server_method, (void))                                                        \
  F(SSL_CTX *, SSL_CTX_new, (const void *))                                                         \
  F(void, SSL_CTX_free, (SSL_CTX *))                                                                \
  F(long, SSL_CTX_ctrl, (SSL_CTX *, int, long, void *))                                             \
  F(uint64_t, SSL_CTX_set_options, (SSL_CTX *, uint64_t))                                           \
  F(int, SSL_CTX_set_cipher_list, (SSL_CTX *, const char *))                                        \
  F(int, SSL_CTX_set_ciphersuites, (SSL_CTX *, const char *))                                       \
  F(int, SSL_CTX_use_certificate_chain_file, (SSL_CTX *, const char *))                             \
  F(int, SSL_CTX_use_PrivateKey_file, (SSL_CTX *, const char *, int))                               \
  F(int, SSL_CTX_check_private_key, (const SSL_CTX *))                                              \
  F(void, SSL_CTX_set_default_passwd_cb, (SSL_CTX *, openssl_password *))                           \
  F(int, SSL_CTX_set_session_id_context, (SSL_CTX *, const unsigned char *, unsigned int))          \
  F(long, SSL_CTX_set_timeout, (SSL_CTX *, long))                                                   \
  F(void, SSL_CTX_set_alpn_select_cb, (SSL_CTX *, openssl_alpn *, void *))                          \
  F(int, SSL_CTX_set_tlsext_ticket_key_evp_cb, (SSL_CTX *, openssl_ticket *))                       \
  F(int, SSL_CTX_set_ex_data, (SSL_CTX *, int, void *))                                             \
  F(void *, SSL_CTX_get_ex_data, (const SSL_CTX *, int))                                            \
  F(SSL_CTX *, SSL_get_SSL_CTX, (const SSL *))                                                      \
  F(int, SSL_version, (const SSL *))                                                                \
  F(SSL *, SSL_new, (SSL_CTX *))                                                                    \
  F(void, SSL_free, (SSL *))                                                                        \
  F(void, SSL_set_accept_state, (SSL *))                                                            \
  F(int, SSL_set_fd, (SSL *, int))                                                                  \
  F(void, SSL_set_bio, (SSL *, BIO *, BIO *))                                                       \
  F(void, SSL_set0_wbio, (SSL *, BIO *))                                                            \
  F(BIO *, SSL_get_wbio, (const SSL *))                                                             \
  F(int, SSL_is_init_finished, (const SSL *))                                                       \
  F(int, SSL_read, (SSL *, void *, int))                                                            \
  F(int, SSL_write, (SSL *, const void *, int))                                                     \
  F(int, SSL_shutdown, (SSL *))                                                                     \
  F(int, SSL_get_error, (const SSL *, int))
#define OPENSSL_CRYPTO(F)                                                                           \
  F(BIO_METHOD *, BIO_meth_new, (int, const char *))                                                \
  F(int, BIO_meth_set_read, (BIO_METHOD *, int (*)(BIO *, char *, int)))                            \
  F(int, BIO_meth_set_write, (BIO_METHOD *, int (*)(BIO *, const char *, int)))                     \
  F(int, BIO_meth_set_ctrl, (BIO_METHOD *, long (*)(BIO *, int, long, void *)))                     \
  F(BIO *, BIO_new, (const BIO_METHOD *))                                                           \
  F(long, BIO_ctrl, (BIO *, int, long, void *))                                                     \
  F(void, BIO_set_data, (BIO *, void *))                                                            \
  F(void *, BIO_get_data, (BIO *))                                                                  \
  F(void, BIO_set_init, (BIO *, int))                                                               \
  F(void, BIO_set_flags, (BIO *, int))                                                              \
  F(void, BIO_clear_flags, (BIO *, int))                                                            \
  F(int, RAND_bytes, (unsigned char *, int))                                                        \
  F(const void *, EVP_aes_256_cbc, (void))                                                          \
  F(int, EVP_CipherInit_ex, (EVP_CIPHER_CTX *, const void *, void *, const unsigned char *,         \
                             const unsigned char *, int))                                           \
  F(int, EVP_MAC_CTX_set_params, (EVP_MAC_CTX *, const struct openssl_param *))                     \
  F(unsigned long, ERR_get_error, (void))                                                           \
  F(const char *, ERR_reason_error_string, (unsigned long))                                         \
  F(void, ERR_clear_error, (void))

struct openssl {
#define OPENSSL_FIELD(result, name, arguments) result(*name) arguments;
  OPENSSL_SSL(OPENSSL_FIELD)
  OPENSSL_CRYPTO(OPENSSL_FIELD)
#undef OPENSSL_FIELD
};

/* The functions; NULL: there is no usable OpenSSL 3; `why` is the reason. Safe in any thread. */
const struct openssl *openssl_load(const char **why);
#endif
