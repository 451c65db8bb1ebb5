/* Targets of requests: the key of the object, and the signature of the URL (media/signing.py).

   Recognized are /m/KEY without escapes, and signed queries with expiry, key id, address and rate. A
   URL with a tag, a trace or a variant, an invalid signature and an expired one are left to the control plane. */
#ifndef HEADRACE_URL_H
#define HEADRACE_URL_H

#include "digest.h"
#include "text.h"

#define URL_KEYS_MAX 64
#define URL_KEY_ID 8

struct url_keys {
  int count;
  char ids[URL_KEYS_MAX][URL_KEY_ID];
  struct hmac_key keys[URL_KEYS_MAX];
};

/* The key with the id of URL_KEY_ID characters at `id`, or NULL. */
const struct hmac_key *url_find_key(const struct url_keys *keys, const char *id);

struct url {
  struct text key;
  int64_t expires_s; /* since 1970; 0: not signed */
  int64_t rate;      /* bytes per second; 0: unlimited */
  struct text network; /* the URL is only for this address or network; none: for all */
};

/* An address as 16 bytes, IPv4 as ::ffff:a.b.c.d; `is_known` is 0 before it was read. */
struct address {
  uint8_t is_known;
  uint8_t bytes[16];
};

/* The key of `target`, without a look at its query; 0: it has an unusual notation. */
int url_read_key(const char *target, size_t bytes, struct url *url);
/* Whether `target` may be answered now. `now_s` is the time since 1970. */
int url_read(const char *target, size_t bytes, const struct url_keys *keys, int is_signature_required,
             int64_t now_s, struct url *url);
/* Whether the network of the URL contains `address`. A network in unusual notation contains none. */
int url_allows(const struct url *url, const struct address *address);
/* The address of the other end of a TCP socket; 0: it is gone. */
int address_read(int fd, struct address *address);
#endif
