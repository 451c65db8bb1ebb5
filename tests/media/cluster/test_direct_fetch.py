"""Block fetches without a task: the plain case is immediate, others match the full path."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from little_nodes import asking
from tests.kit.waiting import wait_true

from headrace.media import answers
from headrace.media.cluster.hop import PLAIN_HEAD, parse_answer_head
from headrace.media.cluster.routing import BlockRequest, DirectFetch
from headrace.media.model import Shape
from headrace.media.ranges import Decision
from headrace.media.requests import Request
from headrace.media.signing import OPEN
from headrace.media.sources import PartialBlock, Span

DATA = bytes(range(256)) * 1200
KEY = "tracks/a.mp3"
SPAN = Span(0, 5000)


class Soloist:
    """A fetch and its results."""

    def __init__(self, router, shape: Shape) -> None:
        self.router = router
        self.source = router.router.peer_source
        self.shape = shape
        self.told: list[PartialBlock | None] = []

    def ask(self) -> DirectFetch | None:
        return self.source.request_now(self.flight, self.shape, self.told.append)

    @property
    def flight(self) -> BlockRequest:
        return BlockRequest(KEY, self.shape.etag, 0, SPAN)

    async def answer(self) -> bytes | None:
        await wait_true(lambda: bool(self.told), what="the result")
        [coming] = self.told
        return await coming.whole() if coming is not None else None

    def is_over(self) -> bool:
        return self.flight not in self.source.block_requests and not self.router.router.receiving


@asynccontextmanager
async def soloist():
    """A fetch with a connection to the first replica."""
    async with asking({KEY: DATA}) as router:
        await router.get(KEY, 0, 10)
        yield Soloist(router, await router.router.peer_source.shape(KEY)), router.order(KEY)


async def test_a_block_of_a_peer_is_told_once_and_shared_meanwhile():
    async with soloist() as (solo, (first, second)):
        first.mood = "slow"
        assert solo.ask() is not None
        assert solo.told == []
        assert solo.ask() is None
        shared = asyncio.create_task(solo.source.block(KEY, solo.shape, 0, SPAN))
        await wait_true(lambda: len(first.asked) == 3)
        first.going_on.set()
        assert await solo.answer() == DATA[:5000]
        assert await shared == DATA[:5000]
        assert (len(first.asked), len(second.asked)) == (3, 0)
        assert solo.is_over()


async def test_without_a_kept_connection_nothing_is_done():
    async with asking({KEY: DATA}) as router:
        solo = Soloist(router, Shape(len(DATA), "any", 0, is_immutable=False))
        assert solo.ask() is None
        assert solo.is_over()
        assert solo.told == []


@pytest.mark.parametrize(
    "mood",
    [
        "full",
        "resets",
        "sends garbage",
        "has another secret",
        "gives another part",
        "ignores ranges",
    ],
)
async def test_what_the_first_does_not_give_the_second_gives(mood):
    async with soloist() as (solo, (first, second)):
        first.mood = mood
        assert solo.ask() is not None
        assert await solo.answer() == DATA[:5000]
        assert len(second.asked) == 1
        await wait_true(solo.is_over)


async def test_a_connection_that_ended_unheard_is_no_failure():
    async with soloist() as (solo, (first, second)):
        port = int(first.member.address.rpartition(":")[2])
        await first.stop()
        await first.start(port)
        asked = len(first.asked)
        if solo.ask() is None:
            assert await solo.source.block(KEY, solo.shape, 0, SPAN) == DATA[:5000]
        else:
            assert await solo.answer() == DATA[:5000]
        assert (len(first.asked) - asked, len(second.asked)) == (1, 0)
        assert solo.router.outs == []


async def test_another_version_sends_it_the_long_way():
    async with soloist() as (solo, nodes):
        for node in nodes:
            node.objects[KEY] = DATA[::-1]
        assert solo.ask() is not None
        assert await solo.answer() is None
        await wait_true(solo.is_over)
        assert solo.source.shape_now(KEY) != solo.shape


@pytest.mark.parametrize("mood", ["slow", "full"])
async def test_one_that_leaves_spoils_nothing_for_who_shares_the_block(mood):
    """While the first replica is queried, or a second one after it."""
    async with soloist() as (solo, (first, second)):
        first.mood, second.mood = mood, "slow"
        asked = solo.ask()
        assert asked is not None
        shared = asyncio.create_task(solo.source.block(KEY, solo.shape, 0, SPAN))
        waited_for, count = (first, 3) if mood == "slow" else (second, 1)
        await wait_true(lambda: len(waited_for.asked) == count)
        asked.cancel()
        first.mood = second.mood = "good"
        assert await shared == DATA[:5000]
        assert solo.told == []
        await wait_true(solo.is_over)


def test_the_head_of_a_part_is_read_by_its_shape_as_field_by_field():
    """Otherwise heads would take the slow path without any visible difference."""
    request = Request("GET", f"/m/{KEY}", {}, is_http_1_0=False, keeps_alive=True, has_body=False)
    for etag, immutable in (("a1-b2-c3", False), ("0" * 64, True)):
        head = answers.object_head(
            request,
            Decision(206, 100, 50),
            Shape(300, etag, 1_700_000_000, immutable),
            key=KEY,
            rights=OPEN,
            cache_status=answers.HIT,
            keeps_alive=True,
            extra=(("X-Headrace-Reply", "5a" * 32),),
        )
        data = head.removesuffix(b"\r\n\r\n")
        assert PLAIN_HEAD.fullmatch(data)
        status, fields = parse_answer_head(data)
        by_field = parse_answer_head(data + b"\r\nX-More: yes")
        assert (status, fields) == (
            206,
            {
                "etag": f'"{etag}"',
                "content-length": "50",
                "content-range": "bytes 100-149/300",
                "x-headrace-reply": "5a" * 32,
            },
        )
        assert status == by_field[0]
        assert fields.items() <= by_field[1].items()
