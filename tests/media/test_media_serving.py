"""Ordinary clients of a real node: whole objects, parts, conditions, order, concurrency."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from raw_clients import pattern, pause, photo_key, serving, wait_until

from headrace.kernel.metrics import REGISTRY
from headrace.media.model import BLOCK_BYTES, content_address
from headrace.media.worker.bodies import FileBody, is_in_memory
from headrace.media.worker.socket_io import PlainChannel


async def test_a_photo_comes_whole_with_all_its_headers(node):
    data = pattern(5000)
    key = await node.put(data)
    answer = await (await node.connect()).ask(key)
    assert (answer.status, answer.body) == (200, data)
    modified = answer.fields.pop("last-modified"), answer.fields.pop("date")
    assert all(moment.endswith(" GMT") for moment in modified)
    assert answer.fields == {
        "etag": f'"{hashlib.sha256(data).hexdigest()}"',
        "cache-control": "public, max-age=31536000, immutable",
        "cache-status": "headrace; hit",
        "accept-ranges": "bytes",
        "content-type": "image/jpeg",
        "content-length": "5000",
        "x-content-type-options": "nosniff",
    }


async def test_parts_conditions_and_head_on_one_connection(node):
    data = pattern(1000)
    key = await node.put(data)
    etag = f'"{hashlib.sha256(data).hexdigest()}"'
    client = await node.connect()

    part = await client.ask(key, Range="bytes=10-19")
    assert (part.status, part.body) == (206, data[10:20])
    assert part.fields["content-range"] == "bytes 10-19/1000"
    assert (await client.ask(key, Range="bytes=-7")).body == data[-7:]
    assert (await client.ask(key, Range="bytes=0-1,5-6")).body == data

    beyond = await client.ask(key, Range="bytes=1000-")
    assert (beyond.status, beyond.fields["content-range"]) == (416, "bytes */1000")
    assert json.loads(beyond.body)["code"] == "media.range_unsatisfiable"

    unchanged = await client.ask(key, If_None_Match=etag, Range="bytes=0-1")
    assert (unchanged.status, unchanged.fields["etag"]) == (304, etag)
    assert "content-length" not in unchanged.fields
    assert (await client.ask(key, If_Match='"other"')).status == 412
    assert (await client.ask(key, Range="bytes=0-1", If_Range=etag)).status == 206
    assert (await client.ask(key, Range="bytes=0-1", If_Range='"old"')).status == 200

    head = await client.ask(key, method="HEAD", Range="bytes=0-1")
    assert (head.status, head.fields["content-length"]) == (200, "1000")
    missing = await client.ask("photos/none.jpg", method="HEAD")
    assert (missing.status, missing.body) == (404, b"")
    assert (await client.ask(key)).body == data


async def test_an_empty_object(node):
    await node.blobs.put("empty.mp3", b"")
    client = await node.connect()
    whole = await client.ask("empty.mp3")
    assert (whole.status, whole.body, whole.fields["content-type"]) == (200, b"", "audio/mpeg")
    part = await client.ask("empty.mp3", Range="bytes=0-")
    assert (part.status, part.fields["content-range"]) == (416, "bytes */0")


@pytest.mark.parametrize("name", ["x.html", "x.svg", "x.xml", "x.js", "x", "x.jpg.html"])
async def test_nothing_is_served_as_what_a_browser_would_run(node, name):
    await node.blobs.put(name, b"<script>alert(1)</script>")
    answer = await (await node.connect()).ask(name)
    assert answer.fields["content-type"] == "application/octet-stream"
    assert answer.fields["cache-control"] == "public, max-age=60"


async def test_the_etag_is_the_one_the_store_gives(node):
    await node.blobs.put("track.mp3", b"x" * 99)
    answer = await (await node.connect()).ask("track.mp3")
    assert answer.fields["etag"] == f'"{(await node.blobs.info("track.mp3")).etag}"'


async def test_ten_megabytes_are_right_at_every_byte(node):
    data = pattern(10 * 1024 * 1024 + 3)
    key = await node.put(data)
    client = await node.connect()
    assert (await client.ask(key)).body == data
    middle = await client.ask(key, Range="bytes=1234567-7654321")
    assert middle.body == data[1234567:7654322]


async def test_pipelined_requests_are_answered_in_order(node):
    keys = {n: await node.put(pattern(n * 1000)) for n in (1, 2, 300, 3)}
    client = await node.connect()
    order = [300, 1, 2, 3, 300, 2] * 20
    heads = [f"GET /m/{keys[n]} HTTP/1.1\r\nHost: a\r\n\r\n".encode() for n in order]
    client.send(b"".join(heads))
    for n in order:
        assert (await client.answer()).body == pattern(n * 1000)


async def test_a_half_closed_client_still_gets_its_answer(node):
    data = pattern(3_000_000)
    key = await node.put(data)
    client = await node.connect()
    client.send(f"GET /m/{key} HTTP/1.0\r\n\r\n".encode())
    client.writer.write_eof()
    answer = await client.answer()
    assert answer.body == data
    assert answer.fields["connection"] == "close"
    assert await client.wait_closed() == b""


async def test_an_answer_that_is_still_in_the_kernel_survives_the_end_of_the_client_s_side(node):
    # At most what the kernel takes with TCP_NOTSENT_LOWAT.
    data = pattern(100_000)
    key = await node.put(data)
    before = sample("media_bytes_total", source="memory")
    client = await node.connect(limit=1024)
    client.send(f"GET /m/{key} HTTP/1.0\r\n\r\n".encode())
    await wait_until(lambda: sample("media_bytes_total", source="memory") == before + len(data))
    client.writer.write_eof()
    await pause(0.05)
    assert (await client.answer()).body == data


async def test_http_1_0_closes_unless_asked_to_stay(node):
    key = await node.put(b"abc")
    client = await node.connect()
    client.send(f"GET /m/{key} HTTP/1.0\r\nConnection: keep-alive\r\n\r\n".encode())
    assert (await client.answer()).fields["connection"] == "keep-alive"
    client.send(f"GET /m/{key} HTTP/1.0\r\n\r\n".encode())
    assert (await client.answer()).fields["connection"] == "close"
    assert await client.wait_closed() == b""


async def test_a_replaced_object_never_mixes_with_the_old_one(node):
    old, new = b"old!" * 2_000_000, b"new!" * 2_000_000
    await node.blobs.put("track.mp3", old)
    client = await node.connect(limit=1024)
    client.send(b"GET /m/track.mp3 HTTP/1.1\r\nHost: a\r\n\r\n")
    await wait_until(lambda: len(client.reader._buffer) > 1024)
    await node.blobs.put("track.mp3", new)
    assert (await client.answer()).body == old
    assert (await client.ask("track.mp3")).body == new


async def test_many_clients_at_once_all_get_their_own_bytes(node):
    keys = [await node.put(pattern(200_000 + n)) for n in range(20)]

    async def listen(n: int) -> None:
        client = await node.connect()
        for step in range(10):
            index = (n + step) % 20
            start = 1000 * n + step
            answer = await client.ask(keys[index], Range=f"bytes={start}-")
            assert answer.body == pattern(200_000 + index)[start:]

    await asyncio.gather(*(listen(n) for n in range(20)))


@pytest.fixture
def cold_file(tmp_path):
    """A descriptor of a file without cached pages."""
    path = tmp_path / "cold"
    path.write_bytes(pattern(4 * BLOCK_BYTES))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    assert is_in_memory(descriptor, 0)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    # Use a block that no test reads: the probe itself makes the kernel start reading.
    if is_in_memory(descriptor, BLOCK_BYTES):
        os.close(descriptor)
        pytest.skip("this filesystem keeps its pages or does not know RWF_NOWAIT")
    return descriptor


@pytest.fixture
def readers():
    """The threads that read uncached blocks."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def test_a_cold_block_is_read_by_a_thread_before_it_is_sent(cold_file, readers):
    woken = asyncio.Event()
    start = 2 * BLOCK_BYTES
    body = FileBody(cold_file, start, 100, readers=readers, wake=woken.set)
    ours, theirs = socket.socketpair()
    channel = PlainChannel(ours)
    assert body.send(channel, 1000) == 0
    assert body.is_waiting
    await asyncio.wait_for(woken.wait(), 60)
    assert body.send(channel, 1000) == 100
    assert body.source == "disk"
    assert theirs.recv(1000) == pattern(4 * BLOCK_BYTES)[start : start + 100]
    body.close()
    ours.close()
    theirs.close()


