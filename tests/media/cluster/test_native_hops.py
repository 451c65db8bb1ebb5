"""Requests of the native data plane to another node that answers wrongly, slowly or not at all."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from little_nodes import LittleNode
from node_kinds import disk_in, few_partitions, over_tls, store_in
from raw_clients import SECRET, head_of, pattern, serving, wait_until
from tests.kit.waiting import wait_true

from headrace.kernel.signing import derive_key
from headrace.media.cluster.hop import KEY_USE, HopGate, HopGuard
from headrace.media.cluster.membership import Member, MembershipStore

DATA = pattern(700_000, 7)
"""Two blocks and a part of a third."""
FIRST, LAST = 1000, 650_000
KEY = "tracks/a.bin"


class Owner(LittleNode):
    """The node that keeps all keys. `spoil` changes its next answer but `good` to a GET, once."""

    def __init__(self) -> None:
        super().__init__("b", {KEY: DATA})
        guard = HopGuard([derive_key(SECRET, KEY_USE)], "b")
        self.gate = HopGate(guard, self.generations, refresh_purges=lambda: None)
        self.spoil, self.good = None, 0

    def _whole_answer(self, request) -> bytes:
        answer = super()._whole_answer(request)
        if request.method != "GET" or self.spoil is None:
            return answer
        self.good -= 1
        if self.good >= 0:
            return answer
        spoil, self.spoil = self.spoil, None
        return spoil(answer)


def without(answer: bytes, field: bytes, value: bytes | None) -> bytes:
    """The answer with another value of `field`, or without it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(field + b":")]
    if value is not None:
        lines.append(field + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


FAULTS = {
    "garbage": lambda _: b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "busy": lambda _: b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    "whole": lambda a: a.replace(b"206 Partial Content", b"200 OK"),
    "other version": lambda a: without(a, b"ETag", b'"another"'),
    "other length": lambda a: without(a, b"Content-Length", b"17"),
    "no length": lambda a: without(a, b"Content-Length", None),
    "chunked": lambda a: without(a, b"Transfer-Encoding", b"chunked"),
    "other range": lambda a: without(a, b"Content-Range", b"bytes 0-9/700000"),
    "unsigned": lambda a: without(a, b"X-Headrace-Reply", None),
    "forged": lambda a: without(a, b"X-Headrace-Reply", b"0" * 64),
    "two lengths": lambda a: a.replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\n", 1),
    "too many bytes": lambda a: a + b"x",
}


@asynccontextmanager
async def asking_owner(folder, **settings):
    """A node without keys of its own, and the owner of all. The store itself has no object."""
    owner = Owner()
    await owner.start()
    try:
        async with store_in(folder) as blobs:
            member_store = MembershipStore(blobs)
            await member_store.register(Member(name="a", address="127.0.0.1:1"), replicas=1)
            await member_store.drain("a")
            await member_store.register(owner.member, replicas=1)
            settings = {"node": "a", "disks": disk_in(folder / "disk"), "replicas": 1, **settings}
            with few_partitions():
                async with serving(blobs, run=folder / "run", **settings) as node:
                    node.url = node.media.objects.url(KEY, ttl_s=600).partition("/m/")[2]
                    yield node, owner
    finally:
        owner.going_on.set()
        await owner.stop()


both = pytest.mark.parametrize(
    "start", [asking_owner, over_tls(asking_owner)], ids=["HTTP", "HTTPS"]
)


def blocks_passed(node) -> float:
    """Blocks of the owner that the native data plane has sent on."""
    return node.series("media_blocks_total", outcome="pass")


async def warm(node, client) -> None:
    """Request until the native data plane answers."""
    before = blocks_passed(node)

    async def is_native() -> bool:
        answer = await client.ask(node.url, Range="bytes=5-9")
        assert answer.status in (206, 404), "404 until the table is built"
        return blocks_passed(node) > before

    await wait_true(is_native, what="an answer of the native plane")


async def ask(node, client):
    return await client.ask(node.url, Range=f"bytes={FIRST}-{LAST}")


@both
async def test_a_wrong_answer_of_the_owner_costs_the_client_nothing(start, tmp_path):
    """Before the first byte and after it: requested again, without a wrong byte."""
    async with start(tmp_path) as (node, owner):
        client = await node.connect()
        await warm(node, client)
        faults = node.series("media_hops_total", outcome="failed")
        for name, spoil in FAULTS.items():
            for good in (0, 1):
                owner.good, owner.spoil = good, spoil
                answer = await ask(node, client)
                assert (answer.status, answer.body == DATA[FIRST : LAST + 1]) == (206, True), name
                assert owner.spoil is None, name
                # By Python, after which the native plane answers again.
                answer = await ask(node, client)
                assert answer.status == 206, (name, good)
        wanted = faults + 2 * len(FAULTS)
        await wait_until(lambda: node.series("media_hops_total", outcome="failed") == wanted)


@both
async def test_an_owner_that_ends_within_a_block_is_out_and_the_client_cut(start, tmp_path):
    """The store has no object to continue with. No wrong byte is sent, and no clean end."""
    async with start(tmp_path) as (node, owner):
        client = await node.connect()
        await warm(node, client)
        owner.mood = "ends half-way"
        owner.going_on.set()
        client.send(head_of(node.url, fields={"Range": f"bytes={FIRST}-{LAST}"}))
        got, is_cut = await client.read_up_to(LAST)
        _, _, body = got.partition(b"\r\n\r\n")
        assert (is_cut, len(body) > 0, DATA[FIRST:].startswith(body)) == (True, True, True)
        client = await node.connect()
        owner.mood = "resets"
        assert (await ask(node, client)).status in (404, 503)


async def test_a_hanging_owner_is_probed_and_its_clients_are_handed_over(tmp_path):
    async with asking_owner(tmp_path) as (node, owner):
        client, leaving = await node.connect(), await node.connect()
        await warm(node, client)
        owner.mood = "hangs"
        for one in (client, leaving):
            one.send(head_of(node.url, fields={"Range": "bytes=0-9"}))
        leaving.drop()
        answer = await client.answer()
        assert answer.status in (404, 503)
        owner.mood = "good"
        owner.going_on.set()
        await warm(node, client)
        assert (await ask(node, client)).body == DATA[FIRST : LAST + 1]


@both
async def test_pipelined_requests_are_answered_in_order_by_hops(start, tmp_path):
    """All answers in order, also behind one that is handed over in its middle."""
    async with start(tmp_path) as (node, owner):
        client = await node.connect()
        await warm(node, client)
        owner.good, owner.spoil = 1, FAULTS["garbage"]
        spans = [(FIRST, LAST), (0, 9), (262_140, 262_150), (699_000, 699_999)]
        heads = [head_of(node.url, fields={"Range": f"bytes={a}-{b}"}) for a, b in spans]
        client.send(b"".join(heads))
        for first, last in spans:
            answer = await client.answer()
            assert answer.body == DATA[first : last + 1]
            assert answer.fields["content-range"] == f"bytes {first}-{last}/{len(DATA)}"
