#include "blocks.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"

enum {
  WAYS = 16,
  TAG_BYTES = 8,
  ENTRY_BYTES = 24,
  SET_BYTES = WAYS * (TAG_BYTES + ENTRY_BYTES),
  DIGEST_BYTES = 20,
  MARKS_MAX = 2,
  NO_DISK = 255,
};
enum { UNVERIFIED, VERIFIED, COLD };

struct blocks *blocks_make(uint64_t revision, const struct plane_disk *disks, int count, const uint8_t *owners,
                           const uint8_t *owners_before, const uint8_t *hash_key, size_t hash_key_bytes) {
  struct blocks *blocks = malloc(sizeof *blocks + (size_t)count * sizeof *disks);
  if (blocks == NULL) return NULL;
  blocks->revision = revision;
  blocks->count = count;
  memcpy(blocks->disks, disks, (size_t)count * sizeof *disks);
  memcpy(blocks->owners, owners, PLANE_SLOTS);
  blocks->has_before = owners_before != NULL;
  if (blocks->has_before) memcpy(blocks->owners_before, owners_before, PLANE_SLOTS);
  blake2b_key_set(&blocks->digests, hash_key, hash_key_bytes, DIGEST_BYTES);
  return blocks;
}

static uint64_t read_le(const uint8_t *at, int bytes) {
  uint64_t value = 0;
  for (int i = bytes - 1; i >= 0; i--) value = value << 8 | at[i];
  return value;
}

/* The tag is published by one aligned store after the entry: acquire orders the reads after it. */
static uint64_t load_tag(const uint8_t *set, int way) {
  return atomic_load_explicit((const _Atomic uint64_t *)(const void *)(set + way * TAG_BYTES), memory_order_acquire);
}

static uint8_t load_byte(const uint8_t *at) {
  return atomic_load_explicit((const _Atomic uint8_t *)at, memory_order_acquire);
}

static void store_byte(uint8_t *at, uint8_t value) {
  atomic_store_explicit((_Atomic uint8_t *)at, value, memory_order_release);
}

static int find_on(const struct plane_disk *disk, const uint8_t digest[DIGEST_BYTES], struct frame *frame) {
  if (disk->sets == 0) return 0;
  uint64_t tag = read_le(digest, TAG_BYTES), hash = read_le(digest + 12, 8);
  uint32_t fingerprint = (uint32_t)read_le(digest + 8, 4);
  uint64_t number = (hash >> 16) % disk->sets;
  const uint8_t *set = disk->index + number * SET_BYTES;
  for (int way = 0; way < WAYS; way++) {
    if (load_tag(set, way) != tag) continue;
    const uint8_t *entry = set + WAYS * TAG_BYTES + way * ENTRY_BYTES;
    if ((uint32_t)read_le(entry, 4) != fingerprint) continue;
    frame->disk = disk;
    frame->number = number * WAYS + (uint64_t)way;
    frame->length = (int64_t)read_le(entry + 8, 4);
    frame->offset = disk->data_at + (int64_t)frame->number * BLOCK_BYTES;
    return 1;
  }
  return 0;
}

static int find_in(const struct blocks *blocks, const uint8_t *owners, const uint8_t digest[DIGEST_BYTES],
                   struct frame *frame) {
  uint8_t owner = owners[read_le(digest + 12, 8) & (PLANE_SLOTS - 1)];
  return owner != NO_DISK && owner < blocks->count && find_on(&blocks->disks[owner], digest, frame);
}

/* The digest of a block's key; see `Digests` in media/cache/layout.py. Returns 0 if it is too long. */
static int digest_of(const struct blocks *blocks, const struct object *object, int64_t number,
                     uint8_t digest[DIGEST_BYTES]) {
  char text[2048];
  int bytes = snprintf(text, sizeof text, "%zu:%s:%lld:%s", object->version_bytes, object->version,
                       (long long)number, object->key);
  if (bytes <= 0 || (size_t)bytes >= sizeof text) return 0;
  blake2b(&blocks->digests, (const uint8_t *)text, (size_t)bytes, digest);
  if (read_le(digest, TAG_BYTES) == 0) { /* a tag of zero means an empty frame */
    memmove(digest + 1, digest + 1, DIGEST_BYTES - 1);
    digest[0] = 1;
  }
  return 1;
}

int blocks_find(const struct blocks *blocks, const struct object *object, int64_t number, struct frame *frame) {
  uint8_t digest[DIGEST_BYTES];
  if (!digest_of(blocks, object, number, digest)) return 0;
  int is_found = find_in(blocks, blocks->owners, digest, frame) ||
                 (blocks->has_before && find_in(blocks, blocks->owners_before, digest, frame));
  return is_found && load_byte(&frame->disk->verified[frame->number]) == VERIFIED;
}

void frame_note_visit(const struct frame *frame) {
  uint8_t *marks = &frame->disk->visited[frame->number];
  uint8_t seen = load_byte(marks);
  /* Read before writing: a store would take the cache line from other processors each time. */
  if (seen < MARKS_MAX) store_byte(marks, (uint8_t)(seen + 1));
}

static void note_cold(const struct frame *frame) {
  uint8_t *verified = &frame->disk->verified[frame->number];
  if (load_byte(verified) == VERIFIED) store_byte(verified, COLD);
}

/* The verified mark is read after the page cache: it is removed before any process reads the block
   from the disk again, so pages that were read but not verified are not sent. */
int frame_is_resident(const struct frame *frame, int64_t offset, int64_t bytes) {
  if (!file_is_resident(frame->disk->reader, frame->offset + offset, bytes)) {
    note_cold(frame);
    return 0;
  }
  return load_byte(&frame->disk->verified[frame->number]) == VERIFIED;
}
