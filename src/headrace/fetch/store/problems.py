"""What was wrong with the rows and photos of a run."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.engines.postgres import Runner
from headrace.fetch.model import PhotoProblem, RowProblem
from headrace.fetch.store.sql import SQL

_VALUES: Final = msgspec.json.Decoder(dict[str, str | int | float])


async def insert_problems(runner: Runner, run_id: int, problems: list[RowProblem]) -> None:
    """Keep `problems` in order."""
    await runner.run(
        SQL.insert_problems,
        run_id=run_id,
        numbers=[p.row for p in problems],
        lines=[p.line for p in problems],
        items=[p.item for p in problems],
        fields=[p.field for p in problems],
        codes=[p.code for p in problems],
        parameters=[msgspec.json.encode(p.values).decode() for p in problems],
    )


async def row_problems(
    runner: Runner, run_id: int, *, after: int, rows_max: int
) -> list[tuple[int, RowProblem]]:
    """(position, problem) of a page, without its text."""
    rows = await runner.all(SQL.problems, run_id=run_id, after=after, rows_max=rows_max)
    return [
        (
            row["id"],
            RowProblem(
                row=row["row_number"],
                line=row["line"],
                item=row["item"],
                field=row["field"],
                code=row["code"],
                values=_VALUES.decode(row["parameters"]),
            ),
        )
        for row in rows
    ]


async def photo_problems(
    runner: Runner, run_id: int, *, after: int, rows_max: int
) -> list[tuple[int, PhotoProblem]]:
    """(position, photo) of a page, without its text."""
    rows = await runner.all(SQL.photo_problems, run_id=run_id, after=after, rows_max=rows_max)
    return [
        (
            row["id"],
            PhotoProblem(
                item=row["item"],
                url=row["url"],
                outcome=row["outcome"],
                text="",
            ),
        )
        for row in rows
    ]
