"""Customers and their limits."""

from __future__ import annotations

import msgspec

from headrace.engines.postgres import Runner
from headrace.fetch.model import Customer
from headrace.fetch.store.sql import SQL


async def find_customers(runner: Runner, customer: str | None = None) -> list[Customer]:
    """Every customer, or the one of that name."""
    rows = await runner.all(SQL.customers, customer=customer)
    return [Customer(**dict(row)) for row in rows]


async def set_customer(runner: Runner, customer: Customer) -> None:
    """Make or change a customer."""
    await runner.run(SQL.set_customer, **msgspec.structs.asdict(customer))
