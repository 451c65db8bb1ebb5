"""The contracts of hosts and claims: a live host leases due jobs, each to one lease."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace

from headrace.jobs.sql import SQL
from verification.simulation.jobs.lanes import (
    fold_lanes,
    grant,
    move_to_lanes,
    plan_lanes,
    recount_lane,
)
from verification.simulation.jobs.settle import settle
from verification.simulation.jobs.tables import (
    NEVER,
    Host,
    Job,
    JobsTables,
    Lane,
    Lease,
    Queue,
    seconds,
    statement,
)

NO_LEASE: Final = dict.fromkeys(
    (
        "lease_id",
        "is_plain",
        "ids",
        "run_ats",
        "priorities",
        "attempts",
        "losses",
        "lanes",
        "headers",
        "versions",
        "payloads",
    )
)
HEADERS_MAX: Final = 55
"""Longer headers have options of a job's own, which a plain lease does not have."""


def open_queue(t: JobsTables, host: int, queue: int) -> Queue | None:
    """The queue, if the host may lease its jobs."""
    row, of = t.host.get(host), t.queue.get(queue)
    if row is None or row.expires_at <= t.now() or row.is_draining:
        return None
    return None if of is None or of.paused else of


def fits(jobs: Sequence[Job], leases_max: int, batch: int) -> list[Job]:
    """The first jobs that fit into the leases; a job that was lost needs one alone."""
    risky = safe = 0
    for place, job in enumerate(jobs):
        risky, safe = risky + (job.losses > 0), safe + (job.losses == 0)
        if risky + -(-safe // batch) > leases_max:
            return list(jobs[:place])
    return list(jobs)


def add_leases(
    t: JobsTables, host: int, queue: Queue, jobs: Sequence[Job], batch: int, **facts: Any
) -> list[Lease]:
    """Insert leases of up to `batch` jobs."""
    alone = [(job,) for job in jobs if job.losses]
    together = [job for job in jobs if not job.losses]
    parts = [tuple(together[i : i + batch]) for i in range(0, len(together), batch)]
    leases = []
    is_kept = queue.keep_done_s is not None or queue.keep_result
    for part in [*alone, *parts]:
        is_plain = not is_kept and all(
            job.unique_key is None
            and job.group_id is None
            and len(job.headers or "") <= HEADERS_MAX
            for job in part
        )
        lease = Lease(
            id=t.model.next_id("job_lease"),
            host=host,
            queue=queue.id,
            jobs=part,
            is_plain=is_plain,
            **facts,
        )
        t.lease.put(lease.id, lease)
        t.host_of.put(lease.id, host)
        leases.append(lease)
    if jobs:
        now = t.now()
        waits_s = [(now - job.run_at).total_seconds() for job in jobs]
        t.add_count(queue.id, claimed=len(jobs), wait_s=sum(waits_s), wait_max_s=max(waits_s))
    return leases


def lease_row(lease: Lease) -> dict[str, Any]:
    """The columns of a claimed lease."""
    jobs = lease.jobs
    return {
        "lease_id": lease.id,
        "is_plain": lease.is_plain,
        "ids": [job.id for job in jobs],
        "run_ats": [job.run_at for job in jobs],
        "priorities": [job.priority for job in jobs],
        "attempts": [job.attempt for job in jobs],
        "losses": [job.losses for job in jobs],
        "lanes": [job.lane for job in jobs],
        "headers": [job.headers for job in jobs],
        "versions": [job.version for job in jobs],
        "payloads": [job.payload for job in jobs],
    }


@statement(SQL.claim_ready)
def claim_ready(
    t: JobsTables,
    *,
    host: int,
    queue: int,
    leases_max: int,
    batch: int,
    priorities: list[int],
    marks_at: list[datetime],
    marks_id: list[int],
    done: list[int],
) -> list[Any]:
    lost, busy = settle(t, whole=done, outcome="done", jobs={}, losses_max=1) if done else ([], [])
    facts = {
        "claimed_at": t.now(),
        "retries": None,
        "moved": 0,
        "lost": lost or None,
        "busy": busy or None,
        "scan_s": 0.0,
    }
    of = open_queue(t, host, queue)
    if of is None:
        return [facts | NO_LEASE]
    found: list[Job] = []
    for priority in priorities:
        mark = (marks_at[priority], marks_id[priority])
        for job in t.ready.due(queue, priority, mark, t.now()):
            if len(found) == leases_max * batch:
                break
            found.append(job)
    taken = fits(found, leases_max, batch)
    for job in taken:
        t.ready.pop(job.id)
    facts["retries"] = of.retries
    facts["moved"] = move_to_lanes(t, [job for job in taken if job.lane is not None])
    jobs = [job for job in taken if job.lane is None]
    jobs.sort(key=lambda job: (job.priority, job.run_at, job.id))
    leases = add_leases(t, host, of, jobs, batch, granted_at=t.now())
    return [facts | lease_row(lease) for lease in leases] or [facts | NO_LEASE]


def ready_lanes(
    t: JobsTables, of: Queue, ready_from: datetime, lanes_max: int
) -> tuple[datetime | None, list[Lane]]:
    """When the first lane is ready, and the free lanes that are ready now."""
    rows = sorted(
        (row.ready_at, key)
        for key, row in t.lane_queue.at_last(of.id)
        if ready_from <= row.ready_at < NEVER
    )
    found: list[Lane] = []
    for at, key in rows:
        if len(found) == lanes_max or at > t.now():
            break
        lane = None if t.lane.is_locked(key[:2]) else t.lane.get(key[:2])
        if key[0] == of.limiter and lane is not None:
            found.append(lane)
    return (rows[0][0] if rows else None), found


@statement(SQL.claim_lanes)
def claim_lanes(
    t: JobsTables,
    *,
    host: int,
    queue: int,
    leases_max: int,
    batch: int,
    lanes_max: int,
    quantum: int,
    is_folding: bool,
    event: int,
    ready_from: datetime,
) -> list[Any]:
    facts: dict[str, Any] = {
        "claimed_at": t.now(),
        "retries": None,
        "limiter": None,
        "wait_s": 0.0,
        "last_event": event,
        "first_ready": None,
        "scan_s": 0.0,
        "is_full": False,
        "slack_s": 0.0,
        "is_counted": False,
    }
    of = open_queue(t, host, queue)
    found: list[Lane] = []
    if of is not None:
        facts |= {"retries": of.retries, "limiter": of.limiter}
        if is_folding:
            facts["last_event"] = fold_lanes(t, queue, event, 500)[1]
        facts["first_ready"], found = ready_lanes(t, of, ready_from, lanes_max)
    if of is None or not found:
        first = facts["first_ready"]
        if is_folding:
            facts["wait_s"] = None if first is None else (first - t.now()).total_seconds()
        return [facts | NO_LEASE]
    facts["is_full"] = len(found) >= lanes_max
    if any(lane.uncounted > 0 for lane in found):
        found = [recount_lane(t, lane) for lane in found]
    planned = plan_lanes(t, queue, found, jobs_max=leases_max * batch, quantum=quantum)
    facts["slack_s"] = min(
        (one.lane.limits.slack_s for one in planned if one.give > 0), default=0.0
    )
    facts["is_counted"] = any(one.lane.limits.concurrency is not None for one in planned)
    first_jobs = [job for one in planned for job in t.laned.first(queue, one.lane.name, one.give)]
    jobs = fits(first_jobs, leases_max, batch)
    for job in jobs:
        t.laned.pop(job.id)
    grant(t, queue, planned, Counter(job.lane or "" for job in jobs), t.now())
    jobs.sort(key=lambda job: (job.priority, job.id))
    leases = add_leases(
        t,
        host,
        of,
        jobs,
        batch,
        granted_at=t.now(),
        limiter=of.limiter,
        is_counted=facts["is_counted"],
    )
    return [facts | lease_row(lease) for lease in leases] or [facts | NO_LEASE]


@statement(SQL.work_ahead)
def work_ahead(t: JobsTables, *, queues: list[int], from_at: datetime, event: int) -> list[Any]:
    ready, laned, moments = [], [], []
    for queue in queues:
        of = t.queue.get(queue)
        if of is None or of.paused:
            continue
        run_at = t.ready.first_at(queue, from_at)
        ready_at = min(
            (
                row.ready_at
                for _, row in t.lane_queue.at_last(queue)
                if from_at <= row.ready_at < NEVER
            ),
            default=None,
        )
        if run_at is not None and run_at <= t.now():
            ready.append(queue)
        has_events = any(key > event for key, _ in t.lane_event.of(queue))
        if has_events or (ready_at is not None and ready_at <= t.now()):
            laned.append(queue)
        moments += [at for at in (run_at, ready_at) if at is not None and at > t.now()]
    wait_s = min(((at - t.now()).total_seconds() for at in moments), default=None)
    return [
        {
            "ready": ready or None,
            "laned": laned or None,
            "wait_s": wait_s,
            "polled_at": t.now(),
            "took_s": 0.0,
            "last_event": t.model.last_id("lane_event"),
        }
    ]


@statement(SQL.add_host)
def add_host(
    t: JobsTables,
    *,
    name: str,
    queues: list[int],
    lease_s: float,
    kind: str,
    tags: list[str],
    cores: int,
) -> list[Any]:
    host = Host(
        id=t.model.next_id("host"),
        name=name,
        queues=tuple(queues),
        kind=kind,
        tags=tuple(tags),
        cores=cores,
        started_at=t.now(),
        expires_at=t.now() + seconds(lease_s),
    )
    t.host.put(host.id, host)
    return [{"id": host.id}]


@statement(SQL.lock_host_name)
def lock_host_name(t: JobsTables, *, name: str) -> list[Any]:
    t.model.lock_advisory(("host", name))
    return [{}]


@statement(SQL.other_agent)
def other_agent(t: JobsTables, *, name: str, own: list[int]) -> list[Any]:
    found = [
        host
        for host in t.host.values()
        if host.name == name
        and host.kind == "agent"
        and host.id not in own
        and host.expires_at > t.now()
    ]
    return [
        {
            "id": host.id,
            "expires_at": host.expires_at,
            "started_at": host.started_at,
            "left_s": (host.expires_at - t.now()).total_seconds(),
        }
        for host in found[-1:]
    ]


@statement(SQL.renew_host)
def renew_host(t: JobsTables, *, host: int, lease_s: float) -> int:
    t.host.lock(host)
    if not t.is_live(host):
        return 0
    t.host.put(host, replace(t.host.get(host), expires_at=t.now() + seconds(lease_s)))  # type: ignore[type-var]
    return 1


@statement(SQL.remove_host)
def remove_host(t: JobsTables, *, host: int) -> int:
    for key, _ in t.allowance.at_first((host,)):
        t.allowance.pop(key)
    return int(t.host.pop(host) is not None)


@statement(SQL.expire_host)
def expire_host(t: JobsTables, *, host: int) -> int:
    for key, _ in t.allowance.at_first((host,)):
        t.allowance.pop(key)
    t.host.lock(host)
    row = t.host.get(host)
    if row is not None:
        t.host.put(host, replace(row, expires_at=min(row.expires_at, t.now())))
    return int(row is not None)


@statement(SQL.drop_hosts)
def drop_hosts(t: JobsTables, *, lost_kept_s: float) -> int:
    dropped = 0
    newest = {host.name: key for key, host in sorted(t.host.items()) if host.kind == "agent"}
    lost_before = t.now() - seconds(lost_kept_s)
    for key, host in t.host.items():
        if host.expires_at > t.now() or t.host.is_locked(key) or t.lease.of(key):
            continue
        is_lost = host.reported_at is not None and newest.get(host.name) == key
        if is_lost and host.expires_at > lost_before:
            continue
        held = t.allowance.at_first((key,))
        if host.expires_at <= t.now() - seconds(5) or not any(row[0] for _, row in held):
            remove_host(t, host=key)
            dropped += 1
    return dropped


@statement(SQL.leases_of_host)
def leases_of_host(t: JobsTables, *, host: int) -> list[Any]:
    return [{"id": key} for key, _ in t.lease.of(host)]


@statement(SQL.expired_leases)
def expired_leases(t: JobsTables, *, leases_max: int) -> list[Any]:
    dead = [host for host, keys in t.lease.keys_of.items() if keys and not t.is_live(host)]
    found = sorted(
        key for host in dead for key, _ in t.lease.of(host) if not t.lease.is_locked(key)
    )
    return [{"id": key} for key in found[:leases_max]]


@statement(SQL.end_stuck_claims)
def end_stuck_claims(t: JobsTables, *, lease_s: float) -> list[Any]:
    return [{"count": 0}]


@statement(SQL.lock_leases)
def lock_leases(t: JobsTables, *, leases: list[int], milliseconds: str | None) -> list[Any]:
    if milliseconds is not None:
        t.model.limit_idle(int(milliseconds) / 1000)
    found = []
    for lease in sorted(leases):
        t.lease.lock(lease)
        if t.lease.get(lease) is not None:
            found.append({"id": lease})
    return found
