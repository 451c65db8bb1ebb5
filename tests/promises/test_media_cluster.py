"""Three real nodes: one dies, freezes, drains or cannot be reached; keys move, objects change.

Never a wrong byte, never a 5xx. The nodes are started once; each test restores what it changed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
import pytest
from tests.kit.otlp import otlp_receiver
from tests.kit.storm.media_cluster import OBJECT_BLOCKS, SECRET, Traffic, content, running_cluster
from tests.kit.waiting import wait_true

from headrace.engines.blobs import Blobs
from headrace.media import Media, MediaConfig
from headrace.media.cache.origin import SHAPE_KEPT_S
from headrace.media.cluster.cluster_config import POLL_EVERY_S
from headrace.media.cluster.membership import Member, MembershipStore
from headrace.media.cluster.purge import Purges
from headrace.media.id3 import Tags, tag_bytes, tag_key
from headrace.media.model import BLOCK_BYTES
from headrace.media.tracing import Traces, read_trace

pytestmark = pytest.mark.slow
PARENT = f"00-{'4b' * 16}-{'f0' * 8}-01"
BUYER = {"title": "Ein Lied", "buyer": "user:42"}
CHURN_S = 60.0


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory):
    async with running_cluster(tmp_path_factory.mktemp("cluster"), SIGNED="off") as found:
        yield found


def blobs_of(cluster, monkeypatch):
    """The bucket as a process of the site uses it."""
    for name, value in cluster.bucket.env.items():
        monkeypatch.setenv(name, value)
    return Blobs(cluster.bucket.env["HEADRACE_BLOBS_URL"])


@pytest.fixture
def blobs(cluster, monkeypatch):
    return blobs_of(cluster, monkeypatch)


async def test_every_node_serves_every_byte_and_each_block_is_read_once_per_replica(cluster):
    cluster.bucket.reads.clear()
    for key in cluster.keys:
        answers = await asyncio.gather(*(cluster.get(node, key) for node in cluster.nodes * 3))
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.content for answer in answers} == {content(key)}
        assert len({answer.headers["etag"] for answer in answers}) == 1
    for key in cluster.keys:
        for block in range(OBJECT_BLOCKS):
            assert cluster.bucket.reads[key, block * BLOCK_BYTES] <= 2


async def test_a_forged_or_repeated_hop_is_refused_and_costs_the_origin_nothing(cluster):
    node, key = cluster.nodes[1], "tracks/hopped.mp3"
    cluster.put(key)
    forged = [
        cluster.hop_headers("n1", key, secret="the secret of some other cluster there is"),
        cluster.hop_headers("n2", key),
        cluster.hop_headers("n1", "tracks/1.mp3"),
        {"x-headrace-hop": "1"},
    ]
    for headers in forged:
        answer = await cluster.client.get(node.url(key), headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "media.hop_refused")
    assert not cluster.bucket.heads[key]
    honest = cluster.hop_headers("n1", key)
    answer = await cluster.client.get(node.url(key), headers=honest)
    assert (answer.status_code, answer.content) == (200, content(key))
    assert "detail=peer" not in answer.headers["cache-status"]
    assert (await cluster.client.get(node.url(key), headers=honest)).status_code == 403


async def test_a_purge_shows_new_bytes_on_every_node_within_a_poll(cluster, blobs):
    key = "purged/one.mp3"
    cluster.put(key)
    for node in cluster.nodes:
        assert (await cluster.get(node, key)).content == content(key)
    cluster.put(key, 2)
    old = [await cluster.get(node, key) for node in cluster.nodes]
    assert {answer.content for answer in old} == {content(key)}, "shapes are cached for a minute"
    await Purges(blobs).purge(key)
    purged_s = time.monotonic()
    for node in cluster.nodes:
        await wait_true(partial(shows, cluster, node, key, 2), what=f"{node.name} is new")
    # Only the poll replaces what is cached for a minute.
    assert time.monotonic() - purged_s < POLL_EVERY_S + SHAPE_KEPT_S / 2
    answers = await asyncio.gather(*(cluster.get(node, key) for node in cluster.nodes * 5))
    assert {answer.content for answer in answers} == {content(key, 2)}, "and never the old again"


async def shows(cluster, node, key, version) -> bool:
    """Whether `node` serves that version; a body of an older one may be cut."""
    try:
        return (await cluster.get(node, key)).content == content(key, version)
    except httpx.ReadError:
        return False


async def test_an_object_replaced_without_a_purge_is_the_old_or_the_new_one(cluster):
    """What is cached stays for a minute. The rest is new for every node."""
    keys = [f"replaced/{number}.mp3" for number in range(6)]
    for key in keys:
        cluster.put(key)
        for node in cluster.nodes:
            assert (await cluster.get(node, key, Range="bytes=0-9")).status_code == 206
        cluster.put(key, 2)
    for key in keys * 3:
        for node in cluster.nodes:
            answer = await cluster.get(node, key, Range=f"bytes={2 * BLOCK_BYTES}-")
            assert answer.status_code == 206
            assert answer.content == content(key, 2)[2 * BLOCK_BYTES :]


async def test_cached_objects_are_served_while_the_store_is_down(cluster):
    await cluster.warm()
    await cluster.bucket.stop()
    try:
        async with Traffic(cluster) as traffic:
            await traffic.wait_reads(150)
            await wait_true(
                lambda: any(node.events("document_not_read") for node in cluster.nodes),
                what="the store is missed",
            )
            await traffic.wait_reads(50)
    finally:
        await cluster.bucket.start()


async def test_a_drained_node_hands_over_while_traffic_runs(cluster, blobs):
    member_store, drained = MembershipStore(blobs), cluster.nodes[2]
    async with Traffic(cluster) as traffic:
        await traffic.wait_reads(50)
        await member_store.drain(drained.name)

        async def is_drained() -> bool:
            answers = [await cluster.get(drained, key, Range="bytes=0-0") for key in cluster.keys]
            return all("detail=peer" in answer.headers["cache-status"] for answer in answers)

        await wait_true(is_drained, what="the drained node owns nothing")
        await traffic.wait_reads(50)
        await member_store.undrain(drained.name)
        await cluster.wait_routing()
        await traffic.wait_reads(50)


async def test_a_node_killed_under_traffic_costs_no_client_a_byte(cluster):
    await cluster.warm()
    dead, left = cluster.nodes[0], cluster.nodes[1:]
    cluster.bucket.reads.clear()
    async with Traffic(cluster) as traffic:
        traffic.through = left
        await traffic.wait_reads(100)
        dead.kill()
        await traffic.wait_reads(200)
        assert traffic.slowest_s < 15
        # The other replica has what the dead node had: the origin is not read.
        assert not cluster.bucket.reads
        dead.start()
        await dead.wait_serving(cluster.client)
        await cluster.wait_routing()
        traffic.through = cluster.nodes
        await traffic.wait_reads(100)


async def test_a_frozen_node_is_avoided_within_seconds(cluster):
    asker, frozen = cluster.nodes[:2]
    keys = cluster.keys_of(frozen.name, 5, without=asker.name)
    frozen_pids = frozen.process.family()
    for pid in frozen_pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        answers = await asyncio.gather(*(cluster.get(asker, key) for key in keys))
        assert [answer.content for answer in answers] == [content(key) for key in keys]
        assert time.monotonic() - began_s < 15
        await wait_true(
            lambda: frozen.name in [event["node"] for event in asker.events("peer_out")],
            what="the frozen node is avoided",
        )
        assert (await cluster.get(asker, keys[0])).content == content(keys[0])
    finally:
        for pid in frozen_pids:
            os.kill(pid, signal.SIGCONT)
    await cluster.wait_routing()


@contextmanager
def silent_address():
    """An address whose connections neither succeed nor are refused, as behind a dead switch."""
    with ExitStack() as stack:
        server, *clients = [stack.enter_context(socket.socket()) for _ in range(5)]
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        # A full backlog drops further packets.
        for client in clients:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_a_member_that_no_packet_reaches_is_avoided(cluster, blobs):
    member_store = MembershipStore(blobs)
    with silent_address() as address:
        await member_store.register(Member(name="silent", address=address), replicas=2)
        try:
            # A new member owns few partitions at first.
            keys = await wait_true(lambda: cluster.keys_of("silent", 40), what="it owns some keys")

            async def is_avoided() -> bool:
                began_s, key = time.monotonic(), keys.pop()
                answers = await asyncio.gather(*(cluster.get(node, key) for node in cluster.nodes))
                assert {answer.content for answer in answers} == {content(key)}
                assert time.monotonic() - began_s < 15
                out = [event["node"] for node in cluster.nodes for event in node.events("peer_out")]
                assert keys, "it was never avoided"
                return "silent" in out

            await wait_true(is_avoided, what="the silent member is avoided")
        finally:
            await member_store.remove("silent")
        await cluster.wait_routing()


async def test_a_bought_track_is_the_same_from_every_node_also_while_one_is_dead(cluster, blobs):
    media = Media(blobs, MediaConfig(), secret=lambda: SECRET)
    key = cluster.keys[0]
    stored = await media.tags.put(**BUYER)
    query = media.objects.url(key, ttl_s=600, tag=stored.id).partition("?")[2]
    tag = tag_bytes(Tags(**BUYER))
    bought, seam = tag + content(key), len(tag)

    async def etag_of(node) -> str:
        whole = await cluster.client.get(f"{node.url(key)}?{query}")
        assert (whole.status_code, whole.content) == (200, bought), node.name
        for first, last in ((0, seam), (seam - 3, seam + 3), (300_000, 560_000)):
            fields = {"Range": f"bytes={first}-{last}", "If-Range": whole.headers["etag"]}
            part = await cluster.client.get(f"{node.url(key)}?{query}", headers=fields)
            assert (part.status_code, part.content) == (206, bought[first : last + 1])
        return whole.headers["etag"]

    etags = {await etag_of(node) for node in cluster.nodes}
    assert len(etags) == 1
    refused = await cluster.client.get(f"{cluster.nodes[0].url(key)}?{query[:-1]}")
    assert refused.status_code == 403
    hidden = await cluster.client.get(cluster.nodes[0].url(tag_key(stored.id)))
    assert hidden.status_code == 404

    dead = next(node for node in cluster.nodes if node.name == cluster.owners(key)[0])
    dead.kill()
    for node in cluster.nodes:
        if node is not dead:
            assert {await etag_of(node)} == etags
    dead.start()
    await dead.wait_serving(cluster.client)
    await cluster.wait_routing()


async def test_a_hot_object_is_copied_by_a_node_that_does_not_keep_it(tmp_path):
    async with running_cluster(tmp_path, keys=2, COPY_RATE="1") as cluster:
        key = cluster.keys[0]
        asked = next(node for node in cluster.nodes if node.name not in cluster.owners(key))

        async def is_copied() -> bool:
            answers = [await cluster.get(asked, key) for _ in range(20)]
            assert {answer.content for answer in answers} == {content(key)}
            return "detail=peer" not in answers[-1].headers["cache-status"]

        await wait_true(is_copied, what="the node has its own copy")
        cluster.bucket.reads.clear()
        assert await is_copied()
        assert not cluster.bucket.reads


@pytest.mark.soak
async def test_a_trace_continues_at_the_owner_and_the_object_store(tmp_path, monkeypatch):
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        async with running_cluster(tmp_path) as cluster:
            await require_trace(cluster, blobs_of(cluster, monkeypatch))
            await wait_true(lambda: hops_below(receiver.spans), what="the spans of hops")
    [first] = {span.parent for span in receiver.spans if span.id in hops_below(receiver.spans)}
    assert first == "f0" * 8


def hops_below(spans):
    """Spans of requests to whose nodes a hop came, which is the span below."""
    hops = {span.parent for span in spans if span.attributes["headrace.media.is_hop"]}
    return hops & {span.id for span in spans}


async def require_trace(cluster, blobs):
    asked, *others = cluster.nodes
    warm, key, other = cluster.keys_of(others[0].name, 8, without=asked.name)[-3:]
    await Traces(blobs).start("user=42", for_s=60)

    async def is_followed() -> bool:
        await cluster.get(asked, warm, baggage="user=42", Range="bytes=0-0")
        return bool(lines(warm, [asked]) and lines(warm, others))

    def lines(key: str, nodes) -> list[dict]:
        found = [line for node in nodes for line in node.events("request_traced")]
        return [line for line in found if line["object"] == key]

    await wait_true(is_followed, what="the nodes have the trace's rule")
    answer = await cluster.get(asked, key, traceparent=PARENT, baggage="user=42,request=r7")
    assert answer.content == content(key)
    plain = await cluster.get(asked, other, traceparent=PARENT, baggage="user=43")
    assert plain.content == content(other)
    await wait_true(lambda: lines(key, [asked]) and lines(key, others), what="lines of both nodes")
    for line in (lines(key, [asked])[0], lines(key, others)[0]):
        assert (line["trace_id"], line["user"], line["request"]) == ("4b" * 16, "42", "r7")
    assert lines(key, [asked])[0]["node"] == asked.name
    assert "detail=peer" in lines(key, [asked])[0]["cache"]
    there = read_trace(cluster.bucket.fields[key], key)
    assert (there.trace, there.user, there.request) == ("4b" * 16, "42", "r7")
    # Requests of other users are neither logged nor sent to the store with their baggage.
    assert "baggage" not in cluster.bucket.fields[other]
    assert not lines(other, cluster.nodes)


class Churn:
    """One change after the other, at random, until its time is over."""

    def __init__(self, cluster, traffic, blobs, seed: int) -> None:
        self.cluster, self.traffic = cluster, traffic
        self.member_store, self.purges = MembershipStore(blobs), Purges(blobs)
        self.random = random.Random(seed)
        self.done: list[str] = []

    async def run(self, seconds: float) -> None:
        """Change something until then, or until a wrong byte."""
        ends_s = time.monotonic() + seconds
        changes = [self.weigh, self.drain, self.replace, self.replace, self.kill, self.grow]
        while time.monotonic() < ends_s and not self.wrong:
            change = self.random.choice(changes)
            await change()
            self.done.append(change.__name__)
            await self.pause(20)

    @property
    def wrong(self) -> list[str]:
        return [fault for fault in self.traffic.faults if "WRONG" in fault]

    async def pause(self, answers: int) -> None:
        await self.traffic.wait_reads(answers, is_strict=False)

    async def weigh(self) -> None:
        node = self.random.choice(self.cluster.nodes)
        await self.member_store.set_weight(node.name, self.random.choice([0.2, 0.5, 1.0, 2.0]))

    async def drain(self) -> None:
        node = self.random.choice(self.cluster.nodes)
        await self.member_store.drain(node.name)
        await self.pause(40)
        await self.member_store.undrain(node.name)

    async def grow(self) -> None:
        """A member that never answers, as at an address that was given away."""
        await self.member_store.register(Member(name="ghost", address="127.0.0.1:9"), replicas=2)
        await self.pause(40)
        await self.member_store.remove("ghost")

    async def replace(self) -> None:
        key = self.random.choice(self.cluster.keys)
        versions = self.traffic.versions.setdefault(key, {1})
        versions.add(max(versions) + 1)
        self.cluster.put(key, max(versions))
        await self.purges.purge(key)

    async def kill(self) -> None:
        node = self.random.choice(self.cluster.nodes)
        self.traffic.through = [one for one in self.cluster.nodes if one is not node]
        node.kill()
        await self.pause(60)
        node.start()
        await node.wait_serving(self.cluster.client)
        self.traffic.through = list(self.cluster.nodes)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
async def test_never_a_wrong_byte_while_everything_changes(tmp_path, monkeypatch, seed):
    async with running_cluster(tmp_path, DISKS=f"{tmp_path / 'disk'}:24MiB") as cluster:
        blobs = blobs_of(cluster, monkeypatch)
        async with Traffic(cluster, seed=seed) as traffic:
            churn = Churn(cluster, traffic, blobs, seed)
            await churn.run(CHURN_S)
            traffic.through = list(cluster.nodes)
        assert churn.wrong == []
        # Bodies of a replaced object or a killed node are cut.
        cut = [fault for fault in traffic.faults if "Error" in fault]
        assert traffic.faults == cut, [fault for fault in traffic.faults if fault not in cut][:5]
        assert len(cut) <= 0.05 * traffic.reads
        await cluster.wait_routing()
        for node in cluster.nodes:
            for key in cluster.keys:
                version = max(traffic.versions.get(key, {1}))
                is_new = partial(shows, cluster, node, key, version)
                await wait_true(is_new, what=f"{key} at {node.name}")
        print(f"seed {seed}: {traffic.reads} reads, {len(cut)} cut, {churn.done}")
