"""The object store: one contract over a folder and over S3, and what only one of them promises."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace.engines import durable_files
from headrace.engines.backup.archive import Archive, BackupConfig, Fenced
from headrace.engines.backup.archiver import new_holder
from headrace.engines.backup.restore import extend_segment
from headrace.engines.backup.wal import SEGMENT_BYTES, encode_part
from headrace.engines.blobs import (
    BlobChanged,
    BlobMissing,
    Blobs,
    BlobsConfig,
    BlobsDown,
    InvalidBlobKey,
)
from headrace.engines.durable_files import write_durably
from headrace.engines.joined_objects import BlobCorrupt

KILLED_WRITER = """
import asyncio, sys
from datetime import UTC, datetime
from pathlib import Path
from headrace.engines.durable_files import DurableWriter, write_durably
root, *keys = sys.argv[1:]
print("go", flush=True)
if len(keys) == 1:
    while True: write_durably(Path(root), keys[0], b"new" * 100_000)
async def main(puts):
    while True: await asyncio.gather(*[puts.put(key, b"new" * 100_000) for key in keys])
asyncio.run(main(DurableWriter(Path(root), 1)))
"""


@pytest.fixture(scope="module")
def s3_server(s3):
    """The process of an S3 server on loopback, and the URL of its one bucket."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.env.items():
            patch.setenv(name, value)
        yield s3.process, s3.url


@pytest.fixture
async def folder_store(tmp_path):
    store = Blobs((tmp_path / "store").as_uri(), BlobsConfig(put_threads=1))
    yield store
    await store.close()


@pytest.fixture(params=["folder", "s3"])
async def store(request, tmp_path):
    url = (
        tmp_path.as_uri() if request.param == "folder" else request.getfixturevalue("s3_server")[1]
    )
    store = Blobs(url)
    yield store
    await store.close()


async def keys_of(store, prefix):
    return sorted([info.key async for info in store.list(prefix)])


async def test_a_folder_is_paged_by_name(store):
    for key in ("pages/b/1.jpg", "pages/a.jpg", "pages/b/2.jpg", "pages/c.jpg", "other/x.jpg"):
        await store.put(key, b"12")
    if store.folder is not None:
        (store.folder / "pages" / "link").symlink_to(store.folder / "other")
        (store.folder / "pages" / ".draft").write_bytes(b"1")
    first = await store.children("pages", children_max=2)
    assert [(one.name, one.size_bytes) for one in first] == [("a.jpg", 2), ("b", None)]
    info = await store.info("pages/a.jpg")
    assert (first[0].etag, first[0].modified_at) == (info.etag, info.modified_at)
    rest = await store.children("pages", after="b", children_max=9)
    assert [one.name for one in rest] == ["c.jpg"]
    assert await store.children("pages/none", children_max=9) == []
    assert "pages" in [one.name for one in await store.children("", children_max=99)]
    with pytest.raises(InvalidBlobKey):
        await store.children("pages/../other", children_max=9)


async def test_objects_are_put_replaced_read_listed_and_deleted(store):
    for data in (b"old", b"0123456789"):
        await store.put("photos/ab/one.jpg", data)
        assert await store.get("photos/ab/one.jpg") == data
    assert (await store.read_part("photos/ab/one.jpg", 3, 4))[1] == b"3456"
    info = await store.info("photos/ab/one.jpg")
    assert (info.size_bytes, bool(info.etag)) == (10, True)
    for call in (store.get("gone.bin"), store.info("gone.bin"), store.read("gone.bin")):
        with pytest.raises(BlobMissing, match=r"no object 'gone\.bin'"):
            await call
    await store.delete("gone.bin")
    for name in ("list/x/1", "list/x/2", "list/y/1"):
        await store.put(name, b".")
    assert await keys_of(store, "list/x") == ["list/x/1", "list/x/2"]
    await store.delete("list/x/1")
    assert await keys_of(store, "list/x") == ["list/x/2"]


async def test_keys_that_are_no_plain_path_are_refused(store):
    for key in ("", "/etc/passwd", "a//b", "../x", "a/../b", "a/.b", "a b", "a\0", "é"):
        for call in (store.put(key, b""), store.get(key)):
            with pytest.raises(InvalidBlobKey):
                await call


async def test_an_object_is_replaced_only_after_reading_its_last_version(store):
    key = "state/one.json"
    await store.put_if(key, b"1", etag=None)
    data, etag = await store.read(key)
    assert (data, await store.read(key, unless=etag)) == (b"1", None)
    await store.put_if(key, b"22", etag=etag)
    assert (await store.read(key, unless=etag))[0] == b"22"
    assert await keys_of(store, "state") == [key]
    for wrong in (None, etag):
        with pytest.raises(BlobChanged):
            await store.put_if(key, b"x", etag=wrong)
    await store.delete(key)
    with pytest.raises(BlobChanged):
        await store.put_if(key, b"x", etag=etag)


