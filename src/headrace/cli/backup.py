"""Commands for backups of the embedded engines, and the archiver inside `headrace up`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any, Final, TypeVar

import click
import msgspec

from headrace.cli.app_context import App, CommandLine
from headrace.cli.roles import APP_ARGUMENT, headrace_command, run_role, write_metrics
from headrace.cli.supervisor import announce_ready
from headrace.engines.backup.archive import (
    Archive,
    BackupConfig,
    BackupElsewhere,
    BackupNotConfigured,
    Base,
    Fenced,
    Verified,
)
from headrace.engines.backup.archive_store import ArchiveMissing
from headrace.engines.backup.archiver import (
    Archiver,
    note_fenced,
    read_identity,
    require_holder,
    require_not_fenced,
)
from headrace.engines.backup.base_backup import take_base
from headrace.engines.backup.restore import Restored, restore
from headrace.engines.backup.standby import (
    PROMOTED_S,
    Standby,
    is_standby,
    make_standby,
    promote,
)
from headrace.engines.backup.state import (
    read_state,
    release_log,
    verify,
)
from headrace.engines.backup.wal import BackupDamaged
from headrace.engines.embedded.data_folder import is_locked, require_owner, require_recovered
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.kernel import metrics
from headrace.kernel.config import parse_moment
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import configure_logs, logger
from headrace.kernel.terminal import Lines, Parsed, pluralize, table

LAST_LOG_S: Final = 10.0
"""Longest wait for the last write to the archive when `headrace up` stops."""
NOT_INCLUDED: Final = (
    "Not included: objects (blobs), which you copy as files, and Valkey, which is rebuilt from"
    " PostgreSQL except for hits of the last seconds."
)
Answer = TypeVar("Answer")
log = logger(__name__)


class NotPromoted(Unavailable):
    """The standby did not end its recovery in time."""

    code = "backup.not_promoted"


def backup_config(app: App) -> BackupConfig:
    """The section, for an embedded PostgreSQL. Raises: BackupElsewhere, BackupNotConfigured."""
    if app.configured_urls().postgres_url:
        raise BackupElsewhere
    config = app.config.section(BackupConfig)
    if config.url is None:
        raise BackupNotConfigured
    return config


def postgres_bin_of(app: App) -> str | None:
    """The configured folder of PostgreSQL's programs."""
    found: str | None = app.config.sections["postgres"].bin
    return found


