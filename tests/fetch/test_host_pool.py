"""Who may hold how many connections of one host, and who waits for one."""

from __future__ import annotations

import asyncio
import random
import time

from headrace.fetch.limits import HostPool, planned_slots, quota_of


async def test_places_are_given_in_order_and_never_twice():
    pool = HostPool(2)
    assert await pool.acquire("a", until_s=None)
    assert await pool.acquire("a", until_s=None)
    assert await pool.acquire("b", until_s=time.monotonic())
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


async def test_no_place_is_lost_or_given_twice_however_waits_end():
    """500 who come, wait, are given up and leave, in an order of chance."""
    pool, chance, busy, most = HostPool(3), random.Random(7), 0, 0

    async def visit() -> None:
        nonlocal busy, most
        until_s = time.monotonic() + chance.random() / 50
        if not await pool.acquire("a", until_s=until_s, ignores_queue_limit=chance.random() < 0.8):
            return
        busy += 1
        most = max(most, busy)
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        busy -= 1
        pool.release("a", is_answered=chance.random() < 0.5)

    visits = [asyncio.create_task(visit()) for _ in range(500)]
    for visitor in chance.sample(visits, 100):
        asyncio.get_running_loop().call_later(chance.random() / 50, visitor.cancel)
    await asyncio.gather(*visits, return_exceptions=True)
    found = pool._of("a")
    assert most <= 3
    # Who was cancelled while it held a place left without giving it back: a task of the test's own.
    assert not found.waiters
    assert found.busy == busy


async def test_behind_a_quick_host_as_many_wait_as_will_have_a_place_in_time():
    pool = HostPool(1)
    for _ in range(30):
        assert await pool.acquire("quick", until_s=None)
        pool.release("quick")
    assert await pool.acquire("quick", until_s=None)
    assert await pool.acquire("new", until_s=None)
    until_s = time.monotonic() + 60
    waits = [asyncio.create_task(pool.acquire("quick", until_s=until_s)) for _ in range(5)]
    others = [
        asyncio.create_task(pool.acquire("new", until_s=time.monotonic() + 1)) for _ in range(5)
    ]
    await asyncio.sleep(0)
    assert [other.done() and other.result() for other in others[1:]] == [False] * 4
    pool.release("new")
    assert await others[0]
    for wait in waits:
        pool.release("quick")
        assert await wait


def test_a_process_keeps_to_its_share_of_a_hosts_connections():
    assert [quota_of(8, slots) for slots in (0, 1, 3, 8, 20)] == [8, 8, 3, 1, 1]
    assert planned_slots({"fetch.1s": 2, "mail": 9}, {"fetch.1s", "fetch.5s"}) == 2
