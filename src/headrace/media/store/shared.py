"""Memory that the filler and the workers share: files without a disk under them, opened by name.

In /dev/shm, since a page of a mapped file that its disk cannot read back is a SIGBUS, not an error; and every page is
allocated when the file is made, since a full /dev/shm (64 MB in many containers) is a SIGBUS later, too. Where it has
no room the file is made in the node's run folder. Each folder there names its run folder in RUN_FILE, so memory of a node
that was killed and whose folder was deleted is found and removed.

The names follow from the run folder, so a filler that was killed finds the memory that its workers go on using. A file is
never replaced under a worker that may have it open: it is emptied in place.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
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
