"""Commands of follows, mutes and blocks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import click

from headrace.feed.cli.text import describe_people
from headrace.feed.model import Bar
from headrace.feed.service import Feed
from headrace.feed.shown import people_shown
from headrace.kernel.routes import PAGE_ROWS_MAX
from headrace.kernel.terminal import Terminal

Verb = Callable[..., Awaitable[int]]
_AUTHORS: Final = click.argument("authors", nargs=-1, required=True, metavar="AUTHOR...")
_LIMIT: Final = click.option(
    "--limit", type=click.IntRange(1, PAGE_ROWS_MAX), default=100, show_default=True,
    help="The most to show.",
)  # fmt: skip
_CURSOR: Final = click.option("--cursor", default=None, help="Go on from there.")


@click.command("follow", short_help="Follow authors.")
@click.argument("viewer")
@_AUTHORS
@click.pass_obj
def follow(terminal: Terminal, viewer: str, authors: tuple[str, ...]) -> None:
    """Let VIEWER follow authors, all or none."""
    changed = terminal.run(Feed, lambda feed: feed.follow(viewer, authors))
    terminal.show({"changed": changed}, f"{changed} new")


@click.command("unfollow", short_help="Unfollow authors, or all.")
@click.argument("viewer")
@click.argument("authors", nargs=-1, metavar="AUTHOR...")
@click.option("--all", "is_all", is_flag=True, help="All of them.")
@click.pass_obj
def unfollow(terminal: Terminal, viewer: str, authors: tuple[str, ...], *, is_all: bool) -> None:
    """Let VIEWER unfollow authors, or all."""
    if is_all == bool(authors):
        raise click.UsageError("name authors, or say --all")
    changed = terminal.run(
        Feed, lambda feed: feed.unfollow_all(viewer) if is_all else feed.unfollow(viewer, authors)
    )
    terminal.show({"changed": changed}, f"{changed} unfollowed")


def _bar_command(name: str, verb: Verb, help_text: str) -> click.Command:
    @click.command(name, short_help=f"{name.title()} authors.", help=help_text)
    @click.argument("viewer")
    @_AUTHORS
    @click.pass_obj
    def command(terminal: Terminal, viewer: str, authors: tuple[str, ...]) -> None:
        changed = terminal.run(Feed, lambda feed: verb(feed, viewer, authors))
        terminal.show({"changed": changed}, f"{changed} changed")

    return command


mute = _bar_command("mute", Feed.mute, "Let VIEWER not see authors, who are not told and see all.")
unmute = _bar_command("unmute", Feed.unmute, "Let VIEWER see authors again.")
block = _bar_command("block", Feed.block, "Let VIEWER and authors not see each other.")
unblock = _bar_command("unblock", Feed.unblock, "End blocks that VIEWER made.")


@click.command("following", short_help="List whom a viewer follows.")
@click.argument("viewer")
@_LIMIT
@_CURSOR
@click.pass_obj
def list_following(terminal: Terminal, viewer: str, *, limit: int, cursor: str | None) -> None:
    """List whom VIEWER follows, latest first."""
    found = terminal.run(Feed, lambda feed: feed.following(viewer, limit, cursor=cursor))
    terminal.show(people_shown(found), describe_people(found))


@click.command("followers", short_help="List who follows an author.")
@click.argument("author")
@_LIMIT
@_CURSOR
@click.pass_obj
def list_followers(terminal: Terminal, author: str, *, limit: int, cursor: str | None) -> None:
    """List who follows AUTHOR, latest first."""
    found = terminal.run(Feed, lambda feed: feed.followers(author, limit, cursor=cursor))
    terminal.show(people_shown(found), describe_people(found))


@click.command("barred", short_help="List mutes or blocks.")
@click.argument("viewer")
@click.argument("kind", type=click.Choice([one.value for one in Bar]))
@_LIMIT
@_CURSOR
@click.pass_obj
def list_barred(
    terminal: Terminal, viewer: str, kind: str, *, limit: int, cursor: str | None
) -> None:
    """List whom VIEWER mutes or blocks, latest first."""
    found = terminal.run(Feed, lambda feed: feed.barred(viewer, Bar(kind), limit, cursor=cursor))
    terminal.show(people_shown(found), describe_people(found))
