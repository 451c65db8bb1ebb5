"""Overview of the five systems with their health issues, and the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from headrace.console.format import pluralize
from headrace.console.screens import health, systems
from headrace.console.screens.health import Issue
from headrace.console.screens.systems import System
from headrace.console.views import Chart, Line, PanelData, Room, Screen, ViewContext, attempt
from headrace.jobs.fleet.load import FleetLoad
from headrace.web.audit import AuditLine
from headrace.web.http import checks_of

MINUTE_S: Final = 60
MINUTES: Final = 60
RUNS_LOOKED_AT: Final = 50
ISSUES_SHOWN: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewView:
    """Data of the overview."""

    systems: Sequence[System]
    health: tuple[str, str]
    """Text and tone for the whole deployment."""
    issues: Sequence[Issue]
    issues_left: int
    """Number of issues that are not shown."""
    engines: dict[str, str | None]
    load: PanelData[FleetLoad]
    ended: Chart
    waits: Chart


async def view_overview(context: ViewContext) -> OverviewView:
    """The overview, read from all sources concurrently."""
    jobs, views, feed = context.jobs, context.views, context.feed
    fetch = context.services.fetch
    engines, (queues, fleet, load, failures, crons, lag, shards), runs, _ = await asyncio.gather(
        _engines(context),
        asyncio.gather(
            _seen(context, "jobs:read", jobs.queues),
            _seen(context, "jobs:read", jobs.fleet.state),
            _seen(context, "jobs:read", jobs.fleet.load),
            _seen(context, "jobs:read", jobs.fleet.failures),
            _seen(context, "jobs:read", jobs.crons.all),
            _seen(context, "views:read", views.lag),
            _seen(context, "feed:read", feed.stats),
        ),
        _runs(context, fetch),
        context.rates.read(),
    )
    rates = context.rates
    issues = [
        *health.engine_issues(engines),
        *health.unreadable_issues(
            {
                "Jobs": ("/jobs", queues),
                "Hosts": ("/jobs/hosts", fleet),
                "Load": ("/jobs", load),
                "Failed jobs": ("/jobs/jobs?state=failed", failures),
                "Crons": ("/jobs/crons", crons),
                "Fetch": ("/fetch", runs),
                "Views": ("/views/lag", lag),
                "Feed": ("/feed", shards),
            }
        ),
        *health.failure_issues(failures),
        *health.role_issues(rates.gone()),
        *health.fleet_issues(fleet),
        *health.queue_issues(queues),
        *health.cron_issues(crons),
        *health.run_issues(runs),
        *health.lag_issues(lag, systems.sweep_lag_s(rates)),
    ]
    return OverviewView(
        systems=[
            systems.jobs_card(rates, queues, fleet),
            systems.fetch_card(rates, runs),
            systems.views_card(rates, lag),
            systems.feed_card(rates, shards),
            systems.media_card(rates, is_installed=True),
        ],
        health=health_of(issues),
        issues=issues[:ISSUES_SHOWN],
        issues_left=len(issues[ISSUES_SHOWN:]),
        engines=engines,
        load=load,
        ended=_chart(
            context, load, "jobs/min", (("done", "done", ""), ("failed", "failed", "bad"))
        ),
        waits=_chart(context, load, "s", (("longest wait", "wait_max_s", "warn"),), idle=None),
    )


def health_of(problems: Sequence[Issue]) -> tuple[str, str]:
    """Text and tone of the health: bad with any problem, warn with warnings only."""
    bad = sum(one.tone == "bad" for one in problems)
    if bad:
        return pluralize(bad, "problem", "problems"), "bad"
    if problems:
        return pluralize(len(problems), "warning", "warnings"), "warn"
    return "no problems detected", "good"


async def _engines(context: ViewContext) -> dict[str, str | None]:
    """Error of each engine; None if it is up."""
    checks = checks_of(context.house)
    found = await asyncio.gather(*(attempt(check()) for check in checks.values()))
    return {name: one.error for name, one in zip(checks, found, strict=True)}


async def _runs(context: ViewContext, fetch: Any) -> PanelData[list[Any]] | None:
    if fetch is None:
        return None
    return await _seen(context, "fetch:read", partial(fetch.runs, runs_max=RUNS_LOOKED_AT))


async def _seen(
    context: ViewContext, scope: str, call: Callable[[], Awaitable[Any]]
) -> PanelData[Any]:
    """The result of `call`, if the caller has `scope`."""
    if not context.may(scope):
        return PanelData(error=f"your token lacks the scope {scope}", is_hidden=True)
    return await attempt(call())


def _chart(
    context: ViewContext,
    load: PanelData[FleetLoad],
    unit: str,
    lines: Sequence[tuple[str, str, str]],
    *,
    idle: int | None = 0,
) -> Chart:
    """The last hour by minute; minutes without a row have the value `idle`."""
    # The current minute is incomplete and would look like a drop.
    this = int(context.now_at.timestamp()) // MINUTE_S * MINUTE_S
    xs = [this - MINUTE_S * back for back in range(MINUTES, 0, -1)]
    if load.value is None:
        return Chart(xs=[], lines=[Line(label, [], tone) for label, _, tone in lines], unit=unit)
    found = {int(one.minute.timestamp()): one for one in load.value.minutes}
    return Chart(
        xs=xs,
        lines=[
            Line(label, [getattr(found[x], name) if x in found else idle for x in xs], tone)
            for label, name, tone in lines
        ],
        unit=unit,
    )


LINES_SHOWN: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditView:
    """A page of audit entries, newest first."""

    lines: list[AuditLine]
    next_url: str | None
    first_url: str | None


async def view_audit(context: ViewContext) -> AuditView:
    """Audit entries before the one in the URL."""
    before = context.query.number("before", 0)
    lines = await context.audit.lines(before=before or None, lines_max=LINES_SHOWN + 1)
    has_more = len(lines) > LINES_SHOWN
    shown = lines[:LINES_SHOWN]
    return AuditView(
        lines=shown,
        next_url=context.url(before=shown[-1].id) if has_more else None,
        first_url=context.url(before=None) if before else None,
    )


ROOM: Final = Room(
    name="overview",
    title="Overview",
    key="o",
    screens=(
        Screen(
            path="/",
            title="Overview",
            tab="Overview",
            template="overview/now.html",
            scope=None,
            view=view_overview,
        ),
        Screen(
            path="/audit",
            title="Audit log",
            tab="Audit",
            template="overview/audit.html",
            scope="*",
            view=view_audit,
            live=False,
        ),
    ),
)
