"""Why a job is where it is, decided from its row and a few facts. No I/O."""

from __future__ import annotations

from typing import Any

from penstock.jobs.model import Job, JobState, Why


def why_waits(job: Job, facts: Any) -> Why:
    """The first thing that keeps the job where it is; `facts` as `store.why_waiting` gives them."""
    match job.state:
        case JobState.READY:
            return _why_ready(job, facts)
        case JobState.SCHEDULED:
            return _why(
                job, "not_due", f"it is due at {job.run_at:%Y-%m-%d %H:%M:%S} UTC", job.run_at
            )
        case JobState.LEASED:
            return _why(job, "running", f"lease {job.lease_id} on {job.host} has it")
        case JobState.GONE:
            return _why(job, "gone", "it ended and was not kept")
        case _:
            return _why(job, job.state.value, job.error or f"it is {job.state.value}")


def _why_ready(job: Job, facts: Any) -> Why:
    if facts is None:
        return _why(job, "no_queue", "its queue is not stored any more")
    if facts["paused"]:
        text = f"queue {job.queue!r} is paused: `penstock queues resume {job.queue}`"
        return _why(job, "queue_paused", text)
    if not facts["is_worked"]:
        text = f"no living worker has code for queue {job.queue!r}: start one"
        return _why(job, "no_worker", text)
    return _why_in_lane(job, facts) or _why(
        job, "waits_for_worker", "it is due: the next free worker takes it in its turn"
    )


def _why_in_lane(job: Job, facts: Any) -> Why | None:
    if facts["is_lane_paused"]:
        return _why(job, "lane_paused", f"lane {job.lane!r} is paused")
    if facts["concurrency"] is not None and facts["inflight"] >= facts["concurrency"]:
        text = f"lane {job.lane!r} is full: {facts['inflight']} of {facts['concurrency']} run"
        return _why(job, "lane_full", text)
    if facts["free_at"] is not None:
        text = (
            f"lane {job.lane!r} had its {facts['starts_max']} starts in {facts['window_s']:g} s:"
            f" free again at {facts['free_at']:%Y-%m-%d %H:%M:%S} UTC"
        )
        return _why(job, "lane_over_rate", text, facts["free_at"])
    return None


def _why(job: Job, reason: str, text: str, until_at: Any = None) -> Why:
    return Why(job_id=job.id, state=job.state, reason=reason, text=text, until_at=until_at)
