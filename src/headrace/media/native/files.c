#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif
enum { PATH_BYTES_MAX = 4096, PAGE_BYTES = 4096 };

/* Of `path`, or of the open file `at` if the path is empty. On network file systems the server is asked. */
static int read_state(int at, const char *path, struct file_state *state) {
  struct statx found;
  int flags = AT_SYMLINK_NOFOLLOW | AT_STATX_FORCE_SYNC | (*path ? 0 : AT_EMPTY_PATH);
  if (statx(at, path, flags, STATX_BASIC_STATS, &found) != 0) return 0;
  *state = (struct file_state){
      .is_regular = S_ISREG(found.stx_mode),
      .device = (uint64_t)found.stx_dev_major << 32 | found.stx_dev_minor,
      .number = found.stx_ino,
      .size_bytes = found.stx_size,
      .modified_s = found.stx_mtime.tv_sec,
      .changed_s = found.stx_ctime.tv_sec,
      .modified_ns = found.stx_mtime.tv_nsec,
      .changed_ns = found.stx_ctime.tv_nsec,
  };
  return 1;
}

static int is_same(const struct file_state *left, const struct file_state *right) {
  return left->is_regular == right->is_regular && left->device == right->device && left->number == right->number &&
         left->size_bytes == right->size_bytes && left->modified_s == right->modified_s &&
         left->modified_ns == right->modified_ns && left->changed_s == right->changed_s &&
         left->changed_ns == right->changed_ns;
}

/* Size and, unless the name is the address of the content, the time that the ETag is made of. */
static int is_version(const struct file_state *state, const struct object *object) {
  char etag[64];
  if (!state->is_regular || state->size_bytes != (uint64_t)object->size_bytes) return 0;
  if (object->is_immutable) return 1;
  int64_t modified_us = state->modified_s * 1000000ll + state->modified_ns / 1000;
  snprintf(etag, sizeof etag, "%llx-%llx", (unsigned long long)modified_us, (unsigned long long)state->size_bytes);
  return strcmp(etag, object->etag) == 0;
}

/* Open the file and read its state; -1: it is not the described version. */
static int open_below(const char *folder, const struct object *object, struct file_state *state) {
  struct open_how how = {
      .flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC,
      .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
  };
  int at = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
  int file = at >= 0 ? (int)syscall(SYS_openat2, at, object->key, &how, sizeof how) : -1;
  if (at >= 0) close(at);
  if (file < 0) return -1;
  if (read_state(file, "", state) && is_version(state, object)) return file;
  close(file);
  return -1;
}

/* Whether the path still leads to the open file, and the file was not changed. */
static int is_current(const struct open_file *entry, const char *folder) {
  char path[PATH_BYTES_MAX];
  struct file_state now;
  int bytes = snprintf(path, sizeof path, "%s/%s", folder, entry->object->key);
  return bytes > 0 && bytes < PATH_BYTES_MAX && read_state(AT_FDCWD, path, &now) && is_same(&now, &entry->state);
}

static void close_entry(struct open_file *entry) {
  close(entry->file);
  object_release(entry->object);
  entry->object = NULL;
}

int files_open(struct files *files, const char *folder, struct object *object, int64_t now_ms) {
  struct open_file *entry = &files->table[object->hash % FILES_MAX];
  if (entry->object != object || !is_current(entry, folder)) {
    if (entry->object != NULL) close_entry(entry);
    if ((entry->file = open_below(folder, object, &entry->state)) < 0) return -1;
    entry->object = object_hold(object);
  }
  entry->used_ms = now_ms;
  return entry->file;
}

void files_close_unused(struct files *files, int64_t before_ms) {
  for (int i = 0; i < FILES_MAX; i++)
    if (files->table[i].object != NULL && files->table[i].used_ms < before_ms) close_entry(&files->table[i]);
}

static int is_byte_resident(int file, int64_t offset) {
  char byte;
  struct iovec into = {&byte, 1};
  return preadv2(file, &into, 1, offset, RWF_NOWAIT) >= 0 || errno != EAGAIN;
}

int file_is_resident(int file, int64_t offset, int64_t bytes) {
  struct { uint64_t offset, length; } span = {(uint64_t)offset, (uint64_t)bytes};
  struct { uint64_t cached, dirty, writeback, evicted, recently_evicted; } found;
  if (syscall(SYS_cachestat, file, &span, &found, 0) == 0)
    return found.cached > (uint64_t)((offset + bytes - 1) / PAGE_BYTES - offset / PAGE_BYTES);
  return is_byte_resident(file, offset) && is_byte_resident(file, offset + bytes - 1);
}
