"""What the routes of the feed are sent by mistake or on purpose.

Each is refused in its words, nothing changes, and the next good request works.
"""

from __future__ import annotations

import json

import pytest
from feed_surfaces import client_of

LONG = "x" * 129
HUGE = "9" * 30
JSON = {"content-type": "application/json"}
VIEWER = "/v1/feed/viewers/7"


def get(path, code, **more):
    """A row: a GET and the refusal that must come."""
    return "GET", path, more, code


def send(method, path, data, code):
    """The same with a JSON body, or bytes."""
    content = data if isinstance(data, bytes) else json.dumps(data).encode()
    return method, path, {"content": content, "headers": JSON}, code


def post(data, code):
    """A row: a body of posts."""
    return send("POST", "/v1/feed/posts", data, code)


def follow(data, code):
    """A row: a body of authors."""
    return send("POST", f"{VIEWER}/follows", data, code)


UNCLEAR = "422 feed.unclear_unfollow"
ID, INPUT, CURSOR = "422 feed.invalid_id", "422 web.invalid_input", "400 cursor.invalid"

CORPUS = [
    # Pages.
    get(f"/v1/feed/viewers/{LONG}", ID),
    get("/v1/feed/viewers/", "404 web.not_found"),
    get("/v1/feed/viewers/a%20b", ID),
    get("/v1/feed/viewers/a%2Fb", ID),
    get("/v1/feed/viewers/a,b", ID),
    get("/v1/feed/viewers/%00", ID),
    get("/v1/feed/viewers/007", ID),
    get("/v1/feed/viewers/-5", ID),
    get("/v1/feed/viewers/0", ID),
    get(f"/v1/feed/viewers/{HUGE}", ID),
    get("/v1/feed/viewers/nobody?cursor=x", CURSOR),
    get("/v1/feed/viewers/nobody?since=$other", CURSOR),
    get("/v1/feed/viewers/nobody/follows?cursor=$line", CURSOR),
    get("/v1/feed/viewers/%ff", ID),
    get("/v1/feed/viewers/%D0%B6", ID),
    get("/v1/feed/viewers/a%0D%0Alink:x", ID),
    get("/v1/feed/viewers/../../etc", "404 web.not_found"),
    get("/v1/feed/viewers/7/likes", "404 web.not_found"),
    get(f"{VIEWER}?limit=0", INPUT),
    get(f"{VIEWER}?limit=-1", INPUT),
    get(f"{VIEWER}?limit=201", INPUT),
    get(f"{VIEWER}?limit=1.5", INPUT),
    get(f"{VIEWER}?limit=many", INPUT),
    get(f"{VIEWER}?limit={HUGE}", INPUT),
    get(f"{VIEWER}?limit=%D9%A5%C2%B2", INPUT),
    get(f"{VIEWER}?cursor=x", CURSOR),
    get(f"{VIEWER}?cursor=", CURSOR),
    get(f"{VIEWER}?cursor=%00", CURSOR),
    get(f"{VIEWER}?cursor={'A' * 2000}", CURSOR),
    get(f"{VIEWER}?since=x", CURSOR),
    get(f"{VIEWER}?cursor=$other", CURSOR),
    get(f"{VIEWER}?since=$other", CURSOR),
    get(f"{VIEWER}?cursor=$line", CURSOR),
    get(f"{VIEWER}?cursor=$cut", CURSOR),
    get("/v1/feed/authors/100/posts?cursor=$other", CURSOR),
    get("/v1/feed/authors/a%20b/posts", ID),
    get("/v1/feed/authors/100/posts?limit=0", INPUT),
    get("/v1/feed/authors/a%20b/followers", ID),
    get("/v1/feed/authors/100/followers?limit=1001", INPUT),
    get("/v1/feed/authors/100/followers?cursor=$other", CURSOR),
    get(f"{VIEWER}/follows?cursor=$line", CURSOR),
    get("/v1/feed/viewers/a%20b/unread", ID),
    get("/v1/feed/viewers/a%20b/marker", ID),
    get("/v1/feed/viewers/a%20b/live", ID),
    get(f"{VIEWER}/live?since=x", CURSOR),
    get(f"{VIEWER}/live", CURSOR, headers={"last-event-id": "$other"}),
    get("/v1/feed/posts/a%20b", ID),
    get("/v1/feed/posts/nobody", "404 feed.post_unknown"),
    get("/v1/feed/verify?sample=0", INPUT),
    # Follows, mutes, blocks.
    ("PUT", f"{VIEWER}/follows/a%20b", {}, ID),
    ("PUT", f"{VIEWER}/mutes/{LONG}", {}, ID),
    ("PUT", "/v1/feed/viewers/a%20b/blocks/7", {}, ID),
    ("DELETE", f"{VIEWER}/follows", {}, UNCLEAR),
    ("DELETE", f"{VIEWER}/follows?all=false", {}, UNCLEAR),
    ("DELETE", f"{VIEWER}/follows?all=true&authors=100", {}, UNCLEAR),
    ("DELETE", f"{VIEWER}/follows?author=100", {}, UNCLEAR),
    ("DELETE", f"{VIEWER}/follows?Authors=100", {}, UNCLEAR),
    ("DELETE", f"{VIEWER}/follows?authors=100&authors=101", {}, "400 web.parameter_repeated"),
    ("DELETE", f"{VIEWER}/follows", {"json": [100]}, UNCLEAR),
    ("DELETE", f"{VIEWER}/follows?authors=1,,2", {}, ID),
    ("DELETE", f"{VIEWER}/follows?authors=", {}, ID),
    ("DELETE", f"{VIEWER}/mutes", {}, INPUT),
    ("DELETE", f"{VIEWER}/blocks?authors=a%20b", {}, ID),
    ("PATCH", f"{VIEWER}/follows/100", {}, "405 web.method_not_allowed"),
    ("POST", f"{VIEWER}/follows/100", {}, "405 web.method_not_allowed"),
    follow(b"", "400 web.malformed_json"),
    follow(b"[", "400 web.malformed_json"),
    follow(b"\xff", "400 web.malformed_json"),
    follow("100", INPUT),
    follow(None, INPUT),
    follow({"authors": [1]}, INPUT),
    follow([None], INPUT),
    follow([1.5], INPUT),
    follow([True], INPUT),
    follow([[1]], INPUT),
    follow([-1], ID),
    follow(["-1"], ID),
    follow(["0100"], ID),
    follow([2**63], INPUT),
    follow([10**30], INPUT),
    follow(["a b"], ID),
    follow([101, ""], ID),
    follow(["a\u0000"], INPUT),
    follow([*range(1, 10_002)], "413 feed.too_many_at_once"),
    follow([*range(1, 5_002)], "409 feed.too_many_follows"),
    # Posts.
    post(b'{"id":"a","id":"b","author":1}', "400 web.malformed_json"),
    post("p", INPUT),
    post([None], INPUT),
    post({}, INPUT),
    post({"id": "p"}, INPUT),
    post({"author": 1}, INPUT),
    post({"author": 1, "id": 5}, INPUT),
    post({"author": 1, "id": "p", "text": "x"}, INPUT),
    post({"author": None, "id": "p"}, INPUT),
    post({"author": 0, "id": "p"}, ID),
    post({"author": -5, "id": "p"}, ID),
    post({"author": 1, "id": ""}, ID),
    post({"author": 1, "id": "a b"}, ID),
    post({"author": 1, "id": "x" * 65}, ID),
    post({"author": 1, "id": "p", "at": "soon"}, INPUT),
    post({"author": 1, "id": "p", "at": "2026-01-01T00:00:00"}, "422 feed.invalid_post"),
    post({"author": 1, "id": "p", "at": "1969-12-31T00:00:00Z"}, "422 feed.invalid_post"),
    post({"author": 1, "id": "p", "at": "9999-01-01T00:00:00Z"}, "422 feed.invalid_post"),
    post({"author": 1, "id": "p", "at": "2098-01-01T00:00:00Z"}, "422 feed.invalid_post"),
    post([{"author": "00", "id": "p"}], ID),
    post({"author": 1, "id": "p", "at": 5}, INPUT),
    post({"author": 1, "id": "p", "ref": "x" * 1001}, "422 feed.invalid_post"),
    post({"author": 1, "id": "p", "ref": 5}, INPUT),
    post({"author": 1, "id": "p", "ref": "a\u0000"}, INPUT),
    post([{"author": 1, "id": "p"}, {"author": 1, "id": "p"}], "422 feed.invalid_post"),
    post({"author": 101, "id": "mine"}, "409 feed.post_taken"),
    post([{"author": 1, "id": "new"}, {"author": 101, "id": "mine"}], "409 feed.post_taken"),
    post([{"author": 1, "id": f"p{n}"} for n in range(1_001)], "413 feed.too_many_at_once"),
    ("DELETE", "/v1/feed/posts/a%20b", {}, ID),
    (
        "POST",
        "/v1/feed/posts",
        {"json": {"author": 1, "id": "p"}, "headers": {"idempotency-key": "k"}},
        "422 web.idempotency_unsupported",
    ),
    # The marker.
    send("PUT", f"{VIEWER}/marker", {}, INPUT),
    send("PUT", f"{VIEWER}/marker", {"position": None}, INPUT),
    send("PUT", f"{VIEWER}/marker", {"position": "x"}, CURSOR),
    send("PUT", f"{VIEWER}/marker", {"position": "$other"}, CURSOR),
]


