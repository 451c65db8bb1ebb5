"""What the commands of views read and print."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from typing import Any

import click

from headrace.kernel.terminal import parse_moment, table
from headrace.views.errors import InvalidSpan
from headrace.views.model import Total


class Moment(click.ParamType[datetime]):
    """`2026-11-21`, `2026-11-21T10:00`, `2026-11-21T10:00:00+01:00`; without an offset it is UTC."""

    name = "moment"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,  # noqa: ARG002 - click's signature
    ) -> datetime:
        """The moment."""
        if isinstance(value, datetime):
            return value
        try:
            return parse_moment(str(value))
        except ValueError as error:
            raise InvalidSpan(
                f"{param.opts[0] if param else 'moment'}: expected a moment such as 2026-11-21T10:00Z, got"
                f" {str(value)[:40]!r}"
            ) from error


class Day(click.ParamType[date]):
    """`2026-11-21`."""

    name = "day"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,  # noqa: ARG002 - click's signature
    ) -> date:
        """The day."""
        if isinstance(value, date):
            return value
        try:
            return date.fromisoformat(str(value))
        except ValueError as error:
            raise InvalidSpan(
                f"{param.opts[0] if param else 'day'}: expected a day such as 2026-11-21, got"
                f" {str(value)[:40]!r}"
            ) from error


def describe_totals(totals: Sequence[Total]) -> str:
    """Totals as a table of what was asked for."""
    names = [
        name
        for name in ("total", "today", "unique")
        if name == "total" or any(getattr(row, name) is not None for row in totals)
    ]
    classes = sorted({name for row in totals for name in row.classes or ()})
    rows = [
        [
            row.id,
            *(_number(getattr(row, name)) for name in names),
            *(_number((row.classes or {}).get(name)) for name in classes),
            "stale" if row.stale else "",
        ]
        for row in totals
    ]
    return table(["id", *names, *classes, ""], rows)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
