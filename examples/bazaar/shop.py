"""The site's pages for buyers, and all that they need of Headrace: photos and tracks, views, feeds.

    uvicorn examples.bazaar.site:web

Plain HTML made on the server; one small script moves the counters. A buyer is a cookie.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any, Final

from examples.bazaar.adverts import MODERATED, Adverts
from examples.bazaar.followers import post_of
from examples.bazaar.panel import break_it, open_console, show_ledger, show_panel
from examples.bazaar.pictures import cover
from examples.bazaar.records import Records
from examples.bazaar.scenes import CATEGORIES
from examples.bazaar.shops import shop_named
from examples.bazaar.storefront import (
    ASSETS,
    BUYER_COOKIE,
    FOLLOWED_MAX,
    Asked,
    Page,
    Shop,
    buyer_of,
    number_of,
    require_own_page,
    segment,
)
from examples.bazaar.tour import turn_tour
from examples.bazaar.tracks import TRACKS, track_named
from litestar import Litestar, Response, get, post
from litestar.di import NamedDependency, Provide
from litestar.exceptions import HTTPException, NotFoundException, PermissionDeniedException
from litestar.params import FromPath, FromQuery
from litestar.response import Redirect

from headrace import Headrace
from headrace.jobs import TakenOutcome
from headrace.kernel.errors import HeadraceError

PER_PAGE: Final = 24
FEED_POSTS: Final = 48
NEWS: Final = 6
RELATED: Final = 4
LIVE_IDS: Final = 60
MODERATION_S: Final = 120.0
Given = NamedDependency[Shop]


@get("/")
async def show_listing(
    request: Asked,
    shop: Given,
    page: FromQuery[str] = "1",
    q: FromQuery[str] = "",
    category: FromQuery[str] = "",
) -> Page:
    """Adverts, a page at a time, sellers mixed: all, those of a category, those with words."""
    await shop.welcome(request)
    q = q.strip()[:200]
    adverts = await asyncio.to_thread(lambda: shop.adverts.search(q) if q else shop.adverts.shown())
    if category in CATEGORIES:
        adverts = [advert for advert in adverts if advert.category == category]
    adverts.sort(key=lambda advert: (advert.item[::-1], advert.shop))
    pages = max(1, -(-len(adverts) // PER_PAGE))
    # What is no number is the first page.
    number = min(int(page), pages) if re.fullmatch(r"[1-9][0-9]{0,8}", page) else 1
    cards = await shop.cards(adverts[(number - 1) * PER_PAGE : number * PER_PAGE])
    is_front = number == 1 and not q and not category
    return shop.page(
        request,
        "listing.html",
        cards=cards,
        count=len(adverts),
        number=number,
        pages=pages,
        words=q,
        category=category if category in CATEGORIES else "",
        news=await asyncio.to_thread(shop.adverts.news, NEWS) if is_front else [],
    )


@get("/items/{seller:str}/{item:path}")
async def show_item(
    request: Asked, shop: Given, seller: FromPath[str], item: FromPath[str]
) -> Page:
    """One advert; that it was opened is counted."""
    await shop.welcome(request)
    advert = await asyncio.to_thread(shop.adverts.find, seller, item.removeprefix("/"))
    if advert is None:
        raise NotFoundException("This advert is not on the site; its seller may have removed it.")
    # Recorded first: `views` never counts more than the site has requested.
    await asyncio.to_thread(shop.adverts.note_opened)
    entity = post_of(advert.shop, advert.item)
    seen = await shop.headrace.views.hit(entity, viewer=buyer_of(request))
    await asyncio.to_thread(shop.adverts.note_opened, is_counted=True)
    others = [one for one in await asyncio.to_thread(shop.adverts.shown) if one != advert]
    alike = [one for one in others if one.category == advert.category and advert.category]
    alike.sort(key=lambda one: (one.shop != advert.shop, one.item[::-1]))
    return shop.page(
        request,
        "item.html",
        advert=advert,
        entity=entity,
        views=seen.total,
        is_followed=advert.shop in await shop.follows(request),
        verdict=await asyncio.to_thread(shop.adverts.verdict, advert.shop, advert.item),
        variants=await asyncio.to_thread(shop.adverts.variants),
        related=await shop.cards(alike[:RELATED]),
    )


@get("/sellers")
async def show_sellers(request: Asked, shop: Given) -> Page:
    """All sellers that have something on the site, with the character of their hosts."""
    await shop.welcome(request)
    counts = Counter(one.shop for one in await asyncio.to_thread(shop.adverts.shown))
    rows = [(shop_named(name), name, count) for name, count in counts.items()]
    rows.sort(key=lambda row: (row[0].manner == "fast" if row[0] else True, row[1]))
    return shop.page(request, "sellers.html", rows=rows)


@get("/sellers/{seller:str}")
async def show_seller(request: Asked, shop: Given, seller: FromPath[str]) -> Page:
    """A seller's adverts, the newest first, and how Headrace copes with its host."""
    await shop.welcome(request)
    posts = (await shop.headrace.feed.pages.author_posts(seller, FEED_POSTS)).posts
    if not posts:
        raise NotFoundException("No seller of this name has anything on the site.")
    followers = (await shop.headrace.feed.follows.followers(seller, 1)).total
    return shop.page(
        request,
        "seller.html",
        seller=seller,
        known=shop_named(seller),
        hosts=await hosts_of(shop, seller),
        cards=await shop.cards_of_posts(posts),
        followers=followers,
        is_followed=seller in await shop.follows(request),
    )


