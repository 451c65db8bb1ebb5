"""The source of bytes when nodes are healthy, dead, slow, full, lying or of another version.

A block is requested in three ways: by a task, directly without one, and as the body of an answer.
A seeded driver makes peers fail in all ways; the examples below it fix the timing of each fault.
"""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import time

import msgspec
import pytest
from little_nodes import AskedRouter, asking, shape_of
from node_kinds import few_partitions
from tests.kit.waiting import wait_true

from headrace.kernel.signing import derive_key
from headrace.media.cluster.hop import KEY_USE, HopSigner, parse_answer_head
from headrace.media.cluster.peers import Peer
from headrace.media.cluster.purge import Purge, PurgeList
from headrace.media.cluster.routing import SHAPE_KEPT_S, SHAPES_MAX
from headrace.media.errors import ObjectUnknown, SourceCut
from headrace.media.model import BLOCK_BYTES, Shape
from headrace.media.partitions import Candidate, PartitionTable
from headrace.media.sources import Span
from headrace.media.worker.bodies import BlockBody
from headrace.media.worker.socket_io import Channel

DATA = bytes(range(256)) * 1200
KEY = "tracks/a.mp3"
LYING = ("resets", "cuts", "sends garbage", "has another secret", "gives another part",
         "ignores ranges")  # fmt: skip


@pytest.fixture(autouse=True)
def _few():
    with few_partitions(bits=14):
        yield


class Body:
    """The body of an answer and its client's socket."""

    def __init__(self, router: AskedRouter, shape: Shape, span: Span) -> None:
        ours, self.theirs = socket.socketpair()
        ours.setblocking(False)
        self.theirs.setblocking(False)
        self.channel, self.got, self.wakes = Channel(ours), b"", 0
        source, length = router.router.peer_source, span.end - span.start
        self.body = BlockBody(
            source, KEY, shape, start=span.start, length_bytes=length, wake=self.wake
        )

    def wake(self) -> None:
        self.wakes += 1

    def send(self) -> bool:
        """Move what is here to the client. Return whether all was moved."""
        try:
            while self.body.left_bytes and self.body.send(self.channel, 64 * 1024):
                self.got += self.theirs.recv(1024 * 1024)
        except BlockingIOError:
            pass
        return not self.body.left_bytes

    def close(self) -> None:
        self.body.close()
        self.channel.close()
        self.theirs.close()


