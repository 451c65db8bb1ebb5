"""Photos and their hosts, catalogue sources, consumers and webhooks."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, Final

from headrace.console.format import format_limit
from headrace.console.model import ROWS_SHOWN
from headrace.console.views import Chart, Line, PanelData, ViewContext, attempt, choices
from headrace.fetch.consumers import HOOK
from headrace.fetch.host_stats import HOST_KEPT_S
from headrace.fetch.i18n import Texts
from headrace.fetch.model import Host, ItemPhoto, Source, Webhook
from headrace.fetch.outcomes import count_bad
from headrace.fetch.study import DOWNLOADS_MIN, Study
from headrace.kernel.routes import PAGE_ROWS_MAX

RESULTS_LOOKED_AT: Final = 60
PHOTOS_SHOWN: Final = 90
"""Photos of a page of the wall; those of its last item may be more."""
EXAMPLES_MAX: Final = 12
SHOWN: Final = ("all", "stored", "broken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A photo on the wall; without a key no copy is stored, and `text` explains why."""

    photo: ItemPhoto
    customer: str
    item: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLine:
    """A host with derived figures."""

    host: Host
    share_bad: float | None
    classes: list[tuple[str, float]]
    """Share of recent photos by sufficient timeout class, fastest first."""


async def view_wall(context: ViewContext) -> dict[str, Any]:
    """Photos of recent results, of one customer or of all."""
    customer = context.query.text("customer", most=128)
    show = context.query.choice("show", SHOWN, "all")
    before = context.query.number("before", 0) or None
    found = await attempt(
        context.fetch.items.newest_results,
        cursor=before,
        results_max=RESULTS_LOOKED_AT + 1,
        customer=customer or None,
        from_at=context.query.moment("from"),
        to_at=context.query.moment("to"),
    )
    tiles: list[Tile] | None = None
    more = None
    if found.value is not None:
        texts = Texts.load(config=context.fetch.config)
        tiles, taken = [], 0
        for result in found.value[:RESULTS_LOOKED_AT]:
            taken += 1
            tiles += [
                Tile(
                    photo=photo,
                    customer=result.customer,
                    item=result.id,
                    text=texts.outcome(photo.outcome),
                )
                for photo in result.photos
                if show == "all" or (show == "stored") == (photo.key is not None)
            ]
            if len(tiles) >= PHOTOS_SHOWN:
                break
        _, more = context.cut(found.value, taken, before="seq")
    return {
        "tiles": PanelData(tiles, found.error),
        "customer": customer,
        "from_at": context.query.text("from"),
        "to_at": context.query.text("to"),
        "show": show,
        "shows": choices(SHOWN),
        "more": more,
    }


async def view_why(context: ViewContext) -> dict[str, Any]:
    """The status of a photo URL."""
    url = context.query.text("url", most=2_048).strip()
    report = await attempt(context.fetch.links.why, url) if url else None
    examples = [] if url else await _photo_examples(context)
    return {"url": url, "quoted": shlex.quote(url), "report": report, "examples": examples}


async def _photo_examples(context: ViewContext) -> list[str]:
    """URLs of photos of the newest results, those without a stored copy first."""
    found = await attempt(context.fetch.items.newest_results, results_max=RESULTS_LOOKED_AT)
    photos = [photo for result in found.value or () for photo in result.photos]
    photos.sort(key=lambda photo: photo.key is not None)
    return list(dict.fromkeys(photo.url for photo in photos))[:EXAMPLES_MAX]


HOST_SORTS: Final[Mapping[str, Callable[[HostLine], float]]] = {
    "errors": lambda line: line.share_bad or 0.0,
    "requests": lambda line: line.host.requests,
    "slow": lambda line: line.host.mean_s or 0.0,
}
"""Orders of hosts other than by name, greatest first."""


async def view_hosts(context: ViewContext) -> dict[str, Any]:
    """Photo hosts: all, those of one customer, or one host.

    Other orders than by name are those of the first PAGE_ROWS_MAX hosts.
    """
    fetch = context.fetch
    customer, host = (
        context.query.text("customer", most=128),
        context.query.text("host", most=255).strip(),
    )
    sort = context.query.choice("sort", ("name", *HOST_SORTS), "name")
    after = (context.query.text("after_host"), context.query.text("after_customer"))
    hosts_max = ROWS_SHOWN + 1 if sort == "name" else PAGE_ROWS_MAX
    if host:
        found = await attempt(fetch.hosts.get, host)
    else:
        found = await attempt(
            fetch.hosts.page, customer=customer or None, after=after, hosts_max=hosts_max
        )
    lines, more = None, None
    if found.value is not None:
        hosts: Sequence[Host] = found.value
        if not host and sort == "name":
            hosts, more = context.cut(
                hosts, ROWS_SHOWN, after_host="host", after_customer="customer"
            )
        lines = [host_line(one) for one in hosts if customer in ("", one.customer)]
        if sort != "name":
            lines = sorted(lines, key=HOST_SORTS[sort], reverse=True)[:ROWS_SHOWN]
    return {
        "hosts": PanelData(lines, found.error),
        "customer": customer,
        "host": host,
        "sort": sort,
        "is_part": sort != "name" and len(found.value or ()) >= PAGE_ROWS_MAX,
        "sorted_max": PAGE_ROWS_MAX,
        "kept_s": HOST_KEPT_S,
        "more": more,
    }


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


