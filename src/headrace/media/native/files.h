/* Objects that are files of a local folder, for a node without disks.

   Files stay open while they are in use, but the path is looked up for each answer: an open file is used only if
   the path still leads to it, unchanged. So a file or folder that is replaced, changed, removed or unmounted is
   noticed, and a replaced object is never mixed with its successor. */
#ifndef HEADRACE_FILES_H
#define HEADRACE_FILES_H

#include "objects.h"

#define FILES_MAX 512

/* What identifies a file and its content. */
struct file_state {
  int is_regular;
  uint64_t device, number, size_bytes;
  int64_t modified_s, changed_s;
  uint32_t modified_ns, changed_ns;
};

struct open_file {
  struct object *object; /* NULL: the entry is empty */
  int file;
  int64_t used_ms;
  struct file_state state;
};

/* By hash of the key; an object in the way of a new one is closed. */
struct files {
  struct open_file table[FILES_MAX];
};

/* The open file of `object` below `folder`, valid until the next call; -1: it has another version, or is no regular
   file. No symbolic link is followed when it is opened. */
int files_open(struct files *files, const char *folder, struct object *object, int64_t now_ms);
/* Close the files that were not used since `before_ms`. */
void files_close_unused(struct files *files, int64_t before_ms);

/* Whether a part of a file, also of one with blocks, is in the page cache. By cachestat, which has no side effect;
   without it the first and last byte are read with RWF_NOWAIT. A file system without both counts as resident: a fault
   shows when bytes are sent. */
int file_is_resident(int file, int64_t offset, int64_t bytes);
#endif
