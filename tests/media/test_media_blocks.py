"""A node with disks: visits of blocks, one read per block, bounded demand, disks that rot."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket

import pytest
from node_kinds import BLOCKS, BYPASS, bucket_store, disk_in
from raw_clients import SECRET, SMALL_BYTES, Served, head_of, pattern, serving
from tests.kit.waiting import wait_true

from headrace.engines.blobs import Blobs
from headrace.kernel.signing import derive_key
from headrace.media.cache import origin
from headrace.media.cache.frame_table import MARKS_MAX
from headrace.media.cache.layout import DATA_AT
from headrace.media.cache.linux import is_in_memory
from headrace.media.cluster.hop import KEY_USE, AnswerSpan, HopSigner, covered_text
from headrace.media.model import BLOCK_BYTES, DiskConfig

KEY, BLOCKS_COUNT = "tracks/a.mp3", 3
SIZE_BYTES = BLOCKS_COUNT * BLOCK_BYTES
DATA = pattern(SIZE_BYTES)


@pytest.fixture
async def cached(tmp_path):
    async with BLOCKS.start(tmp_path) as node:
        yield node


def disk_of(node: Served):
    """The newest disk of the filler."""
    return node.fillers[0]._disks.opened[-1]


def stored(node: Served) -> list[int]:
    """The frames that hold a block."""
    table = disk_of(node).table
    return [frame for frame in range(disk_of(node).frames) if table.entry(frame).tag]


async def read(node: Served, key: str, **fields: str):
    """The answer to one request on its own connection with a small buffer."""
    client = await node.connect(buffer_bytes=65_536)
    try:
        return await client.ask(key, **fields)
    finally:
        client.drop()


async def test_an_answer_is_one_visit_of_a_block_and_a_fill_is_none(cached):
    await cached.blobs.put(KEY, DATA)
    client = await cached.connect()
    heads = [await client.ask(KEY, method="HEAD") for _ in range(4)]
    unchanged = await client.ask(KEY, If_None_Match=heads[0].fields["etag"])
    found = {one.fields["cache-status"] for one in (*heads, unchanged)}
    assert found == {"headrace; fwd=miss"}, "nothing is stored yet"
    seen = []
    for _ in range(4):
        assert ((await read(cached, KEY)).body == DATA) is True
        await wait_true(lambda: len(stored(cached)) == BLOCKS_COUNT, what="all blocks stored")
        seen.append([disk_of(cached).table.visited[frame] for frame in stored(cached)])
    assert seen == [[marks] * BLOCKS_COUNT for marks in (0, 1, MARKS_MAX, MARKS_MAX)]
    assert (await client.ask(KEY, method="HEAD")).fields["cache-status"] == "headrace; hit"


async def test_requests_behind_a_body_that_changes_its_source_are_answered(cached):
    """The native plane begins a body of which only the first block is stored."""
    await cached.blobs.put(KEY, DATA)
    client = await cached.connect()
    for _ in range(2):
        await client.ask(KEY, Range="bytes=0-9")
    client.send(head_of(KEY) + head_of(KEY, fields={"Range": "bytes=5-9"}))
    assert ((await client.answer()).body == DATA) is True
    assert (await client.answer()).body == DATA[5:10]


async def test_a_herd_of_a_cold_track_reads_each_block_once(tmp_path):
    async with bucket_store() as (blobs, bucket):
        data = bucket.objects[KEY] = pattern(6 * BLOCK_BYTES - 1000)
        disks = disk_in(tmp_path / "disk")
        async with serving(blobs, run=tmp_path / "run", disks=disks) as node:

            async def listen(number: int) -> None:
                client = await node.connect()
                for block in (number % 6, (number + 1) % 6):
                    first, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
                    found = await client.ask(KEY, Range=f"bytes={first}-{end - 1}")
                    assert (found.body == data[first:end], found.status) == (True, 206)
                client.drop()

            await asyncio.gather(*(listen(n) for n in range(200)))
            assert set(bucket.reads.values()) == {1}
            assert len(bucket.reads) == 6
            assert bucket.heads[KEY] <= 1


@pytest.mark.parametrize("has_disks", [True, False])
async def test_a_client_that_stops_reading_makes_the_node_read_no_further(tmp_path, has_disks):
    """At most two blocks are read ahead of what the kernel took for the client."""
    async with bucket_store() as (blobs, bucket):
        data = bucket.objects[KEY] = pattern(80 * BLOCK_BYTES)
        disks = disk_in(tmp_path / "disk") if has_disks else ()
        async with serving(blobs, run=tmp_path / "run", disks=disks) as node:
            before = node.series("media_bytes_total")
            client = await node.connect(buffer_bytes=SMALL_BYTES)
            client.send(head_of(KEY))
            await client.reader.readuntil(b"\r\n\r\n")
            seen: list[int] = []

            def is_still() -> bool:
                seen.append(sum(bucket.reads.values()))
                return len(seen) > 30 and len(set(seen[-20:])) == 1

            await wait_true(is_still, what="no more reads")
            sent = node.series("media_bytes_total") - before
            assert seen[-1] * BLOCK_BYTES - sent <= 3 * BLOCK_BYTES
            assert seen[-1] < 80 / 2
            got, is_cut = await client.read_up_to(len(data))
            assert (is_cut, got == data) == (False, True)


async def require_unavailable(node: Served) -> None:
    answer = await (await node.connect()).ask("tracks/other.mp3")
    assert (answer.status, answer.fields["retry-after"]) == (503, "5")
    assert answer.code == "media.store_unavailable"


async def test_a_remote_store_that_goes_away_cuts_bodies(tmp_path):
    async with BYPASS.start(tmp_path, origin_timeout_s=0.3) as node:
        node.bucket.objects[KEY] = data = pattern(20_000_000)
        client = await node.connect(buffer_bytes=SMALL_BYTES)
        client.send(head_of(KEY))
        await client.reader.readuntil(b"\r\n\r\n")
        await node.bucket.stop()
        got, is_cut = await client.read_up_to(len(data))
        assert (is_cut, data.startswith(got)) == (True, True)
        await require_unavailable(node)


async def test_a_remote_store_that_does_not_answer_is_503():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with (
            bucket_store(AWS_ENDPOINT=endpoint) as (blobs, _),
            serving(blobs, origin_timeout_s=0.3) as node,
        ):
            await require_unavailable(node)


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_stored_objects_are_served_without_the_store_after_their_shapes_ended(
    cached, tmp_path, monkeypatch, how
):
    monkeypatch.setattr(origin, "SHAPE_KEPT_S", 0.0)
    monkeypatch.setattr(origin, "STALE_S", 0.0)
    await cached.blobs.put(KEY, DATA)
    await cached.blobs.put("tracks/b.mp3", DATA)
    await read(cached, KEY)
    await wait_true(lambda: len(stored(cached)) == BLOCKS_COUNT, what="all blocks stored")
    if how == "fails":
        away = tmp_path / "away"
        cached.blobs.folder.rename(away)
    else:
        hanging, look = asyncio.Event(), Blobs.info

        async def hang(*arguments):
            await hanging.wait()
            return await look(*arguments)

        monkeypatch.setattr(Blobs, "info", hang)
        monkeypatch.setattr(origin, "STALE_WAIT_S", 0.05)
    for _ in range(3):
        answer = await read(cached, KEY)
        assert (answer.status, answer.body) == (200, DATA)
    if how == "fails":
        assert (await read(cached, "tracks/b.mp3")).status == 503, "it was never read"
        away.rename(cached.blobs.folder)
    else:
        hanging.set()
    await cached.blobs.put(KEY, DATA[::-1])
    await wait_true(lambda: body_is(cached, DATA[::-1]), what="the new version is served")


async def body_is(node: Served, data: bytes) -> bool:
    return (await read(node, KEY)).body == data


async def test_an_object_replaced_before_its_answer_is_read_again_once(cached):
    """After one cut at most, without a purge: a body of the former blocks cannot be completed."""
    old, new = pattern(SIZE_BYTES, 1), pattern(SIZE_BYTES + 1000, 2)
    await cached.blobs.put(KEY, old)
    client = await cached.connect()
    assert (await client.ask(KEY, Range="bytes=0-999")).body == old[:1000]
    await cached.blobs.put(KEY, new)
    client = await cached.connect()
    client.send(head_of(KEY, fields={"Range": "bytes=0-"}))
    head = await client.reader.readuntil(b"\r\n\r\n")
    body, is_cut = await client.read_up_to(
        int(head.lower().split(b"content-length: ")[1].split()[0])
    )
    assert (is_cut and old.startswith(body)) or body == new
    for _ in range(2):
        assert ((await read(cached, KEY)).body == new) is True


# Requests of other nodes


async def test_each_hop_is_proven_however_often_its_head_was_seen(tmp_path):
    """Each answer has its own signature; a replay and a changed request are refused."""
    signer = HopSigner([derive_key(SECRET, KEY_USE)], "a")
    line, settings = signer.sequence(), {"node": "b", "replicas": 1}
    async with BLOCKS.start(tmp_path, **settings) as node:
        await node.blobs.put(KEY, DATA)
        client = await node.connect()
        assert ((await client.ask(KEY)).body == DATA) is True
        etag = (await client.ask(KEY, Range="bytes=0-9")).fields["etag"]

        async def hop(span: str, *, if_match: str = etag, to: str = "b", generation: int = 0):
            value, mac = line.sign(to, covered_text("GET", f"/m/{KEY}", span, if_match), generation)
            fields = {"If_Match": if_match, "Range": span, "X_Headrace_Hop": value}
            data = head_of(KEY, fields=fields)
            client.send(data)
            return data, mac, await client.answer()

        for n in range(12):
            first, last = n * 1000, n * 1000 + (70_000 if n % 2 else 5_000)
            data, mac, answer = await hop(f"bytes={first}-{last}")
            assert (answer.status, answer.body == DATA[first : last + 1]) == (206, True)
            span = AnswerSpan(etag.strip('"'), first, last + 1 - first)
            assert signer.is_authentic(mac, answer.fields["x-headrace-reply"], span)
            for refused in (data, data.replace(KEY.encode(), b"tracks/b.mp3")):
                client.send(refused)
                assert (await client.answer()).code == "media.hop_refused"
        assert (await hop("bytes=0-9", to="c"))[2].status == 403
        assert (await hop("bytes=0-9", generation=7))[2].status == 409
        assert (await hop("bytes=0-9", if_match='"other"'))[2].status == 412
        assert (await hop("bytes=0-9"))[2].body == DATA[:10]


# Disks that rot

TRACKS = [f"tracks/{number}.mp3" for number in range(8)]
CONTENT = {key: pattern(SIZE_BYTES, seed) for seed, key in enumerate(TRACKS)}


async def rot(node: Served, frames: list[int]) -> None:
    """Change bytes of these frames on the disk and drop the disk's page cache."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page.write(os.urandom(mmap.PAGESIZE))
    descriptor = os.open(disk_of(node).config.path / "blocks", os.O_RDWR)
    try:
        for frame in frames:
            os.pwrite(descriptor, page, DATA_AT + frame * BLOCK_BYTES + 25 * mmap.PAGESIZE)
        os.fdatasync(descriptor)
        await wait_true(lambda: all(is_dropped(descriptor, f) for f in frames), what="dropped")
    finally:
        os.close(descriptor)


