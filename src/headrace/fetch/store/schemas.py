"""Schemas of categories and mappings of foreign files, as people wrote them."""

from __future__ import annotations

import msgspec

from headrace.engines.postgres import Row, Runner
from headrace.fetch.mappings import Mapping, NamedMapping
from headrace.fetch.schemas import CategorySchema, Schema
from headrace.fetch.store.sql import SQL


async def find_schemas(runner: Runner, plain: str | None = None) -> list[CategorySchema]:
    """Every schema, by category, or the one of that category in its plain form."""
    return [_schema(row) for row in await runner.all(SQL.schemas, plain=plain)]


async def set_schema(runner: Runner, plain: str, category: str, schema: Schema) -> CategorySchema:
    """Make or replace the schema of a category."""
    encoded = msgspec.json.encode(schema).decode()
    row: Row = await runner.one(SQL.set_schema, plain=plain, category=category, schema=encoded)
    return _schema(row)


async def drop_schema(runner: Runner, plain: str) -> bool:
    """Whether there was a schema; it is gone."""
    return await runner.one(SQL.drop_schema, plain=plain) is not None


async def find_mappings(runner: Runner, name: str | None = None) -> list[NamedMapping]:
    """Every mapping, by name, or the one of that name."""
    return [_mapping(row) for row in await runner.all(SQL.mappings, name=name)]


async def set_mapping(runner: Runner, name: str, mapping: Mapping) -> NamedMapping:
    """Make or replace a mapping."""
    encoded = msgspec.json.encode(mapping).decode()
    row: Row = await runner.one(SQL.set_mapping, name=name, mapping=encoded)
    return _mapping(row)


async def drop_mapping(runner: Runner, name: str) -> bool:
    """Whether there was a mapping; it is gone."""
    return await runner.one(SQL.drop_mapping, name=name) is not None


def _schema(row: Row) -> CategorySchema:
    return CategorySchema(
        category=row["category"],
        schema=msgspec.json.decode(row["schema"], type=Schema),
        updated_at=row["updated_at"],
    )


def _mapping(row: Row) -> NamedMapping:
    return NamedMapping(
        name=row["name"],
        mapping=msgspec.json.decode(row["mapping"], type=Mapping),
        updated_at=row["updated_at"],
    )
