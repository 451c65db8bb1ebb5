"""Raw sockets: doubtful framing is refused and closed, heads and waits are bounded, stops end."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time

import pytest

from headrace.web.model import AddressInUse, AddressRefused
from headrace.web.serving import bind, run_api

HOST = b"Host: localhost\r\n"
NEXT = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = NEXT.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
SLOW = NEXT.replace(b"healthz", b"v1/slow")
POST = b"POST /v1/things HTTP/1.1\r\n" + HOST
UPLOAD = b"POST /v1/uploads HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
PING = b"GET /healthz HTTP/1.1\r\n" + HOST
HELLO = b"\r\n\r\nhello"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
NO_CHUNKS = b"\r\n0\r\n\r\n"
DOUBTFUL = {
    "length and chunked": POST + b"Content-Length: 5\r\n" + CHUNKED + NO_CHUNKS,
    "chunked and length": POST + CHUNKED + b"Content-Length: 5\r\n" + NO_CHUNKS,
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6" + HELLO,
    "length +5": POST + b"Content-Length: +5" + HELLO,
    "length 5,5": POST + b"Content-Length: 5,5" + HELLO,
    "length 0x5": POST + b"Content-Length: 0x5" + HELLO,
    "unknown coding": POST + b"Transfer-Encoding: xchunked\r\n" + NO_CHUNKS,
    "two codings": POST + b"Transfer-Encoding: gzip, chunked\r\n" + NO_CHUNKS,
    "another version": b"GET /healthz HTTP/2.0\r\n" + HOST + b"\r\n",
    "space before colon": PING + b"X-A : b\r\n\r\n",
    "folded line": PING + b"X-A: b\r\n c\r\n\r\n",
    "NUL in a field": PING + b"X-A: b\x00c\r\n\r\n",
    "bare CR": PING + b"X-A: b\rX-B: c\r\n\r\n",
    "huge chunk": UPLOAD + b"FFFFFFFFFFFFFFFFF\r\n",
    "LF in a chunk extension": UPLOAD + b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "two hosts": PING + b"Host: localhost\r\n\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "other absolute host": b"GET http://evil.example/healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00 " + HOST + b"\r\n\r\n",
}
LONG = {
    "target": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
    "field": (PING + b"X-A: " + b"a" * 9000 + b"\r\n\r\n", 431),
    "many fields": (PING + b"X-A: a\r\n" * 101 + b"\r\n", 431),
    "all fields": (PING + (b"X-A: " + b"a" * 8000 + b"\r\n") * 5 + b"\r\n", 431),
    "without end": (PING + b"X-A: " + b"a" * 300_000, 431),
}


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


@pytest.mark.parametrize("request_bytes", DOUBTFUL.values(), ids=DOUBTFUL)
async def test_doubtful_framing_is_refused_and_nothing_after_it_is_read(at, request_bytes, talk):
    answer = await talk(at, request_bytes + NEXT)
    assert statuses(answer) == [400], answer
    assert b"application/problem+json" in answer
    assert b"onnection: close" in answer
    assert not answer.endswith(b"(not closed)")


@pytest.mark.parametrize(("head", "status"), LONG.values(), ids=LONG)
async def test_heads_are_bounded(at, talk, head, status):
    answer = await talk(at, head)
    assert statuses(answer) == [status], answer[:300]
    assert b"problem+json" in answer


@pytest.mark.parametrize("first", [b"", NEXT], ids=["first", "second"])
async def test_a_head_in_pieces_is_bounded_as_a_whole_one(at, talk, first):
    cut = PING + b"X-A: " + b"a" * 4500
    answer = await talk(at, first + cut, b"a" * 4500 + b"\r\n\r\n")
    assert statuses(answer)[-1] == 431, answer[:300]


ACCEPTED = {
    "absolute form": (
        (b"GET http://localhost/healthz HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n",),
        [200],
    ),
    "pipelined": ((NEXT + NEXT.replace(b"healthz", b"v1/no") + LAST,), [200, 404, 200]),
    "in pieces": ((NEXT + PING + b"X-A: a", b"b\r\nConnection: close\r\n\r\n"), [200, 200]),
    "unauthenticated": ((SLOW.replace(b"slow", b"shelf") + LAST,), [401, 200]),
    "before a bad one": ((NEXT + NEXT.replace(b"healthz", b"v1/no") + b"G\0",), [200, 404, 400]),
    "an upgrade is ignored": (
        (PING + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n" + LAST,),
        [200, 200],
    ),
    "answered before the body": (
        (POST + b"Content-Length: 9000\r\n\r\n", b"a" * 9000 + LAST),
        [401, 200],
    ),
    "nothing after the last": ((LAST + NEXT + b"G\0",), [200]),
    "version 1.0": ((b"GET /healthz HTTP/1.0\r\n" + HOST + b"\r\n" + NEXT,), [200]),
    "a balancer's check": ((b"GET /healthz HTTP/1.0\r\n\r\n",), [200]),
    "no host elsewhere": ((b"GET /v1/queues HTTP/1.0\r\n\r\n",), [400]),
}


@pytest.mark.parametrize(("pieces", "expected"), ACCEPTED.values(), ids=ACCEPTED)
async def test_good_requests_are_answered_in_order(at, talk, pieces, expected):
    assert statuses(await talk(at, *pieces)) == expected


async def test_a_body_is_requested_and_trailers_are_bounded(at, talk, token):
    head = UPLOAD[:-2] + b"Authorization: " + token["authorization"].encode() + b"\r\n"
    head += b"Expect: 100-continue\r\n\r\n"
    answer = await talk(at, head, b"5\r\nhello\r\n0\r\nX-A: b\r\n\r\n" + LAST)
    assert statuses(answer) == [100, 201, 200], answer
    assert b'{"bytes":5}' in answer
    endless = [head, b"5\r\nhello\r\n0\r\nX-A: ", *[b"a" * 9000] * 80]
    answer = await talk(at, *endless)
    assert statuses(answer)[-1] == 431, answer


async def test_slow_heads_and_bodies_are_closed(make_app, serving, talk, token):
    body = POST + b"Authorization: " + token["authorization"].encode()
    body += b"\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    async with serving(make_app(head_timeout_s=0.2, body_stall_s=0.2)) as at:
        began_s = time.monotonic()
        answers = await asyncio.gather(
            *(
                talk(at, begun, wait_s=60)
                for begun in (b"", b"GET / HTTP/1.1\r\nHost: lo", NEXT + b"GET /heal", body)
            )
        )
        assert [statuses(answer) for answer in answers] == [[408], [408], [200, 408], [408]]
        assert time.monotonic() - began_s < 10


async def test_a_head_behind_a_slow_request_has_its_time_from_its_turn_on(make_app, serving):
    app = make_app(head_timeout_s=0.2, body_stall_s=0.2)
    async with serving(app) as at:
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(SLOW + b"GET /hea")
        await app.shop.reached.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.4)
        app.shop.go_on.set()
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()


@pytest.mark.parametrize(("graceful_stop_s", "status"), [(60, 200), (0.2, 503)])
async def test_a_stop_waits_for_open_requests_up_to_its_limit(
    make_app, serving, graceful_stop_s, status
):
    app = make_app(graceful_stop_s=graceful_stop_s)
    async with serving(app) as at:
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(SLOW)
        await app.shop.reached.wait()
        at.stop.set()
        await wait_refused(at)
        if status == 200:
            app.shop.go_on.set()
        answer = await reader.read()
        assert statuses(answer) == [status]
        assert (b'{"done":true}' if status == 200 else b"web.stopping") in answer
        writer.close()
        await asyncio.wait_for(asyncio.shield(at.task), 60)


async def wait_refused(at):
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection(at.host, at.port)
            except ConnectionError:
                return
            writer.close()
            await asyncio.sleep(0)


async def test_an_address_in_use_or_unknown_is_named(make_app):
    [taken] = bind(("127.0.0.1", 0))
    app, port = make_app(), taken.getsockname()[1]
    web = app.config.sections["web"]
    app.config.sections["web"] = dataclasses.replace(web, listen=("127.0.0.1", port))
    with pytest.raises(AddressInUse, match=rf"127.0.0.1:{port} is in use by.*web.listen"):
        await run_api(app, asyncio.Event(), lambda *_: pytest.fail("ready"))
    taken.close()
    with pytest.raises(AddressRefused, match=r"no-such-host\.invalid"):
        bind(("no-such-host.invalid", 80))
