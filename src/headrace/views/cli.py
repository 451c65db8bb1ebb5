"""Commands of views: `headrace views hit|get|series|viewers|top|export|changes|rm|...`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final

import click

from headrace.kernel.config import parse_as, parse_duration_s, parse_moment
from headrace.kernel.errors import Corrupt
from headrace.kernel.terminal import (
    CommandGroup,
    Lines,
    Parsed,
    Terminal,
    listing,
    paged,
    pluralize,
    table,
)
from headrace.views.analytics import PERIODS, SPANS
from headrace.views.errors import InvalidSpan
from headrace.views.exports import IDS_MAX, ROWS_MAX, follow, whole_file
from headrace.views.model import CLASSES, FIELDS, TOP_MAX, ExportRow, Hit, Total, Traffic
from headrace.views.service import Views

FILE_HELP: Final = "Write all pages to this .csv or .parquet file."
FOLDER_HELP: Final = "Write all new changes to files in this folder."
SERIES_HEAD: Final = ("start (UTC)", "human", "bot", "owner of ID", "staff")
NO_SERIES: Final = "no views in this span; new views appear within seconds"
CLASS: Final = click.Choice([str(one.value) for one in CLASSES])


def parse_day(text: str) -> date:
    """Parse a date. Raises: ValueError."""
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ValueError("a day such as 2026-11-21") from error


MOMENT: Final = Parsed(parse_moment, InvalidSpan, name="moment")
DAY: Final = Parsed(parse_day, InvalidSpan, name="day")


@click.group("views", cls=CommandGroup)
def views() -> None:
    """Count, read and check views of items."""


@views.command("hit", short_help="Count views.")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option("-n", "n", type=int, default=1, show_default=True, help="Views of each item.")
@click.option(
    "--viewer", default=None, help="Id of the viewer, to count different viewers per day."
)
@click.option(
    "--event",
    default=None,
    help="Id of this call; repeated within 24 hours it counts no second time.",
)
@click.option("--class", "traffic", type=CLASS, default="human", show_default=True)
@click.option("--counter", "counters", multiple=True, help="Also count 1 for this name.")
def hit_items(
    terminal: Terminal,
    ids: tuple[str, ...],
    *,
    n: int,
    viewer: str | None,
    event: str | None,
    traffic: str,
    counters: tuple[str, ...],
) -> None:
    """Count a view of each ID and show the totals."""
    given: dict[str, Any] = {"viewer": viewer, "event": event, "counters": counters}
    hits = [Hit(id=one, n=n, traffic=Traffic(traffic), **given) for one in ids]
    found = terminal.run(Views, lambda views: views.hits(hits))
    terminal.show(listing(found), describe_totals(found))


@views.command("get", short_help="Show totals.")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option(
    "--fields",
    default="total",
    show_default=True,
    help=f"Comma-separated list of {', '.join(FIELDS)}.",
)
def get_totals(terminal: Terminal, ids: tuple[str, ...], *, fields: str) -> None:
    """Show the totals of each ID."""
    names = tuple(part.strip() for part in fields.split(","))
    found = terminal.run(Views, lambda views: views.totals(ids, fields=names))
    terminal.show(listing(found), describe_totals(found))


@views.command("series", short_help="Show views by hour, day or month.")
@click.argument("id")
@click.option("--by", type=click.Choice(["hour", "day", "month"]), default="day", show_default=True)
@click.option("--from", "from_at", type=MOMENT, default=None, help="First moment.")
@click.option("--to", "to_at", type=MOMENT, default=None, help="End, not included.")
def show_series(
    terminal: Terminal,
    id: str,  # noqa: A002 - public
    *,
    by: str,
    from_at: datetime | None,
    to_at: datetime | None,
) -> None:
    """Show views of ID by hour, day or month, with a column per class of viewers.

    The default span is 2 days for hours, today and the 30 days before it for days, and the current
    month and the 11 before it for months.
    """
    found = terminal.run(
        Views, lambda views: views.analytics.series(id, by, from_at=from_at, to_at=to_at)
    )
    rows = [
        (f"{row.start_at:%Y-%m-%d %H:%M}", row.human, row.bot, row.owner, row.staff)
        for row in found
    ]
    terminal.show(listing(found), table(SERIES_HEAD, rows) if found else NO_SERIES)


@views.command("viewers", short_help="Show viewers by day, week or month.")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option("--by", type=click.Choice(list(PERIODS)), default="day", show_default=True)
@click.option("--from", "from_day", type=DAY, default=None, help="First day.")
@click.option("--to", "to_day", type=DAY, default=None, help="End, not included.")
def show_viewers(
    terminal: Terminal,
    ids: tuple[str, ...],
    *,
    by: str,
    from_day: date | None,
    to_day: date | None,
) -> None:
    """Estimate the number of different viewers of all IDs together.

    The default span is today and 30 days before it. A viewer of several IDs or days counts once per
    period; all: once in the whole span.
    """
    span: dict[str, Any] = {"from_day": from_day, "to_day": to_day}
    found = terminal.run(Views, lambda views: views.analytics.viewers(ids, by, **span))
    rows = [(row.day.isoformat(), row.viewers) for row in found]
    terminal.show(listing(found), table(("day", "viewers"), rows) if found else "no viewers")


@views.command("marks", short_help="Show marks of an item.")
@click.argument("id")
@click.option("--from", "from_at", type=MOMENT, default=None, help="First moment.")
@click.option("--to", "to_at", type=MOMENT, default=None, help="End, not included.")
def show_marks(terminal: Terminal, /, id: str, **span: Any) -> None:  # noqa: A002 - public
    """Show the marks of ID that overlap a span; by default the last 30 days."""
    found = terminal.run(Views, lambda views: views.analytics.marks(id, **span))
    form = "%Y-%m-%d %H:%M"
    rows = [
        (row.name, f"{row.from_at:{form}}", f"{row.to_at:{form}}" if row.to_at else "-")
        for row in found
    ]
    text = table(("mark", "from (UTC)", "to"), rows) if found else "no marks"
    terminal.show(listing(found), text)


@views.command("mark", short_help="Mark a period of an item.")
@click.argument("id")
@click.argument("name")
@click.option("--from", "from_at", type=MOMENT, default=None, help="Begin; default: now.")
@click.option("--to", "to_at", type=MOMENT, default=None, help="End; default: not ended.")
def mark_item(terminal: Terminal, /, id: str, name: str, **span: Any) -> None:  # noqa: A002 - public
    """Mark a period of ID with NAME, such as promoted; the same --from again changes its end."""
    marked = terminal.run(Views, lambda views: views.corrections.mark(id, name, **span))
    terminal.show(marked, f"marked {id} as {name} from {marked.from_at:%Y-%m-%d %H:%M} UTC")


@views.command("unmark", short_help="Delete marks of an item.")
@click.argument("id")
@click.argument("name")
@click.option(
    "--from", "from_at", type=MOMENT, default=None, help="Only the mark that begins then."
)
def unmark_item(terminal: Terminal, /, id: str, name: str, **span: Any) -> None:  # noqa: A002 - public
    """Delete all marks NAME of ID, or one of them."""
    count = terminal.run(Views, lambda views: views.corrections.unmark(id, name, **span))
    terminal.show({"deleted": count}, f"deleted {pluralize(count, 'mark')}")


@views.command("top", short_help="Show the most viewed items.")
@click.option("--window", default="24h", show_default=True, help="Length of time, such as 7d.")
@click.option(
    "--max",
    "limit",
    type=click.IntRange(1, TOP_MAX),
    default=20,
    show_default=True,
    help="Number of items.",
)
@click.option("--class", "traffic", type=CLASS, default="human", show_default=True)
def show_top(terminal: Terminal, *, window: str, limit: int, traffic: str) -> None:
    """Show the items with the most views, most first."""
    window_s = parse_as(parse_duration_s, "--window", window, InvalidSpan)
    found = terminal.run(Views, lambda views: views.analytics.top(window_s, limit, traffic=traffic))
    rows = [(row.views, row.id) for row in found]
    terminal.show(listing(found), table(("views", "id"), rows) if found else "no views")


@views.command("export", short_help="Export series of all items.")
@click.option("--by", type=click.Choice(list(SPANS)), default="day", show_default=True)
@click.option("--from", "from_at", type=MOMENT, default=None, help="First moment.")
@click.option("--to", "to_at", type=MOMENT, default=None, help="End, not included.")
@click.option("--after", default="", metavar="ID", help="Continue after this item.")
@click.option("--max", "limit", type=click.IntRange(1, IDS_MAX), default=100, show_default=True)
@click.option("--file", "path", type=click.Path(path_type=Path), default=None, help=FILE_HELP)
def export_series(
    terminal: Terminal, *, after: str, limit: int, path: Path | None, **span: Any
) -> None:
    """Show views of up to --max items, or write those of all items to a file.

    The file appears when it is complete.
    """
    if path is not None:
        form = path.suffix.removeprefix(".")
        if form not in ("csv", "parquet"):
            raise InvalidSpan(f"--file {path.name}: expected a name with .csv or .parquet")

        async def export(views: Views) -> int:
            pages = _pages(views, after=after, span=span)
            return await _export_all(terminal, pages, path, form)

        count = terminal.run(Views, export)
        terminal.show({"rows": count}, f"wrote {pluralize(count, 'row')} to {path}")
        return
    page = terminal.run(
        Views, lambda views: views.exports.series(after=after, ids_max=limit, **span)
    )
    text = paged(_rows_table(page.rows), page.after, "more: --after")
    terminal.show(listing(page.rows, next_cursor=page.after), text)


@views.command("changes", short_help="Read changes of view counts.")
@click.option("--after", default="", metavar="POSITION", help="Position of the last page, or now.")
@click.option("--max", "limit", type=click.IntRange(1, ROWS_MAX), default=ROWS_MAX)
@click.option("--folder", type=click.Path(path_type=Path), default=None, help=FOLDER_HELP)
@click.option("--format", "form", type=click.Choice(["csv", "parquet"]), default="csv")
def read_changes(
    terminal: Terminal, *, after: str, limit: int, folder: Path | None, form: str
) -> None:
    """Show a page of changes of view counts, or write all new ones to numbered files of a folder.

    The folder keeps the position: run the command again for the next changes, also after it was
    killed. The files contain every change once.
    """
    if folder is not None:
        count, position = terminal.run(Views, lambda views: follow(views.exports, folder, form))
        value = {"changes": count, "position": position}
        terminal.show(value, f"wrote {pluralize(count, 'change')} to {folder}")
        return
    page = terminal.run(Views, lambda views: views.exports.changes(after, rows_max=limit))
    text = paged(_rows_table(page.changes), page.position, "continue with --after")
    terminal.show(listing(page.changes, next_cursor=page.position), text)


async def _pages(views: Views, *, after: str, span: Any) -> AsyncIterator[list[ExportRow]]:
    """All pages of an export."""
    following: str | None = after
    while following is not None:
        page = await views.exports.series(after=following, **span)
        yield page.rows
        following = page.after


async def _export_all(
    terminal: Terminal, pages: AsyncIterator[list[ExportRow]], path: Path, form: str
) -> int:
    """Write all rows to a file; return their number."""
    count = 0
    with whole_file(path, form) as writer:
        async for rows in pages:
            writer.write(rows)
            count += len(rows)
            terminal.progress(f"wrote {pluralize(count, 'row')}")
    return count


def _rows_table(rows: Sequence[ExportRow]) -> str:
    cells = [(row.id, f"{row.start_at:%Y-%m-%d %H:%M}", row.traffic, row.views) for row in rows]
    return table(("id", "start (UTC)", "class", "views"), cells) if rows else "no rows"


@views.command("rm", short_help="Delete all views of an item.")
@click.argument("id")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
def remove_item(terminal: Terminal, id: str, *, dry_run: bool) -> None:  # noqa: A002 - public
    """Delete all views of ID, and ignore new ones for 30 days."""
    if dry_run:
        found = terminal.run(Views, lambda views: views.totals([id], fields=("total", "classes")))
        terminal.show(found[0], Lines("would delete", describe_totals(found)))
        return
    deleted = terminal.run(Views, lambda views: views.delete(id))
    until = f"{deleted.until_at:%Y-%m-%d %H:%M} UTC"
    terminal.show(
        deleted,
        f"deleted {deleted.id} with {pluralize(deleted.total, 'view')};"
        f" hits are dropped until {until}",
    )


@views.command("verify", short_help="Compare totals with the sums of their hours.")
def verify(terminal: Terminal) -> int:
    """Compare every total with the sum of its hours. Exit code 8 if any differs."""
    terminal.progress("comparing totals with hours")
    found = terminal.run(Views, lambda views: views.analytics.verify())
    lines: list[str] = [
        f"{pluralize(found.entities, 'item')} with {pluralize(found.views, 'view')}"
    ]
    if found.differences:
        rows = [(row.id, row.traffic.value, row.total, row.hours) for row in found.differences]
        lines.append(table(("id", "class", "total", "hours"), rows))
    else:
        lines.append("every total is the sum of its hours")
    terminal.show(found, Lines(*lines))
    return Corrupt.exit_code if found.differences else 0


@views.command("reclassify", short_help="Move views between classes.")
@click.argument("id")
@click.option("--from", "from_at", type=MOMENT, required=True, help="First hour.")
@click.option("--to", "to_at", type=MOMENT, required=True, help="End, not included.")
@click.option("--source", type=CLASS, required=True, help="Class to take views from.")
@click.option("--target", type=CLASS, required=True, help="Class to add them to.")
def reclassify(terminal: Terminal, /, id: str, **options: Any) -> None:  # noqa: A002 - public
    """Move the views of ID in whole hours to another class, such as from human to bot, as a job."""
    job = terminal.run(Views, lambda views: views.corrections.reclassify(id, **options))
    terminal.show({"job": job}, f"enqueued job {job}: see `headrace jobs show {job}`")


@views.command("lag", short_help="Show how many views PostgreSQL lacks yet.")
def show_lag(terminal: Terminal) -> None:
    """Show how many counted views are only in Valkey yet, for each shard of the items."""
    found = terminal.run(Views, lambda views: views.analytics.lag())
    rows = [
        (row.shard, row.pending, f"{row.oldest_s:.1f} s", row.through, row.flusher or "none")
        for row in found
    ]
    head = ("shard", "pending", "oldest", "flushed to", "flusher")
    terminal.show(listing(found), table(head, rows))


def describe_totals(totals: Sequence[Total]) -> str:
    """Totals as a table of the fields that any of them has."""
    names = [
        name
        for name in ("total", "today", "unique")
        if name == "total" or any(getattr(row, name) is not None for row in totals)
    ]
    classes = sorted({name for row in totals for name in _parts_of(row)})
    rows = [
        [
            row.id,
            *(_number(getattr(row, name)) for name in names),
            *(_number(_parts_of(row).get(name)) for name in classes),
            "stale" if row.stale else "",
        ]
        for row in totals
    ]
    return table(["id", *names, *classes, ""], rows)


def _parts_of(total: Total) -> dict[str, int]:
    return {**(total.classes or {}), **(total.counters or {})}


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


COMMANDS: Final[list[click.Command]] = [views]