async def hosts_of(shop: Shop, seller: str) -> list[Any]:
    """What Headrace measured of the seller's hosts; none, if it has no catalogue of it."""
    try:
        return await shop.headrace.fetch.hosts.page(customer=seller)
    except HeadraceError:
        return []


@get("/live")
async def get_live(shop: Given, ids: FromQuery[str] = "") -> Response[Any]:
    """The totals of some items, for the counters of a page that is open."""
    posts = [one for one in ids.split(",") if one][:LIVE_IDS]
    totals = await shop.headrace.views.totals(posts) if posts else []
    found = {post: one.total for post, one in zip(posts, totals, strict=True)}
    return Response(found, headers={"cache-control": "no-store"})


@post(["/sellers/{seller:str}/follow", "/sellers/{seller:str}/unfollow"], status_code=303)
async def change_follow(request: Asked, shop: Given, seller: FromPath[str]) -> Page:
    """Follow or unfollow the seller, and show the seller's page."""
    require_own_page(request)
    if BUYER_COOKIE not in request.cookies:
        raise PermissionDeniedException(
            "Following needs a cookie: allow it, and open a page first."
        )
    feed, buyer = shop.headrace.feed, buyer_of(request)
    if request.scope["path"].endswith("/follow"):
        if not await asyncio.to_thread(shop.adverts.shown, seller):
            raise NotFoundException("No seller of this name has anything on the site.")
        await feed.follow(buyer, seller)
    else:
        await feed.unfollow(buyer, seller)
    return Redirect(f"/sellers/{segment(seller)}", status_code=303)


@get("/moderate")
async def show_moderation(
    request: Asked, shop: Given, lease: FromQuery[str] = "0", job: FromQuery[str] = "0"
) -> Page:
    """The photo that this visitor took, while the lease lasts; else a button that takes one."""
    jobs, found = shop.headrace.jobs, None
    if number_of(job):
        found = await jobs.job(number_of(job))
    if found is None or found.queue != MODERATED or found.lease_id != number_of(lease):
        return shop.page(request, "moderate.html", job=None, is_lost=found is not None)
    return shop.page(request, "moderate.html", job=found, is_lost=False)


