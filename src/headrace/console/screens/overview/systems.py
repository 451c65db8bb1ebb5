"""The cards of the five systems: a rate, and what stands beside it. Rates are of this machine's roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.console import shown
from headrace.console.model import PREFIX
from headrace.console.rates import Rates
from headrace.console.seeing import Found
from headrace.jobs.fleet.state import FleetState
from headrace.jobs.model import QueueStatus

MEASURING: Final = "measuring"
OF_FLUSHER: Final = 'role="flusher"'
OF_NODE: Final = 'role="media"'
"""Every role declares these series; only its own count in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A card: `facts` are label and text; `error` why nothing is known."""

    name: str
    title: str
    href: str
    what: str
    """From where to where things go through it."""
    rate: str
    unit: str
    recent: Sequence[float | None]
    """The last rates that somebody looked at."""
    facts: Sequence[tuple[str, str]]
    error: str | None = None
    is_installed: bool = True


def jobs_card(rates: Rates, queues: Found[list[QueueStatus]], fleet: Found[FleetState]) -> System:
    """Jobs: the counts are of the whole fleet, from PostgreSQL."""
    per_s = rates.rate_per_s("jobs_finished_total", 'outcome="done"')
    facts = [("waiting", shown.UNKNOWN), ("in hand", shown.UNKNOWN), ("slots", shown.UNKNOWN)]
    if queues.value is not None:
        capped = any(queue.ready_is_capped for queue in queues.value)
        waiting = shown.count(sum(queue.ready for queue in queues.value))
        facts[0] = ("waiting", f"over {waiting}" if capped else waiting)
        facts[1] = ("in hand", shown.count(sum(queue.leased for queue in queues.value)))
    if fleet.value is not None:
        slots = [slot for host in fleet.value.hosts if not host.is_silent for slot in host.slots]
        busy = sum(slot.busy_s > 0 for slot in slots)
        facts[2] = ("slots busy", f"{busy:,} of {len(slots):,}")
    return System(
        name="jobs",
        title="Jobs",
        href=f"{PREFIX}/jobs",
        what="your code → queues → slots of all hosts",
        rate=_rate(rates, per_s),
        recent=rates.note("jobs", per_s),
        unit="done/s",
        facts=facts,
        error=queues.error or fleet.error,
    )


def fetch_card(rates: Rates, runs: Found[list[Any]] | None) -> System:
    """Fetch: photos decided, and catalogues under way."""
    per_s = rates.rate_per_s("fetch_photos_total")
    under_way = shown.UNKNOWN
    if runs is not None and runs.value is not None:
        under_way = shown.count(sum(run.ended_at is None for run in runs.value))
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
            ("runs under way", under_way),
        ],
        error=None if runs is None else runs.error,
        is_installed=runs is not None,
    )


def views_card(rates: Rates, lag: Found[list[Any]]) -> System:
    """Views: hits counted, and how far behind the flush is."""
    per_s = rates.rate_per_s("views_hits_total", 'outcome="counted"')
    oldest, pending = shown.UNKNOWN, shown.UNKNOWN
    if lag.value is not None:
        oldest = shown.seconds(max((shard.oldest_s for shard in lag.value), default=0.0))
        pending = shown.count(sum(shard.pending for shard in lag.value))
    return System(
        name="views",
        title="Views",
        href=f"{PREFIX}/views",
        what="visitors → totals, series, tops",
        rate=_rate(rates, per_s),
        recent=rates.note("views", per_s),
        unit="hits/s",
        facts=[("behind by", oldest), ("calls not flushed", pending)],
        error=lag.error,
    )


def feed_card(rates: Rates, shards: Found[Any]) -> System:
    """Feed: pages read, and whether the index is whole."""
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
            ("sweep behind by", shown.seconds(sweep_lag_s(rates))),
        ],
        error=shards.error,
    )


def media_card(rates: Rates, *, is_installed: bool) -> System:
    """Media: answers begun, bytes sent."""
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
            ("connections", shown.count(rates.total("media_connections", OF_NODE))),
        ],
        is_installed=is_installed,
    )


def sweep_lag_s(rates: Rates) -> float | None:
    """How old the oldest change of a feed is that was not swept; None: no flusher of this machine says so."""
    return rates.greatest("feed_sweep_lag_seconds", OF_FLUSHER)


def _rate(rates: Rates, per_s: float | None) -> str:
    if per_s is None:
        return MEASURING if rates.is_measuring else shown.UNKNOWN
    return shown.short(round(per_s, 1) if per_s < 100 else round(per_s))


def _per_s(rates: Rates, per_s: float | None) -> str:
    return _rate(rates, per_s) + ("" if per_s is None else "/s")


def _bytes(rates: Rates, per_s: float | None) -> str:
    return _rate(rates, None) if per_s is None else f"{shown.size(per_s)}/s"
