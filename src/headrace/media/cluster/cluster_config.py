"""The shared configuration of the media cluster: versioned JSON documents in the object store.

All nodes see the object store, and it supports compare-and-set (If-Match; for a folder a lock
file). So it stores what they must agree on: members, purges, traces. Each document counts its
versions. A change reads the document, changes it, and stores it only if it is unchanged since. A
change must be idempotent: a put whose reply was lost is repeated. Users can neither read nor write
these keys.

Of a node's processes, the one that holds the lock file polls the object store every two seconds
with conditional reads, and keeps the newest valid copy in the node's folder. The others check that
file ten times a second. So the number of workers does not matter, a dead process is replaced at
once (the kernel drops its lock), and a node that starts without the object store uses its last
copy.

Only newer, valid versions are accepted. Missing, damaged or older documents are ignored and logged
once. If a document is missing or older, as after a restored backup, it is stored again as the next
version; otherwise later changes would be ignored until their version catches up.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from headrace.engines.blobs import BlobChanged, BlobMissing, Blobs, BlobsDown
from headrace.kernel.errors import Corrupt, HeadraceError, Unavailable
from headrace.kernel.logs import logger
from headrace.kernel.metrics import bound, counter
from headrace.kernel.resilience import wait_event
from headrace.kernel.single_flight import SingleFlight

log = logger(__name__)

RESERVED: Final = "_headrace"
PREFIX: Final = f"{RESERVED}/media/"
TRIES_MAX: Final = 12
PAUSE_S: Final = 0.05
DOCUMENT_BYTES_MAX: Final = 4 * 2**20
POLL_EVERY_S: Final = 2.0
TICK_S: Final = 0.1
ASK_TIMEOUT_S: Final = 5.0
START_WAIT_S: Final = 1.0
REFRESH_GAP_S: Final = 0.2
LOCK_FILE: Final = "poll.lock"
OUTCOMES: Final = ("changed", "same", "refused", "missing", "failed")
POLLS: Final = counter(
    "media_document_polls_total",
    "Polls of the object store for the cluster's documents, by outcome.",
    outcome=OUTCOMES,
)


class DocumentDamaged(Corrupt):
    """A document of the cluster in the object store is damaged."""

    code = "media.document_damaged"


class DocumentContended(Unavailable):
    """A document of the cluster in the object store could not be changed, because of concurrent
    changes.
    """

    code = "media.document_contended"


class Versioned(Protocol):
    """The contents of a document: a frozen msgspec struct with a version."""

    @property
    def version(self) -> int: ...


V = TypeVar("V", bound=Versioned)


def is_reserved(key: str) -> bool:
    """Whether `key` is reserved for the cluster."""
    return key == RESERVED or key.startswith(f"{RESERVED}/")


@dataclass(frozen=True, slots=True)
class DocumentType(Generic[V]):
    """A document's name, its type, and its value before the first change."""

    name: str
    type: type[V]
    empty: V

    @property
    def key(self) -> str:
        """The key that it is stored under."""
        return f"{PREFIX}{self.name}.json"

    def decode(self, data: bytes) -> V:
        """Raises: DocumentDamaged."""
        try:
            if len(data) > DOCUMENT_BYTES_MAX:
                raise msgspec.ValidationError(f"{len(data)} bytes are too many")
            return msgspec.json.decode(data, type=self.type)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DocumentDamaged(
                f"{self.key}: not a valid document ({error}): remove it from the object store, and"
                " the nodes restore their last valid copy"
            ) from error


class Document(Generic[V]):
    """A document in the object store that can be read and changed."""

    def __init__(self, blobs: Blobs, kind: DocumentType[V]) -> None:
        self._blobs = blobs
        self.kind = kind

    async def read(self) -> V:
        """The stored value. Raises: DocumentDamaged, BlobsDown."""
        return (await self._find())[0]

    async def change(self, change: Callable[[V], V], *, after: int = 0) -> V:
        """Store `change` of the newest version as the next version. Equal contents store nothing.

        The new version is also higher than `after`. Raises: DocumentDamaged, DocumentContended,
        BlobsDown, and the errors of `change`.
        """
        for attempt in range(TRIES_MAX):
            old, etag = await self._find()
            new = change(old)
            if new == old:
                return old
            version = max(old.version, after) + 1
            new = msgspec.structs.replace(new, version=version)  # type: ignore[type-var]
            try:
                await self._blobs.put_if(self.kind.key, msgspec.json.encode(new), etag=etag)
            except BlobChanged:
                await asyncio.sleep(random.uniform(0, PAUSE_S * (attempt + 1)))
            else:
                return new
        raise DocumentContended(
            f"{self.kind.key}: {TRIES_MAX} concurrent changes won: try again", retry_after_s=1
        )

    async def _find(self) -> tuple[V, str | None]:
        try:
            found = await self._blobs.read(self.kind.key)
        except BlobMissing:
            return self.kind.empty, None
        assert found is not None
        data, etag = found
        return self.kind.decode(data), etag


class FollowedDocument(Generic[V]):
    """The newest valid version of one document in this process, and the state of its polling."""

    def __init__(self, kind: DocumentType[V]) -> None:
        self.kind = kind
        self.value = kind.empty
        self.etag: str | None = None
        self.seen_copy: tuple[int, int] | None = None
        self.logged: str | None = None
        self.polled_s = float("-inf")

    def accept(self, data: bytes) -> bool:
        """Accept `data` if it is newer. Return whether it was. Raises: DocumentDamaged."""
        found = self.kind.decode(data)
        if found.version <= self.value.version:
            return False
        self.value = found
        self.changed(found)
        return True

    def changed(self, value: V) -> None:
        """Use `value`, the newest version; for subclasses."""


