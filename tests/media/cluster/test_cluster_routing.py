"""The source of bytes when nodes are healthy, dead, slow, full, lying or of another version."""

from __future__ import annotations

import asyncio
import statistics
import time

import msgspec
import pytest
from little_nodes import asking, shape_of
from tests.kit.waiting import wait_true

from headrace.kernel.signing import derive_key
from headrace.media.cluster.hop import KEY_USE, HopSigner
from headrace.media.cluster.peer_messages import parse_answer_head
from headrace.media.cluster.peers import Peer
from headrace.media.cluster.purge import Purge, PurgeList
from headrace.media.cluster.routing import SHAPE_KEPT_S, SHAPES_MAX
from headrace.media.errors import ObjectUnknown, SourceCut
from headrace.media.model import BLOCK_BYTES
from headrace.media.partitions import Candidate, PartitionTable
from headrace.media.sources import Span

DATA = bytes(range(256)) * 1200
KEY = "tracks/a.mp3"


async def test_a_key_of_others_is_asked_of_its_first_replica_alone():
    async with asking({KEY: DATA}, count=4) as router:
        first, second = router.order(KEY)
        assert await router.get(KEY, 10, 5000) == DATA[10:5000]
        assert [r.method for r in first.asked] == ["HEAD", "GET"]
        assert first.asked[1].fields["range"] == "bytes=10-4999"
        assert not second.asked
        assert await router.get(KEY, 0, BLOCK_BYTES) == DATA[:BLOCK_BYTES]
        assert len(first.asked) == 3, "the shape was known"
        assert (router.own.shapes_asked, router.origin.blocks_asked) == (0, 0)


async def test_blocks_after_the_first_and_the_short_last_one():
    async with asking({KEY: DATA}) as router:
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        assert shape == shape_of(DATA)
        last = await source.block(KEY, shape, 1, Span(0, len(DATA) - BLOCK_BYTES))
        assert last == DATA[BLOCK_BYTES:]


async def test_what_is_ours_or_came_by_a_hop_goes_no_further():
    async with asking({KEY: DATA}) as router:
        found = router.router
        assert found.source(KEY, None).name == "peer"
        hop = object()
        assert found.source(KEY, hop) is router.own
        found.table = PartitionTable.build([Candidate("asker")], 2)
        assert found.source(KEY, None) is router.own
        found.table = None
        assert found.source(KEY, None) is router.own


async def test_the_replica_of_our_own_data_centre_is_asked_first():
    async with asking({KEY: DATA}, count=4, dcs=("there", "here")) as router:
        for number in range(20):
            key = f"tracks/{number}.mp3"
            assert [node.dc for node in router.order(key)] == ["here", "there"]


@pytest.mark.parametrize(
    "mood",
    [
        "resets",
        "cuts",
        "sends garbage",
        "has another secret",
        "gives another part",
        "ignores ranges",
    ],
)
async def test_whatever_the_first_replica_does_the_second_gives_the_right_bytes(mood):
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        first.mood = mood
        for start in range(0, 500, 100):
            span = Span(start, start + 1000)
            assert await source.block(KEY, shape, 0, span) == DATA[start : start + 1000]
        assert second.asked
        assert router.outs == [first.name], "it is out after three bad answers at the latest"
        assert router.order(KEY) == [second]
        assert router.origin.blocks_asked == 0


@pytest.mark.parametrize("mood", ["resets", "has another secret", "denies all", "full"])
async def test_shapes_are_believed_only_from_who_proves_itself(mood):
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        first.mood = mood
        if mood == "denies all":
            first.objects.clear()
        assert await router.router.source(KEY, None).shape(KEY) == shape_of(DATA)
        assert second.asked


async def test_a_dead_node_costs_one_attempt_and_is_back_after_a_probe():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        assert await router.get(KEY) == DATA[:1000]
        port = int(first.member.address.rpartition(":")[2])
        await first.stop()
        for _ in range(5):
            assert await router.get(KEY) == DATA[:1000]
        assert router.outs == [first.name]
        assert len(second.asked) == 5
        peer = router.peers[first.name]
        assert not await peer.probe()
        await first.start(port)
        # A probe has half a second, which a busy machine may exceed.
        await wait_true(peer.probe, what="the node is back")
        peer.health.probe_succeeded()
        assert router.order(KEY)[0] is first
        assert await router.get(KEY) == DATA[:1000]


async def test_a_connection_that_was_kept_too_long_is_no_failure():
    async with asking({KEY: DATA}) as router:
        first, _ = router.order(KEY)
        assert await router.get(KEY) == DATA[:1000]
        port = int(first.member.address.rpartition(":")[2])
        await first.stop()
        await first.start(port)
        assert await router.get(KEY) == DATA[:1000]
        assert router.outs == []
        assert router.order(KEY)[0] is first


