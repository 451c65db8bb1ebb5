"""The answers of a media node: the same table for each kind of node, over raw connections."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time

import pytest
from conformance_cases import (
    ALTERATIONS,
    FORMER,
    LOCAL,
    NO_KEYS,
    OBJECTS,
    SHOP,
    SIZE_BYTES,
    SPELLINGS,
    TOPICS,
)
from id3_tracks import JPEG, own_tag
from node_kinds import BYPASS, FILES, PEER
from raw_clients import SECRET, SMALL_BYTES, Client, head_of, pattern
from tests.kit.waiting import wait_true

from headrace.media.id3 import Tags, tag_bytes, tag_key
from headrace.media.ranges import format_http_date
from headrace.media.signing import Keys, sign

KEY, DATA, _ = OBJECTS["track"]
SEEN = 4
"""Repetitions: the first parses the head, the second caches it, later ones use it."""
KEYS = Keys.derive(SECRET)
TAGS = {"title": "Ein Lied", "artist": "Wer sonst", "buyer": "user:42"}


async def facts_of(node, of: str) -> dict[str, str]:
    """The texts that a row may name."""
    info = await node.blobs.info(OBJECTS[of][0])
    sha256 = hashlib.sha256(OBJECTS[of][1]).hexdigest()
    moment_s = int(info.modified_at.timestamp())
    dates = {"date": 0, "earlier": -1, "later": 1}
    return {
        "{etag}": f'"{sha256 if of == "photo" else info.etag}"',
        **{f"{{{name}}}": format_http_date(moment_s + s) for name, s in dates.items()},
    }


def filled(text: str, facts: dict[str, str]) -> str:
    for name, value in facts.items():
        text = text.replace(name, value)
    return text


def fields_of(row, kind, facts) -> dict[str, str]:
    """All fields of an answer with an object except its date."""
    freshness = "31536000, immutable" if row.of == "photo" else "60"
    found = {
        "etag": facts["{etag}"],
        "last-modified": facts["{date}"],
        "accept-ranges": "bytes",
        "cache-control": f"public, max-age={freshness}",
        "cache-status": kind.cache_status,
        **row.more,
    }
    if row.status == 304:
        return found
    start, end = row.span
    found |= {"content-type": OBJECTS[row.of][2], "x-content-type-options": "nosniff"}
    found["content-length"] = str(end - start)
    if row.status == 206:
        found["content-range"] = f"bytes {start}-{end - 1}/{len(OBJECTS[row.of][1])}"
    return found


def faults_of(row, answer, kind, facts) -> list[str]:
    """What is wrong with an answer."""
    assert answer.fields.pop("date").endswith(" GMT")
    if answer.status != row.status:
        return [f"status {answer.status}, not {row.status}"]
    if row.code:
        more = {name: answer.fields.get(name) for name in row.more}
        return [] if (answer.code, more) == (row.code, row.more) else [f"{answer}"]
    expected = fields_of(row, kind, facts)
    start, end = row.span if row.span and row.method == "GET" else (0, 0)
    found = [] if answer.body == OBJECTS[row.of][1][start:end] else ["wrong bytes"]
    return found if answer.fields == expected else [*found, f"{answer.fields}, not {expected}"]


@pytest.mark.parametrize("topic", TOPICS)
async def test_each_request_has_its_answer_however_often_it_is_repeated(plain, kind, topic):
    faults, client = [], await plain.connect()
    for row in TOPICS[topic]:
        facts = await facts_of(plain, row.of)
        fields = {name: filled(text, facts) for name, text in row.fields.items()}
        for number in range(SEEN):
            answer = await client.ask(
                OBJECTS[row.of][0], method=row.method, X_Case=row.name, **fields
            )
            faults += [f"{row.name} #{number}: {f}" for f in faults_of(row, answer, kind, facts)]
            if answer.fields.get("connection") == "close":
                assert await client.wait_closed() == b""
                client = await plain.connect()
    assert faults == []


async def test_a_target_that_names_no_object_is_not_found(plain):
    client, faults = await plain.connect(), []
    for target in NO_KEYS:
        client.send(f"GET {target} HTTP/1.1\r\nHost: media.test\r\n\r\n".encode())
        answer = await client.answer()
        if (answer.status, answer.code) != (404, "media.object_unknown"):
            faults.append((target, answer))
    assert faults == []
    assert (await client.ask("photos/none.jpg", method="HEAD")).status == 404
    for target in SPELLINGS:
        client.send(f"GET {target} HTTP/1.1\r\nHost: Media.test\r\n\r\n".encode())
        assert (await client.answer()).body == b"odd"


async def test_a_health_check_is_answered(plain):
    client = await plain.connect()
    for method in ("GET", "HEAD"):
        client.send(f"{method} /healthz HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        answer = await client.answer(method=method)
        assert (answer.status, answer.fields["cache-control"]) == (200, "no-store")


async def test_http_1_0_closes_unless_it_may_stay(plain):
    client = await plain.connect()
    client.send(f"GET /m/{KEY} HTTP/1.0\r\nConnection: keep-alive\r\n\r\n".encode())
    assert (await client.answer()).fields["connection"] == "keep-alive"
    client.send(f"GET /m/{KEY} HTTP/1.0\r\n\r\n".encode())
    answer = await client.answer()
    assert ((answer.body == DATA), answer.fields["connection"]) == (True, "close")
    assert await client.wait_closed() == b""


def span_of(chance: random.Random, longest: int = 300_000) -> tuple[int, int]:
    first = chance.randrange(SIZE_BYTES)
    return first, min(SIZE_BYTES - 1, first + chance.randrange(longest))


async def read_part(client: Client, span: tuple[int, int]) -> None:
    answer = await client.answer()
    assert answer.status == 206
    assert (answer.body == DATA[span[0] : span[1] + 1]) is True


def ranged(span: tuple[int, int]) -> bytes:
    return head_of(KEY, fields={"Range": f"bytes={span[0]}-{span[1]}"})


@pytest.mark.parametrize("seed", [1, 2])
async def test_pipelined_heads_keep_their_order_however_they_are_cut(plain, seed):
    chance = random.Random(seed)
    client = await plain.connect()
    spans = [span_of(chance) for _ in range(40)]
    data = b"".join(map(ranged, spans))
    sending = asyncio.create_task(send_cut(client, data, chance))
    for span in spans:
        await read_part(client, span)
    await sending


async def send_cut(client: Client, data: bytes, chance: random.Random) -> None:
    """Send `data` in random pieces, from parts of a head to several heads."""
    while data:
        count = chance.choice([1, 7, 30, 90, 200, 700])
        client.send(data[:count])
        data = data[count:]
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)


async def test_many_clients_get_their_own_bytes_while_others_leave(plain):
    async def listen(seed: int) -> None:
        chance, client = random.Random(seed), await plain.connect()
        for _ in range(12):
            span = span_of(chance)
            client.send(ranged(span))
            if chance.random() < 0.2:
                client.drop()
                client = await plain.connect()
            else:
                await read_part(client, span)
        client.drop()

    await asyncio.gather(*(listen(seed) for seed in range(12)))


async def test_a_socket_that_is_full_gets_the_rest_later(plain):
    """Whole objects, and many small answers that are not read until all were requested."""
    client = await plain.connect(buffer_bytes=SMALL_BYTES)
    for _ in range(SEEN):
        assert ((await client.ask(KEY, Range="bytes=5-")).body == DATA[5:]) is True
    spans = [(n * 10_007, n * 10_007 + 30_000) for n in range(30)]
    for span in spans:
        client.send(ranged(span))
        await asyncio.sleep(0)
    for span in spans:
        await read_part(client, span)


async def test_answers_and_bytes_are_counted(plain, kind):
    def counts() -> list[float]:
        sent = sum(plain.series("media_bytes_total", source=source) for source in kind.sources)
        parts = plain.series("media_requests_total", status="206")
        firsts = plain.series("media_ttfb_seconds_count")
        return [sent, parts, firsts - plain.series("media_requests_total")]

    client, before = await plain.connect(), await settled(counts)
    for n in range(20):
        await read_part_of(client, n, n + 999)
    by_peer = 2 if kind is PEER else 1
    expected = [before[0] + 20_000, before[1] + 20 * by_peer, before[2]]
    await wait_true(lambda: counts() == expected, what=f"{expected} counted")


async def settled(counts) -> list[float]:
    """The counts once those of earlier requests were added, four times a second."""
    seen: list[list[float]] = []

    def is_still() -> bool:
        seen.append(counts())
        return len(seen) > 30 and seen[-30:] == [seen[-1]] * 30

    await wait_true(is_still, what="counts of earlier requests")
    return seen[-1]


async def read_part_of(client: Client, first: int, last: int) -> None:
    client.send(ranged((first, last)))
    await read_part(client, (first, last))


async def test_a_watch_traces_heads_that_were_seen_before(plain):
    client = await plain.connect()
    for _ in range(SEEN):
        await read_part_of(client, 0, 9)
    traced = plain.series("media_trace_lines_total", outcome="written")
    await plain.media.traces.start(f"object={KEY}", for_s=60)

    async def is_logged() -> bool:
        await read_part_of(client, 0, 9)
        return plain.series("media_trace_lines_total", outcome="written") > traced

    await wait_true(is_logged, what="a line of the request")
    await plain.media.traces.stop()


async def test_after_a_purge_no_answer_is_of_the_former_object(plain, kind):
    key, old, new = "tracks/changing.mp3", pattern(5000, 1), pattern(6000, 2)
    await plain.blobs.put(key, old)
    client = await plain.connect()
    for _ in range(SEEN):
        assert (await client.ask(key, Range="bytes=7-")).body == old[7:]
    await plain.blobs.put(key, new)
    await plain.media.purges.purge([key])

    async def is_new() -> bool:
        found = (await client.ask(key, Range="bytes=7-")).body
        assert found in (old[7:], new[7:])
        return found == new[7:]

    assert kind not in (FILES, BYPASS) or await is_new()
    await wait_true(is_new, what="the purge is known")
    for _ in range(SEEN):
        assert await is_new()


# Signed URLs


def signed(**options) -> str:
    """The target of the track behind `/m/`."""
    return f"{KEY}?{sign(KEYS, f'/m/{KEY}', **{'expires_at': int(time.time()) + 60, **options})}"


FULL = {"address": "127.0.0.0/8", "rate": 65_536, "trace": "user=42,request=r7"}


async def test_only_what_was_signed_is_served_until_it_expires(shut):
    client = await shut.connect()
    good = signed()
    for _ in range(SEEN):
        answer = await client.ask(good, Range="bytes=5-9")
        assert (answer.status, answer.body) == (206, DATA[5:10])
        assert answer.fields["cache-control"] in ("private, max-age=60", "private, max-age=59")
    for target, status in (
        (signed(**{**FULL, "rate": None}), 200),
        (f"{KEY}?{sign(Keys.derive(FORMER), f'/m/{KEY}', expires_at=int(time.time()) + 9)}", 200),
        (f"none.mp3?{sign(KEYS, '/m/none.mp3', expires_at=int(time.time()) + 9)}", 404),
    ):
        assert (await client.ask(target)).status == status
    ends_s = int(time.time()) + 2
    ending, began_s = signed(expires_at=ends_s), time.time()
    while (answer := await client.ask(ending, Range="bytes=0-9")).status == 206:
        assert began_s < ends_s
        began_s = time.time()
    assert answer.status == 403
    assert time.time() >= ends_s


async def test_every_refusal_of_a_signature_is_the_same(shut):
    """It shows neither the wrong part nor whether the object exists; the connection stays."""
    client, full = await shut.connect(), signed(**FULL)
    altered = [f"/m/{full}".replace(old, new)[3:] for old, new in ALTERATIONS]
    assert full not in altered
    foreign = sign(Keys.derive("x" * 32), f"/m/{KEY}", expires_at=int(time.time()) + 60)
    refused = [
        *altered, KEY, f"{KEY}?v=1", "none.mp3", "../x", "_headrace/x", f"{KEY}?{foreign}",
        signed(expires_at=int(time.time()) - 1), signed(address="203.0.113.7"), full[:-1],
        *(f"{full}{tail}" for tail in ("=", "&", "&x=1", "A")),
        *(full[:at] + ("0" if full[at] != "0" else "1") + full[at + 1 :]
          for at in range(len(KEY) + 1, len(full), 9)),
    ]  # fmt: skip
    answers = [await client.ask(target, X_Forwarded_For="203.0.113.7") for target in refused]
    wrong = [t for t, a in zip(refused, answers, strict=True) if a.status != 403]
    assert wrong == []
    assert {(one.code, one.body) for one in answers} == {
        ("media.signature_invalid", answers[0].body)
    }
    assert (await client.ask(signed())).status == 200


async def test_a_rate_is_kept_and_delays_no_other_client(shut):
    """Its burst is at most a second's bytes, and it is paced at the rate behind that."""
    paced, other = await shut.connect(), await shut.connect()
    paced.send(head_of(signed(rate=600_000)))
    coming = asyncio.create_task(paced.answer())
    began_s = time.monotonic()
    assert ((await other.ask(signed())).body == DATA) is True
    assert not coming.done()
    assert ((await coming).body == DATA) is True
    assert time.monotonic() - began_s >= 0.2
    paced.send(head_of(signed(rate=600_000), fields={"Range": "bytes=0-9"}))
    assert (await paced.answer()).body == DATA[:10]


