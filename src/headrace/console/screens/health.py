"""Health issues of engines, roles and jobs, each with a link to its cause and its remedies.

Pure functions. Data that cannot be read is an issue too. `health_rooms.py` has those of the other
rooms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby, islice
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from headrace.console.format import format_bytes, format_duration, path_segment
from headrace.console.model import PREFIX
from headrace.console.views import NO_DATA, RECENT_S, PanelData
from headrace.engines.backup.service import BackupsState
from headrace.engines.commit_wait import CommitWait
from headrace.jobs.crons import Cron
from headrace.jobs.fleet.alerts import HOST_RULE, SHORT_OLDEST_S, Alert
from headrace.jobs.fleet.state import (
    LOAD_MINUTES,
    FleetLoad,
    FleetState,
    QueueFailures,
)
from headrace.jobs.model import QueueStatus
from headrace.kernel.errors import TO_DOCTOR
from headrace.kernel.terminal import pluralize
from headrace.web.marks import CAUSES, Mark, causes_text
from headrace.web.role_secrets import RoleSecret, differing

ALERTS_SHOWN: Final = 5
CAUSES_SHOWN: Final = 8
"""Lines of one kind; a further line counts the others."""
DYING_FROM: Final = 3
"""Starts of a role within RECENT_S from which it keeps dying."""
TIMES_SHOWN: Final = 4
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
    "oldest_waits": "Open one of its oldest jobs to see why it waits: pause, lane, missing code"
    " or too few slots.",
    "many_fail": "Read the errors of its failed jobs. After a fix, retry all of them.",
    HOST_RULE: "Check that machine. No job is lost: 30 s after its last report, other hosts take"
    " its jobs. If it will not return: `headrace fleet forget HOST`.",
}
"""What to do about an alert, for the rules whose text does not name it."""
OF_WAITING: Final = ("oldest_waits", "fleet_short")
"""Rules that are about jobs that wait too long."""
DOCTOR_FIX: Final = "Run `headrace doctor` to find the cause."
CAUSE_CHARACTERS: Final = 480
"""Room for three sentences on photos; a stored error may be longer."""


class Remedy(NamedTuple):
    """A button on an issue: an action with the values of its form, and the button's text."""

    action: str
    values: Mapping[str, Any]
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """A health issue: `tone` is bad or warn; `href` leads to the cause, `fix` and `remedies` help.

    `cause` is the stored error or reason, `since_at` when it began and `last_at` when it occurred
    last, if known.
    """

    tone: str
    subject: str
    href: str
    text: str
    fix: str
    cause: str = ""
    since_at: datetime | None = None
    last_at: datetime | None = None
    remedies: Sequence[Remedy] = ()
    may_follow_outage: bool = False
    """Every outage of PostgreSQL causes it, and it ends by itself a moment later."""


ENGINES: Final = {"postgres": "PostgreSQL", "valkey": "Valkey", "blobs": "object store"}
"""Names of the engines for people."""


def engine_issues(engines: Mapping[str, PanelData[Any]]) -> Iterator[Issue]:
    """Engines that are down; the first has the remedy."""
    down = [(name, found) for name, found in engines.items() if found.error is not None]
    for place, (name, found) in enumerate(down):
        yield Issue(
            tone="warn" if name == "replica" else "bad",
            subject="replica is not used" if name == "replica" else f"{ENGINES[name]} is down",
            href="/readyz",
            text=TO_DOCTOR.sub("", found.error or ""),
            fix=("" if place else f"{DOCTOR_FIX} ")
            + "Roles reconnect automatically when it is back.",
        )


def commit_issues(found: PanelData[CommitWait | None]) -> Iterator[Issue]:
    """Commits that wait for a synchronous standby: the cause of silent hosts and schedulers."""
    if found.value is not None:
        yield Issue(
            tone="bad",
            subject="PostgreSQL accepts no writes",
            href="/readyz",
            text=found.value.text,
            fix=f"{found.value.fix[:1].upper()}{found.value.fix[1:]}.",
        )


