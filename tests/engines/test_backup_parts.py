"""The archive without a server: parts of the log, gaps, holders, and what is deleted."""

from __future__ import annotations

import errno
import shutil
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from headrace.engines.backup.archive import (
    Archive,
    ArchiveInside,
    ArchiveTaken,
    BackupConfig,
    Base,
    Fenced,
    base_id_at,
)
from headrace.engines.backup.archive_store import ArchiveDown, ArchiveMissing, fault_and_fix
from headrace.engines.backup.archiver import (
    Identity,
    new_holder,
    read_identity,
    require_holder,
    write_identity,
)
from headrace.engines.backup.restore import OutsideArchive, extend_segment, plan_restore
from headrace.engines.backup.service import is_late
from headrace.engines.backup.state import read_state
from headrace.engines.backup.wal import (
    FULL,
    SEGMENT_BYTES,
    BackupDamaged,
    decode_part,
    encode_part,
    parse_lsn,
    segment_name,
    segment_start,
    unbroken,
)
from headrace.engines.blobs import BlobChanged, BlobsDown

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
NAME = segment_name(1, 3 * SEGMENT_BYTES)
FIRST = segment_start(NAME)


@pytest.fixture
async def archive(tmp_path):
    config = BackupConfig(url=(tmp_path / "archive").as_uri())
    archive = Archive(config, tmp_path / "data", writes=True)
    yield archive
    await archive.close()


def test_segments_have_the_names_of_postgresql():
    position = parse_lsn("2A/FF000148")
    assert segment_name(7, position) == "000000070000002A000000FF"
    assert segment_start("000000070000002A000000FF") == parse_lsn("2A/FF000000")


@pytest.mark.parametrize("damage", [lambda b: b[:-3], lambda b: b[:20], lambda b: b"", "flip"])
def test_a_damaged_part_is_refused_by_name(damage):
    stored = encode_part(FIRST, b"log" * 1000, NOW)
    assert decode_part("log/1", stored).data == b"log" * 1000
    if damage == "flip":
        other = encode_part(FIRST, b"lag" * 1000, NOW).partition(b"\n")[2]
        broken = stored.partition(b"\n")[0] + b"\n" + other
    else:
        broken = damage(stored)
    with pytest.raises(BackupDamaged, match="'log/1'"):
        decode_part("log/1", broken)


def test_a_missing_or_incomplete_segment_is_a_gap():
    names = [segment_name(1, n * SEGMENT_BYTES) for n in range(3, 7)]
    stored = {name: [FULL] for name in names} | {names[3]: ["00000000"]}
    assert unbroken(stored, FIRST + 99) == (names, False)
    assert unbroken(stored, FIRST + SEGMENT_BYTES) == (names[1:], False)
    assert unbroken(stored, FIRST - 1) == ([], True)
    assert unbroken({n: p for n, p in stored.items() if n != names[1]}, FIRST) == (names[:1], True)
    assert unbroken(stored | {names[1]: ["00000000"]}, FIRST) == (names[:2], True)


async def put(archive, start, end, part=None):
    data = bytes(n % 251 for n in range(start, end))
    stored = encode_part(FIRST + start, data, NOW)
    await archive.put_part(1, NAME, part or f"{start:08x}", stored)


async def test_a_segment_is_read_while_its_parts_are_written_again_as_one(archive):
    expected = bytes(n % 251 for n in range(90))
    for start in (0, 10, 30):
        await put(archive, start, start + 20 if start else 10)
    whole, half = bytearray(), bytearray(expected[:10])
    assert await extend_segment(archive, 1, NAME, whole) == NOW
    assert bytes(whole) == expected[:50]
    # The parts from 10 on become one, and one more follows.
    await put(archive, 10, 70)
    await archive.drop_parts(1, NAME, ["0000001e"])
    await put(archive, 70, 90)
    for data in (whole, half):
        await extend_segment(archive, 1, NAME, data)
        assert bytes(data) == expected
    assert await extend_segment(archive, 1, NAME, whole) is None
    await archive.drop_parts(1, NAME, ["0000000a"])
    with pytest.raises(BackupDamaged, match="between offset 10 and 70"):
        await extend_segment(archive, 1, NAME, bytearray())


async def test_one_folder_holds_the_archive_and_a_copy_or_former_holder_is_refused(
    archive, tmp_path
):
    first, second = tmp_path / "first", tmp_path / "second"
    assert await archive.holder() is None
    own = new_holder(None, first, generation=1)
    await archive.claim(own)
    write_identity(first, Identity(own.folder_id, own.archive_id))
    await archive.require_session(own.session)
    require_holder(own, read_identity(first), archive)
    with pytest.raises(ArchiveTaken, match=str(first)):
        require_holder(own, read_identity(second), archive)
    other = Archive(BackupConfig(url=(tmp_path / "archive").as_uri()), tmp_path / "other")
    held = await other.holder()
    await other.claim(new_holder(held, second, generation=2))
    with pytest.raises(Fenced, match=f"{second}.*generation 2"):
        await archive.require_session(own.session)
    with pytest.raises(Fenced):
        require_holder(await archive.holder(), read_identity(first), archive)
    # Both read generation 2; only the first claim of the next one wins.
    held = await archive.holder()
    await other.claim(new_holder(held, second, generation=3))
    with pytest.raises(BlobChanged):
        await archive.claim(new_holder(held, first, generation=3))
    await other.close()


