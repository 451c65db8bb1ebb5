"""Cluster: each command reaches its primary despite moves and failures, and runs once."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from hostile_valkey import hostile_peer
from tests.kit.chaos import ChaosProxy
from tests.kit.own_cluster import Primary
from tests.kit.waiting import wait_true

from headrace.app import PACKAGES
from headrace.cli.doctor_engines import check_valkey
from headrace.engines.functions import Functions, load_libraries
from headrace.engines.multiplex import (
    BEGIN,
    Keys,
    Multiplexer,
    ValkeyPartlyDown,
    ValkeyRefused,
    scan,
    scan_all,
)
from headrace.engines.valkey import (
    Valkey,
    ValkeyConfig,
    ValkeyDown,
    ValkeyMoved,
    hash_slot,
    node_address,
    parse_cluster_map,
)
from headrace.views.durability_wait import DurabilityWait, durability_of


@pytest.fixture
async def line(cluster):
    """The multiplexed connections, with keys of this test's own."""
    config = ValkeyConfig(prefix=f"test-{secrets.token_hex(4)}")
    line = Multiplexer(cluster.url, config)
    yield line
    await line.close()


@pytest.fixture
async def stock(cluster):
    """The pools, with keys of this test's own."""
    stock = Valkey(cluster.url, ValkeyConfig(prefix=f"test-{secrets.token_hex(4)}"))
    yield stock
    await stock.close()


def keys_of(prefix, count=30):
    """Keys all over the hash slots."""
    return [f"{prefix}:{{k{number}}}" for number in range(count)]


def key_of(cluster, primary, prefix):
    """A key that this primary has."""
    return next(key for key in keys_of(prefix, 100) if cluster.owner_of(key) is primary)


@pytest.mark.parametrize(
    ("key", "slot"),
    [
        ("123456789", 0x31C3),
        ("foo", 12182),
        ("a{foo}b", 12182),
        ("{foo}{bar}", 12182),
        (b"{foo}", 12182),
        ("", 0),
    ],
)
def test_a_key_has_the_slot_that_the_engine_says(key, slot):
    assert hash_slot(key) == slot


def test_an_empty_hash_tag_is_none(cluster):
    for key in ("a{}b", "{}", "a{b", "{}{b}"):
        assert cluster.primaries[0].ask("CLUSTER", "KEYSLOT", key) == hash_slot(key)


def test_a_map_is_read_with_nodes_without_a_name():
    told = [
        [0, 5, [b"10.0.0.1", 7000, b"id", []], [b"10.0.0.9", 7000, b"id"]],
        [6, 9, [None, 7001, b"id"]],
        [10, 16383, [b"?", 7002, b"id", [b"hostname", b""]]],
    ]
    found = parse_cluster_map(told, b"cluster_state:ok\r\ncluster_current_epoch:7\r\n", host="gate")
    assert found.primaries == ["10.0.0.1:7000", "gate:7001", "gate:7002"]
    assert (found.owners[5], found.owners[6], found.epoch) == ("10.0.0.1:7000", "gate:7001", 7)
    assert parse_cluster_map([], b"", host="gate").primaries == []
    assert node_address(":7001", host="gate") == ("gate", 7001)
    assert node_address("::1:7001", host="gate") == ("::1", 7001)


async def test_each_command_reaches_the_primary_of_its_key(line, stock):
    keys = keys_of(line.prefix)
    assert await asyncio.gather(*[line.command("INCR", key) for key in keys]) == [1] * len(keys)
    assert await line.values([*keys, f"{line.prefix}:nothing"]) == [b"1"] * len(keys) + [None]
    assert {await line.owner(key) for key in keys} == {n.server for n in await stock.primaries()}
    assert len(await stock.primaries()) == 3
    assert await stock.command("GET", keys[7], near=keys[7]) == b"1"
    assert await line.command("PING") == b"PONG"
    await stock.open()


async def test_a_scan_finds_what_is_on_every_primary(line):
    tags = range(12)
    for tag in tags:
        for number in range(tag + 1):
            await line.command("SET", f"{line.prefix}:{{s:{tag}}}:c:{number}", 1)
    keys = Keys(f"{line.prefix}:{{s:*}}:c:*", [f"{line.prefix}:{{s:{tag}}}:c:" for tag in tags])
    found = [key async for part in scan_all(line, keys) for key in part]
    assert len(found) == len(set(found)) == sum(tag + 1 for tag in tags)
    few = Keys(keys.pattern, keys.starts[:3])
    cursor, found = BEGIN, []
    while found == [] or cursor != BEGIN:
        cursor, part = await scan(line, few, cursor)
        found += part
    assert len(found) == 1 + 2 + 3
    assert await scan(line, Keys(keys.pattern, []), BEGIN) == (BEGIN, [])


