"""Nodes that send the files of a folder: what is no object, a store that is away, HTTPS."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from node_kinds import FILES, TLS
from raw_clients import SMALL_BYTES, head_of, open_files, pattern, serving, wait_until

from headrace.engines.blobs import Blobs
from headrace.engines.mount_guard import StoreRecord
from headrace.media.errors import ListenFailed
from headrace.media.model import BLOCK_BYTES
from headrace.media.worker.bodies import is_in_memory


async def test_only_regular_files_are_served(node, tmp_path):
    """No links, folders, pipes or sockets, whether inside the store or out of it."""
    secret, folder = tmp_path / "secret", node.blobs.folder
    secret.mkdir()
    (secret / "a.jpg").write_text("secret")
    await node.blobs.put("good.jpg", b"good")
    (folder / "link.jpg").symlink_to(secret / "a.jpg")
    (folder / "inside.jpg").symlink_to(folder / "good.jpg")
    (folder / "linked").symlink_to(secret)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket.jpg"))
        client = await node.connect()
        for key in ("link.jpg", "inside.jpg", "linked/a.jpg", "folder", "pipe.jpg", "socket.jpg"):
            answer = await client.ask(key)
            assert (answer.status, b"secret" in answer.body) == (404, False), key
        assert (await client.ask("good.jpg/more")).status == 404
        assert (await client.ask("good.jpg")).body == b"good"


async def test_a_store_that_is_away_is_no_missing_object(node):
    await node.blobs.put("good.jpg", b"good")
    folder, away = node.blobs.folder, node.blobs.folder.with_name("elsewhere")
    folder.rename(away)
    client = await node.connect()
    answer = await client.ask("good.jpg")
    assert (answer.status, answer.fields["retry-after"]) == (503, "5")
    assert answer.code == "media.store_unavailable"
    away.rename(folder)
    assert (await client.ask("good.jpg")).body == b"good"


async def test_a_store_that_is_not_mounted_is_503_and_not_404(tmp_path):
    disk, away = tmp_path / "disk", tmp_path / "away"
    blobs = Blobs(disk.as_uri(), record=StoreRecord(tmp_path / "object-store"))
    await blobs.put("track.mp3", b"music")
    async with serving(blobs) as node:
        client = await node.connect()
        assert (await client.ask("track.mp3")).body == b"music"
        disk.rename(away)
        disk.mkdir()
        answer = await (await node.connect()).ask("track.mp3")
        assert (answer.status, answer.fields["retry-after"]) == (503, "5")
        assert str(tmp_path).encode() not in answer.body
        disk.rmdir()
        away.rename(disk)
        client = await node.connect()
        assert (await client.ask("track.mp3")).body == b"music"
        assert (await client.ask("gone.mp3")).status == 404
    await blobs.close()


@pytest.mark.parametrize("kind", [FILES, TLS], ids=str)
async def test_a_file_cut_short_while_it_is_sent_never_ends_cleanly(kind, tmp_path):
    data = pattern(20_000_000)
    async with kind.start(tmp_path) as node:
        await node.blobs.put("track.mp3", data)
        before = node.series("media_cuts_total", reason="source")
        client = await node.connect(buffer_bytes=SMALL_BYTES)
        client.send(head_of("track.mp3"))
        await client.reader.readuntil(b"\r\n\r\n")
        os.truncate(node.blobs.folder / "track.mp3", 100)
        _, is_cut = await client.read_up_to(len(data))
        assert is_cut
        assert node.series("media_cuts_total", reason="source") == before + 1


async def test_a_file_that_is_not_in_memory_is_read_by_a_thread(node):
    """Its bytes count as read from the disk; clients that leave meanwhile leave no file open."""
    await node.blobs.put("cold.mp3", data := pattern(4 * BLOCK_BYTES))
    file = os.open(node.blobs.folder / "cold.mp3", os.O_RDONLY)
    os.fsync(file)
    client, before = await node.connect(), open_files()
    for number in range(4):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_in_memory(file, 0):
            os.close(file)
            pytest.skip("this filesystem keeps its pages or does not know RWF_NOWAIT")
        leaving = await node.connect()
        leaving.send(head_of("cold.mp3"))
        await asyncio.sleep(0)
        leaving.drop()
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        start, read = number * BLOCK_BYTES, node.series("media_bytes_total", source="disk")
        answer = await client.ask("cold.mp3", Range=f"bytes={start}-{start + 99}")
        assert answer.body == data[start : start + 100]
    assert node.series("media_bytes_total", source="disk") >= read
    os.close(file)
    await wait_until(lambda: open_files() <= before)


async def test_a_copied_file_keeps_its_etag(node, tmp_path):
    await node.blobs.put("a.mp3", pattern(1000))
    path, copy = node.blobs.folder / "a.mp3", tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(path.stat().st_mtime_ns, path.stat().st_mtime_ns))
    client = await node.connect()
    first = (await client.ask("a.mp3")).fields["etag"]
    copy.replace(path)
    assert (await client.ask("a.mp3")).fields["etag"] == first
    assert first == f'"{(await node.blobs.info("a.mp3")).etag}"'


def _replace(path, data):
    draft = path.with_name("draft")
    draft.write_bytes(data)
    draft.replace(path)


def _replace_folder(path, data):
    path.parent.rename(path.parent.with_name("away"))
    path.parent.mkdir()
    path.write_bytes(data)


@pytest.mark.parametrize(
    "change", [_replace, type(Path()).write_bytes, _replace_folder, lambda path, _: path.unlink()]
)
async def test_a_change_of_a_file_that_is_in_use_is_noticed_at_once(node, change):
    """A file that was just sent many times is not sent once more after it was changed."""
    old, new = pattern(BLOCK_BYTES, 1), pattern(BLOCK_BYTES, 2)
    await node.blobs.put("in/a.mp3", old)
    path = node.blobs.folder / "in" / "a.mp3"
    # The same size and, to the microsecond, another time: the kernel's clock ticks every few ms.
    os.utime(path, ns=(1, 10**18))
    client = await node.connect()
    etags = set()
    for number in range(8):
        answer = await client.ask("in/a.mp3", Range=f"bytes={number}-{number + 19_999}")
        assert answer.body == old[number : number + 20_000]
        etags.add(answer.fields["etag"])
    change(path, new)
    answer = await client.ask("in/a.mp3", Range="bytes=0-19999")
    if path.exists():
        assert (answer.status, answer.body) == (206, new[:20_000])
        assert answer.fields["etag"] not in etags
    else:
        assert answer.status == 404


async def test_versions_stored_one_right_after_the_other_have_different_etags(blobs):
    seen = set()
    for number in range(100):
        await blobs.put("a.mp3", b"%03d" % number)
        seen.add((await blobs.info("a.mp3")).etag)
    assert len(seen) == 100


async def test_a_port_in_use_is_an_error_that_names_the_setting(blobs):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ListenFailed, match=r"choose another media\.listen"),
    ):
        async with serving(blobs, listen=taken.getsockname()):
            pass
