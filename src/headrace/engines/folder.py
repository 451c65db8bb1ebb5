"""Durable files in a local folder: written whole, then named, then never lost.

The order is the promise: the contents reach the disk, then the name, then the folders that hold it. A crash
in between leaves a draft that no key names.

A file alone is synced by itself. Those that wait while the few threads are busy go together: all are
written, one `syncfs`, all are named, one `syncfs`, which costs 140 us of CPU a photo of 150 KB instead of
340 (a name and its contents synced apart, the paths resolved: 480). It waits for what others wrote to the
same disk, and then more files go together. Older kernels do not report errors there: one by one.

Folders are walked by descriptor and never through a link, which could lead out of the store.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

TOGETHER_MIN: Final = 4
TOGETHER_MAX: Final = 48
TOGETHER_BYTES_MAX: Final = 16 * 2**20
FOLDERS_KNOWN_MAX: Final = 200_000
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DRAFT: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
Check = Callable[[int], None]
"""Raises OSError where the open folder is not the store's, such as one beneath a disk that was unmounted."""


def put_file(
    folder: Path,
    key: str,
    data: bytes,
    known: set[str] | None = None,
    *,
    check: Check | None = None,
) -> None:
    """Write `data` under `key` so that it survives a power cut once this returns. Raises: OSError.

    Folders below `folder` are made where they are missing, `folder` itself never.
    `known` are folders whose names were synced by this process, and grows: one that somebody else made may
    not have come so far, so its name is synced too, once.
    """
    known = set() if known is None else known
    with ExitStack() as opened:
        path, _, name = key.rpartition("/")
        parent, changed = _walk(_open_root(folder, check, opened), path, known, opened)
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
    known.update(_folders_of(key))


def _open_root(folder: Path, check: Check | None, opened: ExitStack) -> int:
    root = os.open(folder, _FOLDER)
    opened.callback(os.close, root)
    if check is not None:
        check(root)
    return root


def _walk(above: int, path: str, known: set[str], opened: ExitStack) -> tuple[int, list[int]]:
    """Descriptors of the folder `path` below `above`, and of those over it that got an entry or perhaps did."""
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


def _folders_of(key: str) -> list[str]:
    """The folders that a key stands in, as `known` names them."""
    steps = key.split("/")[:-1]
    return ["/" + "/".join(steps[:count]) for count in range(1, len(steps) + 1)]


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
    # The kernel's own stamp is that of its last tick: two versions within 4 ms would have one time, and so one etag.
    now_ns = time.time_ns()
    os.utime(descriptor, ns=(now_ns, now_ns))


@dataclass(slots=True)
class _Put:
    """A file on its way; `error` is why it is not going any further."""

    key: str
    data: bytes
    done: asyncio.Future[None] | None = None
    error: OSError | None = None
    parent: int = -1
    draft: str = ""


def _syncfs() -> Any:
    """The system call, where it reports what could not be written (Linux 5.8); else None."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release is None or (int(release[1]), int(release[2])) < (5, 8):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


_SYNCFS: Final = _syncfs()


def _sync_disk(root: int) -> None:
    if _SYNCFS(root) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _put_together(
    folder: Path, puts: Sequence[_Put], known: set[str], check: Check | None = None
) -> None:
    """Store all of `puts`, each durably or with its `error` set. Raises: OSError of `folder` itself.

    Opened before anything is written, the descriptor that is synced hears of every error since.
    """
    with ExitStack() as opened:
        root = _open_root(folder, check, opened)
        for put in puts:
            try:
                if not _write_draft(root, put, known):
                    put_file(folder, put.key, put.data, check=check)
            except OSError as error:
                put.error = error
        try:
            _sync_disk(root)
            for put in puts:
                _name(put)
            _sync_disk(root)
        except OSError as error:
            for put in puts:
                put.error = put.error or error
        for put in puts:
            _let_go(put)
            if put.error is None:
                known.update(_folders_of(put.key))


def _write_draft(root: int, put: _Put, known: set[str]) -> bool:
    """Write it without its name; not where its folder is on another disk, which is not synced with the store's."""
    path, _, name = put.key.rpartition("/")
    with ExitStack() as opened:
        parent, _changed = _walk(root, path, known, opened)
        if os.fstat(parent).st_dev != os.fstat(root).st_dev:
            return False
        put.parent = os.dup(parent)
    put.draft = f".{name}.{secrets.token_hex(4)}"
    descriptor = os.open(put.draft, _DRAFT, 0o644, dir_fd=put.parent)
    try:
        _write(descriptor, put.data)
    finally:
        os.close(descriptor)
    return True


