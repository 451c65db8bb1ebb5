"""The backups of a site for the HTTP API and the console: what is restorable, and the lag."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from headrace.engines.backup.archive import (
    Archive,
    BackupConfig,
    BackupElsewhere,
    BackupNotConfigured,
)
from headrace.engines.backup.state import Restorable, log_behind, newest_log, read_state
from headrace.engines.postgres import Postgres

BEHIND_S_MIN: Final = 60.0


class BackupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A base backup; `until` is None if it cannot be restored, and `fault` states why."""

    id: str
    generation: int
    ended_at: datetime
    until: datetime | None
    stored_bytes: int
    size_bytes: int
    verified_at: datetime | None
    fault: str


class BackupsState(msgspec.Struct, frozen=True, kw_only=True):
    """Base backups, oldest first, and how far the archive is behind PostgreSQL."""

    archive: str
    folder: str
    """The data folder that writes to the archive; empty if none has begun it."""
    host: str
    generation: int
    behind_bytes: int | None
    """Log of PostgreSQL that is not archived; None if nothing archives it."""
    archived_until: datetime | None
    """Every commit up to then is archived; None if no log of this generation is readable."""
    is_late: bool
    """Whether log is not archived for longer than `backup.every` explains."""
    verified_at: datetime | None
    """The last successful rehearsal of a restore."""
    backups: list[BackupRow]
    unreadable: dict[str, str]
    """Base backups with a damaged record: the fault of each by id."""


class Backups:
    """Reads the archive of the embedded PostgreSQL; `Headrace.backups`."""

    def __init__(
        self, config: BackupConfig, folder: Path, embedded: Callable[[], Postgres] | None
    ) -> None:
        """`embedded` returns the embedded PostgreSQL; None with `postgres.url`."""
        self._config = config
        self._folder = folder
        self._embedded = embedded

    @property
    def is_on(self) -> bool:
        """Whether this site has an archive."""
        return self._config.url is not None and self._embedded is not None

    async def state(self) -> BackupsState:
        """Read the archive: base backups, log and rehearsals.

        Raises: BackupElsewhere, BackupNotConfigured, ArchiveInside, Unavailable, BackupDamaged.
        """
        if self._embedded is None:
            raise BackupElsewhere
        if self._config.url is None:
            raise BackupNotConfigured
        behind_bytes = await log_behind(self._embedded())
        archive = Archive(self._config, self._folder)
        try:
            state = await read_state(archive)
            holder = state.holder
            log = await newest_log(archive, holder.generation) if holder is not None else None
        finally:
            await archive.close()
        until = log[1] if log is not None else None
        return BackupsState(
            archive=archive.name,
            folder=holder.folder if holder is not None else "",
            host=holder.host if holder is not None else "",
            generation=holder.generation if holder is not None else 0,
            behind_bytes=behind_bytes,
            archived_until=until,
            is_late=is_late(behind_bytes, until, self._config),
            verified_at=state.verified.at if state.verified is not None else None,
            backups=[_row(one) for one in state.backups],
            unreadable=state.unreadable,
        )


def is_late(behind_bytes: int | None, until: datetime | None, config: BackupConfig) -> bool:
    """Whether log waits for the archive for longer than `backup.every` explains."""
    if not behind_bytes or until is None:
        return behind_bytes is None
    age_s = (datetime.now(UTC) - until).total_seconds()
    return age_s > max(BEHIND_S_MIN, 5 * config.every_s)


def _row(one: Restorable) -> BackupRow:
    return BackupRow(
        id=one.base.id,
        generation=one.base.generation,
        ended_at=one.base.ended_at,
        until=one.until,
        stored_bytes=one.base.stored_bytes,
        size_bytes=one.base.size_bytes,
        verified_at=one.verified_at,
        fault=one.fault,
    )
