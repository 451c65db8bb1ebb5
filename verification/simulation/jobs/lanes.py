"""The contracts of the functions of lanes and limiters: journal, plan, grants, and releases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from msgspec.structs import replace

from headrace.jobs.sql import SQL
from verification.simulation.jobs.enqueue import limiter_of
from verification.simulation.jobs.tables import (
    ALWAYS,
    NEVER,
    Job,
    JobsTables,
    Lane,
    LaneEvent,
    LaneQueue,
    Limiter,
    Limits,
    seconds,
    statement,
)

ENTRIES: int = 16
"""Grants within this part of a window share one entry."""
BLOCKING: int = 1_000_000_000
"""An entry that blocks the lane until forgotten starts cannot matter."""


class Released(NamedTuple):
    """A job of a lane that is settled."""

    limiter: str
    lane: str
    lease: int
    queue: int
    outcome: str
    granted_at: datetime


def make_lane(t: JobsTables, limiter: str, name: str) -> Lane:
    """make_lanes_v1: a missing lane with its limiter's limits."""
    found = t.lane.get((limiter, name))
    if found is not None:
        return found
    of = t.limiter.get(limiter)
    if of is None:
        of = Limiter(name=limiter)
        t.limiter.put(limiter, of)
    lane = Lane(limiter=limiter, name=name, limits=of.limits)
    t.lane.put((limiter, name), lane)
    return lane


def fold_lanes(t: JobsTables, queue: int, after: int, events_max: int) -> tuple[int, int]:
    """fold_lanes_v1: add journal rows to the counts of lanes that no other session holds."""
    found = [
        (key, event)
        for key, event in sorted(t.lane_event.of(queue))
        if key > after and not t.lane_event.is_locked(key)
    ][:events_max]
    if not found:
        return 0, after
    sums: Counter[tuple[str, str]] = Counter()
    rows: Counter[tuple[str, str]] = Counter()
    for key, event in found:
        t.lane_event.pop(key)
        sums[event.limiter, event.lane] += event.k
        rows[event.limiter, event.lane] += 1
    now, folded = t.now(), len(found)
    for (limiter, name), k in sums.items():
        if t.lane.is_locked((limiter, name)):
            event = LaneEvent(limiter=limiter, lane=name, queue=queue, k=k)
            t.lane_event.put(t.model.next_id("lane_event"), event)
            folded -= 1
            continue
        next_at = make_lane(t, limiter, name).next_at(now)
        key = (limiter, name, queue)
        old = t.lane_queue.get(key)
        if old is None:
            new = LaneQueue(waiting=k, ready_at=next_at if k > 0 else NEVER)
        else:
            waiting = old.waiting + k
            ready_at = NEVER if waiting <= 0 else next_at if old.waiting <= 0 else old.ready_at
            new = replace(old, waiting=waiting, ready_at=ready_at)
        t.lane_queue.put(key, new)
    return folded, found[-1][0]


class Planned(NamedTuple):
    """What a claim takes of a lane."""

    lane: Lane
    give: int
    credit: int


def live_starts(lane: Lane, now: datetime) -> list[tuple[datetime, int]]:
    """Entries that still count."""
    since = now - lane.span
    return [(at, n) for at, n in lane.starts if at > since]


def plan_lanes(
    t: JobsTables, queue: int, lanes: Sequence[Lane], *, jobs_max: int, quantum: int
) -> list[Planned]:
    """plan_lanes_v1: how many jobs each lane gives."""
    now = t.now()
    weights = sum(lane.weight for lane in lanes)
    share = max(quantum, math.ceil(jobs_max / weights))
    planned: list[tuple[datetime, Lane, int, int]] = []
    for lane in lanes:
        row = t.lane_queue.get((lane.limiter, lane.name, queue))
        if row is None:
            continue
        credit = row.credit if row.credit > 0 else lane.weight * share
        give = min(row.waiting, credit)
        limits = lane.limits
        if limits.concurrency is not None:
            give = min(give, limits.concurrency - lane.inflight - lane.uncounted)
        if limits.starts_max is not None:
            live = sum(n for _, n in live_starts(lane, now)) if lane.starts else 0
            give = min(give, limits.starts_max - live)
        planned.append((row.ready_at, lane, 0 if lane.paused else max(0, give), credit))
    planned.sort(key=lambda one: (one[0], one[1].name))
    found, before = [], 0
    for _, lane, give, credit in planned:
        room = jobs_max - before
        before += give
        if give == 0 or room > 0:
            given = max(0, min(give, room))
            left = credit - given if given < give else 0
            found.append(Planned(lane, given, left))
    return found


