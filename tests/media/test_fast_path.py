"""Known heads on the fast path: same answers and bytes as on the full path."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from raw_clients import Answer, Client, pause
from tests.kit.waiting import wait_true
from tests.kit.whole_nodes import SECRET, WholeNode, content, whole_node

from headrace.engines.blobs import Blobs
from headrace.kernel.signing import derive_key
from headrace.media import signing
from headrace.media.cluster.hop import KEY_USE, AnswerSpan, HopSigner, covered_text
from headrace.media.cluster.purge import Purges
from headrace.media.model import BLOCK_BYTES
from headrace.media.tracing import Traces

pytestmark = pytest.mark.slow
KEY, SIZE_BYTES = "tracks/a.mp3", 3 * BLOCK_BYTES + 1234
DATA = content("a", 0, SIZE_BYTES)
SEEN = 4
"""Repetitions: the first parses the head, the second caches it, later ones use it."""


@pytest.fixture(scope="module")
async def blobs(tmp_path_factory):
    blobs = Blobs((tmp_path_factory.mktemp("short") / "store").as_uri())
    await blobs.put(KEY, DATA)
    yield blobs
    await blobs.close()


@pytest.fixture(scope="module")
async def node(blobs, tmp_path_factory):
    """One worker with a disk that has every block of the track."""
    folder = tmp_path_factory.mktemp("node")
    settings = {"blobs_url": blobs.folder.as_uri(), "media_workers": "1"}
    async with whole_node(folder, media_disks=f"{folder}/disk:32MiB", **settings) as node:
        client = await connect(node)
        assert (await client.ask(KEY)).body == DATA
        client.drop()
        yield node


async def connect(node: WholeNode, **options: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", node.port, **options))


def told(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    """All of an answer except its date."""
    fields = {name: value for name, value in answer.fields.items() if name != "date"}
    return answer.status, fields, answer.body


LAST = SIZE_BYTES - 1
WHOLE = (200, DATA)
CASES = {
    "no range": ({}, *WHOLE),
    "a part": ({"Range": "bytes=10-19"}, 206, DATA[10:20]),
    "one byte": ({"Range": "bytes=0-0"}, 206, DATA[:1]),
    "over a block's end": (
        {"Range": f"bytes={BLOCK_BYTES - 5}-{BLOCK_BYTES + 5}"},
        206,
        DATA[BLOCK_BYTES - 5 : BLOCK_BYTES + 6],
    ),
    "a block": (
        {"Range": f"bytes={BLOCK_BYTES}-{2 * BLOCK_BYTES - 1}"},
        206,
        DATA[BLOCK_BYTES : 2 * BLOCK_BYTES],
    ),
    "to the end": ({"Range": f"bytes={BLOCK_BYTES + 7}-"}, 206, DATA[BLOCK_BYTES + 7 :]),
    "past the end": ({"Range": f"bytes={LAST}-{LAST + 100}"}, 206, DATA[LAST:]),
    "the end alone": ({"Range": "bytes=-77"}, 206, DATA[-77:]),
    "beyond": ({"Range": f"bytes={SIZE_BYTES}-"}, 416, None),
    "far beyond": ({"Range": "bytes=999999999999999999-"}, 416, None),
    "backwards": ({"Range": "bytes=9-3"}, *WHOLE),
    "several": ({"Range": "bytes=0-1,4-5"}, *WHOLE),
    "another unit": ({"Range": "items=0-1"}, *WHOLE),
    "small letters": ({"range": "bytes=10-19"}, 206, DATA[10:20]),
    "another version": ({"Range": "bytes=0-1", "If_Range": '"other"'}, *WHOLE),
    "unchanged since": ({"If_Modified_Since": "Fri, 01 Jan 2100 00:00:00 GMT"}, 304, b""),
    "another version is requested": ({"If_Match": '"other"'}, 412, None),
    "a trace": ({"Range": "bytes=3-9", "baggage": "user=42"}, 206, DATA[3:10]),
    "last request": ({"Range": "bytes=0-4", "Connection": "close"}, 206, DATA[:5]),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_repeated_head_is_answered_as_its_first(node, case):
    fields, status, body = CASES[case]
    answers = []
    client = await connect(node)
    for _ in range(SEEN):
        answers.append(told(await client.ask(KEY, X_Case=case, **fields)))
        if fields.get("Connection") == "close":
            client = await connect(node)
    client.drop()
    assert answers[0][0] == status
    assert body is None or (answers[0][2] == body) is True
    for other in answers[1:]:
        assert other[:2] == answers[0][:2]
        assert (other[2] == answers[0][2]) is True


async def test_two_range_lines_are_refused_however_often_the_head_was_seen(node):
    client = await connect(node)
    for _ in range(SEEN):
        assert (await client.ask(KEY, X_Twice="1", Range="bytes=0-9")).status == 206
    twice = f"GET /m/{KEY} HTTP/1.1\r\nHost: media.test\r\nX-Twice: 1\r\n"
    client.send(f"{twice}Range: bytes=0-9\r\nRange: bytes=0-9\r\n\r\n".encode())
    assert (await client.answer()).status == 400


async def test_repeated_heads_at_once_and_in_pieces(node):
    """Pipelined, split and joined heads keep their order and meaning."""
    client = await connect(node)
    spans = [(n * 100_003 % SIZE_BYTES, n * 100_003 % SIZE_BYTES + 50_000) for n in range(12)]
    heads = [
        f"GET /m/{KEY} HTTP/1.1\r\nHost: media.test\r\nRange: bytes={a}-{b}\r\n\r\n".encode()
        for a, b in spans
    ]
    for head, (start, last) in zip(heads, spans, strict=True):
        client.send(head)
        assert ((await client.answer()).body == DATA[start : last + 1]) is True
    client.send(b"".join(heads[:5]) + heads[5][:30])
    for start, last in spans[:5]:
        assert ((await client.answer()).body == DATA[start : last + 1]) is True
    client.send(heads[5][30:] + heads[6])
    for start, last in spans[5:7]:
        assert ((await client.answer()).body == DATA[start : last + 1]) is True


async def test_what_a_socket_does_not_take_at_once_follows(node):
    """A client with a small window receives an answer over many epochs."""
    client = await connect(node, limit=4096)
    for _ in range(SEEN):
        assert ((await client.ask(KEY, Range="bytes=5-")).body == DATA[5:]) is True


async def test_small_answers_that_a_full_socket_takes_in_part_follow(node):
    """One head at a time without reading: at some answer the socket is full in the middle."""
    client = await connect(node)
    for _ in range(SEEN):
        await client.ask(KEY, Range="bytes=0-9")
    client.drop()
    with socket.create_connection(("127.0.0.1", node.port)) as slow:
        spans = [(n * 10_007, n * 10_007 + 30_000) for n in range(30)]
        for first, last in spans:
            head = (
                f"GET /m/{KEY} HTTP/1.1\r\nHost: media.test\r\nRange: bytes={first}-{last}\r\n\r\n"
            )
            slow.sendall(head.encode())
            await pause(0.005)
        answers = slow.makefile("rb")
        for first, last in spans:
            assert (await asyncio.to_thread(read_body, answers) == DATA[first : last + 1]) is True


def read_body(answers) -> bytes:
    """The body of the next answer."""
    length = 0
    while (line := answers.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b": ")
        length = int(value) if name == b"Content-Length" else length
    return answers.read(length)


async def test_every_answer_is_counted(blobs, tmp_path):
    settings = {"blobs_url": blobs.folder.as_uri(), "media_workers": "1"}
    async with whole_node(tmp_path, media_disks=f"{tmp_path}/disk:32MiB", **settings) as node:
        client = await connect(node)
        for n in range(20):
            await client.ask(KEY, Range=f"bytes={n}-{n + 999}")
        across = f"bytes={BLOCK_BYTES - 500}-{BLOCK_BYTES + 499}"
        for _ in range(2):
            await client.ask(KEY, Range=across)
        sources = [f'media_bytes_total{{source="{s}"}}' for s in ("memory", "disk", "origin")]
        blocks = [f'media_blocks_total{{outcome="{outcome}"}}' for outcome in ("hit", "miss")]

        def is_counted() -> bool:
            parts, hits, misses = map(node.series, ['media_requests_total{status="206"}', *blocks])
            return (parts, hits + misses, sum(map(node.series, sources))) == (22, 24, 22_000)

        await wait_true(is_counted, what="all are counted")
        firsts, answers = (
            node.series("media_ttfb_seconds_count"),
            node.series("media_requests_total"),
        )
        assert firsts == answers


async def test_a_purge_ends_the_way(node, blobs):
    old, new = content("old", 0, 5000), content("new", 0, 6000)
    await blobs.put("tracks/changing.mp3", old)
    client = await connect(node)
    for _ in range(SEEN):
        assert (await client.ask("tracks/changing.mp3", Range="bytes=7-")).body == old[7:]
    await blobs.put("tracks/changing.mp3", new)
    await Purges(blobs).purge("tracks/changing.mp3")

    async def is_new() -> bool:
        found = (await client.ask("tracks/changing.mp3", Range="bytes=7-")).body
        assert found in (old[7:], new[7:])
        return found == new[7:]

    await wait_true(is_new, what="the purge is known")
    for _ in range(SEEN):
        assert (await client.ask("tracks/changing.mp3", Range="bytes=7-")).body == new[7:]


async def test_a_url_ends_while_it_is_used(node):
    keys = signing.Keys.derive(SECRET)
    ends_s = int(time.time()) + 3
    query = signing.sign(keys, f"/m/{KEY}", expires_at=ends_s)
    client = await connect(node)

    async def status() -> int:
        asked_s = time.time()
        answer = await client.ask(f"{KEY}?{query}", Range="bytes=0-9")
        assert answer.status == 206 or (answer.status == 403 and time.time() >= ends_s)
        assert answer.status == 403 or asked_s < ends_s
        return answer.status

    assert [await status() for _ in range(SEEN)] == [206] * SEEN
    await wait_true(lambda: _is(403, status), what="it has ended")


async def _is(wanted: int, status) -> bool:
    return await status() == wanted


async def test_a_watch_sees_heads_that_were_seen_before(node, blobs):
    client = await connect(node)
    for _ in range(SEEN):
        await client.ask(KEY, Range="bytes=0-9")
    await Traces(blobs).start(f"object={KEY}", for_s=60)

    async def is_logged() -> bool:
        await client.ask(KEY, Range="bytes=0-9")
        return "request_traced" in node.process.err

    await wait_true(is_logged, what="a line of the request")


async def test_a_hop_s_head_is_proven_each_time_however_often_it_was_seen(blobs, tmp_path):
    """A requesting node gets the same answers, each with its own signature; replays are refused."""
    signer = HopSigner([derive_key(SECRET, KEY_USE)], "a")
    line = signer.sequence()
    settings = {"blobs_url": blobs.folder.as_uri(), "media_workers": "1", "media_node": "b"}
    async with whole_node(tmp_path, media_disks=f"{tmp_path}/disk:32MiB", **settings) as node:
        client = await connect(node)
        etag = (await client.ask(KEY, Range="bytes=0-9")).fields["etag"]

        async def ask(span: str, *, if_match: str = etag, to: str = "b", generation: int = 0):
            covered = covered_text("GET", f"/m/{KEY}", span, if_match)
            value, mac = line.sign(to, covered, generation)
            head = f"GET /m/{KEY} HTTP/1.1\r\nHost: b\r\nIf-Match: {if_match}\r\nRange: {span}\r\n"
            data = f"{head}X-Headrace-Hop: {value}\r\n\r\n".encode()
            client.send(data)
            return data, mac, await client.answer()

        for n in range(3 * SEEN):
            first, last = n * 1000, n * 1000 + (70_000 if n % 2 else 5_000)
            data, mac, answer = await ask(f"bytes={first}-{last}")
            assert answer.status == 206
            assert (answer.body == DATA[first : last + 1]) is True
            told = AnswerSpan(etag.strip('"'), first, last + 1 - first)
            assert signer.is_authentic(mac, answer.fields["x-headrace-reply"], told)
            client.send(data)
            assert (await client.answer()).status == 403
        assert (await ask("bytes=0-9", to="c"))[2].status == 403
        assert (await ask("bytes=0-9", generation=7))[2].status == 409
        assert (await ask("bytes=0-9", if_match='"other"'))[2].status == 412
        stolen = data.replace(f"/m/{KEY}".encode(), b"/m/other")
        client.send(stolen)
        assert (await client.answer()).status == 403
        assert (await ask("bytes=0-9"))[2].body == DATA[:10]