@post("/moderate", status_code=303)
async def decide(request: Asked, shop: Given) -> Page:
    """Record this visitor's decision, if there is one, and take the next photo."""
    require_own_page(request)
    form, takes = await request.form(), shop.headrace.jobs.takes
    if "decision" in form:
        outcome = TakenOutcome(decision=str(form["decision"]), by=buyer_of(request))
        lease, job = number_of(str(form.get("lease"))), number_of(str(form.get("job")))
        await takes.ack(lease, {job: outcome})
    taken = await takes.take(MODERATED, lease_s=MODERATION_S)
    query = f"?lease={taken.lease_id}&job={taken.jobs[0].id}" if taken.jobs else ""
    return Redirect(f"/moderate{query}", status_code=303)


@get("/feed")
async def show_feed(request: Asked, shop: Given) -> Page:
    """The newest adverts of the sellers that this buyer follows."""
    await shop.welcome(request)
    buyer = buyer_of(request)
    posts = (await shop.headrace.feed.page(buyer, FEED_POSTS)).posts
    followed = await shop.headrace.feed.follows.following(buyer, FOLLOWED_MAX)
    sellers = [str(person.id) for person in followed.people]
    cards = await shop.cards_of_posts(posts)
    return shop.page(request, "feed.html", sellers=sellers, cards=cards)


@get("/tracks")
async def show_tracks(request: Asked, shop: Given) -> Page:
    """The tracks, each with how often its page was opened."""
    counted = await shop.headrace.views.totals([f"track:{track.name}" for track in TRACKS])
    rows = [(track, one.total) for track, one in zip(TRACKS, counted, strict=True)]
    return shop.page(request, "tracks.html", rows=rows)


@get("/tracks/{name:str}")
async def show_track(request: Asked, shop: Given, name: FromPath[str]) -> Page:
    """A track with a player, which fetches by range what it plays."""
    track = track_named(name)
    if track is None:
        raise NotFoundException("There is no such track.")
    seen = await shop.headrace.views.hit(f"track:{track.name}", viewer=buyer_of(request))
    others = [other for other in TRACKS if other != track]
    return shop.page(request, "track.html", track=track, views=seen.total, others=others)


@get("/assets/{name:str}", sync_to_thread=False)
def get_asset(name: FromPath[str]) -> Response[bytes]:
    """What the pages look like, and the script of the counters."""
    if name not in ASSETS:
        raise NotFoundException("There is no such file.")
    headers = {"cache-control": "max-age=60", "x-content-type-options": "nosniff"}
    kind = "text/css" if name.endswith(".css") else "text/javascript"
    return Response(ASSETS[name], media_type=kind, headers=headers)


async def store_tracks(headrace: Headrace) -> None:
    """Store the tracks with their covers; those that are stored already stay what they are."""
    for track in TRACKS:
        await headrace.media.objects.put(track.key, await asyncio.to_thread(track.data))
        await headrace.media.objects.put(
            track.cover_key, await asyncio.to_thread(cover, track.name)
        )


def make_web(headrace: Headrace, adverts: Adverts, records: Records) -> Litestar:
    """The ASGI app of the pages."""
    shop = Shop(headrace, adverts, records)

    async def store() -> None:
        await store_tracks(headrace)

    def render_error(request: Asked, error: Exception) -> Page:
        status, text, code = _error_page(error)
        return shop.page(request, "error.html", status=status, text=text, code=code)

    return Litestar(
        [
            show_listing,
            show_item,
            show_sellers,
            show_seller,
            change_follow,
            show_moderation,
            decide,
            show_feed,
            show_tracks,
            show_track,
            get_live,
            get_asset,
            turn_tour,
            show_panel,
            show_ledger,
            break_it,
            open_console,
        ],
        dependencies={"shop": Provide(lambda: shop, sync_to_thread=False)},
        exception_handlers={HTTPException: render_error, HeadraceError: render_error},
        on_startup=[store],
        on_shutdown=[headrace.close],
        openapi_config=None,
        logging_config=None,
    )


def _error_page(error: Exception) -> tuple[int, str, str]:
    """Status, text and code; only an error of Headrace has a code."""
    if isinstance(error, HeadraceError):
        return error.status, error.public_text, error.code
    assert isinstance(error, HTTPException)
    return error.status_code, error.detail, ""
