"""Bytes: a local folder or an S3 store behind one interface, through obstore.

obstore gives one API over folders and S3 with retries in Rust, but its local put never syncs (seen with
strace: open, write, rename). A photo whose row is committed must outlive a power cut, so the local put is
ours (`folder.py`). A key is a relative path of plain segments; the store never sees another. An application's
folder is marked and never made a second time (`marked.py`).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.store import LocalStore, from_url

from headrace.engines.folder import Check, FolderPuts, put_file
from headrace.engines.marked import MarkedFolder, StoreRecord
from headrace.kernel.config import parse_count, parse_duration_s, parse_url, setting
from headrace.kernel.errors import Conflict, InvalidInput, NotFound, Unavailable
from headrace.kernel.trace import onward

_SEGMENT: Final = re.compile(r"(?!\.)[A-Za-z0-9._@~-]{1,128}")
KEY_CHARACTERS_MAX: Final = 512
MIB: Final = 2**20
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
LOCK_FILE: Final = ".headrace-lock"
"""Held while an object of a folder is compared and set; no key can name it."""


class BlobMissing(NotFound):
    """No object of that key is stored."""

    code = "blobs.missing"


class InvalidBlobKey(InvalidInput):
    """The key is no relative path of plain segments."""

    code = "blobs.invalid_key"


class BlobsDown(Unavailable):
    """The object store does not answer or refuses to store."""

    code = "blobs.unavailable"


class StoreNotThere(BlobsDown):
    """The object store's folder is missing, unmounted or another than the one that was used before; nothing was made."""

    code = "blobs.not_there"

    def __init__(self, folder: Path, fault: str) -> None:
        super().__init__(
            f"the object store in folder {folder} is not the one in use ({fault}): mount its disk or put the folder"
            " back; to begin with the folder as it is now, run `headrace blobs adopt`",
            retry_after_s=5,
        )
        self.fault = fault

    @property
    def public_text(self) -> str:
        """Without the folder, which is no caller's business."""
        return (
            "the object store is not there: check its disk with `headrace doctor`, then try again"
        )


