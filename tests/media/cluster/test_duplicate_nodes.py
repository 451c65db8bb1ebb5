"""Two nodes of one name: the second is not registered while the first answers; both log it."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from little_nodes import KEYS, LittleNode
from tests.kit.waiting import wait_true

from headrace.kernel.logs import configure_logs
from headrace.media import Media, MediaConfig
from headrace.media.cluster.cluster import NodeNameTaken, is_local, require_unique_name
from headrace.media.cluster.hop import HopSigner
from headrace.media.cluster.membership import Member, MembershipStore
from headrace.media.worker import serve

LISTEN = ("127.0.0.1", 1)
OWN = Member(name="n1", address="127.0.0.1:1")
SIGNER = HopSigner(KEYS, "n1")


@pytest.mark.parametrize("mood", ["good", "full"])
async def test_a_name_is_taken_while_its_node_answers_and_free_after(mood):
    node = LittleNode("n1", {})
    node.mood = mood
    await node.start()
    try:
        with pytest.raises(NodeNameTaken, match=r"media\.node"):
            await require_unique_name(node.member, OWN, SIGNER, LISTEN)
    finally:
        await node.stop()
    await require_unique_name(node.member, OWN, SIGNER, LISTEN)


@pytest.mark.parametrize(("name", "mood"), [("n2", "good"), ("n1", "denies all"), ("n1", "resets")])
async def test_another_node_or_a_stranger_at_the_address_takes_no_name(name, mood):
    node = LittleNode(name, {})
    node.mood = mood
    await node.start()
    try:
        entered = Member(name="n1", address=node.member.address)
        await require_unique_name(entered, OWN, SIGNER, LISTEN)
        assert node.asked, "it got no request"
    finally:
        await node.stop()


def test_an_address_of_this_machine_and_port_is_our_own():
    assert is_local("127.0.0.1:81", ("127.0.0.1", 81))
    assert is_local("127.0.0.1:81", ("0.0.0.0", 81))
    assert not is_local("127.0.0.1:82", ("0.0.0.0", 81))
    assert not is_local("127.0.0.2:81", ("127.0.0.1", 81))
    assert not is_local("192.0.2.1:81", ("0.0.0.0", 81))


@asynccontextmanager
async def running(blobs, folder):
    """A node n1 at a free port, and its address."""
    config = MediaConfig(node="n1", listen=("127.0.0.1", 0))
    media = Media(blobs, config, secret=lambda: "s" * 32, folder=folder)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(media, stop, lambda listen, _: ready.set_result(listen), run=folder)
    )
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield ready.result()
    finally:
        stop.set()
        await task


async def wait_entered(blobs, address: str) -> None:
    async def is_entered() -> bool:
        entered = (await MembershipStore(blobs).read()).member("n1")
        return entered is not None and entered.address == address

    await wait_true(is_entered, what=f"n1 is entered at {address}")


def reported(capfd) -> list[str]:
    lines = [line for line in capfd.readouterr().err.splitlines() if "node_name_taken" in line]
    return [json.loads(line)["reason"] for line in lines]


@pytest.mark.slow
async def test_a_name_goes_on_from_a_dead_node_and_not_from_one_that_answers(
    blobs, tmp_path, capfd
):
    configure_logs("media", level="info")
    reasons: list[str] = []

    def are_both_reported() -> bool:
        reasons.extend(reported(capfd))
        return len(reasons) >= 2

    async with running(blobs, tmp_path / "dead") as dead:
        await wait_entered(blobs, dead)
    async with running(blobs, tmp_path / "first") as first:
        await wait_entered(blobs, first)
        async with running(blobs, tmp_path / "second") as second:
            await wait_true(are_both_reported, what="both nodes log it")
            assert any(first in why and second in why for why in reasons)
            assert "another node with this name sent a request" in reasons
            await wait_entered(blobs, first)


@pytest.mark.slow
async def test_a_running_node_puts_its_own_dead_address_right(blobs, tmp_path):
    async with running(blobs, tmp_path / "node") as address:
        await wait_entered(blobs, address)
        await MembershipStore(blobs).register(Member(name="n1", address="127.0.0.1:9"), replicas=2)
        await wait_entered(blobs, address)
