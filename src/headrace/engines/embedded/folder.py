"""The data folder: ours or empty, private, and laid out the same way each time."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
from pathlib import Path
from typing import Final

from headrace.engines.embedded.errors import FolderUnusable
from headrace.engines.marked import RECORD_FILE

MARKER: Final = "layout"
MARKER_TEXT: Final = "headrace data folder, layout 1\n"
LOG_BYTES_MAX: Final = 16 * 2**20
PATH_BYTES_MAX: Final = 900
"""PostgreSQL holds paths of 1024 bytes and appends its own to ours (MAXPGPATH)."""
NEW_FOLDER_BYTES_MIN: Final = 256 * 2**20
"""A fresh PostgreSQL takes 40 MB and preallocates its log; less than this ends in the middle of it."""
_NAMES_BEFORE_MARKER: Final = frozenset(
    {"secret", "token", "lock", "run", "blobs", RECORD_FILE, "lost+found"}
)


def usable_folder(folder: Path) -> Path:
    """`folder` as an absolute path, made if it is missing, private to us. Raises: FolderUnusable."""
    path = folder.expanduser().resolve()
    _require_plain(path)
    require_owner(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {entry.name for entry in path.iterdir()}
    except (FileExistsError, NotADirectoryError) as error:
        raise FolderUnusable(
            f"data folder {path} is a file or lies below one: name a folder, or one to be made"
        ) from error
    except OSError as error:
        raise _not_writable(path, error) from error
    if MARKER not in names and not names <= _NAMES_BEFORE_MARKER:
        raise FolderUnusable(
            f"data folder {path} holds other files ({', '.join(sorted(names)[:3])}) and no Headrace data:"
            " name an empty folder, or one to be made"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise _not_writable(path, PermissionError("permission denied"))
    return path


def require_owner(path: Path) -> None:
    """Refuse root the folder of another user, whom files of root's would lock out.

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
            f"data folder {path} belongs to uid {uid}{_name_of(uid)} and this is root: run as that user"
            f" (`setpriv --reuid {uid} --clear-groups headrace ...`, or su), or make the folder root's"
            f" with `chown -R root: {shlex.quote(str(path))}`"
        )


def not_readable(path: Path, error: OSError) -> FolderUnusable:
    """What to tell of a folder that this user may not look into."""
    reason = (error.strerror or str(error)).lower()
    return FolderUnusable(
        f"data folder {path} cannot be read ({reason} on {error.filename or path}): run as the user whom"
        f" it belongs to, this is uid {os.geteuid()}"
    )


def lay_out(path: Path) -> None:
    """Make the subfolders and the marker; the caller holds the lock. Raises: FolderUnusable."""
    try:
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o700)
        for name in ("valkey", "run", "logs"):  # `blobs` is made by the object store, once
            (path / name).mkdir(mode=0o700, exist_ok=True)
        (path / MARKER).write_text(MARKER_TEXT)
    except OSError as error:
        raise _not_writable(path, error) from error


def require_space(path: Path) -> None:
    """Refuse to fill a disk that cannot hold a new PostgreSQL. Raises: FolderUnusable."""
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < NEW_FOLDER_BYTES_MIN:
        raise FolderUnusable(
            f"data folder {path}: {free_bytes // 2**20} MiB are free on its disk,"
            f" {NEW_FOLDER_BYTES_MIN // 2**20} MiB are needed to begin: free some, or choose another disk"
        )


def rotate_log(path: Path) -> None:
    """Put a log over LOG_BYTES_MAX aside as `<name>.1`, replacing the one before."""
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.replace(path.with_name(path.name + ".1"))


def _require_plain(path: Path) -> None:
    if not str(path).isprintable():
        raise FolderUnusable(
            f"data folder {str(path)!r} has control characters or bytes that are no UTF-8 in its path:"
            " choose another name"
        )
    length = len(os.fsencode(path))
    if length > PATH_BYTES_MAX:
        raise FolderUnusable(
            f"data folder {str(path)[:60]}... has a path of {length} bytes, PostgreSQL can use"
            f" {PATH_BYTES_MAX}: choose a shorter one"
        )


def _name_of(uid: int) -> str:
    try:
        return f" ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return ""


def _not_writable(path: Path, error: OSError) -> FolderUnusable:
    reason = (error.strerror or str(error)).lower()
    return FolderUnusable(
        f"data folder {path} cannot be written ({reason}): give this user the right to, or choose another"
    )
