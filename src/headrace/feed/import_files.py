"""Files of follows and posts, read line by line in bounded memory.

A file is CSV with a header or one JSON object per line, recognized by its first character. Lines
are imported in calls of up to IMPORT_STEP, each all or none; a call of follows has one viewer. So
an error can state up to which line everything is imported. Existing entries stay unchanged, so the
corrected file is imported again as a whole.
"""

from __future__ import annotations

import csv
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from typing import Any, Final, TypeVar

import msgspec

from headrace.feed.errors import ImportStopped, InvalidLine, InvalidPost
from headrace.feed.model import FeedId, NewPost, require_feed_id, require_posts
from headrace.kernel.config import parse_as, parse_moment
from headrace.kernel.errors import Conflict, HeadraceError, InvalidInput

IMPORT_STEP: Final = 1_000
COLUMNS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "follows": (("viewer", "author"), ("at",)),
    "posts": (("author", "id"), ("at", "ref", "kind")),
}
"""Required and optional columns of each kind of file."""
Line = TypeVar("Line")
Follow = tuple[FeedId, FeedId, datetime | None]


async def import_in_steps(
    lines: Iterable[tuple[int, Line]],
    write: Callable[[list[Line]], Awaitable[int]],
    *,
    group: Callable[[Line], object],
) -> int:
    """Write lines in steps of one `group` each. Return the sum of the results.

    Raises: InvalidLine, ImportStopped.
    """
    count = done = 0
    numbers, part = list[int](), list[Line]()

    async def flush() -> None:
        nonlocal count, done
        if not part:
            return
        try:
            count += await write(part)
        except (InvalidInput, Conflict) as error:
            where = (numbers[0], numbers[-1])
            raise ImportStopped(_reason(error), lines=where, done=done) from error
        done = numbers[-1]
        numbers.clear()
        part.clear()

    try:
        for number, line in lines:
            if part and (len(part) == IMPORT_STEP or group(line) != group(part[-1])):
                await flush()
            numbers.append(number)
            part.append(line)
    except InvalidLine as error:
        await flush()
        raise InvalidLine(error.number, error.reason, done=done) from error
    await flush()
    return count


def rows_of(file: Iterable[bytes], kind: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Lines of a file with their numbers, validated against the columns of `kind`.

    Raises: InvalidLine.
    """
    lines, skipped, first = _texts(file), 0, ""
    for first in lines:
        if first.strip():
            break
        skipped += 1
    rows = _json_rows if first.lstrip().startswith("{") else _csv_rows
    needed, allowed = COLUMNS[kind]
    for number, row in rows(chain([first], lines), skipped):
        missing = [name for name in needed if row.get(name) in (None, "")]
        unknown = [name for name in row if name not in (*needed, *allowed)]
        if missing or unknown:
            expected = ", ".join((*needed, *(f"{name} (optional)" for name in allowed)))
            raise InvalidLine(number, f"expected {expected}, got {', '.join(map(str, row))}")
        yield number, row


def _texts(file: Iterable[bytes]) -> Iterator[str]:
    """Lines as text, without a byte order mark."""
    for number, line in enumerate(file, 1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            where = f"byte {error.start + 1} is 0x{line[error.start]:02x}"
            raise InvalidLine(number, f"not UTF-8 ({where}): save the file as UTF-8") from error
        yield text.removeprefix("\ufeff") if number == 1 else text


def _json_rows(lines: Iterable[str], skipped: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, skipped + 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except RecursionError as error:
            raise InvalidLine(number, "the JSON is nested too deeply: flatten it") from error
        except msgspec.DecodeError as error:
            raise InvalidLine(number, f"not JSON ({error})") from error
        if not isinstance(row, dict):
            raise InvalidLine(number, "expected a JSON object")
        yield number, row


def _csv_rows(lines: Iterable[str], skipped: int) -> Iterator[tuple[int, dict[str, Any]]]:
    number = skipped

    def numbered() -> Iterator[str]:
        nonlocal number
        for line in lines:
            number += 1
            yield line

    try:
        for row in csv.DictReader(numbered(), restkey="too many", strict=True):
            yield number, {name: value for name, value in row.items() if value}
    except csv.Error as error:
        raise InvalidLine(number, f"not CSV ({error})") from error


def follow_of(row: Mapping[str, Any], number: int) -> Follow:
    """Viewer, author and moment of a line. Raises: InvalidLine."""
    try:
        viewer = require_feed_id("viewer", row["viewer"])
        return viewer, require_feed_id("author", row["author"]), _moment(row)
    except InvalidInput as error:
        raise InvalidLine(number, _reason(error)) from error


def post_of(row: Mapping[str, Any], number: int) -> NewPost:
    """The post of a line. Raises: InvalidLine."""
    try:
        post = NewPost(
            author=row["author"],
            id=row["id"],
            at=_moment(row),
            ref=row.get("ref"),
            kind=row.get("kind"),
        )
        return require_posts([post])[0]
    except InvalidInput as error:
        raise InvalidLine(number, _reason(error)) from error


def _reason(error: HeadraceError) -> str:
    """The error without its statement about the call, which does not apply to the whole file."""
    return error.text.partition("; nothing")[0]


def _moment(row: Mapping[str, Any]) -> datetime | None:
    """Raises: InvalidPost."""
    if row.get("at") in (None, ""):
        return None
    return parse_as(parse_moment, "at", str(row["at"]), InvalidPost)
