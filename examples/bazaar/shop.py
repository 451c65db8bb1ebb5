"""The site's pages for buyers, and all that they need of Headrace: photos and tracks, views, feeds.

    uvicorn examples.bazaar.site:web

Plain HTML made on the server, no script. What sellers wrote is shown as text, whatever it holds:
templates escape everything, and the page's policy lets nothing run on top of that. A buyer is a
cookie.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from examples.bazaar.adverts import MODERATED, Advert, Adverts
from examples.bazaar.followers import post_of
from examples.bazaar.tracks import TRACKS, track_named
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Litestar, Request, Response, get, post
from litestar.datastructures import Cookie
from litestar.di import NamedDependency, Provide
from litestar.exceptions import HTTPException, NotFoundException, PermissionDeniedException
from litestar.params import FromPath, FromQuery
from litestar.response import Redirect

from headrace import Headrace
from headrace.jobs import TakenOutcome
from headrace.kernel.errors import HeadraceError

PER_PAGE: Final = 24
FEED_POSTS: Final = 48
FOLLOWED_MAX: Final = 1_000
BUYER_COOKIE: Final = "bazaar_buyer"
MODERATION_S: Final = 120.0
_BUYER: Final = re.compile(r"buyer-[0-9a-f]{16}")
_FOLDER: Final = Path(__file__).parent
_STYLES: Final = (_FOLDER / "assets" / "shop.css").read_bytes()
_POLICY: Final = (
    "default-src 'none'; style-src 'self'; img-src {media}; media-src {media};"
    " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
Asked = Request[Any, Any, Any]
Page = Response[Any]


class Shop:
    """What the pages are made of."""

    def __init__(self, headrace: Headrace, adverts: Adverts) -> None:
        self.headrace, self.adverts = headrace, adverts
        self._templates = Environment(
            loader=FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals.update(media=headrace.media.objects.url, item_path=item_path)
        self._templates.filters.update(segment=segment)
        media = urlsplit(headrace.media.objects.url("photos"))
        self._policy = _POLICY.format(media=f"{media.scheme}://{media.netloc}")

    async def open(self) -> None:
        """Store the tracks; those that are stored already stay what they are."""
        for track in TRACKS:
            await self.headrace.media.objects.put(track.key, await asyncio.to_thread(track.data))

    def page(self, request: Asked, template: str, *, status: int = 200, **values: Any) -> Page:
        """A page of `template`, and the cookie of a buyer who has none yet."""
        values |= {"path": request.scope["path"], "status": status}
        text = self._templates.get_template(template).render(values)
        headers = {
            "content-security-policy": self._policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "same-origin",
            "cache-control": "no-store",
        }
        buyer = buyer_of(request)
        cookie = Cookie(key=BUYER_COOKIE, value=buyer, httponly=True, samesite="lax", path="/")
        is_new = request.cookies.get(BUYER_COOKIE) != buyer
        return Response(
            text,
            status_code=status,
            media_type="text/html",
            headers=headers,
            cookies=[cookie] if is_new else [],
        )

    async def cards(self, adverts: Iterable[Advert]) -> list[tuple[Advert, int | None]]:
        """The adverts, each with its views."""
        shown = list(adverts)
        counted = await self.headrace.views.totals([post_of(one.shop, one.item) for one in shown])
        return [(advert, one.total) for advert, one in zip(shown, counted, strict=True)]

    async def cards_of_posts(self, posts: Iterable[Any]) -> list[tuple[Advert, int | None]]:
        """The adverts of a feed's posts, in its order; without those just taken off the site."""
        shown = await asyncio.to_thread(self.adverts.shown)
        found = {post_of(advert.shop, advert.item): advert for advert in shown}
        return await self.cards(found[one.id] for one in posts if one.id in found)

    async def follows(self, request: Asked) -> list[str]:
        """The sellers that this buyer follows, latest first."""
        if BUYER_COOKIE not in request.cookies:
            return []
        followed = await self.headrace.feed.follows.following(buyer_of(request), FOLLOWED_MAX)
        return [str(person.id) for person in followed.people]


Given = NamedDependency[Shop]


