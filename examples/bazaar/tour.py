"""The tour: five steps, each with a page of the shop and the console's screen behind it.

A cookie has the step, so the card needs no script and stays where it was.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final

from examples.bazaar.storefront import TOUR_COOKIE, Asked, Page, number_of, require_own_page
from litestar import post
from litestar.datastructures import Cookie
from litestar.response import Redirect


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `screen` is below the console's address."""

    number: int
    title: str
    text: str
    _: KW_ONLY
    path: str
    place: str
    screen: str
    screen_title: str


STEPS: Final = (
    Step(
        1,
        "Fifty sellers, some with failing servers",
        "Each seller has its own server. That of Sleepy Moss stops answering now and"
        " then; others are slow or broken. Photos of Sleepy Moss still arrive, and no"
        " other seller waits for it.",
        path="/sellers/sleepy-moss",
        place="a hanging seller",
        screen="/fetch/customers/sleepy-moss",
        screen_title="the seller's runs and outcomes",
    ),
    Step(
        2,
        "Every view is counted once",
        "Open an advert and load it again: its count rises by one for you, and by one for each view"
        " of a simulated visitor meanwhile. The console shows its views by hour and day.",
        path="/items/velo-ada/velo-ada-0002",
        place="an advert",
        screen="/views/entity?id=velo-ada%3Avelo-ada-0002",
        screen_title="its views",
    ),
    Step(
        3,
        "Jobs that fail and recover",
        "Mails to followers are sent within the rate limit of each provider. Some fail, new"
        " ones all the time: open one and read its error. Each minute, a cron job retries those"
        " that failed at least a minute ago; press retry to be faster. Each new advert runs a"
        " workflow: check it, add it to the search, make small photos, announce it.",
        path="/feed",
        place="your feed",
        screen="/jobs/jobs?queue=bazaar.mail&state=failed",
        screen_title="mails that failed",
    ),
    Step(
        4,
        "Music in ranges",
        "Play a track and jump in it: your browser requests byte ranges. The console shows the"
        " stored object and what the node serves.",
        path="/tracks/market-morning",
        place="a track",
        screen="/media/object?key=tracks%2Fmarket-morning.wav",
        screen_title="the track's object",
    ),
    Step(
        5,
        "Break it",
        "Kill a worker, hang a seller, empty Valkey, stop PostgreSQL. The ledger on that page"
        " shows what was lost. The console's overview lists a killed worker and a stopped"
        " PostgreSQL under Health. A silent seller is no problem there: only the timeout for its"
        " next photo rises, from 1 s to 5 s and 30 s (column Next class of Fetch, Hosts). An"
        " emptied Valkey is no problem either: its index of feeds is rebuilt.",
        path="/break",
        place="the panel",
        screen="",
        screen_title="the overview",
    ),
)


def step_of(request: Asked) -> Step | None:
    """The visitor's step; None: the tour is closed."""
    kept = request.cookies.get(TOUR_COOKIE, "1")
    number = number_of(kept)
    return STEPS[number - 1] if 1 <= number <= len(STEPS) else None


@post("/tour", status_code=303)
async def turn_tour(request: Asked) -> Page:
    """Go to another step, or close the tour with step 0."""
    require_own_page(request)
    form = await request.form()
    number = min(number_of(str(form.get("step", ""))), len(STEPS))
    target = STEPS[number - 1].path if number else "/"
    answer = Redirect(target, status_code=303)
    cookie = Cookie(
        key=TOUR_COOKIE, value=str(number), httponly=True, samesite="lax", path="/", max_age=86_400
    )
    answer.cookies.append(cookie)
    return answer
