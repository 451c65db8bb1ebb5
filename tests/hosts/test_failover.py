"""Failovers of PostgreSQL under load: Patroni on three hosts with a synchronous standby.

The clients of `FailoverSite` use all rooms meanwhile. Nothing that was acknowledged may be lost or
doubled, no role may end, and each room completes a round trip soon after the promotion.
"""

from __future__ import annotations

import time

import pytest
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.slow
BACK_S = 15.0
"""The stated bound."""
CUTS = 2
STATEMENT_S, LAG_S = 2, 7
"""A commit waits 4 s at most, so that clients repeat it while the standby lags."""


async def wait_back(patroni, site, old) -> dict[str, float]:
    """Wait for another primary, then for every room; the seconds since the promotion."""
    _, promoted_s = await patroni.wait_primary(other_than=old)
    return await site.wait_back(promoted_s)


async def test_a_killed_primary_loses_nothing_and_every_room_returns(patroni, make_site):
    site = await make_site(patroni.url)
    async with site.traffic():
        await site.wait_back(0.0)
        primary = patroni.primary()
        primary.kill()
        await wait_back(patroni, site, primary)
    await site.require_all_kept()


@pytest.fixture(params=["url", "haproxy"])
async def site(request, patroni, make_site):
    """The site, by a URL with all servers and through HAProxy."""
    url = patroni.url if request.param == "url" else await patroni.start_haproxy()
    return await make_site(url, POSTGRES_STATEMENT_TIMEOUT=f"{STATEMENT_S}s")


async def kill(primary) -> None:
    primary.kill()


async def cut(primary) -> None:
    primary.host.cut()


@pytest.mark.soak
@pytest.mark.parametrize("fail", [kill, cut])
async def test_a_primary_that_is_gone_is_replaced_and_returns_as_a_standby(patroni, site, fail):
    async with site.traffic():
        await site.wait_back(0.0)
        primary = patroni.primary()
        await fail(primary)
        back_s = await wait_back(patroni, site, primary)
        assert max(back_s.values()) < BACK_S, back_s
        listening = site.roles["agent"].events("listener_waits")
        assert listening, "the agent noticed that its notifications ended"
        if fail is cut:
            primary.host.restore()
        else:
            patroni.start_member(primary)
        await wait_true(patroni.is_whole, what="the old primary is a standby")
        await site.wait_back(time.monotonic())
    await site.require_all_kept()


async def cut_until_demoted(patroni, site, primary) -> None:
    """Cut the network until the server is a standby whose Patroni still tries to keep its lock."""
    demotions = primary.demotions
    primary.host.cut()
    await wait_back(patroni, site, primary)
    await wait_true(lambda: primary.demotions > demotions, what="the old primary is demoted")
    primary.host.restore()


@pytest.mark.soak
async def test_an_old_primary_does_not_take_back_its_lock(patroni, make_site):
    """Patroni 3.0.2 does when its network returns, and what was acknowledged since is lost."""
    site = await make_site(patroni.url, POSTGRES_STATEMENT_TIMEOUT=f"{STATEMENT_S}s")
    async with site.traffic():
        await site.wait_back(0.0)
        for _ in range(CUTS):
            await cut_until_demoted(patroni, site, patroni.primary())
            await wait_true(patroni.is_whole, what="the old primary is a standby")
            await site.wait_back(time.monotonic())
    await site.require_all_kept()


@pytest.mark.soak
async def test_a_switchover_is_a_short_outage(patroni, site):
    async with site.traffic():
        await site.wait_back(0.0)
        old = patroni.primary()
        await patroni.switch_over()
        back_s = await wait_back(patroni, site, old)
        assert max(back_s.values()) < BACK_S, back_s
        await wait_true(patroni.is_whole, what="the old primary is a standby")
    await site.require_all_kept()


@pytest.mark.soak
async def test_what_a_lagging_standby_has_not_confirmed_is_not_acknowledged(patroni, site):
    """Commits wait longer than a statement may take; clients repeat them; the primary dies."""
    async with site.traffic():
        await site.wait_back(0.0)
        primary = patroni.primary()
        with patroni.synchronous_standby().frozen_postgres():
            lagging_s = time.monotonic()
            await wait_true(lambda: time.monotonic() > lagging_s + LAG_S)
            primary.kill()
        back_s = await wait_back(patroni, site, primary)
        assert max(back_s.values()) < BACK_S, back_s
    await site.require_all_kept()
