"""The feed on the console: any viewer's pages, any author's posts, why a post is shown or not, the index."""

from __future__ import annotations

from typing import Final

from headrace.console.screens.feed.actions import ACTIONS
from headrace.console.screens.feed.pages import (
    see_author,
    see_index,
    see_viewer,
    see_why,
)
from headrace.console.seeing import Room, Screen

READ: Final = "feed:read"

ROOM: Final = Room(
    name="feed",
    title="Feed",
    key="e",
    service="feed",
    screens=(
        Screen(
            path="/feed", title="Feed of a viewer", tab="Viewers", template="feed/viewer.html",
            scope=READ, view=see_viewer, live=False,
        ),
        Screen(
            path="/feed/authors", title="Posts of an author", tab="Authors",
            template="feed/author.html", scope=READ, view=see_author, live=False,
        ),
        Screen(
            path="/feed/why", title="Why a post is shown or not", tab="Why",
            template="feed/why.html", scope=READ, view=see_why, live=False,
        ),
        Screen(
            path="/feed/index", title="Index", tab="Index", template="feed/index.html",
            scope=READ, view=see_index,
        ),
    ),
    actions=ACTIONS,
)  # fmt: skip
