"""The object store's contract, once over a folder and once over S3."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.kit.processes import wait_until

from headrace.engines import durable_files
from headrace.engines.blobs import (
    BlobChanged,
    BlobMissing,
    Blobs,
    BlobsConfig,
    BlobsDown,
    InvalidBlobKey,
)
from headrace.engines.durable_files import write_durably


@pytest.fixture(scope="module")
def s3_server():
    """The process of an S3 server on loopback, and the URL of its one bucket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = f"http://127.0.0.1:{port}"

    def answers():
        try:
            return httpx.put(f"{endpoint}/photos-for-tests", timeout=1).is_success
        except httpx.TransportError:
            return None

    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    try:
        wait_until(answers, what="the S3 server answers")
        os.environ.update(settings)
        yield server, "s3://photos-for-tests/site"
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        server.terminate()
        server.wait(60)


@pytest.fixture
def s3_url(s3_server):
    return s3_server[1]


@pytest.fixture(params=["folder", "s3"])
async def store(request, tmp_path):
    url = tmp_path.as_uri() if request.param == "folder" else request.getfixturevalue("s3_url")
    store = Blobs(url)
    yield store
    await store.close()


async def test_what_was_put_comes_back_whole_and_in_part(store):
    await store.put("photos/ab/one.jpg", b"0123456789")
    assert await store.get("photos/ab/one.jpg") == b"0123456789"
    assert await store.read_range("photos/ab/one.jpg", 3, 4) == b"3456"
    info = await store.info("photos/ab/one.jpg")
    assert (info.size_bytes, bool(info.etag)) == (10, True)


async def test_a_second_put_replaces_in_one_step(store):
    await store.put("a.bin", b"old")
    await store.put("a.bin", b"newer")
    assert await store.get("a.bin") == b"newer"


async def test_a_missing_object_is_an_error_and_its_deletion_is_not(store):
    with pytest.raises(BlobMissing, match=r"no object 'gone\.bin'"):
        await store.get("gone.bin")
    with pytest.raises(BlobMissing):
        await store.info("gone.bin")
    await store.delete("gone.bin")


async def test_listing_sees_what_is_there(store):
    for name in ("list/x/1", "list/x/2", "list/y/1"):
        await store.put(name, b".")
    assert sorted([info.key async for info in store.list("list/x")]) == ["list/x/1", "list/x/2"]
    await store.delete("list/x/1")
    assert [info.key async for info in store.list("list/x")] == ["list/x/2"]


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "a//b", "../x", "a/../b", "a/.b", "a b", "a\0", "é"]
)
async def test_keys_that_are_no_plain_path_are_refused(store, key):
    with pytest.raises(InvalidBlobKey):
        await store.put(key, b"")
    with pytest.raises(InvalidBlobKey):
        await store.get(key)


async def test_a_full_or_forbidden_disk_raises_and_leaves_no_partial_object(tmp_path):
    store = Blobs((tmp_path / "store").as_uri())
    (tmp_path / "store" / "a").write_text("a file where a folder is needed")
    with pytest.raises(BlobsDown, match="headrace doctor"):
        await store.put("a/b.bin", b"x")
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["a"]
    await store.close()