class ArchiveKeeper:
    """The archiver of `headrace up`; without `backup.url` it only releases kept log."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._config = app.config.section(BackupConfig)
        is_embedded = not app.configured_urls().postgres_url
        self._is_on = self._config.url is not None and is_embedded
        self._releases = self._config.url is None and is_embedded
        self._archive: Archive | None = None
        self._archiver: Archiver | None = None
        self._task: asyncio.Task[None] | None = None

    async def check_start(self) -> None:
        """Refuse the start of a former primary. Raises: Fenced, ArchiveTaken, FolderUnusable."""
        folder = self._app.data_folder
        if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
            return  # the start of the engines names the fault
        require_recovered(folder)
        require_not_fenced(folder)
        if not self._is_on:
            return
        self._archive = Archive(self._config, folder, writes=True)
        try:
            holder = await self._archive.holder()
            require_holder(holder, read_identity(folder), self._archive)
        except Fenced as error:
            note_fenced(folder, error)
            raise
        except (Unavailable, BackupDamaged, OSError) as error:
            # Backups must not stop the site; the archiver tries again.
            log.warning("archive_unavailable", error=str(error))

    async def start(self, postgres_url: str, request_stop: Callable[[], None]) -> None:
        """Archive in a task, which requests a stop if this folder may not be the primary."""
        postgres = Postgres(postgres_url, PostgresConfig(connections_max=2))
        if self._archive is None:
            if self._releases:
                await release_log(postgres)
                await postgres.close()
            return
        self._archiver = Archiver(
            self._archive,
            postgres,
            self._app.data_folder,
            self._config,
            postgres_bin=postgres_bin_of(self._app),
        )
        self._task = asyncio.create_task(self._run(self._archiver))

        def end(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                request_stop()

        self._task.add_done_callback(end)

    async def _run(self, archiver: Archiver) -> None:
        writing = asyncio.create_task(write_metrics(self._app, "up"))
        try:
            await archiver.run(asyncio.Event(), version=self._app.version)
        except Fenced as error:
            note_fenced(self._app.data_folder, error)
            raise
        finally:
            writing.cancel()
            with suppress(OSError):
                metrics.remove_snapshot(self._app.metrics_folder, "up")

    async def stop(self) -> None:
        """Archive the last log and stop. Raises: Fenced, ArchiveTaken."""
        if self._task is None or self._archiver is None or self._archive is None:
            return
        has_ended = self._task.done()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            if has_ended:
                self._task.result()
            async with asyncio.timeout(LAST_LOG_S):
                await self._archiver.step()
        except (Unavailable, OSError, TimeoutError) as error:
            log.warning("last_log_not_archived", error=str(error))
        finally:
            await self._archiver.close()
            await self._archive.close()


@click.group("backup", invoke_without_command=True, short_help="Back up the embedded PostgreSQL.")
@click.pass_context
def backup(context: click.Context) -> None:
    """Take a base backup now, while `headrace up` runs.

    `headrace up` with backup.url set also takes them by itself, and archives PostgreSQL's
    write-ahead log between them.
    """
    if context.invoked_subcommand is not None:
        return
    line: CommandLine = context.obj

    async def work(app: App) -> Base:
        config = backup_config(app)
        async with opened(app, config) as archive:
            postgres = app.engines.postgres
            holder = await archive.holder()
            require_holder(holder, read_identity(app.data_folder), archive)
            if holder is None:
                raise ArchiveMissing(f"{archive.name} is empty: `headrace up` begins the archive")
            return await take_base(
                archive,
                postgres,
                app.data_folder,
                holder=holder,
                version=app.version,
                postgres_bin=postgres_bin_of(app),
            )

    line.progress("taking a base backup")
    base = line.run_app(work, checked=False)
    text = (
        f"base backup {base.id}: {mib(base.stored_bytes)} stored of {mib(base.size_bytes)}\n"
        f"{NOT_INCLUDED}"
    )
    line.show(base, text)


@backup.command("ls")
@click.pass_obj
def list_backups(line: CommandLine) -> None:
    """List base backups, and the time up to which each can be restored."""
    state = _run_on_archive(line, lambda _, archive: read_state(archive))
    rows = [
        (
            one.base.id,
            str(one.base.generation),
            f"{one.base.ended_at:%Y-%m-%d %H:%M:%S}",
            f"{one.until:%Y-%m-%d %H:%M:%S}" if one.until else "damaged",
            mib(one.base.stored_bytes),
            f"{one.verified_at:%Y-%m-%d %H:%M}" if one.verified_at else "never",
        )
        for one in state.backups
    ]
    rows += [(one, "", "", "damaged", "", "") for one in state.unreadable]
    rows.sort()
    head = ("backup", "generation", "restorable from (UTC)", "to (UTC)", "stored", "verified")
    lines = [table(head, rows) if rows else "no complete base backup yet"]
    if state.holder is not None:
        lines.append(f"written by {state.holder.folder} on {state.holder.host}")
    lines += [f"{one.base.id}: {one.fault}" for one in state.backups if one.fault]
    lines += [f"{one}: {fault}" for one, fault in state.unreadable.items()]
    document = msgspec.to_builtins(state, enc_hook=str)
    document["items"] = document.pop("backups")
    line.show(document, Lines(*lines))


@backup.command("verify")
@click.pass_obj
def verify_backup(line: CommandLine) -> None:
    """Test a restore of the newest state in a temporary folder, and remove the folder.

    Verifies every file and every archived byte, starts the server, and reads every row. The folder
    is beside the data folder and needs space for the whole database. `backup ls` shows the result.
    """

    async def work(app: App, archive: Archive) -> Verified:
        return await verify(archive, app.data_folder, postgres_bin=postgres_bin_of(app))

    line.progress("rehearsing a restore")
    found = _run_on_archive(line, work)
    text = (
        f"base backup {found.base} and its log are restorable: {pluralize(found.rows, 'row')} in"
        f" {pluralize(found.tables, 'table')}, last commit {found.restored_to or 'unknown'},"
        f" in {found.took_s:.0f} s"
    )
    line.show(found, text)


@click.command("restore", short_help="Restore a backup into a new data folder.")
@click.option(
    "--to",
    type=Parsed(parse_moment, name="time"),
    help="A time such as 2026-11-21T10:00Z, UTC if it has no offset; default: the newest state.",
)
@click.pass_obj
def restore_backup(line: CommandLine, *, to: datetime | None) -> None:
    """Restore from backup.url into the new folder --data FOLDER, up to a point in time.

    If the newest base backup is damaged, an older one and the log after it are used. The restored
    folder does not write to the archive until `headrace promote --data FOLDER`.
    """

    async def work(app: App, archive: Archive) -> Restored:
        return await restore(archive, app.data_folder, to=to, postgres_bin=postgres_bin_of(app))

    line.progress("restoring")
    found = _run_on_archive(line, work)
    unused = "".join(f"{one} was not used: {found.unused[one]}\n" for one in sorted(found.unused))
    text = (
        f"{unused}restored {found.folder} from base backup {found.base}, last commit"
        f" {found.committed_at or 'before the end of that backup'}\n{NOT_INCLUDED}\n"
        "To look at it, run `headrace up --engines-only` with --data. To replace the former"
        " primary, run `headrace promote` with --data, then `headrace up`."
    )
    line.show(found, text)


@click.command("standby", short_help="Follow the primary of an archive on a second machine.")
@APP_ARGUMENT
@click.pass_obj
def standby(line: CommandLine, application: str | None) -> None:
    """Follow the primary that writes to backup.url, until SIGTERM or `headrace promote`.

    The first start restores the newest base backup into the new folder --data FOLDER. After a
    promotion this process continues as `headrace up MODULE:APP`.
    """
    app = line.app(application)
    config = backup_config(app)
    require_owner(app.data_folder)
    was_there = app.data_folder.exists()
    promoted = []

    async def body(app: App, stop: asyncio.Event) -> None:
        async with opened(app, config) as archive:
            folder = app.data_folder
            require_not_fenced(folder)
            if not is_standby(folder):
                await make_standby(archive, folder)
            line.show(
                {"data_folder": str(folder), "archive": archive.name},
                f"Standby in {folder} follows {archive.name}; `headrace promote` makes it the"
                " primary.",
            )
            sys.stdout.flush()
            announce_ready()
            promoted.append(
                await Standby(archive, folder, config, postgres_bin=postgres_bin_of(app)).run(stop)
            )

    try:
        run_role(
            app,
            line.packages,
            "standby",
            body,
            loop_factory=asyncio.new_event_loop,
            needs_schema=False,
            records_history=False,
        )
    except BaseException:
        _remove_empty(app, with_folder=not was_there)
        raise
    if promoted == [True]:
        command = [*headrace_command(line), "up", *([application] if application else [])]
        command += ["--json"] if line.is_json else []
        os.execv(command[0], command)  # noqa: S606 - the same program, without a shell


def _remove_empty(app: App, *, with_folder: bool) -> None:
    """Remove the folders for metrics that a standby which could not be made has left empty."""
    left = [app.metrics_folder, app.metrics_folder.parent]
    with suppress(OSError):
        for folder in [*left, app.data_folder] if with_folder else left:
            folder.rmdir()


@click.command("promote", short_help="Make this data folder the primary of the archive.")
@click.option(
    "--again",
    is_flag=True,
    help="Also if this folder is an older copy of the primary's own, such as a snapshot.",
)
@click.pass_obj
def promote_folder(line: CommandLine, *, again: bool) -> None:
    """Make a standby, or a restored folder, the primary: the only one that writes to backup.url.

    A second call has no effect and reports the generation. The former primary stops at its next
    write to the archive, within backup.every, and refuses to start again. Without access to the
    archive it cannot detect this: stop it yourself if you can.
    """

    async def work(app: App, archive: Archive) -> dict[str, Any]:
        folder = app.data_folder
        was_standby = is_standby(folder)
        holder, is_new = await promote(archive, folder, again=again)
        runs = await _has_ended_recovery(app) if was_standby else is_locked(folder)
        return {
            "data_folder": str(folder),
            "generation": holder.generation,
            "already": not is_new,
            "next": "" if runs else f"headrace {'standby' if was_standby else 'up'}",
        }

    answer = _run_on_archive(line, work)
    since = "is the primary already" if answer["already"] else "is the primary now"
    rest = f"start it with `{answer['next']}`" if answer["next"] else "it runs as `headrace up`"
    text = f"{answer['data_folder']} {since}, generation {answer['generation']}; {rest}"
    line.show(answer, text)


async def _has_ended_recovery(app: App) -> bool:
    """Wait for the running standby; return False if none runs. Raises: NotPromoted."""
    try:
        async with asyncio.timeout(PROMOTED_S):
            while is_standby(app.data_folder):
                if not is_locked(app.data_folder):
                    return False
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise NotPromoted(
            f"the standby did not end its recovery within {PROMOTED_S:.0f} s: see its log; it is"
            " the primary as soon as it does"
        ) from None
    return True


def _run_on_archive(
    line: CommandLine, work: Callable[[App, Archive], Coroutine[Any, Any, Answer]]
) -> Answer:
    """Run `work` with the archive, without PostgreSQL."""
    configure_logs("cli", level="warning")
    app = line.app()
    config = backup_config(app)

    async def in_loop() -> Answer:
        async with opened(app, config) as archive:
            return await work(app, archive)

    return asyncio.run(in_loop())


@asynccontextmanager
async def opened(app: App, config: BackupConfig) -> AsyncIterator[Archive]:
    """The archive of an existing site, closed after the block."""
    archive = Archive(config, app.data_folder)
    try:
        yield archive
    finally:
        await archive.close()


def mib(size_bytes: int) -> str:
    """A size for a report, such as `4.8 MiB`."""
    return f"{size_bytes / 2**20:,.1f} MiB"


COMMANDS: Final[list[Any]] = [backup, restore_backup, standby, promote_folder]
