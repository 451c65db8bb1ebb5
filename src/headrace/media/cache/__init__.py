"""The disk cache of a node: blocks of 256 KiB in the frames of local disks.

One process, the filler, writes; the worker processes only read and send.

Promise: never a wrong byte. A damaged or lost disk, a torn write or a kill at any moment causes
cache misses only. Five rules ensure this, without a log, a snapshot, a free list or a lock:

1. An entry is found only through its tag. Storing 0 hides it, storing the tag publishes it
   (`frame_table`).
2. A worker publishes a counter that is odd inside an epoch of its event loop. The filler reuses a
   frame only after every worker has left the epoch in which it could have found it (`epochs`).
3. No frame is used beyond its epoch. A body that is half sent looks its block up again by key in
   the next epoch (`block_cache`).
4. Bytes that wait in sockets stay intact, because the old block is punched out of the file before
   the new one is written (`disk`, `disk_files`).
5. A block is served only if its checksum was correct since it was last read from the disk. The
   checksum covers the key and the disk id (`layout`).

    layout         bytes on a disk, keys, checksums, key to disk and set (pure)
    frame_table    the frames of a disk in shared memory; which frame is evicted (SIEVE)
    epochs         which workers may be sending a frame
    linux          named shared memory; membarrier, fallocate, cachestat
    disk_files     open and claim a folder or device; a disk as a worker reads it
    disk, disks    one disk of the filler; all disks of the node
    origin, fills  read blocks from the object store; fill a frame
    filler         the writing process and its commands
    filler_ipc     messages between workers and filler, the manifest of the disks
    block_cache    `BlockCache`: lookups and block requests of a worker
"""

from __future__ import annotations

from headrace.media.cache.block_cache import BlockCache
from headrace.media.cache.disk_files import Frame
from headrace.media.cache.filler import Filler
from headrace.media.cache.filler_ipc import control
from headrace.media.cache.layout import BlockKey

__all__ = ["BlockCache", "BlockKey", "Filler", "Frame", "control"]
