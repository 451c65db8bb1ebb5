"""Routes that take catalogues in, as files or as the place where they are."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, delete, get, post
from litestar.di import NamedDependency
from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    RequestBody,
    Schema,
)
from litestar.params import FromPath, FromQuery, QueryParameter

from headrace.fetch.errors import InvalidSource
from headrace.fetch.http.languages import in_words_of, texts_for
from headrace.fetch.http.scopes import READ, WRITE
from headrace.fetch.model import Run, Source
from headrace.fetch.readers.row import too_large
from headrace.fetch.service import Fetch
from headrace.fetch.texts import DEFAULT
from headrace.kernel.routes import Idempotency

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
    """Where a catalogue is: brought at every moment of `cron`, or once now without it."""

    url: str
    cron: str | None = None
    tz: str = "UTC"
    format: str | None = None
    mapping: str | None = None


class SourcesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every source."""

    sources: list[Source]


class BringAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The job that brings the file."""

    customer: str
    job: int


@dataclass
class CatalogueOperation(Operation):
    """An operation whose body is a file as it is, which no parameter of the handler shows."""

    def __post_init__(self) -> None:
        """Describe the body."""
        file = OpenAPIMediaType(schema=Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY))
        self.request_body = RequestBody(
            content=dict.fromkeys(_BODY_TYPES, file),
            description="The catalogue file itself, gzip or not. It is recognised by its content; the"
            ' content type does not matter. Or a JSON object {"url", "cron", "tz", "format", "mapping"}: where the'
            " file is; with `cron` it is brought at every moment of it, without it once now.",
            required=True,
        )


@post(
    "/v1/fetch/customers/{customer:str}/catalogues",
    operation_id="runFetchCatalogue",
    summary="Upload a catalogue and apply it, or say where it is brought from",
    opt={**WRITE, "idempotent": True, "streams_body": True},
    status_code=202,
    request_max_body_size=None,
    operation_class=CatalogueOperation,
)
async def run_catalogue(
    request: Request[Any, Any, Any],
    *,
    fetch: NamedDependency[Fetch],
    idempotency: NamedDependency[Idempotency],
    customer: FromPath[str],
    dry_run: FromQuery[bool] = False,
    file_name: FromQuery[str] = "upload",
    format_name: Annotated[str | None, QueryParameter(name="format")] = None,
    mapping: FromQuery[str | None] = None,
    lang: FromQuery[str | None] = None,
) -> Run | Source:
    """Read the body as the customer's catalogue, or bring it from a URL.

    A file that cannot be read is refused with the line, what is there and what to do, in the language of `lang`,
    else of `Accept-Language`. In another language than English the `reason` of a held run is a sentence, too.

    An upload is answered once the run is applied, held or dry; its photos follow, `GET /v1/fetch/runs/{run}`
    shows how far they are. When no answer comes nothing was changed, or the whole run was. A file that is
    brought once is answered with the run that waits for it, one with a `cron` with its source.
    """
    await fetch.customer(customer)
    texts = texts_for(request, lang)
    with tempfile.TemporaryDirectory(prefix="headrace-upload-") as folder, in_words_of(texts):
        path = Path(folder) / "catalogue"
        digest = await _receive(request, path, bytes_max=fetch.config.catalogue_max_bytes)
        asked = _source_in(path)

        async def take(tx: Any) -> Run | Source:
            if asked is not None:
                return await _bring(fetch, customer, asked, is_dry_run=dry_run, tx=tx)
            run = await fetch.run_catalogue(
                path,
                customer,
                file_name=file_name,
                is_dry_run=dry_run,
                format_name=format_name,
                mapping=mapping,
                has_place=True,
                tx=tx,
            )
            if run.reason is None or texts.lang == DEFAULT:
                return run
            return msgspec.structs.replace(run, reason=texts.of_run(run))

        if asked is not None:
            return await idempotency.run(take, body_digest=digest)
        async with fetch.catalogue_place(customer):
            return await idempotency.run(take, body_digest=digest)


async def _bring(
    fetch: Fetch, customer: str, asked: SourceToAdd, *, is_dry_run: bool, tx: Any
) -> Run | Source:
    if asked.cron is None:
        return await fetch.bring_catalogue(
            customer,
            asked.url,
            format_name=asked.format,
            mapping=asked.mapping,
            is_dry_run=is_dry_run,
            tx=tx,
        )
    if is_dry_run:
        raise InvalidSource("dry_run: a source with a cron has none: leave `cron` out to try it")
    return await fetch.sources.set(
        customer,
        url=asked.url,
        cron=asked.cron,
        tz=asked.tz,
        format_name=asked.format,
        mapping=asked.mapping,
    )


def _source_in(path: Path) -> SourceToAdd | None:
    """What a small JSON object with a `url` and no list asks for; None for a catalogue.

    Raises: InvalidSource.
    """
    if path.stat().st_size > _SOURCE_BYTES_MAX:
        return None
    body = path.read_bytes()
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    is_asked = isinstance(found, dict) and "url" in found and not {"id", "sku"} & found.keys()
    if not is_asked or any(isinstance(value, list | dict) for value in found.values()):
        return None
    try:
        return msgspec.convert(found, SourceToAdd)
    except msgspec.ValidationError as error:
        raise InvalidSource(
            f"a source: {error}: expected url, and cron, tz, format and mapping where wanted"
        ) from error


async def _receive(request: Request[Any, Any, Any], path: Path, *, bytes_max: int) -> bytes:
    """Write the body to `path`, a megabyte at a time; its digest. Raises: CatalogueTooLarge."""
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


@get(
    "/v1/fetch/sources",
    operation_id="listFetchSources",
    summary="List where catalogues are brought from",
    opt=READ,
)
async def list_sources(fetch: NamedDependency[Fetch]) -> SourcesAnswer:
    """Every source, when it is brought next, and what came of it last."""
    return SourcesAnswer(sources=await fetch.sources.all())


@get(
    "/v1/fetch/customers/{customer:str}/source",
    operation_id="getFetchSource",
    summary="Show where a customer's catalogue is brought from",
    opt=READ,
)
async def get_source(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> Source:
    """Where the customer's catalogue is brought from, when next, and what came of it last."""
    return await fetch.sources.get(customer)


@delete(
    "/v1/fetch/customers/{customer:str}/source",
    operation_id="removeFetchSource",
    summary="Bring a customer's catalogue no more",
    opt=WRITE,
)
async def remove_source(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> None:
    """Bring the customer's catalogue no more; its items stay as they are."""
    await fetch.sources.remove(customer)


@post(
    "/v1/fetch/customers/{customer:str}/source/bring",
    operation_id="bringFetchSource",
    summary="Bring a customer's catalogue now",
    opt=WRITE,
    status_code=202,
)
async def bring_source(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> BringAnswer:
    """Bring the file of the customer's source now, besides its moments."""
    return BringAnswer(customer=customer, job=await fetch.sources.bring(customer))


ROUTES: Final[list[Any]] = [
    run_catalogue,
    list_sources,
    get_source,
    remove_source,
    bring_source,
]
