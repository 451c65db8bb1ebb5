"""Which object store all hosts of an installation expect, in PostgreSQL; see `engines.marked`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.engines.sql import load_queries

SQL: Final = load_queries("headrace.engines")


class PostgresRecord:
    """The record as a row; implements `marked.SharedRecord`. PostgreSQL is opened when it is first asked."""

    def __init__(self, postgres: Callable[[], Postgres]) -> None:
        self._postgres = postgres

    async def expected(self) -> str | None:
        """The id that is expected, if any is. Raises: Unavailable, SchemaBehind."""
        mark: str | None = await self._postgres().value(SQL.expected_store)
        return mark

    async def expect_first(self, mark: str) -> str:
        """Expect `mark` if nothing is expected yet; what is expected now. Raises: as `expected`."""
        await self._postgres().run(SQL.expect_first_store, mark=mark)
        return await self.expected() or mark

    async def expect(self, mark: str) -> None:
        """Expect `mark` from now on. Raises: as `expected`."""
        await self._postgres().run(SQL.expect_store, mark=mark)
