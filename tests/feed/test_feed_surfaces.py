"""One life of feeds, told alike by Python, HTTP and the command line.

`feed_scenario.toml`, step by step.
"""

from __future__ import annotations

import json
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from feed_surfaces import SURFACES, CommandSurface, Refused, client_of, surface_on

from headrace.feed import cli
from headrace.feed.errors import PostUnknown
from headrace.testing import drain

STEPS = tomllib.loads(Path(__file__).with_name("feed_scenario.toml").read_text())["step"]
PAGES = {"page", "author_posts"}


def filled(value, names):
    """`value` with `names` in their places."""
    if isinstance(value, dict):
        return {key: filled(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, names) for one in value]
    return names.get(value, value) if isinstance(value, str) else value


def without_any(answer, expected):
    """The answer with `<any>` wherever that is expected."""
    if expected == "<any>":
        return "<any>"
    if isinstance(expected, dict) and isinstance(answer, dict):
        return {key: without_any(one, expected.get(key)) for key, one in answer.items()}
    if isinstance(expected, list) and isinstance(answer, list) and len(answer) == len(expected):
        return [without_any(one, part) for one, part in zip(answer, expected, strict=True)]
    return answer


def check_page(step, page, names):
    """What a page shows is what the step says, and the page has all that a page has."""
    assert page.keys() <= {"posts", "next_cursor", "newest"}, "slow, or more than a page has"
    assert all(post.keys() == {"id", "author", "at"} for post in page["posts"])
    assert [f"{post['author']} {post['id']}" for post in page["posts"]] == step["shows"]
    if step.get("more") != "<any>":
        assert ("next_cursor" in page) == step.get("more", False)
    if step["do"] == "page":
        assert ("newest" in page) == bool(step["shows"])
        names["$newest"] = page.get("newest", names.get("$newest"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
async def test_every_way_in_tells_the_same_life(name, engines, feed, jobs):
    names = {"$later": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}

    async with surface_on(name, engines, feed) as surface:
        for step in STEPS:
            given = filled(step.get("with", {}), names)
            try:
                if step["do"] == "work":
                    await drain(SimpleNamespace(jobs=jobs, engines=engines))
                elif "refused" in step:
                    with pytest.raises(Refused) as raised:
                        await surface.do(step["do"], given)
                    assert raised.value.told == step["refused"]
                else:
                    answer = await surface.do(step["do"], given)
                    if isinstance(answer, dict) and "next_cursor" in answer:
                        names["$next"] = answer["next_cursor"]
                    if "shows" in step:
                        check_page(step, answer, names)
                    else:
                        assert without_any(answer, step["gives"]) == step["gives"]
            except (Exception, pytest.fail.Exception) as error:
                error.add_note(f"{name}, step {step['name']!r}")
                raise


async def test_hot_and_plain_answers_are_the_same(engines, feed):
    await feed.follow(7, [100, "ann"])
    for number in range(5):
        await feed.post("ann" if number % 2 else 100, f"p{number}")
    async with client_of(engines, feed) as client:
        for query in ("?limit=3", "", "?limit=200"):
            hot = await client.get(f"/v1/feed/viewers/7{query}")
            # An escaped character is left to the plain way.
            plain = await client.get(f"/v1/feed/viewers/%37{query}")
            assert (hot.status_code, hot.content) == (200, plain.content)
            same = {*hot.headers} - {"date", "x-request-id", "traceparent"}
            assert {*plain.headers} - {"date", "x-request-id", "traceparent"} == same
            for header in same:
                assert hot.headers[header] == plain.headers[header]
        first = await client.get("/v1/feed/viewers/7?limit=3")
        link = first.links["next"]["url"]
        second = await client.get(link)
        assert [post["id"] for post in second.json()["posts"]] == ["p1", "p0"]
        newest = second.json()["newest"]
        since = await client.get(f"/v1/feed/viewers/7?limit=2&since={newest}")
        assert [post["id"] for post in since.json()["posts"]] == ["p4", "p3"]
        # The rest of what is new, and no more than that.
        rest = await client.get(since.links["next"]["url"])
        assert [post["id"] for post in rest.json()["posts"]] == ["p2"]


@pytest.mark.parametrize("way", ["7", "%37"], ids=["hot", "plain"])
async def test_a_page_without_valkey_says_that_it_is_slow(engines, feed, way):
    await feed.follow(7, [100])
    await feed.post(100, "p1")
    await feed.valkey.drop()
    async with client_of(engines, feed) as client:
        page = (await client.get(f"/v1/feed/viewers/{way}")).json()
        assert page["is_slow"] is True
        assert [post["id"] for post in page["posts"]] == ["p1"]


async def test_many_posts_in_one_call_are_all_in_or_none(engines, feed):
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


async def test_scopes_keep_reading_and_writing_apart(engines, feed):
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


CSV_FOLLOWS = "viewer,author,at\n7,100,2026-01-01T00:00:00Z\n7,ann,\nbob,100,\n"
JSON_POSTS = (
    '{"author": 100, "id": "p1", "at": "2026-01-02T00:00:00Z"}\n\n'
    '{"author": "ann", "id": "p2", "at": "2026-01-03T00:00:00Z", "ref": "photo/1"}\n'
)


async def test_files_are_imported_and_again_change_nothing(feed):
    surface = CommandSurface(feed)
    for new in (3, 0):
        told = await surface.run("import", "follows", "-", text=CSV_FOLLOWS)
        assert told == {"follows": new}
        assert await surface.run("import", "posts", "-", text=JSON_POSTS) == {"posts": 2}
    page = await surface.do("page", {"viewer": 7})
    assert [post["id"] for post in page["posts"]] == ["p2", "p1"]
    people = await surface.do("following", {"viewer": 7})
    assert people["people"][-1] == {"id": 100, "since_at": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("kind", "text", "line"),
    [
        ("follows", "viewer,author\n7,100\n7\n", 3),
        ("follows", "viewer,whom\n7,100\n", 2),
        ("follows", "viewer,author\n7,100,now,more\n", 2),
        ("follows", "viewer,author,at\n7,100,soon\n", 2),
        ("posts", '{"author": 1}\n', 1),
        ("posts", '{"author": 1, "id": "p"}\n[]\n', 2),
        ("posts", '{"author": 1, "id": "p"}\n{"author"\n', 2),
        ("posts", '{"author": 1, "id": "p", "ref": 5}\n', 1),
        ("posts", '{"author": 1, "id": "p", "text": "x"}\n', 1),
        ("follows", "\n\nviewer,author\n7,100\n7\n", 5),
        ("posts", '\n \n{"author": 1, "id": "p"}\n[]\n', 4),
        ("follows", "viewer,author\n7,100\n007,100\n", 3),
        ("follows", "viewer,author\n7,a b\n", 2),
        ("posts", "author,id\n1,p\n1,p 2\n", 3),
        ("posts", "author,id,at\n1,p,\n1,p2,2150-01-01\n", 3),
        ("follows", b"viewer,author\n7,100\n7,\xff\n", 3),
        ("posts", b'{"author": 1, "id": "p", "ref": "\xe9"}\n', 1),
        ("posts", 'author,id\n1,p\n1,"p\n', 3),
    ],
)
async def test_a_faulty_line_is_told_by_its_number_and_what_is_in(feed, kind, text, line):
    """All before it is in."""
    surface = CommandSurface(feed)
    with pytest.raises(Refused) as raised:
        await surface.run("import", kind, "-", text=text)
    assert raised.value.told == "422 feed.invalid_line"
    told = raised.value.__cause__.text
    assert told.startswith(f"line {line}: ")
    lines = [row for row in (await feed.follows.following(7)).people if kind == "follows"]
    lines += [row for row in (await feed.pages.author_posts(1)).posts if kind == "posts"]
    assert ("lines up to" in told) == bool(lines), told
    assert ("nothing of the file is imported" in told) != bool(lines), told
    assert "nothing was" not in told


@pytest.mark.slow
async def test_what_an_import_did_before_it_was_stopped_is_said(feed):
    surface = CommandSurface(feed)
    await feed.post(2, "mine")
    posts = [f"1,p{number}" for number in range(2_300)]
    posts[2_100] = "1,mine"
    with pytest.raises(Refused) as raised:
        await surface.run("import", "posts", "-", text="\n".join(["author,id", *posts]))
    assert raised.value.told == "409 feed.import_stopped"
    told = raised.value.__cause__.text
    assert told.startswith("lines 2002 to 2301: post 'mine' belongs to another author")
    assert "lines up to 2001 are imported" in told
    assert (await feed.posts.find("p1999")).author == 1
    with pytest.raises(PostUnknown):
        await feed.posts.find("p2000")
    follows = [f"{viewer},{author}" for viewer in (8, 9) for author in range(1, 5_002)]
    with pytest.raises(Refused) as raised:
        await surface.run("import", "follows", "-", text="\n".join(["viewer,author", *follows]))
    told = raised.value.__cause__.text
    assert told.startswith("line 5002: viewer 8 would exceed the limit of 5000 follows")
    assert "lines up to 5001 are imported" in told
    assert (await feed.follows.following(8)).total == 5_000
    assert (await feed.follows.following(9)).total == 0


async def test_an_empty_file_is_no_fault(feed):
    assert await CommandSurface(feed).run("import", "posts", "-", text="") == {"posts": 0}


@pytest.mark.parametrize(
    "words",
    [
        ("unfollow", "7"),
        ("unfollow", "7", "100", "--all"),
        ("page", "7", "--limit", "0"),
        ("page",),
        ("muted",),
        ("rm",),
        ("import", "likes", "-"),
    ],
)
def test_wrong_words_are_told_with_the_usage(words):
    ran = CliRunner().invoke(cli.COMMANDS[0], words)
    assert ran.exit_code == 2
    assert "Usage" in ran.output


def test_steps_have_names_of_their_own_and_what_they_need():
    names = [step["name"] for step in STEPS]
    assert len(set(names)) == len(names)
    allowed = {"name", "do", "with", "gives", "refused", "shows", "more"}
    assert {key for step in STEPS for key in step} <= allowed
    for step in STEPS:
        said = [key for key in ("gives", "refused", "shows") if key in step]
        assert len(said) == (step["do"] != "work"), json.dumps(step)
        assert ("shows" in step) == (step["do"] in PAGES and "refused" not in step)
