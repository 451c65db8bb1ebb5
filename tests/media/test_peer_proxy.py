"""Known heads that another node answers: same answers and bytes as on the full path."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager

import pytest
from raw_clients import Answer, Client
from tests.kit.waiting import wait_true
from tests.kit.whole_nodes import WholeNode, content, whole_node

from headrace.engines.blobs import Blobs
from headrace.kernel.metrics import REGISTRY
from headrace.media.cluster.purge import Purges
from headrace.media.model import BLOCK_BYTES
from headrace.media.worker.counters import Counters

pytestmark = pytest.mark.slow
SIZE_BYTES = 3 * BLOCK_BYTES + 1234
KEYS = [f"tracks/{n}.mp3" for n in range(8, 16)]
SEEN = 4
"""Repetitions: the first parses the head, the second caches it, later ones use it."""
PEER = "headrace; fwd=miss; detail=peer"
LAST = SIZE_BYTES - 1
CASES = {
    "no range": {},
    "a part": {"Range": "bytes=10-5009"},
    "one byte": {"Range": "bytes=0-0"},
    "over a block's end": {"Range": f"bytes={BLOCK_BYTES - 5}-{BLOCK_BYTES + 5}"},
    "a block": {"Range": f"bytes={BLOCK_BYTES}-{2 * BLOCK_BYTES - 1}"},
    "over all blocks": {"Range": "bytes=5-"},
    "past the end": {"Range": f"bytes={LAST}-{LAST + 100}"},
    "beyond": {"Range": f"bytes={SIZE_BYTES}-"},
    "the end alone": {"Range": "bytes=-77"},
    "another version is requested": {"If_Match": '"other"'},
}


class Pair:
    """Node a, which is queried, and keys that node b keeps; one is for the test with changes."""

    def __init__(self, node: WholeNode, blobs: Blobs, key: str, changing_key: str) -> None:
        self.node, self.blobs = node, blobs
        self.key, self.data = key, content(key, 0, SIZE_BYTES)
        self.changing_key = changing_key

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.node.port))


@pytest.fixture(scope="module")
async def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    async with _two_nodes(folder) as (node, blobs):
        client = Client(*await asyncio.open_connection("127.0.0.1", node.port))
        far: list[str] = []

        async def is_passed() -> bool:
            for key in KEYS:
                answer = await client.ask(key, Range="bytes=0-9")
                if answer.fields["cache-status"] == PEER and key not in far:
                    far.append(key)
            return len(far) >= 2

        await wait_true(is_passed, what="two keys that the other node keeps")
        client.drop()
        yield Pair(node, blobs, *far[:2])


@asynccontextmanager
async def _two_nodes(folder):
    blobs = Blobs((folder / "store").as_uri())
    for key in KEYS:
        await blobs.put(key, content(key, 0, SIZE_BYTES))
    settings = {
        "blobs_url": blobs.folder.as_uri(),
        "media_workers": "1",
        "media_replicas": "1",
    }
    for name in "ab":
        (folder / name / "disk").mkdir(parents=True)

    def node(name: str):
        disk = f"{folder}/{name}/disk:32MiB"
        return whole_node(folder / name, **{**settings, "media_node": name, "media_disks": disk})

    try:
        async with node("a") as asked, node("b"):
            yield asked, blobs
    finally:
        await blobs.close()


def told(answer: Answer) -> tuple[int, dict[str, str], str]:
    """All of an answer except its date."""
    fields = {name: value for name, value in answer.fields.items() if name != "date"}
    return answer.status, fields, hashlib.sha256(answer.body).hexdigest()


@pytest.mark.parametrize("case", CASES)
async def test_a_repeated_head_is_answered_as_its_first(pair, case):
    client = await pair.connect()
    answers = [await client.ask(pair.key, **CASES[case]) for _ in range(SEEN)]
    client.drop()
    assert [told(answer) for answer in answers] == [told(answers[0])] * SEEN
    if answers[0].status == 206:
        first, last = answers[0].fields["content-range"].split()[1].split("/")[0].split("-")
        assert (answers[0].body == pair.data[int(first) : int(last) + 1]) is True
        assert answers[0].fields["cache-status"] == PEER


async def test_many_clients_and_requests_behind_each_other_get_their_own_bytes(pair):
    async def listen(number: int) -> bool:
        client = await pair.connect()
        starts = [number * 3001 + n * 50_021 for n in range(10)]
        for start in starts:
            head = f"GET /m/{pair.key} HTTP/1.1\r\nHost: a\r\nRange: bytes={start}-{start + 39_999}"
            client.send(f"{head}\r\n\r\n".encode())
        bodies = [(await client.answer()).body for _ in starts]
        client.drop()
        return bodies == [pair.data[start : start + 40_000] for start in starts]

    assert all(await asyncio.gather(*(listen(number) for number in range(12))))


async def test_clients_that_leave_spoil_nothing_for_those_who_stay(pair):
    staying = await pair.connect()
    for n in range(20):
        leaving = await pair.connect()
        span = f"bytes={n * 1000}-{n * 1000 + 199_999}"
        leaving.send(f"GET /m/{pair.key} HTTP/1.1\r\nHost: a\r\nRange: {span}\r\n\r\n".encode())
        leaving.drop()
        answer = await staying.ask(pair.key, Range=span)
        assert (answer.body == pair.data[n * 1000 : n * 1000 + 200_000]) is True
    staying.drop()


def test_passed_answers_are_counted_when_the_worker_looks():
    names = {
        "media_bytes_total": {"source": "peer"},
        "media_blocks_total": {"outcome": "pass"},
        "media_requests_total": {"status": "206"},
    }

    def counts() -> list[float]:
        return [REGISTRY.get_sample_value(name, labels) or 0.0 for name, labels in names.items()]

    before, tally = counts(), Counters()
    for _ in range(3):
        tally.note_answer(206, 0.001)
        tally.note_proxied(1000)
    assert counts() == before
    tally.flush()
    tally.flush()
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [3000, 3, 3]


async def test_a_purge_ends_the_way(pair):
    key = pair.changing_key
    former = content(key, 0, SIZE_BYTES)
    client = await pair.connect()
    for _ in range(SEEN):
        assert (await client.ask(key, Range="bytes=7-99")).body == former[7:100]
    other = content("other", 0, SIZE_BYTES)
    await pair.blobs.put(key, other)
    await Purges(pair.blobs).purge(key)

    async def is_new() -> bool:
        found = (await client.ask(key, Range="bytes=7-99")).body
        assert found in (former[7:100], other[7:100])
        return found == other[7:100]

    await wait_true(is_new, what="the purge is known")
    for _ in range(SEEN):
        assert (await client.ask(key, Range="bytes=7-99")).body == other[7:100]
    client.drop()
