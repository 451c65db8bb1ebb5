"""Routes of schemas and mappings."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from headrace.fetch.http.scopes import READ, WRITE
from headrace.fetch.mappings import Mapping, NamedMapping
from headrace.fetch.schemas import CategorySchema, Schema
from headrace.fetch.service import Fetch


class SchemasAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every schema."""

    schemas: list[CategorySchema]


class MappingsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every mapping."""

    mappings: list[NamedMapping]


def _name(path: str) -> str:
    """The category of a path's rest: a category may hold slashes."""
    return path.removeprefix("/")


@get("/v1/fetch/schemas", operation_id="listFetchSchemas", summary="List schemas", opt=READ)
async def list_schemas(fetch: NamedDependency[Fetch]) -> SchemasAnswer:
    """What rows must hold, by category; rows of a category without one are judged by `default`."""
    return SchemasAnswer(schemas=await fetch.schemas.all())


@get(
    "/v1/fetch/schemas/{category:path}",
    operation_id="getFetchSchema",
    summary="Show the schema of a category",
    opt=READ,
)
async def get_schema(fetch: NamedDependency[Fetch], category: FromPath[str]) -> CategorySchema:
    """What rows of a category must hold."""
    return await fetch.schemas.get(_name(category))


@put(
    "/v1/fetch/schemas/{category:path}",
    operation_id="setFetchSchema",
    summary="Make or replace the schema of a category",
    opt=WRITE,
)
async def set_schema(
    fetch: NamedDependency[Fetch], category: FromPath[str], data: JSONBody[Schema]
) -> CategorySchema:
    """Say what rows of a category must hold; it holds from the next run on."""
    return await fetch.schemas.set(_name(category), data)


@delete(
    "/v1/fetch/schemas/{category:path}",
    operation_id="removeFetchSchema",
    summary="Forget the schema of a category",
    opt=WRITE,
)
async def remove_schema(fetch: NamedDependency[Fetch], category: FromPath[str]) -> None:
    """Rows of the category are judged by the default schema from the next run on."""
    await fetch.schemas.remove(_name(category))


@get("/v1/fetch/mappings", operation_id="listFetchMappings", summary="List mappings", opt=READ)
async def list_mappings(fetch: NamedDependency[Fetch]) -> MappingsAnswer:
    """What the names of foreign files mean, by the mapping's name."""
    return MappingsAnswer(mappings=await fetch.mappings.all())


@get(
    "/v1/fetch/mappings/{name:str}",
    operation_id="getFetchMapping",
    summary="Show a mapping",
    opt=READ,
)
async def get_mapping(fetch: NamedDependency[Fetch], name: FromPath[str]) -> NamedMapping:
    """What the names of a foreign file mean."""
    return await fetch.mappings.get(name)


@put(
    "/v1/fetch/mappings/{name:str}",
    operation_id="setFetchMapping",
    summary="Make or replace a mapping",
    opt=WRITE,
)
async def set_mapping(
    fetch: NamedDependency[Fetch], name: FromPath[str], data: JSONBody[Mapping]
) -> NamedMapping:
    """Say what the names of a foreign file mean; uploads and sources then give `mapping`."""
    return await fetch.mappings.set(name, data)


@delete(
    "/v1/fetch/mappings/{name:str}",
    operation_id="removeFetchMapping",
    summary="Forget a mapping",
    opt=WRITE,
)
async def remove_mapping(fetch: NamedDependency[Fetch], name: FromPath[str]) -> None:
    """A source that still names it fails and says so."""
    await fetch.mappings.remove(name)


ROUTES: Final[list[Any]] = [
    *(list_schemas, get_schema, set_schema, remove_schema),
    *(list_mappings, get_mapping, set_mapping, remove_mapping),
]
