"""Cluster: each command reaches its primary despite moves and failures, and runs once."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import contextmanager, suppress
from types import SimpleNamespace
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

LAG = ("headrace_views_lag_v1", ["0-0"])


@pytest.fixture
async def connect():
    """Both clients of a URL, with keys of one test: multiplexed and pooled."""
    opened = []

    def make(url):
        config = ValkeyConfig(prefix=f"test-{secrets.token_hex(4)}")
        opened.extend([Multiplexer(url, config), Valkey(url, config)])
        return opened[-2:]

    yield make
    for client in opened:
        await client.close()


@pytest.fixture
def clients(cluster, connect):
    return connect(cluster.url)


@pytest.fixture
def line(clients):
    """The multiplexed connections."""
    return clients[0]


@pytest.fixture
def stock(clients):
    """The pools."""
    return clients[1]


def keys_of(prefix, count=30):
    """Keys all over the hash slots."""
    return [f"{prefix}:{{k{number}}}" for number in range(count)]


def key_of(cluster, primary, prefix):
    """A key of this primary."""
    return next(key for key in keys_of(prefix, 100) if cluster.owner_of(key) is primary)


@contextmanager
def killed(cluster, primary):
    """A primary is down while the block lasts."""
    primary.kill()
    try:
        yield
    finally:
        primary.start()
        cluster.wait_serving()


def test_hash_slots_are_those_of_the_engine(cluster):
    keys = ["123456789", "foo", "a{foo}b", "{foo}{bar}", "", "a{}b", "{}", "a{b", "{}{b}"]
    for key in keys:
        assert cluster.primaries[0].ask("CLUSTER", "KEYSLOT", key) == hash_slot(key)
    assert hash_slot(b"{foo}") == hash_slot("foo")


def test_a_map_is_parsed_with_nodes_without_a_name():
    reply = [
        [0, 5, [b"10.0.0.1", 7000, b"id", []], [b"10.0.0.9", 7000, b"id"]],
        [6, 9, [None, 7001, b"id"]],
        [10, 16383, [b"?", 7002, b"id", [b"hostname", b""]]],
    ]
    info = b"cluster_state:ok\r\ncluster_current_epoch:7\r\n"
    found = parse_cluster_map(reply, info, host="gate")
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


async def test_a_scan_finds_the_keys_of_every_primary(line):
    tags = range(12)
    starts = [f"{line.prefix}:{{s:{tag}}}:c:" for tag in tags]
    for tag in tags:
        for number in range(tag + 1):
            await line.command("SET", f"{starts[tag]}{number}", 1)
    keys = Keys(f"{line.prefix}:{{s:*}}:c:*", starts)
    found = [key async for part in scan_all(line, keys) for key in part]
    assert len(found) == len(set(found)) == sum(tag + 1 for tag in tags)
    few = Keys(keys.pattern, keys.starts[:3])
    cursor, found = BEGIN, []
    while found == [] or cursor != BEGIN:
        cursor, part = await scan(line, few, cursor)
        found += part
    assert len(found) == 1 + 2 + 3
    assert await scan(line, Keys(keys.pattern, []), BEGIN) == (BEGIN, [])


async def test_lost_functions_are_loaded_again_on_every_primary(cluster, line, stock):
    await load_libraries(stock, PACKAGES)
    for primary in cluster.primaries:
        assert b"headrace_views_v1" in str(primary.ask("FUNCTION", "LIST")).encode()
        assert primary.ask("FUNCTION", "FLUSH") == b"OK"
    functions = Functions(line, "headrace.views")
    for shard in range(8):
        assert await functions.call(LAG[0], [f"{line.prefix}:{{v:{shard}}}:q"], LAG[1]) == [0, 0]
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

    async def is_at(primary):
        return await line.owner(key) == primary.address

    counting = [asyncio.create_task(count()) for _ in range(20)]
    owner = cluster.owner_of(key)
    for to in [one for one in cluster.primaries if one is not owner] + [owner]:
        await asyncio.to_thread(cluster.move, key, to=to)
        await wait_true(lambda to=to: is_at(to))
    stop.set()
    await asyncio.gather(*counting)
    assert int(await line.command("GET", key)) == asked
    assert len({id(each) for each in line._by_loop.values()}) == 1


async def test_a_key_of_a_migrating_slot_is_requested_from_its_target(cluster, line):
    key = f"{line.prefix}:{{asked}}"
    owner, slot = cluster.owner_of(key), hash_slot(key)
    target = next(one for one in cluster.primaries if one is not owner)
    ids = [one.ask("CLUSTER", "MYID").decode() for one in (owner, target)]
    assert await line.command("GET", key) is None
    assert target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0]) == b"OK"
    assert owner.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1]) == b"OK"
    try:
        replies = await asyncio.gather(*[line.command("INCR", key) for _ in range(50)])
        assert sorted(replies) == list(range(1, 51))
        assert "ASK" in str(owner.ask("GET", key))
        assert await line.command("UNLINK", key) == 1
    finally:
        for one in (owner, target):
            assert one.ask("CLUSTER", "SETSLOT", slot, "STABLE") == b"OK"


@pytest.mark.slow
async def test_a_primary_that_is_down_fails_only_its_own_keys(cluster, line, stock):
    *others, gone = cluster.primaries
    alive = [key_of(cluster, one, line.prefix) for one in others]
    dead = key_of(cluster, gone, line.prefix)
    for key in (*alive, dead):
        await line.command("SET", key, 5)
    with killed(cluster, gone):
        with pytest.raises(ValkeyDown):
            await line.command("GET", dead)
        for key in alive:
            assert await line.command("INCR", key) == 6
        with pytest.raises(ValkeyPartlyDown) as raised:
            await line.values([alive[0], dead, alive[1]])
        assert (raised.value.found, raised.value.lost) == ([b"6", None, b"6"], {1})
        with pytest.raises(ValkeyDown) as all_lost:
            await line.values([dead, dead])
        assert not isinstance(all_lost.value, ValkeyPartlyDown)
        await stock.open()
        assert await durability_of(stock) == ("no", 0)
        assert await load_libraries(stock, ("headrace.views",)) in ([], ["headrace_views_v1"])
        findings = await check_valkey(SimpleNamespace(valkey=stock))
        states = {finding.subject: finding.state for finding in findings}
        assert states.pop(f"valkey {gone.address}") == "fail"
        assert "fail" not in states.values()

    async def is_back():
        with suppress(ValkeyDown):
            return await line.command("GET", dead) == b"5"

    await wait_true(is_back)
    with killed(cluster, cluster.primaries[0]):
        assert await line.command("INCR", dead) == 6, "the first address of the URL is not needed"
        await stock.open()
        assert await stock.command("INCR", dead, near=dead) == 7


@pytest.mark.slow
async def test_a_new_primary_gets_its_functions_with_the_first_call(cluster, line, tmp_path):
    functions, key = Functions(line, "headrace.views"), f"{line.prefix}:{{joining}}:q"
    assert await functions.call(LAG[0], [key], LAG[1]) == [0, 0]
    owner, joining = cluster.owner_of(key), Primary(tmp_path / "joining")
    cluster.primaries.append(joining)
    try:
        joining.start()
        meet = ("CLUSTER", "MEET", "127.0.0.1", owner.port, owner.bus_port)
        assert joining.ask(*meet) == b"OK"
        await asyncio.to_thread(cluster.wait_serving)
        await asyncio.to_thread(cluster.move, key, to=joining)
        assert joining.ask("FUNCTION", "LIST") == []
        assert await functions.call(LAG[0], [key], LAG[1]) == [0, 0]
        assert await line.owner(key) == joining.address
        await asyncio.to_thread(cluster.move, key, to=owner)
        assert await functions.call(LAG[0], [key], LAG[1]) == [0, 0]
    finally:
        cluster.primaries.remove(joining)
        name = joining.ask("CLUSTER", "MYID").decode()
        joining.end()
        for one in cluster.primaries:
            assert one.ask("CLUSTER", "FORGET", name) == b"OK"


async def test_a_durability_wait_uses_the_primary_of_each_shard(cluster, stock):
    wait = DurabilityWait(stock, replicas=0, timeout_s=1)
    for one in cluster.primaries:
        assert one.ask("CONFIG", "SET", "appendfsync", "always") == b"OK"
    try:
        assert await durability_of(stock) == ("always", 0)
        await asyncio.gather(*[wait.wait(shard) for shard in range(8) for _ in range(3)])
        key = f"{stock.prefix}:{{v:0}}:f"
        owner = cluster.owner_of(key)
        for to in (next(one for one in cluster.primaries if one is not owner), owner):
            await asyncio.to_thread(cluster.move, key, to=to)
            await wait.wait(0)
        assert int(await stock.command("GET", key, near=key)) >= 3
    finally:
        for one in cluster.primaries:
            assert one.ask("CONFIG", "SET", "appendfsync", "no") == b"OK"
    assert await durability_of(stock) == ("no", 0)


def redirecting_node(peer, words):
    """A node that first claims all hash slots and then redirects every command to itself."""
    if words == [b"CLUSTER", b"SLOTS"]:
        node = b"*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$2\r\nid\r\n" % peer.port
        return b"*1\r\n*3\r\n:0\r\n:16383\r\n" + node
    if words[0] == b"CLUSTER":
        return b"$27\r\ncluster_current_epoch:1\r\n\r\n\r\n"
    if words == [b"PING"]:
        return b"+PONG\r\n"
    return b"-MOVED %d 127.0.0.1:%d\r\n" % (hash_slot(words[1]), peer.port)


@pytest.mark.slow
async def test_redirects_are_limited_and_those_of_a_single_server_explained():
    async with hostile_peer(lambda _, words: b"-MOVED 1 127.0.0.1:1\r\n") as peer:
        line = Multiplexer(peer.url, ValkeyConfig())
        with pytest.raises(ValkeyMoved, match=r"of the cluster in valkey\.url"):
            await line.command("GET", "a")
        peer.answer = lambda _, words: b"+here\r\n"
        assert await line.command("GET", "a") == b"here"
        peer.answer, peer.greets = redirecting_node, False
        with pytest.raises(ValkeyMoved):
            await line.command("GET", "a")
        assert await line.is_cluster()
        peer.answer = lambda _, words: b"-ERR no\r\n"
        with pytest.raises(ValkeyRefused):
            await line.command("GET", "a")
        await line.close()


@pytest.mark.parametrize("dead", [0, 1])
async def test_a_url_of_several_nodes_needs_one_that_answers(cluster, connect, dead):
    addresses = [primary.address for primary in cluster.primaries[:2]]
    addresses[dead] = "127.0.0.1:1"
    line, stock = connect(f"valkey://{','.join(addresses)}")
    await stock.open()
    assert await stock.is_cluster()
    assert await stock.command("PING")
    keys = keys_of(line.prefix)
    for key in keys:
        await line.command("SET", key, "1")
        assert await stock.command("GET", key, near=key) == b"1"
    assert len({await line.owner(key) for key in keys}) == 3


async def test_a_url_of_several_nodes_requires_a_cluster(running_engines, connect):
    with ChaosProxy(running_engines.endpoints.valkey_url) as proxy:
        for client in connect(f"valkey://127.0.0.1:1,{urlsplit(proxy.url).netloc}"):
            with pytest.raises(ValkeyDown, match="not in a cluster"):
                await client.open()
