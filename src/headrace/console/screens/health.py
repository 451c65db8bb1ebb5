"""Health issues of the deployment, each with a link and a fix.

Pure functions. Data that cannot be read is an issue too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from headrace.console.format import format_duration, path_segment
from headrace.console.model import PREFIX
from headrace.console.views import PanelData
from headrace.jobs.crons import Cron
from headrace.jobs.fleet.alerts import HOST_RULE, Alert
from headrace.jobs.fleet.state import FAILURES_COUNTED_MAX, FleetState, QueueFailures
from headrace.jobs.model import QueueStatus
from headrace.kernel.terminal import pluralize

VIEWS_LAG_S: Final = 30.0
FEED_LAG_S: Final = 60.0
ALERTS_SHOWN: Final = 5
ROLES: Final = {
    "agent": "/jobs/hosts",
    "scheduler": "/jobs/hosts",
    "flusher": "/views/lag",
    "media": "/media",
}
"""Roles whose absence is an issue, with the page to open."""
FIXES: Final[Mapping[str, str]] = {
    "active_grows": "Check which jobs arrive and whether handlers became slow. Raise the maximum"
    " of slots, or pause the producer.",
    "leased_grows": "Check what its slots do: handlers may hang on a service that does not"
    " respond.",
    "oldest_waits": "Open one of its oldest jobs to see why it waits: pause, lane, missing code"
    " or too few slots.",
    "many_fail": "Read the errors of its failed jobs. After a fix, retry all of them.",
    "at_max": "Raise the maximum of slots if the hosts have capacity, or speed up its handlers.",
    "fleet_short": "Add hosts, or lower the slots of other queues.",
    HOST_RULE: "Check that machine. No job is lost: 30 s after its last report, other hosts take"
    " its jobs.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """A health issue: `tone` is bad or warn; `href` and `fix` help to resolve it."""

    tone: str
    subject: str
    href: str
    text: str
    fix: str


def engine_issues(engines: Mapping[str, str | None]) -> Iterator[Issue]:
    """Engines that are down."""
    for name, error in engines.items():
        if error is not None:
            yield Issue(
                tone="warn" if name == "replica" else "bad",
                subject="replica is not used" if name == "replica" else f"{name} is down",
                href="/readyz",
                text=error,
                fix="Run `headrace doctor` for details. Roles reconnect automatically when it is"
                " back.",
            )


def unreadable_issues(sources: Mapping[str, tuple[str, PanelData[Any] | None]]) -> Iterator[Issue]:
    """Data sources that cannot be read, each with its page."""
    for subject, (place, found) in sources.items():
        if found is not None and found.error is not None and not found.is_hidden:
            yield Issue(
                tone="bad",
                subject=f"{subject}: no data",
                href=PREFIX + place,
                text=found.error,
                fix="The page retries automatically. Run `headrace doctor` to find the cause.",
            )


def failure_issues(failures: PanelData[Sequence[QueueFailures]]) -> Iterator[Issue]:
    """Queues with jobs that failed or were quarantined in the last hour."""
    for one in failures.value or ():
        many = f"{FAILURES_COUNTED_MAX:,} or more" if one.jobs >= FAILURES_COUNTED_MAX else None
        jobs = f"{many} jobs" if many else pluralize(one.jobs, "job")
        is_failed = one.state == "failed"
        yield Issue(
            tone="bad",
            subject=f"queue {one.queue}",
            href=f"{PREFIX}/jobs/jobs?{urlencode({'queue': one.queue, 'state': one.state})}",
            text=f"{jobs} {one.state} in the last hour; the last error: {one.last_error}",
            fix="Fix the cause, then retry them."
            if is_failed
            else "Their worker process crashed each time. Check memory and payloads, then retry"
            " them.",
        )


def fleet_issues(fleet: PanelData[FleetState]) -> Iterator[Issue]:
    """Open alerts, silent hosts, and a fleet without a scheduler."""
    if fleet.value is None:
        return
    alerted = {alert.subject for alert in fleet.value.alerts if alert.rule == HOST_RULE}
    alerts = fleet.value.alerts
    for alert in alerts[:ALERTS_SHOWN]:
        yield _of_alert(alert)
    others = fleet.value.alerts_open - len(alerts[:ALERTS_SHOWN])
    if others > 0:
        yield Issue(
            tone="bad",
            subject=pluralize(others, "other alert"),
            href=f"{PREFIX}/jobs/alerts?open=1",
            text="see the list of open alerts",
            fix="",
        )
    for host in fleet.value.hosts:
        if host.is_silent and host.name not in alerted:
            yield Issue(
                tone="bad",
                subject=f"host {host.name}",
                href=f"{PREFIX}/jobs/hosts",
                text="no longer reports",
                fix=FIXES[HOST_RULE],
            )
    if not fleet.value.plan.is_led:
        yield Issue(
            tone="warn",
            subject="no scheduler runs",
            href=f"{PREFIX}/jobs/hosts",
            text="slots are not moved, and crons do not run",
            fix="Start `headrace scheduler`, or `headrace up`, which includes it.",
        )


def role_issues(gone: Mapping[str, float]) -> Iterator[Issue]:
    """Roles of this machine that stopped writing metrics."""
    for role, place in ROLES.items():
        if role in gone:
            yield Issue(
                tone="warn",
                subject=f"role {role} on this machine",
                href=PREFIX + place,
                text=f"no metrics for {format_duration(gone[role])}",
                fix="`headrace up` restarts it automatically. A role that was stopped on purpose"
                " is listed for an hour.",
            )


def queue_issues(queues: PanelData[Sequence[QueueStatus]]) -> Iterator[Issue]:
    """Queues with waiting jobs that are paused or have no worker."""
    for queue in queues.value or ():
        if not queue.ready:
            continue
        href = f"{PREFIX}/jobs/queues/{path_segment(queue.queue)}"
        waiting = pluralize(queue.ready, "job waits", "jobs wait")
        if queue.paused:
            yield Issue(
                tone="warn",
                subject=f"queue {queue.queue} is paused",
                href=href,
                text=waiting,
                fix="Resume the queue when its jobs may run.",
            )
        elif not queue.is_known and not queue.decisions:
            yield Issue(
                tone="warn",
                subject=f"queue {queue.queue}",
                href=href,
                text=f"{waiting}, and no running application declares the queue",
                fix="Start an agent whose application declares it, or take its jobs with"
                " `headrace jobs take`.",
            )


def cron_issues(crons: PanelData[Sequence[Cron]]) -> Iterator[Issue]:
    """Crons that were paused by an error."""
    for cron in crons.value or ():
        if cron.error is not None:
            yield Issue(
                tone="bad",
                subject=f"cron {cron.name}",
                href=f"{PREFIX}/jobs/crons",
                text=cron.error,
                fix="Fix the error, then resume the cron.",
            )


def run_issues(runs: PanelData[Sequence[Any]] | None) -> Iterator[Issue]:
    """Catalogue runs that wait for a confirmation."""
    for run in (runs.value if runs is not None else None) or ():
        if str(run.state) == "held":
            yield Issue(
                tone="warn",
                subject=f"catalogue of {run.customer} is held",
                href=f"{PREFIX}/fetch/runs/{run.run}",
                text=run.reason or "it needs a check",
                fix="Review its changes, then apply or discard it.",
            )


def lag_issues(lag: PanelData[Sequence[Any]], feed_lag_s: float | None) -> Iterator[Issue]:
    """Late flushes of views and late sweeps of feeds."""
    oldest_s = max((shard.oldest_s for shard in lag.value or ()), default=0.0)
    if oldest_s > VIEWS_LAG_S:
        yield Issue(
            tone="warn",
            subject="views: flush is late",
            href=f"{PREFIX}/views",
            text=f"the oldest hit has waited {format_duration(oldest_s)}",
            fix="Check that a flusher runs: `headrace flusher`. Live totals include these hits"
            " already.",
        )
    if feed_lag_s is not None and feed_lag_s > FEED_LAG_S:
        yield Issue(
            tone="warn",
            subject="feed: sweep is late",
            href=f"{PREFIX}/feed",
            text=f"the oldest change has waited {format_duration(feed_lag_s)}",
            fix="Check that a flusher runs: `headrace flusher`.",
        )


def _of_alert(alert: Alert) -> Issue:
    name = path_segment(alert.subject)
    is_host = alert.rule == HOST_RULE
    return Issue(
        tone="bad",
        subject=f"{'host' if is_host else 'queue'} {alert.subject}",
        href=f"{PREFIX}/jobs/hosts" if is_host else f"{PREFIX}/jobs/queues/{name}",
        text=alert.text,
        fix=FIXES.get(alert.rule, ""),
    )
