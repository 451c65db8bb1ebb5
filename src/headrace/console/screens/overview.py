"""Overview of the five rooms with their health issues, and the audit log.

Each room has a card with a live rate and key facts. Rates cover the roles of this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from headrace.console.format import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_duration,
    format_short,
)
from headrace.console.history import board_of
from headrace.console.screens import health
from headrace.console.screens.health import Issue
from headrace.console.views import PanelData, Rates, Room, Screen, ViewContext, attempt
from headrace.jobs.fleet.state import FleetState
from headrace.jobs.model import QueueStatus
from headrace.kernel.terminal import pluralize
from headrace.web.http import checks_of

MEASURING: Final = "measuring"
OF_FLUSHER: Final = 'role="flusher"'
OF_NODE: Final = 'role="media"'
"""Selects the role that counts; every role declares these series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A card; `facts` are label and text, `error` explains missing data."""

    name: str
    what: str
    """The flow through the system."""
    rate: str
    unit: str
    recent: Sequence[float | None]
    """Recent rates, as read by viewers of the overview."""
    facts: Sequence[tuple[str, str]]
    error: str | None = None
    is_installed: bool = True

    @property
    def title(self) -> str:
        """The name of the room."""
        return self.name.capitalize()


def jobs_card(
    rates: Rates, queues: PanelData[list[QueueStatus]], fleet: PanelData[FleetState]
) -> System:
    """Jobs; the counts cover the whole fleet."""
    per_s = rates.rate_per_s("jobs_finished_total", 'outcome="done"')
    facts = [("waiting", UNKNOWN), ("in progress", UNKNOWN), ("slots", UNKNOWN)]
    if queues.value is not None:
        capped = any(queue.ready_is_capped for queue in queues.value)
        waiting = format_count(sum(queue.ready for queue in queues.value))
        facts[0] = ("waiting", f"over {waiting}" if capped else waiting)
        facts[1] = ("in progress", format_count(sum(queue.leased for queue in queues.value)))
    if fleet.value is not None:
        slots = [slot for host in fleet.value.hosts if not host.is_silent for slot in host.slots]
        busy = sum(slot.busy_s > 0 for slot in slots)
        facts[2] = ("slots busy", f"{busy:,} of {len(slots):,}")
    return System(
        name="jobs",
        what="your code → queues → slots on all hosts",
        rate=_rate(rates, per_s),
        recent=rates.note("jobs", per_s),
        unit="done/s",
        facts=facts,
        error=queues.error or fleet.error,
    )


def fetch_card(rates: Rates, runs: PanelData[list[Any]] | None) -> System:
    """Fetch: photo rate and active runs."""
    per_s = rates.rate_per_s("fetch_photos_total")
    under_way = UNKNOWN
    if runs is not None and runs.value is not None:
        under_way = format_count(sum(run.ended_at is None for run in runs.value))
    return System(
        name="fetch",
        what="sellers' catalogues and photos → items",
        rate=_rate(rates, per_s),
        recent=rates.note("fetch", per_s),
        unit="photos/s",
        facts=[
            ("received", _bytes(rates, rates.rate_per_s("fetch_received_bytes_total"))),
            ("active runs", under_way),
        ],
        error=None if runs is None else runs.error,
        is_installed=runs is not None,
    )


def views_card(rates: Rates, lag: PanelData[list[Any]]) -> System:
    """Views: hit rate and flush lag."""
    per_s = rates.rate_per_s("views_hits_total", 'outcome="counted"')
    oldest, pending = UNKNOWN, UNKNOWN
    if lag.value is not None:
        oldest = format_duration(max((shard.oldest_s for shard in lag.value), default=0.0))
        pending = format_count(sum(shard.pending for shard in lag.value))
    return System(
        name="views",
        what="visitors → totals, series, tops",
        rate=_rate(rates, per_s),
        recent=rates.note("views", per_s),
        unit="hits/s",
        facts=[("flush lag", oldest), ("unflushed calls", pending)],
        error=lag.error,
    )


def feed_card(rates: Rates, shards: PanelData[Any]) -> System:
    """Feed: page rate, change rate and sweep lag."""
    per_s = rates.rate_per_s("feed_pages_total")
    return System(
        name="feed",
        what="authors' posts → followers' pages",
        rate=_rate(rates, per_s),
        recent=rates.note("feed", per_s),
        unit="pages/s",
        facts=[
            ("changes", _per_s(rates, rates.rate_per_s("feed_changes_total"))),
            ("sweep lag", format_duration(sweep_lag_s(rates))),
        ],
        error=shards.error,
    )


def media_card(rates: Rates, *, is_installed: bool) -> System:
    """Media: request rate, bytes sent, connections."""
    per_s = rates.rate_per_s("media_requests_total", OF_NODE)
    return System(
        name="media",
        what="stored objects → players, by range",
        rate=_rate(rates, per_s),
        recent=rates.note("media", per_s),
        unit="requests/s",
        facts=[
            ("sent", _bytes(rates, rates.rate_per_s("media_bytes_total", OF_NODE))),
            ("connections", format_count(rates.total("media_connections", OF_NODE))),
        ],
        is_installed=is_installed,
    )


def sweep_lag_s(rates: Rates) -> float | None:
    """Age of the oldest unswept feed change; None without a flusher on this machine."""
    return rates.greatest("feed_sweep_lag_seconds", OF_FLUSHER)


def _rate(rates: Rates, per_s: float | None) -> str:
    if per_s is None:
        return MEASURING if rates.is_measuring else UNKNOWN
    return format_short(round(per_s, 1) if per_s < 100 else round(per_s))


def _per_s(rates: Rates, per_s: float | None) -> str:
    return _rate(rates, per_s) + ("" if per_s is None else "/s")


def _bytes(rates: Rates, per_s: float | None) -> str:
    return _rate(rates, None) if per_s is None else f"{format_bytes(per_s)}/s"


RUNS_LOOKED_AT: Final = 50
ISSUES_SHOWN: Final = 15


async def view_overview(context: ViewContext) -> dict[str, Any]:
    """The overview, read from all sources concurrently."""
    jobs, views, feed = context.jobs, context.views, context.feed
    fetch = context.installed_fetch
    history, engines, loaded, runs, _ = await asyncio.gather(
        board_of(context, "overview"),
        _engines(context),
        asyncio.gather(
            _seen(context, "jobs:read", jobs.queues.all),
            _seen(context, "jobs:read", jobs.fleet.state),
            _seen(context, "jobs:read", jobs.fleet.load),
            _seen(context, "jobs:read", jobs.fleet.failures),
            _seen(context, "jobs:read", jobs.crons.all),
            _seen(context, "views:read", views.analytics.lag),
            _seen(context, "feed:read", feed.index.stats),
        ),
        _runs(context, fetch),
        context.rates.read(),
    )
    queues, fleet, load, failures, crons, lag, shards = loaded
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
        *health.lag_issues(lag, sweep_lag_s(rates)),
    ]
    return {
        "systems": [
            jobs_card(rates, queues, fleet),
            fetch_card(rates, runs),
            views_card(rates, lag),
            feed_card(rates, shards),
            media_card(rates, is_installed=True),
        ],
        "health": health_of(issues),
        "issues": issues[:ISSUES_SHOWN],
        "issues_left": len(issues[ISSUES_SHOWN:]),
        "engines": engines,
        "history": history,
    }


def health_of(problems: Sequence[Issue]) -> tuple[str, str]:
    """Text and tone of the health: bad with any problem, warn with warnings only."""
    bad = sum(one.tone == "bad" for one in problems)
    if bad:
        return pluralize(bad, "problem"), "bad"
    if problems:
        return pluralize(len(problems), "warning"), "warn"
    return "no problems detected", "good"


async def _engines(context: ViewContext) -> dict[str, str | None]:
    """Error of each engine; None if it is up."""
    checks = checks_of(context.house)
    found = await asyncio.gather(*(attempt(check) for check in checks.values()))
    errors = {name: one.error for name, one in zip(checks, found, strict=True)}
    replica = context.house.engines.postgres.replica
    if replica and not (state := await replica.state()).is_used:
        errors["replica"] = f"the replica {state.problem}; reads use the primary"
    return errors


async def _runs(context: ViewContext, fetch: Any) -> PanelData[list[Any]] | None:
    if fetch is None:
        return None
    return await _seen(context, "fetch:read", partial(fetch.runs.newest, runs_max=RUNS_LOOKED_AT))


async def _seen(
    context: ViewContext, scope: str, call: Callable[[], Awaitable[Any]]
) -> PanelData[Any]:
    """The result of `call`, if the caller has `scope`."""
    if not context.may(scope):
        return PanelData(error=f"your token lacks the scope {scope}", is_hidden=True)
    return await attempt(call)


LINES_SHOWN: Final = 100


async def view_audit(context: ViewContext) -> dict[str, Any]:
    """Audit entries before the one in the URL."""
    before = context.query.number("before", 0)
    lines = await context.audit.lines(before=before or None, lines_max=LINES_SHOWN + 1)
    shown, next_url = context.cut(lines, LINES_SHOWN, before="id")
    return {"lines": shown, "next_url": next_url}


ROOM: Final = Room(
    name="overview",
    title="Overview",
    key="o",
    scope=None,
    screens=(
        Screen("/", "Overview", "overview/now.html", view_overview, tab="Overview"),
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
