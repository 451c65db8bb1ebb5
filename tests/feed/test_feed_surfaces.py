"""Python, HTTP and commands give the same answers; rules of HTTP and of file imports."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from feed_surfaces import GROUP, STEPS, Shows, client_of, surface_on
from tests.kit.ways_in import Refused
from tests.views.room_harness import SURFACES, run_command, run_scenario

from headrace.feed.errors import PostUnknown
from headrace.testing import drain


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
async def test_every_surface_gives_the_same_answers(name, engines, feed, app):
    names = {"$later": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}

    def resolve(given):
        return {k: names.get(v, v) if isinstance(v, str) else v for k, v in given.items()}

    def check(verb, answer, expected):
        if isinstance(answer, dict) and "next_cursor" in answer:
            names["$next"] = answer["next_cursor"]
        if not isinstance(expected, Shows):
            return False
        assert answer.keys() <= {"posts", "next_cursor", "newest"}, "slow, or an unknown field"
        assert all(post.keys() - {"kind"} == {"id", "author", "at"} for post in answer["posts"])
        posts = [f"{post['author']} {post['id']}" for post in answer["posts"]]
        assert ", ".join(posts) == expected.posts
        assert ("next_cursor" in answer) == expected.more
        if verb == "page":
            assert ("newest" in answer) == bool(posts)
            names["$newest"] = answer.get("newest", names.get("$newest"))
        return True

    async with surface_on(name, engines, feed) as surface:
        meanwhile = {"work": lambda: drain(app)}
        await run_scenario(surface, STEPS, meanwhile=meanwhile, resolve=resolve, check=check)


async def test_fast_and_plain_answers_are_the_same(engines, feed):
    await feed.follow(7, [100, "ann"])
    for number in range(5):
        await feed.post("ann" if number % 2 else 100, f"p{number}")
    own = {"date", "x-request-id", "traceparent"}
    async with client_of(engines, feed) as client:
        for query in ("?limit=3", "", "?limit=200"):
            fast = await client.get(f"/v1/feed/viewers/7{query}")
            # The fast path does not handle escaped characters.
            plain = await client.get(f"/v1/feed/viewers/%37{query}")
            assert (fast.status_code, fast.content) == (200, plain.content)
            assert {*plain.headers} - own == {*fast.headers} - own
            for header in {*fast.headers} - own:
                assert fast.headers[header] == plain.headers[header]
        first = await client.get("/v1/feed/viewers/7?limit=3")
        second = await client.get(first.links["next"]["url"])
        assert [post["id"] for post in second.json()["posts"]] == ["p1", "p0"]
        newest = second.json()["newest"]
        since = await client.get(f"/v1/feed/viewers/7?limit=2&since={newest}")
        assert [post["id"] for post in since.json()["posts"]] == ["p4", "p3"]
        rest = await client.get(since.links["next"]["url"])
        assert [post["id"] for post in rest.json()["posts"]] == ["p2"], "the rest of what is new"
        await feed.valkey.drop()
        for viewer in ("7", "%37"):
            page = (await client.get(f"/v1/feed/viewers/{viewer}")).json()
            assert page["is_slow"] is True
            assert len(page["posts"]) == 5


async def test_posts_of_one_call_are_stored_all_or_none(engines, feed):
    await feed.follow(7, [100])
    async with client_of(engines, feed) as client:
        good = [{"author": 100, "id": f"p{number}"} for number in range(3)]
        answer = await client.post("/v1/feed/posts", json=[*good, {"author": 100, "id": "a b"}])
        assert (answer.status_code, answer.json()["code"]) == (422, "feed.invalid_id")
        assert (await feed.page(7)).posts == []
        answer = await client.post("/v1/feed/posts", json=good)
        assert answer.status_code == 201
        assert [post["id"] for post in answer.json()] == ["p0", "p1", "p2"]
        assert len((await feed.page(7)).posts) == 3


async def test_scopes_separate_reading_and_writing(engines, feed):
    async with client_of(engines, feed, scopes=("feed:read",)) as client:
        assert (await client.get("/v1/feed/viewers/7")).status_code == 200
        for method, path, body in (
            ("PUT", "/v1/feed/viewers/7/follows/100", None),
            ("POST", "/v1/feed/posts", {"author": 1, "id": "p"}),
            ("DELETE", "/v1/feed/posts/p", None),
            ("PUT", "/v1/feed/viewers/7/marker", {"position": "x"}),
            ("POST", "/v1/feed/rebuild", None),
        ):
            answer = await client.request(method, path, json=body)
            assert (answer.status_code, answer.json()["code"]) == (403, "web.insufficient_scope")


def test_invalid_words_of_a_command_are_refused_with_its_usage():
    for line in (
        "unfollow 7",
        "unfollow 7 100 --all",
        "page 7 --limit 0",
        "page",
        "muted",
        "rm",
        "import likes -",
    ):
        ran = CliRunner().invoke(GROUP, line.split())
        assert (ran.exit_code, "Usage" in ran.output) == (2, True), line


CSV_FOLLOWS = "viewer,author,at\n7,100,2026-01-01T00:00:00Z\n7,ann,\nbob,100,\n"
JSON_POSTS = (
    '{"author": 100, "id": "p1", "at": "2026-01-02T00:00:00Z"}\n\n'
    '{"author": "ann", "id": "p2", "at": "2026-01-03T00:00:00Z", "ref": "photo/1"}\n'
)


async def imported(feed, kind, text):
    return await run_command(GROUP, feed, "import", kind, "-", text=text)


async def failed_import(feed, kind, text, code):
    """The text of the error of an import."""
    with pytest.raises(Refused) as raised:
        await imported(feed, kind, text)
    assert raised.value.told == code
    return raised.value.__cause__.text


async def test_files_are_imported_once(feed):
    assert await imported(feed, "posts", "") == {"posts": 0}
    for new in (3, 0):
        assert await imported(feed, "follows", CSV_FOLLOWS) == {"follows": new}
        assert await imported(feed, "posts", JSON_POSTS) == {"posts": 2}
    assert [post.id for post in (await feed.page(7)).posts] == ["p2", "p1"]
    last = (await feed.follows.following(7)).people[-1]
    assert (last.id, last.since_at) == (100, datetime(2026, 1, 1, tzinfo=UTC))


INVALID_FILES = [
    ("follows", "viewer,author\n7,100\n7\n", 3),
    ("follows", "viewer,whose\n7,100\n", 2),
    ("follows", "viewer,author\n7,100,now,more\n", 2),
    ("follows", "viewer,author,at\n7,100,soon\n", 2),
    ("follows", "\n\nviewer,author\n7,100\n7\n", 5),
    ("follows", "viewer,author\n7,100\n007,100\n", 3),
    ("follows", "viewer,author\n7,a b\n", 2),
    ("follows", b"viewer,author\n7,100\n7,\xff\n", 3),
    ("posts", '{"author": 1}\n', 1),
    ("posts", '{"author": 1, "id": "p"}\n[]\n', 2),
    ("posts", '{"author": 1, "id": "p"}\n{"author"\n', 2),
    ("posts", '{"author": 1, "id": "p", "ref": 5}\n', 1),
    ("posts", '{"author": 1, "id": "p", "text": "x"}\n', 1),
    ("posts", '\n \n{"author": 1, "id": "p"}\n[]\n', 4),
    ("posts", "author,id\n1,p\n1,p 2\n", 3),
    ("posts", "author,id,at\n1,p,\n1,p2,2150-01-01\n", 3),
    ("posts", b'{"author": 1, "id": "p", "ref": "\xe9"}\n', 1),
    ("posts", 'author,id\n1,p\n1,"p\n', 3),
]


async def test_an_invalid_line_is_named_by_number_and_earlier_lines_are_imported(feed):
    for kind, text, line in INVALID_FILES:
        error = await failed_import(feed, kind, text, "422 feed.invalid_line")
        assert error.startswith(f"line {line}: ")
        if kind == "follows":
            rows = await feed.follows.unfollow_all(7)
        else:
            rows = await feed.delete("p")
        assert ("lines up to" in error) == bool(rows), error
        assert ("nothing of the file is imported" in error) != bool(rows), error


@pytest.mark.slow
async def test_a_stopped_import_reports_the_imported_lines(feed):
    await feed.post(2, "mine")
    posts = [f"1,p{number}" for number in range(2_300)]
    posts[2_100] = "1,mine"
    text = "\n".join(["author,id", *posts])
    error = await failed_import(feed, "posts", text, "409 feed.import_stopped")
    assert error.startswith("lines 2002 to 2301: post 'mine' belongs to another author")
    assert "lines up to 2001 are imported" in error
    assert (await feed.posts.find("p1999")).author == 1
    with pytest.raises(PostUnknown):
        await feed.posts.find("p2000")
    follows = [f"{viewer},{author}" for viewer in (8, 9) for author in range(1, 5_002)]
    text = "\n".join(["viewer,author", *follows])
    error = await failed_import(feed, "follows", text, "409 feed.import_stopped")
    assert error.startswith("line 5002: viewer 8 would exceed the limit of 5000 follows")
    assert "lines up to 5001 are imported" in error
    assert (await feed.follows.following(8)).total == 5_000
    assert (await feed.follows.following(9)).total == 0
