"""The command that brings in a file: `penstock feed import follows|posts FILE`.

A file is read line by line in bounded memory, CSV with a head or a JSON object a line, whichever its first character says.
What is there already stays as it is, so a file may be imported again.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from typing import Any, Final, TextIO

import click
import msgspec

from penstock.feed.cli.text import moment_of
from penstock.feed.errors import InvalidLine, InvalidPost
from penstock.feed.model import FeedId, NewPost
from penstock.feed.service import Feed
from penstock.kernel.terminal import Terminal

TOLD_EVERY: Final = 10_000
COLUMNS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "follows": (("viewer", "author"), ("at",)),
    "posts": (("author", "id"), ("at", "ref")),
}
"""Of each kind what a line must have, and what it may have."""


@click.command("import", short_help="Bring in follows or posts from a file.")
@click.argument("kind", type=click.Choice(list(COLUMNS)))
@click.argument("file", type=click.File("r", encoding="utf-8"))
@click.pass_obj
def import_lines(terminal: Terminal, kind: str, file: TextIO) -> None:
    """Bring in FILE (- is standard input): CSV with a head, or a JSON object a line.

    follows: viewer, author, at (since when; may be missing). posts: author, id, at, ref (the last two may be missing).
    Lines of one viewer are best kept together.
    """
    lines = counted(terminal, rows_of(file, kind))
    if kind == "follows":
        follows = (_follow(row, number) for number, row in lines)
        count = terminal.run(Feed, lambda feed: feed.import_follows(follows))
        terminal.show({"follows": count}, f"{count} new follows")
        return
    posts = (_post(row, number) for number, row in lines)
    count = terminal.run(Feed, lambda feed: feed.import_posts(posts))
    terminal.show({"posts": count}, f"{count} posts are in")


def rows_of(file: Iterable[str], kind: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The lines of a file with their numbers, each with the columns of `kind` alone. Raises: InvalidLine."""
    lines = iter(file)
    first = next(lines, "").lstrip("\ufeff")
    rows = _json_rows if first.lstrip().startswith("{") else _csv_rows
    needed, allowed = COLUMNS[kind]
    for number, row in rows(chain([first], lines)):
        missing = [name for name in needed if row.get(name) in (None, "")]
        unknown = [name for name in row if name not in (*needed, *allowed)]
        if missing or unknown:
            expected = ", ".join((*needed, *(f"{name} (may be missing)" for name in allowed)))
            raise InvalidLine(number, f"expected {expected}, got {', '.join(map(str, row))}")
        yield number, row


def counted(
    terminal: Terminal, rows: Iterable[tuple[int, Mapping[str, Any]]]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The same, while the terminal shows how far it is."""
    for number, row in rows:
        if number % TOLD_EVERY == 0:
            terminal.progress(f"line {number}")
        yield number, row


def _json_rows(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise InvalidLine(number, f"no JSON ({error})") from error
        if not isinstance(row, dict):
            raise InvalidLine(number, "expected a JSON object")
        yield number, row


def _csv_rows(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(lines, restkey="too many", strict=True)
    try:
        for row in reader:
            yield reader.line_num, {name: value for name, value in row.items() if value}
    except csv.Error as error:
        raise InvalidLine(reader.line_num, f"no CSV ({error})") from error


def _follow(row: Mapping[str, Any], number: int) -> tuple[FeedId, FeedId, datetime | None]:
    return row["viewer"], row["author"], _moment(row, number)


def _post(row: Mapping[str, Any], number: int) -> NewPost:
    ref = row.get("ref")
    if ref is not None and not isinstance(ref, str):
        raise InvalidLine(number, f"ref: expected text, got {str(ref)[:40]!r}")
    return NewPost(author=row["author"], id=row["id"], at=_moment(row, number), ref=ref)


def _moment(row: Mapping[str, Any], number: int) -> datetime | None:
    if row.get("at") in (None, ""):
        return None
    try:
        return moment_of(str(row["at"]), where="at")
    except InvalidPost as error:
        raise InvalidLine(number, error.text) from error
