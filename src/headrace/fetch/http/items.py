"""Routes of items."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, QueryParameter

from headrace.fetch.http.scopes import READ, WRITE
from headrace.fetch.model import ITEMS_SENT_MAX, Run, SentItem, StoredItem
from headrace.fetch.sent import wrong_count
from headrace.fetch.service import Fetch
from headrace.kernel.routes import Idempotency, ItemsMax


class SentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The runs to follow, one for each customer in the call."""

    runs: list[Run]


@get(
    "/v1/fetch/customers/{customer:str}/item",
    operation_id="getFetchItem",
    summary="Show an item with its photos",
    opt=READ,
)
async def get_item(
    fetch: NamedDependency[Fetch],
    customer: FromPath[str],
    item: Annotated[str, QueryParameter(name="id", max_length=400)],
) -> StoredItem:
    """An item as the last catalogues left it, and the outcome of each photo.

    The id is a query parameter, percent-encoded: ids may hold `/`, which proxies change in paths.
    """
    return await fetch.item(customer, item)


@post(
    "/v1/fetch/items",
    operation_id="sendFetchItems",
    summary="Send items without a catalogue",
    opt={**WRITE, "idempotent": True, "items_max": ItemsMax(ITEMS_SENT_MAX, wrong_count)},
    status_code=202,
)
async def send_items(
    fetch: NamedDependency[Fetch],
    idempotency: NamedDependency[Idempotency],
    data: JSONBody[list[SentItem]],
) -> SentAnswer:
    """Take up to 1,000 items in, all or none; those not named stay as they are.

    New and changed lists of photos are asked; where nothing is to be asked the result goes out at once. A
    faulty item is told in its run's errors and stays as it was. Without `fields` those of the item stay;
    `gone` unpublishes it.
    """

    async def send(tx: Any) -> SentAnswer:
        return SentAnswer(runs=await fetch.send_items(data, tx=tx))

    return await idempotency.run(send)


ROUTES: Final[list[Any]] = [get_item, send_items]