@get("/")
async def show_listing(request: Asked, shop: Given, page: FromQuery[str] = "1") -> Page:
    """All adverts, a page at a time, sellers mixed; what is no number is the first page."""
    adverts = await asyncio.to_thread(shop.adverts.shown)
    adverts.sort(key=lambda advert: (advert.item[::-1], advert.shop))
    pages = max(1, -(-len(adverts) // PER_PAGE))
    number = min(int(page), pages) if re.fullmatch(r"[1-9][0-9]{0,8}", page) else 1
    cards = await shop.cards(adverts[(number - 1) * PER_PAGE : number * PER_PAGE])
    return shop.page(
        request, "listing.html", cards=cards, count=len(adverts), number=number, pages=pages
    )


@get("/items/{seller:str}/{item:path}")
async def show_item(
    request: Asked, shop: Given, seller: FromPath[str], item: FromPath[str]
) -> Page:
    """One advert; that it was opened is counted."""
    advert = await asyncio.to_thread(shop.adverts.find, seller, item.removeprefix("/"))
    if advert is None:
        raise NotFoundException("This advert is not on the site; it may have been sold.")
    # Recorded first: `views` never counts more than the site has requested.
    await asyncio.to_thread(shop.adverts.note_opened)
    entity = post_of(advert.shop, advert.item)
    seen = await shop.headrace.views.hit(entity, viewer=buyer_of(request))
    return shop.page(
        request,
        "item.html",
        advert=advert,
        views=seen.total,
        is_followed=advert.shop in await shop.follows(request),
        verdict=await asyncio.to_thread(shop.adverts.verdict, advert.shop, advert.item),
    )


@get("/sellers/{seller:str}")
async def show_seller(request: Asked, shop: Given, seller: FromPath[str]) -> Page:
    """A seller's adverts, the newest first."""
    posts = (await shop.headrace.feed.pages.author_posts(seller, FEED_POSTS)).posts
    if not posts:
        raise NotFoundException("No seller of this name has anything on the site.")
    followers = (await shop.headrace.feed.follows.followers(seller, 1)).total
    return shop.page(
        request,
        "seller.html",
        seller=seller,
        cards=await shop.cards_of_posts(posts),
        followers=followers,
        is_followed=seller in await shop.follows(request),
    )


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
    sellers = await shop.follows(request)
    posts = (await shop.headrace.feed.page(buyer_of(request), FEED_POSTS)).posts if sellers else []
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
    return shop.page(request, "track.html", track=track, views=seen.total)


@get("/assets/shop.css", sync_to_thread=False)
def get_styles() -> Response[bytes]:
    """What the pages look like."""
    headers = {"cache-control": "max-age=60", "x-content-type-options": "nosniff"}
    return Response(_STYLES, media_type="text/css", headers=headers)


def make_web(headrace: Headrace, adverts: Adverts) -> Litestar:
    """The ASGI app of the pages."""
    shop = Shop(headrace, adverts)

    def render_error(request: Asked, error: Exception) -> Page:
        status, text = _error_page(error)
        return shop.page(request, "error.html", status=status, text=text)

    return Litestar(
        [
            show_listing,
            show_item,
            show_seller,
            change_follow,
            show_moderation,
            decide,
            show_feed,
            show_tracks,
            show_track,
            get_styles,
        ],
        dependencies={"shop": Provide(lambda: shop, sync_to_thread=False)},
        exception_handlers={HTTPException: render_error, HeadraceError: render_error},
        on_startup=[shop.open],
        on_shutdown=[headrace.close],
        openapi_config=None,
        logging_config=None,
    )


def buyer_of(request: Asked) -> str:
    """The visitor's name; a new visitor gets one."""
    known = request.cookies.get(BUYER_COOKIE, "")
    if _BUYER.fullmatch(known):
        return known
    if "buyer" not in request.state:
        request.state.buyer = f"buyer-{secrets.token_hex(8)}"
    buyer: str = request.state.buyer
    return buyer


def require_own_page(request: Asked) -> None:
    """Refuse forms of other sites. Raises: PermissionDeniedException."""
    origin = urlsplit(request.headers.get("origin", "")).netloc
    if not origin or origin != request.headers.get("host"):
        raise PermissionDeniedException("Only this site's own pages may change something here.")


def number_of(text: str) -> int:
    """The id in `text`; 0, which nothing has, for any other text."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0


def item_path(advert: Advert) -> str:
    """Where the advert's page is."""
    return f"/items/{segment(advert.shop)}/{segment(advert.item)}"


def segment(text: str) -> str:
    """`text` as one part of a path."""
    return quote(text, safe="")


def _error_page(error: Exception) -> tuple[int, str]:
    if isinstance(error, HeadraceError):
        return error.status, error.public_text
    assert isinstance(error, HTTPException)
    return error.status_code, error.detail
