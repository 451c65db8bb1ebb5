"""The data folder of embedded engines: its checks, layout and lock, and all errors of engines."""

from __future__ import annotations

import fcntl
import os
import pwd
import shlex
import shutil
import struct
from pathlib import Path
from typing import Final

from headrace.engines.mount_guard import RECORD_FILE
from headrace.kernel.errors import Conflict, InvalidInput, NotFound, Unavailable


class EngineMissing(NotFound):
    """An engine's wheel is not installed, or `postgres.bin` or `valkey.bin` names no engine."""

    code = "engines.not_installed"


class EngineTooOld(Conflict):
    """The program that `postgres.bin` or `valkey.bin` names has a version that is not supported."""

    code = "engines.too_old"


class FolderInUse(Conflict):
    """Another process runs engines in this data folder."""

    code = "engines.folder_in_use"


class FolderUnusable(InvalidInput):
    """The data folder is not a folder or not writable, has another owner, or an unusable path."""

    code = "engines.folder_unusable"


class OrphanAlive(Conflict):
    """A process of an earlier run is still alive in this data folder and cannot be killed."""

    code = "engines.orphan_alive"


class NotRunning(Unavailable):
    """No engines run in this data folder, or they are starting."""

    code = "engines.not_running"


class RootRefused(Conflict):
    """PostgreSQL does not run as root, and no other user is available."""

    code = "engines.root_refused"


class StartFailed(Unavailable):
    """An engine ended or did not respond at its start; see its log."""

    code = "engines.start_failed"


class WrongVersion(Conflict):
    """The data in the folder was written by another major version of PostgreSQL."""

    code = "engines.wrong_version"


MARKER: Final = "layout"
MARKER_TEXT: Final = "headrace data folder, layout 1\n"
LOG_BYTES_MAX: Final = 16 * 2**20
PATH_BYTES_MAX: Final = 900
"""PostgreSQL's paths have at most 1024 bytes, including its own file names (MAXPGPATH)."""
NEW_FOLDER_BYTES_MIN: Final = 256 * 2**20
"""Free space for a new PostgreSQL: 40 MB and its preallocated log."""
RECOVERING_FILE: Final = "recovering"
"""In a folder whose PostgreSQL is being restored, or follows an archive (`engines.backup`)."""
RECOVERED_FILE: Final = "recovered"
"""In a folder whose restored PostgreSQL no `headrace up` has used yet."""
_NAMES_BEFORE_MARKER: Final = frozenset(
    {"secret", "token", "lock", "run", "blobs", RECORD_FILE, "lost+found"}
    | {"backup-identity", "backup-store"}
)


