"""What a request needs before it is sent: a rate token of the lane and a connection of its host."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace

import pytest
from room import LIMITS
from tests.kit.waiting import wait_true

from headrace.fetch.host_stats import Classes
from headrace.fetch.limits import (
    LEAD_S_MAX,
    HostPool,
    HostQuota,
    LaneClient,
    RateTokens,
    TokenDebts,
    TokenExpired,
    share_of,
)
from headrace.fetch.model import LIMITER
from headrace.fetch.photo_fetch import LATE_MAX, Requeue
from headrace.jobs.errors import LaneExhausted
from headrace.kernel.batching import BATCH_MAX, RUNS_AT_ONCE, Batcher


@pytest.fixture
def tokens_of(shop):
    """Set the rate of the customer; return the tokens of a photo."""

    async def make(starts_max: int) -> RateTokens:
        limits = {**LIMITS, "starts_max": starts_max}
        await shop.fetch.customers.set("shop", **limits)
        return await LaneClient(shop.jobs).tokens("shop", wait_max_s=0)

    return make


async def spent(shop) -> int:
    """Tokens consumed in the lane."""
    rows = await shop.sql("SELECT sum(one) FROM #lane, unnest(n) AS one WHERE name = 'shop'")
    return int(rows[0][0] or 0)


# Rate tokens


async def test_the_first_request_uses_the_jobs_token_and_each_other_consumes_one(shop, tokens_of):
    tokens = await tokens_of(3)
    await tokens.acquire()
    assert tokens.consume()
    assert not tokens.consume(), "a second request has no token yet"
    for _ in range(2):
        await tokens.acquire()
        assert tokens.consume()
    with pytest.raises(LaneExhausted):
        await tokens.acquire()
    assert tokens.sent == 3
    free = RateTokens()
    for _ in range(3):
        await free.acquire()
        assert free.consume()
    assert free.sent == 3, "without a lane nothing is limited"


async def test_an_expired_token_is_returned_once(tokens_of):
    lane = (await tokens_of(2))._lane
    with pytest.raises(TokenExpired):
        await RateTokens(lane, time.monotonic() - 1).acquire()
    paid = RateTokens(lane, time.monotonic() - 1, may_return=False)
    await paid.acquire()
    assert paid.valid_until_s > time.monotonic()
    ends_s = time.monotonic() + 60
    debts = TokenDebts()
    debts.lead_s = 120.0
    with pytest.raises(TokenExpired):
        await RateTokens(lane, ends_s, debts=debts).acquire()
    await RateTokens(lane, ends_s, may_return=False, debts=debts).acquire()
    assert RateTokens(lane, ends_s, debts=debts).consume(), "the token is still valid"
    assert debts.lead_s <= LEAD_S_MAX
    with pytest.raises(LaneExhausted):
        await RateTokens(lane, time.monotonic() - 1, may_return=False).acquire()


async def test_a_job_that_returns_soon_returns_its_token(shop, tokens_of):
    """A snoozed job would keep it, so one allowed request would never be sent."""
    tokens = await tokens_of(1)
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


async def test_a_late_request_is_charged_to_its_own_lane(shop, tokens_of):
    tokens = await tokens_of(10)
    tokens.valid_until_s = time.monotonic() - 0.1
    assert tokens.consume(), "libcurl has connected and sends the request"

    async def has_spent(count: int) -> bool:
        return await spent(shop) == count

    await wait_true(lambda: has_spent(2), what="a second token is consumed")
    one, other = TokenDebts(), TokenDebts()
    for debts in (one, other):
        RateTokens(tokens._lane, time.monotonic(), debts=debts).charge()
    assert len(one._tasks) == len(other._tasks) == 1
    await wait_true(lambda: has_spent(4), what="the debts of both apps are charged")
    await asyncio.gather(one.close(), other.close())


async def test_manual_settings_of_a_lane_stay_and_no_lane_lacks_a_limit(shop):
    async def lane(name: str = "shop"):
        found = await shop.jobs.lanes.get(LIMITER, name)
        return (found.starts_max, found.window_s, found.concurrency), found.weight, found.paused

    lanes, limits = shop.jobs.lanes, {"starts_max": 9, "window_s": 3, "connections": 4}
    await lanes.set(LIMITER, "shop", starts_max=5, window_s=1, concurrency=2, weight=7)
    await lanes.pause(LIMITER, "shop")
    await shop.fetch.customers.set("shop", **limits)
    assert await lane() == ((9, 3, 4), 7, True)
    await shop.fetch.customers.set("other", **limits)
    assert await lane("other") == ((9, 3, 4), 1, False)
    assert not (await lanes.get(LIMITER, "other")).follows_limiter
    await shop.jobs.queues.declare()
    await lanes.reset(LIMITER, "shop")
    assert (await lane())[0] == (1, 1, 1), "the strictest limits until new ones are set"
    await shop.fetch.customers.set("shop", **limits)
    assert (await lane())[0] == (9, 3, 4)


# Connections of a host


async def test_connections_are_given_in_order():
    pool = HostPool(2)
    for host, until_s in (("a", None), ("a", None), ("b", time.monotonic())):
        assert await pool.acquire(host, until_s=until_s)
    assert not await pool.acquire("a", until_s=time.monotonic() + 0.01)
    third = asyncio.create_task(pool.acquire("a", until_s=None))
    fourth = asyncio.create_task(pool.acquire("a", until_s=None))
    await asyncio.sleep(0)
    fourth.cancel()
    pool.release("a")
    assert await third
    pool.release("a")
    assert await pool.acquire("a", until_s=time.monotonic())
    assert not await pool.acquire("a", until_s=time.monotonic())


async def test_no_connection_is_lost_or_given_twice_however_waits_end():
    """500 tasks acquire, wait, expire, are cancelled and release, in random order."""
    pool, rng, busy, most = HostPool(3), random.Random(7), 0, 0

    async def visit() -> None:
        nonlocal busy, most
        until_s = time.monotonic() + rng.random() / 50
        if not await pool.acquire("a", until_s=until_s, ignores_queue_limit=rng.random() < 0.8):
            return
        busy += 1
        most = max(most, busy)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        busy -= 1
        pool.release("a", is_answered=rng.random() < 0.5)

    visits = [asyncio.create_task(visit()) for _ in range(500)]
    for visitor in rng.sample(visits, 100):
        asyncio.get_running_loop().call_later(rng.random() / 50, visitor.cancel)
    await asyncio.gather(*visits, return_exceptions=True)
    found = pool._of("a")
    assert most <= 3
    # A task that was cancelled while it held a connection did not release it.
    assert not found.waiters
    assert found.busy == busy


async def test_behind_a_quick_host_as_many_wait_as_will_get_a_connection_in_time():
    pool = HostPool(1)
    for _ in range(30):
        assert await pool.acquire("quick", until_s=None)
        pool.release("quick")
    assert await pool.acquire("quick", until_s=None)
    assert await pool.acquire("new", until_s=None)
    now_s = time.monotonic()
    waits = [asyncio.create_task(pool.acquire("quick", until_s=now_s + 60)) for _ in range(5)]
    others = [asyncio.create_task(pool.acquire("new", until_s=now_s + 1)) for _ in range(5)]
    await asyncio.sleep(0)
    assert [other.done() and other.result() for other in others[1:]] == [False] * 4
    pool.release("new")
    assert await others[0]
    for wait in waits:
        pool.release("quick")
        assert await wait


async def test_a_lower_limit_holds_for_the_next_connections():
    pool = HostPool(8)
    for _ in range(2):
        assert await pool.acquire("a", until_s=None)
    assert not await pool.acquire("a", until_s=time.monotonic(), limit=2)
    pool.release("a")
    assert await pool.acquire("a", until_s=time.monotonic(), limit=2)


@pytest.mark.parametrize(
    ("is_first", "shares"), [(True, [8, 8, 3, 1, 1]), (False, [8, 8, 2, 1, 1])]
)
def test_a_process_keeps_to_its_share_of_a_hosts_connections(is_first, shares):
    assert [share_of(8, slots, is_first=is_first) for slots in (0, 1, 3, 8, 20)] == shares


async def test_slots_for_hosts_that_hang_take_no_connections_of_fast_hosts(shop):
    await shop.sql(
        "INSERT INTO #host (name, queues, kind, expires_at)"
        " VALUES ('h', '{}', 'agent', now() + interval '1 min')"
    )
    for name, slots in {"fetch.1s": 1, "fetch.5s": 1, "fetch.30s": 30}.items():
        await shop.sql(f"INSERT INTO #queue (name, limiter) VALUES ('{name}', 'fetch')")
        await shop.sql(
            f"INSERT INTO #fleet_slot SELECT 'h', id, {slots} FROM #queue WHERE name = '{name}'"
        )
    quota = HostQuota(shop.jobs, Classes((1.0, 5.0, 30.0)), connections=8)
    await quota.refresh()
    # Slots of another class get photos of a fast host only after timeouts.
    assert quota.share("fetch.30s", is_first=False) == 1
    assert quota.share("fetch.1s", is_first=True) == 8
    await quota.close()


async def test_processes_without_a_plan_divide_a_hosts_connections(shop):
    """Right after the start each of them used the limit of the whole fleet for half a minute."""
    for host in ("h1", "h2"):
        await shop.sql(
            "INSERT INTO #host (name, queues, kind, expires_at, slots)"
            f" VALUES ('{host}', '{{}}', 'agent', now() + interval '1 min',"
            """ '[{"queue": null, "pid": 7}, {"queue": null, "pid": 8}]')"""
        )
    quota = HostQuota(shop.jobs, Classes((1.0, 5.0, 30.0)), connections=8)
    await quota.refresh()
    assert quota.share("fetch.1s", is_first=True) == 2
    assert quota.share("fetch.1s", is_first=False) == 2
    await quota.close()


# Requests that share a statement


async def test_requests_share_statements_in_order_and_a_busy_batcher_collects():
    calls: list[list[int]] = []
    gate = asyncio.Event()
    gate.set()
    running = most = 0

    async def double(numbers: list[int]) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        calls.append(numbers)
        await gate.wait()
        running -= 1
        return [2 * number for number in numbers]

    batcher: Batcher[int, int] = Batcher(double)
    assert await asyncio.gather(*map(batcher.submit, range(20))) == [2 * n for n in range(20)]
    assert calls == [list(range(20))]
    calls.clear()
    gate.clear()
    count = (RUNS_AT_ONCE + 1) * BATCH_MAX + 50
    submitted = [asyncio.create_task(batcher.submit(n)) for n in range(count)]
    await wait_true(lambda: len(calls) == RUNS_AT_ONCE, what="the most statements run at once")
    assert batcher._timer is None, "the next starts when one of them ends"
    gate.set()
    assert await asyncio.gather(*submitted) == [2 * n for n in range(count)]
    assert most == RUNS_AT_ONCE
    assert [len(call) for call in calls] == [BATCH_MAX] * (RUNS_AT_ONCE + 1) + [50]


async def test_an_error_or_a_cancelled_caller_concerns_no_other():
    async def picky(numbers: list[int]) -> list[int | Exception]:
        if 7 in numbers:
            raise RuntimeError("all of them")
        return [ValueError("you") if number < 0 else number for number in numbers]

    batcher: Batcher[int, int] = Batcher(picky)
    found = await asyncio.gather(batcher.submit(1), batcher.submit(-1), return_exceptions=True)
    assert found[0] == 1
    assert isinstance(found[1], ValueError)
    with pytest.raises(RuntimeError):
        await asyncio.gather(batcher.submit(1), batcher.submit(7))
    leaving, staying = (asyncio.create_task(batcher.submit(n)) for n in (3, 4))
    await asyncio.wait([leaving], timeout=0)
    leaving.cancel()
    assert await staying == 4
