"""A node of several processes: shared clients, restarts, ordered stops, one scrape for all."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest
from raw_clients import pattern, photo_key
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

pytestmark = pytest.mark.slow
wait_true = partial(wait_true_for, deadline_s=DEADLINE_S)
SIZE_BYTES = 2_000_000
PARTS = 'media_requests_total{status="206"}'


@dataclass
class Shop:
    """A folder store with one track, and the settings of a node over it."""

    blobs: Blobs
    settings: dict[str, str]


@asynccontextmanager
async def open_shop(folder):
    blobs = Blobs((folder / "store").as_uri())
    await blobs.put("tracks/a.mp3", content("a", 0, SIZE_BYTES))
    disks = f"{folder}/disk-a:16MiB, {folder}/disk-b:16MiB"
    yield Shop(
        blobs,
        {"blobs_url": blobs.folder.as_uri(), "media_workers": "2", "media_disks": disks},
    )
    await blobs.close()


@pytest.fixture
async def shop(tmp_path):
    """For tests that end their node."""
    async with open_shop(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
async def node(tmp_path_factory):
    """A node with two workers and two disks, for tests that leave it intact."""
    folder = tmp_path_factory.mktemp("shared")
    settings = {"media_connections_max": "6000"}
    async with open_shop(folder) as found, whole_node(folder, **found.settings, **settings) as node:
        yield node


async def read(node: WholeNode, first: int, last: int) -> bytes | None:
    reader = Reader(node.port)
    try:
        found = await reader.ask("tracks/a.mp3", first, last)
    finally:
        reader.drop()
    return found and found[2]


async def test_five_thousand_clients_are_held_in_two_kilobytes_each(node):
    count, head = 5000, b"GET /m/tracks/a.mp3 HTTP/1.1\r\nHost: a\r\nRange: bytes=0-9\r\n\r\n"
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
    await wait_true(lambda: node.series("media_connections") == 0, what="nobody left")


async def test_series_of_all_workers_are_one(node, tmp_path):
    places = [f'media_bytes_total{{source="{s}"}}' for s in ("memory", "disk", "origin")]
    parts, sent = node.series(PARTS), sum(map(node.series, places))
    readers = [Reader(node.port) for _ in range(12)]
    for reader in readers:
        await reader.ask("tracks/a.mp3", 0, 999)
    await wait_true(lambda: node.series(PARTS) == parts + 12, what="every answer counted")
    await wait_true(lambda: node.series("media_connections") == 12, what="clients")
    assert sum(map(node.series, places)) == sent + 12_000
    assert node.series('media_blocks_total{outcome="hit"}') >= 9
    media = Media(Blobs(tmp_path.as_uri()), MediaConfig(), folder=node.folder / "data/run/media")
    [asked] = await media.hottest.list()
    assert asked.key == "tracks/a.mp3"
    for reader in readers:
        reader.drop()
    await wait_true(lambda: node.series("media_connections") == 0, what="nobody left")
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
    data = content("a", 0, SIZE_BYTES)
    assert await read(node, 300_000, 1_700_000) == data[300_000:1_700_001]
    assert await read(node, 0, SIZE_BYTES) == data

    held = [Reader(node.port) for _ in range(16)]
    for reader in held:
        assert (await reader.ask("tracks/a.mp3", 0, 9))[2] == data[:10]
    victim = node.kill("worker")
    kept = [await reader.ask("tracks/a.mp3", 10, 19) for reader in held]
    # Only its own clients notice, and they are a part of all.
    assert 0 < kept.count(None) < len(held)
    assert all(found is None or found[2] == data[10:20] for found in kept)
    await wait_true(lambda: len(node.pids("worker")) == 2, what="the worker's successor")
    assert victim not in node.pids("worker")

    filler = node.kill("filler")
    assert await read(node, 500_000, 900_000) == data[500_000:900_001]
    await wait_true(lambda: node.pids("filler") not in ([], [filler]), what="the successor")
    for reader in held:
        assert (await reader.ask("tracks/a.mp3", 20, 29))[2] == data[20:30]
        reader.drop()
    died = {row["name"] for row in node.process.events("child_died")}
    assert len(died) == 2
    assert "filler" in died
    deaths = 'media_child_deaths_total{child="worker"}'
    await wait_true(lambda: node.series(deaths) == 1, what="the death counted")


async def test_blocks_of_an_earlier_life_are_proved_and_count_as_hits(shop, tmp_path):
    hits, misses = (f'media_blocks_total{{outcome="{outcome}"}}' for outcome in ("hit", "miss"))
    blocks = -(-SIZE_BYTES // BLOCK_BYTES)
    async with whole_node(tmp_path, **shop.settings) as node:
        assert await read(node, 0, SIZE_BYTES) == content("a", 0, SIZE_BYTES)
        await wait_true(lambda: node.series(misses) == blocks, what="all were filled")
        children = node.pids("worker") + node.pids("filler")
        node.process.signal(signal.SIGKILL)
        await wait_true(lambda: not any(map(is_alive, children)), what="no orphan")
        await asyncio.to_thread(node.start)
        assert await read(node, 0, SIZE_BYTES) == content("a", 0, SIZE_BYTES)
        await wait_true(lambda: node.series(hits) == blocks, what="all were there")
        assert node.series(misses) == blocks


@pytest.mark.parametrize(
    "how", ["cut", pytest.param("cut to nothing", marks=pytest.mark.soak), "removed"]
)
async def test_a_disk_whose_file_is_cut_while_it_serves_costs_misses(shop, tmp_path, how):
    names = [f"tracks/{number}.mp3" for number in range(8)]
    for name in names:
        await shop.blobs.put(name, content(name, 0, SIZE_BYTES))

    async def require_right(node: WholeNode) -> None:
        for name in names:
            reader = Reader(node.port)
            status, _, body = await reader.ask(name, 1000, SIZE_BYTES - 1)
            assert status == 206
            assert (body == content(name, 0, SIZE_BYTES)[1000:]) is True, name
            reader.drop()

    async with whole_node(tmp_path, **shop.settings) as node:
        await require_right(node)
        blocks = tmp_path / "disk-a" / "blocks"
        if how == "removed":
            blocks.unlink()
        else:
            os.truncate(blocks, 3_000_000 if how == "cut" else 0)
        for _ in range(3):
            await require_right(node)
        await wait_true(lambda: node.series('media_disks{state="out"}') == 1, what="it is out")
        await require_right(node)


async def test_an_object_that_was_replaced_is_read_anew_after_one_cut(shop, tmp_path):
    old, new = content("a", 0, SIZE_BYTES), content("b", 0, SIZE_BYTES + 1000)
    async with whole_node(tmp_path, **shop.settings | {"media_workers": "1"}) as node:
        assert await read(node, 0, 999) == old[:1000]
        await shop.blobs.put("tracks/a.mp3", new)
        found = [await read(node, 0, SIZE_BYTES + 999) for _ in range(3)]
        # A body that began with the old version's blocks cannot be completed correctly.
        assert found[0] in (None, new)
        assert found[1:] == [new, new]


async def test_a_stop_lets_answers_end_and_leaves_no_process(shop, tmp_path):
    data = pattern(20_000_000)
    key = photo_key(data)
    await shop.blobs.put(key, data)
    async with whole_node(tmp_path, **shop.settings) as node:
        family = node.process.family()
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port, limit=1024)
        writer.write(f"GET /m/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        node.process.signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await reader.readexactly(len(data)) == data
            assert await reader.read() == b""
        writer.close()
        assert await asyncio.to_thread(node.process.wait_exit) == 0
        assert not any(is_alive(pid) for pid in family)
        assert node.process.events("children_killed_at_stop") == []


async def test_children_end_with_a_parent_that_is_killed(shop, tmp_path):
    async with whole_node(tmp_path, **shop.settings) as node:
        children = node.pids("worker") + node.pids("filler")
        assert len(children) == 3
        node.process.signal(signal.SIGKILL)
        await wait_true(lambda: not any(map(is_alive, children)), what="no orphan")


async def test_a_node_that_cannot_start_says_why_and_ends(tmp_path):
    env = {
        "HEADRACE_MEDIA_LISTEN": f"127.0.0.1:{free_port()}",
        "HEADRACE_MEDIA_LISTEN_TLS": f"127.0.0.1:{free_port()}",
        "HEADRACE_MEDIA_TLS_CERT": str(tmp_path / "none.pem"),
        "HEADRACE_BLOBS_URL": tmp_path.as_uri(),
        "HEADRACE_MEDIA_WORKERS": "2",
    }
    node = HeadraceProcess(["media", "serve"], folder=tmp_path / "second", env=env)
    assert await asyncio.to_thread(node.wait_exit, deadline_s=DEADLINE_S) != 0
    assert "none.pem" in node.err
