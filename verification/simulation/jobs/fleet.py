"""The contracts of queues, counts, and of the fleet: reports, allowances, lead and plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from headrace.engines import commit_wait
from headrace.jobs.sql import SQL
from verification.simulation.jobs.tables import (
    ALWAYS,
    NEVER,
    UNLIMITED,
    Host,
    JobsTables,
    Queue,
    seconds,
    statement,
)

TOTALS = ("done", "failed", "cancelled", "retried", "lost", "calls", "run_s", "wait_s", "slot_s")


@statement(SQL.declare_queues)
def declare_queues(t: JobsTables, *, queues: str) -> int:
    for given in msgspec.json.decode(queues):
        del given["aliases"]
        given["decisions"] = msgspec.json.encode(given["decisions"]).decode()
        found = t.queue_by_name.get(given["name"])
        if found is None:
            found = t.model.next_id("queue")
            t.queue_by_name.put(given["name"], found)
        old = t.queue.get(found)
        if old is not None:
            given["limiter"] = old.limiter
        new = Queue(id=found, paused=old is not None and old.paused, **given)
        if new != old:
            t.queue.put(found, new)
    return 1


@statement(SQL.find_queues)
def find_queues(t: JobsTables, *, names: list[str] | None) -> list[Any]:
    return [
        {
            "id": of.id,
            "name": of.name,
            "limiter": of.limiter,
            "is_alias": False,
            "needs_lane": of.needs_lane,
        }
        for of in t.queue.values()
        if names is None or of.name in names
    ]


@statement(SQL.set_paused)
def set_paused(t: JobsTables, *, queue: str, is_paused: bool) -> list[Any]:
    found = t.queue_by_name.get(queue)
    if found is None:
        return []
    of = t.queue.get(found)
    assert of is not None, "a queue is never deleted"
    t.queue.put(found, replace(of, paused=is_paused))
    t.notify_queue(found)
    return [{}]


statement(SQL.restore_queues)(lambda t: 0)


@statement(SQL.database_now)
def database_now(t: JobsTables) -> list[Any]:
    return [{"now": t.now()}]


@statement(commit_wait.SQL.commit_standbys)
def commit_standbys(t: JobsTables) -> list[Any]:
    """Commits wait for no standby in the simulation."""
    states = {"sees_states": True, "senders": 0, "synchronous": 0, "waited_s": 0.0}
    return [{"names": "", "synchronous_commit": "on", "role": "headrace", **states}]


@statement(SQL.bound_idle)
def bound_idle(t: JobsTables, *, milliseconds: str) -> list[Any]:
    t.model.limit_idle(int(milliseconds) / 1000)
    return [{}]


def fold_counts(t: JobsTables, rows_max: int) -> int:
    """fold_counts_v1: add rows of job_count to minutes and totals."""
    folded = 0
    for key, (at, queue, counts) in t.count.items():
        if folded == rows_max:
            break
        if t.count.is_locked(key):
            continue
        folded += 1
        t.count.pop(key)
        place = (queue, at.replace(second=0, microsecond=0))
        for table, where in ((t.minute, place), (t.total, queue)):
            sums = dict(table.get(where) or {})  # type: ignore[attr-defined]
            for name, number in counts.items():
                is_max = name == "wait_max_s"
                before = sums.get(name, 0)
                sums[name] = max(before, number) if is_max else before + number
            table.put(where, sums)  # type: ignore[attr-defined]
    return folded


@statement(SQL.fold_counts)
def fold_counts_(t: JobsTables, *, rows_max: int) -> list[Any]:
    return [{"rows": fold_counts(t, rows_max)}]


@statement(SQL.add_counts)
def add_counts(t: JobsTables, *, host: int, ended: int, counts: str) -> list[Any]:
    for row in msgspec.json.decode(counts):
        t.add_count(
            row["queue_id"],
            calls=row.get("calls", 0),
            run_s=row.get("run_s", 0),
            slot_s=row.get("slot_s", 0),
        )
    found = t.host.get(host)
    if found is not None and ended > 0:
        t.host.lock(host)
        t.host.put(host, replace(found, jobs_ended=found.jobs_ended + ended))
    fold_counts(t, 10_000)
    return [{}]


@statement(SQL.record_backlog)
def record_backlog(t: JobsTables, *, count_max: int) -> list[Any]:
    leased: dict[int, int] = defaultdict(int)
    for lease in t.lease.values():
        leased[lease.queue] += len(lease.jobs) - len(lease.settled)
    rows = []
    for of in t.queue.values():
        ready, later, oldest = t.ready.count(of.id, t.now())
        laned = sum(len(order) for key, order in t.laned.order.items() if key[0] == of.id)
        totals = t.total.get(of.id) or {}
        rows.append(
            {
                "queue": of.name,
                "ready": ready + laned,
                "scheduled": later,
                "running": leased[of.id],
                "failed_kept": 0,
                "quarantined": 0,
                "oldest_s": 0.0 if oldest is None else (t.now() - oldest).total_seconds(),
                **{
                    name: totals.get(name, 0)
                    for name in (
                        "done",
                        "failed",
                        "cancelled",
                        "retried",
                        "lost",
                        "run_s",
                        "wait_s",
                    )
                },
            }
        )
    return rows


@statement(SQL.recent_outcomes)
def recent_outcomes(t: JobsTables, *, minutes: int) -> list[Any]:
    since = t.now().replace(second=0, microsecond=0) - seconds(60 * minutes)
    sums: dict[int, list[float]] = {}
    for (queue, minute), counts in t.minute.items():
        if minute >= since:
            row = sums.setdefault(queue, [0, 0])
            row[0] += counts.get("done", 0)
            row[1] += counts.get("failed", 0)
    return [{"queue": q, "done": done, "failed": bad} for q, (done, bad) in sums.items()]


@statement(SQL.report_host)
def report_host(t: JobsTables, *, host: int, gap_s: float, **facts: Any) -> list[Any]:
    row = t.host.get(host)
    if row is None or row.expires_at <= t.now():
        return []
    t.host.lock(host)
    is_next = row.reported_at is not None and row.reported_at >= t.now() - seconds(gap_s)
    since = row.reports_from if is_next and row.reports_from else t.now()
    t.host.put(host, replace(row, reported_at=t.now(), reports_from=since, **facts))
    return [{"is_draining": row.is_draining}]


@statement(SQL.planned_slots)
def planned_slots(t: JobsTables, *, host: str) -> list[Any]:
    head = plan_head(t)
    if not head["version"]:
        return []
    slots = {queue_name(t, queue): slots for (one, queue), slots in t.slot.items() if one == host}
    is_draining = any(row.name == host and row.is_draining for row in t.host.values())
    return [
        {
            "version": head["version"],
            "slots": msgspec.json.encode(slots).decode(),
            "is_draining": is_draining,
        }
    ]


@statement(SQL.fleet_hosts)
def fleet_hosts(t: JobsTables, *, silent_s: float, gap_s: float) -> list[Any]:
    newest: dict[str, Host] = {row.name: row for row in t.host.values()}
    now, before = t.now(), t.now() - seconds(silent_s)
    since = [
        row.reports_from
        for row in t.host.values()
        if row.reports_from and row.reported_at and row.reported_at >= now - seconds(gap_s)
    ]
    head = plan_head(t)
    written_from = min(since, default=head["led_from"] if head["leads_until"] > now else None)
    is_due = written_from is None or written_from < before
    return [
        {
            **msgspec.structs.asdict(row),
            "queues": list(row.queues),
            "tags": list(row.tags),
            "is_written": written_from is not None,
            "is_silent": is_due
            and (row.expires_at <= now or bool(row.reported_at and row.reported_at < before)),
            "lost_at": (row.reported_at or row.expires_at)
            if is_due and row.expires_at <= now
            else None,
        }
        for _, row in sorted(newest.items())
    ]


@statement(SQL.fleet_queues)
def fleet_queues(t: JobsTables) -> list[Any]:
    leased: dict[int, int] = defaultdict(int)
    for lease in t.lease.values():
        leased[lease.queue] += len(lease.jobs) - len(lease.settled)
    rows = []
    for of in sorted(t.queue.values(), key=lambda of: of.name):
        totals = t.total.get(of.id) or {}
        rows.append(
            {
                **{
                    name: getattr(of, name)
                    for name in (
                        "id",
                        "name",
                        "paused",
                        "batch",
                        "tag",
                        "importance",
                        "slots_min",
                        "slots_max",
                    )
                },
                **{name: totals.get(name, 0) for name in TOTALS},
                "leased": leased[of.id],
            }
        )
    return rows


@statement(SQL.fleet_waiting)
def fleet_waiting(t: JobsTables, *, count_max: int) -> list[Any]:
    rows = []
    for of in t.queue.values():
        if of.paused:
            continue
        due, _, oldest = t.ready.count(of.id, t.now())
        for key, row in t.lane_queue.at_last(of.id):
            if row.ready_at <= t.now() and row.waiting > 0:
                lane = t.lane.get(key[:2])
                limits = () if lane is None else (lane.limits.starts_max, lane.limits.concurrency)
                due += min([row.waiting, *(one for one in limits if one is not None)])
        due += max(0, sum(event.k for _, event in t.lane_event.of(of.id)))
        age_s = None if oldest is None else (t.now() - oldest).total_seconds()
        rows.append({"queue": of.id, "jobs": min(due, count_max), "oldest_age_s": age_s})
    return rows


@statement(SQL.slot_map)
def slot_map(t: JobsTables) -> list[Any]:
    return [
        {"host": host, "queue": queue, "slots": slots, "name": queue_name(t, queue)}
        for (host, queue), slots in t.slot.items()
    ]


def queue_name(t: JobsTables, queue: int) -> str:
    """The name of a queue."""
    of = t.queue.get(queue)
    assert of is not None, "a queue is never deleted"
    return of.name


def plan_head(t: JobsTables) -> dict[str, Any]:
    """The row of fleet_plan."""
    return t.plan.get(1) or {
        "leader": None,
        "leads_until": ALWAYS,
        "led_from": None,
        "term": 0,
        "version": 0,
        "planned_at": None,
    }


@statement(SQL.lead_fleet)
def lead_fleet(t: JobsTables, *, leader: str, lead_s: float) -> list[Any]:
    t.plan.lock(1)
    head = plan_head(t)
    if head["leader"] != leader and head["leads_until"] > t.now():
        return []
    term = head["term"] + (head["leader"] != leader)
    now, until = t.now(), t.now() + seconds(lead_s)
    since = head["led_from"] if head["leads_until"] > now and head["led_from"] else now
    lead = {"leader": leader, "term": term, "leads_until": until, "led_from": since}
    t.plan.put(1, head | lead)
    return [{"term": term}]


@statement(SQL.stop_leading)
def stop_leading(t: JobsTables, *, leader: str) -> int:
    head = plan_head(t)
    if head["leader"] != leader:
        return 0
    t.plan.put(1, head | {"leads_until": ALWAYS})
    return 1


@statement(SQL.find_plan)
def find_plan(t: JobsTables) -> list[Any]:
    head = plan_head(t)
    return [head | {"is_led": head["leads_until"] > t.now()}]


@statement(SQL.write_plan)
def write_plan(t: JobsTables, *, leader: str, term: int, slots: str, moves: str) -> list[Any]:
    if not t.model.lock_advisory("fleet_plan", waits=False):
        return [{"version": None}]
    head = plan_head(t)
    if head["leader"] != leader or head["term"] != term:
        return [{"version": None}]
    t.plan.lock(1)
    number = t.model.next_id("written")
    t.written.put(number, (leader, term, head["leader"], head["term"]))
    wanted = {(row["host"], row["queue"]): row["slots"] for row in msgspec.json.decode(slots)}
    is_changed = head["version"] == 0
    for key in {key for key, _ in t.slot.items()} - wanted.keys():
        t.slot.pop(key)
        is_changed = True
    for key, count in wanted.items():
        if t.slot.get(key) != count:
            t.slot.put(key, count)
            is_changed = True
    version = head["version"] + is_changed
    t.plan.put(1, head | {"planned_at": t.now(), "version": version})
    if is_changed:
        t.model.notify("headrace_fleet", str(version))
    return [{"version": version}]


def slots_elsewhere(t: JobsTables, host_id: int, queue: int, slots_max: int) -> int:
    """slots_elsewhere_v1: slots that other hosts hold, or that the plan binds to them."""
    now = t.now()
    live: dict[str, int] = {}
    for row in t.host.values():
        if row.kind != "taker" and row.expires_at > now and not row.is_draining:
            live[row.name] = row.id
    held: dict[int, int] = defaultdict(int)
    for (host, _), (slots, _, _) in t.allowance.at_last(queue):
        row = t.host.get(host)
        if row is not None and row.expires_at > now - seconds(5):
            held[host] += slots
    bound: dict[int, int] = defaultdict(int)
    before = 0
    for (name, of), slots in sorted(t.slot.items()):
        if of == queue and name in live:
            bound[live[name]] = max(0, min(slots, slots_max - before))
            before += slots
    hosts = (held.keys() | bound.keys()) - {host_id}
    return sum(max(held.get(one, 0), bound.get(one, 0)) for one in hosts)


@statement(SQL.allow_slots)
def allow_slots(t: JobsTables, *, host: int, call: int, requests: str) -> list[Any]:
    is_alive, answers = t.is_live(host), []
    for asked in sorted(msgspec.json.decode(requests), key=lambda row: row["queue_id"]):
        queue = asked["queue_id"]
        of = t.queue.get(queue)
        if of is None:
            continue
        if of.slots_max >= UNLIMITED:
            answers.append({"queue": queue, "slots": None})
            continue
        free = of.slots_max
        if asked["kept"] > 0 or asked["wanted"] > 0:
            free = max(0, of.slots_max - slots_elsewhere(t, host, queue, of.slots_max))
        held, was_short, last_call = t.allowance.get((host, queue)) or (0, False, 0)
        allowed = max(min(held, asked["kept"]), asked["used"])
        if is_alive:
            allowed = max(allowed, min(asked["wanted"], free))
        is_short = allowed < asked["wanted"]
        if allowed != held or is_short != was_short:
            if last_call > call:
                return answers
            t.model.lock_advisory(("slot_allowance", queue))
            # Always computed there: the condition above only saves the search.
            free = max(0, of.slots_max - slots_elsewhere(t, host, queue, of.slots_max))
            if t.host.get(host) is not None:
                t.allowance.put((host, queue), (allowed, is_short, call))
            others = (row[1] for key, row in t.allowance.at_last(queue) if key[0] != host)
            if (is_short and not was_short) or (allowed < held and any(others)):
                t.model.notify("headrace_fleet", "")
        answers.append({"queue": queue, "slots": min(allowed, free)})
    return answers


@statement(SQL.alerts)
def alerts(t: JobsTables, *, is_open: bool, alerts_max: int) -> list[Any]:
    rows = sorted(t.alert.values(), key=lambda row: row["id"], reverse=True)
    return [row | {"cleared_at": None} for row in rows[:alerts_max]]


@statement(SQL.raise_alert)
def raise_alert(t: JobsTables, *, rule: str, subject: str, text: str) -> list[Any]:
    if (rule, subject) in t.alert:
        return []
    row = {"id": t.model.next_id("alert"), "raised_at": t.now()}
    t.alert.put((rule, subject), row | {"rule": rule, "subject": subject, "text": text})
    return [row]


@statement(SQL.clear_alert)
def clear_alert(t: JobsTables, *, rule: str, subject: str) -> list[Any]:
    row = t.alert.pop((rule, subject))
    if row is None:
        return []
    kept = {name: row[name] for name in ("id", "text", "raised_at")}
    return [kept | {"cleared_at": t.now()}]


statement(SQL.sum_hours)(lambda t: [{}])
statement(SQL.maintain_done_partitions)(lambda t: [{"count": 0}])


@statement(SQL.drop_old)
def drop_old(t: JobsTables, *, table: str, column: str, kept_s: float, rows_max: int) -> list[Any]:
    dropped: Sequence[Any] = ()
    if table == "queue_minute":
        since = t.now() - seconds(kept_s)
        dropped = [key for key, _ in t.minute.items() if key[1] <= since][:rows_max]
        _drop(t.minute, dropped)
    return [{"rows": len(dropped)}]


@statement(SQL.drop_old_keys)
def drop_old_keys(t: JobsTables, *, keys_max: int) -> int:
    over = [
        key
        for key, row in t.unique.items()
        if row.is_done and (row.kept_until or NEVER) <= t.now() and not t.unique.is_locked(key)
    ][:keys_max]
    _drop(t.unique, over)
    return len(over)


def _drop(table: Any, keys: Iterable[Any]) -> None:
    for key in keys:
        table.pop(key)
