"""Peer health: failures take a peer out, only a probe brings it back; a missed one is a doubt."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from little_nodes import KEYS, asking
from node_kinds import few_partitions
from tests.kit.waiting import wait_true

from headrace.media.cluster.hop import HopSigner, PeerLost, PeerRequest
from headrace.media.cluster.membership import Member
from headrace.media.cluster.peers import FAILURES_MAX, PROBES_MAX, Health, Peer
from headrace.media.service.nodes import answers

KEY, DATA = "tracks/a.mp3", bytes(range(256)) * 8


@pytest.fixture(autouse=True)
def _few():
    with few_partitions(bits=14):
        yield


def test_a_refused_connection_takes_a_peer_out_at_once():
    health = Health()
    assert health.fail(is_refused=True)
    assert not health.is_usable
    assert not health.fail(is_refused=True), "reported once"


def test_three_bad_answers_in_a_row_take_it_out_and_a_good_one_between_saves_it():
    health = Health()
    for _ in range(10):
        assert not health.fail(is_refused=False)
        assert not health.fail(is_refused=False)
        health.succeed()
    assert [health.fail(is_refused=False) for _ in range(3)] == [False, False, True]


def test_only_a_probe_brings_it_back():
    health = Health()
    health.fail(is_refused=True)
    health.succeed()
    assert not health.is_usable
    assert health.note_probe(is_answered=True)
    assert health.is_usable
    assert not health.note_probe(is_answered=True), "reported once"


STEPS = st.lists(st.sampled_from(["good", "bad", "gone", "probe good", "probe bad"]))


@given(STEPS)
def test_it_is_what_happened_last_that_counts(steps):
    health, is_usable, bad = Health(), True, 0
    for step in steps:
        if step == "good":
            health.succeed()
            bad = 0 if is_usable else bad
        elif step.startswith("probe"):
            health.note_probe(is_answered=step == "probe good")
            bad = bad if is_usable or step == "probe bad" else 0
            is_usable = step == "probe good"
        else:
            health.fail(is_refused=step == "gone")
            bad += 1
            is_usable = is_usable and step == "bad" and bad < FAILURES_MAX
        assert health.is_usable == is_usable


class Node:
    """A server that answers its health check from connection number `answers_from` on."""

    def __init__(self, answers_from):
        self.answers_from = answers_from
        self.asked = 0
        self._held = []

    async def serve(self, reader, writer):
        self.asked += 1
        if self.asked < self.answers_from:
            self._held.append(writer)
            return
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()

    def close(self):
        for writer in self._held:
            writer.close()


@pytest.mark.parametrize("answers_from", [1, PROBES_MAX, PROBES_MAX + 100])
async def test_a_busy_node_is_probed_again_and_a_hanging_one_is_out(answers_from):
    node = Node(answers_from)
    server = await asyncio.start_server(node.serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        is_alive = await answers(Member(name="a", address=f"127.0.0.1:{port}"))
        assert is_alive is (answers_from <= PROBES_MAX)
        if not is_alive:
            assert PROBES_MAX <= node.asked <= 2 * PROBES_MAX, "bounded"
    finally:
        node.close()
        server.close()
    assert not await answers(Member(name="a", address=f"127.0.0.1:{port}")), "refused"


class ResettingSigner(HopSigner):
    """Lets the listening node reset the connection that was just made to it."""

    def __init__(self, listening):
        super().__init__(KEYS, "asker")
        self._listening = listening

    def sequence(self):
        connection, _ = self._listening.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        return super().sequence()


async def test_a_node_that_resets_a_connection_at_once_has_refused_it():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        member = Member(name="a", address=f"127.0.0.1:{listening.getsockname()[1]}")
        peer = Peer(member, ResettingSigner(listening), timeout_s=60.0)
        with pytest.raises(PeerLost, match="reset a new connection") as found:
            await peer.request(PeerRequest("GET", "/"))
        assert found.value.is_refused
        assert await peer.probe() is False


@asynccontextmanager
async def hanging(router):
    """A request that waits for the first replica, which leaves a probe unanswered."""
    first = router.order(KEY)[0]
    peer = router.peers[first.name]
    peer.timeout_s, peer.probe_timeout_s = 60.0, 0.1
    await router.get(KEY)
    first.mood = "hangs"
    coming = asyncio.create_task(router.get(KEY, 7, 77))
    await wait_true(lambda: router.slow == [first.name])
    probing = asyncio.create_task(peer.is_alive())
    await wait_true(lambda: peer.health.is_doubted, what="a doubt")
    yield coming
    first.going_on.set()
    await probing


async def test_a_peer_without_an_answer_to_one_probe_hands_over_what_waits():
    """It stays usable, as three take it out, and is first again when it answers one."""
    async with asking({KEY: DATA}) as router:
        first, second = router.order(KEY)
        async with hanging(router) as coming:
            assert await coming == DATA[7:77]
            assert (len(second.asked), router.outs) == (1, [])
            assert router.order(KEY) == [second, first]
        router.peers[first.name].health.note_probe(is_answered=True)
        assert router.order(KEY) == [first, second]


async def test_a_doubted_peer_without_another_replica_is_requested_again():
    async with asking({KEY: DATA}, count=1, replicas=1) as router:
        reads = router.origin.blocks_asked
        async with hanging(router) as coming:
            router.order(KEY)[0].going_on.set()
            assert await coming == DATA[7:77]
        assert router.origin.blocks_asked == reads