async def test_of_concurrent_replacements_one_succeeds_each_time(store):
    async def add_one() -> None:
        while True:
            try:
                found = await store.read("state/count")
            except BlobMissing:
                found = (b"0", None)
            try:
                return await store.put_if("state/count", b"%d" % (int(found[0]) + 1), etag=found[1])
            except BlobChanged:
                continue

    await asyncio.gather(*(add_one() for _ in range(8)))
    assert await store.get("state/count") == b"8"
    await store.delete("state/count")


async def test_only_plain_files_that_a_put_made_are_objects(folder_store, tmp_path):
    await folder_store.put("t/real.bin", b"x")
    folder, outside = tmp_path / "store" / "t", tmp_path / "outside"
    (folder / ".real.bin.0badf00d").write_bytes(b"draft of a killed put")
    (folder / "with space").write_bytes(b"x")
    outside.mkdir()
    (outside / "passwd").write_bytes(b"x")
    (folder / "link").symlink_to(outside)
    (folder / "passwd").symlink_to(outside / "passwd")
    os.mkfifo(folder / "fifo")
    assert await keys_of(folder_store, "t") == ["t/real.bin"]
    for key in ("t/passwd", "t/link/passwd", "t/fifo", "t/real.bin/deeper"):
        for call in (folder_store.info(key), folder_store.get(key)):
            with pytest.raises(BlobMissing):
                await call
    with pytest.raises(BlobsDown):
        await folder_store.put("t/link/owned", b"x")
    assert [path.name for path in outside.iterdir()] == ["passwd"]


async def test_a_store_without_its_folder_is_down_and_reports_no_miss(folder_store, tmp_path):
    await folder_store.put("a.bin", b"x")
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("a file in its place")
    puts = (folder_store.put("b.bin", b"x"), folder_store.put("a/b.bin", b"x"))
    for call in (folder_store.get("a.bin"), folder_store.info("a.bin"), *puts):
        with pytest.raises(BlobsDown):
            await call
    assert sorted(path.name for path in tmp_path.iterdir()) == ["away", "store"]


async def test_concurrent_puts_share_their_syncs_and_fail_alone(folder_store, tmp_path):
    store, root = folder_store, tmp_path / "store"
    (root / "f").write_text("a file where a folder is needed")
    keys = [f"{'f' if n % 10 == 3 else 'd'}/{n % 4}/{n}.bin" for n in range(100)]
    puts = [store.put(key, key.encode() * 1000) for key in keys]
    for key, end in zip(keys, await asyncio.gather(*puts, return_exceptions=True), strict=True):
        if key.startswith("f"):
            assert isinstance(end, BlobsDown)
            assert "headrace doctor" in end.text
        else:
            assert await store.get(key) == key.encode() * 1000
    assert list(root.rglob(".*")) == [], "no drafts are left"
    shutil.rmtree(root / "d")
    again = [f"d/1/again{n}.bin" for n in range(20)]
    await asyncio.gather(*[store.put(key, b"x") for key in again])
    assert [await store.get(key) for key in again] == [b"x"] * 20
    for number in range(2):
        await asyncio.to_thread(asyncio.run, store.put(f"{number}.bin", b"in another loop"))
    assert await store.get("1.bin") == b"in another loop"


@pytest.mark.parametrize("count", [1, 12], ids=["one put", "puts together"])
def test_a_killed_put_leaves_the_old_or_the_new_object(tmp_path, count):
    old, new = b"old" * 100_000, b"new" * 100_000
    keys = [f"k/{n % 3}/object{n}.bin" for n in range(count)]
    for key in keys:
        write_durably(tmp_path, key, old)
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED_WRITER, str(tmp_path), *keys],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout.readline() == "go\n"
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        child.stdout.close()
        assert {(tmp_path / key).read_bytes() for key in keys} <= {old, new}


@pytest.fixture
def calls(monkeypatch):
    """Syncs and renames of this process, in order."""
    calls: list[str] = []
    sync_disk, fsync = durable_files._sync_disk, os.fsync

    def note_disk(root):
        calls.append("sync")
        sync_disk(root)

    def note_file(descriptor):
        is_folder = Path(f"/proc/self/fd/{descriptor}").readlink().is_dir()
        calls.append("fsync folder" if is_folder else "fsync file")
        fsync(descriptor)

    sys.addaudithook(lambda event, _: calls.append("rename") if event == "os.rename" else None)
    monkeypatch.setattr(durable_files, "_sync_disk", note_disk)
    monkeypatch.setattr(os, "fsync", note_file)
    return calls


def test_data_is_synced_before_its_name_and_the_name_afterwards(tmp_path, calls):
    write_durably(tmp_path, "a/b/c.bin", b"x")
    assert calls[:3] == ["fsync file", "rename", "fsync folder"]
    assert calls.count("fsync folder") == 3
    calls.clear()
    first, second = (
        [durable_files._Put(f"a/{batch}-{n}.bin", b"x") for n in range(5)] for batch in range(2)
    )
    batches = durable_files._Batches(tmp_path, set())
    # A file is stored once the sync after its rename has returned, with the next batch or alone.
    assert batches.write(first) == []
    assert batches.write(second) == first
    assert batches.finish() == second
    whole = [call for call in calls if not call.startswith("fsync")]
    assert whole == ["sync", *["rename"] * 5, "sync", *["rename"] * 5, "sync"]
    assert [put.error for put in (*first, *second)] == [None] * 10