def grant(
    t: JobsTables, queue: int, planned: Sequence[Planned], given: Counter[str], now: datetime
) -> None:
    """grant_v1: record grants in locked lanes, and correct when to look at them."""
    for lane, _, credit in planned:
        k, limits = given[lane.name], lane.limits
        starts = [(at, n) for at, n in sorted(live_starts(lane, now)) if n > 0]
        live = sum(n for _, n in starts)
        free_at = ALWAYS
        if limits.starts_max is not None:
            if k > 0:
                starts = add_start(lane, starts, now, k)
            if live + k >= limits.starts_max:
                first = starts[0][0] if starts else now
                free_at = (min(first, now) if k > 0 else first) + lane.span
        changed = t.put_lane(
            lane,
            starts=tuple(starts) if limits.starts_max is not None else (),
            inflight=0 if limits.concurrency is None else lane.inflight + k,
            started_at=max(lane.started_at or now, now) if k else lane.started_at,
            free_at=free_at,
        )
        next_at = changed.next_at(now)
        for key, row in t.lane_queue.at_first((lane.limiter, lane.name)):
            if key[2] != queue:
                if row.ready_at < next_at:
                    t.lane_queue.put(key, replace(row, ready_at=next_at))
                continue
            waiting = row.waiting - k
            ready_at = next_at
            if waiting <= 0:
                ready_at = NEVER
            elif credit > 0 and next_at <= now:
                ready_at = row.ready_at
            t.lane_queue.put(key, LaneQueue(waiting=waiting, credit=credit, ready_at=ready_at))


def add_start(
    lane: Lane, starts: Sequence[tuple[datetime, int]], at: datetime, k: int
) -> list[tuple[datetime, int]]:
    """Entries with `k` more starts; above 16 a window, near ones share the later moment."""
    added = list(starts)
    if added and added[-1][0] == at:
        return [*added[:-1], (at, added[-1][1] + k)]
    is_many = (lane.limits.starts_max or 0) > ENTRIES
    if is_many and added and added[-1][0] <= at and part(lane, added[-1][0]) == part(lane, at):
        return [*added[:-1], (at, added[-1][1] + k)]
    return [*added, (at, k)]


def part(lane: Lane, at: datetime) -> int:
    """The sixteenth of a window in which a moment lies."""
    return math.floor(at.timestamp() * ENTRIES / lane.span.total_seconds())


def recount_lane(t: JobsTables, lane: Lane) -> Lane:
    """recount_lanes_v1: jobs in flight of leases that are not counted, from the leases."""
    uncounted = 0
    if lane.limits.concurrency is not None:
        for lease in t.lease.values():
            if lease.limiter == lane.limiter and lease.id < lane.counted_from:
                uncounted += sum(job.lane == lane.name for job in lease.open_jobs)
    return t.put_lane(lane, uncounted=uncounted)


def settle_lanes(t: JobsTables, jobs: Iterable[Released]) -> None:
    """settle_lanes_v1: release jobs of lanes; what comes back waits, what never ran is unspent."""
    by_lane: dict[tuple[str, str], list[Released]] = {}
    for job in jobs:
        by_lane.setdefault((job.limiter, job.lane), []).append(job)
    opened: dict[int, None] = {}
    now = t.now()
    for key in sorted(by_lane):
        t.lane.lock(key)
        lane, some = t.lane.get(key), by_lane[key]
        if lane is None:
            continue
        at_once = lane.limits.concurrency
        was_full = at_once is not None and lane.inflight + lane.uncounted >= at_once
        starts = unspent_starts(lane, some, now)
        is_unspent = starts is not None
        ended = sum(job.lease > lane.counted_from for job in some)
        lane = t.put_lane(
            lane,
            inflight=0 if at_once is None else lane.inflight - ended,
            starts=lane.starts if starts is None else starts,
            free_at=ALWAYS if is_unspent else lane.free_at,
        )
        is_opened = was_full or is_unspent
        next_at = lane.next_at(now)
        back = Counter(
            job.queue for job in some if job.outcome in ("unstarted", "returned", "lost")
        )
        for place, row in t.lane_queue.at_first(key):
            k = back[place[2]]
            if not is_opened and k == 0:
                continue
            waiting, ready_at = row.waiting + k, row.ready_at
            if waiting <= 0:
                ready_at = NEVER
            elif is_opened or row.waiting <= 0:
                ready_at = min(ready_at, next_at)
            t.lane_queue.put(place, replace(row, waiting=waiting, ready_at=ready_at))
            if was_full and waiting > 0 and ready_at < NEVER:
                opened[place[2]] = None
    for queue in opened:
        t.notify_queue(queue)


