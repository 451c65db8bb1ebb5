"""Signed URLs and tagged tracks over the wire, byte for byte."""

from __future__ import annotations

import json
import random
import time
from urllib.parse import urlsplit

import pytest
from id3_tracks import JPEG, own_tag
from raw_clients import SECRET, Client, pattern, pause, serving, wait_until

from headrace.media.id3 import Tags, tag_bytes, tag_key
from headrace.media.service.objects import TagUnknown
from headrace.media.signing import Keys, UnsignableUrl, sign

KEY = "tracks/a.mp3"
MUSIC = pattern(700_001)
TAGS = {"title": "Ein Lied", "artist": "Wer sonst", "buyer": "user:42"}
KEYS = Keys.derive(SECRET)


@pytest.fixture
async def shut(blobs):
    """A node that serves signed URLs only."""
    async with serving(blobs, signed="required") as served:
        yield served


def target(url: str) -> str:
    """The part of a URL behind `/m/`."""
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}".removeprefix("/m/")


async def code_of(client: Client, asked: str, **fields: str) -> tuple[int, str]:
    answer = await client.ask(asked, **fields)
    return answer.status, json.loads(answer.body)["code"]


async def test_only_what_was_signed_is_served(shut):
    await shut.media.objects.put(KEY, MUSIC)
    good = target(shut.media.objects.url(KEY, ttl_s=60))
    client = await shut.connect()
    answer = await client.ask(good)
    assert (answer.status, answer.body) == (200, MUSIC)
    assert answer.fields["cache-control"] == "private, max-age=60"
    for asked in (KEY, f"{KEY}?v=1", good[:-1], good.replace("a.mp3", "b.mp3"), f"{good}&x=1"):
        assert await code_of(client, asked) == (403, "media.signature_invalid")
    # On the same connection: a refusal does not end it.
    part = await client.ask(good, Range="bytes=5-9")
    assert (part.status, part.body) == (206, MUSIC[5:10])
    head = await client.ask(good, method="HEAD")
    assert head.fields["content-length"] == str(len(MUSIC))


async def test_a_refusal_tells_nothing(shut):
    """It shows neither the wrong part nor whether the object exists, and is never cached."""
    await shut.media.objects.put(KEY, MUSIC)
    client = await shut.connect()
    over = sign(KEYS, f"/m/{KEY}", expires_at=int(time.time()) - 1)
    foreign = sign(Keys.derive("x" * 32), f"/m/{KEY}", expires_at=int(time.time()) + 60)
    elsewhere = target(shut.media.objects.url(KEY, ttl_s=60, address="203.0.113.7"))
    asked = (KEY, "none.mp3", f"{KEY}?{over}", f"{KEY}?{foreign}", elsewhere, "../x", "_headrace/x")
    answers = [await client.ask(one) for one in asked]
    assert {(one.status, one.body) for one in answers} == {(403, answers[0].body)}
    assert {one.fields["cache-control"] for one in answers} == {"no-store"}
    missing = target(shut.media.objects.url("none.mp3"))
    assert (await client.ask(missing)).status == 404


