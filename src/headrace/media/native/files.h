/* Objects that are files of a local folder, for a node without disks.

   Folder and file are opened for each answer, so a folder that is unmounted or replaced meanwhile is
   noticed. The file must still be the version that was described, so a replaced
   object is never mixed with its successor. */
#ifndef HEADRACE_FILES_H
#define HEADRACE_FILES_H

#include "objects.h"

/* Open the file of `object` below `folder`; -1: it has another version, or is no regular file. No
   symbolic link is followed. */
int file_open(const char *folder, const struct object *object);
#endif