async def test_an_archive_folder_that_disappears_is_never_created_again(archive, tmp_path):
    await archive.claim(new_holder(None, tmp_path / "first", generation=1))
    assert (tmp_path / "archive").stat().st_mode & 0o077 == 0
    shutil.rmtree(tmp_path / "archive")
    with pytest.raises(ArchiveDown, match="mount its disk"):
        await archive.holder()
    assert not (tmp_path / "archive").exists()
    # A data folder that never used it cannot know that there was one.
    for folder, error in (("data", ArchiveDown), ("other", ArchiveMissing)):
        reader = Archive(BackupConfig(url=(tmp_path / "archive").as_uri()), tmp_path / folder)
        with pytest.raises(error, match="mount its disk"):
            await read_state(reader)
        await reader.close()
    assert not (tmp_path / "archive").exists()
    # Another archive may be begun with the same data folder.
    fresh = Archive(BackupConfig(url=(tmp_path / "new").as_uri()), tmp_path / "data", writes=True)
    await fresh.claim(new_holder(None, tmp_path / "first", generation=1))
    with pytest.raises(ArchiveMissing):
        await plan_restore(fresh, None)
    await fresh.close()


@pytest.mark.parametrize(
    ("number", "fault", "fix"),
    [
        (errno.ENOSPC, "no space left", "shorten backup.keep"),
        (errno.EROFS, "mounted read-only", "mount it writable"),
        (errno.EACCES, "permission denied", "chown"),
        (None, "EndOfFile", "credentials"),
    ],
)
async def test_a_write_that_fails_is_named_in_plain_words(number, fault, fix):
    down = BlobsDown("the object store failed")
    down.reason = "EndOfFile"
    down.__cause__ = OSError(number, "text") if number else RuntimeError()
    found = fault_and_fix(down, "file:///archive")
    assert (fault in found[0], fix in found[1]) == (True, True)


async def put_base(archive, days_ago, generation=1):
    """A base backup that needs the log from its own segment on, one segment a day."""
    at = NOW - timedelta(days=days_ago)
    start = (10 - days_ago) * SEGMENT_BYTES
    base = Base(
        id=base_id_at(at),
        generation=generation,
        timeline=1,
        system="1",
        start=start,
        end=start + 1,
        began_at=at,
        ended_at=at,
        version="1",
        migrations=1,
        size_bytes=1,
        stored_bytes=1,
        pieces=("x",),
    )
    await archive.put_piece(base.id, 0, b"x")
    await archive.complete(base)
    await archive.put_part(generation, segment_name(1, start), FULL, b"log")
    return base


@pytest.mark.parametrize(
    ("behind_bytes", "age_s", "late"),
    [(None, 0, True), (0, 900, False), (1, 59, False), (1, 61, True), (1, None, False)],
)
def test_an_archive_is_late_only_after_several_missed_writes(behind_bytes, age_s, late):
    until = datetime.now(UTC) - timedelta(seconds=age_s) if age_s is not None else None
    assert is_late(behind_bytes, until, BackupConfig(every_s=5)) == late
    if late and age_s:
        assert not is_late(behind_bytes, until, BackupConfig(every_s=30))


async def test_an_archive_inside_the_data_folder_is_refused(tmp_path):
    folder, other = tmp_path / "data", tmp_path / "other"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for place in (folder, folder / "backups", tmp_path / "link" / "backups"):
        config = BackupConfig(url=place.as_uri())
        for writes in (True, False):
            with pytest.raises(ArchiveInside, match="another disk"):
                Archive(config, folder, writes=writes)
        await Archive(config, other).close()


async def test_what_no_restore_needs_is_deleted(archive, tmp_path):
    for days_ago in (9, 8, 7):
        await put_base(archive, days_ago)
    for days_ago in (3, 1):
        await put_base(archive, days_ago, generation=2)
    await archive.put_piece("20200101T000000Z", 0, b"of a backup that was killed")
    await archive.put_piece(base_id_at(datetime.now(UTC)), 0, b"in progress")
    deleted = await archive.prune(NOW - timedelta(days=7, hours=12))
    assert deleted == [base_id_at(NOW - timedelta(days=9))]
    ids = {path.name for path in (tmp_path / "archive" / "base").iterdir()}
    assert ids >= {base.id for base in await archive.bases()}
    assert len(ids) == 5, "four complete ones, and the one in progress"
    assert list(await archive.segments(1)) == [segment_name(1, n * SEGMENT_BYTES) for n in (2, 3)]
    await archive.prune(NOW)
    assert [base.generation for base in await archive.bases()] == [2]
    assert (len(await archive.segments(1)), len(await archive.segments(2))) == (0, 1)


async def test_a_damaged_record_is_reported_by_name_and_hides_no_other_base(archive, tmp_path):
    older, base = await put_base(archive, 2), await put_base(archive, 1)
    for one in (base, older):
        path = tmp_path / "archive" / "base" / one.id / "backup.json"
        path.write_bytes(msgspec.json.encode(one)[:40])
        state = await read_state(archive)
        assert one.id in state.unreadable[one.id]
        assert len(state.backups) == 2 - len(state.unreadable)
    with pytest.raises(BackupDamaged, match=f"{older.id}.*{base.id}"):
        await plan_restore(archive, None)


async def test_a_restore_never_leaves_out_a_newer_generation_without_saying_so(archive, tmp_path):
    stored = encode_part(FIRST, b"x" * 10, NOW)
    base = await put_base(archive, 7)
    await archive.put_part(1, segment_name(1, base.start), FULL, stored)
    assert (await plan_restore(archive, None)).base.id == base.id
    newer = await put_base(archive, 6, generation=2)
    (tmp_path / "archive" / "base" / newer.id / "backup.json").write_bytes(b"{")
    with pytest.raises(OutsideArchive, match=r"newest generation.*--to 2026-11-01T12:00"):
        await plan_restore(archive, None)
    assert (await plan_restore(archive, NOW)).unused.keys() == {newer.id}
