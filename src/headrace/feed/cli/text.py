"""What the commands of the feed read and print."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from headrace.feed.errors import InvalidPost
from headrace.feed.model import Page, People
from headrace.kernel.terminal import parse_moment, table


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
        return parse_moment(text)
    except ValueError as error:
        raise InvalidPost(
            f"{where}: expected a moment such as 2026-11-21T10:00Z, got {text[:40]!r}"
        ) from error


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
