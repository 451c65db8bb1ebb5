"""Routes of sellers' pages: the links to them, and the page itself, which needs no token."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody

from headrace.fetch.errors import SellerLinkEnded, SellerLinkUnknown, SellerPageBusy
from headrace.fetch.http.requests import WRITE
from headrace.fetch.i18n import Texts, languages, preferred
from headrace.fetch.model import SellerLink
from headrace.fetch.seller_page import POLICY, message_page
from headrace.fetch.service import Fetch
from headrace.fetch.service.sellers import DAYS, DAYS_MAX
from headrace.kernel.errors import HeadraceError, Unavailable
from headrace.kernel.routes import ANY_QUERY

OPEN: Final = {"scope": None}
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "private, no-store",
    "x-robots-tag": "noindex, nofollow",
    "vary": "accept, accept-language",
}
SENTENCES: Final[dict[type[HeadraceError], str]] = {
    SellerLinkUnknown: "link_unknown",
    SellerLinkEnded: "link_ended",
    SellerPageBusy: "page_busy",
    Unavailable: "page_down",
}
"""Errors that a browser shows as a page, with the sentence of each."""


class SellerLinkLife(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a link is valid."""

    days: Annotated[int, msgspec.Meta(ge=1, le=DAYS_MAX)] = DAYS


@post("/v1/fetch/customers/{customer:str}/seller-link", opt=WRITE, status_code=200)
async def create_fetch_seller_link(
    request: Request[Any, Any, Any],
    fetch: NamedDependency[Fetch],
    customer: FromPath[str],
    data: JSONBody[SellerLinkLife],
) -> SellerLink:
    """Return a new link to the page of a seller; anyone with the link can read it.

    The link begins with `fetch.seller_url`, or else with the address of this request.
    """
    origin = str(request.base_url)
    return await fetch.sellers.link(customer, days=data.days, origin=origin)


@delete("/v1/fetch/customers/{customer:str}/seller-link", opt=WRITE)
async def revoke_fetch_seller_links(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> None:
    """Revoke all links to the page of a seller at once."""
    await fetch.sellers.revoke(customer)


@get("/v1/fetch/sellers/{token:str}", opt={**OPEN, ANY_QUERY: True}, media_type="text/html")
async def get_fetch_seller_page(
    request: Request[Any, Any, Any],
    fetch: NamedDependency[Fetch],
    token: FromPath[str],
    *,
    run: FromQuery[int | None] = None,
    lang: FromQuery[str | None] = None,
) -> Response[bytes]:
    """The page of a seller: last catalogues, their problems, an example of a correct row.

    The link is the only authorization. `lang` or Accept-Language selects the language. Browsers
    receive errors as pages.
    """
    headers = request.headers
    known = lang if lang in languages() else preferred(headers.get("accept-language", ""))
    try:
        page = await fetch.sellers.page(token, run_id=run, lang=known)
    except tuple(SENTENCES) as error:
        if "text/html" not in headers.get("accept", ""):
            raise
        name = next(name for kind, name in SENTENCES.items() if isinstance(error, kind))
        page = message_page(name, Texts.load(known))
        return Response(page.encode(), status_code=error.status, headers=HEADERS)
    return Response(page.encode(), headers=HEADERS)
