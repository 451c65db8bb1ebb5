"""The access log has one line for each answer of each kind of node, and no signature."""

from __future__ import annotations

import asyncio
import json
import random
import re

import pytest
from conformance_cases import OBJECTS
from node_kinds import KINDS
from raw_clients import pattern, serving, wait_until

from headrace.media.header_rules import parse_header_rules
from headrace.media.model import BLOCK_BYTES

KEY, TRACK, _ = OBJECTS["track"]
WAYS = ("files", "files, Python", "blocks", "tls")
COMBINED = re.compile(
    r'127\.0\.0\.1 - - \[\d\d/[A-Z][a-z]{2}/\d{4}(:\d\d){3} \+0000\] "(?P<line>[^"]*)"'
    r' (?P<status>\d{3}) (?P<bytes>\d+) "(?P<referer>[^"]*)" "(?P<agent>[^"]*)"'
)


@pytest.fixture(params=[kind for kind in KINDS if kind.name in WAYS], ids=str)
async def logged(request, tmp_path):
    """A node with a log: `lines()` reads it."""
    kind = request.param
    path = tmp_path / "access.log"
    settings = {"access_log": "json", "access_log_path": str(path)}
    async with kind.start(tmp_path / kind.name, **settings) as node:
        await node.blobs.put(KEY, TRACK)
        node.log_path = path
        node.lines = lambda: [json.loads(line) for line in path.read_text().splitlines()]
        yield node


