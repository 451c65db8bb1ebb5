"""The problems of now: each with where to look and what to do. Pure; what could not be read is itself a problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from headrace.console import shown
from headrace.console.model import PREFIX
from headrace.console.seeing import Found
from headrace.jobs.crons import Cron
from headrace.jobs.fleet.alerts import HOST_RULE, Alert
from headrace.jobs.fleet.state import FAILURES_COUNTED_MAX, FleetState, QueueFailures
from headrace.jobs.model import QueueStatus

VIEWS_LAG_S: Final = 30.0
FEED_LAG_S: Final = 60.0
ALERTS_TOLD: Final = 5
ROLES: Final = {
    "agent": "/jobs/hosts",
    "scheduler": "/jobs/hosts",
    "flusher": "/views/lag",
    "media": "/media",
}
"""Those that are missed once they are gone, and where to look."""
MENDS: Final[Mapping[str, str]] = {
    "active_grows": "See which jobs come and whether handlers became slow; raise its most slots, or pause who sends.",
    "leased_grows": "See what its slots do: handlers may hang on something that does not answer.",
    "oldest_waits": "See why its oldest jobs wait: pause, lane, missing code or too few slots.",
    "many_fail": "Read the errors of its failed jobs; once they are mended, retry all at once.",
    "at_max": "Raise its most slots if the machines have room, or make its handlers quicker.",
    "fleet_short": "Add hosts, or lower what other queues may take.",
    HOST_RULE: "Look at that machine. Nothing is lost: 30 s after its last report its jobs are free for other hosts.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """Something wrong: `tone` bad or warn, where it is, what it is, and what to do."""

    tone: str
    subject: str
    href: str
    text: str
    mend: str


def wrong_engines(engines: Mapping[str, str | None]) -> Iterator[Wrong]:
    """Engines that do not answer, by name with why."""
    for name, error in engines.items():
        if error is not None:
            yield Wrong(
                tone="bad",
                subject=f"{name} does not answer",
                href="/readyz",
                text=error,
                mend="`headrace doctor` says what is missing. Everything reconnects by itself once it is back.",
            )


def unread(sources: Mapping[str, tuple[str, Found[Any] | None]]) -> Iterator[Wrong]:
    """What could not be read, by what it is, with where it is shown: unknown counts as a problem."""
    for subject, (place, found) in sources.items():
        if found is not None and found.error is not None and not found.is_hidden:
            yield Wrong(
                tone="bad",
                subject=f"{subject}: no data",
                href=PREFIX + place,
                text=found.error,
                mend="The page reads it again each second. `headrace doctor` finds what does not answer.",
            )


def wrong_failures(failures: Found[Sequence[QueueFailures]]) -> Iterator[Wrong]:
    """Jobs that failed or were quarantined in the last hour."""
    for one in failures.value or ():
        many = f"{FAILURES_COUNTED_MAX:,} or more" if one.jobs >= FAILURES_COUNTED_MAX else None
        jobs = f"{many} jobs" if many else shown.counted(one.jobs, "job", "jobs")
        is_failed = one.state == "failed"
        yield Wrong(
            tone="bad",
            subject=f"queue {one.queue}",
            href=f"{PREFIX}/jobs/jobs?{urlencode({'queue': one.queue, 'state': one.state})}",
            text=f"{jobs} {one.state} in the last hour; the last error: {one.last_error}",
            mend="Correct the cause, then retry them."
            if is_failed
            else "Their process died each time: check their memory and their payloads, then retry them.",
        )


def wrong_fleet(fleet: Found[FleetState]) -> Iterator[Wrong]:
    """Open alerts, hosts that are silent, and a fleet that nobody plans."""
    if fleet.value is None:
        return
    told = {alert.subject for alert in fleet.value.alerts if alert.rule == HOST_RULE}
    alerts = fleet.value.alerts
    for alert in alerts[:ALERTS_TOLD]:
        yield _of_alert(alert)
    others = fleet.value.alerts_open - len(alerts[:ALERTS_TOLD])
    if others > 0:
        yield Wrong(
            tone="bad",
            subject=shown.counted(others, "other alert", "other alerts"),
            href=f"{PREFIX}/jobs/alerts?open=1",
            text="rules that are broken now",
            mend="",
        )
    for host in fleet.value.hosts:
        if host.is_silent and host.name not in told:
            yield Wrong(
                tone="bad",
                subject=f"host {host.name}",
                href=f"{PREFIX}/jobs/hosts",
                text="it reports no more",
                mend=MENDS[HOST_RULE],
            )
    if not fleet.value.plan.is_led:
        yield Wrong(
            tone="warn",
            subject="nobody plans the fleet",
            href=f"{PREFIX}/jobs/hosts",
            text="slots stay where they are, and crons do not come",
            mend="Start a scheduler: `headrace scheduler`, or `headrace up`, which has one.",
        )


def wrong_roles(gone: Mapping[str, float]) -> Iterator[Wrong]:
    """Roles of this machine that wrote figures and do no more, with the seconds since."""
    for role, place in ROLES.items():
        if role in gone:
            yield Wrong(
                tone="warn",
                subject=f"role {role} of this machine",
                href=PREFIX + place,
                text=f"it tells no figures any more; the last were seen {shown.seconds(gone[role])} ago",
                mend="`headrace up` starts it again by itself. One that was stopped on purpose is told for an hour.",
            )


def wrong_queues(queues: Found[Sequence[QueueStatus]]) -> Iterator[Wrong]:
    """Queues whose jobs wait for a person: paused, or without code anywhere."""
    for queue in queues.value or ():
        if not queue.ready:
            continue
        href = f"{PREFIX}/jobs/queues/{shown.path_segment(queue.queue)}"
        waiting = shown.counted(queue.ready, "job waits", "jobs wait")
        if queue.paused:
            yield Wrong(
                tone="warn",
                subject=f"queue {queue.queue} is paused",
                href=href,
                text=waiting,
                mend="Resume it when they may run.",
            )
        elif not queue.is_known:
            yield Wrong(
                tone="warn",
                subject=f"queue {queue.queue}",
                href=href,
                text=f"{waiting}, and no running code knows the queue",
                mend="Start an agent whose application has it, or take its jobs with `headrace jobs take`.",
            )


def wrong_crons(crons: Found[Sequence[Cron]]) -> Iterator[Wrong]:
    """Crons that paused themselves."""
    for cron in crons.value or ():
        if cron.error is not None:
            yield Wrong(
                tone="bad",
                subject=f"cron {cron.name}",
                href=f"{PREFIX}/jobs/crons",
                text=cron.error,
                mend="Mend what it says, then resume it.",
            )


def wrong_runs(runs: Found[Sequence[Any]] | None) -> Iterator[Wrong]:
    """Catalogues that are held until a person looks."""
    for run in (runs.value if runs is not None else None) or ():
        if str(run.state) == "held":
            yield Wrong(
                tone="warn",
                subject=f"catalogue of {run.customer} is held",
                href=f"{PREFIX}/fetch/runs/{run.run}",
                text=run.reason or "it looks wrong",
                mend="See what it would change; confirm it, or have the seller send a better one.",
            )


def wrong_lags(lag: Found[Sequence[Any]], feed_lag_s: float | None) -> Iterator[Wrong]:
    """Views that are not flushed, feeds that are not swept."""
    oldest_s = max((shard.oldest_s for shard in lag.value or ()), default=0.0)
    if oldest_s > VIEWS_LAG_S:
        yield Wrong(
            tone="warn",
            subject="views are not flushed",
            href=f"{PREFIX}/views",
            text=f"the oldest hit waits for {shown.seconds(oldest_s)}",
            mend="See that a flusher runs: `headrace flusher`. Totals on pages count it already.",
        )
    if feed_lag_s is not None and feed_lag_s > FEED_LAG_S:
        yield Wrong(
            tone="warn",
            subject="feeds are not swept",
            href=f"{PREFIX}/feed",
            text=f"the oldest change waits for {shown.seconds(feed_lag_s)}",
            mend="See that a flusher runs: `headrace flusher`.",
        )


def _of_alert(alert: Alert) -> Wrong:
    name = shown.path_segment(alert.subject)
    is_host = alert.rule == HOST_RULE
    return Wrong(
        tone="bad",
        subject=f"{'host' if is_host else 'queue'} {alert.subject}",
        href=f"{PREFIX}/jobs/hosts" if is_host else f"{PREFIX}/jobs/queues/{name}",
        text=alert.text,
        mend=MENDS.get(alert.rule, ""),
    )
