"""Cards of the five systems: a live rate and key facts each.

Rates cover the roles of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.console.format import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_duration,
    format_short,
)
from headrace.console.model import PREFIX
from headrace.console.rates import Rates
from headrace.console.views import PanelData
from headrace.jobs.fleet.facts import FleetState
from headrace.jobs.model import QueueStatus

MEASURING: Final = "measuring"
OF_FLUSHER: Final = 'role="flusher"'
OF_NODE: Final = 'role="media"'
"""Selects the role that counts; every role declares these series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A card; `facts` are label and text, `error` explains missing data."""

    name: str
    title: str
    href: str
    what: str
    """The flow through the system."""
    rate: str
    unit: str
    recent: Sequence[float | None]
    """Recent rates, as read by viewers of the overview."""
    facts: Sequence[tuple[str, str]]
    error: str | None = None
    is_installed: bool = True


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
        title="Jobs",
        href=f"{PREFIX}/jobs",
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
        title="Fetch",
        href=f"{PREFIX}/fetch",
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
        title="Views",
        href=f"{PREFIX}/views",
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
        title="Feed",
        href=f"{PREFIX}/feed",
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
        title="Media",
        href=f"{PREFIX}/media",
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
