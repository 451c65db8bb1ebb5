"""Memory that the filler and the workers share: files without a disk under them, opened by name.

In /dev/shm, since a page of a mapped file that its disk cannot read back is a SIGBUS, not an error; and every page is
allocated when the file is made, since a full /dev/shm (64 MB in many containers) is a SIGBUS later, too. Where it has
no room the file is made in the node's run folder. Each folder there names its run folder in RUN_FILE, so memory of a node
that was killed and whose folder was deleted is found and removed.

The names follow from the run folder, so a filler that was killed finds the memory that its workers go on using. A file is
never replaced under a worker that may have it open: it is emptied in place.


[store/kernel_calls.py] Three system calls that Python has no name for: membarrier, fallocate with a mode, and cachestat.

membarrier makes every processor that runs a registered process pass a full memory barrier. So a worker pays nothing for its
turn counter: the one filler pays for all, some microseconds a fill. Where the call is refused (some seccomp
filters do) `barrier` says so, and the filler waits longer than any store buffer keeps a store.

cachestat (Linux 6.5) counts the pages of a span that are in the page cache: exact, and 1.2 us for 256 KiB; mincore takes
6.5 us, one byte read with RWF_NOWAIT 0.85 us and proves its own page alone (2 cores, 2026-11-22).
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


def shared_folders(run: Path) -> list[Path]:
    """Where the shared files of the node with that run folder may be, the best place first."""
    name = hashlib.blake2b(bytes(run.resolve()), digest_size=8).hexdigest()
    folders = [_MEMORY / f"headrace-{os.getuid()}-{name}"] if _MEMORY.is_dir() else []
    return [*folders, run]


def open_shared(run: Path, name: str, size_bytes: int) -> tuple[Path, mmap.mmap]:
    """The shared file `name`, made with zeros if it is not there with this size; and its memory.

    Raises: OSError where no place has room.
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
    """Whether the shared file `name` is there with this size."""
    paths = [folder / name for folder in shared_folders(run)]
    return any(path.exists() and path.stat().st_size == size_bytes for path in paths)


def map_shared(path: Path) -> tuple[mmap.mmap, str]:
    """The memory of a shared file, to read and write, and which file it is. Raises: OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, 0), identity_of(descriptor)
    finally:
        os.close(descriptor)


def remove_shared(run: Path) -> None:
    """Take the node's shared files away, at the end of its last process."""
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
    """Which file or device that is, whatever leads there."""
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
        # By link, not by rename: of two that make it at once, both must end up with the same file.
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
    """Hide all that a worker of an earlier node may still see in a file of another size."""
    if path.exists() and path.stat().st_size:
        with map_shared(path)[0] as memory:
            memory[:] = bytes(len(memory))
    path.unlink(missing_ok=True)


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
