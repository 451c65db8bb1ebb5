#include "objects.h"

#include <stdlib.h>
#include <string.h>

enum { PROBES = 8 };

/* FNV-1a. Keys are those of stored objects only, so nobody can fill the table with collisions. */
static uint32_t hash_of(const char *key, size_t bytes) {
  uint32_t hash = 2166136261u;
  for (size_t i = 0; i < bytes; i++) hash = (hash ^ (uint8_t)key[i]) * 16777619u;
  return hash;
}

static int is_same(const struct object *object, uint32_t hash, const char *key, size_t bytes) {
  return object->hash == hash && object->key_bytes == bytes && memcmp(object->key, key, bytes) == 0;
}

void objects_clear(struct objects *objects) {
  for (size_t i = 0; i < OBJECTS_MAX; i++) {
    if (objects->table[i] != NULL) object_release(objects->table[i]);
    objects->table[i] = NULL;
  }
}

/* The entry of a key, or NULL. Entries may be emptied, so an empty one does not end the search. */
static struct object **find_entry(struct objects *objects, const char *key, size_t key_bytes) {
  uint32_t hash = hash_of(key, key_bytes);
  for (uint32_t i = 0; i < PROBES; i++) {
    struct object **entry = &objects->table[(hash + i) % OBJECTS_MAX];
    if (*entry != NULL && is_same(*entry, hash, key, key_bytes)) return entry;
  }
  return NULL;
}

struct object *objects_find(struct objects *objects, const char *key, size_t key_bytes) {
  struct object **entry = find_entry(objects, key, key_bytes);
  return entry != NULL ? *entry : NULL;
}

void objects_remove(struct objects *objects, const char *key) {
  struct object **entry = find_entry(objects, key, strlen(key));
  if (entry == NULL) return;
  object_release(*entry);
  *entry = NULL;
}

void objects_put(struct objects *objects, struct object *object) {
  struct object **chosen = NULL;
  for (uint32_t i = 0; i < PROBES; i++) {
    struct object **entry = &objects->table[(object->hash + i) % OBJECTS_MAX];
    if (*entry != NULL && is_same(*entry, object->hash, object->key, object->key_bytes)) {
      chosen = entry;
      break;
    }
    int is_better = chosen == NULL || (*chosen != NULL && (*entry == NULL || (*entry)->expires_ms < (*chosen)->expires_ms));
    if (is_better) chosen = entry;
  }
  if (*chosen != NULL) object_release(*chosen);
  *chosen = object;
}

static char *append(char **at, const char *text, size_t bytes) {
  char *start = *at;
  memcpy(start, text, bytes + 1);
  *at += bytes + 1;
  return start;
}

struct object *object_make(const struct plane_object *described) {
  size_t key = strlen(described->key), version = strlen(described->version);
  size_t lines = strlen(described->lines), tail = strlen(described->tail), fresh = strlen(described->cache_control);
  if (version + lines + tail + fresh > OBJECT_TEXTS_MAX) return NULL;
  struct object *object = malloc(sizeof *object + key + version + lines + tail + fresh + 5);
  if (object == NULL) return NULL;
  char *at = (char *)(object + 1);
  *object = (struct object){
      .references = 1,
      .is_immutable = described->is_immutable,
      .is_for_peers = described->is_for_peers,
      .peer = described->peer,
      .fresh_s = described->fresh_s,
      .hash = hash_of(described->key, key),
      .size_bytes = described->size_bytes,
      .expires_ms = described->expires_ms,
      .key_bytes = key,
      .version_bytes = version,
      .lines_bytes = lines,
      .tail_bytes = tail,
  };
  object->key = append(&at, described->key, key);
  object->version = append(&at, described->version, version);
  /* GENERATION:SIZE:ETAG, see `version_of` in media/cache/layout.py */
  object->generation = strtoll(object->version, NULL, 10);
  const char *colon = strchr(object->version, ':');
  if (colon != NULL) colon = strchr(colon + 1, ':');
  object->etag = colon != NULL ? colon + 1 : object->version + version;
  object->lines = append(&at, described->lines, lines);
  object->tail = append(&at, described->tail, tail);
  object->cache_control = append(&at, described->cache_control, fresh);
  return object;
}

struct object *object_hold(struct object *object) {
  object->references++;
  return object;
}

void object_release(struct object *object) {
  if (--object->references == 0) free(object);
}