def backup_issues(found: PanelData[BackupsState]) -> Iterator[Issue]:
    """An archive that lags, and damage of the newest base backup, such as a failed rehearsal."""
    state = found.value
    if state is None:
        return
    if state.is_late:
        yield Issue(
            tone="bad",
            subject="backup archive lags",
            href=PREFIX,
            text="nothing archives the log of PostgreSQL"
            if state.behind_bytes is None
            else f"{format_bytes(state.behind_bytes)} of log are not archived",
            fix="Run `headrace doctor`: it tests the disk or bucket of `backup.url`. `headrace up`"
            " logs the reason as `log_not_archived`.",
            since_at=state.archived_until,
        )
    newest = state.backups[-1] if state.backups else None
    faults = [fault for one, fault in state.unreadable.items() if newest is None or one > newest.id]
    fault = newest.fault if newest is not None and newest.fault else "".join(faults[-1:])
    if fault:
        yield Issue(
            tone="bad",
            subject="newest base backup is damaged",
            href=PREFIX,
            text="its last rehearsal or its record failed",
            cause=fault,
            fix="Take a new one with `headrace backup`, then run `headrace backup verify`.",
        )


def unreadable_issues(
    sources: Mapping[str, tuple[str, PanelData[Any] | None]],
    engines: Mapping[str, PanelData[Any]],
) -> Iterator[Issue]:
    """Data that cannot be read, by the name of its screen or check: one issue for each error.

    The remedy for the error of an engine that is down is in the issue of that engine.
    """
    is_stated = any(found.error is not None for found in engines.values())
    places: dict[str, list[tuple[str, str]]] = {}
    for subject, (place, found) in sources.items():
        if found is not None and found.error is not None and not found.is_hidden:
            places.setdefault(found.error, []).append((subject, place))
    slow = {found.error for _, found in sources.values() if found is not None and found.is_slow}
    for error, failed in places.items():
        yield Issue(
            tone="warn" if error in slow else "bad",
            subject=f"no data for {_joined(subject for subject, _ in failed)}",
            href=PREFIX + failed[0][1],
            text=TO_DOCTOR.sub("", error),
            fix="The page retries automatically."
            + ("" if is_stated and TO_DOCTOR.search(error) else f" {DOCTOR_FIX}"),
        )


def _joined(subjects: Iterable[str]) -> str:
    """Names of screens and checks, those of a room together: `Jobs: Fleet, Hosts; Views: Flush`."""
    rooms: dict[str, list[str]] = {}
    for subject in subjects:
        room, _, what = subject.partition(": ")
        rooms.setdefault(room, []).extend([what] if what else [])
    return "; ".join(
        f"{room}: {', '.join(whats)}" if whats else room for room, whats in rooms.items()
    )


def secret_issues(secrets: PanelData[Sequence[RoleSecret]]) -> Iterator[Issue]:
    """Hosts whose root secret differs from that of most hosts."""
    for host, text in differing(secrets.value or ()).items():
        yield Issue(
            tone="bad",
            subject=f"host {host}",
            href=f"{PREFIX}/jobs/hosts",
            text=text,
            fix="Set the same HEADRACE_SECRET on every host and restart its roles. Other hosts"
            " refuse its URLs and cursors.",
        )


def failure_issues(failures: PanelData[Sequence[QueueFailures]]) -> Iterator[Issue]:
    """Queues with jobs that failed or were quarantined, by cause, if one did in the last hour.

    The number is of all kept jobs of the cause. A count of the last hour would fall while nothing
    is repaired, as its jobs grow older.
    """
    found = list(failures.value or ())
    for one in found[:CAUSES_SHOWN]:
        jobs = pluralize(one.jobs, f"{one.state} job")
        matching = {"queue": one.queue, "state": one.state, "q": one.cause}
        yield Issue(
            tone="bad",
            subject=f"queue {one.queue}",
            href=jobs_url(matching),
            text=f"at least {jobs}" if one.jobs_is_capped else jobs,
            cause=one.last_error,
            since_at=None if one.jobs_is_capped or one.jobs == 1 else one.first_at,
            last_at=one.last_at,
            fix="Fix the cause, then retry them."
            if one.state == "failed"
            else "Their worker process crashed each time. Check memory and payloads, then retry"
            " them.",
            remedies=_remedies_of(matching),
        )
    others = found[CAUSES_SHOWN:]
    if others:
        yield Issue(
            tone="bad",
            subject=pluralize(len(others), "other cause"),
            href=jobs_url({"state": "failed"}),
            text=pluralize(sum(one.jobs for one in others), "failed or quarantined job"),
            last_at=max(one.last_at for one in others),
            fix="",
        )


