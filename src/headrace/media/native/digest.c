#include "digest.h"

#include <string.h>

#define ROTATE32(x, n) (((x) >> (n)) | ((x) << (32 - (n))))
#define ROTATE64(x, n) (((x) >> (n)) | ((x) << (64 - (n))))

static const uint32_t SHA256_START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint32_t SHA256_ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t read_be32(const uint8_t *at) {
  return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void write_be32(uint8_t *at, uint32_t value) {
  for (int i = 0; i < 4; i++) at[i] = (uint8_t)(value >> (24 - 8 * i));
}

static void sha256_block(uint32_t state[8], const uint8_t block[64]) {
  uint32_t w[64];
  for (int i = 0; i < 16; i++) w[i] = read_be32(block + 4 * i);
  for (int i = 16; i < 64; i++) {
    uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + w[i - 7] + (ROTATE32(a, 7) ^ ROTATE32(a, 18) ^ a >> 3) +
           (ROTATE32(b, 17) ^ ROTATE32(b, 19) ^ b >> 10);
  }
  uint32_t s[8];
  memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; i++) {
    uint32_t e = s[4], a = s[0];
    uint32_t first = s[7] + (ROTATE32(e, 6) ^ ROTATE32(e, 11) ^ ROTATE32(e, 25)) +
                     ((e & s[5]) ^ (~e & s[6])) + SHA256_ROUND[i] + w[i];
    uint32_t second = (ROTATE32(a, 2) ^ ROTATE32(a, 13) ^ ROTATE32(a, 22)) +
                      ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
    s[7] = s[6], s[6] = s[5], s[5] = s[4], s[4] = s[3] + first;
    s[3] = s[2], s[2] = s[1], s[1] = s[0], s[0] = first + second;
  }
  for (int i = 0; i < 8; i++) state[i] += s[i];
}

/* Continue `state`, which has seen `before` whole blocks, to the digest. */
static void sha256_end(uint32_t state[8], const uint8_t *message, size_t bytes, uint64_t before,
                       uint8_t out[SHA256_BYTES]) {
  uint64_t bits = (before * 64 + bytes) * 8;
  for (; bytes >= 64; message += 64, bytes -= 64) sha256_block(state, message);
  uint8_t last[128] = {0};
  if (bytes) memcpy(last, message, bytes);
  last[bytes] = 0x80;
  size_t end = bytes < 56 ? 64 : 128;
  write_be32(last + end - 8, (uint32_t)(bits >> 32));
  write_be32(last + end - 4, (uint32_t)bits);
  sha256_block(state, last);
  if (end == 128) sha256_block(state, last + 64);
  for (int i = 0; i < 8; i++) write_be32(out + 4 * i, state[i]);
}

void hmac_key_set(struct hmac_key *key, const uint8_t *secret, size_t secret_bytes) {
  uint8_t padded[64] = {0};
  if (secret_bytes > 64) {
    uint32_t state[8];
    memcpy(state, SHA256_START, sizeof state);
    sha256_end(state, secret, secret_bytes, 0, padded);
  } else if (secret_bytes) {
    memcpy(padded, secret, secret_bytes);
  }
  uint8_t block[64];
  memcpy(key->inner, SHA256_START, sizeof key->inner);
  for (int i = 0; i < 64; i++) block[i] = padded[i] ^ 0x36;
  sha256_block(key->inner, block);
  memcpy(key->outer, SHA256_START, sizeof key->outer);
  for (int i = 0; i < 64; i++) block[i] = padded[i] ^ 0x5c;
  sha256_block(key->outer, block);
}

void hmac_sha256(const struct hmac_key *key, const uint8_t *message, size_t bytes, uint8_t out[SHA256_BYTES]) {
  uint32_t state[8];
  uint8_t inner[SHA256_BYTES];
  memcpy(state, key->inner, sizeof state);
  sha256_end(state, message, bytes, 1, inner);
  memcpy(state, key->outer, sizeof state);
  sha256_end(state, inner, sizeof inner, 1, out);
}

static const uint64_t BLAKE2B_START[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

static const uint8_t BLAKE2B_ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

static void blake2b_mix(uint64_t v[16], const int at[4], uint64_t x, uint64_t y) {
  int a = at[0], b = at[1], c = at[2], d = at[3];
  v[a] += v[b] + x;
  v[d] = ROTATE64(v[d] ^ v[a], 32);
  v[c] += v[d];
  v[b] = ROTATE64(v[b] ^ v[c], 24);
  v[a] += v[b] + y;
  v[d] = ROTATE64(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = ROTATE64(v[b] ^ v[c], 63);
}

static void blake2b_block(uint64_t state[8], const uint8_t block[BLAKE2B_BLOCK], uint64_t seen_bytes, int is_last) {
  static const int AT[8][4] = {{0, 4, 8, 12},  {1, 5, 9, 13},  {2, 6, 10, 14}, {3, 7, 11, 15},
                               {0, 5, 10, 15}, {1, 6, 11, 12}, {2, 7, 8, 13},  {3, 4, 9, 14}};
  uint64_t m[16], v[16];
  for (int i = 0; i < 16; i++) {
    m[i] = 0;
    for (int j = 7; j >= 0; j--) m[i] = m[i] << 8 | block[8 * i + j];
  }
  memcpy(v, state, 64);
  memcpy(v + 8, BLAKE2B_START, 64);
  v[12] ^= seen_bytes;
  if (is_last) v[14] = ~v[14];
  for (int round = 0; round < 12; round++) {
    const uint8_t *order = BLAKE2B_ORDER[round % 10];
    for (int i = 0; i < 8; i++) blake2b_mix(v, AT[i], m[order[2 * i]], m[order[2 * i + 1]]);
  }
  for (int i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

void blake2b_key_set(struct blake2b_key *key, const uint8_t *secret, size_t key_bytes, int digest_bytes) {
  memcpy(key->state, BLAKE2B_START, sizeof key->state);
  key->state[0] ^= 0x01010000 ^ (uint64_t)key_bytes << 8 ^ (uint64_t)digest_bytes;
  key->digest_bytes = digest_bytes;
  key->is_keyed = key_bytes > 0;
  if (key->is_keyed) {
    uint8_t block[BLAKE2B_BLOCK] = {0};
    memcpy(block, secret, key_bytes);
    blake2b_block(key->state, block, BLAKE2B_BLOCK, 0);
  }
}

/* `bytes` is above 0: a keyed state whose message is empty would have to end with the key's block. */
void blake2b(const struct blake2b_key *key, const uint8_t *message, size_t bytes, uint8_t *out) {
  uint64_t state[8];
  uint64_t seen = key->is_keyed ? BLAKE2B_BLOCK : 0;
  memcpy(state, key->state, sizeof state);
  for (; bytes > BLAKE2B_BLOCK; message += BLAKE2B_BLOCK, bytes -= BLAKE2B_BLOCK)
    blake2b_block(state, message, seen += BLAKE2B_BLOCK, 0);
  uint8_t last[BLAKE2B_BLOCK] = {0};
  memcpy(last, message, bytes);
  blake2b_block(state, last, seen + bytes, 1);
  for (int i = 0; i < key->digest_bytes; i++) out[i] = (uint8_t)(state[i / 8] >> 8 * (i % 8));
}
