"""Commands `headrace fleet ...` and `headrace crons ...`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import click

from headrace.jobs.crons import Cron, NewCron
from headrace.jobs.errors import InvalidCron, InvalidFilter
from headrace.jobs.fleet.alerts import Alert
from headrace.jobs.fleet.state import Decision, FleetHost, FleetState, QueueSpan
from headrace.jobs.service import Jobs
from headrace.kernel.config import parse_moment
from headrace.kernel.terminal import (
    CommandGroup,
    Lines,
    Parsed,
    Terminal,
    cursor_after,
    listing,
    paged,
    parse_json,
    table,
)


@click.group("fleet", cls=CommandGroup)
def fleet() -> None:
    """Hosts that run jobs, their slots (worker processes), and alerts."""


@fleet.command("show", short_help="Show hosts, their slots, and open alerts.")
def show(terminal: Terminal) -> None:
    """Show hosts with their slots, the plan, the newest decisions and open alerts.

    A slot is a worker process. `slots` counts those that run, floating ones included, which serve
    any queue. `assigned` counts those that belong to a queue; its maximum is what the host's memory
    and CPU allow, without floating slots. `pressure` is the share of the last minute in which some
    process waited for a CPU; 0 while Headrace uses less than half of the CPU. The plan has the
    number of slots of each queue on each host. One scheduler, the leader, makes it; the term is the
    number of leaders so far.
    """
    found = terminal.run(Jobs, lambda jobs: jobs.fleet.state())
    terminal.show(found, _describe(found))


@fleet.command("drain", short_help="Start no more jobs on a host.")
@click.argument("host")
def drain(terminal: Terminal, host: str) -> None:
    """Start no more jobs on HOST until its agent is started again; running jobs finish."""
    terminal.run(Jobs, lambda jobs: jobs.fleet.drain(host))
    terminal.show({"host": host, "is_draining": True}, f"host {host} is draining")


@fleet.command("undrain", short_help="Start jobs on a drained host again.")
@click.argument("host")
def undrain(terminal: Terminal, host: str) -> None:
    """Start jobs on HOST again, after `headrace fleet drain`."""
    terminal.run(Jobs, lambda jobs: jobs.fleet.undrain(host))
    terminal.show({"host": host, "is_draining": False}, f"host {host} starts jobs again")


@fleet.command("forget", short_help="Remove a lost host from the fleet.")
@click.argument("host")
def forget(terminal: Terminal, host: str) -> None:
    """Remove HOST, which is lost and will not return, from the fleet; its alert ends."""
    terminal.run(Jobs, lambda jobs: jobs.fleet.forget(host))
    terminal.show({"host": host, "forgotten": True}, f"host {host} is removed from the fleet")


@fleet.command("decisions", short_help="List changes of slots, with reasons.")
@click.option("--before", default=None, type=int, help="Ids below this one: the next page.")
@click.option("--max", "rows_max", default=100, show_default=True, type=click.IntRange(1, 1000))
def decisions(terminal: Terminal, before: int | None, rows_max: int) -> None:
    """List changes of the number of worker processes (slots) per queue and host, with reasons."""
    found = terminal.run(
        Jobs, lambda jobs: jobs.fleet.decisions(before=before, decisions_max=rows_max)
    )
    cursor = cursor_after(found, rows_max, "id")
    text = paged(_decisions(found), cursor, "more: --before")
    terminal.show(listing(found, next_cursor=cursor), text)


@fleet.command("alerts", short_help="List alerts.")
@click.option("--open", "is_open", is_flag=True, help="Only open alerts.")
def alerts(terminal: Terminal, *, is_open: bool) -> None:
    """List the newest 100 alerts."""
    found = terminal.run(Jobs, lambda jobs: jobs.fleet.alerts(is_open=is_open))
    terminal.show(listing(found), _alerts(found))


MOMENT: Final = Parsed(parse_moment, InvalidFilter, name="moment")
FROM: Final = click.option("--from", "from_at", default=None, type=MOMENT, help="First moment.")
TO: Final = click.option("--to", "to_at", default=None, type=MOMENT, help="End, not included.")


@fleet.command("minutes", short_help="Show counts of a queue by minute.")
@click.argument("queue")
@FROM
@TO
def minutes(terminal: Terminal, queue: str, **span: datetime | None) -> None:
    """Show counts and backlog of QUEUE per minute: the last hour, or a span of up to two days."""
    found = terminal.run(Jobs, lambda jobs: jobs.queues.minutes(queue, **span))
    rows = [(f"{one.minute:%m-%d %H:%M}", *_span_row(one)) for one in found]
    terminal.show(listing(found), table(("minute (UTC)", *SPAN_HEAD), rows))


@fleet.command("hours", short_help="Show counts of a queue by hour.")
@click.argument("queue")
@FROM
@TO
def hours(terminal: Terminal, queue: str, **span: datetime | None) -> None:
    """Show counts and highest backlog of QUEUE per hour: the last 7 days, or a span of up to 90.

    Hours are kept for `jobs.hours_kept`, 90 days by default.
    """
    found = terminal.run(Jobs, lambda jobs: jobs.queues.hours(queue, **span))
    rows = [(f"{one.hour:%m-%d %H:%M}", *_span_row(one)) for one in found]
    terminal.show(listing(found), table(("hour (UTC)", *SPAN_HEAD), rows))


@fleet.command("load", short_help="Show counts of each queue in the last five minutes.")
def load(terminal: Terminal) -> None:
    """Show counts of each queue in the last five minutes."""
    found = terminal.run(Jobs, lambda jobs: jobs.fleet.load())
    head = (
        "queue",
        "done",
        "failed",
        "cancelled",
        "retried",
        "slots",
        "mean run s",
        "mean wait s",
        "longest wait s",
    )
    rows = [
        (
            one.queue,
            one.done,
            one.failed,
            one.cancelled,
            one.retried,
            f"{one.slot_s / found.span_s:.1f}",
            _mean(one.run_mean_s),
            _mean(one.wait_mean_s),
            f"{one.wait_max_s:.3f}",
        )
        for one in found.queues
    ]
    terminal.show(found, table(head, rows))


def _mean(mean_s: float | None) -> str:
    return "unknown" if mean_s is None else f"{mean_s:.3f}"


def _describe(state: FleetState) -> str:
    plan = state.plan
    led = f"led by {plan.leader} (term {plan.term})" if plan.is_led else "no scheduler leads"
    when = "never" if plan.planned_at is None else f"{plan.planned_at:%Y-%m-%d %H:%M:%S} UTC"
    head = (
        "host",
        "state",
        "slots",
        "busy",
        "assigned",
        "load",
        "pressure",
        "jobs ended",
        "planned",
    )
    parts: list[str] = [
        f"plan {plan.version}, {led}, last planned {when}",
        table(head, map(_host_row, state.hosts)),
    ]
    if state.alerts:
        parts.append(_alerts(state.alerts))
    if state.alerts_open > len(state.alerts):
        parts.append(f"{state.alerts_open} alerts are open in all")
    if state.decisions:
        parts.append(_decisions(state.decisions[:10]))
    return Lines(*[line for part in parts for line in ("", part)][1:])


def _host_row(host: FleetHost) -> tuple[object, ...]:
    lost = f" {host.lost_at:%m-%d %H:%M:%S}" if host.lost_at is not None else ""
    busy = sum(slot.busy_s > 0 for slot in host.slots)
    assigned = sum(slot.queue is not None for slot in host.slots)
    bound = Counter(host.planned).most_common(5)
    planned = ", ".join(f"{queue} {count}" for queue, count in bound)
    more = len(host.planned) - len(bound)
    return (
        host.name,
        host.state + lost,
        len(host.slots),
        busy,
        f"{assigned} of at most {host.capacity}",
        f"{host.load_per_core:.2f}",
        f"{host.cpu_pressure:.0%}",
        host.jobs_ended,
        planned + (f" and {more} more" if more else ""),
    )


def _decisions(found: list[Decision]) -> str:
    rows = [
        (d.id, f"{d.at:%m-%d %H:%M:%S}", d.host, d.queue, f"{d.before} -> {d.after}", d.code, d.why)
        for d in found
    ]
    return table(("id", "at (UTC)", "host", "queue", "slots", "code", "why"), rows)


def _alerts(found: list[Alert]) -> str:
    rows = [
        (
            alert.rule,
            alert.subject,
            f"{alert.raised_at:%m-%d %H:%M:%S}",
            "open" if alert.cleared_at is None else f"{alert.cleared_at:%m-%d %H:%M:%S}",
            alert.text,
        )
        for alert in found
    ]
    return table(("alert", "of", "raised (UTC)", "cleared (UTC)", "why"), rows)


SPAN_HEAD: Final = (
    "done",
    "failed",
    "cancelled",
    "retried",
    "lost",
    "handler s",
    "mean wait s",
    "longest wait s",
    "ready",
    "running",
    "oldest s",
)


def _span_row(span: QueueSpan) -> tuple[object, ...]:
    counts = (span.done, span.failed, span.cancelled, span.retried, span.lost)
    waits = (_mean(span.wait_mean_s), f"{span.wait_max_s:.3f}")
    backlog = ("-", "-", "-")
    if span.ready is not None and span.running is not None:
        backlog = (str(span.ready), str(span.running), f"{span.oldest_s or 0.0:.1f}")
    return (*counts, f"{span.run_s:.1f}", *waits, *backlog)


@click.group("crons", cls=CommandGroup)
def crons() -> None:
    """Crons: recurring jobs."""


@crons.command("ls", short_help="List the crons.")
def list_crons(terminal: Terminal) -> None:
    """List every cron with its next scheduled time and its last job."""
    found = terminal.run(Jobs, lambda jobs: jobs.crons.all())
    terminal.show(listing(found), _table(found))


@crons.command("add", short_help="Add a cron.")
@click.argument("name")
@click.argument("spec")
@click.argument("queue")
@click.argument("payload", default="null", type=Parsed(parse_json, InvalidCron))
@click.option("--tz", default="UTC", show_default=True, help="Time zone such as Europe/Moscow.")
@click.option("--priority", default=5, show_default=True, type=int, help="0 first to 9 last.")
def add(terminal: Terminal, /, **fields: Any) -> None:
    """Add cron NAME that enqueues into QUEUE on schedule SPEC, such as '0 4 * * *'; PAYLOAD is
    JSON.
    """
    found = terminal.run(Jobs, lambda jobs: jobs.crons.add(NewCron(**fields)))
    terminal.show(found, _table([found]))


@crons.command("run", short_help="Run a cron now.")
@click.argument("name")
def run(terminal: Terminal, name: str) -> None:
    """Enqueue the job of cron NAME now, in addition to its schedule."""
    job_id = terminal.run(Jobs, lambda jobs: jobs.crons.run(name))
    terminal.show({"id": job_id}, f"job {job_id}")


@crons.command("pause", short_help="Pause a cron.")
@click.argument("name")
def pause(terminal: Terminal, name: str) -> None:
    """Enqueue no jobs of cron NAME until `headrace crons resume NAME`."""
    found = terminal.run(Jobs, lambda jobs: jobs.crons.pause(name))
    terminal.show(found, f"cron {name} is paused")


@crons.command("resume", short_help="Resume a cron.")
@click.argument("name")
def resume(terminal: Terminal, name: str) -> None:
    """Resume cron NAME at its next scheduled time; missed times are skipped."""
    found = terminal.run(Jobs, lambda jobs: jobs.crons.resume(name))
    terminal.show(found, f"cron {name} runs next at {found.next_at:%Y-%m-%d %H:%M:%S} UTC")


@crons.command("rm", short_help="Remove a cron.")
@click.argument("name")
def remove(terminal: Terminal, name: str) -> None:
    """Remove cron NAME, unless running code declares it."""
    terminal.run(Jobs, lambda jobs: jobs.crons.remove(name))
    terminal.show({"name": name, "removed": True}, f"cron {name} is removed")


def _table(found: Sequence[Cron]) -> str:
    rows = [
        (
            cron.name,
            cron.spec,
            cron.tz,
            cron.queue,
            f"{cron.next_at:%Y-%m-%d %H:%M:%S}" if not cron.paused else cron.error or "paused",
            "" if cron.last_job is None else cron.last_job,
            cron.source,
        )
        for cron in found
    ]
    return table(("name", "spec", "tz", "queue", "next (UTC)", "last job", "from"), rows)
