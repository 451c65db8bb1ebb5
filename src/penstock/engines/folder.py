"""Durable files in a local folder: written whole, then named, then never lost.

The order is the promise: the contents reach the disk, then the name, then the folders that hold it. A crash
in between leaves a draft that no key names. Each file is synced by itself, in 16 threads, whose waits the
journal joins into few commits: batches with one `syncfs` cost a third of the CPU and were faster on a
quiet disk, but wait for whatever anybody else wrote to it (beside other load 570 files/s against 870).

Folders are walked by descriptor and never through a link, which could lead out of the store; so a put
resolves no path, and its folder is open already when it is to be synced (640 us of CPU against 900).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

FOLDERS_KNOWN_MAX: Final = 200_000
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DRAFT: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


def put_file(folder: Path, key: str, data: bytes, known: set[str] | None = None) -> None:
    """Write `data` under `key` so that it survives a power cut once this returns. Raises: OSError.

    `known` are folders whose names were synced by this process, and grows: one that somebody else made may
    not have come so far, so its name is synced too, once.
    """
    known = set() if known is None else known
    with ExitStack() as opened:
        path, _, name = key.rpartition("/")
        parent, changed = _walk(folder, path, known, opened)
        draft = f".{name}.{secrets.token_hex(4)}"
        descriptor = os.open(draft, _DRAFT, 0o644, dir_fd=parent)
        try:
            try:
                _write(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(draft, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=parent)
            raise
        for above in (parent, *changed):
            os.fsync(above)
    steps = key.split("/")[:-1]
    known.update("/" + "/".join(steps[:count]) for count in range(1, len(steps) + 1))


def _walk(folder: Path, path: str, known: set[str], opened: ExitStack) -> tuple[int, list[int]]:
    """Descriptors of the folder `path`, and of those above it that got an entry or perhaps did."""
    above = os.open(folder, _FOLDER)
    opened.callback(os.close, above)
    changed = []
    so_far = ""
    for step in path.split("/") if path else ():
        so_far = f"{so_far}/{step}"
        if so_far not in known:
            with suppress(FileExistsError):
                os.mkdir(step, dir_fd=above)
            changed.append(above)
        above = os.open(step, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
        opened.callback(os.close, above)
    return above, changed


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


class FolderPuts:
    """Stores files below a folder in threads of its own."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder = folder
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="folder")
        self._known: set[str] = set()

    async def put(self, key: str, data: bytes) -> None:
        """Store `data` durably under `key`. Raises: OSError."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._put, key, data)

    def close(self) -> None:
        """End the threads after the puts under way; blocks."""
        self._threads.shutdown()

    def _put(self, key: str, data: bytes) -> None:
        try:
            put_file(self._folder, key, data, self._known)
        except FileNotFoundError:
            # Somebody removed a folder that was known.
            self._known.clear()
            put_file(self._folder, key, data, self._known)
        if len(self._known) > FOLDERS_KNOWN_MAX:
            self._known.clear()
