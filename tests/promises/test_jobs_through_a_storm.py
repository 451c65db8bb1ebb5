"""Everything dies at random moments while clients go on.

Nothing acknowledged is lost, nothing counts twice.

The real commands with a durable PostgreSQL of their own. SIGKILL for slots, agents, zygotes, whole
hosts, schedulers and the postmaster; agents, alone or with their slots, are stopped past their
lease and woken. The seed is printed.
"""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest
from jobs_storm import KEYS, LANES, Storm, impatient_pool, shared_keys
from own_engines import fleet_on_own_engines
from tests.kit.history import Event, History
from tests.kit.waiting import wait_true

from headrace.jobs import NewJob

FAULTS = (
    "kill_slot",
    "kill_agent",
    "kill_host",
    "kill_zygote",
    "kill_scheduler",
    "kill_postgres",
    "stop_agent",
    "stop_host",
)


@pytest.mark.slow
async def test_a_short_storm_loses_and_doubles_nothing(tmp_path):
    await _weather(tmp_path, agents=2, rounds=1, pause_s=(0.1, 0.6))


@pytest.mark.soak
async def test_a_long_storm_loses_and_doubles_nothing(tmp_path):
    await _weather(tmp_path, agents=3, rounds=12, pause_s=(0.2, 2.5))


async def _weather(folder, *, agents, rounds, pause_s, seed=None):
    """Every fault once a round, in an order and at moments of chance.

    Then the sky clears and all is judged.
    """
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    print(f"seed {seed}")
    own = fleet_on_own_engines(folder, durable=True, timeout_s=2.0, kind=Storm)
    async with own as (storm, engines):
        await storm.begin(engines, random.Random(seed), agents=agents, schedulers=2)
        await _rage(storm, seed, rounds=rounds, pause_s=pause_s)


async def _rage(storm, seed, *, rounds, pause_s):
    [killer] = await storm.jobs.enqueue_many([NewJob(queue="batched", payload={"dies": True})])
    stop = asyncio.Event()
    clients = [
        asyncio.create_task(client(storm, stop, random.Random(seed + n)))
        for n, client in enumerate((_enqueue, _enqueue, _enqueue_groups, _post))
    ]
    for _ in range(rounds):
        for fault in storm.chance.sample(FAULTS, len(FAULTS)):
            await _pass_time(storm, storm.chance.uniform(*pause_s))
            await storm.suffer(fault)
    stop.set()
    await asyncio.gather(*clients)
    await wait_true(storm.is_drained, what="all is over", deadline_s=60 + 10 * rounds)
    history = storm.history
    counts = {kind: len(history.of(kind)) for kind in ("ok", "unknown", "start", "lost")}
    print(f"faults {len(storm.faults)}, {counts}")
    assert await storm.all_findings(killers={killer}) == []
    assert history.of("ok", what="post")
    assert history.of("end", what="told")


async def _pass_time(storm, seconds):
    """Supervise meanwhile."""
    ends_s = time.monotonic() + seconds

    async def is_over():
        storm.keep_up()
        storm.wake()
        return time.monotonic() > ends_s

    await wait_true(is_over, deadline_s=seconds + 30)


async def _enqueue(storm, stop, chance):
    """Some jobs a call through Python, some of them with unique keys."""
    pool = impatient_pool(storm.postgres_url)
    service = storm.jobs_on(pool)
    while not stop.is_set():
        if chance.random() < 0.3:
            key = f"key-{chance.randrange(KEYS)}"
            rows = [NewJob(queue="noted", payload={"hold_s": 0.02}, unique=key)]
        else:
            rows = [_any_job(chance) for _ in range(chance.randint(1, 8))]
        await storm.enqueue_noting(rows, service)
        await _pause(stop, chance.uniform(0, 0.1))
    await pool.close()


def _any_job(chance):
    after_s = chance.choice((None, None, chance.uniform(0, 1)))
    rest = {"after_s": after_s, "priority": chance.randint(0, 9)}
    match chance.randrange(8):
        case 0:
            return NewJob(queue="fails", payload={}, **rest)
        case 1 | 2:
            return NewJob(queue="fenced", payload={}, **rest)
        case 3:
            payload = {"hold_s": chance.uniform(0, 0.1)}
            return NewJob(queue="laned", lane=chance.choice(LANES), payload=payload, **rest)
        case 4 | 5:
            return NewJob(queue="noted", payload={"hold_s": chance.uniform(0, 0.1)}, **rest)
        case _:
            payload = {"raises": chance.choice((0, 0, 0, 1)), "hold_s": 0.002}
            return NewJob(queue="batched", payload=payload, **rest)


async def _enqueue_groups(storm, stop, chance):
    pool = impatient_pool(storm.postgres_url)
    service = storm.jobs_on(pool)
    while not stop.is_set():
        await storm.enqueue_group(service, chance.randint(0, 20))
        await _pause(stop, chance.uniform(0.2, 0.8))
    await pool.close()


async def _post(storm, stop, chance):
    """One request after the other over HTTP."""
    async with httpx.AsyncClient(base_url=f"http://{storm.address}", timeout=60) as client:
        number = 0
        while not stop.is_set():
            number += 1
            await storm.post(client, f"request-{number}")
            await _pause(stop, chance.uniform(0, 0.2))


async def _pause(stop, seconds):
    await asyncio.wait([asyncio.create_task(stop.wait())], timeout=seconds)


@pytest.mark.parametrize("ended_ns", [15, 25])
def test_a_key_that_two_unfinished_jobs_have_is_named(ended_ns):
    """The bug: the second job got the key before the first had ended."""
    events = [
        _event("ok", "enqueue", 10, key=["k"], job=[1]),
        _event("end", "noted", ended_ns, job=1),
        _event("ok", "enqueue", 20, key=["k"], job=[2]),
        _event("end", "noted", 30, job=2),
    ]
    found = list(shared_keys(History(tuple(events))))
    assert [finding.subject for finding in found] == ([] if ended_ns == 15 else ["k"])


def _event(kind, what, at_ns, **facts):
    return Event(kind=kind, what=what, at_ns=at_ns, pid=1, facts=facts)