async def test_functions_are_on_every_primary_and_again_where_they_were_lost(cluster, line, stock):
    await load_libraries(stock, PACKAGES)
    for primary in cluster.primaries:
        assert b"headrace_views_v1" in str(primary.ask("FUNCTION", "LIST")).encode()
        assert primary.ask("FUNCTION", "FLUSH") == b"OK"
    functions = Functions(line, "headrace.views")
    for shard in range(8):
        key = f"{line.prefix}:{{v:{shard}}}:q"
        assert await functions.call("headrace_views_lag_v1", [key], ["0-0"]) == [0, 0]
    assert await load_libraries(stock, ("headrace.views",)) == []


@pytest.mark.slow
async def test_a_slot_that_moves_loses_and_doubles_nothing(cluster, line):
    key = f"{line.prefix}:{{moving}}"
    asked, stop = 0, asyncio.Event()

    async def count():
        nonlocal asked
        while not stop.is_set():
            asked += 1
            await line.command("INCR", key)

    counting = [asyncio.create_task(count()) for _ in range(20)]
    owner = cluster.owner_of(key)
    for to in [one for one in cluster.primaries if one is not owner] + [owner]:
        await asyncio.to_thread(cluster.move, key, to=to)
        await wait_true(lambda to=to: _is_at(line, key, to))
    stop.set()
    await asyncio.gather(*counting)
    assert int(await line.command("GET", key)) == asked
    assert len({id(each) for each in line._by_loop.values()}) == 1


async def _is_at(line, key, primary):
    return await line.owner(key) == primary.address


async def test_a_migrating_key_is_requested_from_its_target(cluster, line):
    key = f"{line.prefix}:{{asked}}"
    owner, slot = cluster.owner_of(key), hash_slot(key)
    target = next(one for one in cluster.primaries if one is not owner)
    ids = [one.ask("CLUSTER", "MYID").decode() for one in (owner, target)]
    assert await line.command("GET", key) is None
    assert target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0]) == b"OK"
    assert owner.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1]) == b"OK"
    try:
        told = await asyncio.gather(*[line.command("INCR", key) for _ in range(50)])
        assert sorted(told) == list(range(1, 51))
        assert "ASK" in str(owner.ask("GET", key))
        assert await line.command("UNLINK", key) == 1
    finally:
        for one in (owner, target):
            assert one.ask("CLUSTER", "SETSLOT", slot, "STABLE") == b"OK"


@pytest.mark.slow
async def test_a_primary_that_is_away_fails_its_own_keys_alone(cluster, line, stock):
    *others, gone = cluster.primaries
    theirs = [key_of(cluster, one, line.prefix) for one in others]
    its = key_of(cluster, gone, line.prefix)
    for key in (*theirs, its):
        await line.command("SET", key, 5)
    gone.kill()
    try:
        with pytest.raises(ValkeyDown):
            await line.command("GET", its)
        for key in theirs:
            assert await line.command("INCR", key) == 6
        with pytest.raises(ValkeyPartlyDown) as told:
            await line.values([theirs[0], its, theirs[1]])
        assert (told.value.found, told.value.lost) == ([b"6", None, b"6"], {1})
        with pytest.raises(ValkeyDown) as all_lost:
            await line.values([its, its])
        assert not isinstance(all_lost.value, ValkeyPartlyDown)
        await stock.open()
        assert await durability_of(stock) == ("no", 0)
        assert await load_libraries(stock, ("headrace.views",)) in ([], ["headrace_views_v1"])
        found = {finding.subject: finding.state for finding in await check_of(stock)}
        assert found.pop(f"valkey {gone.address}") == "fail"
        assert "fail" not in found.values()
    finally:
        gone.start()
        cluster.wait_serving()

    async def is_back():
        with suppress(ValkeyDown):
            return await line.command("GET", its) == b"5"

    await wait_true(is_back)


async def check_of(stock):
    """The findings of doctor."""

    class Engines:
        valkey = stock

    return await check_valkey(Engines)


@pytest.mark.slow
async def test_the_first_address_may_go_away_once_the_others_are_known(cluster, line, stock):
    first, other, _ = cluster.primaries
    key = key_of(cluster, other, line.prefix)
    await line.open()
    await stock.open()
    first.kill()
    try:
        assert await line.command("INCR", key) == 1
        await stock.open()
        assert await stock.command("INCR", key, near=key) == 2
    finally:
        first.start()
        cluster.wait_serving()


@pytest.mark.slow
async def test_a_primary_that_joins_gets_its_functions_with_the_first_call(cluster, line, tmp_path):
    functions, key = Functions(line, "headrace.views"), f"{line.prefix}:{{joining}}:q"
    assert await functions.call("headrace_views_lag_v1", [key], ["0-0"]) == [0, 0]
    owner, joining = cluster.owner_of(key), Primary(tmp_path / "joining")
    cluster.primaries.append(joining)
    try:
        joining.start()
        meet = ("CLUSTER", "MEET", "127.0.0.1", owner.port, owner.bus_port)
        assert joining.ask(*meet) == b"OK"
        await asyncio.to_thread(cluster.wait_serving)
        await asyncio.to_thread(cluster.move, key, to=joining)
        assert joining.ask("FUNCTION", "LIST") == []
        assert await functions.call("headrace_views_lag_v1", [key], ["0-0"]) == [0, 0]
        assert await line.owner(key) == joining.address
        await asyncio.to_thread(cluster.move, key, to=owner)
        assert await functions.call("headrace_views_lag_v1", [key], ["0-0"]) == [0, 0]
    finally:
        cluster.primaries.remove(joining)
        name = joining.ask("CLUSTER", "MYID").decode()
        joining.end()
        for one in cluster.primaries:
            assert one.ask("CLUSTER", "FORGET", name) == b"OK"


