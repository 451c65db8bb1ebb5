"""Commands of the feed: `headrace feed post|rm|follow|page|...`. Each calls one verb and prints."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, BinaryIO, Final, TypeVar

import click

from headrace.feed.errors import InvalidPost
from headrace.feed.follows import Follows
from headrace.feed.import_files import (
    COLUMNS,
    follow_of,
    import_in_steps,
    post_of,
    rows_of,
)
from headrace.feed.model import PAGE_MAX, Page, People
from headrace.feed.service import Feed
from headrace.kernel.config import parse_moment
from headrace.kernel.errors import Corrupt
from headrace.kernel.routes import PAGE_ROWS_MAX
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

PROGRESS_EVERY: Final = 1_000


@click.command("import", short_help="Import follows or posts from a file.")
@click.argument("kind", type=click.Choice(list(COLUMNS)))
@click.argument("file", type=click.File("rb"))
@click.pass_obj
def import_lines(terminal: Terminal, kind: str, file: BinaryIO) -> None:
    """Import FILE (- is standard input): CSV with a header, or one JSON object per line.

    follows: viewer, author, at (optional). posts: author, id, and optionally at, ref, kind. Group
    follows by viewer for fewer calls.
    """
    lines = counted(terminal, rows_of(file, kind), file)
    if kind == "follows":
        follows = ((number, follow_of(row, number)) for number, row in lines)
        count = terminal.run(
            Feed,
            lambda feed: import_in_steps(
                follows, feed.follows.import_all, group=lambda line: line[0]
            ),
        )
        terminal.show({"follows": count}, f"{count} new follows")
        return
    posts = ((number, post_of(row, number)) for number, row in lines)
    count = terminal.run(
        Feed,
        lambda feed: import_in_steps(posts, feed.posts.import_all, group=lambda _line: None),
    )
    terminal.show({"posts": count}, f"{pluralize(count, 'post')} imported")


def counted(
    terminal: Terminal, rows: Iterable[tuple[int, Mapping[str, Any]]], file: BinaryIO
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The same rows, with progress on the terminal, of a total if `file` has a size."""
    size = 0
    if file.seekable():
        begin = file.tell()
        size = file.seek(0, os.SEEK_END)
        file.seek(begin)
    for number, row in rows:
        if number % PROGRESS_EVERY == 0:
            terminal.progress(f"line {number:,}", file.tell() if size else 0, size or None)
        yield number, row


Verb = Callable[..., Awaitable[int]]
ListVerb = Callable[..., Awaitable[People]]
Command = TypeVar("Command", bound=Callable[..., Any])
_AUTHORS: Final = click.argument("authors", nargs=-1, required=True, metavar="AUTHOR...")
_KINDS: Final = click.option("--kinds", default=None, help="Only these kinds, as in photo,video.")
_CURSOR: Final = click.option("--cursor", default=None, help="Cursor of the next page.")


def _limit(most: int, usual: int) -> Callable[[Command], Command]:
    number = click.IntRange(1, most)
    return click.option(
        "--limit", type=number, default=usual, show_default=True, help="Number of rows."
    )


@click.group("feed", cls=CommandGroup)
def feed() -> None:
    """Feeds of followed authors: follow, post, read, check."""


@feed.command("post", short_help="Add a post.")
@click.argument("author")
@click.argument("id")
@click.option(
    "--at",
    type=Parsed(parse_moment, InvalidPost, name="moment"),
    help="Time of the post; a time in the future schedules it.",
)
@click.option(
    "--ref",
    default=None,
    help="Text that on_post_deleted handlers receive when the post is deleted.",
)
@click.option("--kind", default=None, help="Kind by which pages can be filtered.")
def add_post(
    terminal: Terminal,
    author: str,
    id: str,  # noqa: A002 - public
    *,
    at: datetime | None,
    ref: str | None,
    kind: str | None,
) -> None:
    """Add post ID of AUTHOR to the feeds of all followers."""
    found = terminal.run(Feed, lambda feed: feed.post(author, id, at=at, ref=ref, kind=kind))
    when = f"{found.at:%Y-%m-%d %H:%M:%S} UTC"
    terminal.show(found, f"post {found.id} {'waits until' if found.is_waiting else 'at'} {when}")


@feed.command("show", short_help="Show a post.")
@click.argument("id")
def show_post(terminal: Terminal, id: str) -> None:  # noqa: A002 - public
    """Show post ID as stored, also before its scheduled time."""
    found = terminal.run(Feed, lambda feed: feed.posts.find(id))
    state = ", waiting" if found.is_waiting else ""
    lines = [f"post    {found.id}", f"author  {found.author}"]
    lines.append(f"at      {found.at:%Y-%m-%d %H:%M:%S} UTC{state}")
    if found.ref is not None:
        lines.append(f"ref     {found.ref}")
    if found.kind is not None:
        lines.append(f"kind    {found.kind}")
    terminal.show(found, "\n".join(lines))


