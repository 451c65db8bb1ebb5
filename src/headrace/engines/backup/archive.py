"""The archive: a folder or bucket with base backups and the write-ahead log since each.

    archive.json                   the holder: the data folder that may write, with its generation
    base/<id>/000000 ...           a base backup: pieces of one tar, each compressed
    base/<id>/secret, token        the keys of the data folder
    base/<id>/backup.json          written last: a backup without it does not count
    base/<id>/verified.json        the result of the last `headrace backup verify`
    log/<generation>/<segment>/    parts of a segment by offset, or `full`

A generation is the history of one primary. A promotion replaces the holder by compare-and-set and
begins the next generation. The former holder reads `archive.json` before each write and at its
start, finds another holder, and stops. Within a generation each start of the holder has a session
of its own, so that two copies of one data folder never both write.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from headrace.engines.backup.archive_store import ArchiveDown, ArchiveStore
from headrace.engines.backup.wal import BackupDamaged, damaged, segment_start
from headrace.engines.blobs import BlobMissing
from headrace.engines.mount_guard import StoreRecord
from headrace.kernel.config import parse_duration_s, parse_size_bytes, parse_url, setting
from headrace.kernel.errors import Conflict, HeadraceError, InvalidInput

HOLDER_KEY: Final = "archive.json"
KEY_FILES: Final = ("secret", "token")
STORE_RECORDS: Final = "backup-store"
"""In the data folder: the id of each used archive folder (`engines.mount_guard`)."""
_IN_PROGRESS_MAX: Final = timedelta(days=1)
Stored = TypeVar("Stored")


class BackupNotConfigured(InvalidInput):
    """`backup.url` is not set."""

    code = "backup.not_configured"

    def __init__(self) -> None:
        super().__init__(
            "backup.url is not set: set HEADRACE_BACKUP_URL to file:///folder on another disk or to"
            " s3://bucket/prefix"
        )


class ArchiveTaken(Conflict):
    """The archive belongs to another data folder or database."""

    code = "backup.taken"


class BackupElsewhere(InvalidInput):
    """`postgres.url` is set, and Headrace backs up only its embedded PostgreSQL."""

    code = "backup.not_embedded"

    def __init__(self) -> None:
        super().__init__(
            "postgres.url is set, and Headrace backs up only its embedded PostgreSQL: use the"
            " backups of your provider, pgBackRest or WAL-G for that server"
        )


class ArchiveInside(InvalidInput):
    """`backup.url` is a folder inside the data folder, with whose disk it would be lost."""

    code = "backup.inside_data"


class Fenced(Conflict):
    """Another data folder was promoted, so this one may no longer run as the primary."""

    code = "backup.fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupConfig:
    """Section `backup`."""

    url: str | None = setting(
        None,
        "URL of the archive of the embedded PostgreSQL: file:///folder or s3://bucket/prefix;"
        " unset: no backups.",
        parse_url("file", "s3"),
        secret=True,
    )
    every_s: float = setting(
        "5s",
        "Time between writes of new write-ahead log to the archive; if the disk is lost, so"
        " are the commits since the last one.",
        parse_duration_s,
    )
    base_every_s: float = setting(
        "1d", "Age of the newest base backup at which the next is taken.", parse_duration_s
    )
    keep_s: float = setting(
        "7d", "How far back a restore can go; older backups are deleted.", parse_duration_s
    )
    log_kept_max_bytes: int = setting(
        "4GiB",
        "Most write-ahead log that PostgreSQL keeps on its disk while the archive is"
        " unavailable; beyond it the archive has a gap and a new base backup is taken.",
        parse_size_bytes,
    )


class Holder(msgspec.Struct, frozen=True):
    """The data folder that may write."""

    archive_id: str
    generation: int
    folder_id: str
    session: str
    host: str
    folder: str
    since: datetime
    system: str = ""
    """PostgreSQL's system identifier; empty until the holder has started."""
    timeline: int = 0
    """The timeline of the generation; 0 until the holder has started."""


class Base(msgspec.Struct, frozen=True):
    """A complete base backup."""

    id: str
    generation: int
    timeline: int
    system: str
    start: int
    """The position from which a restore needs the log."""
    end: int
    """The position from which the backup is consistent."""
    began_at: datetime
    ended_at: datetime
    version: str
    migrations: int
    size_bytes: int
    stored_bytes: int
    pieces: tuple[str, ...]
    """The sha256 of each stored piece."""
    keys: tuple[str, ...] = ()

    def piece(self, index: int) -> str:
        """The key of a piece."""
        return f"base/{self.id}/{index:06d}"


