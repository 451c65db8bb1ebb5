"""Commands that rebuild, check and tell: `headrace feed rebuild|verify|stats|why`."""

from __future__ import annotations

import click

from headrace.feed.service import Feed
from headrace.kernel.errors import Corrupt
from headrace.kernel.terminal import Terminal, table


@click.command("rebuild", short_help="Build the index anew.")
@click.pass_obj
def rebuild(terminal: Terminal) -> None:
    """Put every viewer and author into Valkey anew, from PostgreSQL, as a job; pages go on meanwhile."""
    job = terminal.run(Feed, lambda feed: feed.rebuild())
    terminal.show({"job": job}, f"job {job} builds it: `headrace jobs show {job}`")


@click.command("verify", short_help="Compare index and truth.")
@click.option("--all", "is_all", is_flag=True, help="All viewers and authors, not a sample.")
@click.option(
    "--sample", type=click.IntRange(1), default=1_000, show_default=True,
    help="So many viewers and authors.",
)  # fmt: skip
@click.pass_obj
def verify(terminal: Terminal, *, is_all: bool, sample: int) -> int:
    """Compare what Valkey has with PostgreSQL; ends with exit code 8 where something differs."""
    found = terminal.run(Feed, lambda feed: feed.verify(sample=None if is_all else sample))
    viewers = f"{found.viewers} viewers with {found.follows} follows"
    lines = [f"{viewers}, {found.authors} authors with {found.posts} posts"]
    if found.differences:
        rows = [(row.kind, row.entity, row.missing, row.extra) for row in found.differences]
        lines.append(table(("of", "id", "missing", "too many"), rows))
    else:
        lines.append("the index is what PostgreSQL says")
    terminal.show(found, "\n".join(lines))
    return Corrupt.exit_code if found.differences else 0


@click.command("stats", short_help="Show how the index stands.")
@click.pass_obj
def show_stats(terminal: Terminal) -> None:
    """Show for each shard of the index whether it is ready and how far back it reaches."""
    found = terminal.run(Feed, lambda feed: feed.stats())
    rows = [
        (
            row.shard,
            row.state,
            f"{row.floor_at:%Y-%m-%d %H:%M}" if row.floor_at else "all",
            f"{row.newest_at:%Y-%m-%d %H:%M:%S}" if row.newest_at else "-",
        )
        for row in found
    ]
    terminal.show(found, table(("shard", "state", "reaches back to", "newest"), rows))


@click.command("why", short_help="Say why a viewer sees a post or not.")
@click.argument("viewer")
@click.argument("post")
@click.pass_obj
def show_why(terminal: Terminal, viewer: str, post: str) -> None:
    """Say whether VIEWER's pages show POST, and everything that decides it."""
    found = terminal.run(Feed, lambda feed: feed.why(viewer, post))
    lines = [f"post {found.post} {'is' if found.is_shown else 'is not'} in the feed of {viewer}"]
    lines += [f"  {reason.text}" for reason in found.reasons]
    if found.is_slow:
        lines.append("  pages read it from PostgreSQL")
    terminal.show(found, "\n".join(lines))
