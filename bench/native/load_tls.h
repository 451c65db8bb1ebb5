/* TLS of the generator, by the machine's OpenSSL 3: prototypes here, so that no headers of it are needed.

   With tls=1 each connection has TLS, of the server's preferred suite; certificates are not verified. */
typedef struct ssl_st SSL;
typedef struct ssl_ctx_st SSL_CTX;
typedef struct ssl_session_st SSL_SESSION;
const void *TLS_client_method(void);
SSL_CTX *SSL_CTX_new(const void *method);
long SSL_CTX_ctrl(SSL_CTX *context, int command, long number, void *data);
void SSL_CTX_set_default_read_buffer_len(SSL_CTX *context, size_t bytes);
void SSL_CTX_sess_set_new_cb(SSL_CTX *context, int (*keep)(SSL *, SSL_SESSION *));
SSL *SSL_new(SSL_CTX *context);
void SSL_free(SSL *ssl);
void SSL_set_shutdown(SSL *ssl, int mode);
int SSL_set_fd(SSL *ssl, int fd);
int SSL_set_session(SSL *ssl, SSL_SESSION *session);
void SSL_SESSION_free(SSL_SESSION *session);
int SSL_session_reused(const SSL *ssl);
void SSL_set_connect_state(SSL *ssl);
int SSL_do_handshake(SSL *ssl);
int SSL_read(SSL *ssl, void *into, int bytes_max);
int SSL_write(SSL *ssl, const void *data, int bytes);
int SSL_get_error(const SSL *ssl, int result);
void ERR_clear_error(void);

enum { TLS_WANT_READ = 2, TLS_WANT_WRITE = 3, TLS_READ_BYTES = 256 * 1024 };
static SSL_CTX *tls_context;
static SSL_SESSION *last_session;

static int keep_session(SSL *ssl, SSL_SESSION *session) {
    (void)ssl;
    if (last_session) SSL_SESSION_free(last_session);
    last_session = session;
    return 1;
}

static SSL *tls_of(int fd, int is_resumed) {
    if (!tls_context) {
        tls_context = SSL_CTX_new(TLS_client_method());
        SSL_CTX_ctrl(tls_context, 41, 1, NULL); /* read ahead: one call for many records */
        SSL_CTX_set_default_read_buffer_len(tls_context, TLS_READ_BYTES);
        SSL_CTX_ctrl(tls_context, 44, 1 | 0x300, NULL); /* sessions of a client, kept by keep_session */
        SSL_CTX_sess_set_new_cb(tls_context, keep_session);
    }
    SSL *ssl = SSL_new(tls_context);
    SSL_set_fd(ssl, fd);
    SSL_set_connect_state(ssl);
    if (is_resumed && last_session) SSL_set_session(ssl, last_session);
    return ssl;
}

static void tls_end(SSL *ssl) {
    SSL_set_shutdown(ssl, 1 | 2); /* as if both had ended it: otherwise its session is not used again */
    SSL_free(ssl);
}

/* Received bytes, or -1 with EAGAIN, or 0 at the end, as recv. */
static ssize_t tls_read(SSL *ssl, void *into, size_t bytes_max) {
    int got = SSL_read(ssl, into, bytes_max < 1 << 30 ? (int)bytes_max : 1 << 30);
    if (got > 0) return got;
    int error = SSL_get_error(ssl, got);
    ERR_clear_error();
    errno = EAGAIN;
    return error == TLS_WANT_READ || error == TLS_WANT_WRITE ? -1 : 0;
}