class BlockAsk:
    """One request for a block: started, then awaited or abandoned."""

    def __init__(self, way: str, router: AskedRouter, shape: Shape, span: Span) -> None:
        self.source = router.router.peer_source
        self.router, self.shape, self.span = router, shape, span
        self.body = Body(router, shape, span) if way == "body" else None
        work = {"body": self.by_body, "task": self.by_task}[way]
        self.task = asyncio.create_task(work())

    async def by_task(self) -> bytes:
        return await self.source.block(KEY, self.shape, 0, self.span)

    async def by_body(self) -> bytes:
        if not self.body.body.is_ready():
            await self.body.body.wait_ready()
        await wait_true(self.body.send, what="the whole body")
        return self.body.got

    async def abandon(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if self.body is not None:
            self.body.close()

    async def result(self) -> bytes:
        try:
            return await self.task
        finally:
            if self.body is not None:
                self.body.close()


WAYS = ("task", "body")


@pytest.fixture(params=WAYS)
async def way(request):
    return request.param


async def known_shape(router: AskedRouter) -> Shape:
    """The shape of the object; the first replica has a kept connection then."""
    return await router.router.source(KEY, None).shape(KEY)


@pytest.mark.parametrize("seed", range(4))
async def test_right_bytes_whatever_the_peers_do(seed):
    """Only misbehaving nodes are taken out, and only a probe brings one back."""
    dice = random.Random(seed)
    async with asking({KEY: DATA}, count=3, replicas=3) as router:
        bad = dict.fromkeys(router.nodes, 0)
        for _ in range(60):
            node = dice.choice(list(router.nodes.values()))
            node.mood = dice.choice(["good", "good", "full", *LYING])
            bad[node.name] |= node.mood in LYING
            shape, start = await known_shape(router), dice.randrange(200_000)
            before = {name: len(one.asked) for name, one in router.nodes.items()}
            order, reads = router.order(KEY), router.origin.blocks_asked
            span = Span(start, start + dice.randrange(1, 60_000))
            found = await BlockAsk(dice.choice(WAYS), router, shape, span).result()
            assert (found == DATA[span.start : span.end]) is True
            asked = {n for n, count in before.items() if len(router.nodes[n].asked) > count}
            if order and order[0].mood == "good":
                assert asked == {order[0].name}
            assert asked <= {one.name for one in order}
            is_any_good = any(one.mood == "good" for one in order)
            assert (router.origin.blocks_asked > reads) == (not is_any_good)
            await wait_true(lambda: not router.router.repairs)
            out = {name for name, peer in router.peers.items() if not peer.health.is_usable}
            assert all(bad[name] for name in out)
            if out and dice.random() < 0.5:
                name = dice.choice(sorted(out))
                assert await router.peers[name].probe() or router.nodes[name].mood == "full"
                router.peers[name].health.note_probe(is_answered=True)
                assert router.nodes[name] in router.order(KEY)


async def test_a_key_of_others_is_requested_from_its_first_replica_alone():
    async with asking({KEY: DATA}, count=4) as router:
        first, second = router.order(KEY)
        assert await router.get(KEY, 10, 5000) == DATA[10:5000]
        assert [r.method for r in first.asked] == ["HEAD", "GET"]
        assert first.asked[1].fields["range"] == "bytes=10-4999"
        last = Span(0, len(DATA) - BLOCK_BYTES)
        source, shape = router.router.source(KEY, None), shape_of(DATA)
        assert await source.block(KEY, shape, 1, last) == DATA[BLOCK_BYTES:]
        assert (len(first.asked), len(second.asked)) == (3, 0), "the shape was cached"
        assert (router.own.shapes_asked, router.origin.blocks_asked) == (0, 0)


async def test_own_keys_and_hops_go_no_further():
    async with asking({KEY: DATA}) as router:
        found = router.router
        assert found.source(KEY, None).name == "peer"
        assert found.source(KEY, object()) is router.own
        found.table = PartitionTable.build([Candidate("asker")], 2)
        assert found.source(KEY, None) is router.own
        assert found.is_replica(KEY)
        found.table = None
        assert found.source(KEY, None) is router.own


async def test_the_replica_of_the_own_data_center_is_first():
    async with asking({KEY: DATA}, count=4, dcs=("there", "here")) as router:
        for number in range(20):
            key = f"tracks/{number}.mp3"
            assert [node.dc for node in router.order(key)] == ["here", "there"]


@pytest.mark.parametrize("mood", [*LYING, "denies all", "full"])
async def test_a_shape_is_accepted_only_with_its_proof(mood):
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        first.mood = mood
        if mood == "denies all":
            first.objects.clear()
        is_proven = mood in ("gives another part", "ignores ranges", "cuts")
        assert await known_shape(router) == shape_of(DATA)
        assert is_proven or second.asked


async def test_a_dead_node_costs_one_attempt_and_a_restarted_one_none(way):
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        shape, span = await known_shape(router), Span(0, 1000)
        port = int(first.member.address.rpartition(":")[2])
        await first.stop()
        await first.start(port)
        assert await BlockAsk(way, router, shape, span).result() == DATA[:1000]
        assert (router.outs, len(second.asked)) == ([], 0), "a connection kept too long"
        await first.stop()
        for _ in range(5):
            assert await BlockAsk(way, router, shape, span).result() == DATA[:1000]
        assert (router.outs, len(second.asked)) == ([first.name], 5)
        assert not await router.peers[first.name].probe()
        await second.stop()
        reads = router.origin.blocks_asked
        assert await BlockAsk(way, router, shape, span).result() == DATA[:1000]
        assert router.origin.blocks_asked == reads + 1
        assert router.router.source(KEY, None) is router.own


@pytest.mark.slow
async def test_a_peer_that_hangs_is_dropped_when_its_probe_fails():
    async with asking({KEY: DATA}) as router:
        first, _ = router.order(KEY)
        assert await router.get(KEY) == DATA[:1000]
        first.mood = "hangs"
        coming = asyncio.create_task(router.get(KEY, 7, 77))
        await wait_true(lambda: router.slow == [first.name])
        peer = router.peers[first.name]
        assert not await peer.probe()
        peer.health.note_probe(is_answered=False)
        peer.drop()
        assert await coming == DATA[7:77]


@pytest.mark.slow
@pytest.mark.parametrize("has_end", [True, False])
async def test_a_peer_with_a_slow_origin_is_waited_for_but_not_for_ever(has_end):
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        first.mood = "slow"
        began_s = time.monotonic()
        coming = asyncio.create_task(router.get(KEY, 7, 77))
        await wait_true(lambda: router.slow == [first.name])
        assert await router.peers[first.name].probe(), "it serves; its origin is slow"
        if has_end:
            first.going_on.set()
        assert await coming == DATA[7:77]
        assert bool(second.asked) is not has_end
        assert has_end or time.monotonic() - began_s > 0.5


async def test_full_peers_stay_in_use_and_a_missing_object_is_one_request():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        with pytest.raises(ObjectUnknown):
            await router.get("tracks/none.mp3")
        assert sum(len(node.asked) for node in router.nodes.values()) == 1
        first.mood = second.mood = "full"
        for number in range(5):
            assert await known_shape(router) == shape_of(DATA)
            assert router.own.shapes_asked == number + 1
        assert router.outs == []
        assert router.order(KEY) == [first, second]


async def test_a_replaced_object_is_cut_and_its_shape_forgotten(way):
    async with asking({KEY: DATA}) as router:
        source, shape = router.router.source(KEY, None), await known_shape(router)
        for node in router.nodes.values():
            node.objects[KEY] = DATA[::-1]
        for _ in range(3):
            with pytest.raises(SourceCut):
                await BlockAsk(way, router, shape, Span(0, 10)).result()
        assert router.outs == [], "a changed object is no fault of the peer"
        assert source.shape_now(KEY) == shape_of(DATA[::-1]), "the new shape is known already"
        assert await router.get(KEY) == DATA[::-1][:1000]


SPAN = Span(10, 200_000)


async def test_bytes_are_passed_on_while_the_rest_of_the_block_is_received():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        shape = await known_shape(router)
        first.mood = "pauses"
        client = Body(router, shape, SPAN)
        assert not client.body.is_ready()
        await client.body.wait_ready()
        await wait_true(lambda: not client.send() and len(client.got) > 20_000)
        shared = BlockAsk("task", router, shape, SPAN)
        woken = client.wakes
        first.going_on.set()
        await wait_true(lambda: client.wakes > woken)
        await wait_true(client.send)
        assert (client.got == DATA[10:200_000], client.body.source) == (True, "peer")
        assert await shared.result() == DATA[10:200_000]
        assert ([r.method for r in first.asked], second.asked) == (["HEAD", "GET"], [])
        client.close()


@pytest.mark.parametrize("then", ["next", "origin", "replaced"])
async def test_a_peer_lost_half_way_costs_only_the_rest(way, then):
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        shape = await known_shape(router)
        first.mood = "ends half-way"
        second.mood = "ends half-way" if then == "origin" else "good"
        coming = BlockAsk(way, router, shape, SPAN)
        await wait_true(lambda: any(b.filled_bytes > 20_000 for b in begun(router)))
        [here] = [block.filled_bytes for block in begun(router)]
        if then == "replaced":
            second.objects[KEY] = DATA[::-1]
        for node in (first, second):
            node.going_on.set()
        if then == "replaced":
            with pytest.raises(SourceCut):
                await coming.result()
            return
        assert (await coming.result() == DATA[10:200_000]) is True
        rest = second.asked[-1].fields["range"]
        assert rest.endswith("-199999")
        assert 10 + here <= int(rest.removeprefix("bytes=").partition("-")[0]) < 110_000
        assert router.origin.blocks_asked == (then == "origin")
        assert router.outs == [node.name for node in (first, second)][: 1 + (then == "origin")]
        await wait_true(lambda: not router.router.repairs)


def begun(router: AskedRouter) -> list:
    return list(router.router.receiving.values())


@pytest.mark.parametrize("mood", ["slow", "pauses", "full"])
async def test_an_abandoned_request_does_not_harm_others_of_its_block(way, mood):
    """Also of 50 at once, which share one request to the peer."""
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        shape = await known_shape(router)
        first.mood, second.mood = mood, "slow"
        leaving = BlockAsk(way, router, shape, SPAN)
        staying = [BlockAsk("task", router, shape, SPAN) for _ in range(50)]
        busy, count = (second, 1) if mood == "full" else (first, 2)
        await wait_true(lambda: len(busy.asked) == count)
        await leaving.abandon()
        for node in (first, second):
            node.mood = "good" if node.mood == "slow" else node.mood
            node.going_on.set()
        for request in staying:
            assert (await request.result() == DATA[10:200_000]) is True
        assert len(first.asked) <= 3
        await wait_true(lambda: not router.router.receiving and not router.router.repairs)


async def test_a_forged_hop_is_refused_and_its_sender_served_by_the_next():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        forger = HopSigner([derive_key("another cluster's secret, no use here", KEY_USE)], "asker")
        forged = Peer(first.member, forger, timeout_s=2.0)
        router.router.peers = {**router.peers, first.name: forged}
        assert await router.get(KEY) == DATA[:1000]
        assert (bool(first.asked), bool(second.asked)) == (True, True)
        forged.close()


def purged(*names: str, version: int) -> bytes:
    purges = tuple(Purge(name=name, generation=version) for name in names)
    return msgspec.json.encode(PurgeList(version=version, purges=purges))


async def test_a_node_without_a_purge_is_not_used_until_it_has_it():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        assert await router.get(KEY) == DATA[:1000]
        router.generations.accept(purged(KEY, version=3))
        coming = asyncio.create_task(router.get(KEY))
        await wait_true(lambda: len(first.asked) == 3)
        first.generations.accept(purged(KEY, version=3))
        assert await coming == DATA[:1000]
        assert (router.outs, second.asked) == ([], [])
        assert {r.method for r in first.asked[2:-1]} == {"HEAD"}, "a purge drops the known shape"
        router.generations.accept(purged(KEY, version=4))
        assert await router.get(KEY) == DATA[:1000]
        assert (router.own.shapes_asked, router.origin.blocks_asked) == (1, 1)


async def test_a_shape_requested_before_a_purge_is_not_used_after_it():
    async with asking({KEY: DATA}) as router:
        first, source = router.order(KEY)[0], router.router.peer_source
        first.mood = "slow"
        before = asyncio.create_task(source.shape(KEY))
        await wait_true(lambda: len(first.asked) == 1)
        router.generations.accept(purged(KEY, version=3))
        after = asyncio.create_task(source.shape(KEY))
        first.going_on.set()
        await before
        assert source.shape_now(KEY) is None
        first.generations.accept(purged(KEY, version=3))
        await after
        assert source.shape_now(KEY) is not None


async def test_shapes_are_kept_for_a_moment_and_bounded():
    async with asking({KEY: DATA}) as router:
        source = router.router.source(KEY, None)
        await known_shape(router)
        shapes = router.router.shapes
        known = shapes.get(KEY, 0)
        assert 0 < known.expires_s - time.monotonic() <= SHAPE_KEPT_S
        assert shapes.get(KEY, 1) is None, "of an older purge"
        shapes.keep(KEY, known._replace(expires_s=time.monotonic() - 1))
        assert source.shape_now(KEY) is None
        lasting = known._replace(expires_s=time.monotonic() + 60)
        for number in range(SHAPES_MAX + 1):
            shapes.keep(f"k{number}", lasting)
        found = [shapes.get(f"k{number}", 0) for number in (0, 1, SHAPES_MAX)]
        assert found == [None, lasting, lasting]


async def test_trace_fields_are_sent_with_the_hop():
    async with asking({KEY: DATA}) as router:
        first, _ = router.order(KEY)
        source = router.router.source(KEY, None, onward=[("traceparent", "00-ab-cd-01")])
        assert await source.block(KEY, await source.shape(KEY), 0, Span(0, 10)) == DATA[:10]
        assert [r.fields["traceparent"] for r in first.asked] == ["00-ab-cd-01"] * 2
        assert (router.origin.blocks_asked, router.own.shapes_asked) == (0, 0), "it is accepted"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"HTTP/1.0 200 OK", b"HTTP/1.1 20 OK", b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"HTTP/1.1 200 OK\r\nno colon",
        "HTTP/1.1 ٢٠٠ OK".encode(),
    ],
)  # fmt: skip
def test_an_invalid_answer_of_a_node_is_refused(data):
    with pytest.raises(ValueError, match=r"."):
        parse_answer_head(data)


@pytest.mark.slow
async def test_the_load_of_a_dead_node_is_spread_over_all_others():
    """By real requests: each share is within the noise of the fair share."""
    count = 12
    async with asking({}, count=count) as router:
        keys = [f"tracks/{number}.mp3" for number in range(700)]
        dead = router.nodes["n5"]
        await dead.stop()
        router.peers["n5"].health.note_probe(is_answered=False)
        for node in router.nodes.values():
            node.objects.update(dict.fromkeys(keys, b"x"))
        # All nodes run in this loop: many concurrent connects would exceed the limit of a peer.
        for start in range(0, len(keys), 20):
            await asyncio.gather(*(router.get(key) for key in keys[start : start + 20]))
        asked = [
            sum(r.method == "GET" for r in n.asked) for n in router.nodes.values() if n is not dead
        ]
        assert sum(asked) == len(keys)
        fair = len(keys) / (count - 1)
        assert max(asked) <= 1.05 * fair + 3 * fair**0.5
        assert statistics.pstdev(asked) <= 2 * fair**0.5
