"""Commands that count and tell: `headrace views hit|get|series|top`."""

from __future__ import annotations

from datetime import date, datetime
from typing import Final

import click

from headrace.kernel.config import parse_duration_s
from headrace.kernel.terminal import Terminal, table
from headrace.views.cli.text import Day, Moment, describe_totals
from headrace.views.errors import InvalidSpan
from headrace.views.model import CLASSES, FIELDS, TOP_MAX, Hit, Traffic
from headrace.views.service import Views

CLASS: Final = click.Choice([str(one.value) for one in CLASSES])


@click.command("hit", short_help="Count views.")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option("-n", "n", type=int, default=1, show_default=True, help="Views of each.")
@click.option("--viewer", default=None, help="Who looked, for the number of viewers a day.")
@click.option("--event", default=None, help="Counts once in 24 hours under this id.")
@click.option("--class", "traffic", type=CLASS, default="human", show_default=True)
@click.pass_obj
def hit_items(
    terminal: Terminal,
    ids: tuple[str, ...],
    *,
    n: int,
    viewer: str | None,
    event: str | None,
    traffic: str,
) -> None:
    """Count a view of each ID and show the totals."""
    hits = [Hit(id=one, n=n, viewer=viewer, event=event, traffic=Traffic(traffic)) for one in ids]
    found = terminal.run(Views, lambda views: views.hits(hits))
    terminal.show(found, describe_totals(found))


@click.command("get", short_help="Show totals.")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option(
    "--fields", default="total", show_default=True, help=f"Some of {','.join(FIELDS)}, by commas."
)
@click.pass_obj
def get_totals(terminal: Terminal, ids: tuple[str, ...], *, fields: str) -> None:
    """Show the totals of each ID."""
    wanted = tuple(part.strip() for part in fields.split(","))
    found = terminal.run(Views, lambda views: views.totals(ids, fields=wanted))
    terminal.show(found, describe_totals(found))


@click.command("series", short_help="Show views by hour or day.")
@click.argument("id")
@click.option("--by", type=click.Choice(["hour", "day"]), default="day", show_default=True)
@click.option("--from", "from_at", type=Moment(), default=None, help="From this moment on.")
@click.option("--to", "to_at", type=Moment(), default=None, help="Until before this moment.")
@click.pass_obj
def show_series(
    terminal: Terminal,
    id: str,  # noqa: A002 - as it is called everywhere
    *,
    by: str,
    from_at: datetime | None,
    to_at: datetime | None,
) -> None:
    """Show views of ID by hour or day: 2 days of hours, or today and 30 days before, unless said otherwise."""
    found = terminal.run(Views, lambda views: views.series(id, by, from_at=from_at, to_at=to_at))
    rows = [
        (f"{row.start_at:%Y-%m-%d %H:%M}", row.human, row.bot, row.owner, row.staff)
        for row in found
    ]
    terminal.show(found, table(("start (UTC)", *CLASSES), rows) if found else "no views")


@click.command("viewers", short_help="Show viewers by day.")
@click.argument("id")
@click.option("--from", "from_day", type=Day(), default=None, help="From this day on.")
@click.option("--to", "to_day", type=Day(), default=None, help="Until before this day.")
@click.pass_obj
def show_viewers(
    terminal: Terminal,
    id: str,  # noqa: A002 - as it is called everywhere
    *,
    from_day: date | None,
    to_day: date | None,
) -> None:
    """Show about how many viewers ID had on each day: today and 30 days before, unless given otherwise."""
    found = terminal.run(Views, lambda views: views.viewers(id, from_day=from_day, to_day=to_day))
    rows = [(row.day.isoformat(), row.viewers) for row in found]
    terminal.show(found, table(("day", "viewers"), rows) if found else "no viewers")


@click.command("top", short_help="Show the most viewed items.")
@click.option("--window", default="24h", show_default=True, help="Views of this time, such as 7d.")
@click.option(
    "--max", "limit", type=click.IntRange(1, TOP_MAX), default=20, show_default=True,
    help="The most to show.",
)  # fmt: skip
@click.option("--class", "traffic", type=CLASS, default="human", show_default=True)
@click.pass_obj
def show_top(terminal: Terminal, *, window: str, limit: int, traffic: str) -> None:
    """Show the items with the most views, most first."""
    try:
        window_s = parse_duration_s(window)
    except ValueError as error:
        raise InvalidSpan(f"--window: expected {error}, got {window[:40]!r}") from error
    found = terminal.run(Views, lambda views: views.top(window_s, limit, traffic=traffic))
    rows = [(row.views, row.id) for row in found]
    terminal.show(found, table(("views", "id"), rows) if found else "no views")