class DocumentPoller:
    """Follows documents for one process. Owns its task: call `start`, then `close`."""

    def __init__(
        self,
        blobs: Blobs,
        folder: Path,
        polled: Sequence[FollowedDocument[Any]],
        *,
        every_s: float = POLL_EVERY_S,
    ) -> None:
        self._blobs = blobs
        self._folder = folder
        self._every_s = every_s
        self._followed = {one.kind.name: one for one in polled}
        self._lock: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_polled = asyncio.Event()
        self._refreshing: SingleFlight[str, None] = SingleFlight()

    async def start(self) -> None:
        """Load the copies of this node, wait up to a second for a poll, then poll in the
        background.

        Raises: OSError (the folder).
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._read_copies()
        self._lead()
        self._task = asyncio.get_running_loop().create_task(self._run())
        if self.leads:
            await wait_event(self._is_polled, START_WAIT_S)

    async def close(self) -> None:
        """Stop polling; another process of the node takes over."""
        await self._refreshing.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def refresh(self, name: str) -> None:
        """Poll one document now. Concurrent callers share one poll; at most five polls a second."""
        followed = self._followed[name]
        elapsed_s = asyncio.get_running_loop().time() - followed.polled_s
        if name in self._refreshing or elapsed_s >= REFRESH_GAP_S:
            await self._refreshing.call(name, lambda: self._poll(followed))

    async def _run(self) -> None:
        polled_s = float("-inf")
        while True:
            try:
                self._read_copies()
                now_s = asyncio.get_running_loop().time()
                if self._lead() and now_s - polled_s >= self._every_s:
                    polled_s = now_s
                    await asyncio.gather(*map(self._poll, self._followed.values()))
                    self._is_polled.set()
            except Exception:
                log.exception("polling_failed")
            await asyncio.sleep(TICK_S)

    @property
    def leads(self) -> bool:
        """Whether this process polls the object store for the node."""
        return self._lock is not None

    def _lead(self) -> bool:
        """Take the lock unless another process of the node has it.

        Return whether this process has it.
        """
        if self._lock is None:
            descriptor = os.open(self._folder / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            self._lock = descriptor
        return True

    async def _poll(self, followed: FollowedDocument[Any]) -> None:
        followed.polled_s = asyncio.get_running_loop().time()
        try:
            outcome = await self._read_store(followed)
        except BlobMissing:
            outcome = "missing"
            if followed.value.version:
                await self._put_back(followed, "is missing")
        except DocumentDamaged as error:
            outcome = "refused"
            self._log_once(followed, "document_refused", error.text)
        except (BlobsDown, TimeoutError, OSError) as error:
            outcome = "failed"
            self._log_once(followed, "document_not_read", type(error).__name__)
        bound(POLLS, "media_document_polls_total", outcome=outcome).inc()

    async def _read_store(self, followed: FollowedDocument[Any]) -> str:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            found = await self._blobs.read(followed.kind.key, unless=followed.etag)
        if found is None:
            followed.logged = None
            return "same"
        data, etag = found
        is_newer = followed.accept(data)
        followed.etag = etag
        if is_newer:
            followed.logged = None
            await asyncio.to_thread(_keep, self._copy_of(followed), data)
            return "changed"
        value = followed.value
        if followed.kind.decode(data) == value:
            followed.logged = None
            return "same"
        await self._put_back(followed, f"is older than version {value.version}")
        return "refused"

    async def _put_back(self, followed: FollowedDocument[Any], why: str) -> None:
        """Store the known version again, as after a restored backup of the store."""
        log.warning("document_put_back", document=followed.kind.name, why=why)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                newer = followed.value
                await Document(self._blobs, followed.kind).change(
                    lambda old: newer if old.version <= newer.version else old, after=newer.version
                )
        except (HeadraceError, TimeoutError) as error:
            self._log_once(followed, "document_not_put_back", type(error).__name__)

    def _copy_of(self, followed: FollowedDocument[Any]) -> Path:
        return self._folder / f"{followed.kind.name}.json"

    def _read_copies(self) -> None:
        for followed in self._followed.values():
            copy = self._copy_of(followed)
            try:
                found = copy.stat()
                if followed.seen_copy == (found.st_ino, found.st_mtime_ns):
                    continue
                followed.seen_copy = (found.st_ino, found.st_mtime_ns)
                followed.accept(copy.read_bytes())
            except FileNotFoundError:
                continue
            except (OSError, HeadraceError) as error:
                self._log_once(followed, "copy_refused", str(error))

    def _log_once(self, followed: FollowedDocument[Any], event: str, reason: str) -> None:
        """Log an event unless it equals the last one: the store may be unavailable for hours."""
        if followed.logged != (logged := f"{event} {reason}"):
            followed.logged = logged
            log.warning(event, document=followed.kind.name, reason=reason)


def _keep(copy: Path, data: bytes) -> None:
    """Write the copy atomically, so that a power loss leaves the old or the new one."""
    draft = copy.with_suffix(f".draft-{os.getpid()}")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(copy)
