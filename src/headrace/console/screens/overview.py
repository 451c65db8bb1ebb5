"""Overview of the five rooms with their health issues, and the audit log.

Each room has a card with a live rate and key facts. Rates cover the roles of this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

from headrace.console.format import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_duration,
    format_short,
)
from headrace.console.history import MINUTE_S, RECORDED_AFTER_S, board_of
from headrace.console.model import ROWS_SHOWN
from headrace.console.screens import health, health_rooms
from headrace.console.screens.health import Issue
from headrace.console.screens.search import view_search
from headrace.console.stored import (
    OF_FLUSHER,
    StoredMinute,
    newest_minute,
    recent_marks,
    recent_outages,
)
from headrace.console.views import (
    NO_ANSWER,
    NO_DATA,
    PanelData,
    Rates,
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
from headrace.jobs.model import QueueStatus
from headrace.kernel.errors import TO_DOCTOR
from headrace.kernel.terminal import pluralize
from headrace.web.http import check_engines
from headrace.web.marks import Mark
from headrace.web.role_secrets import RoleSecret, read_secrets

FIRST_IMPORT: Final = (
    "headrace fetch customer set SHOP",
    "headrace fetch catalogue run shop.yml --customer SHOP",
)
MEASURING: Final = "measuring"
SETTLED_S: Final = 15.0
"""After an outage of PostgreSQL every scheduler and flusher has its lead or shards again."""
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
    at: str = ""
    """The time of a rate that is not of now."""
    recent: Sequence[float | None]
    """Recent rates, as read by viewers of the overview."""
    facts: Sequence[tuple[str, str]]
    error: str | None = None
    is_installed: bool = True
    commands: Sequence[str] = ()
    """An example of a first use, where there was none yet."""
    link: tuple[str, str] | None = None
    """Path below /console and text of a list that belongs to the facts."""

    @property
    def title(self) -> str:
        """The name of the room."""
        return self.name.capitalize()


class RoomRates:
    """This machine's rates; until they are measured, those of the newest recorded minute."""

    def __init__(self, rates: Rates, minute: StoredMinute | None) -> None:
        self._rates, self._minute = rates, minute

    def shown(self, per_s: float | None, series: str, key: str = "") -> float | None:
        """The measured rate, or the recorded one."""
        if per_s is None and self._minute is not None:
            return self._minute.rate_per_s(series, key)
        return per_s

    def at(self, per_s: float | None) -> str:
        """When a recorded rate was; empty for a measured one."""
        return "" if per_s is not None or self._minute is None else self._minute.note

    def text(self, per_s: float | None) -> str:
        """A rate for people."""
        if per_s is None:
            return MEASURING if self._rates.is_measuring else UNKNOWN
        return format_short(round(per_s, 1) if per_s < 100 else round(per_s))

    def bytes_text(self, per_s: float | None) -> str:
        """A rate of bytes for people."""
        return self.text(None) if per_s is None else f"{format_bytes(per_s)}/s"


def jobs_card(
    rates: Rates,
    given: RoomRates,
    queues: PanelData[Sequence[QueueStatus]],
    fleet: PanelData[FleetState],
    *,
    now_at: datetime,
) -> System:
    """Jobs of the whole fleet; busy slots are the hosts' last reports, so their age is stated."""
    per_s = rates.rate_per_s("jobs_finished_total", 'outcome="done"')
    facts = [("waiting", UNKNOWN), ("in progress", UNKNOWN), ("slots", UNKNOWN)]
    if queues.value is not None:
        facts[0] = ("waiting", _waiting([one for one in queues.value if not one.decisions]))
        if people := [one for one in queues.value if one.decisions]:
            facts.insert(1, ("waiting for people", _waiting(people)))
        facts[-2] = ("in progress", format_count(sum(queue.leased for queue in queues.value)))
    if fleet.value is not None:
        alive = [host for host in fleet.value.hosts if not host.is_silent]
        slots = [slot for host in alive for slot in host.slots]
        busy = sum(slot.busy_s > 0 for slot in slots)
        facts[-1] = ("slots busy", f"{busy:,} of {len(slots):,}")
        reports = [host.reported_at for host in alive if host.reported_at is not None]
        if reports:
            age_s = max(0.0, (now_at - min(reports)).total_seconds())
            facts.append(("slots reported", f"{age_s:.0f} s ago"))
    return System(
        name="jobs",
        what="your code → queues → slots on all hosts",
        rate=given.text(given.shown(per_s, "jobs_ended", "done")),
        at=given.at(per_s),
        recent=rates.note("jobs", per_s),
        unit="done/s",
        facts=facts,
        error=queues.error or fleet.error,
    )


def _waiting(queues: Sequence[QueueStatus]) -> str:
    count = format_count(sum(queue.ready for queue in queues))
    return f"over {count}" if any(queue.ready_is_capped for queue in queues) else count


def fetch_card(rates: Rates, given: RoomRates, runs: PanelData[Sequence[Any]] | None) -> System:
    """Fetch: photo rate and active runs."""
    per_s = rates.rate_per_s("fetch_photos_total")
    received_per_s = given.shown(rates.rate_per_s("fetch_received_bytes_total"), "fetch_bytes")
    under_way, is_unused = UNKNOWN, False
    if runs is not None and runs.value is not None:
        is_unused = not runs.value and not per_s
        under_way = format_count(sum(run.ended_at is None for run in runs.value))
    return System(
        name="fetch",
        what="sellers' catalogues and photos → items",
        rate="no photos yet" if is_unused else given.text(given.shown(per_s, "fetch_photos")),
        at="" if is_unused else given.at(per_s),
        recent=rates.note("fetch", per_s),
        unit="" if is_unused else "photos/s",
        commands=FIRST_IMPORT if is_unused else (),
        facts=[
            ("received", given.bytes_text(received_per_s)),
            ("active runs", under_way),
        ],
        link=("/fetch/hosts?sort=errors", "Photo hosts by errors"),
        error=None if runs is None else runs.error,
        is_installed=runs is not None,
    )