def unspent_starts(
    lane: Lane, jobs: Sequence[Released], now: datetime
) -> tuple[tuple[datetime, int], ...] | None:
    """Entries without the starts of jobs that never started; None: all were spent."""
    if lane.limits.window_s is None:
        return None
    since = now - seconds(lane.limits.window_s)
    less: Counter[int] = Counter()
    for job in jobs:
        if job.outcome == "unstarted" and job.granted_at > since:
            entries = [(at, i) for i, (at, _) in enumerate(lane.starts) if at >= job.granted_at]
            if entries:
                less[min(entries)[1]] += 1
    if not less:
        return None
    return tuple((at, max(0, n - less[i])) for i, (at, n) in enumerate(lane.starts))


def spend(t: JobsTables, limiter: str, name: str, k: int, wait_max_s: float) -> float | None:
    """spend_v1: consume starts now or as soon as they fit; None: refused."""
    t.lane.lock((limiter, name))
    lane, now = make_lane(t, limiter, name), t.now()
    starts_max = lane.limits.starts_max
    if lane.paused or (starts_max is not None and starts_max < k):
        return None
    if starts_max is None:
        t.put_lane(lane, started_at=max(lane.started_at or now, now))
        return 0.0
    starts = sorted((at, n) for at, n in live_starts(lane, now) if n > 0)
    last = starts[-1][0] if starts else ALWAYS
    moments = [max(now, last)] + [max(now, last, at + lane.span) for at, _ in starts]
    fits = [
        at
        for at in moments
        if k <= starts_max - sum(n for one, n in starts if one > at - lane.span)
    ]
    if not fits or min(fits) > now + seconds(wait_max_s):
        return None
    at = min(fits)
    starts = add_start(lane, starts, at, k)
    is_full = sum(n for _, n in starts) >= starts_max
    t.put_lane(
        lane,
        starts=tuple(starts),
        started_at=max(lane.started_at or at, at),
        free_at=starts[0][0] + lane.span if is_full else ALWAYS,
    )
    return max(0.0, (at - now).total_seconds())


def limit_lane(t: JobsTables, lane: Lane, limits: Limits) -> None:
    """limit_lanes_v1: change the limits of a lane while it runs."""
    now, old = t.now(), lane.limits
    counts_now = old.concurrency is None and limits.concurrency is not None
    at = None
    if limits.window_s is not None and lane.started_at is not None:
        if old.window_s is None:
            at = lane.started_at
        elif limits.window_s + limits.slack_s > old.window_s + old.slack_s:
            at = min(lane.started_at, now - lane.span)
    starts: list[tuple[datetime, int]] = []
    if limits.window_s is not None:
        later = seconds(max(0.0, old.slack_s - limits.slack_s))
        starts = [] if at is None else [(at, BLOCKING)]
        starts += [(one + later, n) for one, n in lane.starts]
    is_counting = old.concurrency is not None and limits.concurrency is not None
    lane = t.put_lane(
        lane,
        limits=limits,
        free_at=ALWAYS,
        counted_from=t.model.next_id("job_lease") if counts_now else lane.counted_from,
        inflight=lane.inflight if is_counting else 0,
        uncounted=0 if limits.concurrency is None else lane.uncounted,
        starts=tuple(starts),
    )
    if counts_now:
        recount_lane(t, lane)
    for key, row in t.lane_queue.at_first((lane.limiter, lane.name)):
        if row.waiting > 0:
            t.lane_queue.put(key, replace(row, ready_at=now))
            t.notify_queue(key[2])


def move_to_lanes(t: JobsTables, jobs: Iterable[Job]) -> int:
    """Move due jobs of lanes from job_ready, whose rows the caller deleted, into their lanes."""
    events: Counter[tuple[str, str | None, int]] = Counter()
    for job in jobs:
        t.laned.put(job.id, job)
        events[limiter_of(t, job.queue), job.lane, job.queue] += 1
    for (limiter, lane, queue), k in events.items():
        assert lane is not None, "only jobs of lanes move"
        event = LaneEvent(limiter=limiter, lane=lane, queue=queue, k=k)
        t.lane_event.put(t.model.next_id("lane_event"), event)
    return events.total()


@statement(SQL.fold_lanes)
def fold_lanes_(t: JobsTables, *, queue: int, event: int, events_max: int) -> list[Any]:
    folded, last_event = fold_lanes(t, queue, event, events_max)
    return [{"folded": folded, "last_event": last_event}]


@statement(SQL.spend_of_queue)
def spend_of_queue(
    t: JobsTables, *, queue: int, lane: str, starts: int, wait_max_s: float
) -> list[Any]:
    return [{"wait_s": spend(t, limiter_of(t, queue), lane, starts, wait_max_s)}]


