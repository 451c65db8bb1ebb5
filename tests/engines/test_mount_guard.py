"""A blob folder that was used is never created again: its absence is an error."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.processes import HeadraceProcess

from headrace.__main__ import main
from headrace.cli.doctor import check_blobs
from headrace.engines.blobs import BlobMissing, Blobs, BlobsConfig, BlobsDown, StoreMismatch
from headrace.engines.mount_guard import (
    MARK_FILE,
    PostgresRecord,
    StoreRecord,
    read_mark,
    read_record,
)
from headrace.engines.postgres import Postgres, PostgresConfig

NOWHERE = "postgresql://headrace@127.0.0.1:1/headrace?sslmode=disable"


class Place:
    """A disk's folder, and hosts that keep objects in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "disk" / "objects"
        self.away = folder / "unmounted"
        self._hosts = folder / "hosts"
        self.opened: list[Blobs] = []

    def record_file(self, host: str = "a") -> Path:
        return self._hosts / host / "object-store"

    def open(self, host: str = "a", *, shared=None, may_create=True) -> Blobs:
        """A process that begins on `host`."""
        record = StoreRecord(self.record_file(host), shared, may_create)
        blobs = Blobs(self.folder.as_uri(), BlobsConfig(put_threads=1), record=record)
        self.opened.append(blobs)
        return blobs

    def unmount(self) -> None:
        """The disk goes; an empty folder is seen in its place."""
        self.folder.rename(self.away)
        self.folder.mkdir()

    def mount(self) -> None:
        """It is back."""
        self.folder.rmdir()
        self.away.rename(self.folder)


@pytest.fixture
async def place(tmp_path):
    place = Place(tmp_path)
    yield place
    for blobs in place.opened:
        await blobs.close()


def every_use(blobs: Blobs):
    """Each way in, as a call to await; listing as one too."""

    async def listed():
        return [info.key async for info in blobs.list("t")]

    return {
        "put": lambda: blobs.put("t/new.bin", b"x"),
        "put_if": lambda: blobs.put_if("t/new.bin", b"x", etag=None),
        "get": lambda: blobs.get("t/old.bin"),
        "read": lambda: blobs.read("t/old.bin"),
        "read_range": lambda: blobs.read_range("t/old.bin", 0, 1),
        "read_part": lambda: blobs.read_part("t/old.bin", 0, 1),
        "info": lambda: blobs.info("t/old.bin"),
        "delete": lambda: blobs.delete("t/old.bin"),
        "list": listed,
        "open": blobs.open,
    }


USES = sorted(every_use(Blobs("s3://never-asked")))


async def test_the_first_use_makes_the_folder_and_marks_and_records_it(place):
    blobs = place.open()
    assert not place.folder.exists(), "nothing is made before it is used"
    await blobs.put("t/old.bin", b"x")
    mark = read_mark(place.folder)
    assert mark is not None
    assert mark == read_record(place.record_file())
    assert [path.name for path in place.folder.iterdir() if path.name != "t"] == [MARK_FILE]
    assert [info.key async for info in blobs.list("")] == ["t/old.bin"], "the mark is no object"
    assert await place.open().get("t/old.bin") == b"x"


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("is_running", [True, False], ids=["while it runs", "before it starts"])
async def test_an_unmounted_disk_raises_and_nothing_is_created(place, use, is_running):
    first = place.open()
    await first.put("t/old.bin", b"x")
    place.unmount()
    blobs = first if is_running else place.open()
    with pytest.raises(StoreMismatch, match=rf"{place.folder}.*it has no marker.*blobs adopt"):
        await every_use(blobs)[use]()
    assert list(place.folder.iterdir()) == []
    place.mount()
    assert await blobs.get("t/old.bin") == b"x", "the same process continues"
    await blobs.put("t/new.bin", b"y")


@pytest.mark.parametrize("use", USES)
async def test_a_removed_folder_raises_and_is_not_created_again(place, use):
    await place.open().put("t/old.bin", b"x")
    place.folder.parent.rename(place.away)
    with pytest.raises(StoreMismatch, match=r"it does not exist, expected store [0-9a-f]{32}"):
        await every_use(place.open())[use]()
    assert not place.folder.parent.exists()


async def test_many_puts_at_once_all_fail_when_the_disk_goes(place):
    blobs = place.open()
    keys = [f"t/{number % 3}/{number}.bin" for number in range(40)]
    await asyncio.gather(*[blobs.put(key, b"x") for key in keys])
    place.unmount()
    ended = await asyncio.gather(*[blobs.put(key, b"y") for key in keys], return_exceptions=True)
    assert {type(end) for end in ended} == {StoreMismatch}
    assert list(place.folder.iterdir()) == []
    place.mount()
    assert {await blobs.get(key) for key in keys} == {b"x"}


