"""Routes of consumers."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from headrace.fetch.http.scopes import READ, WRITE
from headrace.fetch.model import Consumer
from headrace.fetch.service import Fetch


class ConsumersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every consumer."""

    consumers: list[Consumer]


class ReplayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How many items are told to the consumer once more."""

    consumer: str
    items: int


@get(
    "/v1/fetch/consumers",
    operation_id="listFetchConsumers",
    summary="List the consumers that items are told to",
    opt=READ,
)
async def list_consumers(fetch: NamedDependency[Fetch]) -> ConsumersAnswer:
    """Every `on_item` handler that a worker recorded, with how many items it was told of."""
    return ConsumersAnswer(consumers=await fetch.consumers())


@delete(
    "/v1/fetch/consumers/{name:str}",
    operation_id="removeFetchConsumer",
    summary="Forget a consumer",
    opt=WRITE,
)
async def remove_consumer(fetch: NamedDependency[Fetch], name: FromPath[str]) -> None:
    """Forget a consumer and drop what waits for it; a worker that starts with it records it anew."""
    await fetch.remove_consumer(name)


@post(
    "/v1/fetch/consumers/{name:str}/replay",
    operation_id="replayFetchConsumer",
    summary="Tell a consumer every item once more",
    opt=WRITE,
    status_code=202,
)
async def replay_consumer(
    fetch: NamedDependency[Fetch], name: FromPath[str], customer: FromQuery[str | None] = None
) -> ReplayAnswer:
    """The newest version of every item, of one customer or of all, is on its way when this answers."""
    items = await fetch.replay(name, customer=customer)
    return ReplayAnswer(consumer=name, items=items)


ROUTES: Final[list[Any]] = [list_consumers, remove_consumer, replay_consumer]
