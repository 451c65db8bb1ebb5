"""Steps with a `LeaseManager` in tests: claim one lease, settle its jobs, wait until recorded."""

from __future__ import annotations

from headrace.jobs import store
from headrace.jobs.leases import LeaseManager
from headrace.jobs.messages import Ack
from headrace.jobs.outcomes import DONE, Outcome
from headrace.jobs.store.leases import ClaimCursor


async def live_manager(postgres, config, queue_ids, lease_s=30):
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


async def settle(manager, claim, outcomes=DONE):
    """Settle a lease and wait until recorded. Return False if the lease no longer existed."""
    lost = []
    manager.on_lost = lost.append
    manager.settle(told(claim, outcomes))
    await manager.flush()
    return claim.lease_id not in lost