async def test_the_disk_of_another_installation_is_refused(place, tmp_path):
    await place.open().put("t/old.bin", b"x")
    mine = read_mark(place.folder)
    place.folder.rename(place.away)
    other = Place(tmp_path / "other")
    await other.open().put("t/old.bin", b"of somebody else")
    other.folder.rename(place.folder)
    with pytest.raises(StoreMismatch, match=f"holds store {read_mark(place.folder)}, .*{mine}"):
        await place.open().get("t/old.bin")
    for blobs in other.opened:
        await blobs.close()


@pytest.mark.parametrize("damage", [b"", b"\x1b[31mRED\x1b]0;t\x07", b"\xff" * 50, b"0" * 33])
async def test_a_damaged_mark_or_record_is_refused_until_one_is_adopted(place, damage):
    await place.open().put("t/old.bin", b"x")
    mark_file, mark = place.folder / MARK_FILE, read_mark(place.folder)
    mark_file.write_bytes(damage)
    with pytest.raises(StoreMismatch, match=f"it has no marker, expected store {mark}"):
        await place.open().get("t/old.bin")
    mark_file.write_text(mark)
    place.record_file().write_bytes(damage)
    with pytest.raises(StoreMismatch, match=f"holds store {mark}, .*its record is damaged"):
        await place.open().get("t/old.bin")
    assert place.record_file().read_bytes() == damage
    mark_file.write_bytes(damage)
    adopted = await place.open().adopt()
    assert read_mark(place.folder) == read_record(place.record_file()) == adopted
    assert await place.open().get("t/old.bin") == b"x"


async def test_objects_of_an_older_version_are_adopted(place):
    older = Blobs(place.folder.as_uri())
    await older.put("t/old.bin", b"x")
    await older.close()
    assert read_mark(place.folder) is None
    assert await place.open().get("t/old.bin") == b"x"
    assert read_mark(place.folder) == read_record(place.record_file())


async def test_a_read_only_folder_is_used_without_a_marker(tmp_path):
    """Nobody makes files in a folder of /proc, not even root."""
    record = StoreRecord(tmp_path / "object-store")
    blobs = Blobs("file:///proc/sys/kernel", record=record)
    await blobs.verify_store()
    assert await blobs.info("ostype")
    with pytest.raises(BlobMissing):
        await blobs.info("no-such-thing")
    assert read_record(record.file) is None
    await blobs.close()


async def test_a_data_folder_that_takes_no_record_makes_no_second_store(place):
    place.record_file().parent.parent.mkdir(parents=True)
    place.record_file().parent.write_text("a file where the data folder is")
    blobs = place.open()
    await blobs.put("t/old.bin", b"x")
    place.unmount()
    with pytest.raises(StoreMismatch):
        await blobs.put("t/new.bin", b"x")
    assert list(place.folder.iterdir()) == []


async def test_a_lost_record_follows_the_mark(place):
    await place.open().put("t/old.bin", b"x")
    place.record_file().unlink()
    assert await place.open().get("t/old.bin") == b"x"
    assert read_record(place.record_file()) == read_mark(place.folder)


async def test_what_was_restored_without_its_mark_is_adopted_on_purpose(place):
    blobs = place.open()
    await blobs.put("t/old.bin", b"x")
    (place.folder / MARK_FILE).unlink()
    with pytest.raises(StoreMismatch, match="it has no marker"):
        await place.open().info("t/gone.bin")
    assert await place.open().adopt() == read_mark(place.folder) == read_record(place.record_file())
    assert await place.open().get("t/old.bin") == b"x"
    with pytest.raises(BlobsDown):
        await blobs.put("t/new.bin", b"a process that ran all the while looks again")
    await blobs.put("t/new.bin", b"and continues")


async def test_a_child_leaves_the_first_use_to_its_parent(place):
    child = place.open(may_create=False)
    with pytest.raises(StoreMismatch, match="cannot be read now"):
        await child.put("t/old.bin", b"x")
    assert not place.folder.exists()
    await place.open().put("t/old.bin", b"x")
    assert await child.get("t/old.bin") == b"x"