async def test_what_stands_in_the_folder_and_no_put_made_is_no_object(tmp_path):
    store = Blobs((tmp_path / "store").as_uri())
    await store.put("t/real.bin", b"x")
    (tmp_path / "store" / "t" / ".real.bin.0badf00d").write_bytes(b"draft of a killed put")
    (tmp_path / "store" / "t" / "with space").write_bytes(b"x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "passwd").write_bytes(b"x")
    (tmp_path / "store" / "t" / "link").symlink_to(outside)
    (tmp_path / "store" / "t" / "passwd").symlink_to(outside / "passwd")
    os.mkfifo(tmp_path / "store" / "t" / "fifo")
    assert [info.key async for info in store.list("t")] == ["t/real.bin"]
    for key in ("t/passwd", "t/link/passwd", "t/fifo", "t/real.bin/deeper"):
        with pytest.raises(BlobMissing):
            await store.info(key)
        with pytest.raises(BlobMissing):
            await store.get(key)
    with pytest.raises(BlobsDown):
        await store.put("t/link/owned", b"x")
    assert [path.name for path in outside.iterdir()] == ["passwd"]
    await store.close()


async def test_a_store_without_its_folder_is_down_and_reports_no_miss(tmp_path):
    store = Blobs((tmp_path / "store").as_uri())
    await store.put("a.bin", b"x")
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("a file in its place")
    for call in (store.get("a.bin"), store.info("a.bin"), store.put("b.bin", b"x")):
        with pytest.raises(BlobsDown):
            await call
    await store.close()


async def test_puts_at_once_share_their_syncs_and_fail_alone(tmp_path):
    store = Blobs((tmp_path / "store").as_uri(), BlobsConfig(put_threads=1))
    (tmp_path / "store" / "f").write_text("a file where a folder is needed")
    keys = [f"{'f' if n % 10 == 3 else 'd'}/{n % 4}/{n}.bin" for n in range(100)]
    ended = await asyncio.gather(
        *[store.put(key, f"{key}".encode() * 1000) for key in keys], return_exceptions=True
    )
    for key, end in zip(keys, ended, strict=True):
        if key.startswith("f"):
            assert isinstance(end, BlobsDown)
        else:
            assert await store.get(key) == f"{key}".encode() * 1000
    assert list((tmp_path / "store").rglob(".*")) == [], "no drafts are left"
    shutil.rmtree(tmp_path / "store" / "d")
    again = [f"d/1/again{n}.bin" for n in range(20)]
    await asyncio.gather(*[store.put(key, b"x") for key in again])
    assert [await store.get(key) for key in again] == [b"x"] * 20
    await store.close()


async def test_a_store_serves_one_loop_after_another(tmp_path):
    store = Blobs((tmp_path / "store").as_uri())
    for number in range(2):
        await asyncio.to_thread(asyncio.run, store.put(f"{number}.bin", b"x"))
    assert await store.get("1.bin") == b"x"
    await store.close()


def test_a_put_killed_at_any_moment_leaves_the_old_or_the_new_object(tmp_path):
    write_durably(tmp_path, "k/object.bin", b"old" * 100_000)
    code = (
        "import sys; from pathlib import Path; from headrace.engines.durable_files import"
        " write_durably\n"
        "print('go', flush=True)\n"
        "while True: write_durably(Path(sys.argv[1]), 'k/object.bin', b'new' * 100_000)\n"
    )
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "go\n"
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        child.stdout.close()
        assert (tmp_path / "k" / "object.bin").read_bytes() in (b"old" * 100_000, b"new" * 100_000)


def test_puts_killed_together_leave_the_old_or_the_new_objects(tmp_path):
    old, new = b"old" * 10_000, b"new" * 10_000
    keys = [f"k/{n % 3}/object{n}.bin" for n in range(12)]
    for key in keys:
        write_durably(tmp_path, key, old)
    code = (
        "import asyncio, sys; from pathlib import Path; from headrace.engines.durable_files import"
        " DurableWriter\n"
        "async def main(puts, keys):\n"
        "    while True: await asyncio.gather(*[puts.put(k, b'new' * 10_000) for k in keys])\n"
        "print('go', flush=True)\n"
        "asyncio.run(main(DurableWriter(Path(sys.argv[1]), 1), sys.argv[2:]))\n"
    )
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), *keys], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "go\n"
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        child.stdout.close()
        assert {(tmp_path / key).read_bytes() for key in keys} <= {old, new}


