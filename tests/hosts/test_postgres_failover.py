"""Failovers of PostgreSQL under load: Patroni, three hosts, one synchronous standby."""

from __future__ import annotations

import asyncio

import pytest

pytestmark = pytest.mark.slow
BACK_S = 15.0


async def warm_up(site) -> None:
    """Wait until each room answers."""
    await site.wait_back(0.0)


async def test_a_killed_primary_loses_nothing_and_every_room_returns(patroni, make_site):
    site = await make_site(patroni.url)
    async with site.traffic():
        await warm_up(site)
        primary = patroni.primary()
        primary.kill()
        _, promoted_s = await patroni.wait_primary(other_than=primary)
        back_s = await site.wait_back(promoted_s)
        await asyncio.sleep(2)
    print("back", back_s)
    await site.require_all_kept()
    assert max(back_s.values()) < BACK_S


async def test_a_primary_without_network(patroni, make_site):
    site = await make_site(patroni.url)
    async with site.traffic():
        await warm_up(site)
        primary = patroni.primary()
        primary.host.cut()
        _, promoted_s = await patroni.wait_primary(other_than=primary)
        back_s = await site.wait_back(promoted_s)
        print("back", back_s)
        primary.host.restore()
        await asyncio.sleep(10)
        await site.wait_back(promoted_s + back_s["jobs"] + 8)
    await site.require_all_kept()
    assert max(back_s.values()) < BACK_S