def usable_folder(folder: Path) -> Path:
    """Create `folder` if missing, check it, and return its absolute path.

    Raises: FolderUnusable.
    """
    path = folder.expanduser().resolve()
    _require_plain(path)
    require_owner(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {entry.name for entry in path.iterdir()}
    except (FileExistsError, NotADirectoryError) as error:
        raise FolderUnusable(
            f"data folder {path} is a file or below a file: choose a folder"
        ) from error
    except OSError as error:
        raise _not_writable(path, error) from error
    if MARKER not in names and not names <= _NAMES_BEFORE_MARKER:
        raise FolderUnusable(
            f"data folder {path} contains other files ({', '.join(sorted(names)[:3])}) and no"
            " Headrace data: choose an empty or a new folder"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise _not_writable(path, PermissionError("permission denied"))
    return path


def require_owner(path: Path) -> None:
    """Refuse root a folder of another user, who could not read files of root.

    Raises: FolderUnusable.
    """
    try:
        uid = path.stat().st_uid
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise not_readable(path, error) from error
    if os.geteuid() == 0 and uid != 0:
        raise FolderUnusable(
            f"data folder {path} belongs to uid {uid}{_name_of(uid)} and this is root: run as that"
            " user"
            f" (`setpriv --reuid {uid} --clear-groups headrace ...`, or su), or make the folder"
            f" root's with `chown -R root: {shlex.quote(str(path))}`"
        )


def not_readable(path: Path, error: OSError) -> FolderUnusable:
    """The error for a folder that this user cannot read."""
    reason = (error.strerror or str(error)).lower()
    return FolderUnusable(
        f"data folder {path} cannot be read ({reason} on {error.filename or path}): run as its"
        f" owner, this is uid {os.geteuid()}"
    )


def lay_out(path: Path) -> None:
    """Create subfolders and the layout file; the caller holds the lock. Raises: FolderUnusable."""
    try:
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o700)
        for name in ("valkey", "run", "logs"):  # `blobs` is created by the mount guard
            (path / name).mkdir(mode=0o700, exist_ok=True)
        (path / MARKER).write_text(MARKER_TEXT)
    except OSError as error:
        raise _not_writable(path, error) from error


def require_recovered(path: Path) -> None:
    """Refuse a folder that is a standby, or whose restore did not end. Raises: FolderUnusable."""
    if not (path / RECOVERING_FILE).exists():
        return
    if (path / "postgres" / "standby.signal").exists():
        raise FolderUnusable(
            f"data folder {path} is a standby: continue it with `headrace standby`, or make it the"
            " primary with `headrace promote`"
        )
    raise FolderUnusable(
        f"data folder {path} is incomplete, because its restore did not end: delete it, and"
        " restore again"
    )


def require_space(path: Path) -> None:
    """Require free space for a new PostgreSQL. Raises: FolderUnusable."""
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < NEW_FOLDER_BYTES_MIN:
        raise FolderUnusable(
            f"data folder {path}: {free_bytes // 2**20} MiB are free on its disk,"
            f" {NEW_FOLDER_BYTES_MIN // 2**20} MiB are required: free some, or choose another disk"
        )


def rotate_log(path: Path) -> None:
    """Rename a log over LOG_BYTES_MAX to `<name>.1`, replacing the previous one."""
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.replace(path.with_name(path.name + ".1"))


def _require_plain(path: Path) -> None:
    if not str(path).isprintable():
        raise FolderUnusable(
            f"data folder {str(path)!r} has control characters or invalid UTF-8 in its path:"
            " choose another name"
        )
    length = len(os.fsencode(path))
    if length > PATH_BYTES_MAX:
        raise FolderUnusable(
            f"data folder {str(path)[:60]}... has a path of {length} bytes, PostgreSQL allows"
            f" {PATH_BYTES_MAX}: choose a shorter path"
        )


def _name_of(uid: int) -> str:
    try:
        return f" ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return ""


def _not_writable(path: Path, error: OSError) -> FolderUnusable:
    reason = (error.strerror or str(error)).lower()
    return FolderUnusable(
        f"data folder {path} cannot be written ({reason}): grant this user write permission, or"
        " choose another folder"
    )


_FLOCK: Final = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class FolderLock:
    """The lock of one data folder, held for the life of the starter.

    An open-file-description lock (fcntl(2), F_OFD_SETLK): the kernel releases it however the
    process ends, engines do not inherit it because the descriptor closes on exec, and any process
    can check it without taking it, unlike flock(2). The pid in the file is only for people.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock and write this process's pid into it. Raises: FolderInUse."""
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK))
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)
            raise FolderInUse(
                f"data folder {self._folder} is in use by process {holder_pid(self._folder)}: stop"
                " that process first, or choose another folder"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock if it is held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a live process holds the lock of `folder`. Raises: FolderUnusable."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except NotADirectoryError as error:
        raise FolderUnusable(f"data folder {folder} is not a folder: choose another one") from error
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK))
    finally:
        os.close(descriptor)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def holder_pid(folder: Path) -> str:
    """The pid of the last starter, as text."""
    try:
        return (folder / "lock").read_text().strip() or "unknown"
    except OSError:
        return "unknown"


def _request(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
