"""The review page of fetch: held items, and pairs of photos that look alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.console.actions import Action, Field
from headrace.console.views import PanelData, ViewContext, attempt
from headrace.fetch.duplicates import NearDuplicate
from headrace.fetch.publish_check import HeldItem

HELD_SHOWN: Final = 50
PAIRS_SHOWN: Final = 50
SHOWN: Final = (
    ("all", "all pairs"),
    ("across", "two customers"),
    ("within", "one customer"),
    ("reviewed", "reviewed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewView:
    """Data of the review page."""

    held: PanelData[list[HeldItem]]
    more_held: str | None
    pairs: PanelData[list[NearDuplicate]]
    more_pairs: str | None
    customer: str
    show: str
    shows: Sequence[tuple[str, str]]
    media_origin: str


async def view_review(context: ViewContext) -> ReviewView:
    """Held items, and pairs of photos, of one customer or of all."""
    customer = context.query.text("customer", most=128)
    show = context.query.choice("show", [value for value, _ in SHOWN], "all")
    after = (context.query.text("after_customer"), context.query.text("after_item"))
    held, pairs = await asyncio.gather(
        attempt(context.fetch.held.list(customer or None, after=after, rows_max=HELD_SHOWN)),
        attempt(
            context.fetch.duplicates.list(
                customer or None,
                across={"across": True, "within": False}.get(show),
                reviewed=show == "reviewed",
                before=context.query.number("before", 0) or None,
                rows_max=PAIRS_SHOWN,
            )
        ),
    )
    more_held = more_pairs = None
    if held.value and len(held.value) == HELD_SHOWN:
        last = held.value[-1]
        more_held = context.url(after_customer=last.customer, after_item=last.id)
    if pairs.value and len(pairs.value) == PAIRS_SHOWN:
        more_pairs = context.url(before=pairs.value[-1].id)
    return ReviewView(
        held=held,
        more_held=more_held,
        pairs=pairs,
        more_pairs=more_pairs,
        customer=customer,
        show=show,
        shows=SHOWN,
        media_origin=context.media_origin,
    )


REVIEW_ACTIONS: Final = (
    Action(
        name="fetch-release",
        title="Publish held item",
        what="Publishes item {id} of {customer} as it is. The handler that held it is not called.",
        command="headrace fetch held release -- {customer} {id}",
        http="POST /v1/fetch/customers/{customer}/held/release?id={id}",
        run=lambda context, given: context.fetch.held.release(given["customer"], given["id"]),
        done="item {id} of {customer} is published",
        fields=(Field(name="customer", label="Customer"), Field(name="id", label="Item")),
    ),
    Action(
        name="fetch-duplicate-review",
        title="Mark pair as reviewed",
        what="Removes pair {pair} from the list of open pairs. Both photos stay as they are.",
        command="headrace fetch duplicates review {pair}",
        http="POST /v1/fetch/duplicates/{pair}/review",
        run=lambda context, given: context.fetch.duplicates.review(given["pair"]),
        done="pair {pair} is reviewed; both photos are unchanged",
        fields=(Field(name="pair", label="Pair", kind="number"),),
    ),
)
