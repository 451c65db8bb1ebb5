"""Routes of catalogues and their sources, items, results, hosts and single links."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    RequestBody,
    Schema,
)
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.fetch.errors import InvalidSource, InvalidTime
from headrace.fetch.http.requests import READ, WRITE, in_words_of, texts_for
from headrace.fetch.i18n import DEFAULT
from headrace.fetch.model import (
    ITEMS_SENT_MAX,
    Host,
    Result,
    Run,
    SentItem,
    Source,
    StoredItem,
    UrlReport,
)
from headrace.fetch.readers.rows import too_large
from headrace.fetch.service import Fetch
from headrace.fetch.service.items import wrong_count
from headrace.fetch.study import WEEKS_MAX, Study, csv_of_study
from headrace.kernel.config import moment_of
from headrace.kernel.routes import OTHER_TYPES, PAGE_ROWS_MAX, Idempotency, ItemsMax

_WRITE_BYTES: Final = 2**20
_SOURCE_BYTES_MAX: Final = 16 * 1024
_BODY_TYPES: Final = (
    "text/csv",
    "text/tab-separated-values",
    "application/xml",
    "application/json",
    "application/x-ndjson",
    "application/gzip",
    "application/octet-stream",
)


class SourceToAdd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """URL of a catalogue: fetched on the schedule `cron`, or once now without it."""

    url: str
    cron: str | None = None
    tz: str = "UTC"
    format: str | None = None
    mapping: str | None = None


class SourcesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every source."""

    sources: list[Source]


class BringAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The job that fetches the file."""

    customer: str
    job: int


@dataclass
class CatalogueOperation(Operation):
    """An operation whose body is a raw file, which no parameter of the handler describes."""

    def __post_init__(self) -> None:
        """Describe the body."""
        file = OpenAPIMediaType(schema=Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY))
        self.request_body = RequestBody(
            content=dict.fromkeys(_BODY_TYPES, file),
            description="The catalogue file itself, gzip or not. Its format is detected from the"
            " content; the content type is ignored. Or a JSON object"
            ' {"url", "cron", "tz", "format", "mapping"}: the file is fetched from the URL, on the'
            " schedule `cron`, or once now without it.",
            required=True,
        )


@post(
    "/v1/fetch/customers/{customer:str}/catalogues",
    opt={**WRITE, "idempotent": True, "streams_body": True},
    status_code=202,
    request_max_body_size=None,
    operation_class=CatalogueOperation,
)
async def run_fetch_catalogue(
    request: Request[Any, Any, Any],
    *,
    fetch: NamedDependency[Fetch],
    idempotency: NamedDependency[Idempotency],
    customer: FromPath[str],
    dry_run: FromQuery[bool] = False,
    review: FromQuery[bool] = False,
    file_name: FromQuery[str] = "upload",
    format_name: Annotated[str | None, QueryParameter(name="format")] = None,
    mapping: FromQuery[str | None] = None,
    lang: FromQuery[str | None] = None,
    supplemental: FromQuery[bool] = False,
) -> Run | Source:
    """Read the body as the customer's catalogue, or fetch it from a URL.

    With `supplemental` the file overlays price and stock of items by id. It neither adds nor
    removes items, and an overlay stays until a file without the id is applied.

    An unreadable file is refused with the line, its content and a remedy, in the language of
    `lang`, else of `Accept-Language`. In a language other than English the `reason` of a held run
    is translated too.

    The response to an upload follows once the run is applied, held or dry. Its photos follow
    later; `GET /v1/fetch/runs/{run}` shows the progress. With `review` the run is held until it is
    confirmed, and then changes what it shows. Without a response, either nothing or the whole run
    was applied. The response to a URL is the run that waits for the file, or with `cron` the
    source.
    """
    await fetch.customers.get(customer)
    texts = texts_for(request, lang)
    with tempfile.TemporaryDirectory(prefix="headrace-upload-") as folder, in_words_of(texts):
        path = Path(folder) / "catalogue"
        digest = await _receive(request, path, bytes_max=fetch.config.catalogue_max_bytes)
        source = _source_in(path)
        kind = {"is_dry_run": dry_run, "is_supplemental": supplemental}

        async def take(tx: Any) -> Run | Source:
            if source is not None:
                if review:
                    raise InvalidSource("review: supported with a file only, not with a URL")
                return await _bring(fetch, customer, source, tx=tx, **kind)
            run = await fetch.run_catalogue(
                path,
                customer,
                file_name=file_name,
                is_review=review,
                format_name=format_name,
                mapping=mapping,
                has_permit=True,
                tx=tx,
                **kind,
            )
            if run.reason is None or texts.lang == DEFAULT:
                return run
            return msgspec.structs.replace(run, reason=texts.of_run(run))

        if source is not None:
            return await idempotency.run(take, body_digest=digest)
        async with fetch.catalogue_permit(customer):
            return await idempotency.run(take, body_digest=digest)


async def _bring(
    fetch: Fetch, customer: str, source: SourceToAdd, *, tx: Any, **kind: bool
) -> Run | Source:
    how: dict[str, Any] = {"format_name": source.format, "mapping": source.mapping}
    if source.cron is None:
        return await fetch.bring_catalogue(customer, source.url, tx=tx, **(how | kind))
    if any(kind.values()):
        raise InvalidSource("dry_run and supplemental are not supported with a cron: omit `cron`")
    return await fetch.sources.set(customer, url=source.url, cron=source.cron, tz=source.tz, **how)


def _source_in(path: Path) -> SourceToAdd | None:
    """The source in a small JSON object with a `url` and no list; None for a catalogue.

    Raises: InvalidSource.
    """
    if path.stat().st_size > _SOURCE_BYTES_MAX:
        return None
    body = path.read_bytes()
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    is_source = isinstance(found, dict) and "url" in found and not {"id", "sku"} & found.keys()
    if not is_source or any(isinstance(value, list | dict) for value in found.values()):
        return None
    try:
        return msgspec.convert(found, SourceToAdd)
    except msgspec.ValidationError as error:
        raise InvalidSource(
            f"a source: {error}: expected url, and optionally cron, tz, format and mapping"
        ) from error


async def _receive(request: Request[Any, Any, Any], path: Path, *, bytes_max: int) -> bytes:
    """Write the body to `path`, a megabyte at a time; return its digest.

    Raises: CatalogueTooLarge.
    """
    received = 0
    waiting = bytearray()
    hashed = hashlib.sha256()
    with path.open("wb") as file:
        async for block in request.stream():
            received += len(block)
            if received > bytes_max:
                raise too_large(bytes_max)
            hashed.update(block)
            waiting += block
            if len(waiting) >= _WRITE_BYTES:
                await asyncio.to_thread(file.write, bytes(waiting))
                waiting.clear()
        await asyncio.to_thread(file.write, bytes(waiting))
    return hashed.digest()


@get("/v1/fetch/sources", opt=READ)
async def list_fetch_sources(fetch: NamedDependency[Fetch]) -> SourcesAnswer:
    """Every source with its next run and last result."""
    return SourcesAnswer(sources=await fetch.sources.all())


@get("/v1/fetch/customers/{customer:str}/source", opt=READ)
async def get_fetch_source(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> Source:
    """The source of the customer's catalogue, with its next run and last result."""
    return await fetch.sources.get(customer)