def views_card(rates: Rates, given: RoomRates, lag: PanelData[Sequence[Any]]) -> System:
    """Views: rate of their storage, and what PostgreSQL does not have yet.

    Every process of the site may count hits; all of them pass the flushers.
    """
    per_s = rates.rate_per_s("views_flushed_total", OF_FLUSHER)
    pending, oldest = UNKNOWN, UNKNOWN
    if lag.value is not None:
        oldest_s = max((shard.oldest_s for shard in lag.value), default=0.0)
        pending = format_count(sum(shard.pending for shard in lag.value))
        oldest = format_duration(oldest_s)
    return System(
        name="views",
        what="visitors → totals, charts, top lists",
        rate=given.text(given.shown(per_s, "views_flushed")),
        at=given.at(per_s),
        recent=rates.note("views", per_s),
        unit="stored/s",
        facts=[("calls not yet stored", pending), ("oldest of them", oldest)],
        error=lag.error,
    )


def feed_card(rates: Rates, given: RoomRates, shards: PanelData[Any]) -> System:
    """Feed: page rate, change rate and the oldest unconfirmed change."""
    per_s = rates.rate_per_s("feed_pages_total")
    changes_per_s = rates.rate_per_s("feed_changes_total")
    # The history has no series of changes.
    changes = [] if rates.is_measuring else [("changes", f"{given.text(changes_per_s)}/s")]
    return System(
        name="feed",
        what="authors' posts → followers' pages",
        rate=given.text(given.shown(per_s, "feed_pages")),
        at=given.at(per_s),
        recent=rates.note("feed", per_s),
        unit="pages/s",
        facts=[
            *changes,
            ("counted in", "API and jobs"),
            ("oldest unconfirmed change", format_duration(sweep_lag_s(rates))),
        ],
        error=shards.error,
    )


def media_card(rates: Rates, given: RoomRates, *, is_installed: bool) -> System:
    """Media: request rate, bytes sent, connections."""
    per_s = rates.rate_per_s("media_requests_total", OF_NODE)
    sent_per_s = given.shown(rates.rate_per_s("media_bytes_total", OF_NODE), "media_bytes")
    return System(
        name="media",
        what="stored objects → players, by range",
        rate=given.text(given.shown(per_s, "media_requests")),
        at=given.at(per_s),
        recent=rates.note("media", per_s),
        unit="requests/s",
        facts=[
            ("sent", given.bytes_text(sent_per_s)),
            ("connections", format_count(rates.total("media_connections", OF_NODE))),
        ],
        is_installed=is_installed,
    )


def sweep_lag_s(rates: Rates) -> float | None:
    """Age of the oldest unconfirmed feed change; None without a flusher on this machine."""
    return rates.greatest("feed_sweep_lag_seconds", OF_FLUSHER)


RUNS_LOOKED_AT: Final = 50
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
        feed_card(rates, given, found.shards),
        media_card(rates, given, is_installed=True),
    ]
    return {
        "systems": [replace(one, error=card_error(one.error)) for one in cards],
        "health": health_of(issues),
        "recorded_after_s": MINUTE_S + RECORDED_AFTER_S,
        "issues": issues[:ISSUES_SHOWN],
        "issues_left": len(issues[ISSUES_SHOWN:]),
        "engines": found.engines,
        "outages": found.outages,
        "outages_shown": OUTAGES_SHOWN,
        "history": replace(history, error=TO_DOCTOR.sub("", history.error)),
        "cause_characters": health.CAUSE_CHARACTERS,
    }


def card_error(error: str | None) -> str:
    """The error of a card. Health states remedies, and once for all cards that reads are slow."""
    return "no data, see Health" if error == NO_ANSWER else TO_DOCTOR.sub("", error or "")


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
            "Backups": ("", found.backups),
            "Jobs": ("/jobs", found.queues),
            "Hosts": ("/jobs/hosts", found.fleet),
            "Load of queues": ("/jobs", found.load),
            "Failed jobs": ("/jobs/jobs?state=failed", found.failures),
            "Crons": ("/jobs/crons", found.crons),
            "Secrets of roles": ("/jobs/hosts", found.secrets),
            "Fetch": ("/fetch", found.runs),
            "Photos": ("/fetch/photos?show=broken", found.faulty_runs),
            "Views": ("/views/lag", found.lag),
            "Feed": ("/feed", found.shards),
            "Media disks": ("/media", found.disks),
            "Media nodes": ("/media/cluster", found.nodes),
            "Marks in charts": ("", found.marks),
        },
        found.engines,
    )
    yield from health.secret_issues(found.secrets)
    yield from health.failure_issues(found.failures)
    yield from health.fleet_issues(found.fleet)
    yield from health.lost_issues(found.load)
    yield from health.death_issues(found.marks)
    yield from health.role_issues(rates.gone())
    yield from health.queue_issues(found.queues)
    yield from health.kept_issues(found.queues, found.failures, found.load)
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


def health_of(problems: Sequence[Issue]) -> tuple[str, str]:
    """Text and tone of the health: bad with any problem, warn with warnings only."""
    bad = sum(one.tone == "bad" for one in problems)
    if bad:
        return pluralize(bad, "problem"), "bad"
    if problems:
        return pluralize(len(problems), "warning"), "warn"
    return "no problems detected", "good"


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
    return {"lines": shown, "next_url": next_url}


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