class BlobChanged(Conflict):
    """The stored object is not the one that was to be replaced."""

    code = "blobs.changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobsConfig:
    """Section `blobs`."""

    url: str | None = setting(
        None,
        "Where objects are kept: file:///folder or s3://bucket/prefix; unset: the data folder.",
        parse_url("file", "s3"),
        secret=True,
    )
    timeout_s: float = setting(
        "15s",
        "Longest wait for an S3 store, repeats included, and a second more for each MiB sent or read.",
        parse_duration_s,
    )
    put_threads: int = setting(
        "2", "Threads that write and sync objects; each takes all that wait.", parse_count
    )


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What the store says of an object."""

    key: str
    size_bytes: int
    etag: str
    modified_at: datetime


def require_key(key: str) -> str:
    """`key`, if it is a safe path such as `photos/ab/cd/abcd.jpg`. Raises: InvalidBlobKey."""
    valid = len(key) <= KEY_CHARACTERS_MAX and all(_SEGMENT.fullmatch(s) for s in key.split("/"))
    if not valid:
        raise InvalidBlobKey(
            f"blob key {key[:60]!r} is not valid: use segments of A-Z a-z 0-9 . _ @ ~ - joined by /,"
            " none empty or starting with a dot"
        )
    return key


class Blobs:
    """An object store; `folder` is set when it is a local one, so that files can be sent by sendfile.

    With a `record` the folder is looked at when it is first used, and made only if none was ever recorded. Without
    one, for a folder of the caller's own, it is made here if it is missing.
    """

    def __init__(
        self, url: str, config: BlobsConfig | None = None, *, record: StoreRecord | None = None
    ) -> None:
        parts = urlsplit(url)
        self._url = url
        self._told: tuple[tuple[tuple[str, str], ...], Any] | None = None
        self.folder: Path | None = None
        self._marked: MarkedFolder | None = None
        self._puts: FolderPuts | None = None
        self._store: Any = None
        self._timeout_s: float | None = None
        if parts.scheme != "file":
            self._timeout_s = (config or BlobsConfig()).timeout_s
            self._store = from_url(url)
            return
        self.folder = Path(unquote(parts.path))
        if record is not None:
            self._marked = MarkedFolder(self.folder, record)
        else:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unusable(self.folder, error) from error
            self._store = LocalStore(self.folder)
        check = self._marked.check if self._marked is not None else None
        self._puts = FolderPuts(self.folder, max(1, (config or BlobsConfig()).put_threads), check)

    async def put(self, key: str, data: bytes) -> None:
        """Store `data` durably; an object of that key is replaced in one step. Raises: BlobsDown."""
        require_key(key)
        async with self._use(key, is_put=True, size_bytes=len(data)):
            if self._puts is None:
                await obstore.put_async(self._store, key, data, use_multipart=False)
            else:
                await self._puts.put(key, data)

    async def put_if(self, key: str, data: bytes, *, etag: str | None) -> None:
        """Store `data` durably if `key` still is what `read` gave with `etag` (None: if nothing is stored).

        Raises: BlobChanged, BlobsDown.
        """
        require_key(key)
        async with self._use(key, is_put=True, size_bytes=len(data)):
            try:
                if self.folder is not None:
                    await asyncio.to_thread(self._put_if, self.folder, key, data, etag)
                else:
                    mode: Any = "create" if etag is None else {"e_tag": etag}
                    await obstore.put_async(self._store, key, data, mode=mode, use_multipart=False)
            except (
                obstore.exceptions.AlreadyExistsError,
                obstore.exceptions.PreconditionError,
            ) as error:
                raise BlobChanged(
                    f"object {key!r} is another than the one to be replaced: read it again"
                ) from error

    def _put_if(self, folder: Path, key: str, data: bytes, etag: str | None) -> None:
        check = self._marked.check if self._marked is not None else None
        with _lock_of(folder, check) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                found = obstore.head(self._store, key)["e_tag"]
            except FileNotFoundError:
                found = None
            if found != etag:
                raise obstore.exceptions.PreconditionError(key)
            put_file(folder, key, data, check=check)

    async def read(self, key: str, *, unless: str | None = None) -> tuple[bytes, str] | None:
        """All bytes and their etag, or None while it is the one of etag `unless`.

        The etag is the store's own spelling, good for `put_if` and `unless` alone.
        Raises: BlobMissing, BlobsDown.
        """
        async with self._use(key) as limit:
            self._require_plain(key)
            try:
                options: Any = {"if_none_match": unless} if unless else {}
                result = await obstore.get_async(self._store, key, options=options)
            except obstore.exceptions.NotModifiedError:
                return None
            _allow(limit, result.meta["size"])
            return bytes(await result.bytes_async()), str(result.meta["e_tag"] or "")

    async def get(self, key: str) -> bytes:
        """All bytes. Raises: BlobMissing, BlobsDown."""
        async with self._use(key) as limit:
            self._require_plain(key)
            result = await obstore.get_async(self._store, key)
            _allow(limit, result.meta["size"])
            return bytes(await result.bytes_async())

    async def read_range(self, key: str, start: int, length_bytes: int) -> bytes:
        """`length_bytes` bytes from `start`; fewer at the end. Raises: BlobMissing, BlobsDown."""
        async with self._use(key, size_bytes=length_bytes):
            self._require_plain(key)
            found = await obstore.get_range_async(
                self._reader(), key, start=start, length=length_bytes
            )
            return bytes(found)

    async def read_part(self, key: str, start: int, length_bytes: int) -> tuple[BlobInfo, bytes]:
        """`length_bytes` bytes from `start`, and of which object: both of one answer, so of one version.

        Raises: BlobMissing, BlobsDown.
        """
        async with self._use(key, size_bytes=length_bytes):
            self._require_plain(key)
            wanted: Any = {"range": (start, start + length_bytes)}
            result = await obstore.get_async(self._reader(), key, options=wanted)
            info = self._info(key, result.meta)
            return info, bytes(await result.bytes_async())

    async def info(self, key: str) -> BlobInfo:
        """Size, etag and time. Raises: BlobMissing, BlobsDown."""
        async with self._use(key):
            self._require_plain(key)
            return self._info(key, await obstore.head_async(self._reader(), key))

    async def delete(self, key: str) -> None:
        """Remove the object; one that is gone already is no error. Raises: BlobsDown."""
        require_key(key)
        try:
            async with self._use(key):
                self.require_there()
                await obstore.delete_async(self._store, key)
        except BlobMissing:
            return

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        """Every object below `prefix`, in no order (a folder lists in its own). Raises: BlobsDown.

        Files in a folder that no put could have named (drafts of a killed put, links) are left out.
        """
        async with self._use(prefix):
            self.require_there()
        batches: Any = aiter(obstore.list(self._store, prefix))
        while True:
            async with self._use(prefix):
                batch = await anext(batches, None)
            if batch is None:
                return
            for meta in batch:
                info = self._info(meta["path"], meta)
                if self._is_object(info.key):
                    yield info

    def _require_plain(self, key: str) -> None:
        """Raises: InvalidBlobKey; FileNotFoundError, also for a link or a device."""
        require_key(key)
        if self.folder is None:
            return
        try:
            is_plain = is_plain_file(self.folder, key)
        except (FileNotFoundError, NotADirectoryError):
            is_plain = False
        if not is_plain:
            raise FileNotFoundError(key)

    def require_there(self) -> None:
        """Return if the folder is the right one now, as far as this host knows; a bucket always is. Raises: BlobsDown."""
        if self.folder is None:
            return
        if self._marked is None:
            if not self.folder.is_dir():
                raise _unusable(self.folder, FileNotFoundError(errno.ENOENT, "it is gone"))
            return
        try:
            fault = self._marked.lost()
        except OSError as error:
            raise _unusable(self.folder, error) from error
        if fault is not None:
            raise StoreNotThere(self.folder, fault)

    async def settle(self) -> None:
        """See that a folder is the one that was recorded; at its first use, make and record it. Raises: BlobsDown."""
        if self._marked is None or self._marked.is_settled:
            return
        assert self.folder is not None, "what is marked is a folder"
        try:
            fault = await self._marked.settle()
        except OSError as error:
            raise _unusable(self.folder, error) from error
        except (Unavailable, Conflict) as error:
            raise StoreNotThere(self.folder, f"it cannot be recorded: {error.text}") from error
        if fault is not None:
            raise StoreNotThere(self.folder, fault)
        self._store = LocalStore(self.folder)

    async def adopt(self) -> str | None:
        """Make the folder if it is missing, and expect it as it is from now on; its id, None if it has none.

        Raises: BlobsDown, Unavailable, SchemaBehind.
        """
        if self._marked is None or self.folder is None:
            return None
        try:
            mark = await self._marked.adopt()
        except OSError as error:
            raise _unusable(self.folder, error) from error
        self._store = LocalStore(self.folder)
        return mark

    @asynccontextmanager
    async def _use(
        self, key: str, *, is_put: bool = False, size_bytes: int = 0
    ) -> AsyncIterator[asyncio.Timeout]:
        """One operation on an object, bounded in time where it goes to S3, with errors in our words."""
        await self.settle()
        longest_s = None if self._timeout_s is None else self._timeout_s + size_bytes / MIB
        try:
            async with asyncio.timeout(longest_s) as limit:
                yield limit
        except FileNotFoundError as error:
            self.require_there()
            if is_put:
                raise _down(key, error) from error
            raise BlobMissing(f"no object {key!r} is stored") from error
        except TimeoutError as error:
            if longest_s is None:
                raise _down(key, error) from error
            raise BlobsDown(
                f"the object store did not answer within {longest_s:.0f} s on {key!r}: check it with"
                " `headrace doctor`, then try again; blobs.timeout is the limit",
                retry_after_s=5,
            ) from error
        except (OSError, obstore.exceptions.BaseError) as error:
            self.require_there()
            raise _down(key, error) from error

    def _reader(self) -> Any:
        """The store, for one read: it is told whom that is for (`trace.onward`), unless it is a folder.

        A store that is told anything is a client of its own, 7 ms to make: for what is looked into, not for each read.
        """
        fields = onward.get()
        if not fields or self.folder is not None:
            return self._store
        if self._told is None or self._told[0] != fields:
            # Options take the place of what the environment says of them, so that is said again.
            allows_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
            options: Any = {"default_headers": dict(fields), "allow_http": allows_http}
            self._told = fields, from_url(self._url, client_options=options)
        return self._told[1]

    def _info(self, key: str, meta: Any) -> BlobInfo:
        modified_at = meta["last_modified"]
        etag = str(meta["e_tag"] or "").strip('"')
        if self.folder is not None:
            etag = file_etag((modified_at - _EPOCH) // timedelta(microseconds=1), meta["size"])
        return BlobInfo(key, meta["size"], etag, modified_at)

    def _is_object(self, key: str) -> bool:
        try:
            self._require_plain(key)
        except (InvalidBlobKey, FileNotFoundError):
            return False
        return True

    async def open(self) -> None:
        """Check that the store can be listed. Raises: BlobsDown."""
        async for _ in self.list("headrace-probe"):
            break

    async def close(self) -> None:
        """End the threads after the puts under way."""
        if self._puts is not None:
            await asyncio.to_thread(self._puts.close)


def _allow(limit: asyncio.Timeout, size_bytes: int) -> None:
    """Give an operation the time that its bytes take."""
    if (when := limit.when()) is not None:
        limit.reschedule(when + size_bytes / MIB)


def is_plain_file(folder: Path, key: str) -> bool:
    """Whether `key` is a regular file reached through real folders: a link could lead out of the store."""
    path = folder
    steps = key.split("/")
    for step in steps[:-1]:
        path /= step
        if not stat.S_ISDIR(path.lstat().st_mode):
            return False
    return stat.S_ISREG((path / steps[-1]).lstat().st_mode)


def file_etag(modified_us: int, size_bytes: int) -> str:
    """The etag of a file: without its inode, so that copies which keep the time have the same one on every host."""
    return f"{modified_us:x}-{size_bytes:x}"


def _lock_of(folder: Path, check: Check | None) -> BinaryIO:
    """The lock of `folder`, opened; no folder is made for it. Raises: OSError."""
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if check is not None:
            check(root)
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        return open(os.open(LOCK_FILE, flags, 0o666, dir_fd=root), "ab")  # noqa: PTH123 - of a descriptor
    finally:
        os.close(root)


def _unusable(folder: Path, error: OSError) -> BlobsDown:
    return BlobsDown(
        f"the object store in folder {folder} cannot be used ({error.strerror}): run as a"
        " user who may write there, or set blobs.url (HEADRACE_BLOBS_URL)",
        retry_after_s=5,
    )


def _down(key: str, error: Exception) -> BlobsDown:
    return BlobsDown(
        f"the object store failed on {key!r} ({type(error).__name__}): check its disk, address and"
        " credentials with `headrace doctor`",
        retry_after_s=5,
    )
