"""Commands of posts: `headrace feed post|show|rm`."""

from __future__ import annotations

from datetime import datetime

import click

from headrace.feed.cli.text import Moment
from headrace.feed.service import Feed
from headrace.kernel.terminal import Terminal


@click.command("post", short_help="Add a post.")
@click.argument("author")
@click.argument("id")
@click.option("--at", type=Moment(), default=None, help="Its moment; a later one than now waits.")
@click.option("--ref", default=None, help="What handlers of its deletion are given.")
@click.pass_obj
def add_post(
    terminal: Terminal,
    author: str,
    id: str,  # noqa: A002 - as it is called everywhere
    *,
    at: datetime | None,
    ref: str | None,
) -> None:
    """Add post ID of AUTHOR; from now on it is in the feeds of all followers."""
    found = terminal.run(Feed, lambda feed: feed.post(author, id, at=at, ref=ref))
    when = f"{found.at:%Y-%m-%d %H:%M:%S} UTC"
    terminal.show(found, f"post {found.id} {'waits for' if found.is_waiting else 'of'} {when}")


@click.command("show", short_help="Show a post.")
@click.argument("id")
@click.pass_obj
def show_post(terminal: Terminal, id: str) -> None:  # noqa: A002 - as it is called everywhere
    """Show post ID as it is kept, also one that waits."""
    found = terminal.run(Feed, lambda feed: feed.find(id))
    lines = [f"post    {found.id}", f"author  {found.author}"]
    lines.append(f"at      {found.at:%Y-%m-%d %H:%M:%S} UTC{', waits' if found.is_waiting else ''}")
    if found.ref is not None:
        lines.append(f"ref     {found.ref}")
    terminal.show(found, "\n".join(lines))


@click.command("rm", short_help="Remove posts.")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.pass_obj
def remove_posts(terminal: Terminal, ids: tuple[str, ...]) -> None:
    """Remove posts: no page shows them any more, and handlers of deletions are told."""
    gone = terminal.run(Feed, lambda feed: feed.delete(ids))
    terminal.show({"deleted": gone}, f"{gone} removed")
