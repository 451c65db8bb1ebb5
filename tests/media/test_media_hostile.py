"""Malicious, slow, broken and excess clients get a typed answer or a cut; the node survives."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time

import pytest
from raw_clients import DEADLINE_S, open_files, pattern, pause, serving, wait_until
from refused_heads import REFUSED

from headrace.kernel.metrics import REGISTRY

GOOD = b"GET /m/good.jpg HTTP/1.1\r\nHost: a\r\n\r\n"
ENDLESS = {"TLS", "endless target", "endless head", "bare LF", "HTTP/2 preface"}


def cuts(reason: str) -> float:
    return REGISTRY.get_sample_value("media_cuts_total", {"reason": reason}) or 0.0


@pytest.fixture
async def good(node):
    await node.blobs.put("good.jpg", b"good")
    return node


@pytest.mark.parametrize("name", REFUSED)
async def test_a_doubtful_request_is_answered_and_ends_its_connection(good, name):
    status, data = REFUSED[name]
    client = await good.connect()
    # The valid request behind it must not be answered: its start is ambiguous.
    client.send(data if name in ENDLESS else data + GOOD)
    answer = await client.answer()
    assert answer.status == status
    assert answer.fields["connection"] == "close"
    assert answer.fields["content-type"] == "application/problem+json"
    problem = json.loads(answer.body)
    assert problem["status"] == status
    assert problem["code"].startswith("media.")
    assert await client.wait_closed() == b""
    assert (await (await good.connect()).ask("good.jpg")).body == b"good"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "TRACE", "PURGE"])
async def test_other_methods(good, method):
    client = await good.connect()
    answer = await client.ask("good.jpg", method=method, Range="bytes=0-1")
    assert (answer.status, answer.fields["allow"]) == (405, "GET, HEAD, OPTIONS")
    assert (await client.ask("good.jpg")).body == b"good"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /m/good.jpg HTTP/1.1\r\nHost: a\r\nContent-Length: 39\r\n\r\n", 400),
        (b"GET /m/good.jpg HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /m/good.jpg HTTP/1.1\r\nHost: a\r\nContent-Length: 39\r\n\r\n", 405),
        (b"POST /m/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 405),
    ],
)
async def test_a_body_is_never_taken_for_a_request(good, head, status):
    client = await good.connect()
    # Far more than one receive: unread bytes at a close would reset the connection.
    client.send(head + GOOD * 3000)
    answer = await client.answer()
    assert (answer.status, answer.fields["connection"]) == (status, "close")
    assert await client.wait_closed() == b""


@pytest.mark.parametrize("key", ["../secret", "%2e%2e/secret", "photos/%2e%2e%2fsecret", "a%00"])
async def test_a_path_out_of_the_store_names_nothing(good, tmp_path, key):
    (tmp_path / "secret").write_text("secret")
    answer = await (await good.connect()).ask(key)
    assert (answer.status, json.loads(answer.body)["code"]) == (404, "media.object_unknown")
    assert b"secret" not in answer.body


async def test_symbolic_links_and_what_is_no_file_are_not_served(good, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "a.jpg").write_text("secret")
    folder = good.blobs.folder
    (folder / "link.jpg").symlink_to(secret / "a.jpg")
    (folder / "inside.jpg").symlink_to(folder / "good.jpg")
    (folder / "linked").symlink_to(secret)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe.jpg")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket.jpg"))
    client = await good.connect()
    for key in ("link.jpg", "inside.jpg", "linked/a.jpg", "folder", "pipe.jpg", "socket.jpg"):
        assert (await client.ask(key)).status == 404, key
    assert (await client.ask("good.jpg/more")).status == 404
    assert (await client.ask("good.jpg")).body == b"good"
    listener.close()


async def test_a_store_that_is_gone_is_not_a_missing_object(good):
    good.blobs.folder.rename(good.blobs.folder.with_name("elsewhere"))
    client = await good.connect()
    answer = await client.ask("good.jpg")
    assert (answer.status, answer.fields["retry-after"]) == (503, "5")
    assert json.loads(answer.body)["code"] == "media.store_unavailable"
    good.blobs.folder.with_name("elsewhere").rename(good.blobs.folder)
    assert (await client.ask("good.jpg")).body == b"good"


async def test_a_file_cut_short_while_it_is_sent_never_ends_cleanly(node):
    size_bytes = 30_000_000
    await node.blobs.put("track.mp3", pattern(size_bytes))
    before = cuts("source")
    client = await node.connect(limit=1024)
    client.send(b"GET /m/track.mp3 HTTP/1.1\r\nHost: a\r\n\r\n")
    await wait_until(lambda: len(client.reader._buffer) > 1024)
    os.truncate(node.blobs.folder / "track.mp3", 100)
    with pytest.raises(ConnectionResetError):
        await client.answer()
    assert cuts("source") == before + 1


async def test_clients_killed_in_the_middle_leave_nothing_behind(node):
    key = await node.put(pattern(20_000_000))
    await (await node.connect()).ask(key, Range="bytes=0-0")
    before = open_files()
    victims = [await node.connect(limit=1024) for _ in range(20)]
    for client in victims:
        client.send(f"GET /m/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    for client in victims:
        await wait_until(lambda client=client: len(client.reader._buffer) > 1024)
        client.drop()
    await wait_until(lambda: open_files() <= before)
    assert (await (await node.connect()).ask(key, Range="bytes=5-8")).status == 206


async def test_slow_readers_do_not_slow_a_fast_one(node):
    data = pattern(8_000_000)
    key = await node.put(data)
    for _ in range(50):
        slow = await node.connect(limit=1024)
        slow.send(f"GET /m/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        await wait_until(lambda slow=slow: len(slow.reader._buffer) > 1024)
    fast = await node.connect()
    began_s = time.monotonic()
    for _ in range(5):
        assert (await fast.ask(key)).body == data
    assert time.monotonic() - began_s < DEADLINE_S


async def test_a_stalled_reader_is_cut_and_a_slow_one_is_not(blobs):
    async with serving(blobs, send_timeout_s=1.0, send_progress_bytes=1024) as node:
        data = pattern(8_000_000)
        key = await node.put(data)
        before = cuts("stalled") + cuts("client")
        stalled, slow = await node.connect(limit=1024), await node.connect(limit=32_768)
        for client in (stalled, slow):
            client.send(f"GET /m/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        got = bytearray()
        until_s = time.monotonic() + 2.5
        while time.monotonic() < until_s:
            got += await slow.reader.read(100_000)
            await pause(0.1)
        await wait_until(lambda: cuts("stalled") + cuts("client") > before)
        got += await slow.reader.readexactly(len(data) - (len(got) - got.index(b"\r\n\r\n") - 4))
        assert got.partition(b"\r\n\r\n")[2] == data
        with pytest.raises(ConnectionResetError):
            await stalled.wait_closed()


async def test_a_client_that_sips_is_cut(blobs):
    # It reads all the time, so only its measured progress shows the fault.
    loop = asyncio.get_running_loop()
    settings = {"send_timeout_s": 0.5, "send_progress_bytes": 2_000_000}
    async with serving(blobs, **settings) as node:
        key = await node.put(pattern(20_000_000))
        before = cuts("stalled")
        with socket.socket() as sipping:
            sipping.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
            sipping.setblocking(False)
            await loop.sock_connect(sipping, (node.host, node.port))
            head = f"GET /m/{key} HTTP/1.1\r\nHost: a\r\n\r\n"
            await loop.sock_sendall(sipping, head.encode())
            until_s = time.monotonic() + DEADLINE_S
            while cuts("stalled") == before and time.monotonic() < until_s:
                await loop.sock_recv(sipping, 8192)
                await pause(0.02)
        assert cuts("stalled") == before + 1


async def test_a_head_that_trickles_in_is_answered_408(blobs):
    async with serving(blobs, header_timeout_s=0.5) as node:
        client = await node.connect()
        waiting = asyncio.create_task(client.answer())
        # Each byte arrives within the timeout; the whole head does not.
        for byte in b"GET /m/good.jpg HTTP/1.1\r\nX: " + b"x" * 200:
            client.send(bytes([byte]))
            done, _ = await asyncio.wait([waiting], timeout=0.05)
            if done:
                break
        assert waiting.done()
        answer = await waiting
        assert (answer.status, json.loads(answer.body)["code"]) == (408, "media.head_timeout")
        client.writer.write_eof()
        assert await client.wait_closed() == b""


async def test_who_says_nothing_is_closed_without_an_answer(blobs):
    async with serving(blobs, header_timeout_s=0.3) as node:
        silent = await node.connect()
        assert await silent.wait_closed() == b""


async def test_who_asks_nothing_more_is_closed(blobs):
    async with serving(blobs, idle_timeout_s=0.3) as node:
        await node.blobs.put("good.jpg", b"good")
        idle = await node.connect()
        assert (await idle.ask("good.jpg")).status == 200
        assert await idle.wait_closed() == b""


async def test_one_client_too_many_is_told_so(blobs):
    async with serving(blobs, connections_max=3) as node:
        await node.blobs.put("good.jpg", b"good")
        held = [await node.connect() for _ in range(3)]
        for client in held:
            assert (await client.ask("good.jpg")).status == 200
        extra = await node.connect()
        answer = await extra.answer()
        assert (answer.status, answer.fields["retry-after"]) == (503, "1")
        assert json.loads(answer.body)["code"] == "media.too_many_connections"
        assert (await held[0].ask("good.jpg")).status == 200
        for client in (extra, held[1]):
            client.writer.close()
        async with asyncio.timeout(60):
            while (await _try(node)) != 200:
                continue


async def _try(node) -> int:
    client = await node.connect()
    client.send(GOOD)
    status = (await client.answer()).status
    client.drop()
    return status


async def test_a_flood_of_pipelined_requests_leaves_room_for_others(good):
    flood = await good.connect(limit=1024)
    flood.send(GOOD * 20_000)
    other = await good.connect()
    began_s = time.monotonic()
    for _ in range(20):
        assert (await other.ask("good.jpg")).status == 200
    assert time.monotonic() - began_s < DEADLINE_S
