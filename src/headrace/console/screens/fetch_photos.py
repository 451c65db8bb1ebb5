"""Photos and their hosts, catalogue sources, consumers and webhooks."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time
from typing import Final

from headrace.console.views import Chart, Line, PanelData, ViewContext, attempt, choices
from headrace.fetch.i18n import Texts
from headrace.fetch.model import Consumer, Host, ItemPhoto, Source, UrlReport, Webhook
from headrace.fetch.outcomes import count_bad
from headrace.fetch.study import DOWNLOADS_MIN, Study

RESULTS_LOOKED_AT: Final = 60
HOSTS_SHOWN: Final = 100
SHOWN: Final = ("all", "stored", "broken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A photo on the wall; without a key no copy is stored, and `text` explains why."""

    photo: ItemPhoto
    customer: str
    item: str
    at: datetime
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WallView:
    """Data of the photo wall."""

    tiles: PanelData[list[Tile]]
    customer: str
    show: str
    shows: Sequence[tuple[str, str]]
    more: str | None
    media_origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyView:
    """Status of a photo; `report` is None until a URL is entered."""

    url: str
    quoted: str
    """The URL, quoted for a shell."""
    report: PanelData[UrlReport] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLine:
    """A host with derived figures."""

    host: Host
    share_bad: float | None
    classes: list[tuple[str, float]]
    """Share of recent photos by sufficient timeout class, fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsView:
    """Data of the hosts page."""

    hosts: PanelData[list[HostLine]]
    customer: str
    host: str
    more: str | None


async def view_wall(context: ViewContext) -> WallView:
    """Photos of recent results, of one customer or of all."""
    customer = context.query.text("customer", most=128)
    show = context.query.choice("show", SHOWN, "all")
    before = context.query.number("before", 0) or None
    found = await attempt(
        context.fetch.items.newest_results(
            before=before, results_max=RESULTS_LOOKED_AT, customer=customer or None
        )
    )
    tiles, more = None, None
    if found.value is not None:
        texts = Texts.load(config=context.fetch.config)
        tiles = [
            Tile(
                photo=photo,
                customer=result.customer,
                item=result.id,
                at=result.at,
                text=texts.outcome(photo.outcome),
            )
            for result in found.value
            for photo in result.photos
            if show == "all" or (show == "stored") == (photo.key is not None)
        ]
        if len(found.value) == RESULTS_LOOKED_AT:
            more = context.url(before=found.value[-1].seq)
    return WallView(
        tiles=PanelData(tiles, found.error),
        customer=customer,
        show=show,
        shows=choices(SHOWN),
        more=more,
        media_origin=context.media_origin,
    )


async def view_why(context: ViewContext) -> WhyView:
    """The status of a photo URL."""
    url = context.query.text("url", most=2_048).strip()
    report = await attempt(context.fetch.links.why(url)) if url else None
    return WhyView(url=url, quoted=shlex.quote(url), report=report)


async def view_hosts(context: ViewContext) -> HostsView:
    """Photo hosts: all, those of one customer, or one host."""
    fetch = context.fetch
    customer, host = (
        context.query.text("customer", most=128),
        context.query.text("host", most=255).strip(),
    )
    after = (context.query.text("after_host"), context.query.text("after_customer"))
    if host:
        found = await attempt(fetch.hosts.get(host))
    else:
        found = await attempt(
            fetch.hosts.page(customer=customer or None, after=after, hosts_max=HOSTS_SHOWN)
        )
    lines, more = None, None
    if found.value is not None:
        lines = [host_line(one) for one in found.value if customer in ("", one.customer)]
        if not host and len(found.value) == HOSTS_SHOWN:
            last = found.value[-1]
            more = context.url(after_host=last.host, after_customer=last.customer)
    return HostsView(hosts=PanelData(lines, found.error), customer=customer, host=host, more=more)


def host_line(host: Host) -> HostLine:
    """A host with derived figures."""
    photos = sum(host.photos_by_outcome.values())
    bad = count_bad(host.photos_by_outcome)
    return HostLine(
        host=host,
        share_bad=bad / photos if photos else None,
        classes=[(name, share) for name, share in host.needs.items() if share > 0],
    )


SPANS: Final = ("4", "12", "26", "57")
"""Weeks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyView:
    """Download times with their charts."""

    study: PanelData[Study]
    weeks: str
    times: Chart
    errors: Chart
    spans: Sequence[str] = SPANS
    downloads_min: int = DOWNLOADS_MIN