async def test_nobody_left_means_our_own_disks_and_in_between_the_origin():
    async with asking({KEY: DATA}) as router:
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        for node in router.nodes.values():
            await node.stop()
        assert await source.block(KEY, shape, 0, Span(5, 90)) == DATA[5:90]
        assert router.origin.blocks_asked == 1
        assert router.router.source(KEY, None) is router.own


@pytest.mark.slow
async def test_a_peer_that_hangs_is_told_and_dropped_when_found_dead():
    async with asking({KEY: DATA}) as router:
        first, _ = router.order(KEY)
        assert await router.get(KEY) == DATA[:1000]
        first.mood = "hangs"
        asked = asyncio.create_task(router.get(KEY, 7, 77))
        await wait_true(lambda: router.slow == [first.name])
        peer = router.peers[first.name]
        assert not await peer.probe()
        peer.health.probe_failed()
        peer.drop()
        assert await asked == DATA[7:77]


@pytest.mark.slow
async def test_a_peer_that_reads_its_origin_slowly_is_waited_for():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        first.mood = "slow"
        asked = asyncio.create_task(router.get(KEY, 7, 77))
        await wait_true(lambda: router.slow == [first.name])
        assert await router.peers[first.name].probe(), "it serves; its origin is slow"
        first.going_on.set()
        assert await asked == DATA[7:77]
        assert not second.asked


@pytest.mark.slow
async def test_an_answer_that_never_comes_has_an_end():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        first.mood = "slow"
        began_s = time.monotonic()
        assert await router.get(KEY, 7, 77) == DATA[7:77]
        assert 0.5 < time.monotonic() - began_s < 10
        assert second.asked


async def test_a_peer_that_is_full_or_without_its_store_is_still_asked_for_what_it_may_have():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        first.mood = "full"
        assert await router.get(KEY) == DATA[:1000]
        assert second.asked
        second.mood = "full"
        router.router.shapes.clear()
        for number in range(5):
            assert await router.router.source(KEY, None).shape(KEY) == shape_of(DATA)
            assert router.own.shapes_asked == number + 1
        assert router.outs == []
        assert router.order(KEY) == [first, second]


async def test_an_object_that_is_missing_is_missing_after_one_question():
    async with asking({KEY: DATA}) as router:
        with pytest.raises(ObjectUnknown):
            await router.get("tracks/none.mp3")
        assert sum(len(node.asked) for node in router.nodes.values()) == 1
        assert router.outs == []


async def test_an_object_replaced_meanwhile_is_cut_and_its_shape_forgotten():
    async with asking({KEY: DATA}) as router:
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        for node in router.nodes.values():
            node.objects[KEY] = DATA[::-1]
        for _ in range(5):
            with pytest.raises(SourceCut):
                await source.block(KEY, shape, 0, Span(0, 10))
        assert router.outs == [], "a changed object is no fault of the peer"
        assert source.shape_now(KEY) == shape_of(DATA[::-1]), "the new shape is known already"
        assert await router.get(KEY) == DATA[::-1][:1000]


async def begun(source, shape, span: Span):
    """A block whose first part is received."""
    coming = await source.begin_block(KEY, shape, 0, span)
    await wait_true(lambda: coming.filled_bytes > 20_000)
    return coming


async def test_bytes_are_passed_on_while_the_rest_of_the_block_comes():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        first.mood = "pauses"
        coming = await begun(source, shape, Span(10, 200_000))
        here = coming.filled_bytes
        assert 20_000 < here < 199_990
        assert bytes(coming.part(0)) == DATA[10 : 10 + here]
        assert bytes(coming.part(here)) == b""
        assert await source.begin_block(KEY, shape, 0, Span(10, 200_000)) is coming, (
            "requested once"
        )
        told = []
        coming.call_at_more(lambda: told.append(coming.filled_bytes))
        first.going_on.set()
        assert await coming.whole() == DATA[10:200_000]
        assert told[0] > here
        assert not router.router.receiving
        assert not second.asked
        first.mood = "good"
        assert await router.get(KEY) == DATA[:1000]


@pytest.mark.parametrize("are_both_lost", [False, True])
async def test_a_peer_lost_half_way_costs_nothing_the_rest_is_asked_of_the_next(are_both_lost):
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        first.mood = "ends half-way"
        second.mood = "ends half-way" if are_both_lost else "good"
        coming = await begun(source, shape, Span(10, 200_000))
        here = coming.filled_bytes
        for node in (first, second):
            node.going_on.set()
        assert await coming.whole() == DATA[10:200_000]
        rest = second.asked[-1].fields["range"]
        assert rest.endswith("-199999")
        assert 10 + here <= int(rest.removeprefix("bytes=").partition("-")[0]) < 110_000
        assert router.origin.blocks_asked == are_both_lost
        assert router.outs == [node.name for node in (first, second)][: 1 + are_both_lost]
        await wait_true(lambda: not router.router.repairs)