async def test_each_answer_has_one_line_under_load_with_clients_that_leave(logged):
    chance = random.Random(5)
    before = logged.series("media_requests_total")
    expected = 0

    async def play(is_leaving):
        nonlocal expected
        client = await logged.connect(buffer_bytes=4096 if is_leaving else 0)
        for _ in range(chance.randrange(1, 12)):
            if is_leaving:
                client.send(f"GET /m/{KEY} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
                await client.wait_begun()
                expected += 1
                break
            start = chance.randrange(len(TRACK) - 1)
            answer = await client.ask(KEY, Range=f"bytes={start}-{start + 999}")
            assert answer.status == 206
            expected += 1
        client.drop()

    await asyncio.gather(*(play(is_leaving=n % 4 == 0) for n in range(24)))
    await wait_until(lambda: len(logged.lines()) >= expected)
    lines = logged.lines()
    await wait_until(lambda: logged.series("media_requests_total") - before == expected)
    assert len(lines) == expected
    assert {line["status"] for line in lines} == {200, 206}
    for line in lines:
        assert (line["client"], line["method"], line["path"]) == ("127.0.0.1", "GET", f"/m/{KEY}")
        if line["status"] == 206:
            first, last = map(int, line["range"].removeprefix("bytes=").split("-"))
            assert line["bytes"] == min(last + 1, len(TRACK)) - first
        else:
            assert 0 <= line["bytes"] <= len(TRACK)
        assert line["duration_s"] >= 0
        assert line["cache"].startswith("headrace; ")


async def test_fields_are_escaped_and_signatures_are_left_out(logged):
    client = await logged.connect()
    signed = (await logged.media.objects.sign(KEY, ttl_s=60)).url.partition("/m/")[2]
    signature = signed.rpartition("&s=")[2]
    fields = {
        "Referer": f'https://a.example/"x\\?a=1&s={signature}&b=2',
        "User-Agent": 'player "1"\\',
        "Range": "bytes=5-9",
    }
    for path in (signed, f"{KEY}?x=1"):
        for _ in range(3):
            assert (await client.ask(path, **fields)).status == 206
    await wait_until(lambda: len(logged.lines()) == 6)
    assert signature not in logged.log_path.read_text()
    planes = set()
    for line, path in zip(logged.lines(), [signed] * 3 + [f"{KEY}?x=1"] * 3, strict=True):
        assert line["path"] == f"/m/{path}".replace(signature, "*")
        assert line["referer"] == fields["Referer"].replace(signature, "*")
        assert (line["user_agent"], line["range"], line["bytes"]) == (
            fields["User-Agent"],
            "bytes=5-9",
            5,
        )
        planes.add(line["plane"])
    assert planes <= {"native", "python"}


async def test_refusals_have_lines_too(logged):
    client = await logged.connect()
    assert (await client.ask("tracks/none.mp3")).status == 404
    assert (await client.ask(KEY, Range=f"bytes={len(TRACK)}-")).status == 416
    assert (await client.ask(KEY, method="HEAD")).status == 200
    probing = await logged.connect()
    probing.send(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
    await probing.wait_begun()
    for head in (b"\0\r\n\r\n", b"GET /m/a HTTP/3.0\r\nHost: a\r\n\r\n"):
        broken = await logged.connect()
        broken.send(head)
        await broken.wait_closed()
    await wait_until(lambda: len(logged.lines()) == 5)
    lines = logged.lines()
    assert [line["status"] for line in lines] == [404, 416, 200, 400, 505]
    assert [line["bytes"] > 0 for line in lines] == [True, True, False, True, True]
    assert [line["method"] for line in lines] == ["GET", "GET", "HEAD", "", ""]


async def test_a_renamed_log_is_followed_by_a_new_one(logged):
    client = await logged.connect()
    await client.ask(KEY)
    await wait_until(lambda: len(logged.lines()) == 1)
    rotated = logged.log_path.rename(logged.log_path.with_suffix(".1"))
    await client.ask(KEY)
    await wait_until(lambda: logged.log_path.exists() and len(logged.lines()) == 1)
    assert len(rotated.read_text().splitlines()) == 1


async def test_an_answer_from_another_node_has_a_line(tmp_path):
    path = tmp_path / "access.log"
    kind = next(kind for kind in KINDS if kind.name == "peer")
    settings = {"access_log": "json", "access_log_path": str(path)}
    async with kind.start(tmp_path / "peer", **settings) as node:
        await node.blobs.put(KEY, TRACK)
        client = await node.connect()
        for _ in range(4):
            assert (await client.ask(KEY, Range="bytes=5-9")).body == TRACK[5:10]
        await wait_until(lambda: path.read_text().count(KEY) == 4)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        asked = [line for line in lines if KEY in line["path"]]
        assert {(line["status"], line["bytes"]) for line in asked} == {(206, 5)}
        assert all("detail=peer" in line["cache"] for line in asked)
        assert "native" in {line["plane"] for line in asked}


@pytest.mark.parametrize("data_plane", ["auto", "python"])
async def test_the_combined_format_and_a_file_that_fails(blobs, tmp_path, data_plane):
    path = tmp_path / "access.log"
    path.symlink_to("/dev/full")
    settings = {"access_log": "combined", "access_log_path": str(path), "data_plane": data_plane}
    async with serving(blobs, run=tmp_path / "run", **settings) as node:
        await node.blobs.put("a.mp3", pattern(BLOCK_BYTES))
        client = await node.connect()
        before = node.series("media_access_log_dropped_total")
        for _ in range(3):
            assert (await client.ask("a.mp3", Referer='a"b')).status == 200
        await wait_until(lambda: node.series("media_access_log_dropped_total") == before + 3)
        path.unlink()
        for _ in range(3):
            await client.ask("a.mp3", Referer='a"b', User_Agent="x")
        await wait_until(lambda: path.exists() and len(path.read_text().splitlines()) == 3)
        for line in path.read_text().splitlines():
            found = COMBINED.fullmatch(line)
            assert found is not None, line
            assert found["line"] == "GET /m/a.mp3 HTTP/1.1"
            assert (found["status"], found["bytes"]) == ("200", str(BLOCK_BYTES))
            assert (found["referer"], found["agent"]) == (r"a\x22b", "x")


RULES = parse_header_rules(
    json.dumps(
        [
            {"prefix": "tracks/", "cache_control": "public, max-age=5"},
            {
                "prefix": "tracks/a",
                "cache_control": "no-cache",
                "fields": {"Content-Disposition": "attachment", "X-Robots-Tag": "noindex"},
            },
            {"prefix": "photos/", "fields": {"Link": "<https://a.example/>; rel=license"}},
        ]
    )
)


async def test_header_rules_give_the_same_bytes_on_both_planes(kind, tmp_path):
    async with kind.start(tmp_path / kind.name, headers=RULES) as node:
        keys = ("tracks/a1.mp3", "tracks/b.mp3", "photos/x.jpg", "other.mp3")
        for key in keys:
            await node.blobs.put(key, pattern(1_000))
        client = await node.connect()
        cache_controls = ("no-cache", "public, max-age=5", *["public, max-age=60"] * 2)
        for key, expected in zip(keys, cache_controls, strict=True):
            signed = (await node.media.objects.sign(key, ttl_s=30)).url.partition("/m/")[2]
            for path, method in ((key, "GET"), (key, "GET"), (key, "GET"), (key, "HEAD")):
                answer = await client.ask(path, method=method)
                fields = answer.fields
                assert fields["cache-control"] == expected
                is_a = key == "tracks/a1.mp3"
                assert fields.get("content-disposition") == ("attachment" if is_a else None)
                assert fields.get("x-robots-tag") == ("noindex" if is_a else None)
                assert ("link" in fields) == (key == "photos/x.jpg")
                assert fields["content-length"] == "1000"
            same = await client.ask(key, If_None_Match=fields["etag"])
            assert (same.status, same.fields["cache-control"]) == (304, expected)
            assert same.fields.get("x-robots-tag") == ("noindex" if is_a else None)
            # A signed URL ends with its signature, also in caches.
            for _ in range(3):
                private = (await client.ask(signed)).fields["cache-control"]
                assert private.startswith("private, max-age=")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, "prefix"),
        ({"prefix": "../a\n"}, "prefix"),
        ({"prefix": "a/", "cache": "x"}, "cache"),
        ({"prefix": "a/", "cache_control": "no-cache\r\nX: 1"}, "cache_control"),
        ({"prefix": "a/", "cache_control": 5}, "cache_control"),
        ({"prefix": "a/", "fields": {"X-A": "é"}}, "X-A"),
        ({"prefix": "a/", "fields": {"X-A": "a\rb"}}, "X-A"),
        ({"prefix": "a/", "fields": {"X A": "a"}}, "X A"),
        ({"prefix": "a/", "fields": {"X-A\r\nY": "a"}}, "X-A"),
        ({"prefix": "a/", "fields": {"Content-Length": "5"}}, "Content-Length"),
        ({"prefix": "a/", "fields": {"transfer-encoding": "chunked"}}, "transfer-encoding"),
        ({"prefix": "a/", "fields": {"Connection": "close"}}, "Connection"),
        ({"prefix": "a/", "fields": {"Set-Cookie": "a=b"}}, "Set-Cookie"),
        ({"prefix": "a/", "fields": {"Cache-Control": "no-store"}}, "cache_control"),
        ({"prefix": "a/", "fields": {"X-Headrace-Reply": "x"}}, "X-Headrace-Reply"),
        ({"prefix": "a/", "fields": ["X"]}, "fields"),
        ({"prefix": "a/", "fields": {"X-A": "x" * 2000}}, "1024 bytes"),
    ],
)
def test_a_rule_that_would_break_answers_is_refused(rule, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse_header_rules(json.dumps([rule]))


@pytest.mark.parametrize("text", ["{", "5", "9" * 5000, '["a"]', '[{"prefix":"a"},{"prefix":"a"}]'])
def test_what_is_no_list_of_rules_is_refused(text):
    with pytest.raises(ValueError, match="rules") as refused:
        parse_header_rules(text)
    assert "integer string" not in str(refused.value)