def _remedies_of(matching: dict[str, str]) -> list[Remedy]:
    return [
        Remedy("jobs.bulk_retry", matching, "Retry all"),
        Remedy("jobs.bulk_delete", matching, "Delete all"),
    ]


def kept_issues(
    queues: PanelData[Sequence[QueueStatus]],
    failures: PanelData[Sequence[QueueFailures]],
    load: PanelData[FleetLoad],
    *,
    kept_s: float,
) -> Iterator[Issue]:
    """Queues with failed jobs that `failures` lacks: older ones, or more than it covers."""
    known = {one.queue for one in failures.value or ()}
    failing = {one.queue for one in (load.value.queues if load.value else ()) if one.failed}
    kept = [one for one in queues.value or () if one.failed and one.queue not in known]
    for queue in kept[:CAUSES_SHOWN]:
        matching = {"queue": queue.queue, "state": "failed"}
        jobs = pluralize(queue.failed, "failed or quarantined job")
        is_new = queue.queue in failing
        yield Issue(
            tone="bad" if is_new else "warn",
            subject=f"queue {queue.queue}",
            href=jobs_url(matching),
            text=f"{'over ' if queue.failed_is_capped else ''}{jobs} kept, "
            + ("some from the last minutes" if is_new else "none from the last hour"),
            fix=f"Retry or delete them. They are kept for {format_duration(kept_s)} (setting"
            " `jobs.failed_kept`).",
            remedies=_remedies_of(matching),
        )
    others = kept[CAUSES_SHOWN:]
    if others:
        yield Issue(
            tone="warn",
            subject=pluralize(len(others), "other queue"),
            href=f"{PREFIX}/jobs?state=failed&sort=failed",
            text="failed jobs are kept",
            fix="",
        )


def lost_issues(load: PanelData[FleetLoad]) -> Iterator[Issue]:
    """Queues whose jobs were returned because their process died."""
    if load.value is None:
        return
    for queue in islice((one for one in load.value.queues if one.lost), CAUSES_SHOWN):
        jobs = pluralize(queue.lost, "job was", "jobs were")
        yield Issue(
            tone="warn",
            subject=f"queue {queue.queue}",
            href=f"{PREFIX}/jobs/queues/{path_segment(queue.queue)}",
            text=f"{jobs} requeued within the last {LOAD_MINUTES + 1} minutes, because a worker"
            " died or a lease ended",
            fix="No job is lost: each runs again. A job that crashes its process repeatedly is"
            f" quarantined. The cause is in {log_of('agent')}.",
        )


def fleet_issues(
    fleet: PanelData[FleetState], queues: PanelData[Sequence[QueueStatus]] = NO_DATA
) -> Iterator[Issue]:
    """Open alerts, silent hosts, and a fleet without a scheduler."""
    if fleet.value is None:
        return
    alerted = {alert.subject for alert in fleet.value.alerts if alert.rule == HOST_RULE}
    alerts = fleet.value.alerts
    by_name = {one.queue: one for one in queues.value or ()}
    for alert in alerts[:ALERTS_SHOWN]:
        yield _of_alert(alert, by_name.get(alert.subject))
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
            may_follow_outage=True,
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
                fix="`headrace up`, or its unit of systemd, restarts it automatically. A role that"
                " was stopped on purpose is listed for an hour.",
            )


def death_issues(marks: PanelData[Sequence[Mark]]) -> Iterator[Issue]:
    """Roles that started again, and slots and media processes that died, as the history has them.

    `marks` are those of the last hour; one line for each host and role.
    """
    found = [one for one in marks.value or () if one.kind in ("restart", "deaths")]
    found.sort(key=lambda one: (one.kind, one.host, one.role))
    lines = [list(group) for _, group in groupby(found, lambda one: (one.kind, one.host, one.role))]
    lines.sort(key=lambda line: line[-1].at, reverse=True)
    for line in lines[:CAUSES_SHOWN]:
        yield _of_restarts(line) if line[0].kind == "restart" else _of_deaths(line)