class Verified(msgspec.Struct, frozen=True):
    """The result of a rehearsal of a restore."""

    base: str
    at: datetime
    took_s: float
    tables: int = 0
    rows: int = 0
    restored_to: datetime | None = None
    fault: str = ""
    """Why it failed; empty after a success."""


class Archive:
    """The archive at `config.url`, as used by the data folder `folder`.

    If the folder `writes`, a missing archive folder is created at its first use. A folder that was
    used and is missing later is refused (see `mount_guard`).

    Raises: BackupNotConfigured, ArchiveInside.
    """

    def __init__(self, config: BackupConfig, folder: Path, *, writes: bool = False) -> None:
        if config.url is None:
            raise BackupNotConfigured
        parts = urlsplit(config.url)
        record = None
        if parts.scheme == "file":
            # Of this URL alone, so that another archive can be begun.
            name = hashlib.sha256(config.url.encode()).hexdigest()[:16]
            record = StoreRecord(folder / STORE_RECORDS / name, may_create=writes)
            place = Path(unquote(parts.path))
            if place.resolve().is_relative_to(folder.resolve()):
                raise ArchiveInside(
                    f"backup.url {config.url} is inside the data folder {folder}, and would be lost"
                    " with it: set HEADRACE_BACKUP_URL to a folder on another disk"
                )
            if writes and not record.file.exists() and place.parent.is_dir():
                # The archive has every row and key of the site.
                place.mkdir(mode=0o700, exist_ok=True)
        self.store = ArchiveStore(config.url, record)
        self.name = self.store.name
        self._holder: tuple[Holder, str] | None = None

    async def close(self) -> None:
        """Wait for open writes."""
        await self.store.close()

    async def holder(self) -> Holder | None:
        """The current holder, None for an empty archive. Raises: Unavailable, BackupDamaged."""
        known = self._holder
        try:
            found = await self.store.read(HOLDER_KEY, unless=known[1] if known else None)
        except BlobMissing:
            self._holder = None
            return None
        if found is not None:
            self._holder = _decoded(HOLDER_KEY, found[0], Holder), found[1]
        return self._holder[0] if self._holder else None

    async def claim(self, holder: Holder) -> None:
        """Replace the holder that `holder()` returned last. Raises: BlobChanged, Unavailable."""
        etag = self._holder[1] if self._holder else None
        await self.store.put_if(HOLDER_KEY, msgspec.json.encode(holder), etag=etag)
        self._holder = None
        await self.holder()

    async def require_session(self, session: str) -> None:
        """Require that this process still is the holder. Raises: Fenced, Unavailable."""
        found = await self.holder()
        if found is None:
            raise ArchiveDown(f"{self.name} has no {HOLDER_KEY} any more", "restore this file")
        if found.session != session:
            raise fenced_by(found)

    async def bases(self) -> list[Base]:
        """Complete base backups with a readable record, oldest first. Raises: Unavailable."""
        return (await self.bases_and_faults())[0]

    async def bases_and_faults(self) -> tuple[list[Base], dict[str, str]]:
        """As `bases`, and the fault of each damaged record by id. Raises: Unavailable."""
        found, faults = await self._records("backup.json", Base)
        return sorted(found, key=lambda base: base.ended_at), faults

    @asynccontextmanager
    async def new_base(self, base_id: str) -> AsyncIterator[None]:
        """Remove what the block stored of a base backup if it fails.

        Attempts that are repeated each minute would fill the archive with their pieces.
        """
        try:
            yield
        except BaseException:
            with suppress(HeadraceError, OSError):
                await self._delete_base(base_id)
            raise

    async def put_piece(self, base_id: str, index: int, data: bytes) -> None:
        """Store a piece of a base backup."""
        await self.store.put(f"base/{base_id}/{index:06d}", data)

    async def put_key(self, base_id: str, name: str, data: bytes) -> None:
        """Store a file with a key beside a base backup."""
        await self.store.put(f"base/{base_id}/{name}", data)

    async def get(self, key: str) -> bytes:
        """The bytes of an object. Raises: BackupDamaged if it is missing."""
        try:
            return await self.store.get(key)
        except BlobMissing as error:
            raise damaged(key, "it is missing") from error

    async def complete(self, base: Base) -> None:
        """Make a base backup count."""
        await self.store.put(f"base/{base.id}/backup.json", msgspec.json.encode(base))

    async def put_verified(self, verified: Verified) -> None:
        """Record the result of a rehearsal."""
        await self.store.put(f"base/{verified.base}/verified.json", msgspec.json.encode(verified))

    async def verified(self) -> list[Verified]:
        """The recorded rehearsals, oldest first; a damaged record counts as none."""
        found, _ = await self._records("verified.json", Verified)
        return sorted(found, key=lambda verified: verified.at)

    async def segments(self, generation: int) -> dict[str, list[str]]:
        """Stored parts of each segment of a generation, both in order of position."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        async for info in self.store.list(f"log/{generation:06d}"):
            _, _, segment, part = info.key.split("/")
            found[segment].append(part)
        return {name: sorted(found[name]) for name in sorted(found)}

    async def has_log_after(self, generation: int) -> bool:
        """Whether a later generation has log."""
        generations = [int(info.key.split("/")[1]) async for info in self.store.list("log")]
        return max(generations, default=0) > generation

    async def parts(self, generation: int, segment: str) -> list[str]:
        """Stored parts of one segment, in order."""
        infos = self.store.list(f"log/{generation:06d}/{segment}")
        return sorted([info.key.rpartition("/")[2] async for info in infos])

    async def get_part(self, generation: int, segment: str, part: str) -> tuple[str, bytes]:
        """Key and stored bytes of a part. Raises: BackupDamaged if it is missing."""
        key = part_key(generation, segment, part)
        return key, await self.get(key)

    async def put_part(self, generation: int, segment: str, part: str, stored: bytes) -> None:
        """Store a part."""
        await self.store.put(part_key(generation, segment, part), stored)

    async def drop_parts(self, generation: int, segment: str, parts: Iterable[str]) -> None:
        """Delete parts whose bytes another part has."""
        for part in parts:
            await self.store.delete(part_key(generation, segment, part))

    async def prune(self, oldest_needed: datetime) -> list[str]:
        """Delete what no restore to `oldest_needed` or later needs; return the ids of backups.

        The newest base backup always stays.
        """
        bases = await self.bases()
        if not bases:
            return []
        older = [base for base in bases if base.ended_at <= oldest_needed]
        first = older[-1] if older else bases[0]
        kept = [base for base in bases if base.ended_at >= first.ended_at]
        complete = {base.id for base in bases}
        deleted = [base.id for base in bases if base not in kept]
        # A backup may be in progress, whose pieces have no `backup.json` yet.
        abandoned = min(kept[0].id, base_id_at(datetime.now(UTC) - _IN_PROGRESS_MAX))
        for base_id in await self._base_ids():
            if base_id in deleted or (base_id not in complete and base_id < abandoned):
                await self._delete_base(base_id)
        async for key, generation, start in self._log_keys():
            needed = [base.start for base in kept if base.generation == generation]
            if not needed and generation >= kept[-1].generation:
                continue
            if not needed or start < min(needed):
                await self.store.delete(key)
        return deleted

    async def _delete_base(self, base_id: str) -> None:
        # Without its record it does not count.
        await self.store.delete(f"base/{base_id}/backup.json")
        await self.store.clear(f"base/{base_id}")

    async def _base_ids(self) -> list[str]:
        return sorted({info.key.split("/")[1] async for info in self.store.list("base")})

    async def _log_keys(self) -> AsyncIterator[tuple[str, int, int]]:
        found = [info.key async for info in self.store.list("log")]
        for key in found:
            _, generation, segment, _ = key.split("/")
            # The segment of the first needed position begins before it.
            yield key, int(generation), segment_start(segment)

    async def _records(self, name: str, kind: type[Stored]) -> tuple[list[Stored], dict[str, str]]:
        """The records `name` of all base backups, and the fault of each damaged one by id."""
        found: list[Stored] = []
        faults: dict[str, str] = {}
        for key in [info.key async for info in self.store.list("base")]:
            if not key.endswith(f"/{name}"):
                continue
            try:
                found.append(_decoded(key, await self.store.get(key), kind))
            except BlobMissing:
                continue  # deleted since it was listed
            except BackupDamaged as error:
                faults[error.base_id] = error.text
        return found, faults


def part_key(generation: int, segment: str, part: str) -> str:
    """The key of a part."""
    return f"log/{generation:06d}/{segment}/{part}"


def base_id_at(moment: datetime) -> str:
    """The id of a base backup that begins at `moment`; ids are in order of time (microseconds)."""
    return f"{moment.astimezone(UTC):%Y%m%dT%H%M%S.%f}Z"


def fenced_by(holder: Holder) -> Fenced:
    """The error for a former holder."""
    return Fenced(
        f"the archive is now written by data folder {holder.folder} on {holder.host} (generation"
        f" {holder.generation}, since {holder.since:%Y-%m-%d %H:%M:%S} UTC): this one must not run"
        " as a second primary; follow the new one with `headrace standby --data NEW`"
    )


def _decoded(key: str, data: bytes, kind: type[Stored]) -> Stored:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise damaged(key, str(error)) from error
