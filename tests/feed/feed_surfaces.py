"""The verbs of the feed on each surface, one life of some feeds as a table, and an HTTP client."""

# ruff: noqa: A006 - the product's name of a post's id is `id`

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import datetime
from typing import NamedTuple

from tests.views.room_harness import ANY, Refusal, Surface, Verb, quoted, served, words_of

from headrace.feed import cli, http

SCOPES = ("feed:read", "feed:write")
GROUP = cli.COMMANDS[0]


def viewer_path(viewer, rest=""):
    """The path of a viewer."""
    return f"/v1/feed/viewers/{quoted(viewer)}{rest}"


def author_path(author, rest):
    """A path of an author."""
    return f"/v1/feed/authors/{quoted(author)}{rest}"


def change(command, method, name, call):
    """A verb on one or many authors. Each form has its own route."""

    def request(viewer, authors):
        path = viewer_path(viewer, f"/{name}")
        if len(authors) == 1:
            return method, f"{path}/{quoted(authors[0])}"
        if method == "PUT":
            return "POST", path, {"json": authors}
        return method, path, {"params": {"authors": ",".join(map(str, authors))}}

    return Verb(
        lambda feed, viewer, authors: call(feed)(viewer, authors),
        request,
        lambda viewer, authors: (command, viewer, *authors),
        wrap="changed",
    )


def of_viewer(rest, command, call):
    """A verb that reads something of a viewer."""
    return Verb(
        lambda feed, viewer, **more: call(feed)(viewer, **more),
        lambda viewer, **params: ("GET", viewer_path(viewer, rest), {"params": params}),
        lambda viewer, **options: (command, viewer, *words_of(options)),
    )


def of_index(name, method, call, wrap=""):
    """A verb without arguments."""
    return Verb(
        lambda feed: call(feed)(),
        lambda: (method, f"/v1/feed/{name}"),
        lambda: (name,),
        wrap=wrap,
    )


VERBS = {
    "follow": change("follow", "PUT", "follows", lambda feed: feed.follow),
    "unfollow": change("unfollow", "DELETE", "follows", lambda feed: feed.unfollow),
    "mute": change("mute", "PUT", "mutes", lambda feed: feed.follows.mute),
    "unmute": change("unmute", "DELETE", "mutes", lambda feed: feed.follows.unmute),
    "block": change("block", "PUT", "blocks", lambda feed: feed.follows.block),
    "unblock": change("unblock", "DELETE", "blocks", lambda feed: feed.follows.unblock),
    "unfollow_all": Verb(
        lambda feed, viewer: feed.follows.unfollow_all(viewer),
        lambda viewer: ("DELETE", viewer_path(viewer, "/follows"), {"params": {"all": "true"}}),
        lambda viewer: ("unfollow", viewer, "--all"),
        wrap="changed",
    ),
    "following": of_viewer("/follows", "following", lambda feed: feed.follows.following),
    "muted": of_viewer("/mutes", "muted", lambda feed: feed.follows.muted),
    "blocked": of_viewer("/blocks", "blocked", lambda feed: feed.follows.blocked),
    "followers": Verb(
        lambda feed, author, **more: feed.follows.followers(author, **more),
        lambda author, **params: ("GET", author_path(author, "/followers"), {"params": params}),
        lambda author, **options: ("followers", author, *words_of(options)),
    ),
    "post": Verb(
        lambda feed, author, id, at, **more: feed.post(
            author, id, at=datetime.fromisoformat(at), **more
        ),
        lambda **body: ("POST", "/v1/feed/posts", {"json": body}),
        lambda author, id, **options: ("post", author, id, *words_of(options)),
    ),
    "find": Verb(
        lambda feed, id: feed.posts.find(id),
        lambda id: ("GET", f"/v1/feed/posts/{quoted(id)}"),
        lambda id: ("show", id),
    ),
    "delete": Verb(
        lambda feed, id: feed.delete(id),
        lambda id: ("DELETE", f"/v1/feed/posts/{quoted(id)}"),
        lambda id: ("rm", id),
    ),
    "page": of_viewer("", "page", lambda feed: feed.page),
    "author_posts": Verb(
        lambda feed, author: feed.pages.author_posts(author),
        lambda author: ("GET", author_path(author, "/posts")),
        lambda author: ("author", author),
    ),
    "unread": of_viewer("/unread", "unread", lambda feed: feed.pages.unread),
    "marker": of_viewer("/marker", "marker", lambda feed: feed.pages.marker),
    "set_marker": Verb(
        lambda feed, viewer, position: feed.pages.set_marker(viewer, position),
        lambda viewer, **body: ("PUT", viewer_path(viewer, "/marker"), {"json": body}),
        lambda viewer, position: ("marker", viewer, position),
    ),
    "why": Verb(
        lambda feed, viewer, post: feed.pages.why(viewer, post),
        lambda viewer, post: ("GET", viewer_path(viewer, "/why"), {"params": {"post": post}}),
        lambda viewer, post: ("why", viewer, post),
    ),
    "rebuild": of_index("rebuild", "POST", lambda feed: feed.index.rebuild, wrap="job"),
    "verify": of_index("verify", "GET", lambda feed: feed.index.verify),
    "stats": of_index("stats", "GET", lambda feed: feed.index.stats),
}