async def test_a_body_closed_while_a_thread_reads_gives_its_file_back_after(cold_file, readers):
    woken = asyncio.Event()
    body = FileBody(cold_file, 0, 1000, readers=readers, wake=woken.set)
    ours, theirs = socket.socketpair()
    assert body.send(PlainChannel(ours), 1000) == 0
    body.close()
    os.fstat(cold_file)
    await wait_until(lambda: not body.is_waiting)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(cold_file)
    assert not woken.is_set()
    ours.close()
    theirs.close()


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_the_series_count_answers_and_bytes(node):
    parts = sample("media_requests_total", status="206")
    sent = sample("media_bytes_total", source="memory")
    key = await node.put(pattern(1000))
    client = await node.connect()
    await client.ask(key, Range="bytes=0-99")
    assert sample("media_requests_total", status="206") == parts + 1
    assert sample("media_bytes_total", source="memory") == sent + 100
    assert sample("media_connections") >= 1


async def test_a_stop_lets_the_answer_under_way_end(blobs):
    data = pattern(12_000_000)
    async with serving(blobs) as node:
        key = await node.put(data)
        busy, idle = await node.connect(limit=1024), await node.connect()
        assert (await idle.ask(key, Range="bytes=0-0")).status == 206
        busy.send(f"GET /m/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        await wait_until(lambda: len(busy.reader._buffer) > 1024)
        node.stop.set()
        assert await idle.wait_closed() == b""
        assert (await busy.answer()).body == data
        assert await busy.wait_closed() == b""
        await asyncio.wait_for(node.task, 60)
        with pytest.raises(ConnectionRefusedError):
            await node.connect()


async def test_a_stop_answers_what_was_asked_before_it(blobs):
    """Requests that the node has not read yet, on a kept and on a waiting connection."""
    async with serving(blobs) as node:
        data = pattern(1000)
        key = await node.put(data)
        kept = await node.connect()
        assert (await kept.ask(key)).body == data
        request = f"GET /m/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
        with socket.create_connection((node.host, node.port)) as new:
            new.sendall(request)
            kept.send(request)
            node.stop.set()
            answer = await kept.answer()
            assert (answer.status, answer.body) == (200, data)
            assert answer.fields["connection"] == "close"
            assert await kept.wait_closed() == b""
            told = await asyncio.to_thread(new.makefile("rb").read)
        assert told.startswith(b"HTTP/1.1 200 OK\r\n")
        assert told.endswith(data)


async def test_a_stop_cuts_who_does_not_end(blobs):
    async with serving(blobs, stop_timeout_s=0.3) as node:
        key = await node.put(pattern(20_000_000))
        client = await node.connect(limit=1024)
        client.send(f"GET /m/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        await wait_until(lambda: len(client.reader._buffer) > 1024)
        node.stop.set()
        await asyncio.wait_for(node.task, 60)
        with pytest.raises(ConnectionResetError):
            await client.wait_closed()


def test_the_key_of_the_tests_is_content_addressed():
    assert content_address(photo_key(b"x")) == hashlib.sha256(b"x").hexdigest()