async def view_study(context: ViewContext) -> dict[str, Any]:
    """Download times of all hosts, errors per class and week, and a proposal of classes."""
    weeks = context.query.choice("weeks", SPANS, SPANS[0])
    found = await attempt(context.fetch.study, weeks=int(weeks))
    study = found.value
    if study is None:
        return {"study": found, "weeks": weeks, "spans": SPANS}
    times = study.times
    return {
        "study": found,
        "weeks": weeks,
        "times": Chart(
            xs=list(range(len(times))),
            unit="",
            lines=[Line("downloads", [one.downloads for one in times])],
            kind="bars",
            labels=[f"up to {one.up_to_s:g} s" for one in times],
        ),
        "errors": errors_chart(study),
        "first_week": study.weeks[0].week if len({one.week for one in study.weeks}) == 1 else None,
        "spans": SPANS,
        "downloads_min": DOWNLOADS_MIN,
    }


def errors_chart(study: Study) -> Chart:
    """Percentage of failed and refused attempts: of a first week by class, later by week."""
    unit = "% of attempts"
    weeks = sorted({one.week for one in study.weeks})
    by_class: dict[str, dict[date, float]] = {}
    for one in study.weeks:
        by_class.setdefault(format_limit(one.time_class), {})[one.week] = (
            100 * one.errors / one.attempts
        )
    if len(weeks) <= 1:
        rates = [rate for of in by_class.values() for rate in of.values()]
        return Chart(
            xs=list(range(len(by_class))),
            unit=unit,
            lines=[Line("errors", rates)],
            kind="bars",
            labels=list(by_class),
        )
    # A week without attempts is a gap.
    count = (weeks[-1] - weeks[0]).days // 7 + 1
    every = [weeks[0] + timedelta(weeks=number) for number in range(count)]
    return Chart(
        xs=list(range(count)),
        unit=unit,
        lines=[Line(name, [of.get(week) for week in every]) for name, of in by_class.items()],
        labels=[f"{week:%Y-%m-%d}" for week in every],
    )


WAITING_COUNTED: Final = 10_000


async def view_sources(context: ViewContext) -> dict[str, Any]:
    """Catalogue sources, by customer."""
    after = context.query.text("after", most=128)
    found = await attempt(context.fetch.sources.all)
    following = sorted(
        (one for one in found.value or () if one.customer > after), key=lambda one: one.customer
    )
    shown, more = context.cut(following, ROWS_SHOWN, after="customer")
    lines = [(one, *source_state(one)) for one in shown]
    return {"sources": PanelData(lines, found.error), "more": more}


async def view_deliveries(context: ViewContext) -> dict[str, Any]:
    """Consumers and webhooks with their backlogs."""
    fetch = context.fetch
    after = context.query.text("after", most=128)
    consumers, webhooks = await asyncio.gather(
        attempt(fetch.consumers.all),
        attempt(fetch.webhooks.list, after=after, webhooks_max=ROWS_SHOWN + 1),
    )
    shown, more = context.cut(webhooks.value or (), ROWS_SHOWN, after="customer")
    lines = [(webhook, *webhook_state(webhook, context.now_at)) for webhook in shown]
    return {
        "consumers": consumers,
        "check": HOOK,
        "webhooks": PanelData(lines, webhooks.error),
        "more": more,
        "waiting_counted": WAITING_COUNTED,
    }


def source_state(source: Source) -> tuple[str, str]:
    """The state of a source, and its tone."""
    if source.next_at is None:
        return "paused", "warn"
    if source.outcome is None:
        return "not imported yet", ""
    kind = source.outcome.partition(":")[0]
    return source.outcome, {"failed": "bad", "refused": "bad", "held": "warn"}.get(kind, "good")


def webhook_state(webhook: Webhook, now_at: datetime) -> tuple[str, str]:
    """The state of a webhook, and its tone."""
    if webhook.disabled_at is not None:
        return "disabled", "bad"
    if webhook.failures:
        return "failing", "bad"
    if webhook.waiting and webhook.next_at is not None and webhook.next_at > now_at:
        return "waiting", "warn"
    return "sending" if webhook.waiting else "up to date", "good"
