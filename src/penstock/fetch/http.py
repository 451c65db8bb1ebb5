"""Routes under `/v1/fetch`: customers, catalogues, runs, items and results."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, delete, get, post, put
from litestar.di import NamedDependency
from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    RequestBody,
    Schema,
)
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from penstock.fetch.model import (
    CatalogueTooLarge,
    Consumer,
    Customer,
    PhotoProblem,
    Result,
    RowProblem,
    Run,
    StoredItem,
)
from penstock.fetch.service import Fetch
from penstock.kernel.limits import PAGE_ROWS_MAX

_READ: Final = {"scope": "fetch:read"}
_WRITE: Final = {"scope": "fetch:write"}
_WRITE_BYTES: Final = 2**20
_BODY_TYPES: Final = (
    "text/csv",
    "text/tab-separated-values",
    "application/xml",
    "application/gzip",
    "application/octet-stream",
)


class CustomerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most `starts_max` requests in any `window_s` seconds, `connections` at once."""

    starts_max: int
    window_s: float = 60.0
    connections: int = 8


class ProblemAnswer(RowProblem, frozen=True, kw_only=True):
    """A row's problem with its position, for paging."""

    position: int


class PhotoProblemAnswer(PhotoProblem, frozen=True, kw_only=True):
    """A photo's problem with its position, for paging."""

    position: int


class ProblemsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of each; ask on with `after` and `photos_after` set to the last positions."""

    problems: list[ProblemAnswer]
    photos: list[PhotoProblemAnswer]


class ConsumersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every consumer."""

    consumers: list[Consumer]


class ReplayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How many items are told to the consumer once more."""

    consumer: str
    items: int


@dataclass
class CatalogueOperation(Operation):
    """An operation whose body is a file as it is, which no parameter of the handler shows."""

    def __post_init__(self) -> None:
        """Describe the body."""
        file = OpenAPIMediaType(schema=Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY))
        self.request_body = RequestBody(
            content=dict.fromkeys(_BODY_TYPES, file),
            description="The catalogue file itself: CSV, TSV or YML, gzip or not. It is recognised by"
            " its content; the content type does not matter.",
            required=True,
        )


class ResultsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of results; keep `next_after` and ask again with it."""

    results: list[Result]
    next_after: int


@put(
    "/v1/fetch/customers/{customer:str}",
    operation_id="setFetchCustomer",
    summary="Make a customer or change its limits",
    opt=_WRITE,
)
async def set_customer(
    fetch: NamedDependency[Fetch], customer: FromPath[str], data: JSONBody[CustomerLimits]
) -> Customer:
    """Make a customer or change its limits; they hold at once, for photos not started yet."""
    return await fetch.set_customer(customer, **msgspec.structs.asdict(data))