def filled(value, names):
    """`value` with the cursors of this run in their places."""
    if isinstance(value, dict):
        return {key: filled(one, names) for key, one in value.items()}
    if isinstance(value, bytes):
        return filled(value.decode("latin-1"), names).encode("latin-1")
    for name, cursor in names.items():
        value = value.replace(name, cursor) if isinstance(value, str) else value
    return value


async def cursors(feed):
    """Cursors that are good elsewhere: another viewer's, a list's; and one that was cut."""
    await feed.follow(8, [100, 101])
    await feed.posts.add([])
    other = (await feed.page(8, 1)).next
    line = (await feed.follows.following(8, 1)).next
    own = (await feed.page(7, 1)).next
    assert other
    assert line
    assert own
    return {"$other": other, "$line": line, "$cut": own[:-1]}


@pytest.mark.slow
async def test_each_is_refused_and_nothing_changes(engines, feed):
    """One server for all: what one of them left behind would show in the next."""
    await feed.follow(7, [100])
    await feed.post(100, "mine")
    await feed.post(100, "mine2")
    names = await cursors(feed)
    good = [post.id for post in (await feed.page(7)).posts]
    async with client_of(engines, feed) as client:
        for method, path, more, told in CORPUS:
            answer = await client.request(method, filled(path, names), **filled(more, names))
            seen = f"{method} {path[:80]} {str(more)[:80]}"
            assert answer.is_error, seen
            problem = answer.json()
            assert f"{answer.status_code} {problem['code']}" == told, seen
            assert answer.headers["content-type"] == "application/problem+json", seen
            assert problem["detail"], seen
            page = await client.get(VIEWER)
            assert [post["id"] for post in page.json()["posts"]] == good, seen
        people = await client.get(f"{VIEWER}/follows")
        assert people.json()["total"] == 1
        for kind in ("mutes", "blocks"):
            assert (await client.get(f"{VIEWER}/{kind}")).json()["total"] == 0
        assert (await client.get("/v1/feed/posts/new")).status_code == 404
    assert len(CORPUS) > 90