async def test_where_no_signature_is_required_one_is_still_checked(plain):
    client = await plain.connect()
    assert ((await client.ask(signed())).body == DATA) is True
    assert (await client.ask(signed()[:-1])).status == 403


# Bought tracks


def key_of_track(track: bytes) -> str:
    return f"tracks/{hashlib.sha256(track).hexdigest()[:12]}.mp3"


async def bought(node, track: bytes = DATA, **tags: str) -> tuple[str, bytes]:
    """A buyer's URL of the track, and the tag that it begins with."""
    key = key_of_track(track)
    await node.blobs.put(key, track)
    stored = await node.media.tags.put(**{**TAGS, **tags}, cover=JPEG)
    found = await node.media.objects.sign(key, tag=stored.id, ttl_s=60)
    tag = tag_bytes(Tags(**{**TAGS, **tags}, cover=JPEG))
    assert stored.size_bytes == len(tag)
    return found.url.partition("/m/")[2], tag


async def test_every_range_of_a_bought_track_is_right(shut):
    target, tag = await bought(shut, own_tag(4096) + DATA)
    expected, seam = tag + DATA, len(tag)
    size, chance, client = len(expected), random.Random(7), await shut.connect()
    whole = await client.ask(target)
    assert ((whole.body == expected), whole.fields["content-type"]) == (True, "audio/mpeg")
    assert whole.fields["cache-control"].startswith("private, max-age=")
    etag = whole.fields["etag"]
    assert (await client.ask(target, If_None_Match=etag)).status == 304
    head = await client.ask(target, method="HEAD")
    assert head.fields["content-length"] == str(size)
    beyond = await client.ask(target, Range=f"bytes={size}-")
    assert beyond.fields["content-range"] == f"bytes */{size}"
    starts = [0, 1, seam - 1, seam, seam + 1, 262_143, 262_144, seam + 262_144, size - 1]
    spans = [(start, min(size - 1, start + chance.choice([0, 1, 5000]))) for start in starts]
    spans += [tuple(sorted(chance.choices(range(size), k=2))) for _ in range(30)]
    for first, last in spans:
        answer = await client.ask(target, Range=f"bytes={first}-{last}", If_Range=etag)
        assert answer.fields["content-range"] == f"bytes {first}-{last}/{size}"
        assert ((answer.body == expected[first : last + 1]), first, last) == (True, first, last)


