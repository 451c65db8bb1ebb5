"""The verbs of reports: what was wrong with the rows and photos of a run, in a seller's language."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.model import BIGINT_MAX, PhotoProblem, RowProblem
from headrace.fetch.reports import (
    ReportLine,
    csv_head,
    csv_of,
    line_of_file,
    line_of_photo,
    line_of_row,
    page_of,
)
from headrace.fetch.service.runs import Runs
from headrace.fetch.settings import FetchConfig
from headrace.fetch.texts import DEFAULT, Texts
from headrace.kernel.routes import PAGE_ROWS_MAX

PAGE_LINES_MAX: Final = PAGE_ROWS_MAX
"""Rows and photos that the page shows; CSV and JSON have all."""


class Reports:
    """What a seller must mend: `fetch.reports`."""

    def __init__(self, postgres: Postgres, runs: Runs, config: FetchConfig) -> None:
        self._postgres = postgres
        self._config = config
        self._runs = runs

    async def problems(
        self, run_id: int, *, after: int = 0, rows_max: int = PAGE_ROWS_MAX, lang: str = DEFAULT
    ) -> list[tuple[int, RowProblem]]:
        """(position, problem) of a run's rows behind position `after`. Raises: RunUnknown, LanguageUnknown."""
        texts = Texts.load(lang, self._config)
        await self._runs.get(run_id)
        return await self._rows(run_id, texts, after=after, rows_max=rows_max)

    async def photo_problems(
        self, run_id: int, *, after: int = 0, rows_max: int = PAGE_ROWS_MAX, lang: str = DEFAULT
    ) -> list[tuple[int, PhotoProblem]]:
        """(position, photo) of those that failed or were refused. Raises: RunUnknown, LanguageUnknown."""
        texts = Texts.load(lang, self._config)
        await self._runs.get(run_id)
        return await self._photos(run_id, texts, after=after, rows_max=rows_max)

    async def reason(self, run_id: int, *, lang: str = DEFAULT) -> str:
        """Why a run is held, refused or abandoned; empty where it is not. Raises: RunUnknown, LanguageUnknown."""
        return Texts.load(lang, self._config).of_run(await self._runs.get(run_id))

    async def lines(self, run_id: int, *, lang: str = DEFAULT) -> AsyncIterator[list[ReportLine]]:
        """The fault of the file, those of rows and of photos, a page at a time. Raises: RunUnknown, LanguageUnknown."""
        texts = Texts.load(lang, self._config)
        run = await self._runs.get(run_id)
        if told := texts.of_run(run):
            yield [line_of_file(run, told)]
        position = 0
        while rows := await self._rows(run_id, texts, after=position):
            position = rows[-1][0]
            yield [line_of_row(problem) for _, problem in rows]
        position = 0
        while photos := await self._photos(run_id, texts, after=position):
            position = photos[-1][0]
            yield [line_of_photo(photo) for _, photo in photos]

    async def csv(self, run_id: int, *, lang: str = DEFAULT) -> AsyncIterator[str]:
        """All of it as CSV, a page at a time; a run without problems has the head alone.

        Raises: RunUnknown, LanguageUnknown.
        """
        yield csv_head()
        async for lines in self.lines(run_id, lang=lang):
            yield csv_of(lines)

    async def page(self, run_id: int, *, lang: str = DEFAULT) -> str:
        """A page for a browser, with up to 1,000 rows and as many photos. Raises: RunUnknown, LanguageUnknown."""
        texts = Texts.load(lang, self._config)
        run = await self._runs.get(run_id)
        rows = await self.problems(run_id, rows_max=PAGE_LINES_MAX, lang=lang)
        photos = await self.photo_problems(run_id, rows_max=PAGE_LINES_MAX, lang=lang)
        return page_of(
            run,
            [line_of_row(problem) for _, problem in rows],
            [line_of_photo(photo) for _, photo in photos],
            texts,
        )

    async def _rows(
        self, run_id: int, texts: Texts, *, after: int, rows_max: int = PAGE_ROWS_MAX
    ) -> list[tuple[int, RowProblem]]:
        found = await store.problems.row_problems(
            self._postgres, run_id, after=_place(after), rows_max=_page(rows_max)
        )
        return [
            (position, msgspec.structs.replace(problem, text=texts.of_row(problem)))
            for position, problem in found
        ]

    async def _photos(
        self, run_id: int, texts: Texts, *, after: int, rows_max: int = PAGE_ROWS_MAX
    ) -> list[tuple[int, PhotoProblem]]:
        found = await store.problems.photo_problems(
            self._postgres, run_id, after=_place(after), rows_max=_page(rows_max)
        )
        return [
            (position, msgspec.structs.replace(photo, text=texts.outcome(photo.outcome)))
            for position, photo in found
        ]


def _place(after: int) -> int:
    return min(max(0, after), BIGINT_MAX)


def _page(rows_max: int) -> int:
    return min(max(1, rows_max), PAGE_ROWS_MAX)
