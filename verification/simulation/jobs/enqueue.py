"""The contracts of the statements that enqueue jobs: keys, chains, groups, and their ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from msgspec.structs import replace

from headrace.jobs.sql import SQL
from verification.simulation.jobs.tables import (
    PARKED_AT,
    Group,
    Job,
    JobsTables,
    LaneEvent,
    Unique,
    seconds,
    statement,
)


def enqueue(
    t: JobsTables,
    *,
    queues: Sequence[int],
    priorities: Sequence[int],
    run_ats: Sequence[Any] | None,
    delays_s: Sequence[Any] | None,
    lanes: Sequence[Any] | None,
    keys: Sequence[Any] | None,
    groups: Sequence[Any] | None,
    payloads: Sequence[bytes],
    versions: Sequence[int] | None,
    headers: Sequence[str],
    is_hinted: bool,
    key_times_s: Sequence[Any] | None = None,
    chains: Sequence[Any] | None = None,
) -> list[int]:
    """enqueue_v1: insert jobs; the id of a taken key's job in place of a new one."""
    now, ids = t.now(), []
    events: Counter[tuple[str, str, int]] = Counter()
    for i, queue in enumerate(queues):
        own = t.model.next_id("job_id")
        key = None if keys is None else keys[i]
        if key is not None:
            kept_s = None if key_times_s is None else key_times_s[i]
            taken = take_key(t, queue, key, own, kept_s)
            if taken != own:
                ids.append(taken)
                continue
        ids.append(own)
        at = moment(now, run_ats and run_ats[i], delays_s and delays_s[i])
        chain = None if chains is None else chains[i]
        if chain is not None and link_chain(t, queue, chain, own, at):
            at = PARKED_AT
        job = Job(
            id=own,
            queue=queue,
            run_at=at,
            group_id=None if groups is None else groups[i],
            priority=priorities[i],
            lane=None if lanes is None else lanes[i],
            unique_key=key,
            headers=headers[i] if len(headers) > 1 else headers[0],
            payload=payloads[i],
            version=1 if versions is None else versions[i],
        )
        if job.lane is None or at > now:
            t.ready.put(own, job)
        else:
            t.laned.put(own, job)
            events[limiter_of(t, queue), job.lane, queue] += 1
    add_lane_events(t, events)
    if is_hinted:
        for queue in dict.fromkeys(queues):
            t.notify_queue(queue)
    return ids


def moment(now: datetime, run_at: datetime | None, delay_s: float | None) -> datetime:
    """When a new job is due: not before now."""
    at = run_at if run_at is not None else now + seconds(delay_s or 0.0)
    return max(at, now)


def limiter_of(t: JobsTables, queue: int) -> str:
    """The limiter of a queue."""
    row = t.queue.get(queue)
    assert row is not None, "a queue is never deleted"
    return row.limiter


def add_lane_events(t: JobsTables, events: dict[tuple[str, str, int], int]) -> None:
    """Insert a journal row for each lane."""
    for (limiter, lane, queue), k in events.items():
        event = LaneEvent(limiter=limiter, lane=lane, queue=queue, k=k)
        t.lane_event.put(t.model.next_id("lane_event"), event)


def take_key(t: JobsTables, queue: int, key: str, own: int, kept_s: float | None) -> int:
    """take_keys_v1: the job that has the key, which is `own` if it was free."""
    now = t.now()
    t.unique.lock((queue, key))
    held = t.unique.get((queue, key))
    is_over = held is not None and held.is_done and held.kept_until is not None
    if held is not None and not (is_over and held.kept_until <= now):  # type: ignore[operator]
        return held.job_id
    kept_until = None if kept_s is None else now + seconds(kept_s)
    t.unique.put((queue, key), Unique(job_id=own, kept_until=kept_until))
    return own


def link_chain(t: JobsTables, queue: int, chain: str, job: int, due_at: datetime) -> bool:
    """link_chains_v1: append to a chain; whether the job is not its first."""
    t.model.lock_advisory(("chain", queue, chain))
    is_later = bool(t.chain.at_first((queue, chain)))
    t.chain.put((queue, chain, t.model.next_id("job_chain")), (job, due_at))
    return is_later


def advance_chains(t: JobsTables, ids: Iterable[int]) -> None:
    """advance_chains_v1: remove ended jobs; what is now the first of its chain becomes due."""
    if not len(t.chain):
        return
    ended = set(ids)
    chains = {key[:2]: None for key, (job, _) in t.chain.items() if job in ended}
    for chain in chains:
        t.model.lock_advisory(("chain", *chain))
        for key, (job, _) in t.chain.at_first(chain):
            if job in ended:
                t.chain.pop(key)
        first = min(t.chain.at_first(chain), default=None)
        if first is not None:
            _, (job, due_at) = first
            row = t.ready.get(job)
            if row is not None and row.run_at >= PARKED_AT:
                t.ready.put(job, replace(row, run_at=max(due_at, t.now())))
                t.notify_queue(row.queue)