async def test_puts_together_reach_the_disk_before_their_names_and_after(tmp_path):
    calls: list[str] = []
    real_sync = durable_files._sync_disk

    def sync(root: int) -> None:
        calls.append("sync")
        real_sync(root)

    sys.addaudithook(lambda event, _: calls.append("rename") if event == "os.rename" else None)
    durable_files._sync_disk = sync
    try:
        puts = [durable_files._Put(f"a/{n}.bin", b"x") for n in range(5)]
        durable_files._write_batch(tmp_path, puts, set())
    finally:
        durable_files._sync_disk = real_sync
    assert calls[:7] == ["sync", *["rename"] * 5, "sync"]
    assert [put.error for put in puts] == [None] * 5


def test_a_put_syncs_the_file_before_its_name_and_then_the_folder(tmp_path):
    """The order that makes a put durable, seen through the calls that Python makes."""
    calls: list[str] = []
    real_fsync = os.fsync

    def fsync(descriptor):
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        calls.append("fsync folder" if target.is_dir() else "fsync file")
        real_fsync(descriptor)

    sys.addaudithook(lambda event, _: calls.append("rename") if event == "os.rename" else None)
    os.fsync = fsync
    try:
        write_durably(tmp_path, "a/b/c.bin", b"x")
    finally:
        os.fsync = real_fsync
    assert calls[:3] == ["fsync file", "rename", "fsync folder"]
    assert calls.count("fsync folder") == 3


async def test_an_object_is_replaced_only_by_who_read_its_last_version(store):
    with pytest.raises(BlobMissing):
        await store.read("state/one.json")
    await store.put_if("state/one.json", b"1", etag=None)
    with pytest.raises(BlobChanged):
        await store.put_if("state/one.json", b"x", etag=None)
    data, etag = await store.read("state/one.json")
    assert data == b"1"
    assert await store.read("state/one.json", unless=etag) is None
    await store.put_if("state/one.json", b"22", etag=etag)
    with pytest.raises(BlobChanged):
        await store.put_if("state/one.json", b"x", etag=etag)
    assert (await store.read("state/one.json", unless=etag))[0] == b"22"
    assert [info.key async for info in store.list("state")] == ["state/one.json"]
    await store.delete("state/one.json")
    with pytest.raises(BlobChanged):
        await store.put_if("state/one.json", b"x", etag=etag)


async def test_of_many_who_replace_at_once_one_wins_each_time(store):
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


async def _list(store):
    return [info async for info in store.list("photos")]


@pytest.mark.parametrize(
    "operation",
    [
        lambda store: store.put("photos/one.jpg", b"1" * 1000),
        lambda store: store.put_if("photos/two.jpg", b"2", etag=None),
        lambda store: store.get("photos/old.jpg"),
        lambda store: store.read("photos/old.jpg"),
        lambda store: store.read_range("photos/old.jpg", 0, 1),
        lambda store: store.read_part("photos/old.jpg", 0, 1),
        lambda store: store.info("photos/old.jpg"),
        lambda store: store.delete("photos/old.jpg"),
        _list,
        lambda store: store.open(),
    ],
    ids=["put", "put_if", "get", "read", "range", "part", "info", "delete", "list", "open"],
)
async def test_a_frozen_s3_store_is_waited_for_no_longer_than_the_setting(s3_server, operation):
    """The client alone tries for three minutes."""
    server, url = s3_server
    store = Blobs(url, BlobsConfig(timeout_s=0.2))
    await Blobs(url).put("photos/old.jpg", b"old")
    server.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(8):
            with pytest.raises(BlobsDown, match=r"did not respond within 0 s.*blobs\.timeout"):
                await operation(store)
    finally:
        server.send_signal(signal.SIGCONT)
    await store.close()


async def test_what_is_large_has_the_time_that_its_bytes_take(s3_url):
    store = Blobs(s3_url, BlobsConfig(timeout_s=5.0))
    data = bytes(8 * 2**20)
    await store.put("photos/large", data)
    assert await store.get("photos/large") == data
    async with store._use("photos/large", size_bytes=3 * 2**20) as limit:
        left_s = limit.when() - asyncio.get_running_loop().time()
    assert 5.0 < left_s <= 8.0
    await store.close()
