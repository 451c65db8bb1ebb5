"""Commands: `headrace feed post|rm|follow|page|...`; each calls one verb and prints."""

from __future__ import annotations

from typing import Final

import click

from headrace.feed.cli.follows import (
    block,
    follow,
    list_barred,
    list_followers,
    list_following,
    mute,
    unblock,
    unfollow,
    unmute,
)
from headrace.feed.cli.importing import import_lines
from headrace.feed.cli.pages import count_unread, list_author_posts, show_marker, show_page
from headrace.feed.cli.posts import add_post, remove_posts, show_post
from headrace.feed.cli.upkeep import rebuild, show_stats, show_why, verify


@click.group("feed")
def feed() -> None:
    """Posts of those whom one follows: post, follow, read, check."""


for _command in (
    add_post,
    show_post,
    remove_posts,
    follow,
    unfollow,
    mute,
    unmute,
    block,
    unblock,
    list_following,
    list_followers,
    list_barred,
    show_page,
    list_author_posts,
    count_unread,
    show_marker,
    import_lines,
    rebuild,
    verify,
    show_stats,
    show_why,
):
    feed.add_command(_command)

COMMANDS: Final[list[click.Command]] = [feed]
