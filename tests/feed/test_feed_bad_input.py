"""Malformed HTTP requests: each is refused by its code, and nothing changes."""

from __future__ import annotations

import re

import pytest
from feed_surfaces import client_of
from tests.views.room_harness import bodies, paths, require_all_refused

from headrace.feed.errors import InvalidFeedId, InvalidFollow, InvalidKind

LONG, HUGE = "x" * 129, "9" * 30
VIEWERS, VIEWER = "/v1/feed/viewers", "/v1/feed/viewers/7"
FOLLOWS, POSTS, MARKER = f"{VIEWER}/follows", "/v1/feed/posts", f"{VIEWER}/marker"
AUTHOR = "/v1/feed/authors/100"
BAD_IDS = (LONG, "a%20b", "a%2Fb", "a,b", "%00", "007", "-5", "0", HUGE, "%ff", "%D0%B6")
BAD_LIMITS = ("0", "-1", "201", "1.5", "many", HUGE, "%D9%A5%C2%B2")


def post(**fields):
    """The body of a post."""
    return {"author": 1, "id": "p"} | fields


INVALID_ID = [
    *paths("GET", *(f"{VIEWERS}/{bad}" for bad in (*BAD_IDS, "a%0D%0Alink:x"))),
    *paths("GET", *(f"{VIEWERS}/a%20b/{name}" for name in ("unread", "marker", "live"))),
    *paths("GET", *(f"/v1/feed/authors/a%20b/{name}" for name in ("posts", "followers"))),
    *paths("GET", f"{POSTS}/a%20b"),
    *paths("PUT", f"{FOLLOWS}/a%20b", f"{VIEWER}/mutes/{LONG}", f"{VIEWERS}/a%20b/blocks/7"),
    *paths("DELETE", f"{FOLLOWS}?authors=1,,2", f"{FOLLOWS}?authors=", f"{POSTS}/a%20b"),
    *paths("DELETE", f"{VIEWER}/blocks?authors=a%20b"),
    *bodies("POST", FOLLOWS, *([bad] for bad in (-1, "-1", "0100", "a b")), [101, ""]),
    *bodies("POST", POSTS, post(author=0), post(author=-5), [post(author="00")]),
    *bodies("POST", POSTS, *(post(id=bad) for bad in ("", "a b", "x" * 65))),
]
INVALID_INPUT = [
    *paths("GET", *(f"{VIEWER}?limit={bad}" for bad in BAD_LIMITS)),
    *paths("GET", f"{AUTHOR}/posts?limit=0", f"{AUTHOR}/followers?limit=1001"),
    *paths("GET", "/v1/feed/verify?sample=0"),
    *paths("DELETE", f"{VIEWER}/mutes"),
    *bodies("POST", FOLLOWS, "100", None, {"authors": [1]}, ["a\u0000"]),
    *bodies("POST", FOLLOWS, *([bad] for bad in (None, 1.5, True, [1], 2**63, 10**30))),
    *bodies("POST", POSTS, "p", [None], {}, {"id": "p"}, {"author": 1}, post(text="x")),
    *bodies("POST", POSTS, post(author=None), post(id=5), post(at="soon"), post(at=5)),
    *bodies("POST", POSTS, post(ref=5), post(ref="a\u0000")),
    *bodies("PUT", MARKER, {}, {"position": None}),
    *paths("DELETE", f"{FOLLOWS}?author=100", f"{FOLLOWS}?Authors=100"),
]