async def view_study(context: ViewContext) -> StudyView:
    """Download times of all hosts, errors per class and week, and a proposal of classes."""
    weeks = context.query.choice("weeks", SPANS, SPANS[0])
    found = await attempt(context.fetch.study(weeks=int(weeks)))
    study = found.value
    times = study.times if study else []
    return StudyView(
        study=found,
        weeks=weeks,
        times=Chart(
            xs=list(range(len(times))),
            unit="downloads by time",
            lines=[Line("downloads", [one.downloads for one in times])],
            kind="bars",
            labels=[f"{one.up_to_s:g} s" for one in times],
        ),
        errors=errors_chart(study) if study else Chart(xs=[], lines=[]),
    )


def errors_chart(study: Study) -> Chart:
    """Percentage of failed and refused attempts by week, a line per class."""
    weeks = sorted({one.week for one in study.weeks})
    by_class: dict[str, dict[object, float]] = {}
    for one in study.weeks:
        by_class.setdefault(one.time_class, {})[one.week] = 100 * one.errors / one.attempts
    return Chart(
        xs=[datetime.combine(week, time(), UTC).timestamp() for week in weeks],
        unit="% of attempts",
        lines=[Line(name, [of.get(week) for week in weeks]) for name, of in by_class.items()],
    )


WEBHOOKS_SHOWN: Final = 200
WAITING_COUNTED: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A source with its state."""

    source: Source
    tone: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcesView:
    """Data of the sources page."""

    sources: PanelData[list[SourceLine]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookLine:
    """A webhook with its state."""

    webhook: Webhook
    tone: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveriesView:
    """Data of the deliveries page."""

    consumers: PanelData[list[Consumer]]
    webhooks: PanelData[list[WebhookLine]]
    more: str | None
    waiting_counted: int


async def view_sources(context: ViewContext) -> SourcesView:
    """Every catalogue source."""
    found = await attempt(context.fetch.sources.all())
    lines = None if found.value is None else [source_line(source) for source in found.value]
    return SourcesView(sources=PanelData(lines, found.error))


async def view_deliveries(context: ViewContext) -> DeliveriesView:
    """Consumers and webhooks with their backlogs."""
    fetch = context.fetch
    after = context.query.text("after", most=128)
    consumers, webhooks = await asyncio.gather(
        attempt(fetch.consumers.all()),
        attempt(fetch.webhooks.list(after=after, webhooks_max=WEBHOOKS_SHOWN)),
    )
    lines, more = None, None
    if webhooks.value is not None:
        lines = [webhook_line(webhook, context.now_at) for webhook in webhooks.value]
        if len(webhooks.value) == WEBHOOKS_SHOWN:
            more = context.url(after=webhooks.value[-1].customer)
    return DeliveriesView(
        consumers=consumers,
        webhooks=PanelData(lines, webhooks.error),
        more=more,
        waiting_counted=WAITING_COUNTED,
    )


def source_line(source: Source) -> SourceLine:
    """A source with its state."""
    if source.next_at is None:
        return SourceLine(source=source, tone="warn", state="paused")
    if source.outcome is None:
        return SourceLine(source=source, tone="", state="not imported yet")
    kind = source.outcome.partition(":")[0]
    tone = {"failed": "bad", "refused": "bad", "held": "warn"}.get(kind, "good")
    return SourceLine(source=source, tone=tone, state=source.outcome)


def webhook_line(webhook: Webhook, now_at: datetime) -> WebhookLine:
    """A webhook with its state."""
    if webhook.disabled_at is not None:
        return WebhookLine(webhook=webhook, tone="bad", state="disabled")
    if webhook.failures:
        return WebhookLine(webhook=webhook, tone="bad", state="failing")
    if webhook.waiting and webhook.next_at is not None and webhook.next_at > now_at:
        return WebhookLine(webhook=webhook, tone="warn", state="waiting")
    return WebhookLine(
        webhook=webhook, tone="good", state="sending" if webhook.waiting else "up to date"
    )
