"""Hands for a desk in tests: claim one lease, say what became of its jobs, wait until that is recorded."""

from __future__ import annotations

from headrace.jobs import store
from headrace.jobs.handling import DONE, Outcome
from headrace.jobs.leases import Desk, Scan
from headrace.jobs.slots.messages import Settled


async def living_desk(postgres, config, queue_ids, lease_s=30):
    """A desk of a host that lives."""
    host_id = await store.leases.add_host(postgres, "test", list(queue_ids), lease_s)
    return Desk(postgres, config, host_id)


async def claim_one(desk, queue_id, jobs_max=10, scan=None):
    """One lease of jobs without lanes, or None."""
    claims = await desk.claim_ready(queue_id, scan or Scan(), leases_max=1, batch=jobs_max)
    return claims.leases[0] if claims.leases else None


async def claim_lane_jobs(desk, queue_id, jobs_max=100):
    """One lease of jobs of lanes, or None."""
    claims = await desk.claim_lanes(queue_id, leases_max=1, batch=jobs_max)
    return claims.leases[0] if claims.leases else None


def told(claim, outcomes=DONE):
    """What a slot would say: one outcome for all jobs of a lease, or some by job."""
    if outcomes is DONE:
        return Settled(lease_id=claim.lease_id)
    if isinstance(outcomes, Outcome):
        outcomes = dict.fromkeys(claim.ids, outcomes)
    some = list(outcomes.values())
    return Settled(
        lease_id=claim.lease_id,
        ids=list(outcomes),
        words=[one.word for one in some],
        delays_s=[one.after_s for one in some],
        errors=[one.error for one in some],
        tracebacks=[one.traceback for one in some],
        results=[one.result for one in some],
        queues=[one.queue for one in some],
    )


async def settle(desk, claim, outcomes=DONE):
    """Say it and wait until it is recorded; False: the lease was gone."""
    lost = []
    desk.on_lost = lost.append
    desk.settle(told(claim, outcomes))
    await desk.flush()
    return claim.lease_id not in lost
