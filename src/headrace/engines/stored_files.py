"""Objects as files of a folder: which files are objects, their etags, and pages of one folder.

A page lists the direct children of a folder by name. It reads all names of the folder, but the
size and time of the shown ones only.
"""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Child(NamedTuple):
    """A direct child of a folder: a subfolder, or an object with its size and time."""

    name: str
    size_bytes: int | None
    """None: a subfolder."""
    modified_at: datetime = EPOCH
    etag: str = ""


def is_plain_file(folder: Path, key: str) -> bool:
    """Whether `key` is a regular file in real folders; a link could lead out of the store."""
    path = folder
    steps = key.split("/")
    for step in steps[:-1]:
        path /= step
        if not stat.S_ISDIR(path.lstat().st_mode):
            return False
    return stat.S_ISREG((path / steps[-1]).lstat().st_mode)


def file_etag(modified_us: int, size_bytes: int) -> str:
    """The etag of a file; without the inode, so that copies on other hosts have the same one."""
    return f"{modified_us:x}-{size_bytes:x}"


def children_of(
    root: Path, prefix: str, *, after: str, children_max: int, is_name: Callable[[str], object]
) -> list[Child]:
    """Up to `children_max` children of the folder `prefix` with names behind `after`, by name.

    Links, and names that no key has, are left out. A missing folder has no children. Raises:
    OSError.
    """
    folder = root
    for step in prefix.split("/") if prefix else ():
        folder /= step
        if folder.is_symlink():
            return []
    try:
        with os.scandir(folder) as entries:
            first = heapq.nsmallest(
                children_max,
                (
                    (entry.name, entry.is_dir(follow_symlinks=False), entry.path)
                    for entry in entries
                    if entry.name > after and is_name(entry.name) and not entry.is_symlink()
                ),
            )
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [child for one in first if (child := _child(*one)) is not None]


def children_in(
    listed: Mapping[str, Any], *, after: str, children_max: int, is_name: Callable[[str], object]
) -> list[Child]:
    """The same of a bucket, from the answer to a list request with a delimiter."""
    children = [Child(_name_of(path), None) for path in listed["common_prefixes"]]
    children += [
        Child(
            _name_of(meta["path"]),
            meta["size"],
            meta["last_modified"],
            str(meta["e_tag"] or "").strip('"'),
        )
        for meta in listed["objects"]
    ]
    behind = (one for one in children if one.name > after and is_name(one.name))
    return sorted(behind, key=lambda one: one.name)[:children_max]


def _name_of(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _child(name: str, is_folder: bool, path: str) -> Child | None:  # noqa: FBT001 - a tuple's part
    if is_folder:
        return Child(name, None)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    modified_us = found.st_mtime_ns // 1_000
    modified_at = EPOCH + timedelta(microseconds=modified_us)
    return Child(name, found.st_size, modified_at, file_etag(modified_us, found.st_size))
