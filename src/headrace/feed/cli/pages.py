"""Commands that tell: `headrace feed page|author|unread|marker`."""

from __future__ import annotations

from typing import Final

import click

from headrace.feed.cli.text import describe_page
from headrace.feed.model import PAGE_MAX
from headrace.feed.service import Feed
from headrace.feed.shown import page_shown
from headrace.kernel.terminal import Terminal

_LIMIT: Final = click.option(
    "--limit", type=click.IntRange(1, PAGE_MAX), default=20, show_default=True,
    help="The most to show.",
)  # fmt: skip
_CURSOR: Final = click.option("--cursor", default=None, help="Go on from there.")


@click.command("page", short_help="Show a page of a feed.")
@click.argument("viewer")
@_LIMIT
@_CURSOR
@click.option("--since", default=None, help="Only what is newer than this place.")
@click.pass_obj
def show_page(
    terminal: Terminal, viewer: str, *, limit: int, cursor: str | None, since: str | None
) -> None:
    """Show the newest posts of those whom VIEWER follows."""
    found = terminal.run(Feed, lambda feed: feed.page(viewer, limit, cursor=cursor, since=since))
    terminal.show(page_shown(found), describe_page(found))


@click.command("author", short_help="Show an author's posts.")
@click.argument("author")
@_LIMIT
@_CURSOR
@click.pass_obj
def list_author_posts(terminal: Terminal, author: str, *, limit: int, cursor: str | None) -> None:
    """Show the newest posts of AUTHOR."""
    found = terminal.run(Feed, lambda feed: feed.author_posts(author, limit, cursor=cursor))
    terminal.show(page_shown(found), describe_page(found))


@click.command("unread", short_help="Count what is new.")
@click.argument("viewer")
@click.pass_obj
def count_unread(terminal: Terminal, viewer: str) -> None:
    """Count the posts that are newer than VIEWER's read marker."""
    found = terminal.run(Feed, lambda feed: feed.unread(viewer))
    terminal.show(found, f"{found.count}{' or more' if found.has_more else ''} unread")


@click.command("marker", short_help="Show or set up to where was read.")
@click.argument("viewer")
@click.argument("place", required=False)
@click.pass_obj
def show_marker(terminal: Terminal, viewer: str, place: str | None) -> None:
    """Show up to where VIEWER has read, or note PLACE; it never goes back."""
    found = terminal.run(
        Feed,
        lambda feed: feed.marker(viewer) if place is None else feed.set_marker(viewer, place),
    )
    text = "nothing is read yet"
    if found.at is not None:
        text = f"read up to {found.post} of {found.at:%Y-%m-%d %H:%M:%S} UTC"
    terminal.show(found, text)