def _of_restarts(line: Sequence[Mark]) -> Issue:
    last = line[-1]
    times = [one.at for one in line if last.at - one.at <= timedelta(seconds=RECENT_S)]
    keeps = "keeps dying: " if len(times) >= DYING_FROM else ""
    at = ", ".join(f"{one.at:%H:%M}" for one in line[-TIMES_SHOWN:])
    return Issue(
        tone="bad" if keeps else "warn",
        subject=f"role {last.role} on {last.host}" if last.role else f"roles on {last.host}",
        href=PREFIX + ROLES.get(last.role, ""),
        text=f"{keeps}started again at {at} UTC"
        + (f", {len(line)} times in the last hour" if len(line) > 1 else ""),
        cause=last.text if not last.role else "",
        fix=f"If nobody restarted it, the exit code is in {log_of(last.role or '*')}.",
    )


def log_of(role: str) -> str:
    """Where the log of a role is, as the end of a sentence."""
    return (
        f"the log of the role on that host: `journalctl -u headrace-{role}` for a unit of systemd,"
        " the output of `headrace up`, or the file that `headrace up` names at its start"
    )


def _of_deaths(line: Sequence[Mark]) -> Issue:
    last, causes = line[-1], Counter[str]()
    for one in line:
        causes.update(one.causes)
    died = sum(one.count for one in line)
    is_media = last.role == "media"
    noun = pluralize(died, "process", "processes") if is_media else pluralize(died, "slot")
    return Issue(
        tone="warn",
        subject=f"{'media node' if is_media else 'slots'} on {last.host}",
        href=f"{PREFIX}/media" if is_media else f"{PREFIX}/jobs/hosts",
        text=f"{noun} died in the last hour, most recently in the minute {last.at:%H:%M} UTC",
        cause=causes_text(causes),
        fix=f"They were started again. The exit codes are in {log_of('media')}."
        if is_media
        else "The agent has started others, and no job is lost."
        + (" Check the memory of the host and" if CAUSES["killed"] in causes else " See")
        + f" {log_of('agent')}.",
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
                remedies=[Remedy("jobs.resume_queue", {"queue": queue.queue}, "Resume")],
            )
        elif not queue.is_known and not queue.decisions:
            yield Issue(
                tone="warn",
                subject=f"queue {queue.queue}",
                href=href,
                text=f"{waiting}, and no running application declares the queue",
                fix="Start an agent whose application declares it, or take its jobs with"
                " `headrace jobs take`.",
                may_follow_outage=True,
            )


def cron_issues(crons: PanelData[Sequence[Cron]]) -> Iterator[Issue]:
    """Crons that were paused by an error."""
    for cron in crons.value or ():
        if cron.error is not None:
            yield Issue(
                tone="bad",
                subject=f"cron {cron.name}",
                href=f"{PREFIX}/jobs/crons",
                text="paused by an error",
                cause=cron.error,
                fix="Fix the error, then resume the cron.",
                remedies=[Remedy("jobs.resume_cron", {"name": cron.name}, "Resume")],
            )


def jobs_url(matching: Mapping[str, str]) -> str:
    """URL of the list of jobs with a filter."""
    given = {name: value for name, value in matching.items() if value}
    return f"{PREFIX}/jobs/jobs?{urlencode(given)}"


def _of_alert(alert: Alert, queue: QueueStatus | None) -> Issue:
    """An open alert; a warning if its cause is over, and only the time to clear it is not."""
    name = path_segment(alert.subject)
    is_host = alert.rule == HOST_RULE
    is_over = (
        queue is not None
        and alert.rule in OF_WAITING
        and (queue.oldest_ready_age_s or 0.0) <= SHORT_OLDEST_S
    )
    return Issue(
        tone="warn" if is_over else "bad",
        subject=f"{'host' if is_host else 'queue'} {alert.subject}",
        href=f"{PREFIX}/jobs/hosts" if is_host else f"{PREFIX}/jobs/queues/{name}",
        text=alert.text,
        cause=_now_waits(queue) if is_over and queue is not None else "",
        since_at=alert.raised_at,
        fix="The alert clears itself if this lasts." if is_over else FIXES.get(alert.rule, ""),
    )


def _now_waits(queue: QueueStatus) -> str:
    if queue.oldest_ready_age_s is None:
        return "Now none of its jobs waits."
    return f"Now its oldest due job has waited {format_duration(queue.oldest_ready_age_s)}."