def _name(put: _Put) -> None:
    if put.error is None and put.draft:
        name = put.key.rpartition("/")[2]
        try:
            os.rename(put.draft, name, src_dir_fd=put.parent, dst_dir_fd=put.parent)
        except OSError as error:
            put.error = error
        else:
            put.draft = ""


def _let_go(put: _Put) -> None:
    """Close the folder; remove a draft that got no name."""
    if put.parent >= 0:
        if put.draft:
            with suppress(OSError):
                os.unlink(put.draft, dir_fd=put.parent)
        os.close(put.parent)


class FolderPuts:
    """Stores files below a folder in a few threads; each takes all that wait. `check` is asked at each write."""

    def __init__(self, folder: Path, threads: int, check: Check | None = None) -> None:
        self._folder = folder
        self._check = check
        self._threads_max = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="folder")
        self._waiting: deque[_Put] = deque()
        self._busy = 0
        self._lock = threading.Lock()
        self._known: set[str] = set()

    async def put(self, key: str, data: bytes) -> None:
        """Store `data` durably under `key`. Raises: OSError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append(_Put(key, data, done))
            is_thread_due = self._busy < self._threads_max
            self._busy += is_thread_due
        if is_thread_due:
            self._threads.submit(self._work)
        await done

    def close(self) -> None:
        """End the threads after the puts under way; blocks."""
        self._threads.shutdown()

    def _work(self) -> None:
        while puts := self._take():
            try:
                if len(puts) >= TOGETHER_MIN and _SYNCFS is not None:
                    _put_together(self._folder, puts, self._known, self._check)
                    alone = [put for put in puts if isinstance(put.error, FileNotFoundError)]
                else:
                    alone = puts
                for put in alone:
                    self._put_alone(put)
            except Exception as error:  # noqa: BLE001 - told to whoever waits
                for put in puts:
                    put.error = put.error or OSError(f"{type(error).__name__}: {error}")
            _tell(puts)

    def _take(self) -> list[_Put]:
        """What to store next; the thread is free once there is nothing."""
        puts: list[_Put] = []
        size_bytes = 0
        with self._lock:
            if len(self._known) > FOLDERS_KNOWN_MAX:
                self._known.clear()
            while self._waiting and len(puts) < TOGETHER_MAX and size_bytes < TOGETHER_BYTES_MAX:
                puts.append(self._waiting.popleft())
                size_bytes += len(puts[-1].data)
            self._busy -= not puts
        return puts

    def _put_alone(self, put: _Put) -> None:
        put.error = None
        try:
            try:
                put_file(self._folder, put.key, put.data, self._known, check=self._check)
            except FileNotFoundError:
                # Somebody removed a folder that was known.
                self._known.clear()
                put_file(self._folder, put.key, put.data, self._known, check=self._check)
        except OSError as error:
            put.error = error


def _tell(puts: Sequence[_Put]) -> None:
    """Answer whoever waits, each on its own loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Put]] = {}
    for put in puts:
        if put.done is not None:
            by_loop.setdefault(put.done.get_loop(), []).append(put)
    for loop, its_puts in by_loop.items():
        # A loop that was closed waits for nothing.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_answer, its_puts)


def _answer(puts: Sequence[_Put]) -> None:
    for put in puts:
        if put.done is None or put.done.done():
            continue
        if put.error is None:
            put.done.set_result(None)
        else:
            put.done.set_exception(put.error)
