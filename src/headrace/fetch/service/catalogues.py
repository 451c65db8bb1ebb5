"""Runs of catalogues, their reports, and the schemas and mappings that rows are validated with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres, Tx
from headrace.fetch import store
from headrace.fetch.catalogues import Catalogues
from headrace.fetch.errors import MappingUnknown, RunUnknown, SchemaUnknown
from headrace.fetch.i18n import DEFAULT, Texts
from headrace.fetch.mappings import Mapping, NamedMapping, require_mapping
from headrace.fetch.model import BIGINT_MAX, Change, PhotoProblem, RowProblem, Run, RunState
from headrace.fetch.reports import (
    csv_head,
    csv_of,
    line_of_file,
    line_of_photo,
    line_of_row,
    page_of,
)
from headrace.fetch.schemas import (
    CategorySchema,
    Schema,
    plain_category,
    require_category,
    require_schema,
)
from headrace.fetch.settings import FetchConfig
from headrace.fetch.sql import SQL
from headrace.fetch.validation import find_item_id
from headrace.kernel.ids import USER_ID, require_new_id
from headrace.kernel.routes import PAGE_ROWS_MAX

PAGE_LINES_MAX: Final = PAGE_ROWS_MAX
"""Rows and photos on the page; CSV and JSON list all."""


class Runs:
    """Runs of catalogues: `fetch.runs`."""

    def __init__(self, postgres: Postgres, catalogues: Catalogues) -> None:
        self._postgres = postgres
        self._catalogues = catalogues

    async def get(self, run_id: int, *, tx: Tx | None = None) -> Run:
        """State and counts of a run, as `tx` sees it if given. Raises: RunUnknown."""
        is_id = isinstance(run_id, int) and 0 < run_id <= BIGINT_MAX
        runner = tx or self._postgres
        found = await store.runs.find_runs(runner, run_ids=[run_id]) if is_id else []
        if not found:
            raise RunUnknown(run_id)
        return found[0]

    async def newest(
        self,
        customer: str | None = None,
        *,
        states: Iterable[RunState] | None = None,
        before: int | None = None,
        runs_max: int = 50,
    ) -> list[Run]:
        """The newest runs, of one customer or of all, in some states or in any.

        With `before` only smaller ids. Raises: CustomerUnknown.
        """
        if customer is not None:
            await store.runs.get_customer(self._postgres, customer)
        rows_max = min(max(1, runs_max), PAGE_ROWS_MAX)
        return await store.runs.find_runs(
            self._postgres,
            customer=customer,
            states=None if states is None else [state.value for state in states],
            before=None if before is None else min(max(0, before), BIGINT_MAX),
            rows_max=rows_max,
        )

    async def confirm(self, run_id: int) -> Run:
        """Apply a held run. Raises: RunUnknown, RunNotHeld, RunUnderWay, RunsBusy."""
        await self._catalogues.confirm(await self.get(run_id))
        return await self.get(run_id)

    async def discard(self, run_id: int) -> Run:
        """Close a held run without applying it.

        Raises: RunUnknown, RunNotHeld, RunUnderWay, RunsBusy.
        """
        await self._catalogues.discard(await self.get(run_id))
        return await self.get(run_id)

    async def undo(self, run_id: int) -> Run:
        """Restore the customer's items to their state before a run; return the run that does so.

        Raises: RunUnknown, RunNotUndoable, RunUnderWay, RunsBusy.
        """
        undone = await self.get(run_id)
        return await self.get(await self._catalogues.undo(undone))

    async def changes(
        self, run_id: int, *, after: str = "", rows_max: int = PAGE_ROWS_MAX
    ) -> list[Change]:
        """Changes of a run, or of a dry or held one if applied, behind item `after`.

        Raises: RunUnknown.
        """
        await self.get(run_id)
        rows_max = min(max(1, rows_max), PAGE_ROWS_MAX)
        # A text that is no item id starts at the first item; PostgreSQL would reject some texts.
        behind = find_item_id(after) or ""
        return await store.runs.changes(
            self._postgres.reads, run_id, after=behind, rows_max=rows_max
        )


class Schemas:
    """Schemas of categories: `fetch.schemas`. A change applies from the next run on."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def all(self) -> list[CategorySchema]:
        """Every schema, by category."""
        return await store.runs.find_schemas(self._postgres)

    async def get(self, category: str) -> CategorySchema:
        """The schema of a category. Raises: SchemaUnknown."""
        plain = plain_category(category)
        found = await store.runs.find_schemas(self._postgres, plain) if plain.isprintable() else []
        if not found:
            raise SchemaUnknown(category)
        return found[0]

    async def set(self, category: str, schema: Schema) -> CategorySchema:
        """Create or replace the schema of a category. Raises: InvalidSchema."""
        name = require_category(category)
        require_schema(schema)
        return await store.runs.set_schema(self._postgres, plain_category(name), name, schema)

    async def remove(self, category: str) -> None:
        """Delete a schema; the default one then applies to its category. Raises: SchemaUnknown."""
        found = await self.get(category)
        await self._postgres.run(SQL.drop_schema, plain=plain_category(found.category))


