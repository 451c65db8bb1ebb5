"""Members register themselves and are changed by operators, never partially."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from headrace.media.cluster.cluster_config import Document, DocumentDamaged, is_reserved
from headrace.media.cluster.membership import (
    MEMBERSHIP,
    RAMP_S,
    InvalidNode,
    Member,
    Membership,
    MembershipStore,
    NodeUnknown,
)


def member(name: str, **values) -> Member:
    return Member(name=name, address=f"10.0.0.{ord(name[0]) % 200}:8081", **values)


@pytest.fixture
def member_store(blobs):
    return MembershipStore(blobs)


async def test_nodes_enter_themselves_and_are_changed_by_name(member_store):
    assert (await member_store.read()) == Membership()
    await member_store.register(member("b", dc="x"), replicas=3)
    await member_store.register(member("a", started_at_s=50.0), replicas=2)
    found = await member_store.read()
    assert [one.name for one in found.members] == ["a", "b"]
    assert (found.version, found.replicas) == (2, 2), "the last start wins"
    await member_store.drain("a")
    await member_store.set_weight("b", 0.5)
    found = await member_store.read()
    assert [(one.state, one.weight) for one in found.members] == [("draining", 1.0), ("up", 0.5)]
    assert [one.name for one in found.candidates(1e9)] == ["b"]
    await member_store.undrain("a")
    await member_store.remove("b")
    assert [(one.name, one.state) for one in (await member_store.read()).members] == [("a", "up")]


async def test_a_node_that_starts_again_changes_nothing_that_was_set_by_hand(member_store):
    await member_store.register(member("a"), replicas=2)
    await member_store.register(member("b", started_at_s=1000.0), replicas=2)
    await member_store.drain("b")
    await member_store.set_weight("b", 3)
    before = await member_store.read()
    await member_store.register(member("b", started_at_s=1900.0), replicas=2)
    assert await member_store.read() == before
    moved = msgspec.structs.replace(member("b", started_at_s=1950.0), address="10.9.9.9:1")
    await member_store.register(moved, replicas=2)
    found = (await member_store.read()).member("b")
    assert found is not None
    assert (found.address, found.state, found.weight) == ("10.9.9.9:1", "draining", 3)
    assert found.started_at_s == 1000.0


async def test_nodes_of_a_new_cluster_have_equal_shares_at_once(member_store):
    """The first node kept 83 % of the partitions for minutes beside two later ones."""
    for number, name in enumerate("abc"):
        start_s = 1000.0 + number * 100
        await member_store.register(member(name, started_at_s=start_s), replicas=2)
        found = await member_store.read()
        for now_s in (start_s, start_s + 45, start_s + RAMP_S):
            assert len({one.weight for one in found.candidates(now_s)}) == 1
    await member_store.register(member("d", started_at_s=1000.0 + RAMP_S), replicas=2)
    weights = [one.weight for one in (await member_store.read()).candidates(1000.0 + RAMP_S)]
    assert weights == [1.0, 1.0, 1.0, 0.1], "these have cached objects, and it has none"


async def test_a_node_that_joins_later_ramps_up(member_store):
    await member_store.register(member("a", started_at_s=10.0), replicas=2)
    await member_store.register(member("b", started_at_s=1000.0), replicas=2)
    first, second = (await member_store.read()).candidates(1000.0)
    assert (first.weight, second.weight) == (1.0, 0.1)
    weights = [
        (await member_store.read()).candidates(1000.0 + s)[1].weight for s in range(0, 400, 30)
    ]
    assert weights == pytest.approx([0.1 * n for n in range(1, 11)] + [1.0] * 4)
    await member_store.remove("b")
    assert [one.name for one in (await member_store.read()).candidates(5000.0)] == ["a"]
    await member_store.register(member("b", started_at_s=6000.0), replicas=2)
    found = await member_store.read()
    assert found.candidates(6000.0)[1].weight == 0.1
    assert found.candidates(6000.0 + RAMP_S)[1].weight == 1.0
    assert found.candidates(5900.0)[1].weight == 0.1, "a clock that is behind"


@pytest.mark.parametrize(
    ("name", "address", "weight"),
    [
        ("", "10.0.0.1:1", 1),
        ("a;b", "10.0.0.1:1", 1),
        ("x" * 65, "10.0.0.1:1", 1),
        ("a\nb", "10.0.0.1:1", 1),
        ("a", "10.0.0.1", 1),
        ("a", "10.0.0.1:0", 1),
        ("a", "0.0.0.0:8081", 1),
        ("a", "[::]:8081", 1),
        ("a", "10.0.0.1:8081", 0),
        ("a", "10.0.0.1:8081", 101),
        ("a", "10.0.0.1:8081", float("nan")),
    ],
)
async def test_what_no_peer_could_reach_is_refused(member_store, name, address, weight):
    with pytest.raises((InvalidNode, ValueError)):
        await member_store.register(Member(name=name, address=address, weight=weight), replicas=2)
    assert (await member_store.read()).version == 0


async def test_unknown_nodes_and_bad_values_change_nothing(member_store):
    await member_store.register(member("a"), replicas=2)
    for change in (member_store.drain, member_store.undrain, member_store.remove):
        with pytest.raises(NodeUnknown, match="its members are a"):
            await change("z")
    for weight in (0, -1, 101, float("nan")):
        with pytest.raises(InvalidNode):
            await member_store.set_weight("a", weight)
    for replicas in (-1, 9):
        with pytest.raises(InvalidNode):
            await member_store.register(member("b"), replicas=replicas)
    assert (await member_store.read()).version == 1


async def test_changes_at_once_are_all_kept(member_store):
    await asyncio.gather(*(member_store.register(member(name), replicas=2) for name in "abcdefgh"))
    found = await member_store.read()
    assert [one.name for one in found.members] == list("abcdefgh")
    assert found.version == 8


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": -1}',
        b'{"version": 1, "members": [{"name": "a"}]}',
        b'{"version": 1, "members": [{"name": "a", "address": "x"}]}',
        b'{"version": 1, "replicas": 9}',
        b'{"version": 1, "members": [' + b",".join([b'{"name":"a","address":"h:1"}'] * 2) + b"]}",
        b"\xff\xfe",
    ],
)
async def test_a_damaged_document_is_neither_read_nor_written_over(blobs, member_store, data):
    await blobs.put(MEMBERSHIP.key, data)
    with pytest.raises(DocumentDamaged):
        await member_store.read()
    with pytest.raises(DocumentDamaged):
        await member_store.register(member("a"), replicas=2)
    assert await blobs.get(MEMBERSHIP.key) == data


async def test_fields_of_a_later_release_are_read_over(blobs, member_store):
    await blobs.put(MEMBERSHIP.key, b'{"version": 5, "new": 1, "members": []}')
    assert (await member_store.register(member("a"), replicas=2)).version == 6


async def test_what_others_store_meanwhile_is_never_written_over(blobs):
    document = Document(blobs, MEMBERSHIP)
    calls = []

    def meddle(old: Membership) -> Membership:
        if not calls:
            (blobs.folder / "_headrace/media").mkdir(parents=True)
            newer = msgspec.json.encode(Membership(version=41))
            (blobs.folder / MEMBERSHIP.key).write_bytes(newer)
        calls.append(old.version)
        return msgspec.structs.replace(old, replicas=5)

    assert await document.change(meddle) == Membership(version=42, replicas=5)
    assert calls == [0, 41]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("_headrace/media/membership.json", True),
        ("_headrace", True),
        ("_headrace2/a", False),
        ("tracks/_headrace/a", False),
    ],
)
def test_which_keys_are_the_cluster_s_own(key, expected):
    assert is_reserved(key) is expected
