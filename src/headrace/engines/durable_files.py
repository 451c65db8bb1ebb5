"""Durable files in a local folder: written completely, synced, then renamed to their name.

The order is the promise: the contents reach the disk, then the name, then the folders that hold it.
A crash in between leaves a draft that no key names. Folders are opened one by one without following
links, because a link could lead out of the store.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

BATCH_MIN: Final = 4
BATCH_MAX: Final = 100
BATCH_BYTES_MAX: Final = 16 * 2**20
FOLDERS_KNOWN_MAX: Final = 200_000
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DRAFT: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
Check = Callable[[int], None]
"""Raises OSError unless the open folder is the store's, such as after an unmount."""


def write_durably(
    folder: Path,
    key: str,
    data: bytes | Iterable[bytes],
    known: set[str] | None = None,
    *,
    check: Check | None = None,
    naming: AbstractContextManager[None] | None = None,
) -> None:
    """Write `data` under `key` so that it survives a power cut. Raises: OSError.

    Missing folders below `folder` are created, `folder` itself is not. `known` holds the folders
    whose names this process has synced, and grows. A folder of another process may not be synced
    yet, so its name is synced once here. `naming` is entered while the file gets its name, and may
    raise instead.
    """
    known = set() if known is None else known
    with ExitStack() as opened:
        path, _, name = key.rpartition("/")
        parent, changed = _walk(_open_root(folder, check, opened), path, known, opened)
        draft = f".{name}.{secrets.token_hex(4)}"
        descriptor = os.open(draft, _DRAFT, 0o644, dir_fd=parent)
        try:
            try:
                _write(descriptor, [data] if isinstance(data, bytes) else data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            with naming or nullcontext():
                os.rename(draft, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=parent)
            raise
        for above in (parent, *changed):
            os.fsync(above)
    known.update(_folders_of(key))


def rename_durably(folder: Path, source: str, key: str, *, check: Check | None = None) -> None:
    """Give the durable file `source` the name `key`. Raises: OSError."""
    with ExitStack() as opened:
        path, _, name = key.rpartition("/")
        parent, changed = _walk(_open_root(folder, check, opened), path, set(), opened)
        os.rename(folder / source, name, dst_dir_fd=parent)
        for above in (parent, *changed):
            os.fsync(above)


def _open_root(folder: Path, check: Check | None, opened: ExitStack) -> int:
    root = os.open(folder, _FOLDER)
    opened.callback(os.close, root)
    if check is not None:
        check(root)
    return root


def _walk(above: int, path: str, known: set[str], opened: ExitStack) -> tuple[int, list[int]]:
    """A descriptor of the folder `path`, and of folders above it with possibly new entries."""
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
    """The folders of a key, in the form of `known`."""
    steps = key.split("/")[:-1]
    return ["/" + "/".join(steps[:count]) for count in range(1, len(steps) + 1)]


def _write(descriptor: int, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        left = memoryview(piece)
        while left:
            left = left[os.write(descriptor, left) :]
    # The kernel's time stamp has a resolution of 4 ms, which would give two versions one etag.
    now_ns = time.time_ns()
    os.utime(descriptor, ns=(now_ns, now_ns))


@dataclass(slots=True)
class _Put:
    """A file that is being written; `error` is why it failed."""

    key: str
    data: bytes
    done: asyncio.Future[None] | None = None
    error: OSError | None = None
    parent: int = -1
    draft: str = ""


def _syncfs() -> Any:
    """The system call if it reports write errors (Linux 5.8), otherwise None."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release is None or (int(release[1]), int(release[2])) < (5, 8):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


_SYNCFS: Final = _syncfs()


def _sync_disk(root: int) -> None:
    if _SYNCFS(root) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _Batches:
    """Consecutive batches of one thread; one sync stores a batch and the names of the one before.

    A sync reports errors since its folder was opened, so the folder is opened before the writes and
    renames that the sync covers.
    """

    def __init__(self, folder: Path, known: set[str], check: Check | None = None) -> None:
        self._folder = folder
        self._known = known
        self._check = check
        self._root = -1
        self.named: list[_Put] = []
        """Renamed files whose names are not synced yet."""

    def write(self, puts: Sequence[_Put]) -> list[_Put]:
        """Write, sync and rename `puts`; return those that failed, and all of the batch before."""
        try:
            self._open(is_checked=True)
            for put in puts:
                try:
                    if not _write_draft(self._root, put, self._known):
                        write_durably(self._folder, put.key, put.data, check=self._check)
                except OSError as error:
                    put.error = error
        except OSError as error:
            for put in puts:
                put.error = put.error or error
        ended = self.finish(puts)
        try:
            self._open()
        except OSError as error:
            for put in puts:
                put.error = put.error or error
        for put in puts:
            _rename_draft(put)
            _close(put)
        self.named = [put for put in puts if put.error is None]
        return [*ended, *(put for put in puts if put.error is not None)]

    def finish(self, puts: Sequence[_Put] = ()) -> list[_Put]:
        """Sync drafts and names; return the files that are stored now, or failed."""
        ended, self.named = self.named, []
        if self._root < 0:
            return ended
        try:
            _sync_disk(self._root)
        except OSError as error:
            for put in (*ended, *puts):
                put.error = put.error or error
        os.close(self._root)
        self._root = -1
        for put in ended:
            if put.error is None:
                self._known.update(_folders_of(put.key))
        return ended

    def _open(self, *, is_checked: bool = False) -> None:
        if self._root < 0:
            self._root = os.open(self._folder, _FOLDER)
        if is_checked and self._check is not None:
            self._check(self._root)


def _write_draft(root: int, put: _Put, known: set[str]) -> bool:
    """Write the draft of a file; return False if its folder is on another file system."""
    path, _, name = put.key.rpartition("/")
    with ExitStack() as opened:
        parent, _changed = _walk(root, path, known, opened)
        if os.fstat(parent).st_dev != os.fstat(root).st_dev:
            return False
        put.parent = os.dup(parent)
    put.draft = f".{name}.{secrets.token_hex(4)}"
    descriptor = os.open(put.draft, _DRAFT, 0o644, dir_fd=put.parent)
    try:
        _write(descriptor, [put.data])
    finally:
        os.close(descriptor)
    return True


def _rename_draft(put: _Put) -> None:
    if put.error is None and put.draft:
        name = put.key.rpartition("/")[2]
        try:
            os.rename(put.draft, name, src_dir_fd=put.parent, dst_dir_fd=put.parent)
        except OSError as error:
            put.error = error
        else:
            put.draft = ""


def _close(put: _Put) -> None:
    """Close the folder of a file and delete a leftover draft."""
    if put.parent >= 0:
        if put.draft:
            with suppress(OSError):
                os.unlink(put.draft, dir_fd=put.parent)
        os.close(put.parent)


class DurableWriter:
    """Stores files below a folder in a few threads; each thread takes all waiting files.

    A single file is synced by itself. Files that wait while the threads are busy form a batch: all
    are written, one `syncfs`, all are renamed. The `syncfs` of the next batch stores their names,
    so under load a batch takes one; without a next batch one more follows at once. `syncfs` also
    waits for other writers of the disk, and meanwhile the next batch grows. Kernels that report no
    errors from it sync files one by one. `check` runs before each write.
    """

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
        """Wait for open writes and stop the threads; blocks."""
        self._threads.shutdown()

    def _work(self) -> None:
        batches = _Batches(self._folder, self._known, self._check)
        while (puts := self._take(is_end=not batches.named)) or batches.named:
            ended = puts
            try:
                if not puts:
                    ended = batches.finish()
                elif _SYNCFS is not None and (batches.named or len(puts) >= BATCH_MIN):
                    ended = batches.write(puts)
                    puts = [put for put in ended if isinstance(put.error, FileNotFoundError)]
                for put in puts:
                    self._write_one(put)
            except Exception as error:  # noqa: BLE001 - each waiting caller receives it
                for put in ended:
                    put.error = put.error or OSError(f"{type(error).__name__}: {error}")
            _resolve(ended)

    def _take(self, *, is_end: bool) -> list[_Put]:
        """The next files to store; if there are none and `is_end`, the thread becomes free."""
        puts: list[_Put] = []
        size_bytes = 0
        with self._lock:
            if len(self._known) > FOLDERS_KNOWN_MAX:
                self._known.clear()
            while self._waiting and len(puts) < BATCH_MAX and size_bytes < BATCH_BYTES_MAX:
                puts.append(self._waiting.popleft())
                size_bytes += len(puts[-1].data)
            self._busy -= is_end and not puts
        return puts

    def _write_one(self, put: _Put) -> None:
        put.error = None
        try:
            try:
                write_durably(self._folder, put.key, put.data, self._known, check=self._check)
            except FileNotFoundError:
                # A known folder was deleted.
                self._known.clear()
                write_durably(self._folder, put.key, put.data, self._known, check=self._check)
        except OSError as error:
            put.error = error


def _resolve(puts: Sequence[_Put]) -> None:
    """Complete the futures of `puts`, each on its own loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Put]] = {}
    for put in puts:
        if put.done is not None:
            by_loop.setdefault(put.done.get_loop(), []).append(put)
    for loop, its_puts in by_loop.items():
        # The loop may be closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_complete, its_puts)


def _complete(puts: Sequence[_Put]) -> None:
    for put in puts:
        if put.done is None or put.done.done():
            continue
        if put.error is None:
            put.done.set_result(None)
        else:
            put.done.set_exception(put.error)