def finish_members(t: JobsTables, members: Sequence[tuple[int, str]]) -> None:
    """finish_members_v1: count ended members; the last one enqueues the callback."""
    for group_id in sorted({group_id for group_id, _ in members}):
        group = t.group.get(group_id)
        if group is None:
            continue
        states = Counter(state for one, state in members if one == group_id)
        t.group.lock(group_id)
        group = replace(
            group,
            pending=group.pending - states.total(),
            done=group.done + states["done"],
            failed=group.failed + states["failed"],
            cancelled=group.cancelled + states["cancelled"],
            quarantined=group.quarantined + states["quarantined"],
        )
        t.group.put(group_id, group)
        if group.pending <= 0:
            t.group.pop(group_id)
            call_back(t, group)


def call_back(t: JobsTables, group: Group) -> None:
    """Enqueue the callback of an ended group."""
    job = group.callback
    counts = ",".join(
        f'"{name}":{getattr(group, name)}'
        for name in ("id", "done", "failed", "cancelled", "quarantined")
    )
    rest = b"}" if job.payload == b"{}" else b"," + job.payload[1:]
    enqueue(
        t,
        queues=[job.queue],
        priorities=[job.priority],
        run_ats=[group.run_at],
        delays_s=[group.delay_s],
        lanes=[job.lane],
        keys=[job.unique_key],
        groups=None,
        payloads=[b'{"group":{' + counts.encode() + b"}" + rest],
        versions=[job.version],
        headers=[job.headers or ""],
        is_hinted=True,
    )


@statement(SQL.enqueue)
def enqueue_(t: JobsTables, **given: Any) -> list[Any]:
    return [{"ids": enqueue(t, **given)}]


def add_alike(
    t: JobsTables,
    *,
    queue: int,
    priority: int,
    run_ats: Any,
    delays_s: Any,
    version: int,
    headers: str,
    is_hinted: bool,
    payloads: Sequence[bytes],
) -> list[int]:
    at = moment(t.now(), run_ats and run_ats[0], delays_s and delays_s[0])
    ids = []
    for payload in payloads:
        ids.append(t.model.next_id("job_id"))
        job = Job(
            id=ids[-1],
            queue=queue,
            run_at=at,
            priority=priority,
            version=version,
            headers=headers,
            payload=payload,
        )
        t.ready.put(job.id, job)
    if is_hinted:
        t.notify_queue(queue)
    return ids


@statement(SQL.enqueue_one)
def enqueue_one(t: JobsTables, *, payload: bytes, **alike: Any) -> list[Any]:
    return [{"id": add_alike(t, payloads=[payload], **alike)[0]}]


@statement(SQL.enqueue_alike)
def enqueue_alike(t: JobsTables, **alike: Any) -> list[Any]:
    return [{"ids": add_alike(t, **alike)}]


@statement(SQL.notify_queue)
def notify_queue(t: JobsTables, *, queue: str) -> list[Any]:
    t.model.notify("headrace_jobs", queue)
    return [{}]


@statement(SQL.add_groups)
def add_groups(
    t: JobsTables,
    *,
    pending: list[int],
    queues: list[int],
    priorities: list[int],
    run_ats: Any,
    delays_s: Any,
    lanes: Any,
    keys: Any,
    payloads: list[bytes],
    versions: Any,
    headers: list[str],
) -> list[Any]:
    ids = []
    for i, count in enumerate(pending):
        ids.append(t.model.next_id("job_group_id"))
        callback = Job(
            id=0,
            queue=queues[i],
            run_at=t.now(),
            priority=priorities[i],
            lane=lanes and lanes[i],
            unique_key=keys and keys[i],
            payload=payloads[i],
            headers=headers[i] if len(headers) > 1 else headers[0],
            version=1 if versions is None else versions[i],
        )
        group = Group(
            id=ids[-1],
            pending=count,
            callback=callback,
            run_at=run_ats and run_ats[i],
            delay_s=delays_s and delays_s[i],
        )
        t.group.put(group.id, group)
        if count == 0:
            finish_members(t, [(group.id, "none")])
    return [{"ids": ids}]


@statement(SQL.add_members)
def add_members(t: JobsTables, *, groups: list[int], queues: list[int], **rest: Any) -> list[Any]:
    if any(t.group.get(one) is None for one in groups):
        return [{"ids": None}]
    newest = t.model.next_id("job_id")
    ids = enqueue(t, queues=queues, groups=groups, **rest)
    added: Counter[int] = Counter()
    for job_id, group_id in zip(ids, groups, strict=True):
        if job_id > newest:
            added[group_id] += 1
    for group_id in sorted(added):
        t.group.lock(group_id)
        group = t.group.get(group_id)
        assert group is not None, "it existed above"
        t.group.put(group_id, replace(group, pending=group.pending + added[group_id]))
    return [{"ids": ids}]


@statement(SQL.seal_groups)
def seal_groups(t: JobsTables, *, groups: list[int]) -> list[Any]:
    finish_members(t, [(group_id, "sealed") for group_id in groups])
    return [{}]


@statement(SQL.drop_group)
def drop_group(t: JobsTables, *, group: int) -> int:
    return int(t.group.pop(group) is not None)


def mark(t: JobsTables, *, group: int, opened_at: datetime | None) -> list[Any]:
    row = t.group.get(group)
    if row is None:
        return []
    t.group.lock(group)
    t.group.put(group, replace(row, opened_at=opened_at))
    return [{"id": group}]


statement(SQL.mark_group_open)(lambda t, group: mark(t, group=group, opened_at=t.now()))
statement(SQL.mark_group_closed)(lambda t, group: mark(t, group=group, opened_at=None))