@statement(SQL.move_due)
def move_due(t: JobsTables, *, jobs_max: int) -> list[Any]:
    due = []
    for at, key in list(t.ready.laned):
        if at > t.now() or len(due) == jobs_max:
            break
        if not t.ready.is_locked(key) and (job := t.ready.get(key)) is not None:
            t.ready.pop(key)
            due.append(job)
    return [{"count": move_to_lanes(t, due)}]


@statement(SQL.set_limiter)
def set_limiter(
    t: JobsTables,
    *,
    limiter: str,
    starts_max: int | None,
    window_s: float | None,
    slack_s: float,
    concurrency: int | None,
    is_set: bool,
) -> list[Any]:
    limits = Limits(
        starts_max=starts_max, window_s=window_s, slack_s=slack_s, concurrency=concurrency
    )
    old = t.limiter.get(limiter)
    if not is_set and (old is None or old.declared != limits):
        old = replace(old or Limiter(name=limiter), declared=limits)
        t.limiter.put(limiter, old)
    if not is_set and old is not None and (old.is_set or (old.limits == limits and old.is_spread)):
        return [{"is_to_spread": False}]
    old = old or Limiter(name=limiter)
    t.limiter.put(limiter, replace(old, limits=limits, is_set=is_set, is_spread=False))
    return [{"is_to_spread": True}]


@statement(SQL.spread_limiter)
def spread_limiter(t: JobsTables, *, limiter: str, after: str, lanes_max: int) -> list[Any]:
    of = t.limiter.get(limiter)
    assert of is not None, "it was set before"
    names = sorted(name for (one, name), _ in t.lane.items() if one == limiter and name > after)[
        :lanes_max
    ]
    for name in names:
        lane = t.lane.get((limiter, name))
        assert lane is not None, "it was just read"
        if not lane.is_own and lane.limits != of.limits:
            limit_lane(t, lane, of.limits)
    if len(names) == lanes_max:
        return [{"after": names[-1]}]
    if not of.is_spread:
        t.limiter.put(limiter, replace(of, is_spread=True))
    return [{"after": None}]


@statement(SQL.unspread_limiters)
def unspread_limiters(t: JobsTables) -> list[Any]:
    return [{"name": of.name} for of in t.limiter.values() if not of.is_spread]


@statement(SQL.set_lane)
def set_lane(
    t: JobsTables,
    *,
    limiter: str,
    lane: str,
    is_own: bool | None,
    starts_max: int | None,
    window_s: float | None,
    concurrency: int | None,
    is_paused: bool | None,
    weight: int | None,
) -> list[Any]:
    row = make_lane(t, limiter, lane)
    of = t.limiter.get(limiter)
    row = t.put_lane(
        row,
        is_own=row.is_own if is_own is None else is_own,
        paused=row.paused if is_paused is None else is_paused,
        weight=row.weight if weight is None else weight,
    )
    if is_own is None:
        starts_max, window_s = row.limits.starts_max, row.limits.window_s
        concurrency = row.limits.concurrency
    slack_s = 0.25 if of is None else of.limits.slack_s
    limits = Limits(
        starts_max=starts_max,
        window_s=window_s,
        # PostgreSQL's least and greatest leave NULL out.
        slack_s=max(slack_s, 1.0 if window_s is None else min(1.0, window_s / 60)),
        concurrency=concurrency,
    )
    if not row.is_own:
        limits = Limits() if of is None else of.limits
    limit_lane(t, row, limits)
    return [{}]


@statement(SQL.remove_idle_lanes)
def remove_idle_lanes(
    t: JobsTables, *, limiter: str, lane: str, lanes_max: int, idle_s: float
) -> list[Any]:
    seen = sorted(key for key, _ in t.lane.items() if key > (limiter, lane))[:lanes_max]
    removed = 0
    leased = {(lease.limiter, job.lane) for lease in t.lease.values() for job in lease.jobs}
    for key in seen:
        row = t.lane.get(key)
        if row is None or t.lane.is_locked(key) or row.is_own or row.paused:
            continue
        quiet = t.now() - max(seconds(idle_s), row.span)
        queues = t.lane_queue.at_first(key)
        if (
            row.weight == 1
            and row.inflight == 0
            and (row.started_at or ALWAYS) < quiet
            and all(one.waiting == 0 for _, one in queues)
            and key not in leased
        ):
            removed += 1
            for place, _ in queues:
                t.lane_queue.pop(place)
            t.lane.pop(key)
    last = seen[-1] if len(seen) == lanes_max else (None, None)
    return [{"last_limiter": last[0], "last_name": last[1], "removed": removed}]