@feed.command("rm", short_help="Delete posts.")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
def remove_posts(terminal: Terminal, ids: tuple[str, ...]) -> None:
    """Delete posts from all feeds and run the on_post_deleted handlers."""
    deleted = terminal.run(Feed, lambda feed: feed.delete(ids))
    terminal.show({"deleted": deleted}, f"{pluralize(deleted, 'post')} deleted")


@feed.command("follow", short_help="Follow authors.")
@click.argument("viewer")
@_AUTHORS
def follow(terminal: Terminal, viewer: str, authors: tuple[str, ...]) -> None:
    """Let VIEWER follow authors: all of them, or none if one is invalid."""
    changed = terminal.run(Feed, lambda feed: feed.follow(viewer, authors))
    terminal.show({"changed": changed}, f"{viewer} follows {pluralize(changed, 'more author')}")


@feed.command("unfollow", short_help="Unfollow authors, or everyone.")
@click.argument("viewer")
@click.argument("authors", nargs=-1, metavar="AUTHOR...")
@click.option("--all", "is_all", is_flag=True, help="Unfollow everyone.")
def unfollow(terminal: Terminal, viewer: str, authors: tuple[str, ...], *, is_all: bool) -> None:
    """Let VIEWER unfollow authors, or everyone."""
    if is_all == bool(authors):
        raise click.UsageError("give either authors or --all")

    async def unfollow(feed: Feed) -> int:
        if is_all:
            return await feed.follows.unfollow_all(viewer)
        return await feed.unfollow(viewer, authors)

    changed = terminal.run(Feed, unfollow)
    terminal.show({"changed": changed}, f"{pluralize(changed, 'author')} unfollowed")


def _mute_block_command(name: str, verb: Verb, help_text: str) -> None:
    @feed.command(name, short_help=f"{name.title()} authors.", help=help_text)
    @click.argument("viewer")
    @_AUTHORS
    def command(terminal: Terminal, viewer: str, authors: tuple[str, ...]) -> None:
        changed = terminal.run(Feed, lambda feed: verb(feed.follows, viewer, authors))
        terminal.show({"changed": changed}, f"{pluralize(changed, 'author')} changed")


_mute_block_command("mute", Follows.mute, "Hide authors from VIEWER without notifying them.")
_mute_block_command("unmute", Follows.unmute, "End mutes of VIEWER.")
_mute_block_command("block", Follows.block, "Hide VIEWER and authors from each other.")
_mute_block_command("unblock", Follows.unblock, "End blocks set by VIEWER.")


def _list_command(name: str, of: str, verb: ListVerb, what: str) -> None:
    @feed.command(name, short_help=f"List {what}.", help=f"List {what}, latest first.")
    @click.argument("entity", metavar=of)
    @_limit(PAGE_ROWS_MAX, 100)
    @_CURSOR
    def command(terminal: Terminal, entity: str, *, limit: int, cursor: str | None) -> None:
        found = terminal.run(Feed, lambda feed: verb(feed.follows, entity, limit, cursor=cursor))
        document = listing(found.people, next_cursor=found.next, total=found.total)
        terminal.show(document, describe_people(found))


_list_command("following", "VIEWER", Follows.following, "the authors that a viewer follows")
_list_command("followers", "AUTHOR", Follows.followers, "the followers of an author")
_list_command("muted", "VIEWER", Follows.muted, "the authors that a viewer mutes")
_list_command("blocked", "VIEWER", Follows.blocked, "the authors that a viewer blocks")


@feed.command("page", short_help="Show a page of a feed.")
@click.argument("viewer")
@_limit(PAGE_MAX, 20)
@_CURSOR
@click.option("--since", default=None, help="Show only posts newer than this position.")
@_KINDS
def show_page(
    terminal: Terminal,
    viewer: str,
    *,
    limit: int,
    cursor: str | None,
    since: str | None,
    kinds: str | None,
) -> None:
    """Show the newest posts of the authors that VIEWER follows."""
    found = terminal.run(
        Feed, lambda feed: feed.page(viewer, limit, cursor=cursor, since=since, kinds=kinds)
    )
    terminal.show(page_document(found), describe_page(found))


@feed.command("author", short_help="Show an author's posts.")
@click.argument("author")
@_limit(PAGE_MAX, 20)
@_CURSOR
@_KINDS
def list_author_posts(
    terminal: Terminal, author: str, *, limit: int, cursor: str | None, kinds: str | None
) -> None:
    """Show the newest posts of AUTHOR."""
    found = terminal.run(
        Feed,
        lambda feed: feed.pages.author_posts(author, limit, cursor=cursor, kinds=kinds),
    )
    terminal.show(page_document(found), describe_page(found))


@feed.command("unread", short_help="Count unread posts.")
@click.argument("viewer")
@_KINDS
def count_unread(terminal: Terminal, viewer: str, *, kinds: str | None) -> None:
    """Count the posts that are newer than VIEWER's read marker."""
    found = terminal.run(Feed, lambda feed: feed.pages.unread(viewer, kinds=kinds))
    terminal.show(found, f"{found.count}{' or more' if found.has_more else ''} unread")


