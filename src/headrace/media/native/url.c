#include "url.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

static const char PREFIX[] = "/m/";
static const size_t PREFIX_BYTES = sizeof PREFIX - 1;
enum {
  SIGNATURE_CHARACTERS = 43,
  EXPIRY_DIGITS_MAX = 11,
  RATE_DIGITS_MAX = 12,
  NETWORK_CHARACTERS_MAX = 49,
};

/* base64url without padding of 32 bytes. */
static void encode_signature(const uint8_t digest[SHA256_BYTES], char out[SIGNATURE_CHARACTERS + 1]) {
  static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  uint8_t padded[33] = {0};
  memcpy(padded, digest, SHA256_BYTES);
  for (int i = 0; i < 11; i++) {
    uint32_t bits = (uint32_t)padded[3 * i] << 16 | (uint32_t)padded[3 * i + 1] << 8 | padded[3 * i + 2];
    for (int j = 0; j < 4; j++) out[4 * i + j] = DIGITS[bits >> (18 - 6 * j) & 63];
  }
}

const struct hmac_key *url_find_key(const struct url_keys *keys, const char *id) {
  for (int i = 0; i < keys->count; i++)
    if (memcmp(keys->ids[i], id, URL_KEY_ID) == 0) return &keys->keys[i];
  return NULL;
}

/* A number above 0 without leading zeros; 0: there is none. */
static int64_t read_digits(const char **at, const char *end, int digits_max) {
  if (*at < end && **at == '0') return 0;
  int64_t number = text_read_number(at, end, digits_max);
  return number < 0 ? 0 : number;
}

static int skip(const char **at, const char *end, const char *text) {
  size_t bytes = strlen(text);
  if ((size_t)(end - *at) < bytes || memcmp(*at, text, bytes) != 0) return 0;
  *at += bytes;
  return 1;
}

/* [&a=NETWORK][&r=RATE] */
static int read_limits(const char **at, const char *end, struct url *url) {
  if (skip(at, end, "&a=")) {
    url->network.at = *at;
    while (*at < end && **at != '&') ++*at;
    url->network.bytes = (size_t)(*at - url->network.at);
    if (url->network.bytes < 2 || url->network.bytes > NETWORK_CHARACTERS_MAX) return 0;
  }
  return !skip(at, end, "&r=") || (url->rate = read_digits(at, end, RATE_DIGITS_MAX)) > 0;
}

/* e=EXPIRY&k=ID[&a=NETWORK][&r=RATE]&s=SIGNATURE; what is signed begins with the path. */
static int read_signed(const char *target, const char *query, const char *end, const struct url_keys *keys,
                       int64_t now_s, struct url *url) {
  const char *at = query;
  if (!skip(&at, end, "e=") || (url->expires_s = read_digits(&at, end, EXPIRY_DIGITS_MAX)) == 0) return 0;
  if (!skip(&at, end, "&k=") || end - at < URL_KEY_ID) return 0;
  const struct hmac_key *key = url_find_key(keys, at);
  at += URL_KEY_ID;
  if (key == NULL || now_s >= url->expires_s || !read_limits(&at, end, url)) return 0;
  const char *signed_end = at;
  if (!skip(&at, end, "&s=") || end - at != SIGNATURE_CHARACTERS) return 0;
  uint8_t digest[SHA256_BYTES];
  char expected[SIGNATURE_CHARACTERS + 1];
  hmac_sha256(key, (const uint8_t *)target, (size_t)(signed_end - target), digest);
  encode_signature(digest, expected);
  return is_equal_secret(at, expected, SIGNATURE_CHARACTERS);
}

int url_read_key(const char *target, size_t bytes, struct url *url) {
  const char *query = memchr(target, '?', bytes);
  const char *path_end = query != NULL ? query : target + bytes;
  memset(url, 0, sizeof *url);
  if ((size_t)(path_end - target) <= PREFIX_BYTES || memcmp(target, PREFIX, PREFIX_BYTES) != 0) return 0;
  url->key.at = target + PREFIX_BYTES;
  url->key.bytes = (size_t)(path_end - url->key.at);
  /* An escape may stand for a character of a key: only the control plane decodes it. */
  return memchr(url->key.at, '%', url->key.bytes) == NULL;
}

/* Whether a query has a field of a variant, which only the control plane reads (media/variants.py). */
static int names_variant(const char *query, const char *end) {
  static const char *const FIELDS[] = {"w=", "h=", "fit=", "fm="};
  for (const char *at = query; at < end; at++) {
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++)
      if (skip(&at, end, FIELDS[i])) return 1;
    at = memchr(at, '&', (size_t)(end - at));
    if (at == NULL) return 0;
  }
  return 0;
}

int url_read(const char *target, size_t bytes, const struct url_keys *keys, int is_signature_required,
             int64_t now_s, struct url *url) {
  const char *end = target + bytes;
  const char *query = memchr(target, '?', bytes);
  if (!url_read_key(target, bytes, url)) return 0;
  int is_signed = query != NULL && memmem(query, (size_t)(end - query), "&s=", 3) != NULL;
  if (!is_signed) return !is_signature_required && (query == NULL || !names_variant(query + 1, end));
  return read_signed(target, query + 1, end, keys, now_s, url);
}

static const uint8_t IPV4_PREFIX[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

int address_read(int fd, struct address *address) {
  struct sockaddr_storage peer;
  socklen_t bytes = sizeof peer;
  if (getpeername(fd, (struct sockaddr *)&peer, &bytes) != 0) return 0;
  if (peer.ss_family == AF_INET) {
    memcpy(address->bytes, IPV4_PREFIX, sizeof IPV4_PREFIX);
    memcpy(address->bytes + 12, &((struct sockaddr_in *)&peer)->sin_addr, 4);
  } else if (peer.ss_family == AF_INET6) {
    memcpy(address->bytes, &((struct sockaddr_in6 *)&peer)->sin6_addr, 16);
  } else {
    return 0;
  }
  return address->is_known = 1;
}

/* The network's address and its number of leading bits in 16 bytes; 0: it has another notation. */
static int read_network(const struct url *url, uint8_t network[16], int *bits) {
  char text[NETWORK_CHARACTERS_MAX + 1];
  memcpy(text, url->network.at, url->network.bytes);
  text[url->network.bytes] = 0;
  char *slash = strchr(text, '/');
  if (slash != NULL) *slash = 0;
  int is_ipv4 = inet_pton(AF_INET, text, network + 12) == 1;
  if (is_ipv4) memcpy(network, IPV4_PREFIX, sizeof IPV4_PREFIX);
  else if (inet_pton(AF_INET6, text, network) != 1) return 0;
  int own_bits = is_ipv4 ? 32 : 128;
  int64_t prefix = own_bits;
  if (slash != NULL) {
    const char *at = slash + 1, *end = at + strlen(at);
    prefix = read_digits(&at, end, 3);
    if (prefix == 0 || prefix > own_bits || at != end) return 0;
  }
  *bits = (int)prefix + 128 - own_bits;
  return 1;
}

int url_allows(const struct url *url, const struct address *address) {
  uint8_t network[16];
  int bits;
  if (url->network.at == NULL) return 1;
  if (!address->is_known || !read_network(url, network, &bits)) return 0;
  for (int i = 0; i < 128; i++) {
    int expected = network[i / 8] >> (7 - i % 8) & 1, found = address->bytes[i / 8] >> (7 - i % 8) & 1;
    if (i < bits ? expected != found : expected) return 0;
  }
  return 1;
}
