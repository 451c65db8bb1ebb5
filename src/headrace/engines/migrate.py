"""Schema migrations: numbered files per room, in two phases, so that old and new code overlap.

`0001_tables.sql` is an initial schema. `0003_pre_add_lane.sql` runs before the new code starts and
must keep the old code working. `0004_post_drop_slot.sql` runs when no old code is left. Each file
is one transaction with a lock timeout of 4 s and a statement timeout of 5 s, so a migration that
would block the site fails and can be repeated. An advisory lock serializes migrators. The checksum
of each applied file is stored, and a changed file is refused. A file may contain
`-- oldest-code: 0.3.0`; older code refuses to start. Each migration ends with
`set_planner_settings`, the settings that every function shares (docs/decisions/0021).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from headrace.engines.postgres import Postgres, Tx
from headrace.engines.postgres_errors import SchemaBehind, pooler_error, translated_errors
from headrace.engines.sql import load_queries
from headrace.kernel.errors import Conflict, Corrupt


class UrlsDiffer(Conflict):
    """`postgres.url` and `postgres.direct_url` lead to different databases; nothing was written."""

    code = "postgres.urls_differ"


_ROUNDS: Final = 5


async def require_sessions(postgres: Postgres) -> None:
    """Refuse a pooler in transaction mode. Raises: PostgresPooled, UrlsDiffer.

    Such a pooler runs each transaction on any of its server connections: LISTEN is lost without an
    error, a session lock stays on a shared connection, and prepared statements are missing. A
    start-up setting that is in effect proves a session. Otherwise two clients are compared.
    """
    async with postgres.session() as session:
        has_setting = await session.value(SQL.has_session_setting)
        direct = await session.value(SQL.identity)
    through_url = await postgres.value(SQL.identity)
    if direct != through_url:
        raise UrlsDiffer(
            "postgres.url and postgres.direct_url lead to different databases or servers"
            f" ({through_url} and {direct}, start time and database of each): correct one of them"
        )
    if not has_setting and await shares_backends(postgres):
        raise pooler_error("")


async def shares_backends(postgres: Postgres) -> bool:
    """Whether connections share backends; only the backend's process id is evidence.

    PgBouncer answers session settings from its own memory.
    """
    first = await postgres.connect_unpooled(statement_cache_size=0)
    try:
        second = await postgres.connect_unpooled(statement_cache_size=0)
        try:
            with translated_errors():
                seen = [
                    (
                        await first.fetchval(SQL.backend.text),
                        await second.fetchval(SQL.backend.text),
                    )
                    for _ in range(_ROUNDS)
                ]
        finally:
            second.terminate()
    finally:
        first.terminate()
    firsts, seconds = {pair[0] for pair in seen}, {pair[1] for pair in seen}
    return len(firsts) > 1 or len(seconds) > 1 or firsts == seconds


SQL: Final = load_queries("headrace.engines")
MIGRATORS_WAIT_S: Final = 120.0
_NAME: Final = re.compile(r"(\d{4})_(?:(pre|post)_)?(\w+)\.sql")
_OLDEST_CODE: Final = re.compile(r"^-- oldest-code: *(\d+\.\d+\.\d+) *$", re.MULTILINE)


class SchemaAhead(Conflict):
    """The database was migrated for newer code, and this code is too old for it."""

    code = "engines.schema_ahead"


class MigrationEdited(Corrupt):
    """The file of an applied migration was changed."""

    code = "engines.migration_edited"


@dataclass(frozen=True, slots=True)
class Migration:
    """One migration file."""

    room: str
    number: int
    phase: str
    name: str
    text: str

    @property
    def label(self) -> str:
        """Text such as `jobs 0001 pre queue`."""
        return f"{self.room} {self.number:04} {self.phase} {self.name}"

    @property
    def checksum(self) -> str:
        """SHA-256 of the text, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def oldest_code(self) -> str | None:
        """The oldest version of Headrace that runs after this migration."""
        match = _OLDEST_CODE.search(self.text)
        return match[1] if match else None


