"""The review page of fetch: held items, and pairs of photos that look alike."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from headrace.console.actions import Action, Field
from headrace.console.views import PanelData, ViewContext, attempt

HELD_SHOWN: Final = 25
PAIRS_SHOWN: Final = 25
SHOWN: Final = (
    ("all", "all pairs"),
    ("across", "two customers"),
    ("within", "one customer"),
    ("reviewed", "reviewed"),
)


async def view_review(context: ViewContext) -> dict[str, Any]:
    """Held items, and pairs of photos, of one customer or of all."""
    customer = context.query.text("customer", most=128)
    show = context.query.choice("show", [value for value, _ in SHOWN], "all")
    after = (context.query.text("after_customer"), context.query.text("after_item"))
    before = context.query.number("before", 0) or None
    held, pairs = await asyncio.gather(
        attempt(context.fetch.held.list, customer or None, after=after, rows_max=HELD_SHOWN + 1),
        attempt(
            context.fetch.duplicates.list,
            customer or None,
            across={"across": True, "within": False}.get(show),
            reviewed=show == "reviewed",
            cursor=before,
            rows_max=PAIRS_SHOWN + 1,
        ),
    )
    items, more_held = context.cut(
        held.value or (), HELD_SHOWN, after_customer="customer", after_item="id"
    )
    found, more_pairs = context.cut(pairs.value or (), PAIRS_SHOWN, before="id")
    return {
        "held": PanelData(items, held.error),
        "more_held": more_held,
        "pairs": PanelData(found, pairs.error),
        "more_pairs": more_pairs,
        "customer": customer,
        "show": show,
        "shows": SHOWN,
    }


REVIEW_ACTIONS: Final = (
    Action(
        name="fetch-release",
        title="Publish held item",
        what="Publishes item {id} of {customer} as it is. The handler that held it is not called.",
        command="headrace fetch held release -- {customer} {id}",
        http="POST /v1/fetch/customers/{customer}/held/release?id={id}",
        run=lambda context, given: context.fetch.held.release(given["customer"], given["id"]),
        done="item {id} of {customer} is published",
        fields=(Field("customer", "Customer"), Field("id", "Item")),
    ),
    Action(
        name="fetch-duplicate-review",
        title="Mark pair as reviewed",
        what="Removes pair {pair} from the list of open pairs. Both photos stay as they are.",
        command="headrace fetch duplicates review {pair}",
        http="POST /v1/fetch/duplicates/{pair}/review",
        run=lambda context, given: context.fetch.duplicates.review(given["pair"]),
        done="pair {pair} is reviewed; both photos are unchanged",
        fields=(Field("pair", "Pair", kind="number"),),
    ),
)
