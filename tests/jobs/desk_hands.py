"""Hands for a desk in tests: claim one lease, say what became of its jobs, wait until that is recorded."""

from __future__ import annotations

from headrace.jobs import store
from headrace.jobs.claim_cursor import ClaimCursor
from headrace.jobs.leases import LeaseManager
from headrace.jobs.outcomes import DONE, Outcome
from headrace.jobs.slots.messages import Ack


async def living_desk(postgres, config, queue_ids, lease_s=30):
    """A desk of a host that lives."""
    host_id = await store.hosts.add_host(postgres, "test", list(queue_ids), lease_s)
    return LeaseManager(postgres, config, host_id)


async def claim_one(leases, queue_id, jobs_max=10, cursor=None):
    """One lease of jobs without lanes, or None."""
    claims = await leases.claim_ready(
        queue_id, cursor or ClaimCursor(), leases_max=1, batch=jobs_max
    )
    return claims.leases[0] if claims.leases else None


async def claim_lane_jobs(leases, queue_id, jobs_max=100):
    """One lease of jobs of lanes, or None."""
    claims = await leases.claim_lanes(queue_id, leases_max=1, batch=jobs_max)
    return claims.leases[0] if claims.leases else None


def told(claim, outcomes=DONE):
    """What a slot would say: one outcome for all jobs of a lease, or some by job."""
    if outcomes is DONE:
        return Ack(lease_id=claim.lease_id)
    if isinstance(outcomes, Outcome):
        outcomes = dict.fromkeys(claim.ids, outcomes)
    some = list(outcomes.values())
    return Ack(
        lease_id=claim.lease_id,
        ids=list(outcomes),
        kinds=[one.kind for one in some],
        delays_s=[one.after_s for one in some],
        errors=[one.error for one in some],
        tracebacks=[one.traceback for one in some],
        results=[one.result for one in some],
        queues=[one.queue for one in some],
    )


async def settle(leases, claim, outcomes=DONE):
    """Say it and wait until it is recorded; False: the lease was gone."""
    lost = []
    leases.on_lost = lost.append
    leases.settle(told(claim, outcomes))
    await leases.flush()
    return claim.lease_id not in lost