@feed.command("marker", short_help="Show or set the read marker.")
@click.argument("viewer")
@click.argument("position", required=False)
def show_marker(terminal: Terminal, viewer: str, position: str | None) -> None:
    """Show VIEWER's read marker, or move it forward to POSITION."""

    async def read_or_set(feed: Feed) -> Any:
        if position is None:
            return await feed.pages.marker(viewer)
        return await feed.pages.set_marker(viewer, position)

    found = terminal.run(Feed, read_or_set)
    text = "no marker"
    if found.at is not None:
        text = f"read up to {found.post} of {found.at:%Y-%m-%d %H:%M:%S} UTC"
    terminal.show(found, text)


@feed.command("rebuild", short_help="Rebuild the index of feeds in Valkey.")
def rebuild(terminal: Terminal) -> None:
    """Rebuild the index in Valkey from PostgreSQL, as a job. Pages are served meanwhile."""
    job = terminal.run(Feed, lambda feed: feed.index.rebuild())
    terminal.show({"job": job}, f"enqueued job {job}: see `headrace jobs show {job}`")


@feed.command("verify", short_help="Compare the index of feeds with PostgreSQL.")
@click.option("--all", "is_all", is_flag=True, help="Compare all viewers and authors.")
@click.option(
    "--sample",
    type=click.IntRange(1),
    default=1_000,
    show_default=True,
    help="Number of viewers and of authors.",
)
def verify(terminal: Terminal, *, is_all: bool, sample: int) -> int:
    """Compare the index in Valkey with PostgreSQL. Exit code 8 if anything differs."""
    terminal.progress("comparing the index with PostgreSQL")
    found = terminal.run(Feed, lambda feed: feed.index.verify(sample=None if is_all else sample))
    viewers = f"{pluralize(found.viewers, 'viewer')} with {pluralize(found.follows, 'follow')}"
    lines: list[str] = [
        f"{viewers}, {pluralize(found.authors, 'author')} with {pluralize(found.posts, 'post')}"
    ]
    if found.differences:
        rows = [(row.kind, row.entity, row.missing, row.extra) for row in found.differences]
        lines.append(table(("kind", "id", "missing", "extra"), rows))
        lines.append("to repair the index, run `headrace feed rebuild`")
    else:
        lines.append("the index equals PostgreSQL")
    terminal.show(found, Lines(*lines))
    return Corrupt.exit_code if found.differences else 0


@feed.command("stats", short_help="Show the state of the index of feeds.")
def show_stats(terminal: Terminal) -> None:
    """Show the state of the feed index in Valkey: since when it has posts, and its newest post."""
    found = terminal.run(Feed, lambda feed: feed.index.stats())
    rows = [
        (
            row.shard,
            row.state,
            f"{row.floor_at:%Y-%m-%d %H:%M}" if row.floor_at else "all",
            f"{row.newest_at:%Y-%m-%d %H:%M:%S}" if row.newest_at else "-",
        )
        for row in found
    ]
    lines: list[str] = [table(("shard", "state", "since", "newest"), rows)]
    if any(row.state == "ahead" for row in found):
        lines.append(
            "ahead: PostgreSQL crashed or failed over, and the index may have posts that it lost; a"
            " flusher rebuilds the index, or run `headrace feed rebuild`"
        )
    terminal.show(listing(found), Lines(*lines))


@feed.command("why", short_help="Explain why a viewer sees a post or not.")
@click.argument("viewer")
@click.argument("post")
def show_why(terminal: Terminal, viewer: str, post: str) -> None:
    """Show whether POST is in VIEWER's feed, and all reasons."""
    found = terminal.run(Feed, lambda feed: feed.pages.why(viewer, post))
    lines = [f"post {found.post} {'is' if found.is_shown else 'is not'} in the feed of {viewer}"]
    lines += [f"  {reason.text}" for reason in found.reasons]
    if found.is_slow:
        lines.append("  pages read it from PostgreSQL")
    terminal.show(found, "\n".join(lines))


feed.add_command(import_lines)


def describe_page(page: Page) -> str:
    """A page as a table, with the cursor of the next one."""
    has_kinds = any(post.kind for post in page.posts)
    rows = [
        (f"{post.at:%Y-%m-%d %H:%M:%S}", post.author, post.id)
        + ((post.kind or "-",) if has_kinds else ())
        for post in page.posts
    ]
    names = ("at (UTC)", "author", "post", *(("kind",) if has_kinds else ()))
    return paged(table(names, rows) if rows else "no posts", page.next)


def page_document(page: Page) -> dict[str, Any]:
    """A page as the document of a list."""
    more = {"newest": page.newest, "is_slow": page.is_slow}
    return listing(page.posts, next_cursor=page.next, **more)


def describe_people(people: People) -> str:
    """A list as a table, with its total and the cursor of the next page."""
    rows = [(f"{one.since_at:%Y-%m-%d %H:%M:%S}", one.id) for one in people.people]
    total = f"{people.total} in total"
    text = Lines(total, table(("since (UTC)", "id"), rows)) if rows else total
    return paged(text, people.next)


COMMANDS: Final[list[click.Command]] = [feed]