@pytest.mark.slow
def test_of_processes_that_begin_at_once_one_makes_the_mark(tmp_path):
    code = (
        "import sys; from pathlib import Path; from headrace.engines.mount_guard import make_mark\n"
        "print('ready', flush=True); sys.stdin.readline(); print(make_mark(Path(sys.argv[1])))\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    told = {child.communicate(timeout=60)[0].strip() for child in children}
    assert told == {read_mark(tmp_path / "store")}
    assert [path.name for path in (tmp_path / "store").iterdir()] == [MARK_FILE]


async def test_a_second_host_without_the_mount_is_refused_at_its_first_use(place, postgres):
    shared = PostgresRecord(lambda: postgres)
    await place.open("a", shared=shared).put("t/old.bin", b"x")
    place.unmount()
    blobs = place.open("b", shared=shared)
    with pytest.raises(StoreMismatch, match="it has no marker, expected store"):
        await blobs.put("t/new.bin", b"x")
    assert list(place.folder.iterdir()) == []
    with pytest.raises(StoreMismatch, match="expected store"):
        await place.open("b", may_create=False).get("t/old.bin")
    place.mount()
    assert await blobs.get("t/old.bin") == b"x"
    assert read_record(place.record_file("b")) == read_mark(place.folder)


async def test_what_one_host_adopts_all_follow(place, postgres):
    shared = PostgresRecord(lambda: postgres)
    running = place.open("b", shared=shared)
    await place.open("a", shared=shared).put("t/old.bin", b"x")
    assert await running.get("t/old.bin") == b"x"
    place.folder.rename(place.away)
    adopted = await place.open("a", shared=shared).adopt()
    with pytest.raises(BlobsDown):
        await running.put("t/new.bin", b"x")
    await running.put("t/new.bin", b"y")
    assert read_record(place.record_file("b")) == adopted == await shared.expected()


async def test_of_two_hosts_that_begin_apart_one_is_first(place, tmp_path, postgres):
    shared = PostgresRecord(lambda: postgres)
    other = Place(tmp_path / "other")
    await place.open(shared=shared).put("t/old.bin", b"x")
    own = other.open(shared=shared)
    await Blobs(other.folder.as_uri()).put("t/own.bin", b"of a host that mounts something else")
    with pytest.raises(StoreMismatch, match="it has no marker, expected store"):
        await own.get("t/own.bin")
    assert await shared.expect_first("another") == read_mark(place.folder)


async def test_while_postgres_is_away_a_marked_folder_is_used_and_an_empty_one_not_made(place):
    away = Postgres(NOWHERE, PostgresConfig())
    shared = PostgresRecord(lambda: away)
    blobs = place.open("b", shared=shared)
    with pytest.raises(StoreMismatch, match="the record of earlier use cannot be read now"):
        await blobs.put("t/old.bin", b"x")
    assert not place.folder.exists()
    await place.open("a").put("t/old.bin", b"x")
    assert await blobs.get("t/old.bin") == b"x"
    assert read_record(place.record_file("b")) is None, "read again at the next start"
    await away.close()


async def test_doctor_says_which_store_is_expected_and_what_to_do(place):
    [finding] = await check_blobs(place.open())
    assert finding.state == "ok"
    place.unmount()
    [finding] = await check_blobs(place.open())
    assert (finding.state, finding.subject) == ("fail", "blobs")
    assert str(place.folder) in finding.text
    assert "mount" in finding.fix
    assert "headrace blobs adopt" in finding.fix


async def test_public_errors_omit_the_folder(place):
    await place.open().put("t/old.bin", b"x")
    place.unmount()
    with pytest.raises(BlobsDown) as caught:
        await place.open().open()
    assert str(place.folder) not in caught.value.public_text
    assert (caught.value.status, caught.value.retryable) == (503, True)


@pytest.mark.slow
def test_commands_make_no_second_store(tmp_path, capsys):
    (tmp_path / "track.bin").write_bytes(b"music")
    folder = tmp_path / "data" / "blobs"
    put = ("media", "put", "t/track.bin", str(tmp_path / "track.bin"))

    def run(*words):
        code = main([*words, "--data", str(tmp_path / "data")])
        told = capsys.readouterr()
        return code, told.out + told.err

    assert run(*put)[0] == 0
    folder.rename(tmp_path / "away")
    process = HeadraceProcess([*put, "--data", str(tmp_path / "data")], folder=tmp_path, env={})
    process_told = process.wait_exit(), process.out + process.err
    for code, told in (process_told, run(*put), run("media", "ls"), run("doctor")):
        assert code == 7
        assert str(folder) in told
        assert "headrace blobs adopt" in told
    assert not folder.exists()
    (tmp_path / "away").rename(folder)
    code, told = run("media", "ls")
    assert code == 0
    assert "t/track.bin" in told
    folder.rename(tmp_path / "away")
    assert run("blobs", "adopt")[0] == 0
    assert run("media", "ls") == (0, "no objects\n")


def test_a_bucket_has_nothing_to_adopt(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HEADRACE_BLOBS_URL", "s3://photos")
    assert main(["blobs", "adopt", "--data", str(tmp_path / "data")]) == 2
    assert "blobs.url is not a folder" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