class Shows(NamedTuple):
    """A page: `author post` of each post, newest first, and whether a next page exists."""

    posts: str
    more: bool | object = False


def changed(count):
    """An answer."""
    return {"changed": count}


def posted(author, post, day, **more):
    """The arguments of a post at 10:00 UTC of a day, and its answer."""
    given = {"author": author, "id": post, "at": f"2026-11-0{day}T10:00:00Z", **more}
    return given, given


def listed(*ids, total, **more):
    """An answer with people."""
    return {"people": [{"id": one, "since_at": ANY} for one in ids], "total": total, **more}


def why(viewer, post, *, is_shown=False, **found):
    """The arguments of a question for one reason, and its answer."""
    reason = {"text": ANY, **found.pop("reason")}
    return {"viewer": viewer, "post": post}, {
        "viewer": viewer,
        "post": post,
        "is_shown": is_shown,
        "reasons": [reason],
        **found,
    }


SEVEN, BOB = {"viewer": 7}, {"viewer": "bob"}
BAD_ID, BAD_CURSOR = Refusal("422 feed.invalid_id"), Refusal("400 cursor.invalid")
VERIFIED = dict.fromkeys(("viewers", "authors", "posts", "follows"), ANY) | {"differences": []}
STEPS = [
    ("page", SEVEN, Shows("")),
    ("follow", {**SEVEN, "authors": [100]}, changed(1)),
    ("follow", {**SEVEN, "authors": [100]}, changed(0)),
    ("follow", {**SEVEN, "authors": [101, 102, 100, "ann"]}, changed(3)),
    ("follow", {**BOB, "authors": [100, "ann"]}, changed(2)),
    ("post", *posted(100, "p1", 1)),
    ("page", SEVEN, Shows("100 p1")),
    ("post", posted(100, "p1", 5)[0], posted(100, "p1", 1)[1]),
    ("post", *posted("ann", "p2", 2)),
    ("post", *posted(101, "p3", 2)),
    ("post", *posted(999, "p4", 3)),
    ("post", *posted(102, "p5", 4, ref="photo/5", kind="photo")),
    ("page", SEVEN, Shows("102 p5, 101 p3, ann p2, 100 p1")),
    ("page", BOB, Shows("ann p2, 100 p1")),
    ("page", {**SEVEN, "limit": 2}, Shows("102 p5, 101 p3", more=True)),
    ("page", {**SEVEN, "limit": 2, "cursor": "$next"}, Shows("ann p2, 100 p1", more=ANY)),
    ("page", {**SEVEN, "limit": 1}, Shows("102 p5", more=True)),
    ("marker", SEVEN, ANY),
    ("unread", SEVEN, {"count": 4, "has_more": False}),
    (
        "set_marker",
        {**SEVEN, "position": "$newest"},
        {"position": ANY, "post": "p5", "at": "2026-11-04T10:00:00Z", "set_at": ANY},
    ),
    ("unread", SEVEN, {"count": 0, "has_more": False}),
    ("post", *posted(100, "p6", 6)),
    ("unread", SEVEN, {"count": 1, "has_more": False}),
    ("page", {**SEVEN, "since": "$newest"}, Shows("100 p6")),
    ("author_posts", {"author": 100}, Shows("100 p6, 100 p1")),
    ("delete", {"id": "p6"}, ANY),
    ("page", BOB, Shows("ann p2, 100 p1")),
    ("author_posts", {"author": 100}, Shows("100 p1")),
    ("find", {"id": "p6"}, Refusal("404 feed.post_unknown")),
    ("page", {**SEVEN, "kinds": "photo"}, Shows("102 p5")),
    ("page", {**SEVEN, "kinds": "text"}, Shows("")),
    ("page", {**SEVEN, "kinds": "Photo"}, Refusal("422 feed.invalid_kind")),
    ("find", {"id": "p5"}, posted(102, "p5", 4, ref="photo/5", kind="photo")[1]),
    ("mute", {**SEVEN, "authors": ["ann"]}, changed(1)),
    ("page", SEVEN, Shows("102 p5, 101 p3, 100 p1")),
    ("page", BOB, Shows("ann p2, 100 p1")),
    ("following", SEVEN, {"people": ANY, "total": 4}),
    ("muted", SEVEN, listed("ann", total=1)),
    ("unmute", {**SEVEN, "authors": ["ann"]}, changed(1)),
    ("page", SEVEN, Shows("102 p5, 101 p3, ann p2, 100 p1")),
    ("block", {**SEVEN, "authors": [101, 102]}, changed(2)),
    ("page", SEVEN, Shows("ann p2, 100 p1")),
    ("unblock", {**SEVEN, "authors": [101]}, changed(1)),
    ("page", SEVEN, Shows("101 p3, ann p2, 100 p1")),
    ("blocked", SEVEN, listed(102, total=1)),
    ("block", {"viewer": "ann", "authors": ["bob"]}, changed(1)),
    ("page", BOB, Shows("100 p1")),
    ("followers", {"author": 100}, listed("bob", 7, total=2)),
    ("followers", {"author": 100, "limit": 1}, listed("bob", total=2, next_cursor=ANY)),
    (
        "followers",
        {"author": 100, "limit": 1, "cursor": "$next"},
        listed(7, total=2, next_cursor=ANY),
    ),
    ("unfollow", {**SEVEN, "authors": [100, 4711]}, changed(1)),
    ("page", SEVEN, Shows("101 p3, ann p2")),
    (
        "post",
        {"author": 100, "id": "p7", "at": "$later"},
        {"id": "p7", "author": 100, "at": ANY, "is_waiting": True},
    ),
    ("page", BOB, Shows("100 p1")),
    (
        "why",
        *why(7, "p3", is_shown=True, author=101, at=ANY, reason={"code": "followed", "at": ANY}),
    ),
    ("why", *why(7, "p1", author=100, at=ANY, reason={"code": "not_followed"})),
    ("why", *why(7, "p5", author=102, at=ANY, reason={"code": "blocked", "at": ANY})),
    ("why", *why("bob", "p7", author=100, at=ANY, reason={"code": "waits", "at": ANY})),
    (
        "why",
        *why("bob", "p2", author="ann", at=ANY, reason={"code": "blocked_by_author", "at": ANY}),
    ),
    ("why", *why(7, "p6", reason={"code": "unknown"})),
    ("why", *why("nobody", "p3", author=101, at=ANY, reason={"code": "not_followed"})),
    ("verify", {}, VERIFIED),
    ("rebuild", {}, {"job": ANY}),
    ("work", {}, None),
    ("page", SEVEN, Shows("101 p3, ann p2")),
    ("stats", {}, [{"shard": 0, "state": "ready", "floor_at": ANY, "newest_at": ANY}]),
    ("unfollow_all", SEVEN, changed(3)),
    ("page", SEVEN, Shows("")),
    ("page", {"viewer": "b b"}, BAD_ID),
    ("follow", {**SEVEN, "authors": [100, "a/b"]}, BAD_ID),
    ("follow", {**SEVEN, "authors": ["0"]}, BAD_ID),
    ("post", posted(100, "p 1", 1)[0], BAD_ID),
    ("post", posted(101, "p1", 1)[0], Refusal("409 feed.post_taken")),
    (
        "post",
        {"author": 101, "id": "p9", "at": "1869-01-01T00:00:00Z"},
        Refusal("422 feed.invalid_post"),
    ),
    ("page", {**SEVEN, "cursor": "bm90IGEgY3Vyc29y"}, BAD_CURSOR),
    ("page", {**SEVEN, "since": "bm90IGEgcGxhY2U"}, BAD_CURSOR),
    ("set_marker", {**SEVEN, "position": "bm90IGEgcGxhY2U"}, BAD_CURSOR),
]


@asynccontextmanager
async def client_of(engines, feed, *, scopes=SCOPES, stop=None):
    """A client of the room's routes. Setting `stop` ends the server early."""
    services = {"feed": feed}
    async with served(engines, services, http.ROUTES, scopes=scopes, stop=stop) as client:
        yield client


@asynccontextmanager
async def surface_on(name, engines, feed):
    """The surface `name` of a service."""
    if name != "http":
        yield Surface(name, feed, GROUP, VERBS)
        return
    async with client_of(engines, feed) as client:
        yield Surface(name, feed, GROUP, VERBS, client)