async def test_buyers_share_a_track_and_nothing_else(shut, kind):
    first, tag = await bought(shut)
    second, other = await bought(shut, buyer="user:43")
    client = await shut.connect()
    answers = [await client.ask(one) for one in (first, second)]
    assert [one.body == t + DATA for one, t in zip(answers, (tag, other), strict=True)] == [
        True
    ] * 2
    assert answers[0].fields["etag"] != answers[1].fields["etag"]
    identifier = second.partition("&t=")[2][:64]
    assert (await client.ask(tag_key(identifier))).status == 403
    if kind is FILES:
        await shut.blobs.put(key_of_track(DATA), own_tag(50) + DATA[::-1])
        new = await client.ask(first, If_None_Match=answers[0].fields["etag"])
        assert ((new.body == tag + DATA[::-1]), new.status) == (True, 200)
        await shut.media.tags.rm(identifier)
        assert (await client.ask(second)).code == "media.object_unknown"


@pytest.mark.parametrize("own_bytes", [300_000, 500, 0])
async def test_a_track_s_own_tag_is_left_out_unless_it_is_cut(shut, own_bytes):
    tracks = {300_000: own_tag(300_000) + DATA[:999], 500: own_tag(500)[:100], 0: b""}
    target, tag = await bought(shut, tracks[own_bytes])
    music = DATA[:999] if own_bytes == 300_000 else tracks[own_bytes]
    client = await shut.connect()
    for _ in range(2):
        assert ((await client.ask(target)).body == tag + music) is True