@get(
    "/v1/fetch/customers/{customer:str}",
    operation_id="getFetchCustomer",
    summary="Show a customer",
    opt=_READ,
)
async def get_customer(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> Customer:
    """Show a customer's limits."""
    return await fetch.customer(customer)


@post(
    "/v1/fetch/customers/{customer:str}/catalogues",
    operation_id="runFetchCatalogue",
    summary="Upload a catalogue and apply it",
    opt=_WRITE,
    status_code=202,
    request_max_body_size=None,
    operation_class=CatalogueOperation,
)
async def run_catalogue(
    request: Request[Any, Any, Any],
    *,
    fetch: NamedDependency[Fetch],
    customer: FromPath[str],
    dry_run: FromQuery[bool] = False,
    file_name: FromQuery[str] = "upload",
) -> Run:
    """Read the body (CSV, TSV or YML, gzip or not) as the customer's catalogue.

    Answered once the run is applied, held or dry; its photos follow, `GET /v1/fetch/runs/{run}` shows
    how far they are. When no answer comes nothing was changed, or the whole run was.
    """
    await fetch.customer(customer)
    with tempfile.TemporaryDirectory(prefix="penstock-upload-") as folder:
        path = Path(folder) / "catalogue"
        await _receive(request, path, bytes_max=fetch.config.catalogue_max_bytes)
        return await fetch.run_catalogue(path, customer, file_name=file_name, is_dry_run=dry_run)


async def _receive(request: Request[Any, Any, Any], path: Path, *, bytes_max: int) -> None:
    """Write the body to `path`, a megabyte at a time. Raises: CatalogueTooLarge."""
    received = 0
    waiting = bytearray()
    with path.open("wb") as file:
        async for block in request.stream():
            received += len(block)
            if received > bytes_max:
                raise CatalogueTooLarge(
                    f"the catalogue is over {bytes_max:,} bytes: split it, pack it with gzip, or raise"
                    " fetch.catalogue_max"
                )
            waiting += block
            if len(waiting) >= _WRITE_BYTES:
                await asyncio.to_thread(file.write, bytes(waiting))
                waiting.clear()
        await asyncio.to_thread(file.write, bytes(waiting))


@get(
    "/v1/fetch/runs/{run:int}",
    operation_id="getFetchRun",
    summary="Show how far a run is",
    opt=_READ,
)
async def get_run(fetch: NamedDependency[Fetch], run: FromPath[int]) -> Run:
    """Counts of rows, items and photos by outcome."""
    return await fetch.run(run)


@get(
    "/v1/fetch/runs/{run:int}/errors",
    operation_id="listFetchRunErrors",
    summary="List the problems of a run's rows and photos",
    opt=_READ,
)
async def list_errors(
    fetch: NamedDependency[Fetch],
    run: FromPath[int],
    *,
    after: Annotated[int, QueryParameter(ge=0)] = 0,
    photos_after: Annotated[int, QueryParameter(ge=0)] = 0,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> ProblemsAnswer:
    """Problems in the order of the rows, of which the first 1,000 are kept, and photos without a copy.

    `problems` has faults of rows, links refused at the door among them; `photos` those that failed or
    were refused when they were asked for.
    """
    found = await fetch.problems(run, after=after, rows_max=limit)
    photos = await fetch.photo_problems(run, after=photos_after, rows_max=limit)
    return ProblemsAnswer(
        problems=[
            ProblemAnswer(position=position, **msgspec.structs.asdict(problem))
            for position, problem in found
        ],
        photos=[
            PhotoProblemAnswer(position=position, **msgspec.structs.asdict(photo))
            for position, photo in photos
        ],
    )


@post(
    "/v1/fetch/runs/{run:int}/confirm",
    operation_id="confirmFetchRun",
    summary="Apply a held run",
    opt=_WRITE,
    status_code=202,
)
async def confirm_run(fetch: NamedDependency[Fetch], run: FromPath[int]) -> Run:
    """Apply a run that was held because it was empty, truncated or much smaller than the last."""
    return await fetch.confirm_run(run)


@get(
    "/v1/fetch/customers/{customer:str}/items/{item:str}",
    operation_id="getFetchItem",
    summary="Show an item with its photos",
    opt=_READ,
)
async def get_item(
    fetch: NamedDependency[Fetch], customer: FromPath[str], item: FromPath[str]
) -> StoredItem:
    """An item as the last catalogues left it, and the outcome of each photo."""
    return await fetch.item(customer, item)


@get(
    "/v1/fetch/results",
    operation_id="listFetchResults",
    summary="List results in the order of their commits",
    opt=_READ,
)
async def list_results(
    fetch: NamedDependency[Fetch],
    after: Annotated[int, QueryParameter(ge=0)] = 0,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    customer: FromQuery[str | None] = None,
) -> ResultsAnswer:
    """What to publish, edit and unpublish; nothing is missed by asking on from `next_after`."""
    found = await fetch.results(after=after, results_max=limit, customer=customer)
    return ResultsAnswer(results=found, next_after=found[-1].seq if found else after)


@get(
    "/v1/fetch/consumers",
    operation_id="listFetchConsumers",
    summary="List the consumers that items are told to",
    opt=_READ,
)
async def list_consumers(fetch: NamedDependency[Fetch]) -> ConsumersAnswer:
    """Every `on_item` handler that a worker recorded, with how many items it was told of."""
    return ConsumersAnswer(consumers=await fetch.consumers())


@delete(
    "/v1/fetch/consumers/{name:str}",
    operation_id="removeFetchConsumer",
    summary="Forget a consumer",
    opt=_WRITE,
)
async def remove_consumer(fetch: NamedDependency[Fetch], name: FromPath[str]) -> None:
    """Forget a consumer and drop what waits for it; a worker that starts with it records it anew."""
    await fetch.remove_consumer(name)


@post(
    "/v1/fetch/consumers/{name:str}/replay",
    operation_id="replayFetchConsumer",
    summary="Tell a consumer every item once more",
    opt=_WRITE,
    status_code=202,
)
async def replay_consumer(
    fetch: NamedDependency[Fetch], name: FromPath[str], customer: FromQuery[str | None] = None
) -> ReplayAnswer:
    """The newest version of every item, of one customer or of all, is on its way when this answers."""
    items = await fetch.replay(name, customer=customer)
    return ReplayAnswer(consumer=name, items=items)


ROUTES: Final[list[Any]] = [
    set_customer,
    get_customer,
    run_catalogue,
    get_run,
    list_errors,
    confirm_run,
    get_item,
    list_results,
    list_consumers,
    remove_consumer,
    replay_consumer,
]
