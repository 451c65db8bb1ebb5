/* SHA-256, HMAC-SHA256 (RFC 2104, FIPS 180-4) and keyed BLAKE2b (RFC 7693).

   Both keyed digests start from a state that already contains the key, so a short message costs the
   compression of its own blocks only. */
#ifndef HEADRACE_DIGEST_H
#define HEADRACE_DIGEST_H

#include <stddef.h>
#include <stdint.h>

#define SHA256_BYTES 32
#define BLAKE2B_BLOCK 128

struct hmac_key {
  uint32_t inner[8];
  uint32_t outer[8];
};

void hmac_key_set(struct hmac_key *key, const uint8_t *secret, size_t secret_bytes);
void hmac_sha256(const struct hmac_key *key, const uint8_t *message, size_t bytes, uint8_t out[SHA256_BYTES]);

struct blake2b_key {
  uint64_t state[8];
  int digest_bytes;
  int is_keyed;
};

/* Without a key (key_bytes is 0) it is plain BLAKE2b. */
void blake2b_key_set(struct blake2b_key *key, const uint8_t *secret, size_t key_bytes, int digest_bytes);
void blake2b(const struct blake2b_key *key, const uint8_t *message, size_t bytes, uint8_t *out);
#endif
