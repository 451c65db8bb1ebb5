"""The store of a cache node: blocks of 256 KiB in the frames of local disks. One process writes, all others send.

Promise: never a wrong byte. A damaged or lost disk or index, a kill at any moment, a torn write cost misses only.

Five rules carry it, without a log, a snapshot, a free list or a lock:

1. An entry is found only through its tag: one store of 0 hides it, one store of the tag shows it (`table`).
2. Workers publish a counter that is odd inside a turn of their event loop; the filler touches a frame only after every worker has
   left the turn in which it could have found it (`turns`).
3. Nothing of a frame outlives a turn: a body that is half sent is looked up by its key in the next one (`view`).
4. Bytes that wait in sockets are kept by punching the old block out before the new one is written (`disk`, `probe`).
5. A block is served only after its sum, seeded with its key and disk, was right since it was last read from the disk (`layout`, `view`).

The order of a fill (`filling`): find again; read the origin, check length and ETag; choose a frame; hide it; barrier, wait for
turns; punch; write; fields, entry sum; show; answer. The origin is read before a frame is given up, since an origin
that is down would otherwise empty the store; the wait of some 10 us after it is not worth hiding beside the read.

layout      bytes on a disk, keys, sums, which disk and set a key belongs to (pure)
sieve       which frame gives way (pure)
table       the frames of a disk in shared memory
turns       who may be sending a frame
shared, kernel_calls   memory by name; membarrier, fallocate, cachestat
files, disk, probe     a disk: opened, written, tried
disks, manifest        all disks of a node, what workers know of them
origin, filling        shapes and blocks of the object store; the fill
scrub       blocks compared with their sums in the background
wire, filler, commands, link   filler and workers on a unix socket
view        `Store`: what a worker has
"""

from __future__ import annotations

from headrace.media.cache.block_cache import Store
from headrace.media.cache.filler import Filler
from headrace.media.cache.filler_ipc import control
from headrace.media.cache.layout import BlockKey
from headrace.media.cache.read_disk import Frame

__all__ = ["BlockKey", "Filler", "Frame", "Store", "control"]
