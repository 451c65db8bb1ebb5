"""What the commands of the feed read and print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from penstock.feed.errors import InvalidPost
from penstock.feed.model import Page, People


class Moment(click.ParamType[datetime]):
    """`2026-11-21`, `2026-11-21T10:00`, `2026-11-21T10:00:00+01:00`; without an offset it is UTC."""

    name = "moment"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,  # noqa: ARG002 - click's signature
        ctx: click.Context | None,  # noqa: ARG002 - click's signature
    ) -> datetime:
        """The moment."""
        return value if isinstance(value, datetime) else moment_of(str(value), where="--at")


def moment_of(text: str, *, where: str) -> datetime:
    """The moment that is written there. Raises: InvalidPost."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidPost(
            f"{where}: expected a moment such as 2026-11-21T10:00Z, got {text[:40]!r}"
        ) from error
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def describe_page(page: Page) -> str:
    """A page as lines, and how to go on."""
    rows = [(f"{post.at:%Y-%m-%d %H:%M:%S}", post.author, post.id) for post in page.posts]
    lines = [table(("at", "author", "post"), rows) if rows else "no posts"]
    if page.next is not None:
        lines.append(f"more: --cursor {page.next}")
    return "\n".join(lines)


def describe_people(people: People) -> str:
    """A list as lines, how long it is, and how to go on."""
    rows = [(f"{one.since_at:%Y-%m-%d %H:%M:%S}", one.id) for one in people.people]
    lines = [f"{people.total} in all"]
    if rows:
        lines.append(table(("since", "id"), rows))
    if people.next is not None:
        lines.append(f"more: --cursor {people.next}")
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows under a head, in aligned columns."""
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in texts]
    return "\n".join(line.rstrip() for line in lines)
