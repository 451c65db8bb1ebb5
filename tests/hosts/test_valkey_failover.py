"""Failovers of Valkey under load: a cluster of six hosts, and Sentinels on three.

The clients of `FailoverSite` use all rooms meanwhile. No role may end, no hit may be doubled or
lost, and each room completes a round trip soon after the promotion. Hits of many callers and pages
against the oracle: `tests/views/test_views_cluster.py`, `tests/feed/test_feed_cluster.py`.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest
from site_clients import AD
from tests.kit.waiting import wait_true

from headrace.feed.valkey_store import hash_tags
from headrace.views import ViewsConfig
from headrace.views.model import shard_of

pytestmark = pytest.mark.slow
BACK_S = 15.0
"""The stated bound."""
VIEWS_KEY = f"{{v:{shard_of(AD, ViewsConfig().shards)}}}"
FEED_KEY = f"{{{hash_tags(1)[0]}}}"


def seeds_of(net, spread) -> str:
    """A URL of several nodes, of which the first does not exist."""
    nothing = net.address.rpartition(".")[0] + ".250"
    return f"valkey://{nothing}:6379," + ",".join(one.address for one in spread.primaries)


async def require_back(site, promoted_s) -> None:
    """Each room is back within the stated bound."""
    back_s = await site.wait_back(promoted_s)
    assert max(back_s.values()) < BACK_S, back_s


async def test_a_killed_primary_of_a_cluster_stops_no_room(net, spread, make_site, database_url):
    site = await make_site(database_url, VALKEY_URL=seeds_of(net, spread))
    async with site.traffic():
        await site.wait_back(0.0)
        gone = spread.owner_of(VIEWS_KEY)
        followed = spread.replica_of(gone)
        gone.kill()
        await wait_true(partial(spread.leads, followed), what="its replica is promoted")
        await require_back(site, time.monotonic())
        await asyncio.to_thread(gone.start)
        await wait_true(spread.is_whole, what="it returned as a replica")
    await site.require_all_kept()


@pytest.mark.soak
async def test_a_cluster_whose_hosts_are_cut_off_and_whose_slots_move(
    net, spread, make_site, database_url
):
    """Hash slots of both rooms move under load, then each room's primary is cut off and returns."""
    site = await make_site(database_url, VALKEY_URL=seeds_of(net, spread))
    async with site.traffic():
        await site.wait_back(0.0)
        for key in (VIEWS_KEY, FEED_KEY):
            owner = spread.owner_of(key)
            other = next(one for one in spread.primaries if one is not owner)
            await asyncio.to_thread(spread.move, key, to=other)
            await require_back(site, time.monotonic())
        for key in (FEED_KEY, VIEWS_KEY):
            gone = spread.owner_of(key)
            followed = spread.replica_of(gone)
            gone.host.cut()
            await wait_true(partial(spread.leads, followed), what="its replica is promoted")
            await require_back(site, time.monotonic())
            gone.host.restore()
            await wait_true(spread.is_whole, what="it returned as a replica")
            await require_back(site, time.monotonic())
    await site.require_all_kept()


DURABLE = {"VIEWS_DURABILITY": "durable", "VIEWS_DURABLE_REPLICAS": "1"}


async def kill(server) -> None:
    server.fail()


async def cut(server) -> None:
    server.host.cut()


async def require_survived(site, watched, fail) -> None:
    """A primary that fails is replaced, and returns as a replica."""
    async with site.traffic():
        await site.wait_back(0.0)
        gone = watched.primary()
        await fail(gone)
        _, promoted_s = await asyncio.to_thread(watched.wait_primary, other_than=gone)
        await require_back(site, promoted_s)
        if fail is cut:
            gone.host.restore()
        else:
            await asyncio.to_thread(gone.start)
            await asyncio.to_thread(gone.run_sentinel)
        await wait_true(watched.is_whole, what="the old primary is a replica")
        await require_back(site, time.monotonic())
    await site.require_all_kept()


async def test_a_killed_primary_of_sentinels_stops_no_room(watched, make_site, database_url):
    site = await make_site(database_url, VALKEY_URL=watched.url, **DURABLE)
    await require_survived(site, watched, kill)


@pytest.mark.soak
async def test_a_primary_of_sentinels_that_is_cut_off_stops_no_room(
    watched, make_site, database_url
):
    site = await make_site(database_url, VALKEY_URL=watched.url, **DURABLE)
    await require_survived(site, watched, cut)


@pytest.mark.soak
@pytest.mark.parametrize("fail", [kill, cut])
async def test_a_proxy_that_follows_the_primary_stops_no_room(
    watched, make_site, database_url, fail
):
    site = await make_site(database_url, VALKEY_URL=watched.start_haproxy(), **DURABLE)
    await require_survived(site, watched, fail)


@pytest.mark.soak
async def test_a_switchover_of_sentinels_is_a_short_outage(watched, make_site, database_url):
    site = await make_site(database_url, VALKEY_URL=watched.url, **DURABLE)
    async with site.traffic():
        await site.wait_back(0.0)
        old = watched.primary()
        watched.switch_over()
        _, promoted_s = await asyncio.to_thread(watched.wait_primary, other_than=old)
        await require_back(site, promoted_s)
        await wait_true(watched.is_whole, what="the old primary is a replica")
    await site.require_all_kept()