class Mappings:
    """Mappings of column names: `fetch.mappings`. A change applies from the next run on."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def all(self) -> list[NamedMapping]:
        """Every mapping, by name."""
        return await store.runs.find_mappings(self._postgres)

    async def get(self, name: str) -> NamedMapping:
        """A mapping. Raises: MappingUnknown."""
        is_named = USER_ID.fullmatch(name) is not None
        found = await store.runs.find_mappings(self._postgres, name) if is_named else []
        if not found:
            raise MappingUnknown(name)
        return found[0]

    async def set(self, name: str, mapping: Mapping) -> NamedMapping:
        """Create or replace a mapping. Raises: InvalidId, InvalidMapping."""
        require_new_id("mapping", name)
        require_mapping(mapping)
        return await store.runs.set_mapping(self._postgres, name, mapping)

    async def remove(self, name: str) -> None:
        """Delete a mapping; sources that use it fail with MappingUnknown.

        Raises: MappingUnknown.
        """
        if not USER_ID.fullmatch(name) or not await self._postgres.run(SQL.drop_mapping, name=name):
            raise MappingUnknown(name)


class Reports:
    """Problems that a seller must fix, in a chosen language: `fetch.reports`."""

    def __init__(self, postgres: Postgres, runs: Runs, config: FetchConfig) -> None:
        self._postgres = postgres
        self._config = config
        self._runs = runs

    async def problems(
        self, run_id: int, *, after: int = 0, rows_max: int = PAGE_ROWS_MAX, lang: str = DEFAULT
    ) -> list[tuple[int, RowProblem]]:
        """(position, problem) of a run's rows behind position `after`.

        Raises: RunUnknown, LanguageUnknown.
        """
        texts = Texts.load(lang, self._config)
        await self._runs.get(run_id)
        return await self._rows(run_id, texts, after=after, rows_max=rows_max)

    async def photo_problems(
        self, run_id: int, *, after: int = 0, rows_max: int = PAGE_ROWS_MAX, lang: str = DEFAULT
    ) -> list[tuple[int, PhotoProblem]]:
        """(position, photo) of a run's failed and refused photos.

        Raises: RunUnknown, LanguageUnknown.
        """
        texts = Texts.load(lang, self._config)
        await self._runs.get(run_id)
        return await self._photos(run_id, texts, after=after, rows_max=rows_max)

    async def reason(self, run_id: int, *, lang: str = DEFAULT) -> str:
        """Reason why a run is held, refused or abandoned; empty for other states.

        Raises: RunUnknown, LanguageUnknown.
        """
        return Texts.load(lang, self._config).of_run(await self._runs.get(run_id))

    async def csv(self, run_id: int, *, lang: str = DEFAULT) -> AsyncIterator[str]:
        """Problems of the file, then of its rows, then of photos, as CSV, a page at a time.

        The header alone for a run without problems. Raises: RunUnknown, LanguageUnknown.
        """
        texts = Texts.load(lang, self._config)
        run = await self._runs.get(run_id)
        yield csv_head()
        if reason := texts.of_run(run):
            yield csv_of([line_of_file(run, reason)])
        position = 0
        while rows := await self._rows(run_id, texts, after=position):
            position = rows[-1][0]
            yield csv_of(line_of_row(problem) for _, problem in rows)
        position = 0
        while photos := await self._photos(run_id, texts, after=position):
            position = photos[-1][0]
            yield csv_of(line_of_photo(photo) for _, photo in photos)

    async def page(self, run_id: int, *, lang: str = DEFAULT) -> str:
        """An HTML page with up to 1,000 rows and as many photos.

        Raises: RunUnknown, LanguageUnknown.
        """
        texts = Texts.load(lang, self._config)
        run = await self._runs.get(run_id)
        rows = await self.problems(run_id, rows_max=PAGE_LINES_MAX, lang=lang)
        photos = await self.photo_problems(run_id, rows_max=PAGE_LINES_MAX, lang=lang)
        problems = [problem for _, problem in rows]
        return page_of(run, problems, [photo for _, photo in photos], texts)

    async def _rows(
        self, run_id: int, texts: Texts, *, after: int, rows_max: int = PAGE_ROWS_MAX
    ) -> list[tuple[int, RowProblem]]:
        found = await store.runs.row_problems(
            self._postgres.reads, run_id, after=_position(after), rows_max=_page(rows_max)
        )
        return [
            (position, msgspec.structs.replace(problem, text=texts.of_row(problem)))
            for position, problem in found
        ]

    async def _photos(
        self, run_id: int, texts: Texts, *, after: int, rows_max: int = PAGE_ROWS_MAX
    ) -> list[tuple[int, PhotoProblem]]:
        found = await store.runs.photo_problems(
            self._postgres.reads, run_id, after=_position(after), rows_max=_page(rows_max)
        )
        return [
            (position, msgspec.structs.replace(photo, text=texts.outcome(photo.outcome)))
            for position, photo in found
        ]


def _position(after: int) -> int:
    return min(max(0, after), BIGINT_MAX)


def _page(rows_max: int) -> int:
    return min(max(1, rows_max), PAGE_ROWS_MAX)
