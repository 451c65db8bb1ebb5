"""Three system calls that Python has no name for: membarrier, fallocate with a mode, and cachestat.

membarrier makes every processor that runs a registered process pass a full memory barrier. So a worker pays nothing for its
turn counter: the one filler pays for all, some microseconds a fill. Where the call is refused (some seccomp
filters do) `barrier` says so, and the filler waits longer than any store buffer keeps a store.

cachestat (Linux 6.5) counts the pages of a span that are in the page cache: exact, and 1.2 us for 256 KiB; mincore takes
6.5 us, one byte read with RWF_NOWAIT 0.85 us and proves its own page alone (2 cores, 2026-11-22).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from typing import Final

_libc: Final = ctypes.CDLL(None, use_errno=True)
_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_GLOBAL_EXPEDITED: Final = 2
_REGISTER_GLOBAL_EXPEDITED: Final = 4
_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01
_CACHESTAT: Final = ctypes.c_long(451)
_TRIED: Final = [bytearray(1)]
"""Where a byte is read to that nobody looks at."""
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def register_for_barriers() -> bool:
    """Let `barrier` of any process reach this one; whether the kernel agrees. Lost at fork and exec."""
    return _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def barrier() -> bool:
    """Every registered process has passed a full memory barrier since the call; False: not possible here."""
    return _membarrier(_GLOBAL_EXPEDITED)


def punch_hole(descriptor: int, offset: int, length_bytes: int) -> None:
    """Take the bytes out of the file, and their pages out of the page cache. Raises: OSError.

    Pages that a socket still sends stay as they are: the socket has the only reference then, and the next write
    gets new pages.
    """
    if _libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, offset, length_bytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _Residency:
    """Counts cached pages with the structures of one thread, made once: two would cost 0.6 us a call."""

    def __init__(self) -> None:
        self._span = (ctypes.c_uint64 * 2)()
        self._found = (ctypes.c_uint64 * 5)()
        self._arguments = (ctypes.byref(self._span), ctypes.byref(self._found), ctypes.c_uint(0))
        self.is_refused = platform.system() != "Linux"

    def cached_pages(self, descriptor: int, offset: int, length_bytes: int) -> int:
        """Pages of the span in the page cache; -1 where the kernel refuses to count them."""
        self._span[0], self._span[1] = offset, length_bytes
        if _libc.syscall(_CACHESTAT, ctypes.c_int(descriptor), *self._arguments) != 0:
            # Other errors are of one file alone, such as EPERM where it belongs to another user.
            self.is_refused = ctypes.get_errno() == errno.ENOSYS
            return -1
        return self._found[0]


_RESIDENCY: Final = _Residency()


def is_in_memory(descriptor: int, offset: int, length_bytes: int) -> bool:
    """Whether every page of the span is in the page cache. Call it in the thread of the event loop.

    Without cachestat (a kernel before 6.5, a seccomp filter) only the first and the last page are tried.
    """
    if not _RESIDENCY.is_refused:
        found = _RESIDENCY.cached_pages(descriptor, offset, length_bytes)
        if found >= 0:
            first = offset // mmap.PAGESIZE
            return found > (offset + length_bytes - 1) // mmap.PAGESIZE - first
    try:
        os.preadv(descriptor, _TRIED, offset, os.RWF_NOWAIT)
        os.preadv(descriptor, _TRIED, offset + length_bytes - 1, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without RWF_NOWAIT cannot answer; a fault shows when the bytes are sent.
        return True
    return True


def _membarrier(command: int) -> bool:
    if _MEMBARRIER is None:
        return False
    zero = ctypes.c_uint(0)
    return bool(_libc.syscall(ctypes.c_long(_MEMBARRIER), ctypes.c_int(command), zero, 0) == 0)