@pytest.mark.slow
async def test_expiry_is_judged_when_a_request_starts(blobs):
    data = pattern(12_000_000)
    async with serving(blobs, signed="required") as node:
        await node.media.objects.put(KEY, data)
        slow, late = await node.connect(limit=1024), await node.connect()
        expires_at = int(time.time()) + 3
        asked = f"{KEY}?{sign(KEYS, f'/m/{KEY}', expires_at=expires_at)}"
        slow.send(f"GET /m/{asked} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        await wait_until(lambda: len(slow.reader._buffer) > 1024)
        await wait_until(lambda: time.time() >= expires_at)
        assert (await late.ask(asked)).status == 403
        assert (await slow.answer()).body == data
        assert (await slow.ask(asked)).status == 403


async def test_the_address_is_that_of_the_connection(shut):
    await shut.media.objects.put(KEY, MUSIC)
    client = await shut.connect()
    for address, status in (("127.0.0.1", 200), ("127.0.0.0/8", 200), ("127.0.0.2", 403)):
        asked = target(shut.media.objects.url(KEY, ttl_s=60, address=address))
        assert (await client.ask(asked, X_Forwarded_For="127.0.0.2")).status == status


async def test_a_former_secret_is_accepted_until_it_is_removed(blobs):
    former = "f" * 32
    asked = f"{KEY}?{sign(Keys.derive(former), f'/m/{KEY}', expires_at=int(time.time()) + 60)}"
    for accepted, status in (((former,), 200), ((), 403)):
        async with serving(blobs, signed="required", accepted_secrets=accepted) as node:
            await node.media.objects.put(KEY, MUSIC)
            assert (await (await node.connect()).ask(asked)).status == status


async def test_where_none_is_required_a_signature_is_checked_all_the_same(node):
    await node.media.objects.put(KEY, MUSIC)
    client = await node.connect()
    assert (await client.ask(KEY)).fields["cache-control"] == "public, max-age=60"
    good = target(node.media.objects.url(KEY, ttl_s=60))
    assert (await client.ask(good)).body == MUSIC
    assert (await client.ask(good[:-1])).status == 403


async def bought(node, track: bytes = MUSIC, **tags: str) -> tuple[str, bytes]:
    """A track and a buyer's URL of it: the target, and the tag it begins with."""
    await node.media.objects.put(KEY, track)
    given = {**TAGS, **tags}
    stored = await node.media.tags.put(**given, cover=JPEG)
    signed = await node.media.objects.sign(KEY, tag=stored.id, ttl_s=60)
    tag = tag_bytes(Tags(**given, cover=JPEG))
    assert stored.size_bytes == len(tag)
    return target(signed.url), tag


async def test_a_bought_track_begins_with_its_tag(shut):
    asked, tag = await bought(shut)
    client = await shut.connect()
    whole = await client.ask(asked)
    assert (whole.status, whole.body) == (200, tag + MUSIC)
    assert whole.fields["content-type"] == "audio/mpeg"
    assert whole.fields["cache-control"].startswith("private, max-age=")
    head = await client.ask(asked, method="HEAD")
    assert head.fields["content-length"] == str(len(tag + MUSIC))
    etag = whole.fields["etag"]
    assert (await client.ask(asked, If_None_Match=etag)).status == 304
    current = await client.ask(asked, Range="bytes=3-", If_Range=etag)
    assert (current.status, current.body) == (206, (tag + MUSIC)[3:])
    beyond = await client.ask(asked, Range=f"bytes={len(tag + MUSIC)}-")
    assert beyond.fields["content-range"] == f"bytes */{len(tag + MUSIC)}"


async def test_every_range_of_a_bought_track_is_right(shut):
    asked, tag = await bought(shut)
    expected = tag + MUSIC
    seam, size = len(tag), len(tag + MUSIC)
    chosen = random.Random(7)
    starts = [0, 1, seam - 1, seam, seam + 1, 262_143, 262_144, seam + 262_144, size - 1]
    ranges = [(start, min(size - 1, start + chosen.choice([0, 1, 5000]))) for start in starts]
    ranges += [tuple(sorted(chosen.choices(range(size), k=2))) for _ in range(30)]
    client = await shut.connect()
    for first, last in ranges:
        answer = await client.ask(asked, Range=f"bytes={first}-{last}")
        assert answer.fields["content-range"] == f"bytes {first}-{last}/{size}"
        assert answer.body == expected[first : last + 1], (first, last)
    assert (await client.ask(asked, Range="bytes=-9")).body == expected[-9:]


@pytest.mark.parametrize("own_bytes", [10, 4096, 300_000])
async def test_the_track_s_own_tag_is_left_out(shut, own_bytes):
    asked, tag = await bought(shut, own_tag(own_bytes) + MUSIC)
    client = await shut.connect()
    for _ in range(2):
        assert (await client.ask(asked)).body == tag + MUSIC
    plain = target(shut.media.objects.url(KEY))
    assert (await client.ask(plain)).body == own_tag(own_bytes) + MUSIC


async def test_buyers_share_the_track_and_nothing_else(shut):
    first, tag = await bought(shut)
    second, other = await bought(shut, buyer="user:43")
    client = await shut.connect()
    answers = [await client.ask(one) for one in (first, second)]
    assert [one.body for one in answers] == [tag + MUSIC, other + MUSIC]
    assert answers[0].fields["etag"] != answers[1].fields["etag"]
    keys = [info.key async for info in shut.blobs.list("")]
    assert len(keys) == 3


async def test_a_replaced_track_has_another_etag_and_the_same_tag(shut):
    asked, tag = await bought(shut)
    client = await shut.connect()
    old = await client.ask(asked)
    await shut.media.objects.put(KEY, own_tag(50) + MUSIC[::-1])
    new = await client.ask(asked, If_None_Match=old.fields["etag"])
    assert (new.status, new.body) == (200, tag + MUSIC[::-1])


async def test_a_removed_tag_ends_its_urls(shut):
    asked, _ = await bought(shut)
    tag = asked.partition("&t=")[2][:64]
    client = await shut.connect()
    assert (await client.ask(asked)).status == 200
    await shut.media.tags.rm(tag)
    assert await code_of(client, asked) == (404, "media.object_unknown")
    for verb in (shut.media.tags.get, shut.media.tags.rm):
        with pytest.raises(TagUnknown):
            await verb(tag)


async def test_tags_themselves_are_not_served(node):
    asked, _ = await bought(node)
    tag = asked.partition("&t=")[2][:64]
    client = await node.connect()
    assert await code_of(client, tag_key(tag)) == (404, "media.object_unknown")
    with pytest.raises(UnsignableUrl):
        node.media.objects.url(tag_key(tag), ttl_s=60)


async def test_the_same_tag_is_stored_once(shut):
    await bought(shut)
    [before] = [info async for info in shut.blobs.list("_headrace")]
    await pause(0.02)
    await bought(shut)
    [after] = [info async for info in shut.blobs.list("_headrace")]
    assert after == before


async def test_a_track_that_is_shorter_than_its_own_tag_says(shut):
    torn = own_tag(500)[:100]
    asked, tag = await bought(shut, torn)
    assert (await (await shut.connect()).ask(asked)).body == tag + torn
    empty, tag = await bought(shut, b"")
    assert (await (await shut.connect()).ask(empty)).body == tag
