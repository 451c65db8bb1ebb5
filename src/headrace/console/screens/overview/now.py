"""The first page: what goes on, and what is wrong.

Every source is asked at once and answers for itself: an engine that is down makes its card say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from headrace.console import shown
from headrace.console.screens.overview import systems, wrongs
from headrace.console.screens.overview.systems import System
from headrace.console.screens.overview.wrongs import Wrong
from headrace.console.seeing import Ask, Chart, Found, Line, attempt
from headrace.jobs.fleet.load import FleetLoad
from headrace.web.http import checks_of

MINUTE_S: Final = 60
MINUTES: Final = 60
RUNS_LOOKED_AT: Final = 50
WRONGS_SHOWN: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewView:
    """The page."""

    systems: Sequence[System]
    health: tuple[str, str]
    """A word and its tone for the whole deployment."""
    wrongs: Sequence[Wrong]
    wrongs_left: int
    """More of them than a page shows."""
    engines: dict[str, str | None]
    load: Found[FleetLoad]
    ended: Chart
    waits: Chart


async def see_overview(ask: Ask) -> OverviewView:
    """All sources at once."""
    jobs, views, feed = ask.service("jobs"), ask.service("views"), ask.service("feed")
    fetch = ask.services.get("fetch")
    engines, (queues, fleet, load, failures, crons, lag, shards), runs, _ = await asyncio.gather(
        _engines(ask),
        asyncio.gather(
            _seen(ask, "jobs:read", jobs.queues),
            _seen(ask, "jobs:read", jobs.fleet.state),
            _seen(ask, "jobs:read", jobs.fleet.load),
            _seen(ask, "jobs:read", jobs.fleet.failures),
            _seen(ask, "jobs:read", jobs.crons.all),
            _seen(ask, "views:read", views.analytics.lag),
            _seen(ask, "feed:read", feed.index.stats),
        ),
        _runs(ask, fetch),
        ask.rates.read(),
    )
    rates = ask.rates
    wrong = [
        *wrongs.wrong_engines(engines),
        *wrongs.unread(
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
        *wrongs.wrong_failures(failures),
        *wrongs.wrong_roles(rates.gone()),
        *wrongs.wrong_fleet(fleet),
        *wrongs.wrong_queues(queues),
        *wrongs.wrong_crons(crons),
        *wrongs.wrong_runs(runs),
        *wrongs.wrong_lags(lag, systems.sweep_lag_s(rates)),
    ]
    return OverviewView(
        systems=[
            systems.jobs_card(rates, queues, fleet),
            systems.fetch_card(rates, runs),
            systems.views_card(rates, lag),
            systems.feed_card(rates, shards),
            systems.media_card(rates, is_installed="media" in ask.services),
        ],
        health=health_of(wrong),
        wrongs=wrong[:WRONGS_SHOWN],
        wrongs_left=len(wrong[WRONGS_SHOWN:]),
        engines=engines,
        load=load,
        ended=_chart(ask, load, "jobs/min", (("done", "done", ""), ("failed", "failed", "bad"))),
        waits=_chart(ask, load, "s", (("longest wait", "wait_max_s", "warn"),), idle=None),
    )


def health_of(problems: Sequence[Wrong]) -> tuple[str, str]:
    """What all problems together mean: red with any fault, yellow with warnings alone."""
    bad = sum(one.tone == "bad" for one in problems)
    if bad:
        return shown.counted(bad, "problem", "problems"), "bad"
    if problems:
        return shown.counted(len(problems), "warning", "warnings"), "warn"
    return "no problems detected", "good"


async def _engines(ask: Ask) -> dict[str, str | None]:
    """By engine why it does not answer; None: it does."""
    checks = checks_of(ask.house)
    found = await asyncio.gather(*(attempt(check()) for check in checks.values()))
    return {name: one.error for name, one in zip(checks, found, strict=True)}


async def _runs(ask: Ask, fetch: Any) -> Found[list[Any]] | None:
    if fetch is None:
        return None
    return await _seen(ask, "fetch:read", partial(fetch.runs, runs_max=RUNS_LOOKED_AT))


async def _seen(ask: Ask, scope: str, call: Callable[[], Awaitable[Any]]) -> Found[Any]:
    """What `call` gives, to those who may see it."""
    if not ask.may(scope):
        return Found(error=f"your token lacks the scope {scope}", is_hidden=True)
    return await attempt(call())


def _chart(
    ask: Ask,
    load: Found[FleetLoad],
    unit: str,
    lines: Sequence[tuple[str, str, str]],
    *,
    idle: int | None = 0,
) -> Chart:
    """The last hour by minute; a minute without a row had no work, which is `idle`."""
    # The minute that is under way would look like a fall.
    this = int(ask.now_at.timestamp()) // MINUTE_S * MINUTE_S
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
