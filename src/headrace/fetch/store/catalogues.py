"""Customers and what they configured: sources of catalogues, schemas of categories, mappings."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headrace.engines.postgres import Row, Runner
from headrace.fetch.errors import CustomerUnknown
from headrace.fetch.mappings import Mapping, NamedMapping
from headrace.fetch.model import Customer
from headrace.fetch.schemas import CategorySchema, Schema
from headrace.fetch.sql import SQL
from headrace.kernel.ids import USER_ID


@dataclass(frozen=True, slots=True)
class SourceToBring:
    """A file to fetch, with validators, hash and rules of the applied one."""

    url: str
    format_name: str | None
    mapping: str | None
    etag: str | None = None
    last_modified: str | None = None
    sha256: str | None = None
    rules: bytes | None = None

    def read_as(self, rules: bytes) -> SourceToBring:
        """The source without validators if the applied file was read by other rules."""
        if self.rules == rules:
            return self
        return SourceToBring(self.url, self.format_name, self.mapping, rules=rules)


async def set_source(
    runner: Runner,
    customer: str,
    *,
    url: str,
    cron: str,
    tz: str,
    format_name: str | None,
    mapping: str | None,
) -> None:
    """Create or replace a customer's source; discard the validators of an earlier file."""
    await runner.run(
        SQL.set_source,
        customer=customer,
        url=url,
        cron=cron,
        tz=tz,
        format=format_name,
        mapping=mapping,
    )


async def find_sources(runner: Runner, customer: str | None = None) -> list[Row]:
    """Every source by customer, or the one of that customer."""
    return await runner.all(SQL.sources, customer=customer)


async def drop_source(runner: Runner, customer: str) -> bool:
    """Delete the source. Return whether it existed."""
    return await runner.one(SQL.drop_source, customer=customer) is not None


async def find_to_bring(runner: Runner, customer: str) -> SourceToBring | None:
    """The customer's source, with validators if its last file is the applied one."""
    row = await runner.one(SQL.source_to_bring, customer=customer)
    return None if row is None else SourceToBring(*row)


async def find_schemas(runner: Runner, plain: str | None = None) -> list[CategorySchema]:
    """Every schema, by category, or the one of that category in its plain form."""
    return [_schema(row) for row in await runner.all(SQL.schemas, plain=plain)]


async def set_schema(runner: Runner, plain: str, category: str, schema: Schema) -> CategorySchema:
    """Create or replace the schema of a category."""
    encoded = msgspec.json.encode(schema).decode()
    row: Row = await runner.one(SQL.set_schema, plain=plain, category=category, schema=encoded)
    return _schema(row)


async def drop_schema(runner: Runner, plain: str) -> bool:
    """Delete the schema. Return whether it existed."""
    return await runner.one(SQL.drop_schema, plain=plain) is not None


async def find_mappings(runner: Runner, name: str | None = None) -> list[NamedMapping]:
    """Every mapping, by name, or the one of that name."""
    return [_mapping(row) for row in await runner.all(SQL.mappings, name=name)]


async def set_mapping(runner: Runner, name: str, mapping: Mapping) -> NamedMapping:
    """Create or replace a mapping."""
    encoded = msgspec.json.encode(mapping).decode()
    row: Row = await runner.one(SQL.set_mapping, name=name, mapping=encoded)
    return _mapping(row)


async def drop_mapping(runner: Runner, name: str) -> bool:
    """Delete the mapping. Return whether it existed."""
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


async def find_customers(runner: Runner, customer: str | None = None) -> list[Customer]:
    """Every customer, or the one of that name."""
    rows = await runner.all(SQL.customers, customer=customer)
    return [Customer(**dict(row)) for row in rows]


async def get_customer(runner: Runner, customer: str) -> Customer:
    """The customer of that name. Raises: CustomerUnknown."""
    is_name = USER_ID.fullmatch(customer) is not None
    found = await find_customers(runner, customer) if is_name else []
    if not found:
        raise CustomerUnknown(customer)
    return found[0]


async def set_customer(runner: Runner, customer: Customer) -> None:
    """Create or change a customer."""
    await runner.run(SQL.set_customer, **msgspec.structs.asdict(customer))
