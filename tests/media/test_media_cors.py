"""Scripts of other origins can read media only where the settings allow it."""

from __future__ import annotations

import os

import pytest
from raw_clients import pattern, serving

from headrace.media.model import parse_origins

ALLOW = "access-control-allow-origin"
SHOP = "https://shop.example"
PREFLIGHT = {
    "Origin": SHOP,
    "Access_Control_Request_Method": "GET",
    "Access_Control_Request_Headers": "range",
}


async def stored(node) -> str:
    await node.blobs.put("tracks/a.mp3", pattern(1000))
    return "tracks/a.mp3"


async def test_without_a_setting_no_origin_may_read(node):
    key = await stored(node)
    client = await node.connect()
    answer = await client.ask(key, Origin=SHOP)
    assert not [name for name in answer.fields if "access-control" in name or name == "vary"]
    asked = await client.ask(key, method="OPTIONS", **PREFLIGHT)
    assert (asked.status, asked.fields["allow"]) == (204, "GET, HEAD, OPTIONS")
    assert not [name for name in asked.fields if "access-control" in name]
    assert (await client.ask(key)).status == 200


async def test_any_origin_may_read_ranges_and_sees_their_fields(blobs):
    async with serving(blobs, cors_origins=("*",)) as node:
        key = await stored(node)
        client = await node.connect()
        for fields in (
            {},
            {"Range": "bytes=10-19"},
            {"If_None_Match": "*"},
            {"Range": "bytes=1000-"},
        ):
            answer = await client.ask(key, Origin=SHOP, **fields)
            assert answer.fields[ALLOW] == "*"
            exposed = answer.fields["access-control-expose-headers"].split(", ")
            assert {"Content-Range", "Accept-Ranges", "Content-Length", "ETag"} <= set(exposed)
            assert "access-control-allow-credentials" not in answer.fields
            assert "vary" not in answer.fields
        assert (await client.ask("none", Origin=SHOP)).fields[ALLOW] == "*"


async def test_a_preflight_allows_a_range_and_looks_at_nothing(blobs):
    async with serving(blobs, cors_origins=(SHOP,), signed="required") as node:
        client = await node.connect()
        asked = await client.ask("not/there.mp3", method="OPTIONS", **PREFLIGHT)
        assert (asked.status, asked.body, asked.fields[ALLOW]) == (204, b"", SHOP)
        assert "Range" in asked.fields["access-control-allow-headers"].split(", ")
        assert asked.fields["access-control-allow-methods"] == "GET, HEAD, OPTIONS"
        assert asked.fields["vary"] == "Origin"
        assert "content-length" not in asked.fields
        refused = await client.ask("tracks/a.mp3", Origin=SHOP)
        assert (refused.status, refused.fields[ALLOW]) == (403, SHOP)


async def test_an_origin_that_is_not_listed_is_told_nothing(blobs):
    async with serving(blobs, cors_origins=(SHOP, "http://localhost:3000")) as node:
        key = await stored(node)
        client = await node.connect()
        for origin in (
            "https://shop.example.evil",
            "http://shop.example",
            "null",
            "https://SHOP.example/",
        ):
            answer = await client.ask(key, Origin=origin)
            assert ALLOW not in answer.fields
            assert answer.fields["vary"] == "Origin"
        assert (await client.ask(key)).fields["vary"] == "Origin"
        assert (await client.ask(key, Origin="http://localhost:3000")).fields[
            ALLOW
        ] == "http://localhost:3000"


async def test_methods_that_are_not_known_are_told_those_that_are(node):
    answer = await (await node.connect()).ask("x", method="DELETE")
    assert (answer.status, answer.fields["allow"]) == (405, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ()),
        ("*", ("*",)),
        (" https://A.example ,http://[::1]:3000", ("https://a.example", "http://[::1]:3000")),
    ],
)
def test_origins_are_read(text, found):
    assert parse_origins(text) == found


@pytest.mark.parametrize(
    "text",
    ["*, https://a.example", "https://a.example/", "a.example", "null", "https://a.example:0"],
)
def test_what_is_no_origin_is_refused(text):
    with pytest.raises(ValueError, match="origins without a path"):
        parse_origins(text)


async def test_copies_of_a_file_have_one_etag(blobs, tmp_path):
    await blobs.put("a.mp3", pattern(1000))
    path = blobs.folder / "a.mp3"
    before = await blobs.info("a.mp3")
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(path.stat().st_mtime_ns, path.stat().st_mtime_ns))
    async with serving(blobs) as node:
        client = await node.connect()
        first = (await client.ask("a.mp3")).fields["etag"]
        inode = path.stat().st_ino
        copy.replace(path)
        assert path.stat().st_ino != inode
        assert (await client.ask("a.mp3")).fields["etag"] == first == f'"{before.etag}"'
    assert (await blobs.info("a.mp3")).etag == before.etag
    [listed] = [one async for one in blobs.list("")]
    assert listed.etag == before.etag


async def test_versions_put_one_right_after_the_other_differ(blobs):
    seen = set()
    for number in range(200):
        await blobs.put("a.mp3", b"%03d" % number)
        seen.add((await blobs.info("a.mp3")).etag)
    assert len(seen) == 200
