"""Archive, restore to a time, standby and promotion, on a real server."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from tests.kit.waiting import wait_true

from headrace.engines.backup.archive import Archive, ArchiveTaken, BackupConfig, Fenced
from headrace.engines.backup.archiver import Archiver
from headrace.engines.backup.base_backup import take_base
from headrace.engines.backup.restore import (
    OutsideArchive,
    RestoreFolderExists,
    extend_segment,
    plan_restore,
    restore,
)
from headrace.engines.backup.standby import Standby, StandbyLeft, make_standby, promote
from headrace.engines.backup.state import log_behind, read_state, verify
from headrace.engines.backup.wal import BackupDamaged, segment_name
from headrace.engines.embedded import EmbeddedEngines, FolderUnusable
from headrace.engines.embedded.settings import endpoints_of
from headrace.engines.postgres import Postgres, PostgresConfig

pytestmark = pytest.mark.slow


class Primary:
    """Engines with an archiver that writes when the test calls `step`."""

    def __init__(self, folder: Path, archive_folder: Path) -> None:
        self.folder, self.archive_folder = folder, archive_folder
        self.config = BackupConfig(url=archive_folder.as_uri(), every_s=0.05)
        self.engines = EmbeddedEngines(
            folder, durable=False, extra={"max_slot_wal_keep_size": "64MB"}
        )
        self.archive = Archive(self.config, folder, writes=True)
        self.url = ""

    async def start(self):
        self.url = (await self.engines.start()).postgres_url
        self.postgres = Postgres(self.url, PostgresConfig())
        self.archiver = Archiver(self.archive, self.postgres, self.folder, self.config)
        return self

    async def stop(self):
        await self.postgres.close()
        await self.engines.stop()

    async def execute(self, statement):
        connection = await asyncpg.connect(self.url)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    async def keep(self, *numbers):
        """Commit a row for each number, and archive it."""
        for number in numbers:
            await self.execute(f"INSERT INTO kept VALUES ({number})")
        await self.archiver.step()

    async def base(self):
        """Take a base backup; the archiver runs meanwhile."""

        async def steps():
            while True:
                await self.archiver.step()
                await asyncio.sleep(0)

        await self.archiver.step()
        running = asyncio.create_task(steps())
        try:
            return await take_base(
                self.archive,
                self.postgres,
                self.folder,
                holder=await self.archive.holder(),
                version="1",
            )
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def primary_in(folder: Path, archive_folder: Path):
    primary = Primary(folder, archive_folder)
    try:
        await primary.start()
        await primary.execute("CREATE TABLE IF NOT EXISTS kept (number integer)")
        (folder / "secret").write_text("the secret of this site")
        yield primary
    finally:
        await primary.stop()
        await primary.archive.close()


@pytest.fixture(scope="module")
async def primary(tmp_path_factory):
    """A primary for the tests of a module that only append to it."""
    folder = tmp_path_factory.mktemp("primary")
    async with primary_in(folder / "data", folder / "archive") as primary:
        yield primary


async def rows_in(folder: Path):
    """The kept numbers of a restored folder."""
    engines = EmbeddedEngines(folder, durable=False)
    try:
        connection = await asyncpg.connect((await engines.start()).postgres_url)
        rows = await connection.fetch("SELECT number FROM kept ORDER BY number")
        await connection.close()
        return [row["number"] for row in rows]
    finally:
        await engines.stop()


async def test_a_restore_has_the_rows_of_its_time_and_the_newest_has_all(primary, tmp_path):
    with pytest.raises(Exception, match="no complete base backup"):
        await plan_restore(primary.archive, None)
    await primary.execute("TRUNCATE kept")
    await primary.archiver.step()
    base = await primary.base()
    await primary.keep(1, 2)
    at = await primary.execute("SELECT clock_timestamp()")
    for number in range(3, 60):
        await primary.keep(number)
    await primary.execute("SELECT pg_switch_wal()")
    await primary.keep(60)

    found = await restore(primary.archive, tmp_path / "then", to=at)
    assert await rows_in(tmp_path / "then") == [1, 2]
    assert base.ended_at < found.committed_at <= at
    await restore(primary.archive, tmp_path / "now", to=None)
    assert await rows_in(tmp_path / "now") == list(range(1, 61))
    assert (tmp_path / "now" / "secret").read_text() == "the secret of this site"
    assert (tmp_path / "now" / "secret").stat().st_mode & 0o777 == 0o600

    # No commit is after this time, though it is inside the archive.
    await primary.execute("CHECKPOINT")
    late = await primary.execute("SELECT clock_timestamp()")
    await primary.execute("SELECT pg_log_standby_snapshot()")
    await primary.archiver.step()
    await restore(primary.archive, tmp_path / "late", to=late)
    assert await rows_in(tmp_path / "late") == list(range(1, 61))

    with pytest.raises(OutsideArchive, match=r"before the oldest.*from"):
        await restore(primary.archive, tmp_path / "early", to=base.ended_at - timedelta(days=1))
    with pytest.raises(OutsideArchive, match="after the archived log"):
        await restore(primary.archive, tmp_path / "early", to=datetime.now(UTC) + timedelta(days=1))
    assert not (tmp_path / "early").exists()
    with pytest.raises(RestoreFolderExists, match="now"):
        await restore(primary.archive, tmp_path / "now", to=None)


async def test_damage_in_the_archive_is_named_and_an_older_base_restores_all(primary, tmp_path):
    await primary.keep(99)
    older = await primary.base()
    base = await primary.base()
    await primary.keep(100)
    verified = await verify(primary.archive, tmp_path / "data")
    assert verified.base == base.id
    assert list(tmp_path.iterdir()) == [], "the scratch folder is removed"
    copy = tmp_path / "copy"
    shutil.copytree(primary.archive_folder, copy)
    archive = Archive(BackupConfig(url=copy.as_uri()), tmp_path / "reader")
    assert (await read_state(archive)).backups[-1].verified_at == verified.at

    piece = copy / base.piece(0)
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1])
    with pytest.raises(BackupDamaged, match=f"{base.piece(0)}.*{len(whole) - 1} bytes"):
        await verify(archive, tmp_path / "data")
    shown = {one.base.id: one for one in (await read_state(archive)).backups}
    assert (shown[base.id].until, base.piece(0) in shown[base.id].fault) == (None, True)
    assert shown[older.id].until is not None
    restored = await restore(archive, tmp_path / "restored", to=None)
    assert (restored.base, list(restored.unused)) == (older.id, [base.id])
    assert (await rows_in(tmp_path / "restored"))[-2:] == [99, 100]
    shutil.rmtree(tmp_path / "restored")
    piece.write_bytes(whole)
    newest = max((copy / "log" / "000001").glob("*/*"), key=lambda path: path.parts[-2:])
    newest.write_bytes(newest.read_bytes()[:-5])
    with pytest.raises(BackupDamaged, match=newest.name):
        await verify(archive, tmp_path / "data")
    [state] = [one for one in (await read_state(archive)).backups if one.base.id == base.id]
    assert (state.until, newest.name in state.fault) == (None, True)
    with pytest.raises(BackupDamaged, match=r"the log before the damage ends at 2") as caught:
        await restore(archive, tmp_path / "newest", to=None)
    last = datetime.fromisoformat(caught.value.text.rpartition(" ")[2])
    with pytest.raises(BackupDamaged, match=f"{newest.parent.name}.*the log before the damage"):
        await restore(archive, tmp_path / "newest", to=last + timedelta(seconds=1))
    await restore(archive, tmp_path / "earlier", to=last)
    assert (await rows_in(tmp_path / "earlier"))[-1] >= 99
    shutil.rmtree(tmp_path / "earlier")
    shutil.rmtree(copy / "log" / "000001" / segment_name(1, base.start))
    with pytest.raises(BackupDamaged, match="is missing"):
        await verify(archive, tmp_path / "data")
    with pytest.raises(BackupDamaged, match="is missing"):
        await restore(archive, tmp_path / "failed", to=None)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    await archive.close()


async def test_commits_continue_while_the_archive_is_away_and_a_gap_is_never_hidden(tmp_path):
    async with primary_in(tmp_path / "data", tmp_path / "archive") as primary:
        (tmp_path / "data" / "token").mkdir()
        with pytest.raises(IsADirectoryError):
            await primary.base()
        assert not list((tmp_path / "archive" / "base").glob("*/*")), "no piece is left"
        (tmp_path / "data" / "token").rmdir()
        await primary.base()
        await primary.keep(1)
        shutil.move(tmp_path / "archive", tmp_path / "unmounted")
        with pytest.raises(Exception, match="mount its disk"):
            await primary.keep(2)
        assert await log_behind(primary.postgres) > 0
        shutil.move(tmp_path / "unmounted", tmp_path / "archive")
        before = await primary.execute("SELECT clock_timestamp()")
        await primary.keep(3)
        assert await log_behind(primary.postgres) == 0
        await restore(primary.archive, tmp_path / "after", to=None)
        assert await rows_in(tmp_path / "after") == [1, 2, 3]

        # More log than the limit: PostgreSQL removes what was not archived.
        for _ in range(8):
            await primary.execute("SELECT pg_switch_wal()")
            await primary.execute("INSERT INTO kept VALUES (4)")
        await primary.execute("CHECKPOINT")
        assert await log_behind(primary.postgres) is None
        await primary.keep(5)
        with pytest.raises(OutsideArchive, match="gap"):
            await plan_restore(primary.archive, None)
        stop = asyncio.Event()
        running = asyncio.create_task(primary.archiver.run(stop, version="1"))
        await wait_true(lambda: has_bases(primary.archive, 2), what="a new base backup is taken")
        stop.set()
        await running
        assert (await plan_restore(primary.archive, before)).base.generation == 1
        await restore(primary.archive, tmp_path / "again", to=None)
        assert await rows_in(tmp_path / "again") == [1, 2, 3, *[4] * 8, 5]

        # The next start frees the archive though no base backup is due.
        left = tmp_path / "archive" / "base" / "20200101T000000Z"
        await primary.archive.put_piece(left.name, 0, b"of a backup that was killed")
        stop.clear()
        running = asyncio.create_task(primary.archiver.run(stop, version="1"))
        await wait_true(lambda: is_absent(left), what="it is deleted")
        stop.set()
        await running


async def is_absent(path):
    return not path.exists()


async def has_bases(archive, count):
    return len(await archive.bases()) == count


async def test_a_promoted_standby_has_all_archived_rows_and_the_primary_is_fenced(tmp_path):
    async with primary_in(tmp_path / "data", tmp_path / "archive") as primary:
        await primary.base()
        await primary.keep(1)
        folder = tmp_path / "standby"
        archive = Archive(primary.config, tmp_path / "reader")
        await make_standby(archive, folder)
        with pytest.raises(FolderUnusable, match="headrace standby"):
            await EmbeddedEngines(folder).start()
        stop = asyncio.Event()
        running = asyncio.create_task(Standby(archive, folder, primary.config).run(stop))
        await primary.keep(*range(2, 50))
        await primary.execute("SELECT pg_switch_wal()")
        await primary.keep(50)
        await wait_true(lambda: replays(folder, 50), what="the standby has row 50")
        # Stopped and started again, it continues.
        stop.set()
        assert await running is False
        await primary.keep(51)
        running = asyncio.create_task(Standby(archive, folder, primary.config).run(asyncio.Event()))
        await wait_true(lambda: replays(folder, 51), what="the standby has row 51")
        await primary.keep(52)
        holder, is_new = await promote(archive, folder)
        assert (holder.generation, is_new) == (2, True)
        assert await running is True
        with pytest.raises(Fenced, match=str(folder)):
            await primary.keep(53)
        with pytest.raises(Fenced):
            await Archiver(primary.archive, primary.postgres, primary.folder, primary.config).step()
        late = tmp_path / "late"
        with pytest.raises(Exception, match="of its current primary"):
            await make_standby(archive, late)
    assert await rows_in(folder) == list(range(1, 53))
    async with primary_in(folder, tmp_path / "archive") as second:
        base = await second.base()
        assert (base.generation, base.timeline) == (2, 2)
        await second.keep(60)
        await restore(second.archive, tmp_path / "both", to=None)
        # The folder of the restore is a copy, which must not write to the archive.
        async with primary_in(tmp_path / "both", tmp_path / "archive") as copy:
            with pytest.raises(ArchiveTaken, match="headrace promote"):
                await copy.keep(61)
        for again, generation, is_new in [(False, 3, True), (False, 3, False), (True, 4, True)]:
            found = await promote(archive, tmp_path / "both", again=again)
            assert (found[0].generation, found[1]) == (generation, is_new)
    assert await rows_in(tmp_path / "both") == [*range(1, 53), 60, 61]
    await archive.close()


async def replays(folder, number):
    with suppress(OSError, asyncpg.PostgresError, FileNotFoundError):
        return number in await rows_of_standby(folder)
    return False


async def rows_of_standby(folder):
    connection = await asyncpg.connect(endpoints_of(folder).postgres_url, timeout=5)
    try:
        return [row["number"] for row in await connection.fetch("SELECT number FROM kept")]
    finally:
        await connection.close()


async def test_a_truncated_newest_part_is_written_again_and_an_older_copy_is_refused(tmp_path):
    async with primary_in(tmp_path / "data", tmp_path / "archive") as primary:
        await primary.keep(1)
    shutil.copytree(tmp_path / "data" / "postgres", tmp_path / "older")
    [*_, newest] = sorted((tmp_path / "archive" / "log" / "000001").glob("*/*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    async with primary_in(tmp_path / "data", tmp_path / "archive") as primary:
        await primary.keep(*range(2, 200))
        data = bytearray()
        await extend_segment(primary.archive, 1, newest.parent.name, data)
        assert b"kept" in data, "the damaged part was written again"
    shutil.rmtree(tmp_path / "data" / "postgres")
    shutil.move(tmp_path / "older", tmp_path / "data" / "postgres")
    async with primary_in(tmp_path / "data", tmp_path / "archive") as primary:
        with pytest.raises(ArchiveTaken, match="old copy"):
            await primary.archiver.step()


async def test_a_standby_refuses_a_second_promotion(tmp_path):
    async with primary_in(tmp_path / "data", tmp_path / "archive") as primary:
        await primary.base()
        archive = Archive(primary.config, tmp_path / "reader")
        for name in ("one", "two"):
            await make_standby(archive, tmp_path / name)
        await promote(archive, tmp_path / "one")
        held, is_new = await promote(archive, tmp_path / "one")
        assert (held.generation, is_new) == (2, False)
        with pytest.raises(StandbyLeft, match=str(tmp_path / "one")):
            await promote(archive, tmp_path / "two")
        with pytest.raises(StandbyLeft):
            await Standby(archive, tmp_path / "two", primary.config).run(asyncio.Event())
        await archive.close()
