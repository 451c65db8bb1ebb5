"""A block of another node is sent as it is received."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest
from little_nodes import asking
from tests.kit.waiting import wait_true

from headrace.media.errors import SourceCut
from headrace.media.worker.bodies import BlockBody
from headrace.media.worker.socket_io import PlainChannel

DATA = bytes(range(256)) * 1200
KEY = "tracks/a.mp3"


class Client:
    """A socket pair: `send` sends a body, `got` is what arrived."""

    def __init__(self, source, shape, *, start: int, length_bytes: int) -> None:
        ours, self.theirs = socket.socketpair()
        ours.setblocking(False)
        self.theirs.setblocking(False)
        self.channel, self.got = PlainChannel(ours), b""
        self.wakes = 0
        self.body = BlockBody(
            source, KEY, shape, start=start, length_bytes=length_bytes, wake=self.wake
        )

    def wake(self) -> None:
        self.wakes += 1

    async def begin(self) -> None:
        assert not self.body.is_ready()
        await self.body.wait_ready()
        assert self.body.is_ready()

    def send(self) -> int:
        try:
            moved = self.body.send(self.channel, 64 * 1024)
            self.got += self.theirs.recv(1024 * 1024)
        except BlockingIOError:
            return 0
        return moved

    def close(self) -> None:
        self.body.close()
        self.channel.close()
        self.theirs.close()


async def test_what_is_here_goes_out_while_the_rest_comes():
    async with asking({KEY: DATA}) as router:
        first, _ = router.order(KEY)
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        first.mood = "pauses"
        # Across two blocks: the second is requested as soon as the first has begun.
        with closing(Client(source, shape, start=100_000, length_bytes=200_000)) as client:
            await client.begin()
            assert len(first.asked) == 2
            await wait_true(lambda: client.send() == 0 and len(client.got) > 50_000)
            assert client.body.is_waiting
            assert len(first.asked) == 3
            woken = client.wakes
            first.going_on.set()
            await wait_true(lambda: client.wakes > woken)
            await wait_true(lambda: client.send() == 0 and not client.body.left_bytes)
            assert client.got == DATA[100_000:300_000]
            assert client.body.source == "peer"


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_node_lost_half_way_is_noticed_by_no_client_unless_the_object_is_another(
    is_replaced,
):
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        first.mood = "ends half-way"
        with closing(Client(source, shape, start=0, length_bytes=200_000)) as client:
            await client.begin()
            await wait_true(lambda: client.send() == 0 and len(client.got) > 50_000)
            if is_replaced:
                second.objects[KEY] = DATA[::-1]
            first.going_on.set()
            if is_replaced:
                with pytest.raises(SourceCut):
                    await wait_true(lambda: client.send() < 0)
                assert client.got == DATA[: len(client.got)]
            else:
                await wait_true(lambda: client.send() == 0 and not client.body.left_bytes)
                assert client.got == DATA[:200_000]


async def test_one_that_leaves_spoils_nothing_for_who_shares_the_block():
    async with asking({KEY: DATA}) as router:
        first, _ = router.order(KEY)
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        first.mood = "pauses"
        one = Client(source, shape, start=0, length_bytes=200_000)
        other = Client(source, shape, start=0, length_bytes=200_000)
        with closing(other):
            await asyncio.gather(one.begin(), other.begin())
            await wait_true(lambda: one.send() == 0 and one.body.is_waiting)
            one.close()
            first.going_on.set()
            await wait_true(lambda: other.send() == 0 and not other.body.left_bytes)
            assert other.got == DATA[:200_000]
            assert [request.method for request in first.asked] == ["HEAD", "GET"]
