"""Connections on raw sockets: framing in doubt is refused and closed, slow senders are let go."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from headrace.web.model import AddressInUse, AddressRefused
from headrace.web.server import bind, run_api

HOST = b"Host: localhost\r\n"
NEXT = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
DOUBTFUL = {
    "length and chunked": b"POST /v1/things HTTP/1.1\r\n%bContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": b"POST /v1/things HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n"
    b"Content-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /v1/things HTTP/1.1\r\n%bContent-Length: 5\r\n"
    b"Content-Length: 6\r\n\r\nhello",
    "length +5": b"POST /v1/things HTTP/1.1\r\n%bContent-Length: +5\r\n\r\nhello",
    "length 5,5": b"POST /v1/things HTTP/1.1\r\n%bContent-Length: 5,5\r\n\r\nhello",
    "length 0x5": b"POST /v1/things HTTP/1.1\r\n%bContent-Length: 0x5\r\n\r\nhello",
    "unknown coding": b"POST /v1/things HTTP/1.1\r\n%bTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two codings": b"POST /v1/things HTTP/1.1\r\n%bTransfer-Encoding: gzip, chunked\r\n\r\n"
    b"0\r\n\r\n",
    "another version": b"GET /healthz HTTP/2.0\r\n%b\r\n",
    "space before colon": b"GET /healthz HTTP/1.1\r\n%bX-A : b\r\n\r\n",
    "folded line": b"GET /healthz HTTP/1.1\r\n%bX-A: b\r\n c\r\n\r\n",
    "NUL in a field": b"GET /healthz HTTP/1.1\r\n%bX-A: b\x00c\r\n\r\n",
    "bare CR": b"GET /healthz HTTP/1.1\r\n%bX-A: b\rX-B: c\r\n\r\n",
    "huge chunk": b"POST /v1/uploads HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n"
    b"FFFFFFFFFFFFFFFFF\r\n",
    "LF in a chunk extension": b"POST /v1/uploads HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n"
    b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\n%bHost: localhost\r\n\r\n",
    "other absolute host": b"GET http://evil.example/healthz HTTP/1.1\r\n%b\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00 %b\r\n\r\n",
}


@pytest.fixture
async def at(app, serving):
    async with serving(app) as at:
        yield at


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


@pytest.mark.parametrize("request_bytes", DOUBTFUL.values(), ids=DOUBTFUL)
async def test_framing_in_doubt_is_refused_and_nothing_after_it_is_read(at, request_bytes, talk):
    answer = await talk(at, request_bytes.replace(b"%b", HOST) + NEXT)
    assert statuses(answer) == [400], answer
    assert b"application/problem+json" in answer
    assert b"onnection: close" in answer
    assert not answer.endswith(b"(not closed)")


async def test_a_host_is_needed(at, talk):
    assert statuses(await talk(at, b"GET /healthz HTTP/1.1\r\n\r\n")) == [400]


async def test_the_absolute_form_of_our_host_is_served(at, talk):
    request = b"GET http://localhost/healthz HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    assert statuses(await talk(at, request)) == [200]


async def test_heads_are_bounded(at, talk):
    for head, status in (
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X-A: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X-A: a\r\n" * 101 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + (b"X-A: " + b"a" * 8000 + b"\r\n") * 5 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X-A: " + b"a" * 300_000, 431),
    ):
        answer = await talk(at, head)
        assert statuses(answer) == [status], answer[:300]
        assert b"problem+json" in answer


async def test_a_head_in_pieces_is_bounded_as_a_whole_one(at, talk):
    """Also behind another request, where no single read is long."""
    cut = b"GET /healthz HTTP/1.1\r\n" + HOST + b"X-A: " + b"a" * 4500
    for first in (b"", NEXT):
        answer = await talk(at, first + cut, b"a" * 4500 + b"\r\n\r\n")
        assert statuses(answer)[-1] == 431, answer[:300]
    good = b"GET /healthz HTTP/1.1\r\n" + HOST + b"X-A: a"
    answer = await talk(at, NEXT + good, b"b\r\nConnection: close\r\n\r\n")
    assert statuses(answer) == [200, 200]


async def test_pipelined_requests_are_answered_in_order(at, talk):
    last = NEXT.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert statuses(await talk(at, NEXT + NEXT.replace(b"healthz", b"v1/no") + last)) == [
        200,
        404,
        200,
    ]


async def test_a_head_that_never_ends_is_let_go(make_app, serving, talk):
    async with serving(make_app(head_timeout_s=0.2)) as at:
        started_s = time.monotonic()
        for begun in (b"", b"GET / HTTP/1.1\r\nHost: lo"):
            assert statuses(await talk(at, begun)) == [408]
        # also on a connection that was used before
        assert statuses(await talk(at, NEXT + b"GET /heal")) == [200, 408]
        assert time.monotonic() - started_s < 10


async def test_a_body_that_stalls_is_let_go(make_app, token, serving, talk):
    head = b"POST /v1/things HTTP/1.1\r\n" + HOST
    head += b"Authorization: " + token["authorization"].encode() + b"\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    async with serving(make_app(body_stall_s=0.2)) as at:
        assert statuses(await talk(at, head)) == [408]


async def test_a_slow_handler_is_not_the_senders_fault(make_app, serving):
    app = make_app(head_timeout_s=0.1, body_stall_s=0.1)
    async with serving(app) as at:
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(b"GET /v1/slow HTTP/1.1\r\n" + HOST + b"\r\nGET /hea")
        await app.shop.reached.wait()
        assert await reader_is_silent(reader, 0.4)
        app.shop.go_on.set()
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()


async def reader_is_silent(reader, for_s):
    try:
        async with asyncio.timeout(for_s):
            return not await reader.read(1)
    except TimeoutError:
        return True


async def test_a_connection_over_the_limit_gets_a_response(make_app, serving, talk):
    app = make_app(connections_max=2)
    async with serving(app) as at:
        held = [await asyncio.open_connection(at.host, at.port) for _ in range(2)]
        for _, writer in held:
            writer.write(NEXT.replace(b"healthz", b"v1/slow"))
            await app.shop.reached.wait()
            app.shop.reached.clear()
        answer = await talk(at, b"")
        assert statuses(answer) == [503]
        assert b"web.overloaded" in answer
        assert b"retry-after: 1" in answer
        for _, writer in held:
            writer.close()


async def test_a_stop_lets_requests_under_way_end(make_app, serving):
    app = make_app()
    async with serving(app) as at:
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(b"GET /v1/slow HTTP/1.1\r\n" + HOST + b"\r\n")
        await app.shop.reached.wait()
        at.stop.set()
        await wait_refused(at)
        app.shop.go_on.set()
        answer = await reader.read()
        assert statuses(answer) == [200]
        assert b'{"done":true}' in answer
        writer.close()
        await asyncio.wait_for(at.task, 60)


async def test_a_stop_does_not_wait_for_ever(make_app, serving):
    app = make_app(graceful_stop_s=1)
    async with serving(app) as at:
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(b"GET /v1/slow HTTP/1.1\r\n" + HOST + b"\r\n")
        await app.shop.reached.wait()
        at.stop.set()
        await asyncio.wait_for(asyncio.shield(at.task), 60)
        answer = await reader.read()
        assert statuses(answer) == [503]
        assert b"web.stopping" in answer
        writer.close()


async def wait_refused(at):
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection(at.host, at.port)
            except ConnectionError:
                return
            writer.close()
            await asyncio.sleep(0)


async def test_an_address_that_is_taken_is_named(make_app):
    taken = bind(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with pytest.raises(AddressInUse, match=rf"127.0.0.1:{port} is in use by.*web.listen"):
        await run_api(make_app_at(make_app, port), asyncio.Event(), lambda *_: pytest.fail("ready"))
    taken.close()
    with pytest.raises(AddressRefused, match=r"no-such-host\.invalid"):
        bind(("no-such-host.invalid", 80))


def make_app_at(make_app, port):
    app = make_app()
    web = app.config.sections["web"]
    app.config.sections["web"] = type(web)(listen=("127.0.0.1", port))
    return app