@delete("/v1/fetch/customers/{customer:str}/source", opt=WRITE)
async def remove_fetch_source(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> None:
    """Stop fetching the customer's file; its items stay as they are."""
    await fetch.sources.remove(customer)


@post("/v1/fetch/customers/{customer:str}/source/bring", opt=WRITE, status_code=202)
async def bring_fetch_source(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> BringAnswer:
    """Fetch the file of the customer's source now, in addition to its schedule."""
    job = await fetch.sources.bring(customer)
    return BringAnswer(customer=customer, job=job)


class SentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The runs, one per customer in the call."""

    runs: list[Run]


@get("/v1/fetch/customers/{customer:str}/item", opt=READ)
async def get_fetch_item(
    fetch: NamedDependency[Fetch],
    customer: FromPath[str],
    item: Annotated[str, QueryParameter(name="id", max_length=400)],
) -> StoredItem:
    """Current state of an item with the outcome of each photo.

    The id is a percent-encoded query parameter: ids may contain `/`, which proxies change in paths.
    """
    return await fetch.items.get(customer, item)


@post(
    "/v1/fetch/items",
    opt={**WRITE, "idempotent": True, "items_max": ItemsMax(ITEMS_SENT_MAX, wrong_count)},
    status_code=202,
)
async def send_fetch_items(
    fetch: NamedDependency[Fetch],
    idempotency: NamedDependency[Idempotency],
    data: JSONBody[list[SentItem]],
) -> SentAnswer:
    """Upload up to 1,000 items, all or none; other items stay as they are.

    New and changed lists of photos are requested; without a request the result is published at
    once. A faulty item is listed in its run's errors and stays as it was. Without `fields` the
    stored ones stay; `gone` unpublishes the item.
    """

    async def send(tx: Any) -> SentAnswer:
        return SentAnswer(runs=await fetch.send_items(data, tx=tx))

    return await idempotency.run(send)


class ResultsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of results; store `next_after` and pass it in the next call."""

    results: list[Result]
    next_after: int


@get("/v1/fetch/results", opt=READ)
async def list_fetch_results(
    fetch: NamedDependency[Fetch],
    after: Annotated[int, QueryParameter(ge=0)] = 0,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    customer: FromQuery[str | None] = None,
) -> ResultsAnswer:
    """Items to publish, edit and unpublish; continue with `next_after` to miss none."""
    found = await fetch.items.results(after=after, results_max=limit, customer=customer)
    return ResultsAnswer(results=found, next_after=found[-1].seq if found else after)


class NewestResultsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of results, newest first; continue with `cursor` = `next_cursor`, null at the end."""

    results: list[Result]
    next_cursor: str | None


@get("/v1/fetch/results/newest", opt=READ)
async def list_newest_fetch_results(
    *,
    fetch: NamedDependency[Fetch],
    cursor: Annotated[int | None, QueryParameter(ge=1)] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    customer: FromQuery[str | None] = None,
    from_at: Annotated[str | None, QueryParameter(name="from")] = None,
    to_at: Annotated[str | None, QueryParameter(name="to")] = None,
) -> NewestResultsAnswer:
    """The newest results, for people; pollers need the order of commits of `/v1/fetch/results`."""
    found = await fetch.items.newest_results(
        cursor=cursor,
        results_max=limit,
        customer=customer,
        from_at=moment_of("from", from_at, InvalidTime),
        to_at=moment_of("to", to_at, InvalidTime),
    )
    following = str(found[-1].seq) if len(found) == limit else None
    return NewestResultsAnswer(results=found, next_cursor=following)


class HostsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of hosts; continue with `after_host` and `after_customer` of the last one."""

    hosts: list[Host]


@get("/v1/fetch/hosts", opt=READ)
async def list_fetch_hosts(
    fetch: NamedDependency[Fetch],
    customer: FromQuery[str | None] = None,
    *,
    after_host: FromQuery[str] = "",
    after_customer: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> HostsAnswer:
    """Speed, timeout class, requests and outcomes per host and customer."""
    found = await fetch.hosts.page(
        customer=customer, after=(after_host, after_customer), hosts_max=limit
    )
    return HostsAnswer(hosts=found)


@get("/v1/fetch/hosts/{host:str}", opt=READ)
async def get_fetch_host(fetch: NamedDependency[Fetch], host: FromPath[str]) -> HostsAnswer:
    """One host, per customer."""
    return HostsAnswer(hosts=await fetch.hosts.get(host))


@get(
    "/v1/fetch/study",
    opt={**READ, OTHER_TYPES: ("text/csv",)},
    responses={200: ResponseSpec(Study, description="The study, or its counts as CSV.")},
)
async def get_fetch_study(
    fetch: NamedDependency[Fetch],
    weeks: Annotated[int, QueryParameter(ge=1, le=WEEKS_MAX)] = 4,
    format_name: Annotated[Literal["json", "csv"], QueryParameter(name="format")] = "json",
) -> Response[Any]:
    """Download times of all hosts, errors per class and week, and timeout classes that would fit.

    With `format=csv` the response has the counts: week, class, outcome, download time up to,
    attempts.
    """
    found = await fetch.study(weeks=weeks)
    if format_name == "json":
        return Response(found)
    headers = {"content-disposition": 'attachment; filename="download-times.csv"'}
    return Response(csv_of_study(found.attempts), media_type="text/csv", headers=headers)


@get("/v1/fetch/why", opt=READ)
async def get_fetch_why(
    fetch: NamedDependency[Fetch], url: Annotated[str, QueryParameter(max_length=8192)]
) -> UrlReport:
    """Whether the URL is allowed, its last outcome per customer, and its next request."""
    return await fetch.links.why(url)
