"""Cards of the five rooms on the overview: a live rate with its span, and key facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from headrace.console.format import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_duration,
    format_short,
)
from headrace.console.screens.views import PENDING_COUNTED
from headrace.console.stored import OF_FLUSHER, OF_NODE, StoredMinute
from headrace.console.views import NO_ANSWER, SPAN_S, PanelData, Rates
from headrace.feed.lookup import FeedBacklog
from headrace.fetch.model import FINAL_STATES
from headrace.jobs.fleet.state import FleetState
from headrace.jobs.model import QueueStatus
from headrace.kernel.errors import TO_DOCTOR

FIRST_IMPORT: Final = (
    "headrace fetch customer set SHOP",
    "headrace fetch catalogue run shop.yml --customer SHOP",
)
MEASURING: Final = "measuring"
RUNS_LOOKED_AT: Final = 50
"""The newest runs of catalogues, in which active ones are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A card; `facts` are label and text, `error` explains missing data."""

    name: str
    what: str
    """The flow through the system."""
    rate: str
    unit: str
    span: str = ""
    """Where and when the rate was measured."""
    recent: Sequence[float | None]
    """Recent rates, as read by viewers of the overview; empty for a recorded rate."""
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

    def span(self, per_s: float | None, of: str = "") -> str:
        """Where and when a rate was measured; `of`: the roles. Empty for an unknown rate."""
        if per_s is not None:
            return f"{of}this machine, last {SPAN_S:.0f} s"
        return "" if self._minute is None else f"{of}all hosts, {self._minute.note} UTC"

    def recent(self, name: str, per_s: float | None) -> Sequence[float | None]:
        """Recent measured rates of a card; none if a recorded one is shown."""
        noted = self._rates.note(name, per_s)
        return noted if per_s is not None or self._minute is None else ()

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
        span=given.span(per_s),
        recent=given.recent("jobs", per_s),
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
    label, under_way, is_unused = "active runs", UNKNOWN, False
    if runs is not None and runs.value is not None:
        is_unused = not runs.value and not per_s
        under_way = format_count(sum(run.state not in FINAL_STATES for run in runs.value))
        if len(runs.value) == RUNS_LOOKED_AT:
            label = f"active, of the newest {RUNS_LOOKED_AT} runs"
    return System(
        name="fetch",
        what="sellers' catalogues and photos → items",
        rate="no photos yet" if is_unused else given.text(given.shown(per_s, "fetch_photos")),
        span="" if is_unused else given.span(per_s),
        recent=given.recent("fetch", per_s),
        unit="" if is_unused else "photos/s",
        commands=FIRST_IMPORT if is_unused else (),
        facts=[
            ("received", given.bytes_text(received_per_s)),
            (label, under_way),
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
        calls = sum(shard.pending for shard in lag.value)
        is_capped = any(shard.pending >= PENDING_COUNTED for shard in lag.value)
        pending = format_count(calls) + (" or more" if is_capped else "")
        oldest_s = max((shard.oldest_s for shard in lag.value), default=0.0)
        oldest = format_duration(oldest_s) if calls else "none"
    return System(
        name="views",
        what="visitors → totals, charts, top lists",
        rate=given.text(given.shown(per_s, "views_flushed")),
        span=given.span(per_s, "flushers of "),
        recent=given.recent("views", per_s),
        unit="views stored/s",
        facts=[("calls not yet stored", pending), ("oldest of them", oldest)],
        error=lag.error,
    )


def feed_card(
    rates: Rates, given: RoomRates, shards: PanelData[Any], backlog: PanelData[FeedBacklog]
) -> System:
    """Feed: page rate, change rate and the oldest unconfirmed change of the whole deployment."""
    per_s = rates.rate_per_s("feed_pages_total")
    changes_per_s, oldest = rates.rate_per_s("feed_changes_total"), UNKNOWN
    if backlog.value is not None:
        lag_s = backlog.value.unswept_s
        oldest = format_duration(lag_s) if lag_s else "none"
    # The history has no series of changes.
    changes = [] if rates.is_measuring else [("changes", f"{given.text(changes_per_s)}/s")]
    return System(
        name="feed",
        what="authors' posts → followers' pages",
        rate=given.text(given.shown(per_s, "feed_pages")),
        span=given.span(per_s, "API and jobs of "),
        recent=given.recent("feed", per_s),
        unit="pages/s",
        facts=[
            *changes,
            ("oldest unconfirmed change", oldest),
        ],
        error=shards.error or backlog.error,
    )


def media_card(rates: Rates, given: RoomRates, *, is_installed: bool) -> System:
    """Media: request rate, bytes sent, connections."""
    per_s = rates.rate_per_s("media_requests_total", OF_NODE)
    sent_per_s = given.shown(rates.rate_per_s("media_bytes_total", OF_NODE), "media_bytes")
    clients = rates.total("media_connections", OF_NODE)
    return System(
        name="media",
        what="stored objects → players, by range",
        rate=given.text(given.shown(per_s, "media_requests")),
        span=given.span(per_s),
        recent=given.recent("media", per_s),
        unit="requests/s",
        facts=[
            ("sent", given.bytes_text(sent_per_s)),
            ("connections", "no node here" if clients is None else format_count(clients)),
        ],
        is_installed=is_installed,
    )


def card_error(error: str | None) -> str:
    """The error of a card. Health states remedies, and once for all cards that reads are slow."""
    return "no data, see Health" if error == NO_ANSWER else TO_DOCTOR.sub("", error or "")