def table(other, line, cut):
    """The requests, with cursors that are valid for another viewer or list, and a cut one."""
    at_moments = ("2026-01-01T00:00:00", "1969-12-31T00:00:00Z")
    too_late = ("9999-01-01T00:00:00Z", "2098-01-01T00:00:00Z")
    return {
        "422 feed.invalid_id": INVALID_ID,
        "422 web.invalid_input": INVALID_INPUT,
        "400 cursor.invalid": [
            *paths("GET", *(f"{VIEWER}?cursor={bad}" for bad in ("x", "", "%00", "A" * 2000))),
            *paths("GET", *(f"{VIEWER}?cursor={bad}" for bad in (other, line, cut))),
            *paths("GET", f"{VIEWER}?since=x", f"{VIEWER}?since={other}", f"{VIEWER}/live?since=x"),
            *paths("GET", f"{VIEWERS}/nobody?cursor=x", f"{VIEWERS}/nobody?since={other}"),
            *paths("GET", *(f"{VIEWERS}/{v}/follows?cursor={line}" for v in ("nobody", 7))),
            *paths("GET", *(f"{AUTHOR}/{name}?cursor={other}" for name in ("posts", "followers"))),
            ("GET", f"{VIEWER}/live", {"headers": {"last-event-id": other}}),
            *bodies("PUT", MARKER, {"position": "x"}, {"position": other}),
        ],
        "422 feed.invalid_follow": [
            *paths("DELETE", FOLLOWS, f"{FOLLOWS}?all=false", f"{FOLLOWS}?all=true&authors=100"),
            ("DELETE", FOLLOWS, {"json": [100]}),
        ],
        "422 feed.invalid_post": [
            *bodies("POST", POSTS, *(post(at=bad) for bad in (*at_moments, *too_late))),
            *bodies("POST", POSTS, post(ref="x" * 1001), [post(), post()]),
        ],
        "409 feed.post_taken": bodies(
            "POST",
            POSTS,
            post(author=101, id="mine"),
            [post(id="new"), post(author=101, id="mine")],
        ),
        "409 feed.too_many_follows": bodies("POST", FOLLOWS, [*range(1, 5_002)]),
        "413 feed.too_many_at_once": [
            *bodies("POST", FOLLOWS, [*range(1, 10_002)]),
            *bodies("POST", POSTS, [post(id=f"p{n}") for n in range(1_001)]),
        ],
        "404 feed.post_unknown": paths("GET", f"{POSTS}/nobody"),
        "404 web.not_found": paths("GET", f"{VIEWERS}/", f"{VIEWERS}/../../etc", f"{VIEWER}/likes"),
        "405 web.method_not_allowed": [
            *paths("PATCH", f"{FOLLOWS}/100"),
            *paths("POST", f"{FOLLOWS}/100"),
        ],
        "400 web.parameter_repeated": paths("DELETE", f"{FOLLOWS}?authors=100&authors=101"),
        "400 web.malformed_json": [
            *bodies("POST", FOLLOWS, b"", b"[", b"\xff"),
            *bodies("POST", POSTS, b'{"id":"a","id":"b","author":1}'),
        ],
        "422 web.idempotency_unsupported": [
            ("POST", POSTS, {"json": post(), "headers": {"idempotency-key": "k"}})
        ],
    }


@pytest.mark.slow
async def test_each_is_refused_and_nothing_changes(engines, feed):
    """One server for all, so that effects of a request show in the next."""
    await feed.follow(7, [100])
    await feed.post(100, "mine")
    await feed.post(100, "mine2")
    await feed.follow(8, [100, 101])
    requests = table(
        other=(await feed.page(8, 1)).next,
        line=(await feed.follows.following(8, 1)).next,
        cut=(await feed.page(7, 1)).next[:-1],
    )
    checked = 0
    async with client_of(engines, feed) as client:

        async def is_unchanged(seen):
            nonlocal checked
            checked += 1
            page = (await client.get(VIEWER)).json()
            assert [each["id"] for each in page["posts"]] == ["mine2", "mine"], seen

        await require_all_refused(client, requests, is_unchanged)
        for name, total in (("follows", 1), ("mutes", 0), ("blocks", 0)):
            assert (await client.get(f"{VIEWER}/{name}")).json()["total"] == total
        assert (await client.get(f"{POSTS}/new")).status_code == 404
    assert checked > 105


async def test_what_is_no_list_or_no_follow_is_refused(feed):
    calls = [
        (InvalidFeedId, "posts 'None': expected a list", feed.posts.import_all(None)),
        (InvalidFeedId, "follows '5': expected a list", feed.follows.import_all(5)),
        (InvalidFollow, "expected (viewer, author)", feed.follows.import_all([7])),
        (InvalidFollow, "expected (viewer, author)", feed.follows.import_all([("7",)])),
        (InvalidKind, "expected a list of kinds", feed.pages.page(7, kinds=5)),
    ]
    for error, text, call in calls:
        with pytest.raises(error, match=re.escape(text)):
            await call
