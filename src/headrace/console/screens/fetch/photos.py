"""Photos: a wall of what was published last, why one is there or not, and the hosts that they come from."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from headrace.console.screens.words import same
from headrace.console.seeing import Ask, Found, attempt
from headrace.fetch.i18n import Texts
from headrace.fetch.model import Host, ItemPhoto, UrlReport

RESULTS_LOOKED_AT: Final = 60
HOSTS_SHOWN: Final = 100
SHOWN: Final = ("all", "stored", "broken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A photo on the wall; without a key there is no good copy, and `text` says why."""

    photo: ItemPhoto
    customer: str
    item: str
    at: datetime
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WallView:
    """Photos of the newest results."""

    tiles: Found[list[Tile]]
    customer: str
    show: str
    shows: Sequence[tuple[str, str]]
    more: str | None
    media_origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyView:
    """Why a photo is there or not; None: no link was given yet."""

    url: str
    quoted: str
    """As a shell takes it."""
    report: Found[UrlReport] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLine:
    """A host with what is worked out of its counts."""

    host: Host
    share_bad: float | None
    classes: list[tuple[str, float]]
    """Of its recent photos the share that each class was enough for, the quickest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsView:
    """Hosts by name."""

    hosts: Found[list[HostLine]]
    customer: str
    host: str
    more: str | None


async def see_wall(ask: Ask) -> WallView:
    """Photos of the newest results, of one customer or of all."""
    customer = ask.query.text("customer", most=128)
    show = ask.query.choice("show", SHOWN, "all")
    before = ask.query.number("before", 0) or None
    found = await attempt(
        ask.service("fetch").newest_results(
            before=before, results_max=RESULTS_LOOKED_AT, customer=customer or None
        )
    )
    tiles, more = None, None
    if found.value is not None:
        texts = Texts.load(config=ask.service("fetch").config)
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
            more = ask.url(before=found.value[-1].seq)
    return WallView(
        tiles=Found(tiles, found.error),
        customer=customer,
        show=show,
        shows=same(SHOWN),
        more=more,
        media_origin=ask.media_origin,
    )


async def see_why(ask: Ask) -> WhyView:
    """Why a photo is there or not."""
    url = ask.query.text("url", most=2_048).strip()
    report = await attempt(ask.service("fetch").why(url)) if url else None
    return WhyView(url=url, quoted=shlex.quote(url), report=report)


async def see_hosts(ask: Ask) -> HostsView:
    """Hosts that photos were asked of: all, those of a customer's links, or one."""
    fetch = ask.service("fetch")
    customer, host = ask.query.text("customer", most=128), ask.query.text("host", most=255).strip()
    after = (ask.query.text("after_host"), ask.query.text("after_customer"))
    if host:
        found = await attempt(fetch.host(host))
    else:
        found = await attempt(
            fetch.hosts(customer=customer or None, after=after, hosts_max=HOSTS_SHOWN)
        )
    lines, more = None, None
    if found.value is not None:
        lines = [host_line(one) for one in found.value if customer in ("", one.customer)]
        if not host and len(found.value) == HOSTS_SHOWN:
            last = found.value[-1]
            more = ask.url(after_host=last.host, after_customer=last.customer)
    return HostsView(hosts=Found(lines, found.error), customer=customer, host=host, more=more)


def host_line(host: Host) -> HostLine:
    """A host as a line of the list."""
    photos = sum(host.photos_by_outcome.values())
    bad = sum(
        count
        for outcome, count in host.photos_by_outcome.items()
        if outcome.startswith(("failed:", "refused:"))
    )
    return HostLine(
        host=host,
        share_bad=bad / photos if photos else None,
        classes=[(name, share) for name, share in host.needs.items() if share > 0],
    )
