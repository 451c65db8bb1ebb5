"""Which job a slot's crash is attributed to, and the outcomes of all jobs of that slot. No I/O."""

from __future__ import annotations

from headrace.jobs.agent.worker_proxy import WorkerProxy
from headrace.jobs.messages import Ack, Outcome, Work
from headrace.jobs.outcomes import RETURNED, UNSTARTED, final_outcome
from headrace.jobs.slots.status_board import SlotStatus
from headrace.kernel.resilience import Backoff


def started_jobs(worker: WorkerProxy, status: SlotStatus) -> set[int]:
    """The jobs that had started when the slot died, according to its cell on the status board.

    A job that ran alone is named there. Otherwise every job of a batch had started, and of
    concurrent calls the oldest ones without an outcome.
    """
    if status.jobs == 0:
        return set()
    given = [job_id for lease in worker.leases.values() for job_id in lease.open_ids()]
    if status.job_id is not None:
        return {status.job_id} & set(given)
    if worker.queue is not None and worker.queue.facts.batch is None:
        return set(given[: worker.queue.facts.concurrency])
    return set(given)


def acks_of_crashed(
    worker: WorkerProxy, status: SlotStatus, why: str, *, is_overtime: bool, backoff: Backoff
) -> list[Ack]:
    """Acks for all jobs of a dead slot: jobs that had started are `lost`, the others `returned`.

    With `is_overtime` the slot was killed for a call over its timeout. A job that ran alone then
    counts as a failed run.
    """
    started = started_jobs(worker, status)
    acks = []
    for lease in worker.leases.values():
        attempts = dict(zip(lease.ids, lease.attempts, strict=True))
        outcomes = {}
        for job_id in lease.open_ids():
            if job_id not in started:
                outcomes[job_id] = RETURNED
            elif is_overtime and len(started) == 1:
                outcomes[job_id] = final_outcome(
                    Outcome("retry", None, why),
                    attempt=attempts[job_id] + 1,
                    retries=lease.retries_of(job_id),
                    backoff=backoff,
                )
            else:
                outcomes[job_id] = Outcome("lost", None, why)
        acks.append(Ack(lease_id=lease.lease_id, outcomes=outcomes))
    return acks


def returned_ack(work: Work) -> Ack:
    """An ack that returns work no slot has started, as if it had never been claimed."""
    outcome = RETURNED if work.start_before_s is None else UNSTARTED
    return Ack(lease_id=work.lease_id, outcomes=dict.fromkeys(work.ids, outcome))
