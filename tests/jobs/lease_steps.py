"""Hosts that claim and settle in a test, and the rules that the stored counts of lanes obey."""

from __future__ import annotations

from headrace.engines.sql import compile_query
from headrace.jobs import store
from headrace.jobs.leases import LeaseManager
from headrace.jobs.messages import Ack
from headrace.jobs.outcomes import DONE, Outcome
from headrace.jobs.store.claim_cursor import ClaimCursor

NO_LIMITS = {"starts_max": None, "window_s": None, "concurrency": None}
FAIL = Outcome("fail", None, "peer: 503")


class RunningHost:
    """A live host with its claims, and the leases that were reported as lost."""

    def __init__(self, manager):
        self.manager = manager
        self.claims = {}
        self.open_when_lost = set()
        self.lost = []
        manager.on_lost = self.lost.append

    @classmethod
    async def add(cls, postgres, config, queue_ids):
        """Register a host that does not expire by itself."""
        return cls(await live_manager(postgres, config, queue_ids, 3600))


async def live_manager(postgres, config, queue_ids, lease_s=600):
    """The lease manager of a live host."""
    host_id = await store.leases.add_host(postgres, "test", list(queue_ids), lease_s)
    return LeaseManager(postgres, config, host_id)


async def claim_one(manager, queue_id, jobs_max=10, cursor=None):
    """One lease of jobs without lanes, or None."""
    claims = await manager.claim_ready(
        queue_id, cursor or ClaimCursor(), leases_max=1, batch=jobs_max
    )
    return claims.leases[0] if claims.leases else None


async def claim_lane_jobs(manager, queue_id, jobs_max=100):
    """One lease of jobs of lanes, or None."""
    claims = await manager.claim_lanes(queue_id, leases_max=1, batch=jobs_max)
    return claims.leases[0] if claims.leases else None


def told(claim, outcomes=DONE):
    """The ack of a slot: one outcome for all jobs of a lease, or outcomes by job."""
    if outcomes is DONE:
        return Ack(lease_id=claim.lease_id)
    if isinstance(outcomes, Outcome):
        outcomes = dict.fromkeys(claim.ids, outcomes)
    return Ack(lease_id=claim.lease_id, outcomes=dict(outcomes))


async def settle(manager, claim, outcomes=DONE):
    """Settle a lease and wait until recorded. Return False if the lease no longer existed."""
    lost = []
    manager.on_lost = lost.append
    manager.settle(told(claim, outcomes))
    await manager.flush()
    return claim.lease_id not in lost


_BOOKS = """
    -- Contradictions between the counts of lanes.
    WITH rows AS (
        SELECT q.limiter, j.lane, j.queue, count(*) AS n FROM headrace.lane_job j
        JOIN headrace.queue q ON q.id = j.queue GROUP BY 1, 2, 3
    ), journal AS (
        SELECT limiter, lane, queue, sum(k) AS n FROM headrace.lane_event GROUP BY 1, 2, 3
    ), counted AS (
        SELECT limiter, lane, queue, waiting AS n FROM headrace.lane_queue
    ), leased AS (
        SELECT l.limiter, u.lane, count(*) AS n
        FROM headrace.job_lease l CROSS JOIN LATERAL unnest(l.ids, l.lanes) AS u(id, lane)
        JOIN headrace.lane c ON c.limiter = l.limiter AND c.name = u.lane
        WHERE u.id <> ALL(l.settled) AND c.concurrency IS NOT NULL AND l.id > c.counted_from
        GROUP BY 1, 2
    )
    SELECT 'waiting + journal = rows' AS rule, limiter, lane,
           coalesce(w.n, 0) + coalesce(e.n, 0) AS found, coalesce(r.n, 0) AS expected
    FROM counted w FULL JOIN rows r USING (limiter, lane, queue)
    FULL JOIN journal e USING (limiter, lane, queue)
    WHERE coalesce(w.n, 0) + coalesce(e.n, 0) <> coalesce(r.n, 0)
    UNION ALL
    SELECT 'in flight = leased', coalesce(l.limiter, d.limiter), coalesce(l.name, d.lane),
           coalesce(l.inflight, 0), coalesce(d.n, 0)
    FROM headrace.lane l FULL JOIN leased d ON d.limiter = l.limiter AND d.lane = l.name
    WHERE coalesce(l.inflight, 0) <> coalesce(d.n, 0)
    UNION ALL
    SELECT 'parked with work', w.limiter, w.lane, w.waiting, 0 FROM headrace.lane_queue w
    JOIN headrace.lane l ON l.limiter = w.limiter AND l.name = w.lane
    WHERE w.ready_at = 'infinity' AND w.waiting > 0 AND NOT l.paused
      AND coalesce(l.inflight < l.concurrency, true)
    UNION ALL
    SELECT 'armed without work', w.limiter, w.lane, w.waiting, 0 FROM headrace.lane_queue w
    WHERE w.ready_at < 'infinity' AND w.waiting <= 0
    UNION ALL
    SELECT 'a queue of a missing lane', w.limiter, w.lane, w.waiting, 0
    FROM headrace.lane_queue w
    WHERE NOT EXISTS (SELECT FROM headrace.lane l WHERE l.limiter = w.limiter AND l.name = w.lane)
    UNION ALL
    SELECT 'a log as long as its counts', l.limiter, l.name, cardinality(l.at), cardinality(l.n)
    FROM headrace.lane l WHERE cardinality(l.at) <> cardinality(l.n)
"""


async def broken_books(runner):
    """Every count of lanes that contradicts another."""
    rows = await runner.all(compile_query("books", _BOOKS))
    return [tuple(row) for row in rows]


def most_in_a_window(starts, window_s):
    """The most starts in any window of that length."""
    starts = sorted(starts)
    most, first = 0, 0
    for index, start in enumerate(starts):
        while starts[first] <= start - window_s:
            first += 1
        most = max(most, index - first + 1)
    return most
