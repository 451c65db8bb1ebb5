"""The feed room: feeds of viewers, posts of authors, visibility of a post, the index."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from headrace.console.actions import Action, Field
from headrace.console.history import board_of
from headrace.console.views import (
    NO_DATA,
    PanelData,
    Room,
    Screen,
    ViewContext,
    attempt,
    choices,
)
from headrace.feed import Feed
from headrace.feed.model import MuteOrBlock, Page, People

POSTS_SHOWN: Final = 30
PEOPLE_SHOWN: Final = 50
EXAMPLES_MAX: Final = 12
BOARDS: Final = ("feed", "following", "muted", "blocked")
AUTHOR_BOARDS: Final = ("posts", "followers")


async def view_viewer(context: ViewContext) -> dict[str, Any]:
    """The feed of a viewer, or followed, muted or blocked authors."""
    feed, viewer = context.feed, context.query.text("viewer", most=128).strip()
    board = context.query.choice("list", BOARDS, "feed")
    rankings = feed.pages.rankings.names()
    kinds = context.query.text("kinds", most=300)
    rank = context.query.choice("rank", rankings, "")
    if not viewer:
        return {
            "history": await board_of(context, "feed"),
            "viewer": viewer,
            "board": board,
            "kinds": kinds,
            "rank": rank,
            "rankings": choices(rankings),
            "examples": (await attempt(feed.lookup.recent)).value,
        }
    cursor = context.query.text("cursor", most=512) or None
    unread, marker, following = await asyncio.gather(
        attempt(feed.pages.unread, viewer),
        attempt(feed.pages.marker, viewer),
        attempt(feed.follows.following, viewer, 1),
    )
    page: PanelData[Page] = NO_DATA
    people: PanelData[People] = NO_DATA
    more = None
    if board == "feed":
        page = await attempt(
            feed.page, viewer, POSTS_SHOWN, cursor=cursor, kinds=_kinds_of(kinds), rank=rank or None
        )
        more = page.value.next if page.value else None
    else:
        people = await attempt(_people, feed, viewer, board, cursor=cursor)
        more = people.value.next if people.value else None
    return {
        "viewer": viewer,
        "board": board,
        "boards": BOARDS,
        "kinds": kinds,
        "rank": rank,
        "rankings": choices(rankings),
        "page": page,
        "people": people,
        "unread": unread,
        "marker": marker,
        "following": following.value.total if following.value else None,
        "more": context.url(cursor=more) if more else None,
        "is_first": cursor is None,
    }


def _kinds_of(text: str) -> list[str] | None:
    """Kinds separated by commas or spaces; None: all."""
    return text.replace(",", " ").split() or None


async def view_author(context: ViewContext) -> dict[str, Any]:
    """The posts of an author, or the followers."""
    feed, author = context.feed, context.query.text("author", most=128).strip()
    board = context.query.choice("list", AUTHOR_BOARDS, "posts")
    kinds = context.query.text("kinds", most=300)
    if not author:
        examples = (await attempt(feed.lookup.recent, authors=True)).value
        return {"author": author, "board": board, "kinds": kinds, "examples": examples}
    cursor = context.query.text("cursor", most=512) or None
    page: PanelData[Page] = NO_DATA
    if board == "posts":
        followers = await attempt(feed.follows.followers, author, 1)
        page = await attempt(
            feed.pages.author_posts, author, POSTS_SHOWN, cursor=cursor, kinds=_kinds_of(kinds)
        )
        more = page.value.next if page.value else None
    else:
        followers = await attempt(feed.follows.followers, author, PEOPLE_SHOWN, cursor=cursor)
        more = followers.value.next if followers.value else None
    return {
        "author": author,
        "board": board,
        "boards": AUTHOR_BOARDS,
        "kinds": kinds,
        "page": page,
        "people": followers,
        "followers": followers.value.total if followers.value else None,
        "more": context.url(cursor=more) if more else None,
    }


async def view_why(context: ViewContext) -> dict[str, Any]:
    """The reasons why a viewer sees a post or not."""
    viewer, post = (context.query.text(name, most=128).strip() for name in ("viewer", "post"))
    is_asked = bool(viewer and post)
    why = await attempt(context.feed.pages.why, viewer, post) if is_asked else None
    viewers: PanelData[Any] = NO_DATA
    posts: PanelData[Page] = NO_DATA
    if viewer and not post:
        posts = await attempt(context.feed.page, viewer, EXAMPLES_MAX)
    elif not viewer:
        viewers = await attempt(context.feed.lookup.recent)
    return {
        "viewer": viewer,
        "post": post,
        "why": why,
        "viewers": viewers.value,
        "posts": [one.id for one in posts.value.posts] if posts.value else [],
    }


async def view_index(context: ViewContext) -> dict[str, Any]:
    """State of each shard of the index."""
    feed = context.feed
    return {
        "shards": await attempt(feed.index.stats),
        "index_for_s": feed.config.index_for_s,
        "keep_for_s": feed.config.keep_for_s,
    }


async def _people(feed: Any, viewer: str, board: str, *, cursor: str | None) -> People:
    """One page of the list `board`."""
    found: People
    if board == "following":
        found = await feed.follows.following(viewer, PEOPLE_SHOWN, cursor=cursor)
    else:
        kind = MuteOrBlock.MUTE if board == "muted" else MuteOrBlock.BLOCK
        found = await feed.follows.list_kind(viewer, kind, PEOPLE_SHOWN, cursor=cursor)
    return found


READ: Final = "feed:read"
SAMPLE: Final = 1_000
VIEWER: Final = Field("viewer", "Viewer")
AUTHOR: Final = Field("author", "Author")
POST: Final = Field("post", "Post")


def _relation(
    verb: str,
    title: str,
    what: str,
    *,
    call: str,
    run: Callable[[Feed, str, str], Awaitable[int]],
    done: str,
    already: str,
) -> Action:
    """An action that changes a relation between viewer and author."""
    method, _, path = call.partition(" ")
    return Action(
        name=f"feed-{verb}",
        title=title,
        what=what,
        command=f"headrace feed {verb} {{viewer}} {{author}}",
        http=f"{method} /v1/feed/viewers/{{viewer}}/{path}/{{author}}",
        run=lambda context, given: run(context.feed, given["viewer"], given["author"]),
        done=f"viewer {{viewer}} {done} {{author}}",
        unchanged=f"viewer {{viewer}} {already} {{author}}; no change",
        fields=(VIEWER, AUTHOR),
    )


RELATIONS: Final = (
    _relation(
        "follow",
        "Follow author",
        "{viewer} follows {author}. The next feed page includes the author's posts.",
        call="PUT follows",
        run=lambda feed, viewer, author: feed.follow(viewer, author),
        done="follows",
        already="already follows",
    ),
    _relation(
        "unfollow",
        "Unfollow author",
        "{viewer} no longer follows {author}. The next feed page excludes the author's posts.",
        call="DELETE follows",
        run=lambda feed, viewer, author: feed.unfollow(viewer, author),
        done="no longer follows",
        already="did not follow",
    ),
    _relation(
        "mute",
        "Mute author",
        "Hides the posts of {author} from {viewer}.",
        call="PUT mutes",
        run=lambda feed, viewer, author: feed.follows.mute(viewer, author),
        done="muted",
        already="already muted",
    ),
    _relation(
        "unmute",
        "Unmute author",
        "Shows the posts of {author} to {viewer} again, if {viewer} follows {author}.",
        call="DELETE mutes",
        run=lambda feed, viewer, author: feed.follows.unmute(viewer, author),
        done="unmuted",
        already="had not muted",
    ),
    _relation(
        "block",
        "Block author",
        "Hides the posts of {viewer} and {author} from each other.",
        call="PUT blocks",
        run=lambda feed, viewer, author: feed.follows.block(viewer, author),
        done="blocked",
        already="already blocked",
    ),
    _relation(
        "unblock",
        "Unblock author",
        "Ends the block of {author} by {viewer}.",
        call="DELETE blocks",
        run=lambda feed, viewer, author: feed.follows.unblock(viewer, author),
        done="unblocked",
        already="had not blocked",
    ),
)


async def preview_delete(context: ViewContext, given: dict[str, Any]) -> str:
    """The post that would be deleted."""
    found = await context.feed.posts.find(given["post"])
    return (
        f"Post {found.id} by {found.author}, {found.at:%Y-%m-%d %H:%M:%S} UTC."
        " Deletion handlers run."
    )


async def verify(context: ViewContext, given: dict[str, Any]) -> str:  # noqa: ARG001 - signature of actions
    """Compare the index with PostgreSQL."""
    found = await context.feed.index.verify(sample=SAMPLE)
    seen = f"{found.viewers:,} viewers with {found.follows:,} follows, {found.authors:,} authors"
    seen += f" with {found.posts:,} posts"
    if found.is_equal:
        return f"{seen}: the index matches PostgreSQL"
    first = found.differences[0]
    return (
        f"{seen}: {len(found.differences)} differ, such as {first.kind} of {first.entity}:"
        f" {first.missing} missing, {first.extra} extra; rebuild the index to repair it"
    )


ACTIONS: Final = (
    *RELATIONS,
    Action(
        name="feed-delete",
        title="Delete post",
        what="Deletes post {post}. No page shows it any more. This cannot be undone.",
        command="headrace feed rm {post}",
        http="DELETE /v1/feed/posts/{post}",
        run=lambda context, given: context.feed.delete(given["post"]),
        done="post {post} is deleted",
        unchanged="post {post} does not exist",
        fields=(POST,),
        is_danger=True,
        preview=preview_delete,
    ),
    Action(
        name="feed-rebuild",
        title="Rebuild index",
        what="Rebuilds the index in Valkey from PostgreSQL, in a job. Pages are served meanwhile.",
        command="headrace feed rebuild",
        http="POST /v1/feed/rebuild",
        run=lambda context, _: context.feed.index.rebuild(),
        done="job {found} rebuilds the index; pages are served meanwhile",
    ),
    Action(
        name="feed-verify",
        title="Verify index",
        what="Compares up to 1,000 viewers and authors in Valkey with PostgreSQL. Read-only.",
        command="headrace feed verify",
        http="GET /v1/feed/verify",
        run=verify,
    ),
)


ROOM: Final = Room(
    name="feed",
    title="Feed",
    key="e",
    scope=READ,
    screens=(
        Screen(
            "/feed", "Feed of a viewer", "feed/viewer.html", view_viewer, tab="Viewers", live=False
        ),
        Screen(
            "/feed/authors",
            "Posts of an author",
            "feed/author.html",
            view_author,
            tab="Authors",
            live=False,
        ),
        Screen(
            "/feed/why", "Post visibility", "feed/why.html", view_why, tab="Visibility", live=False
        ),
        Screen("/feed/index", "Index", "feed/index.html", view_index, tab="Index"),
    ),
    actions=ACTIONS,
)
