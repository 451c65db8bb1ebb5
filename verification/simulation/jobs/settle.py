"""The contracts of settlement: the lease row is the fence, and each job gets one outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from headrace.jobs.sql import SQL
from verification.simulation.jobs.enqueue import (
    add_lane_events,
    advance_chains,
    finish_members,
    limiter_of,
)
from verification.simulation.jobs.lanes import Released, settle_lanes
from verification.simulation.jobs.tables import (
    ENDS,
    Job,
    JobsTables,
    Lease,
    Unique,
    seconds,
    statement,
)

BACK = frozenset({"unstarted", "returned", "lost"})
STATES = {"fail": "failed", "cancel": "cancelled", "quarantined": "quarantined", "done": "done"}
COUNTED = {
    "done": "done",
    "fail": "failed",
    "quarantined": "failed",
    "cancel": "cancelled",
    "retry": "retried",
    "snooze": "retried",
    "moved": "retried",
    "lost": "lost",
}


class Settlement(NamedTuple):
    """A job of a lease with its outcome."""

    lease: Lease
    job: Job
    outcome: str
    delay_s: float | None = None
    error: str | None = None
    target: int | None = None


def settle(
    t: JobsTables,
    *,
    whole: Sequence[int],
    outcome: str,
    jobs: dict[int, dict[int, tuple[str, float | None, str, str | None]]],
    losses_max: int,
) -> tuple[list[int], list[int]]:
    """settle_v1. Return leases that do not exist, and leases that other sessions hold."""
    rest, released = list(whole), []
    if outcome == "done":
        rest = [one for one in whole if not settle_plain(t, one, released)]
    wanted = list(dict.fromkeys([*rest, *jobs]))
    lost, busy, settled = [], [], []
    for lease_id in sorted(wanted):
        if t.lease.is_locked(lease_id):
            busy.append(lease_id)
            continue
        lease = t.lease.get(lease_id)
        if lease is None:
            lost.append(lease_id)
            continue
        t.lease.lock(lease_id)
        own, is_whole = jobs.get(lease_id, {}), lease_id in rest
        for job in lease.open_jobs:
            if job.id in own or is_whole:
                given = own.get(job.id, (outcome, None, "", None))
                settled.append(settlement(t, lease, job, given, losses_max))
    if settled or released:
        settle_jobs(t, settled, released)
    return lost, busy


def settle_plain(t: JobsTables, lease_id: int, released: list[Released]) -> bool:
    """The common case: a whole plain lease is done. Return whether it was one."""
    lease = t.lease.get(lease_id)
    if lease is None or not lease.is_plain or t.lease.is_locked(lease_id):
        return False
    if lease.is_counted and lease.settled:
        return False
    t.lease.pop(lease_id)
    left = lease.open_jobs
    t.add_count(lease.queue, done=len(left))
    for job in left:
        t.end_job(job.id, "done")
    if lease.is_counted and lease.limiter is not None:
        for job in lease.jobs:
            assert job.lane is not None, "a lease of a limiter has jobs of lanes"
            released.append(
                Released(lease.limiter, job.lane, lease_id, lease.queue, "done", lease.granted_at)
            )
    return True


def settlement(
    t: JobsTables,
    lease: Lease,
    job: Job,
    given: tuple[str, float | None, str, str | None],
    losses_max: int,
) -> Settlement:
    """The outcome to record: a job that was lost too often is quarantined."""
    kind, delay_s, error, queue = given
    target = None
    if kind == "lost" and job.losses + 1 >= losses_max:
        kind = "quarantined"
        error = error or f"the process that ran it died {job.losses + 1} times"
    elif kind == "moved":
        target = None if queue is None else t.queue_by_name.get(queue)
        if target is None:
            kind, error = "fail", f"send_to: queue {queue} is not known"
    return Settlement(lease, job, kind, delay_s, error, target)


def settle_jobs(t: JobsTables, settled: Sequence[Settlement], released: Sequence[Released]) -> None:
    """settle_jobs_v1: keys, chains, lanes, rows, counts, leases and groups, in this order."""
    settled = [settle_key(t, one) for one in settled]
    advance_chains(
        t, [one.job.id for one in settled if one.outcome in ENDS or one.outcome == "moved"]
    )
    lanes = [
        Released(
            one.lease.limiter,
            one.job.lane or "",
            one.lease.id,
            one.lease.queue,
            one.outcome,
            one.lease.granted_at,
        )
        for one in settled
        if one.lease.limiter is not None and (one.lease.is_counted or one.outcome in BACK)
    ]
    settle_lanes(t, [*lanes, *released])
    counts: dict[int, Counter[str]] = {}
    for one in settled:
        if one.outcome in ENDS:
            end(t, one)
        if one.outcome in COUNTED:
            counts.setdefault(one.lease.queue, Counter())[COUNTED[one.outcome]] += 1
    put_back(t, [one for one in settled if one.outcome not in ENDS])
    for queue, numbers in counts.items():
        t.add_count(queue, **numbers)
    by_lease: dict[int, list[int]] = {}
    for one in settled:
        by_lease.setdefault(one.lease.id, []).append(one.job.id)
    for lease_id, ids in by_lease.items():
        lease = t.lease.get(lease_id)
        assert lease is not None, "its row is locked"
        now_settled = lease.settled | set(ids)
        if len(now_settled) >= len(lease.jobs):
            t.lease.pop(lease_id)
        else:
            t.lease.put(lease_id, replace(lease, settled=now_settled))
    members = [
        (one.job.group_id, STATES[one.outcome])
        for one in settled
        if one.job.group_id is not None and one.outcome in ENDS
    ]
    if members:
        finish_members(t, members)


def settle_key(t: JobsTables, one: Settlement) -> Settlement:
    """settle_keys_v1: release the key of an ended job, or move it to the target queue."""
    key = one.job.unique_key
    if key is None or not (one.outcome in ENDS or one.outcome == "moved"):
        return one
    place = (one.lease.queue, key)
    held = t.unique.get(place)
    if held is not None and held.job_id == one.job.id and not held.is_done:
        is_kept = held.kept_until is not None and held.kept_until > t.now()
        if one.outcome == "done" and is_kept:
            t.unique.put(place, replace(held, is_done=True))
        else:
            t.unique.pop(place)
    if one.outcome != "moved":
        return one
    assert one.target is not None, "a moved job has a target"
    target = (one.target, key)
    t.unique.lock(target)
    taken = t.unique.get(target)
    if taken is None:
        t.unique.put(target, Unique(job_id=one.job.id))
        return one
    return one._replace(job=replace(one.job, unique_key=None))


def end(t: JobsTables, one: Settlement) -> None:
    """keep_ended_v1: store a job that did not end done; done ones are not kept."""
    t.end_job(one.job.id, one.outcome)
    if one.outcome != "done":
        job = replace(
            one.job,
            attempt=one.job.attempt + (one.outcome == "fail"),
            losses=one.job.losses + (one.outcome == "quarantined"),
        )
        t.failed.put(job.id, (STATES[one.outcome], job, one.error or ""))


def put_back(t: JobsTables, settled: Sequence[Settlement]) -> None:
    """put_back_v1: jobs wait again, in their lane if they were granted a start of it."""
    now = t.now()
    events: Counter[tuple[str, str, int]] = Counter()
    for one in settled:
        later, is_moved = one.outcome in ("retry", "snooze"), one.outcome == "moved"
        job = one.job
        changes: dict[str, Any] = {"last_error": None}
        if later:
            changes["run_at"] = now + seconds(one.delay_s or 0.0)
            changes["last_error"] = (one.error or "")[:500] or None
            changes["attempt"] = job.attempt + (one.outcome == "retry")
        elif is_moved:
            changes |= {"run_at": now, "queue": one.target, "attempt": 0, "losses": 0}
        elif one.outcome == "lost":
            changes["losses"] = job.losses + 1
        job = replace(job, **changes)
        if job.lane is not None and (is_moved or (one.lease.limiter is not None and not later)):
            t.laned.put(job.id, job)
            if is_moved:
                events[limiter_of(t, job.queue), job.lane, job.queue] += 1
        else:
            t.ready.put(job.id, job)
    add_lane_events(t, events)
    for one in settled:
        if one.outcome != "moved" and t.cancel.get(one.job.id) is not None:
            end_marked(t, [one.job.id])
    for queue in dict.fromkeys(
        one.target or one.lease.queue
        for one in settled
        if one.outcome in ("returned", "lost", "moved")
    ):
        t.notify_queue(queue)


def end_waiting(t: JobsTables, ids: Sequence[int]) -> list[int]:
    """end_waiting_v1: cancel waiting jobs. Return those that waited."""
    ended: list[Job] = []
    events: Counter[tuple[str, str, int]] = Counter()
    for job_id in ids:
        if (job := t.ready.pop(job_id)) is None:
            if (job := t.laned.pop(job_id)) is None:
                continue
            assert job.lane is not None, "it is in a lane"
            events[limiter_of(t, job.queue), job.lane, job.queue] -= 1
        ended.append(job)
        t.failed.put(job.id, ("cancelled", job, "cancelled"))
        t.end_job(job.id, "cancel")
        if job.unique_key is not None:
            held = t.unique.get((job.queue, job.unique_key))
            if held is not None and held.job_id == job.id:
                t.unique.pop((job.queue, job.unique_key))
    add_lane_events(t, events)
    advance_chains(t, [job.id for job in ended])
    members = [(job.group_id, "cancelled") for job in ended if job.group_id is not None]
    if members:
        finish_members(t, members)
    return [job.id for job in ended]


def end_marked(t: JobsTables, ids: Sequence[int]) -> None:
    """end_marked_v1: end jobs that were put back although they are to be cancelled."""
    for job_id in end_waiting(t, ids):
        row = t.failed.get(job_id)
        assert row is not None, "it was just stored"
        t.add_count(row[1].queue, cancelled=1)


def return_lease(t: JobsTables, lease_id: int, losses_max: int) -> int:
    """return_lease_v1: return the jobs of a lease whose host expired or is missing."""
    lease = t.lease.get(lease_id)
    if lease is None or t.lease.is_locked(lease_id) or t.is_live(lease.host):
        return 0
    settle(t, whole=[lease_id], outcome="lost", jobs={}, losses_max=losses_max)
    return len(lease.open_jobs)


@statement(SQL.settle)
def settle_(
    t: JobsTables,
    *,
    whole: list[int],
    outcome: str,
    leases: list[int],
    ids: list[int],
    outcomes: list[str],
    delays_s: list[float | None],
    errors: list[str],
    tracebacks: list[str],
    results: list[bytes | None],
    queues: list[str | None],
    losses_max: int,
    progressed: list[int],
) -> list[Any]:
    for job in progressed:
        t.progress.pop(job)
    jobs: dict[int, dict[int, tuple[str, float | None, str, str | None]]] = {}
    for i, lease in enumerate(leases):
        jobs.setdefault(lease, {})[ids[i]] = (outcomes[i], delays_s[i], errors[i], queues[i])
    lost, busy = settle(t, whole=whole, outcome=outcome, jobs=jobs, losses_max=losses_max)
    return [{"lost": lost or None, "busy": busy or None}] if lost or busy else []


@statement(SQL.return_lease)
def return_lease_(t: JobsTables, *, lease: int, losses_max: int) -> list[Any]:
    return [{"jobs": return_lease(t, lease, losses_max)}]


@statement(SQL.end_waiting)
def end_waiting_(t: JobsTables, *, ids: list[int]) -> list[Any]:
    return [{"ids": end_waiting(t, ids)}]


@statement(SQL.cancel_tree)
def cancel_tree(t: JobsTables, *, ids: list[int]) -> list[Any]:
    ended = end_waiting(t, sorted(set(ids)))
    running = {job.id for lease in t.lease.values() for job in lease.open_jobs}
    marked = [job_id for job_id in sorted(set(ids)) if job_id in running]
    for job_id in marked:
        t.cancel.put(job_id, t.cancel.get(job_id) or t.now())
    if marked:
        t.model.notify("headrace_fleet", "")
    return [{"ended": ended, "marked": marked}]


@statement(SQL.marked_jobs)
def marked_jobs(t: JobsTables, *, host: int) -> list[Any]:
    if not len(t.cancel):
        return []
    return [
        {"job_id": job.id, "lease_id": lease.id}
        for _, lease in t.lease.of(host)
        for job in lease.open_jobs
        if job.id in t.cancel
    ]


@statement(SQL.tend_workflows)
def tend_workflows(t: JobsTables, *, kept_s: float, rows_max: int) -> list[Any]:
    marked = [job_id for job_id, _ in t.cancel.items()]
    end_marked(t, marked)
    leased = {job.id for lease in t.lease.values() for job in lease.jobs}
    for job_id in marked:
        if job_id not in leased:
            t.cancel.pop(job_id)
    return [{"is_more": False}]


@statement(SQL.write_progress)
def write_progress(t: JobsTables, *, leases: list[int], ids: list[int], **_rest: Any) -> int:
    for lease_id, job_id in zip(leases, ids, strict=True):
        lease = t.lease.get(lease_id)
        if lease is not None and job_id not in lease.settled:
            t.progress.put(job_id, lease_id)
    return 1
