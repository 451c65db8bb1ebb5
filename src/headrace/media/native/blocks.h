/* Verified blocks of this node's disks, found in the shared frame table (media/cache/frame_table.py).

   `blocks_find` and the functions that take a frame are used inside an epoch only. */
#ifndef HEADRACE_BLOCKS_H
#define HEADRACE_BLOCKS_H

#include "digest.h"
#include "objects.h"
#include "plane.h"

#define BLOCK_BYTES (256 * 1024)

struct blocks {
  uint64_t revision; /* of the manifest these disks are from */
  uint8_t owners[PLANE_SLOTS];
  uint8_t owners_before[PLANE_SLOTS];
  int has_before;
  struct blake2b_key digests;
  int count;
  struct plane_disk disks[];
};

struct frame {
  const struct plane_disk *disk;
  uint64_t number;
  int64_t offset;
  int64_t length;
};

/* Made by one malloc. */
struct blocks *blocks_make(uint64_t revision, const struct plane_disk *disks, int count, const uint8_t *owners,
                           const uint8_t *owners_before, const uint8_t *hash_key, size_t hash_key_bytes);

/* Find a verified block of `object`; 0: there is none. */
int blocks_find(const struct blocks *blocks, const struct object *object, int64_t number, struct frame *frame);
/* Mark the block as visited, which keeps it longer (SIEVE). Once for each answer and block. */
void frame_note_visit(const struct frame *frame);
/* Whether `bytes` of the frame from `offset` on are in memory and still verified. */
int frame_is_resident(const struct frame *frame, int64_t offset, int64_t bytes);
#endif