async def test_an_object_replaced_while_a_peer_is_lost_is_cut():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        first.mood = "ends half-way"
        coming = await begun(source, shape, Span(10, 200_000))
        second.objects[KEY] = DATA[::-1]
        first.going_on.set()
        with pytest.raises(SourceCut):
            await coming.whole()
        with pytest.raises(SourceCut):
            coming.part(coming.filled_bytes)


async def test_many_at_once_ask_a_block_once():
    async with asking({KEY: DATA}) as router:
        first, _ = router.order(KEY)
        found = await asyncio.gather(*(router.get(KEY, 0, BLOCK_BYTES) for _ in range(200)))
        assert set(found) == {DATA[:BLOCK_BYTES]}
        assert [r.method for r in first.asked] == ["HEAD", "GET"]


async def test_one_who_gives_up_does_not_spoil_it_for_the_others():
    async with asking({KEY: DATA}) as router:
        first, _ = router.order(KEY)
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        first.mood = "slow"
        asked = [asyncio.create_task(source.block(KEY, shape, 0, Span(0, 500))) for _ in range(5)]
        await wait_true(lambda: len(first.asked) == 2)
        first.mood = "good"
        asked[0].cancel()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert set(found[1:]) == {DATA[:500]}
        assert len(first.asked) == 3


async def test_a_forged_hop_is_refused_and_the_asker_not_believed():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        forger = HopSigner([derive_key("another cluster's secret, no use here", KEY_USE)], "asker")
        forged = Peer(first.member, forger, timeout_s=2.0)
        router.router.peers = {**router.peers, first.name: forged}
        assert await router.get(KEY) == DATA[:1000]
        assert first.asked
        assert second.asked
        forged.close()


def purged(*names: str, version: int) -> bytes:
    purges = tuple(Purge(name=name, generation=version) for name in names)
    return msgspec.json.encode(PurgeList(version=version, purges=purges))


async def test_a_node_that_has_not_heard_of_a_purge_is_not_believed_until_it_has():
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        assert await router.get(KEY) == DATA[:1000]
        router.generations.accept(purged(KEY, version=3))
        asked = asyncio.create_task(router.get(KEY))
        await wait_true(lambda: len(first.asked) == 3)
        first.generations.accept(purged(KEY, version=3))
        assert await asked == DATA[:1000]
        assert router.outs == []
        assert not second.asked
        assert [r.method for r in first.asked][:2] == ["HEAD", "GET"]
        assert {r.method for r in first.asked[2:-1]} == {"HEAD"}, "a purge drops the known shape"


async def test_nodes_that_never_hear_of_a_purge_are_gone_around():
    async with asking({KEY: DATA}) as router:
        router.generations.accept(purged(KEY, version=3))
        assert await router.get(KEY) == DATA[:1000]
        assert (router.own.shapes_asked, router.origin.blocks_asked) == (1, 1)
        assert router.outs == []


async def test_shapes_are_kept_for_a_moment_and_bounded():
    async with asking({KEY: DATA}) as router:
        source = router.router.source(KEY, None)
        shape = await source.shape(KEY)
        assert source.shape_now(KEY) == shape
        kept = router.router.shapes[KEY]
        assert 0 < kept.until_s - time.monotonic() <= SHAPE_KEPT_S
        router.router.shapes[KEY] = kept._replace(until_s=time.monotonic() - 1)
        assert source.shape_now(KEY) is None
        for number in range(SHAPES_MAX + 10):
            router.router.keep_shape(f"k{number}", shape)
        assert len(router.router.shapes) == SHAPES_MAX


async def test_trace_fields_go_on_with_the_hop():
    async with asking({KEY: DATA}) as router:
        first, _ = router.order(KEY)
        source = router.router.source(KEY, None, onward=[("traceparent", "00-ab-cd-01")])
        shape = await source.shape(KEY)
        assert await source.block(KEY, shape, 0, Span(0, 10)) == DATA[:10]
        assert [r.fields["traceparent"] for r in first.asked] == ["00-ab-cd-01"] * 2
        assert (router.origin.blocks_asked, router.own.shapes_asked) == (0, 0), "it is accepted"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.0 200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nno colon",
        "HTTP/1.1 ٢٠٠ OK".encode(),
    ],
)
def test_what_is_no_answer_of_a_node_is_refused(data):
    with pytest.raises(ValueError, match=r"."):
        parse_answer_head(data)


@pytest.mark.slow
async def test_the_load_of_a_dead_node_is_spread_over_all_others():
    """By real requests: each share is within the noise of the fair share."""
    count = 12
    async with asking({}, count=count) as router:
        keys = [f"tracks/{number}.mp3" for number in range(1500)]
        dead = router.nodes["n5"]
        await dead.stop()
        router.peers["n5"].health.probe_failed()
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
        assert router.router.table is not None
        assert max(router.router.table.shares({"n5"}).values()) <= 1.05 / (count - 1)
