"""What the cache needs of Linux: named shared memory, membarrier, fallocate and cachestat.

Shared memory is a file in /dev/shm: a mapped page that a disk cannot read back is a SIGBUS, not an
error. All pages are allocated when the file is made, because a full /dev/shm is a SIGBUS later. If
it has no room, the file is made in the node's run folder. The path depends on the run folder only,
so a restarted filler finds the memory that its workers use. A file is never replaced while a worker
may have it open: it is cleared in place. RUN_FILE names the run folder, so memory of a deleted node
can be found and removed.

membarrier makes every processor that runs a registered process execute a full memory barrier. So
workers pay nothing for their epoch counter; the filler pays some microseconds for each fill. If the
call is refused, as by some seccomp filters, `barrier` returns False and the filler waits instead.

cachestat (Linux 6.5) counts the cached pages of a range exactly and is faster than mincore.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import platform
from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder of our own in it, mode 0700
RUN_FILE: Final = "run"
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EPERM, errno.EACCES})
_libc: Final = ctypes.CDLL(None, use_errno=True)
_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_GLOBAL_EXPEDITED: Final = 2
_REGISTER_GLOBAL_EXPEDITED: Final = 4
_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01
_CACHESTAT: Final = ctypes.c_long(451)
_TRIED: Final = [bytearray(1)]
"""Target of probing reads."""


def shared_folders(run: Path) -> list[Path]:
    """Folders that may hold the node's shared files, the preferred one first."""
    name = hashlib.blake2b(bytes(run.resolve()), digest_size=8).hexdigest()
    folders = [_MEMORY / f"headrace-{os.getuid()}-{name}"] if _MEMORY.is_dir() else []
    return [*folders, run]


def open_shared(run: Path, name: str, size_bytes: int) -> tuple[Path, mmap.mmap]:
    """Open the shared file `name` and map it; create it with zeros unless it exists with this size.

    Raises: OSError if no folder has room.
    """
    folders = shared_folders(run)
    for folder in folders:
        path = folder / name
        if path.exists() and path.stat().st_size == size_bytes:
            return path, map_shared(path)[0]
        _empty(path)
    for folder in folders:
        try:
            return folder / name, _make(folder, name, size_bytes, run)
        except OSError as error:
            if error.errno not in _NO_ROOM or folder == folders[-1]:
                raise
    raise AssertionError("there is always the run folder")


def has_shared(run: Path, name: str, size_bytes: int) -> bool:
    """Whether the shared file `name` exists with this size."""
    paths = [folder / name for folder in shared_folders(run)]
    return any(path.exists() and path.stat().st_size == size_bytes for path in paths)


def map_shared(path: Path) -> tuple[mmap.mmap, str]:
    """Map a shared file for reading and writing. Return also its identity. Raises: OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, 0), identity_of(descriptor)
    finally:
        os.close(descriptor)


def remove_shared(run: Path) -> None:
    """Remove the node's shared files, when its last process ends."""
    folder = shared_folders(run)[0]
    if folder != run and folder.is_dir():
        _remove(folder)


def memory_folders() -> dict[Path, Path]:
    """This user's folders of shared memory, each with its run folder."""
    found = {}
    for folder in _MEMORY.glob(f"headrace-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            found[folder] = Path(os.fsdecode((folder / RUN_FILE).read_bytes()))
    return found


def remove_abandoned() -> None:
    """Remove the shared memory of nodes whose run folder was deleted."""
    for folder, run in memory_folders().items():
        if not run.exists():
            with contextlib.suppress(FileNotFoundError):  # another node removes it, too
                _remove(folder)


def identity_of(file: int | Path) -> str:
    """The identity of a file or device: device and inode numbers."""
    seen = os.stat(file)  # noqa: PTH116 - a descriptor, too
    return f"{seen.st_dev}:{seen.st_ino}:{seen.st_rdev}"


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
    folder.rmdir()


def _make(folder: Path, name: str, size_bytes: int, run: Path) -> mmap.mmap:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "a folder of another user's", str(folder))
    if folder != run:
        (folder / RUN_FILE).write_bytes(bytes(run.resolve()))
    draft = folder / f"{name}.{os.getpid()}.draft"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        memory = mmap.mmap(descriptor, size_bytes)
        # A link, not a rename: two concurrent makers must end up with the same file.
        try:
            os.link(draft, folder / name)
        except FileExistsError:
            memory.close()
            return map_shared(folder / name)[0]
        return memory
    finally:
        os.close(descriptor)
        draft.unlink(missing_ok=True)


def _empty(path: Path) -> None:
    """Clear and remove a file of another size, which workers of an earlier node may still map."""
    if path.exists() and path.stat().st_size:
        with map_shared(path)[0] as memory:
            memory[:] = bytes(len(memory))
    path.unlink(missing_ok=True)


_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def register_for_barriers() -> bool:
    """Register this process for `barrier`, until fork or exec. Return whether it worked."""
    return _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def barrier() -> bool:
    """Execute a memory barrier in every registered process; False: not available here."""
    return _membarrier(_GLOBAL_EXPEDITED)


def punch_hole(descriptor: int, offset: int, length_bytes: int) -> None:
    """Remove a range from the file and its pages from the page cache. Raises: OSError.

    Pages that a socket still sends stay intact: the socket then has the only reference, and the
    next write gets new pages.
    """
    if _libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, offset, length_bytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _Residency:
    """Counts cached pages with structures that are allocated once."""

    def __init__(self) -> None:
        self._span = (ctypes.c_uint64 * 2)()
        self._found = (ctypes.c_uint64 * 5)()
        self._arguments = (ctypes.byref(self._span), ctypes.byref(self._found), ctypes.c_uint(0))
        self.is_refused = platform.system() != "Linux"

    def cached_pages(self, descriptor: int, offset: int, length_bytes: int) -> int:
        """The number of cached pages in a range; -1: the kernel refuses the call."""
        self._span[0], self._span[1] = offset, length_bytes
        if _libc.syscall(_CACHESTAT, ctypes.c_int(descriptor), *self._arguments) != 0:
            # Other errors concern this file only, such as EPERM if it belongs to another user.
            self.is_refused = ctypes.get_errno() == errno.ENOSYS
            return -1
        return self._found[0]


_RESIDENCY: Final = _Residency()


def is_in_memory(descriptor: int, offset: int, length_bytes: int) -> bool:
    """Whether every page of a range is cached. Call it in the thread of the event loop.

    Without cachestat only the first and the last page are probed.
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