async def test_a_durability_wait_uses_the_primary_of_each_shard(cluster, stock):
    fence = DurabilityWait(stock, replicas=0, timeout_s=1)
    for one in cluster.primaries:
        assert one.ask("CONFIG", "SET", "appendfsync", "always") == b"OK"
    try:
        assert await durability_of(stock) == ("always", 0)
        await asyncio.gather(*[fence.wait(shard) for shard in range(8) for _ in range(3)])
        key = f"{stock.prefix}:{{v:0}}:f"
        owner = cluster.owner_of(key)
        other = next(one for one in cluster.primaries if one is not owner)
        for to in (other, owner):
            await asyncio.to_thread(cluster.move, key, to=to)
            await fence.wait(0)
        assert int(await stock.command("GET", key, near=key)) >= 3
    finally:
        for one in cluster.primaries:
            assert one.ask("CONFIG", "SET", "appendfsync", "no") == b"OK"
    assert await durability_of(stock) == ("no", 0)


def one_of_a_cluster(peer, words):
    """A node that first claims all hash slots and then redirects."""
    if words == [b"CLUSTER", b"SLOTS"]:
        node = b"*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$2\r\nid\r\n" % peer.port
        return b"*1\r\n*3\r\n:0\r\n:16383\r\n" + node
    if words[0] == b"CLUSTER":
        return b"$27\r\ncluster_current_epoch:1\r\n\r\n\r\n"
    if words == [b"PING"]:
        return b"+PONG\r\n"
    return b"-MOVED %d 127.0.0.1:%d\r\n" % (hash_slot(words[1]), peer.port)


@pytest.mark.slow
async def test_redirects_have_a_limit():
    async with hostile_peer(one_of_a_cluster) as peer:
        peer.greets = False
        line = Multiplexer(peer.url, ValkeyConfig())
        with pytest.raises(ValkeyMoved):
            await line.command("GET", "a")
        await line.close()


@pytest.mark.slow
async def test_a_single_server_that_says_moved_is_found_to_be_none():
    async with hostile_peer(lambda _, words: b"-MOVED 1 127.0.0.1:1\r\n") as peer:
        line = Multiplexer(peer.url, ValkeyConfig())
        with pytest.raises(ValkeyMoved, match=r"of the cluster in valkey\.url"):
            await line.command("GET", "a")
        peer.answer = lambda _, words: b"+here\r\n"
        assert await line.command("GET", "a") == b"here"
        peer.answer = one_of_a_cluster
        peer.greets = False
        with pytest.raises(ValkeyMoved):
            await line.command("GET", "a")
        assert await line.is_cluster()
        with pytest.raises(ValkeyRefused):
            await _refused(line, peer)
        await line.close()


async def _refused(line, peer):
    peer.answer = lambda _, words: b"-ERR no\r\n"
    await line.command("GET", "a")


@pytest.mark.parametrize("dead", [0, 1])
async def test_a_url_of_several_nodes_needs_one_that_answers(cluster, dead):
    """A process that starts while some of them are away finds the rest by any other."""
    places = [primary.address for primary in cluster.primaries[:2]]
    places[dead] = "127.0.0.1:1"
    url, prefix = f"valkey://{','.join(places)}", f"test-{secrets.token_hex(4)}"
    line = Multiplexer(url, ValkeyConfig(prefix=prefix))
    stock = Valkey(url, ValkeyConfig(prefix=prefix))
    await stock.open()
    assert await stock.is_cluster()
    assert await stock.command("PING")
    for key in keys_of(prefix, 30):
        await line.command("SET", key, "1")
        assert await stock.command("GET", key, near=key) == b"1"
    assert len({await line.owner(key) for key in keys_of(prefix, 30)}) == 3
    await line.close()
    await stock.close()


async def test_a_url_of_several_nodes_is_for_a_cluster_alone(running_engines):
    with ChaosProxy(running_engines.endpoints.valkey_url) as proxy:
        place = urlsplit(proxy.url).netloc
        url = f"valkey://127.0.0.1:1,{place}"
        line, stock = Multiplexer(url, ValkeyConfig()), Valkey(url, ValkeyConfig())
        with pytest.raises(ValkeyDown, match="not in a cluster"):
            await line.open()
        with pytest.raises(ValkeyDown, match="not in a cluster"):
            await stock.open()
        await line.close()
        await stock.close()
