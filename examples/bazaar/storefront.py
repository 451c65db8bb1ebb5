"""What all pages of the site share: templates, the visitor's cookie, the policy of the pages.

What sellers wrote is shown as text, whatever it holds: templates escape everything, and the page's
policy runs no script but the site's own. Every page works without scripts, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from examples.bazaar.adverts import VARIANT_WIDTHS, Advert, Adverts, Photo, variant_key
from examples.bazaar.followers import post_of
from examples.bazaar.records import Records
from examples.bazaar.scenes import CATEGORIES
from examples.bazaar.shops import shop_named
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Request, Response
from litestar.datastructures import Cookie
from litestar.exceptions import PermissionDeniedException

from headrace import Headrace
from headrace.kernel.errors import HeadraceError

FOLLOWED_MAX: Final = 1_000
FOLLOWED_FIRST: Final = 6
"""So many sellers a new visitor follows, so that the feed is not empty."""
HUES: Final = 8
BUYER_COOKIE: Final = "bazaar_buyer"
TOUR_COOKIE: Final = "bazaar_tour"
_BUYER: Final = re.compile(r"buyer-[0-9a-f]{16}")
_FOLDER: Final = Path(__file__).parent
ASSETS: Final = {
    "shop.css": (_FOLDER / "assets" / "shop.css").read_bytes(),
    "live.js": (_FOLDER / "assets" / "live.js").read_bytes(),
}
_POLICY: Final = (
    "default-src 'none'; style-src 'self'; img-src {media}; media-src {media};"
    " script-src 'self'; connect-src 'self'; form-action 'self' {console};"
    " frame-ancestors 'none'; base-uri 'none'"
)
Asked = Request[Any, Any, Any]
Page = Response[Any]


@dataclass(frozen=True, slots=True)
class Card:
    """An advert in a list, with its views, if they are known."""

    advert: Advert
    views: int | None
    photo: Photo | None
    has_variants: bool


class Shop:
    """What the pages are made of."""

    def __init__(self, headrace: Headrace, adverts: Adverts, records: Records) -> None:
        self.headrace, self.adverts, self.records = headrace, adverts, records
        host, port = headrace.config.sections["web"].listen
        self.console = f"http://{host}:{port}/console"
        self._templates = Environment(
            loader=FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        url = headrace.media.objects.url
        self._templates.globals.update(
            media=url,
            variant=lambda photo, width: url(variant_key(photo, width)),
            widths=VARIANT_WIDTHS,
            item_path=item_path,
            post_of=post_of,
            categories=CATEGORIES,
            console=self.console,
        )
        self._templates.filters.update(
            segment=segment,
            title_of=title_of,
            hue=hue_of,
            initials=initials_of,
            ago=ago,
            outcome_text=outcome_text,
        )
        media = urlsplit(url("photos"))
        address = urlsplit(self.console)
        self._policy = _POLICY.format(
            media=f"{media.scheme}://{media.netloc}",
            console=f"{address.scheme}://{address.netloc}",
        )

    def page(self, request: Asked, template: str, *, status: int = 200, **values: Any) -> Page:
        """A page of `template`, and the cookie of a buyer who was just welcomed."""
        from examples.bazaar.tour import step_of

        values = {"text": "", **values}
        values |= {"path": request.scope["path"], "status": status, "tour": step_of(request)}
        values.setdefault("words", "")
        text = self._templates.get_template(template).render(values)
        headers = {
            "content-security-policy": self._policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "same-origin",
            "cache-control": "no-store",
        }
        buyer = buyer_of(request)
        cookie = Cookie(key=BUYER_COOKIE, value=buyer, httponly=True, samesite="lax", path="/")
        is_new = "is_welcome" in request.state
        return Response(
            text,
            status_code=status,
            media_type="text/html",
            headers=headers,
            cookies=[cookie] if is_new else [],
        )

    async def cards(self, adverts: Iterable[Advert]) -> list[Card]:
        """The adverts, each with its views. Without Headrace, views are unknown."""
        shown = list(adverts)
        totals: list[int | None] = [None] * len(shown)
        with contextlib.suppress(HeadraceError):
            posts = [post_of(one.shop, one.item) for one in shown]
            totals = [one.total for one in await self.headrace.views.totals(posts)]
        variants = await asyncio.to_thread(self.adverts.variants)
        photos = [next((one for one in ad.photos if one.key), None) for ad in shown]
        return [
            Card(advert, views, photo, photo is not None and photo.key in variants)
            for advert, views, photo in zip(shown, totals, photos, strict=True)
        ]

    async def cards_of_posts(self, posts: Iterable[Any]) -> list[Card]:
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

    async def welcome(self, request: Asked) -> None:
        """Let a new visitor follow some sellers, so that there is a feed from the start.

        Before there are sellers, or while they cannot be followed, a visitor stays new.
        """
        if buyer_of(request) == request.cookies.get(BUYER_COOKIE):
            return
        sellers = sorted({one.shop for one in await asyncio.to_thread(self.adverts.shown)})
        if sellers:
            chosen = sellers[:: max(1, len(sellers) // FOLLOWED_FIRST)][:FOLLOWED_FIRST]
            with contextlib.suppress(HeadraceError):
                await self.headrace.feed.follow(buyer_of(request), chosen)
                request.state.is_welcome = True


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


def item_path(advert: Any) -> str:
    """Where the page of an advert, or of a piece of news, is."""
    return f"/items/{segment(advert.shop)}/{segment(advert.item)}"


def segment(text: str) -> str:
    """`text` as one part of a path."""
    return quote(text, safe="")


def title_of(seller: str) -> str:
    """The seller's name as people write it."""
    shop = shop_named(seller)
    return shop.title if shop else seller


def outcome_text(outcome: str) -> str:
    """Whether Headrace refused a photo or the seller's host did not deliver it."""
    kind, _, reason = outcome.partition(":")
    reason = reason.replace("_", " ")
    if kind == "refused":
        return f"Headrace refused it ({reason})"
    if kind == "failed":
        return f"the seller's host did not deliver it ({reason})"
    return kind or "not requested yet"


def initials_of(seller: str) -> str:
    """Two letters of the seller's name."""
    words = re.findall(r"\w+", title_of(seller))
    return "".join(word[0] for word in words[:2]).upper()


def hue_of(text: str) -> int:
    """The number of a color for `text`."""
    return zlib.crc32(text.encode()) % HUES


def ago(at: float) -> str:
    """How long ago a moment in Unix time was."""
    age_s = int(max(0.0, time.time() - at))
    if age_s < 60:
        return f"{age_s} s ago"
    return f"{age_s // 60} min ago" if age_s < 3600 else f"{age_s // 3600} h ago"
