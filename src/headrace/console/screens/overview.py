"""Overview of the five rooms with their health issues, and the audit log.

Each room has a card with a live rate and key facts. Rates cover the roles of this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

from headrace.console.history import MINUTE_S, RECORDED_AFTER_S, board_of
from headrace.console.model import ROWS_SHOWN
from headrace.console.screens import health, health_rooms
from headrace.console.screens.cards import (
    RUNS_LOOKED_AT,
    RoomRates,
    card_error,
    feed_card,
    fetch_card,
    jobs_card,
    media_card,
    views_card,
)
from headrace.console.screens.health import Issue
from headrace.console.screens.search import view_search
from headrace.console.stored import (
    OF_NODE,
    OUTAGES_SHOWN_FOR,
    READ_EVERY_S,
    newest_minute,
    recent_marks,
    recent_outages,
)
from headrace.console.views import (
    NO_DATA,
    PanelData,
    Room,
    Screen,
    ViewContext,
    attempt,
)
from headrace.engines.backup.service import BackupsState
from headrace.engines.commit_wait import CommitWait, find_commit_wait
from headrace.fetch.i18n import Texts
from headrace.jobs.crons import Cron
from headrace.jobs.fleet.state import FleetLoad, FleetState, QueueFailures
from headrace.jobs.model import JobsConfig, QueueStatus
from headrace.kernel.errors import TO_DOCTOR
from headrace.kernel.terminal import pluralize
from headrace.web.http import check_engines
from headrace.web.marks import Mark
from headrace.web.model import WebConfig
from headrace.web.role_secrets import RoleSecret, read_secrets

SETTLED_S: Final = 15.0
"""After an outage of PostgreSQL every scheduler and flusher has its lead or shards again."""
ISSUES_SHOWN: Final = 15
OUTAGES_SHOWN: Final = 10

BACKUPS_EVERY_S: Final = 60.0
"""The archive is read at most so often: it has an object for each write of new log."""
FAULTY_EVERY_S: Final = 5.0
"""The newest run of each customer is read at most so often."""
NODES_EVERY_S: Final = 10.0
"""Nodes of a cluster are probed at most so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that the overview reads; None: the room is not installed."""

    engines: Mapping[str, PanelData[Any]]
    commits: PanelData[CommitWait | None]
    queues: PanelData[Sequence[QueueStatus]]
    fleet: PanelData[FleetState]
    load: PanelData[FleetLoad]
    failures: PanelData[Sequence[QueueFailures]]
    crons: PanelData[Sequence[Cron]]
    secrets: PanelData[Sequence[RoleSecret]]
    lag: PanelData[Sequence[Any]]
    shards: PanelData[Sequence[Any]]
    backlog: PanelData[Any]
    runs: PanelData[Sequence[Any]] | None
    troubles: PanelData[Sequence[Any]] | None
    faulty_runs: PanelData[Sequence[Any]] | None
    disks: PanelData[Any]
    nodes: PanelData[Any]
    backups: PanelData[BackupsState]
    marks: PanelData[Sequence[Mark]]
    outages: PanelData[list[Mark]]

    @property
    def is_partial(self) -> bool:
        """Whether the caller lacks a scope for some of it."""
        found = (getattr(self, one.name) for one in fields(self))
        return any(isinstance(one, PanelData) and one.is_hidden for one in found)


async def view_overview(context: ViewContext) -> dict[str, Any]:
    """The overview, read from all sources concurrently."""
    history, found = await asyncio.gather(board_of(context, "overview"), _read(context))
    rates = context.rates
    given = RoomRates(rates, await newest_minute(context))
    # After an outage of PostgreSQL, roles need a moment to take their leads and shards again.
    failed_s = context.house.engines.postgres.failed_s
    is_settled = found.commits.value is None and time.monotonic() - failed_s > SETTLED_S
    issues = [one for one in _issues(context, found) if is_settled or not one.may_follow_outage]
    # The order within a tone is that of the sources.
    issues.sort(key=lambda one: one.tone != "bad")
    cards = [
        jobs_card(rates, given, found.queues, found.fleet, now_at=context.now_at),
        fetch_card(rates, given, found.runs),
        views_card(rates, given, found.lag),
        feed_card(rates, given, found.shards, found.backlog),
        media_card(rates, given, is_installed=True),
    ]
    return {
        "systems": [replace(one, error=card_error(one.error)) for one in cards],
        "health": health_of(issues, is_partial=found.is_partial),
        "recorded_after_s": MINUTE_S + RECORDED_AFTER_S + READ_EVERY_S,
        "outages_from": f"{context.now_at - OUTAGES_SHOWN_FOR:%Y-%m-%dT%H:00Z}",
        "engine_names": health.ENGINES,
        "issues": issues[:ISSUES_SHOWN],
        "issues_left": len(issues[ISSUES_SHOWN:]),
        "engines": found.engines,
        "outages": found.outages,
        "outages_shown": OUTAGES_SHOWN,
        "history": replace(history, error=TO_DOCTOR.sub("", history.error)),
        "cause_characters": health.CAUSE_CHARACTERS,
    }


async def _read(context: ViewContext) -> Sources:
    jobs, views, feed, media = context.jobs, context.views, context.feed, context.media
    fetch = context.installed_fetch
    calls: dict[str, tuple[str, Callable[[], Awaitable[Any]]]] = {
        "queues": ("jobs:read", jobs.queues.all),
        "fleet": ("jobs:read", jobs.fleet.state),
        "load": ("jobs:read", jobs.fleet.load),
        "failures": ("jobs:read", jobs.fleet.failures),
        "crons": ("jobs:read", jobs.crons.all),
        "secrets": ("jobs:read", partial(read_secrets, context.house.engines.postgres)),
        "lag": ("views:read", views.analytics.lag),
        "shards": ("feed:read", feed.index.stats),
        "backlog": ("feed:read", feed.lookup.backlog),
    }
    if fetch is not None:
        newest = partial(fetch.runs.newest, runs_max=RUNS_LOOKED_AT)
        calls["runs"] = ("fetch:read", newest)
        calls["troubles"] = ("fetch:read", fetch.lookup.troubles)
        faulty = partial(context.rates.kept, "faulty", FAULTY_EVERY_S, fetch.lookup.faulty_runs)
        calls["faulty_runs"] = ("fetch:read", faulty)
    if media.config.disks:
        calls["disks"] = ("media:read", media.disks.list)
    if media.config.node is not None:
        nodes = partial(context.rates.kept, "nodes", NODES_EVERY_S, media.nodes.list)
        calls["nodes"] = ("media:read", nodes)
    if context.backups.is_on:
        backups = partial(context.rates.kept, "backups", BACKUPS_EVERY_S, context.backups.state)
        calls["backups"] = ("metrics:read", backups)
    engines, commits, _, found_marks, outages, *results = await asyncio.gather(
        _engines(context),
        attempt(find_commit_wait, context.house.engines.postgres),
        context.rates.read(),
        attempt(recent_marks, context),
        recent_outages(context),
        *(_seen(context, scope, call) for scope, call in calls.values()),
    )
    absent = {
        "runs": None,
        "troubles": None,
        "faulty_runs": None,
        "disks": NO_DATA,
        "nodes": NO_DATA,
        "backups": NO_DATA,
    }
    return Sources(
        engines=engines,
        commits=commits,
        marks=found_marks,
        outages=outages,
        **{**absent, **dict(zip(calls, results, strict=True))},
    )


def _issues(context: ViewContext, found: Sources) -> Iterator[Issue]:
    rates, fetch = context.rates, context.installed_fetch
    yield from health.engine_issues(found.engines)
    yield from health.commit_issues(found.commits)
    yield from health.backup_issues(found.backups)
    yield from health.unreadable_issues(
        {
            "Jobs: Fleet": ("/jobs", found.queues),
            "Jobs: load of queues": ("/jobs", found.load),
            "Jobs: failed jobs": ("/jobs/jobs?state=failed", found.failures),
            "Jobs: Hosts": ("/jobs/hosts", found.fleet),
            "Jobs: Crons": ("/jobs/crons", found.crons),
            "Fetch: Runs": ("/fetch", found.runs),
            "Fetch: Photos": ("/fetch/photos?show=broken", found.faulty_runs),
            "Views: Flush": ("/views/lag", found.lag),
            "Feed: Index": ("/feed/index", found.shards),
            "the check of late posts and changes": ("/feed", found.backlog),
            "Media: disks": ("/media", found.disks),
            "Media: Cluster": ("/media/cluster", found.nodes),
            "the check of backups": ("", found.backups),
            "the check of HEADRACE_SECRET": ("", found.secrets),
            "the check for restarts and dead processes": ("", found.marks),
        },
        found.engines,
    )
    yield from health.secret_issues(found.secrets)
    yield from health.failure_issues(found.failures)
    yield from health.fleet_issues(found.fleet, found.queues)
    yield from health.lost_issues(found.load)
    yield from health.death_issues(found.marks)
    yield from health.role_issues(rates.gone())
    yield from health.queue_issues(found.queues)
    kept_s = context.house.config.section(JobsConfig).failed_kept_s
    yield from health.kept_issues(found.queues, found.failures, found.load, kept_s=kept_s)
    yield from health.cron_issues(found.crons)
    if fetch is not None:
        yield from health_rooms.trouble_issues(found.troubles)
        held = [
            one.things
            for one in (found.troubles.value if found.troubles else None) or ()
            if one.kind == "held_run"
        ]
        texts = Texts.load(config=fetch.config)
        yield from health_rooms.run_issues(found.runs, found.faulty_runs, sum(held), texts.outcome)
    yield from health_rooms.views_issues(found.lag)
    yield from health_rooms.feed_issues(found.backlog, found.shards)
    yield from health_rooms.media_issues(rates, found.disks, found.nodes, OF_NODE)
    yield from health_rooms.stale_issues(rates.age_s("nodes"))


def health_of(issues: Sequence[Issue], *, is_partial: bool = False) -> tuple[str, str]:
    """Text and tone of the health. `is_partial`: the caller may not read all that is checked."""
    bad = sum(one.tone == "bad" for one in issues)
    counts = ((bad, "problem"), (len(issues) - bad, "warning"))
    found = ", ".join(pluralize(count, noun) for count, noun in counts if count)
    text = found or "no problems detected"
    if is_partial:
        text += " in what your token may read"
    return text, "bad" if bad else "warn" if issues else "good"


async def _engines(context: ViewContext) -> dict[str, PanelData[Any]]:
    """The state of each engine as in `/readyz`, with an error unless it is up."""
    failures = await check_engines(context.house)
    states: dict[str, PanelData[Any]] = {
        name: PanelData(error=failure) if failure else PanelData(value=True)
        for name, failure in failures.items()
    }
    postgres = context.house.engines.postgres
    missing = postgres.servers.no_primary or postgres.direct_servers.no_primary
    if missing and states["postgres"].error is not None:
        states["postgres"] = PanelData(error=f"{missing.text}. {missing.advice}")
    replica = postgres.replica
    if replica and not (state := await replica.state()).is_used:
        text = f"the replica {state.problem}; reads use the primary"
        states["replica"] = PanelData(error=text)
    return states


async def _seen(
    context: ViewContext, scope: str, call: Callable[[], Awaitable[Any]]
) -> PanelData[Any]:
    """The result of `call`, if the caller has `scope`."""
    if not context.may(scope):
        return PanelData(error=f"your token lacks the scope {scope}", is_hidden=True)
    return await attempt(call)


async def view_audit(context: ViewContext) -> dict[str, Any]:
    """Audit entries before the one in the URL."""
    before = context.query.number("before", 0)
    lines = await context.audit.lines(before=before or None, lines_max=ROWS_SHOWN + 1)
    shown, next_url = context.cut(lines, ROWS_SHOWN, before="id")
    kept_s = context.house.config.section(WebConfig).audit_kept_s
    return {"lines": shown, "next_url": next_url, "kept_s": kept_s}


ROOM: Final = Room(
    name="overview",
    title="Overview",
    key="o",
    scope=None,
    screens=(
        Screen("/", "Overview", "overview/now.html", view_overview, tab="Overview"),
        Screen("/search", "Search", "overview/search.html", view_search, live=False),
        Screen(
            "/audit",
            "Audit log",
            "overview/audit.html",
            view_audit,
            scope="*",
            tab="Audit",
            live=False,
        ),
    ),
)