def test_a_failed_sync_fails_the_batch_and_the_names_of_the_one_before(tmp_path, monkeypatch):
    first, second = ([durable_files._Put(f"{batch}.bin", b"x")] for batch in range(2))
    batches = durable_files._Batches(tmp_path, set())
    batches.write(first)

    def fail(_root):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable_files, "_sync_disk", fail)
    assert batches.write(second) == [*first, *second]
    assert all(isinstance(put.error, OSError) for put in (*first, *second))
    assert batches.finish() == []
    assert list(tmp_path.iterdir()) == [tmp_path / "0.bin"]


USES = {
    "put": lambda store: store.put("photos/one.jpg", b"1" * 1000),
    "put_if": lambda store: store.put_if("photos/two.jpg", b"2", etag=None),
    "get": lambda store: store.get("photos/old.jpg"),
    "read": lambda store: store.read("photos/old.jpg"),
    "part": lambda store: store.read_part("photos/old.jpg", 0, 1),
    "info": lambda store: store.info("photos/old.jpg"),
    "delete": lambda store: store.delete("photos/old.jpg"),
    "list": lambda store: keys_of(store, "photos"),
    "open": lambda store: store.open(),
}


async def test_every_use_of_a_frozen_s3_store_ends_at_the_configured_timeout(s3_server):
    """The client alone retries for three minutes."""
    server, url = s3_server
    store = Blobs(url, BlobsConfig(timeout_s=0.2))
    await Blobs(url).put("photos/old.jpg", b"old")
    server.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(8):
            ends = await asyncio.gather(*[u(store) for u in USES.values()], return_exceptions=True)
    finally:
        server.send_signal(signal.SIGCONT)
    for name, end in zip(USES, ends, strict=True):
        assert isinstance(end, BlobsDown), name
        assert "did not respond within 0 s" in end.text, name
        assert "blobs.timeout" in end.text, name
    await store.close()


async def test_the_timeout_grows_with_the_size_of_an_object(s3_server):
    store = Blobs(s3_server[1], BlobsConfig(timeout_s=5.0))
    data = bytes(8 * 2**20)
    await store.put("photos/large", data)
    assert await store.get("photos/large") == data
    async with store._use("photos/large", size_bytes=3 * 2**20) as limit:
        left_s = limit.when() - asyncio.get_running_loop().time()
    assert 5.0 < left_s <= 8.0
    await store.close()


async def test_parts_are_joined_to_one_object_or_nothing_changes(store):
    parts = {f"join/{n}": bytes([n]) * 3_000_000 for n in range(4)}
    for key, data in parts.items():
        await store.put(key, data)
    whole = b"".join(parts.values())
    await store.put("tracks/a.mp3", b"before")
    for wrong, keys in ((BlobCorrupt, [*parts]), ((BlobMissing, BlobsDown), [*parts, "join/none"])):
        with pytest.raises(wrong):
            await store.join("tracks/a.mp3", keys, size_bytes=len(whole), sha256="0" * 64)
        assert await store.get("tracks/a.mp3") == b"before"
    digest = hashlib.sha256(whole).hexdigest()
    await store.join("tracks/a.mp3", [*parts], size_bytes=len(whole), sha256=digest)
    assert await store.get("tracks/a.mp3") == whole
    await store.join("tracks/empty.mp3", [], size_bytes=0)
    assert await store.get("tracks/empty.mp3") == b""
    await store.clear("join")
    assert await keys_of(store, "join") == []


async def test_an_archive_of_backups_in_a_bucket_has_one_holder_and_returns_its_log(
    s3_server, tmp_path
):
    """The same code as for a folder, except for conditional puts and lists."""
    config = BackupConfig(url=f"{s3_server[1]}/backup-{tmp_path.name}")
    one, two = (Archive(config, tmp_path / name) for name in ("one", "two"))
    assert await one.holder() is None
    own = new_holder(None, tmp_path / "one", generation=1)
    await one.claim(own)
    assert await two.holder() == own
    await two.claim(new_holder(own, tmp_path / "two", generation=2))
    with pytest.raises(BlobChanged):
        await one.claim(new_holder(own, tmp_path / "one", generation=2))
    with pytest.raises(Fenced):
        await one.require_session(own.session)
    segment = "000000010000000000000001"
    for part, data in (("00000000", b"first"), ("00000005", b"second")):
        stored = encode_part(SEGMENT_BYTES + int(part, 16), data, datetime.now(UTC))
        await one.put_part(1, segment, part, stored)
    assert await two.segments(1) == {segment: ["00000000", "00000005"]}
    data = bytearray()
    await extend_segment(two, 1, segment, data)
    assert data == b"firstsecond"
    await one.drop_parts(1, segment, ["00000005"])
    assert await two.parts(1, segment) == ["00000000"]
    for archive in (one, two):
        await archive.close()