def is_dropped(descriptor: int, frame: int) -> bool:
    """Whether no page of a frame is in memory; a socket may hold its pages for a moment."""
    start = DATA_AT + frame * BLOCK_BYTES
    os.posix_fadvise(descriptor, start, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
    pages = range(start, start + BLOCK_BYTES, mmap.PAGESIZE)
    return not any(is_in_memory(descriptor, page, mmap.PAGESIZE) for page in pages)


async def read_all(node: Served) -> list[str]:
    """Read every track, check each byte, return the Cache-Status of each."""
    answers = [(key, await read(node, key)) for key in TRACKS]
    assert [key for key, answer in answers if answer.body != CONTENT[key]] == []
    return [answer.fields["cache-status"] for _, answer in answers]


async def test_a_disk_that_rots_sends_no_wrong_byte_and_is_retired(cached, tmp_path):
    for key, data in CONTENT.items():
        await cached.blobs.put(key, data)
    await read_all(cached)
    await wait_true(lambda: len(stored(cached)) == len(TRACKS) * BLOCKS_COUNT, what="all stored")
    assert set(await read_all(cached)) == {"headrace; hit"}

    await rot(cached, stored(cached)[:4])
    await read_all(cached)
    [disk] = await cached.media.disks.list()
    assert (disk.state, disk.rotten) == ("in use", 4)
    assert set(await read_all(cached)) == {"headrace; hit"}, "they were read and stored again"

    await rot(cached, stored(cached)[-4:])
    spans = [(key, first) for key in TRACKS for first in (0, 90_000, 600_000) for _ in range(3)]
    answers = await asyncio.gather(
        *(read(cached, key, Range=f"bytes={first}-{first + 99_999}") for key, first in spans)
    )
    for (key, first), answer in zip(spans, answers, strict=True):
        assert (answer.body == CONTENT[key][first : first + 100_000]) is True

    await rot(cached, stored(cached))
    away = tmp_path / "away"
    cached.blobs.folder.rename(away)
    assert (await read(cached, TRACKS[0], Range="bytes=0-262143")).status == 503
    away.rename(cached.blobs.folder)
    await read_all(cached)
    await wait_true(lambda: disk_of(cached).state.value == "out", what="retired")
    [retired] = await cached.media.disks.list()
    assert "10 blocks" in retired.fault
    await read_all(cached)
    added = await cached.media.disks.add(retired.path, retired.size_bytes)
    assert (added.state, added.fault, added.rotten) == ("in use", "", 0)
    await read_all(cached)


@pytest.mark.parametrize("how", ["cut", "cut to nothing", "removed"])
async def test_a_disk_file_that_is_cut_costs_misses(tmp_path, how):
    """It is taken out of use; the other disk and the store have every byte."""
    disks = tuple(DiskConfig(tmp_path / name, 20 * 2**20) for name in "ab")
    async with BLOCKS.start(tmp_path, disks=disks) as node:
        for key, data in CONTENT.items():
            await node.blobs.put(key, data)
        await read_all(node)
        blocks = tmp_path / "a" / "blocks"
        if how == "removed":
            blocks.unlink()
        else:
            os.truncate(blocks, 3_000_000 if how == "cut" else 0)
        for _ in range(3):
            await read_all(node)
        cut = node.fillers[0]._disks.opened[0]
        await wait_true(lambda: cut.state.value == "out", what="it is out")
        await read_all(node)


@pytest.mark.parametrize("plane", ["auto", "python"])
async def test_an_answer_continues_where_the_file_of_a_disk_ends(tmp_path, plane):
    """A short sendfile there is followed by no event of the socket, which has room."""
    async with BLOCKS.start(tmp_path, data_plane=plane) as node:
        await node.blobs.put(KEY, DATA)
        await read(node, KEY)
        await wait_true(lambda: len(stored(node)) == BLOCKS_COUNT, what="all blocks stored")
        assert (await read(node, KEY)).fields["cache-status"] == "headrace; hit"
        # Pages that wait in a socket cannot be split, so they stay in memory as a whole.
        for start in range(0, SIZE_BYTES, BLOCK_BYTES):
            slow = await node.connect(buffer_bytes=SMALL_BYTES)
            slow.send(head_of(KEY, fields={"Range": f"bytes={start}-"}))
            await slow.wait_begun()
        end = DATA_AT + stored(node)[-1] * BLOCK_BYTES + 116_416
        os.truncate(disk_of(node).config.path / "blocks", end)
        client = await node.connect()
        assert (await client.ask(KEY)).body == DATA