def find_migrations(packages: tuple[str, ...]) -> list[Migration]:
    """The migrations of `packages` in the order of application: by package, then number."""
    found: list[Migration] = []
    for package in packages:
        room = package.rpartition(".")[2]
        for file in sorted(
            files(package).joinpath("sql", "migrations").iterdir(), key=lambda f: f.name
        ):
            match = _NAME.fullmatch(file.name)
            if match:
                text = file.read_text(encoding="utf-8")
                found.append(Migration(room, int(match[1]), match[2] or "pre", match[3], text))
    return found


async def plan_migrations(postgres: Postgres, packages: tuple[str, ...]) -> list[Migration]:
    """The migrations that are not applied. Raises: MigrationEdited."""
    async with postgres.session() as session:
        return await _missing(session, find_migrations(packages))


async def apply_migrations(
    postgres: Postgres, packages: tuple[str, ...], *, phases: tuple[str, ...] = ("pre", "post")
) -> list[Migration]:
    """Apply the missing migrations of `phases` and return them; safe for concurrent processes.

    Raises: MigrationEdited, PostgresPooled; PostgresBusy after 4 s of waiting for a lock, with
    nothing half applied.
    """
    await require_sessions(postgres)
    applied: list[Migration] = []
    async with postgres.session() as session:
        await session.allow_long_statements(MIGRATORS_WAIT_S)
        await session.run(SQL.lock_migrations)
        try:
            missing = await _missing(session, find_migrations(packages))
            for migration in (m for m in missing if m.phase in phases):
                with translated_errors():
                    async with session.connection.transaction():
                        await session.run(SQL.set_lock_timeout)
                        await session.run(SQL.set_statement_timeout)
                        await session.connection.execute(migration.text, timeout=MIGRATORS_WAIT_S)
                        await session.run(SQL.set_planner_settings)
                        await session.run(
                            SQL.record_migration,
                            room=migration.room,
                            number=migration.number,
                            phase=migration.phase,
                            name=migration.name,
                            checksum=migration.checksum,
                            oldest_code=migration.oldest_code,
                        )
                applied.append(migration)
        finally:
            await session.run(SQL.unlock_migrations)
    return applied


async def check_schema(postgres: Postgres, packages: tuple[str, ...], *, version: str) -> None:
    """Refuse a database that does not fit this version.

    Raises: SchemaBehind, SchemaAhead, PostgresPooled.
    """
    await require_sessions(postgres)
    async with postgres.session() as session:
        missing = [
            m for m in await _missing(session, find_migrations(packages)) if m.phase == "pre"
        ]
        oldest = await session.all(SQL.oldest_codes)
    if missing:
        raise SchemaBehind(
            f"the database lacks {len(missing)} migration(s), first {missing[0].label}:"
            " run `headrace migrate`"
        )
    needed = max((_version_key(row["oldest_code"]) for row in oldest), default=(0,))
    if needed > _version_key(version):
        text = ".".join(str(part) for part in needed)
        raise SchemaAhead(
            f"the database was migrated for Headrace {text} or newer, this is {version}:"
            " run the newer version"
        )


async def _missing(session: Tx, migrations: list[Migration]) -> list[Migration]:
    await session.run(SQL.create_schema)
    await session.run(SQL.create_migration_table)
    rows: list[Any] = await session.all(SQL.applied_migrations)
    applied = {(row["room"], row["number"]): row["checksum"] for row in rows}
    for migration in migrations:
        checksum = applied.get((migration.room, migration.number), migration.checksum)
        if checksum != migration.checksum:
            raise MigrationEdited(
                f"migration {migration.label} was applied with other contents: restore the file and"
                " put the change into a new migration"
            )
    return [m for m in migrations if (m.room, m.number) not in applied]


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
