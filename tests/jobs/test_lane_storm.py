"""Everything at once on few lanes: no job is lost or doubled, and the counts agree in the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress

import pytest
from lease_steps import live_manager, told

from headrace.engines.postgres_errors import PostgresBusy
from headrace.jobs import NewJob
from headrace.jobs.errors import JobNotWaiting, LaneUnknown
from headrace.jobs.outcomes import DONE, RETURNED, UNSTARTED, Outcome
from headrace.jobs.store.claim_cursor import ClaimCursor

LANES = ("u", "v", "w", "x", None)
STORM_S = 2.0
OUTCOMES = (
    DONE,
    DONE,
    DONE,
    UNSTARTED,
    RETURNED,
    Outcome("lost"),
    Outcome("retry", 0.0),
    Outcome("snooze", 0.05),
    Outcome("moved", queue="q"),
    Outcome("moved", queue="far"),
)


class Storm:
    """Hosts that claim and settle at random while others enqueue, cancel, spend and set limits."""

    def __init__(self, jobs, postgres, config, ids):
        self.jobs, self.postgres, self.config, self.ids = jobs, postgres, config, ids
        self.dice = random.Random(11)
        self.ends_s = time.monotonic() + STORM_S
        self.enqueued = []
        self.cancelled = 0

    @property
    def is_over(self):
        # A busy machine does little of it in that time.
        has_met_all = len(self.enqueued) > 200 and self.cancelled > 0
        return has_met_all and time.monotonic() > self.ends_s

    async def enqueue(self):
        while not self.is_over:
            some = [
                NewJob(
                    queue=self.dice.choice(("q", "next", "far")),
                    lane=self.dice.choice(LANES),
                    priority=self.dice.randint(0, 9),
                    after_s=self.dice.choice((None, None, 0.1)),
                )
                for _ in range(20)
            ]
            self.enqueued += await self.jobs.enqueue_many(some)

    async def work(self):
        """One host after the other; each dies in the end with its leases."""
        while not self.is_over:
            manager = await live_manager(self.postgres, self.config, self.ids.values())
            scans = {queue_id: ClaimCursor() for queue_id in self.ids.values()}
            for _ in range(self.dice.randint(10, 40)):
                queue_id = self.dice.choice(list(self.ids.values()))
                size = {"leases_max": self.dice.randint(1, 3), "batch": self.dice.randint(1, 6)}
                if self.dice.random() < 0.7:
                    claims = await manager.claim_lanes(queue_id, **size)
                else:
                    claims = await manager.claim_ready(queue_id, scans[queue_id], **size)
                for lease in claims.leases:
                    self.settle_some(manager, lease)
            await manager.flush()
            if self.dice.random() < 0.5:
                await manager.leave()

    def settle_some(self, manager, lease):
        """Settle nothing of some leases, a part of some, and most of them whole."""
        dice = self.dice.random()
        if dice < 0.1:
            return
        if dice < 0.5:
            manager.settle(told(lease))
            return
        some = lease.ids[: self.dice.randint(1, len(lease.ids))]
        manager.settle(told(lease, {job_id: self.dice.choice(OUTCOMES) for job_id in some}))
        if dice < 0.9:
            manager.settle(told(lease))

    async def disturb(self):
        while not self.is_over:
            # A lane may not exist yet; on a slow machine a lock may be late.
            with suppress(LaneUnknown, PostgresBusy):
                await self.change_something()
            await self.jobs.sweep()

    async def change_something(self):
        lane = self.dice.choice(LANES[:4])
        match self.dice.randint(0, 4):
            case 0:
                await self.jobs.lanes.spend("l", lane, self.dice.randint(1, 3), wait_max_s=1)
            case 1:
                await self.jobs.lanes.set_limiter(
                    "l", starts_max=self.dice.randint(50, 90), window_s=0.1, concurrency=20
                )
            case 2:
                await self.jobs.lanes.set(
                    "l",
                    lane,
                    starts_max=None,
                    window_s=None,
                    concurrency=self.dice.randint(1, 9),
                )
            case 3:
                await self.jobs.lanes.reset("l", lane)
            case _:
                await self.cancel()

    async def cancel(self):
        some = self.enqueued[-200:]
        for job_id in self.dice.sample(some, min(20, len(some))):
            with suppress(JobNotWaiting):
                await self.jobs.cancel(job_id)
                self.cancelled += 1
                return


@pytest.mark.slow
async def test_a_storm(jobs, queue_ids, postgres, *, config, sql, broken_invariants):
    ids = queue_ids
    await sql("UPDATE headrace.queue SET keep_done_s = 3600")
    storm = Storm(jobs, postgres, config, ids)
    async with asyncio.timeout(60):
        await asyncio.gather(storm.enqueue(), storm.disturb(), *(storm.work() for _ in range(4)))
    assert await broken_invariants() == []
    await sql("UPDATE headrace.host SET expires_at = now()")
    while (await jobs.sweep()).leases_returned:
        continue
    assert await broken_invariants() == []
    await sql(
        "UPDATE headrace.lane SET starts_max = NULL, window_s = NULL, concurrency = NULL,"
        " free_at = '-infinity'"
    )
    await sql("UPDATE headrace.lane_queue SET ready_at = now() WHERE waiting > 0")
    places = await _drained(jobs, postgres, config, ids=ids, sql=sql)
    assert set(storm.enqueued) == places.keys()
    assert set(places.values()) == {1}
    assert len(storm.enqueued) > 200
    assert storm.cancelled > 0
    assert await broken_invariants() == []


async def _drained(jobs, postgres, config, *, ids, sql):
    """Finish all jobs. Return how often each is stored as ended."""
    manager = await live_manager(postgres, config, ids.values())
    async with asyncio.timeout(60):
        while True:
            await sql("UPDATE headrace.job_ready SET run_at = now() WHERE run_at > now()")
            await jobs.sweep()
            found = 0
            for queue_id in ids.values():
                for claims in (
                    await manager.claim_ready(queue_id, ClaimCursor(), leases_max=20, batch=50),
                    await manager.claim_lanes(queue_id, leases_max=20, batch=50),
                ):
                    found += len(claims.leases)
                    for lease in claims.leases:
                        manager.settle(told(lease))
            await manager.flush()
            if not found:
                break
    rows = await sql(
        "SELECT id FROM headrace.job_done UNION ALL SELECT id FROM headrace.job_failed"
        " UNION ALL SELECT id FROM headrace.job_ready UNION ALL SELECT id FROM headrace.lane_job"
    )
    return Counter(row["id"] for row in rows)
