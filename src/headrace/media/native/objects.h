/* The objects that the control plane has described: an open-addressing table by key.

   An object is shared by the table and by the answers that send it, so it is counted. At most
   OBJECTS_MAX are kept; beyond that an object in the way of a new one is dropped and described again
   when it is requested. */
#ifndef HEADRACE_OBJECTS_H
#define HEADRACE_OBJECTS_H

#include <stddef.h>
#include <stdint.h>

#include "plane.h"

#define OBJECTS_MAX 65536
#define OBJECT_TEXTS_MAX 3072 /* of version, lines, tail and cache_control together */

struct object {
  int references;
  int is_immutable;
  int is_for_peers;
  int32_t peer; /* that keeps its blocks; 0: this node */
  int32_t fresh_s;
  uint32_t hash;
  int64_t size_bytes;
  int64_t expires_ms;
  size_t key_bytes;
  size_t version_bytes;
  size_t lines_bytes;
  size_t tail_bytes;
  int64_t generation; /* of the purge that its version has */
  const char *etag;   /* in its version */
  char *key; /* all texts follow the structure and are terminated */
  char *version;
  char *lines;
  char *tail;
  char *cache_control; /* of unsigned URLs; empty: from fresh_s and is_immutable */
};

struct objects {
  struct object *table[OBJECTS_MAX];
};

void objects_clear(struct objects *objects);
struct object *objects_find(struct objects *objects, const char *key, size_t key_bytes);
void objects_remove(struct objects *objects, const char *key);
/* Takes over the caller's reference. */
void objects_put(struct objects *objects, struct object *object);

struct object *object_make(const struct plane_object *described);
struct object *object_hold(struct object *object);
void object_release(struct object *object);
#endif
