"""Mount guard: a blob folder that was used is never created again; its absence is an error."""

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
    StoreEmpty,
    StoreRecord,
    make_mark,
    read_mark,
    read_record,
)
from headrace.engines.postgres import Postgres, PostgresConfig

NOWHERE = "postgresql://headrace@127.0.0.1:1/headrace?sslmode=disable"
MARKER = """
import sys
from pathlib import Path
from headrace.engines.mount_guard import make_mark
print("ready", flush=True)
sys.stdin.readline()
print(make_mark(Path(sys.argv[1])))
"""


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
        """The store as a new process on `host` opens it."""
        record = StoreRecord(self.record_file(host), shared, may_create)
        blobs = Blobs(self.folder.as_uri(), BlobsConfig(put_threads=1), record=record)
        self.opened.append(blobs)
        return blobs

    def unmount(self) -> None:
        """Replace the folder by an empty one."""
        self.folder.rename(self.away)
        self.folder.mkdir()

    def mount(self) -> None:
        """Put the folder back."""
        self.folder.rmdir()
        self.away.rename(self.folder)

    async def require_refused(self, blobs: Blobs, match: str) -> None:
        """Every use of the store raises, and nothing is created."""
        before = list(self.folder.iterdir()) if self.folder.exists() else None
        for name, use in every_use(blobs).items():
            with pytest.raises(StoreMismatch, match=match):
                await use()
            assert (list(self.folder.iterdir()) if self.folder.exists() else None) == before, name


def every_use(blobs: Blobs):
    """Each operation of a store."""

    async def keys():
        return [info.key async for info in blobs.list("t")]

    return {
        "put": lambda: blobs.put("t/new.bin", b"x"),
        "put_if": lambda: blobs.put_if("t/new.bin", b"x", etag=None),
        "get": lambda: blobs.get("t/old.bin"),
        "read": lambda: blobs.read("t/old.bin"),
        "read_part": lambda: blobs.read_part("t/old.bin", 0, 1),
        "info": lambda: blobs.info("t/old.bin"),
        "delete": lambda: blobs.delete("t/old.bin"),
        "list": keys,
        "open": blobs.open,
    }


@pytest.fixture
async def place(tmp_path):
    """A place without a store."""
    place = Place(tmp_path)
    yield place
    for blobs in place.opened:
        await blobs.close()


@pytest.fixture
async def used(place):
    """The place after its first object."""
    await place.open().put("t/old.bin", b"x")
    return place


async def test_the_first_use_creates_marks_and_records_the_folder(place):
    blobs = place.open()
    assert not place.folder.exists(), "nothing is created before the first use"
    await blobs.put("t/old.bin", b"x")
    assert read_mark(place.folder) == read_record(place.record_file()) is not None
    assert [path.name for path in place.folder.iterdir() if path.name != "t"] == [MARK_FILE]
    assert [info.key async for info in blobs.list("")] == ["t/old.bin"], "the mark is no object"
    assert await place.open().get("t/old.bin") == b"x"


