"""Rate-limit tokens of a photo, with a real lane: consumed, expired, returned, charged later."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.fetch.limits import LEAD_S_MAX, LaneClient, RateTokens, TokenDebts, TokenExpired
from headrace.fetch.photo_fetch import LATE_MAX, Requeue
from headrace.jobs.errors import LaneExhausted


async def limit(shop, starts_max: int, window_s: float) -> None:
    await shop.fetch.customers.set("shop", starts_max=starts_max, window_s=window_s, connections=50)


async def test_the_first_request_uses_the_jobs_token_and_others_consume_more(shop):
    await limit(shop, 3, 60.0)
    tokens = await LaneClient(shop.jobs).tokens("shop", wait_max_s=0)
    await tokens.acquire()
    assert tokens.consume()
    assert not tokens.consume(), "a second request has no token yet"
    for _ in range(2):
        await tokens.acquire()
        assert tokens.consume()
    with pytest.raises(LaneExhausted):
        await tokens.acquire()
    assert tokens.sent == 3


async def test_an_expired_token_is_returned_unless_it_was_before(shop):
    await limit(shop, 2, 60.0)
    reach = LaneClient(shop.jobs)
    lane = (await reach.tokens("shop", wait_max_s=0))._lane
    with pytest.raises(TokenExpired):
        await RateTokens(lane, time.monotonic() - 1).acquire()
    paid = RateTokens(lane, time.monotonic() - 1, may_return=False)
    await paid.acquire()
    assert paid.valid_until_s > time.monotonic()
    with pytest.raises(LaneExhausted):
        await RateTokens(lane, time.monotonic() - 1, may_return=False).acquire()


async def test_a_token_that_would_expire_is_returned_in_time(shop):
    await limit(shop, 1, 60.0)
    lane = (await LaneClient(shop.jobs).tokens("shop", wait_max_s=0))._lane
    ends_s = time.monotonic() + 60
    debts = TokenDebts()
    debts.lead_s = 120.0
    with pytest.raises(TokenExpired):
        await RateTokens(lane, ends_s, debts=debts).acquire()
    await RateTokens(lane, ends_s, may_return=False, debts=debts).acquire()
    tokens = RateTokens(lane, ends_s, debts=debts)
    assert tokens.consume(), "the token is still valid"
    assert debts.lead_s <= LEAD_S_MAX


async def test_a_job_that_returns_soon_returns_its_token(shop):
    """A snoozed job would keep it, so one allowed request would never be sent."""
    await limit(shop, 1, 60.0)
    tokens = await LaneClient(shop.jobs).tokens("shop", wait_max_s=0)
    fetcher, job = shop.fetch._photos._fetcher, SimpleNamespace(id=1)
    for _ in range(LATE_MAX):
        assert job.id not in fetcher._late_count or fetcher._late_count[job.id] < LATE_MAX
        assert await fetcher._requeue(job, tokens, 0.0) == Requeue(), "this process was late"
    assert fetcher._late_count[job.id] == LATE_MAX
    assert await fetcher._requeue(job, tokens, 0.01) == Requeue(), "no connection was free"
    assert await fetcher._requeue(job, tokens, 5.0) == Requeue(5.0), "the host is jammed"
    tokens.valid_until_s = time.monotonic() + 60
    assert tokens.consume()
    assert await fetcher._requeue(job, tokens, 0.01) == Requeue(0.01), "its token is consumed"


async def test_without_a_lane_nothing_is_counted():
    tokens = RateTokens()
    for _ in range(3):
        await tokens.acquire()
        assert tokens.consume()
    assert tokens.sent == 3


async def test_a_request_that_left_late_is_charged_again(shop):
    await limit(shop, 10, 60.0)
    tokens = await LaneClient(shop.jobs).tokens("shop", wait_max_s=0)
    tokens.valid_until_s = time.monotonic() - 0.1
    assert tokens.consume(), (
        "libcurl has connected: what it sends now is late and leaves all the same"
    )

    async def is_charged() -> bool:
        return await spent(shop) == 2

    await wait_true(is_charged, what="a second token is consumed")


SPENT = compile_query(
    "spent",
    "-- Tokens consumed in the lane of shop.\n"
    "SELECT coalesce((SELECT sum(n) FROM unnest(n) AS n), 0)"
    " FROM headrace.lane WHERE name = 'shop'",
)


async def spent(shop) -> int:
    return int(await shop.postgres.value(SPENT))


async def test_two_apps_with_a_customer_of_one_name_charge_their_own_lanes(shop):
    await limit(shop, 10, 60.0)
    lane = (await LaneClient(shop.jobs).tokens("shop", wait_max_s=0))._lane
    one, other = TokenDebts(), TokenDebts()
    for debts in (one, other):
        RateTokens(lane, time.monotonic(), debts=debts).charge()
    assert len(one._tasks) == len(other._tasks) == 1

    async def is_charged() -> bool:
        return await spent(shop) == 3

    await wait_true(is_charged, what="both debts are charged")
    await asyncio.gather(one.close(), other.close())
