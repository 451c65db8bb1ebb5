"""A node of several processes: shared clients, deaths, restarts, ordered stops, one scrape."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import ssl
from functools import partial
from types import SimpleNamespace

import pytest
from tests.kit.certificates import client_context, self_signed_files
from tests.kit.processes import HeadraceProcess, is_alive
from tests.kit.waiting import wait_true as wait_true_for
from tests.kit.whole_nodes import (
    DEADLINE_S,
    Reader,
    WholeNode,
    content,
    flood,
    free_port,
    resident_kib,
    whole_node,
)

from headrace.engines.blobs import Blobs
from headrace.media import Media, MediaConfig
from headrace.media.model import BLOCK_BYTES
from headrace.media.worker.supervisor import Supervisor

pytestmark = pytest.mark.slow
wait_true = partial(wait_true_for, deadline_s=DEADLINE_S)
KEY, SIZE_BYTES = "tracks/a.mp3", 2_000_000
DATA = content("a", 0, SIZE_BYTES)
LONG_KEY, LONG = "tracks/long.mp3", content("long", 0, 16_000_000)
BLOCKS = -(-SIZE_BYTES // BLOCK_BYTES)
PARTS = 'media_requests_total{status="206"}'


async def stored(folder) -> dict[str, str]:
    """A folder store with two tracks, and the settings of a node over it."""
    blobs = Blobs((folder / "store").as_uri())
    await blobs.put(KEY, DATA)
    await blobs.put(LONG_KEY, LONG)
    await blobs.close()
    disks = f"{folder}/disk-a:16MiB, {folder}/disk-b:16MiB"
    return {"blobs_url": blobs.folder.as_uri(), "media_workers": "2", "media_disks": disks}


@pytest.fixture(scope="module")
async def node(tmp_path_factory):
    """A node with two workers and two disks, for tests that leave it intact."""
    folder = tmp_path_factory.mktemp("shared")
    settings = {**await stored(folder), "media_connections_max": "6000"}
    cert, key = self_signed_files(folder)
    tls = {"media_tls_cert": cert, "media_tls_key": key}
    tls_port = free_port()
    tls["media_listen_tls"] = f"127.0.0.1:{tls_port}"
    async with whole_node(folder, **settings, **tls) as node:
        node.tls_port, node.tls = tls_port, client_context(cert)
        yield node


async def read(node: WholeNode, first: int, last: int) -> bytes | None:
    reader = Reader(node.port)
    try:
        found = await reader.ask(KEY, first, last)
    finally:
        reader.drop()
    return found and found[2]


def session_of(node: WholeNode, session: ssl.SSLSession | None = None) -> ssl.SSLSession:
    """A session with the node, which must accept `session`."""
    with (
        socket.create_connection(("127.0.0.1", node.tls_port), timeout=60) as plain,
        node.tls.wrap_socket(plain, server_hostname="media.test", session=session) as client,
    ):
        client.sendall(f"GET /m/{KEY} HTTP/1.1\r\nHost: a\r\nRange: bytes=0-9\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 206"
        assert session is None or client.session_reused
        return client.session


async def test_clients_are_held_in_two_kilobytes_each(node):
    count, head = 2500, b"GET /m/tracks/a.mp3 HTTP/1.1\r\nHost: a\r\nRange: bytes=0-9\r\n\r\n"
    parts = node.series(PARTS)
    for client in flood(node.port, 200, head):
        client.recv(1000)
        client.close()
    before = sum(map(resident_kib, node.pids("worker")))
    clients = await asyncio.to_thread(flood, node.port, count, head)
    answers = [client.recv(1000) for client in clients]
    assert all(answer.startswith(b"HTTP/1.1 206") for answer in answers)
    held_kib = sum(map(resident_kib, node.pids("worker"))) - before
    assert held_kib / count <= 2.0
    clients[0].sendall(head)
    assert clients[0].recv(1000).startswith(b"HTTP/1.1 206")
    for client in clients:
        client.close()
    await wait_true(lambda: node.series(PARTS) == parts + 200 + count + 1, what="all counted")
    await wait_true(lambda: node.series("media_connections") == 0, what="no client left")


async def test_series_of_all_workers_are_one(node, tmp_path):
    places = [f'media_bytes_total{{source="{s}"}}' for s in ("memory", "disk", "origin")]
    parts, sent = node.series(PARTS), sum(map(node.series, places))
    readers = [Reader(node.port) for _ in range(12)]
    for reader in readers:
        await reader.ask(KEY, 0, 999)
    await wait_true(lambda: node.series(PARTS) == parts + 12, what="every answer counted")
    await wait_true(lambda: node.series("media_connections") == 12, what="clients")
    assert sum(map(node.series, places)) == sent + 12_000
    assert node.series('media_blocks_total{outcome="hit"}') >= 9
    media = Media(Blobs(tmp_path.as_uri()), MediaConfig(), folder=node.folder / "data/run/media")

    async def sampled():
        for _ in range(32):
            await readers[0].ask(KEY, 0, 9)
        return await media.hottest.list()

    [found] = await wait_true(sampled, what="a sampled request")
    assert found.key == KEY
    for reader in readers:
        reader.drop()
    await wait_true(lambda: node.series("media_connections") == 0, what="no client left")
    assert node.series("media_stage_seconds_count") > 0


async def test_a_second_node_on_the_same_address_is_refused(node, tmp_path):
    env = {
        "HEADRACE_MEDIA_LISTEN": f"127.0.0.1:{node.port}",
        "HEADRACE_BLOBS_URL": tmp_path.as_uri(),
    }
    second = HeadraceProcess(["media", "serve"], folder=tmp_path / "second", env=env)
    assert await asyncio.to_thread(second.wait_exit, deadline_s=DEADLINE_S) == 5
    assert "media.listen_failed" in second.err


async def test_a_cached_node_serves_over_the_death_of_each_of_its_processes(node):
    assert await read(node, 300_000, 1_700_000) == DATA[300_000:1_700_001]
    assert await read(node, 0, SIZE_BYTES) == DATA
    options = {"ssl": node.tls, "server_hostname": "media.test"}
    held = [Reader(node.port) for _ in range(16)]
    held += [Reader(node.tls_port, **options) for _ in range(16)]
    for reader in held:
        assert (await reader.ask(KEY, 0, 9))[2] == DATA[:10]
    session = await asyncio.to_thread(session_of, node)
    # As a fault of the native data plane would.
    victim = node.kill("worker", by=signal.SIGSEGV)
    # Its native thread answers until then.
    await wait_true(lambda: not is_alive(victim), what="the worker's death")
    kept = [await reader.ask(KEY, 10, 19) for reader in held]
    # Only its own clients notice, and they are a part of all.
    for some in (kept[:16], kept[16:]):
        assert 0 < some.count(None) < len(some)
    assert all(found is None or found[2] == DATA[10:20] for found in kept)
    await wait_true(lambda: len(node.pids("worker")) == 2, what="the worker's successor")
    assert victim not in node.pids("worker")
    # By every worker, also by the successor.
    for _ in range(8):
        assert await asyncio.to_thread(session_of, node, session)
    filler = node.kill("filler")
    assert await read(node, 500_000, 900_000) == DATA[500_000:900_001]
    await wait_true(lambda: node.pids("filler") not in ([], [filler]), what="the successor")
    for reader in held:
        assert (await reader.ask(KEY, 20, 29))[2] == DATA[20:30]
        reader.drop()
    died = {row["name"] for row in node.process.events("child_died")}
    assert (len(died), "filler" in died) == (2, True)
    deaths = 'media_child_deaths_total{child="worker"}'
    await wait_true(lambda: node.series(deaths) == 1, what="the death counted")


async def test_a_node_stops_in_order_dies_without_orphans_and_finds_its_blocks(tmp_path):
    """A stop ends its answers; after a kill of the whole node its blocks count as hits."""
    hits, misses = (f'media_blocks_total{{outcome="{outcome}"}}' for outcome in ("hit", "miss"))
    async with whole_node(tmp_path, **await stored(tmp_path)) as node:
        family = node.process.family()
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port, limit=1024)
        writer.write(f"GET /m/{LONG_KEY} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        node.process.signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert (await reader.readexactly(len(LONG)) == LONG) is True
            assert await reader.read() == b""
        writer.close()
        assert await asyncio.to_thread(node.process.wait_exit) == 0
        assert not any(is_alive(pid) for pid in family)
        assert node.process.events("children_killed_at_stop") == []

        await asyncio.to_thread(node.start)
        assert await read(node, 0, SIZE_BYTES) == DATA
        await wait_true(lambda: node.series(misses) + node.series(hits) >= BLOCKS, what="filled")
        children = node.pids("worker") + node.pids("filler")
        assert len(children) == 3
        # Changed sets of the index are on the disk within a tenth of a second.
        await wait_true(lambda: read_again(node), what="all blocks are hits")
        node.process.signal(signal.SIGKILL)
        await wait_true(lambda: not any(map(is_alive, children)), what="no orphan")
        await asyncio.to_thread(node.start)
        assert await read(node, 0, SIZE_BYTES) == DATA
        await wait_true(lambda: node.series(hits) + node.series(misses) >= BLOCKS, what="counted")
        assert node.series(hits) >= BLOCKS - 1


async def read_again(node: WholeNode) -> bool:
    """Whether each block is a hit now."""
    reader = Reader(node.port)
    for block in range(BLOCKS):
        await reader.ask(KEY, block * BLOCK_BYTES, block * BLOCK_BYTES + 9)
    reader.drop()
    return node.series('media_blocks_total{outcome="hit"}') >= BLOCKS


async def test_a_stop_before_the_children_are_ready_leaves_no_unread_error():
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._children = [SimpleNamespace(ready=asyncio.Event()) for _ in range(2)]
    unread, stop = [], asyncio.Event()
    stop.set()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, found: unread.append(found["message"]))
    stopping = loop.create_task(stop.wait())
    await stopping
    assert not await supervisor._wait_ready([stopping])
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert unread == []