class FirstUseElsewhere:
    """A shared record; another process begins to use the store right before it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def expected(self):
        return make_mark(self.folder)


async def test_a_first_use_of_two_processes_at_once_is_no_fault(place):
    blobs = place.open(shared=FirstUseElsewhere(place.folder))
    await blobs.put("t/own.bin", b"x")
    assert await place.open().get("t/own.bin") == b"x"


class CountedRecord:
    """A shared record that counts its reads."""

    reads = 0
    mark: str | None = None

    async def expected(self) -> str | None:
        self.reads += 1
        await asyncio.sleep(0)
        return self.mark

    async def expect_first(self, mark: str) -> str:
        self.mark = self.mark or mark
        return self.mark


async def test_concurrent_first_puts_verify_the_store_once(place):
    """Each put that verified it alone took three statements: seconds for hundreds of photos."""
    shared = CountedRecord()
    blobs = place.open(shared=shared)
    await asyncio.gather(*[blobs.put(f"t/{number}.bin", b"x") for number in range(50)])
    assert shared.reads == 1
    place.unmount()
    ended = await asyncio.gather(
        *[blobs.put(f"t/{number}.bin", b"y") for number in range(50)], return_exceptions=True
    )
    assert {type(end) for end in ended} == {StoreMismatch}
    place.mount()
    await blobs.put("t/0.bin", b"z")
    assert await blobs.get("t/0.bin") == b"z"


@pytest.mark.parametrize("is_running", [True, False], ids=["while it runs", "before it starts"])
async def test_an_unmounted_disk_raises_and_nothing_is_created(place, is_running):
    first = place.open()
    await first.put("t/old.bin", b"x")
    place.unmount()
    blobs = first if is_running else place.open()
    await place.require_refused(blobs, rf"{place.folder}.*it has no marker.*blobs adopt")
    with pytest.raises(BlobsDown) as caught:
        await blobs.open()
    assert str(place.folder) not in caught.value.public_text
    assert (caught.value.status, caught.value.retryable) == (503, True)
    [finding] = await check_blobs(place.open())
    assert (finding.state, finding.subject) == ("fail", "blobs")
    assert str(place.folder) in finding.text
    assert finding.fix.startswith("mount its disk")
    assert "headrace blobs adopt" in finding.fix
    place.mount()
    assert await blobs.get("t/old.bin") == b"x", "the same process continues"
    await blobs.put("t/new.bin", b"y")
    [finding] = await check_blobs(place.open())
    assert finding.state == "ok"


async def test_a_removed_folder_raises_and_is_not_created_again(used):
    used.folder.parent.rename(used.away)
    await used.require_refused(used.open(), r"it does not exist, expected store [0-9a-f]{32}")
    assert not used.folder.parent.exists()


async def test_concurrent_puts_all_fail_when_the_disk_disappears(place):
    blobs = place.open()
    keys = [f"t/{number % 3}/{number}.bin" for number in range(40)]
    await asyncio.gather(*[blobs.put(key, b"x") for key in keys])
    place.unmount()
    ended = await asyncio.gather(*[blobs.put(key, b"y") for key in keys], return_exceptions=True)
    assert {type(end) for end in ended} == {StoreMismatch}
    assert list(place.folder.iterdir()) == []
    place.mount()
    assert {await blobs.get(key) for key in keys} == {b"x"}


async def test_the_disk_of_another_installation_is_refused(used, tmp_path):
    mine = read_mark(used.folder)
    used.folder.rename(used.away)
    other = Place(tmp_path / "other")
    await other.open().put("t/old.bin", b"of another installation")
    other.folder.rename(used.folder)
    with pytest.raises(StoreMismatch, match=f"holds store {read_mark(used.folder)}, .*{mine}"):
        await used.open().get("t/old.bin")
    for blobs in other.opened:
        await blobs.close()


@pytest.mark.parametrize("damage", [b"", b"\x1b[31mRED\x1b]0;t\x07", b"\xff" * 50, b"0" * 33])
async def test_a_damaged_mark_or_record_is_refused_until_the_folder_is_adopted(used, damage):
    mark_file, mark = used.folder / MARK_FILE, read_mark(used.folder)
    mark_file.write_bytes(damage)
    with pytest.raises(StoreMismatch, match=f"it has no marker, expected store {mark}"):
        await used.open().get("t/old.bin")
    mark_file.write_text(mark)
    used.record_file().write_bytes(damage)
    with pytest.raises(StoreMismatch, match=f"holds store {mark}, .*its record is damaged"):
        await used.open().get("t/old.bin")
    assert used.record_file().read_bytes() == damage
    mark_file.write_bytes(damage)
    adopted = await used.open().adopt()
    assert read_mark(used.folder) == read_record(used.record_file()) == adopted
    assert await used.open().get("t/old.bin") == b"x"


async def test_a_folder_without_mark_or_record_gets_both(place):
    older = Blobs(place.folder.as_uri())
    await older.put("t/old.bin", b"of a version without marks")
    await older.close()
    assert read_mark(place.folder) is None
    for _ in range(2):
        assert await place.open().get("t/old.bin")
        assert read_mark(place.folder) == read_record(place.record_file())
        place.record_file().unlink()


@pytest.mark.parametrize("is_shared", [False, True])
async def test_an_unmounted_disk_is_not_adopted_by_mistake(place, postgres, is_shared):
    shared = PostgresRecord(lambda: postgres) if is_shared else None
    await place.open("a", shared=shared).put("t/old.bin", b"x")
    mark = read_mark(place.folder)
    place.unmount()
    name = "b" if is_shared else "a"
    with pytest.raises(StoreEmpty, match=f"expected store {mark}.*Mount it; .*--empty"):
        await place.open(name, shared=shared).adopt()
    assert list(place.folder.iterdir()) == []
    place.mount()
    assert await place.open(name, shared=shared).get("t/old.bin") == b"x"
    place.unmount()
    assert await place.open(name, shared=shared).adopt(is_empty=True) != mark


async def test_before_the_first_migrate_that_command_is_the_fix(place, running_engines):
    async with running_engines.database(template="template0") as url:
        bare = Postgres(url, PostgresConfig())
        blobs = place.open("b", shared=PostgresRecord(lambda: bare))
        with pytest.raises(StoreMismatch, match="run `headrace migrate` once") as caught:
            await blobs.put("t/old.bin", b"x")
        assert "adopt" not in caught.value.text
        await bare.close()


async def test_a_restored_folder_without_its_mark_is_adopted_by_command(place):
    blobs = place.open()
    await blobs.put("t/old.bin", b"x")
    (place.folder / MARK_FILE).unlink()
    with pytest.raises(StoreMismatch, match="it has no marker"):
        await place.open().info("t/gone.bin")
    assert await place.open().adopt() == read_mark(place.folder) == read_record(place.record_file())
    assert await place.open().get("t/old.bin") == b"x"
    with pytest.raises(BlobsDown):
        await blobs.put("t/new.bin", b"a running process reads the record again")
    await blobs.put("t/new.bin", b"and continues")


async def test_a_read_only_folder_is_used_without_a_marker(tmp_path):
    """No user can create files in this folder, not even root."""
    record = StoreRecord(tmp_path / "object-store")
    blobs = Blobs("file:///proc/sys/kernel", record=record)
    await blobs.verify_store()
    assert await blobs.info("ostype")
    with pytest.raises(BlobMissing):
        await blobs.info("no-such-thing")
    assert read_record(record.file) is None
    await blobs.close()


async def test_without_a_writable_record_the_running_process_still_refuses(place):
    place.record_file().parent.parent.mkdir(parents=True)
    place.record_file().parent.write_text("a file in place of the data folder")
    blobs = place.open()
    await blobs.put("t/old.bin", b"x")
    place.unmount()
    await place.require_refused(blobs, "it has no marker")


async def test_a_child_process_leaves_the_first_use_to_its_parent(place):
    child = place.open(may_create=False)
    with pytest.raises(StoreMismatch, match="cannot be read now"):
        await child.put("t/old.bin", b"x")
    assert not place.folder.exists()
    await place.open().put("t/old.bin", b"x")
    assert await child.get("t/old.bin") == b"x"


@pytest.mark.slow
def test_concurrent_first_uses_create_one_mark(tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", MARKER, str(tmp_path / "store")],
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
    marks = {child.communicate(timeout=60)[0].strip() for child in children}
    assert marks == {read_mark(tmp_path / "store")}
    assert [path.name for path in (tmp_path / "store").iterdir()] == [MARK_FILE]


async def test_hosts_share_the_record_in_postgres(place, tmp_path, postgres):
    shared = PostgresRecord(lambda: postgres)
    await place.open("a", shared=shared).put("t/old.bin", b"x")
    place.unmount()
    blobs = place.open("b", shared=shared)
    await place.require_refused(blobs, "it has no marker, expected store")
    with pytest.raises(StoreMismatch, match="expected store"):
        await place.open("b", may_create=False).get("t/old.bin")
    place.mount()
    assert await blobs.get("t/old.bin") == b"x"
    mark = read_mark(place.folder)
    assert read_record(place.record_file("b")) == mark
    assert await shared.expect_first("another") == mark
    other = Place(tmp_path / "other")
    await Blobs(other.folder.as_uri()).put("t/own.bin", b"of a host with another mount")
    with pytest.raises(StoreMismatch, match="it has no marker, expected store"):
        await other.open(shared=shared).get("t/own.bin")
    place.folder.rename(place.away)
    adopted = await place.open("a", shared=shared).adopt(is_empty=True)
    with pytest.raises(BlobsDown):
        await blobs.put("t/new.bin", b"x")
    await blobs.put("t/new.bin", b"y")
    assert read_record(place.record_file("b")) == adopted == await shared.expected()


async def test_while_postgres_is_down_only_a_marked_folder_is_used(place):
    away = Postgres(NOWHERE, PostgresConfig())
    blobs = place.open("b", shared=PostgresRecord(lambda: away))
    with pytest.raises(StoreMismatch, match="the record of earlier use cannot be read now"):
        await blobs.put("t/old.bin", b"x")
    assert not place.folder.exists()
    await place.open("a").put("t/old.bin", b"x")
    assert await blobs.get("t/old.bin") == b"x"
    assert read_record(place.record_file("b")) is None, "read again at the next start"
    await away.close()


@pytest.mark.slow
def test_commands_create_no_second_store(tmp_path, capsys, monkeypatch):
    (tmp_path / "track.bin").write_bytes(b"music")
    folder = tmp_path / "data" / "blobs"
    put = ("media", "put", "t/track.bin", str(tmp_path / "track.bin"))

    def run(*words):
        code = main([*words, "--data", str(tmp_path / "data")])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    assert run(*put)[0] == 0
    folder.rename(tmp_path / "away")
    process = HeadraceProcess([*put, "--data", str(tmp_path / "data")], folder=tmp_path, env={})
    ended = process.wait_exit(), process.out + process.err
    for code, shown in (ended, run(*put), run("media", "ls"), run("doctor")):
        assert code == 7
        assert str(folder) in shown
        assert "headrace blobs adopt" in shown
    assert not folder.exists()
    (tmp_path / "away").rename(folder)
    code, shown = run("media", "ls")
    assert (code, "t/track.bin" in shown) == (0, True)
    folder.rename(tmp_path / "away")
    assert run("blobs", "adopt")[0] == 5
    assert run("blobs", "adopt", "--empty")[0] == 0
    assert run("media", "ls") == (0, "no objects\n")
    monkeypatch.setenv("HEADRACE_BLOBS_URL", "s3://photos")
    code, shown = run("blobs", "adopt")
    assert (code, "blobs.url is not a folder" in shown) == (2, True)