# Other origins

PREFLIGHT = {"Access_Control_Request_Method": "GET", "Access_Control_Request_Headers": "range"}
ALLOW = "access-control-allow-origin"


async def test_without_a_setting_no_origin_may_read(plain):
    client = await plain.connect()
    for _ in range(SEEN):
        answer = await client.ask(KEY, Origin=SHOP, Range="bytes=0-9")
        preflight = await client.ask(KEY, method="OPTIONS", Origin=SHOP, **PREFLIGHT)
        for fields in (answer.fields, preflight.fields):
            assert not [name for name in fields if "access-control" in name or name == "vary"]
        assert (preflight.status, preflight.fields["allow"]) == (204, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [(SHOP, SHOP), (LOCAL, LOCAL), ("https://shop.example.evil", None), ("null", None),
     ("http://shop.example", None), ("https://SHOP.example/", None), ("", None)],
)  # fmt: skip
async def test_listed_origins_may_read_and_no_other(shut, origin, allowed):
    client, fields = await shut.connect(), {"Origin": origin} if origin else {}
    good = signed()
    for _ in range(SEEN):
        for target in (good, KEY):
            answer = await client.ask(target, Range="bytes=0-9", **fields)
            assert (answer.fields.get(ALLOW), answer.fields["vary"]) == (allowed, "Origin")
    preflight = await client.ask("not/there.mp3", method="OPTIONS", **fields, **PREFLIGHT)
    assert (preflight.status, preflight.body, preflight.fields.get(ALLOW)) == (204, b"", allowed)
    assert "content-length" not in preflight.fields
    if allowed:
        assert "Range" in preflight.fields["access-control-allow-headers"].split(", ")
        assert preflight.fields["access-control-allow-methods"] == "GET, HEAD, OPTIONS"


async def test_any_origin_may_read_and_sees_the_fields_of_ranges(strict):
    client = await strict.connect()
    for fields in ({}, {"Range": "bytes=1-9"}, {"If_None_Match": "*"}, {"Range": "bytes=9999999-"}):
        for _ in range(SEEN):
            answer = await client.ask(KEY, Origin=SHOP, **fields)
            assert answer.fields[ALLOW] == "*"
            exposed = answer.fields["access-control-expose-headers"].split(", ")
            assert {"Content-Range", "Accept-Ranges", "Content-Length", "ETag"} <= set(exposed)
            assert "access-control-allow-credentials" not in answer.fields
            assert "vary" not in answer.fields
    assert (await client.ask("none", Origin=SHOP)).fields[ALLOW] == "*"
    client.drop()
