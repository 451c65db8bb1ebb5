"""Reads with a cached head get the same response as on the full path."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from litestar import Request, get
from litestar.di import NamedDependency
from small_shop import Shop
from tests.kit.waiting import wait_true

from headrace.kernel import metrics
from headrace.kernel.errors import LimitExceeded
from headrace.kernel.routes import FAST_PATH, FastResponse
from headrace.web import auth
from headrace.web.guard import SECURITY_HEADERS
from headrace.web.tokens import Tokens

SHORT, LONG, LITESTAR = "short", "long", "litestar"
TARGET = "/v1/shelf?q=a,b"


async def shelf_fast(shop, asked):
    """Reports the path by the task that it runs in."""
    what = asked.query.get("q", "")
    if what == "unknown":
        return None
    if what == "limited" and _way() == SHORT:
        raise LimitExceeded("seen on the fast path", retry_after_s=2)
    if what == "limited":
        raise LimitExceeded("too many calls: wait", retry_after_s=2.4)
    if what == "slow":
        shop.reached.set()
        await shop.go_on.wait()
    body = msgspec.json.encode({"q": what, "way": _way(), "agent": asked.user_agent})
    return FastResponse(body, 200, ((b"cache-control", b"private"), (b"etag", b'"1"')))


def _way():
    name = asyncio.current_task().get_coro().__qualname__
    return SHORT if name == "Connection._answer_fast" else LONG


@get("/v1/shelf", operation_id="shelf", opt={"scope": "jobs:read", FAST_PATH: shelf_fast})
async def show_shelf(request: Request, shop: NamedDependency[Shop]) -> dict[str, str]:
    """Return the request."""
    return {"way": LITESTAR}


@pytest.fixture
def app(make_app):
    """The application with a fast read."""
    return make_app(routes=[show_shelf])


class Line:
    """One kept connection that sends raw heads and reads whole answers."""

    def __init__(self, reader, writer, token):
        self.reader, self.writer = reader, writer
        self.head = (
            f"Host: localhost\r\nUser-Agent: tests\r\nAuthorization: {token['authorization']}\r\n"
        )

    def send(self, target=TARGET, *, more="", version="1.1"):
        self.writer.write(f"GET {target} HTTP/{version}\r\n{self.head}{more}\r\n".encode())

    async def answer(self):
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        fields = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(fields["content-length"]))
        return int(head[0].split()[1]), fields, msgspec.json.decode(body) if body else None

    async def ask(self, *target, **how):
        self.send(*target, **how)
        return await self.answer()


@pytest.fixture
async def open_line(token):
    """`await open_line(at)`: a connection; all are closed when the test ends."""
    opened = []

    async def connect(at):
        line = Line(*await asyncio.open_connection(at.host, at.port), token)
        opened.append(line)
        return line

    yield connect
    for line in opened:
        line.writer.close()


@pytest.fixture
async def at(app, serving):
    """The address of the application."""
    async with serving(app) as where:
        yield where


async def known(line):
    """A line whose head is known by now."""
    status, _, told = await line.ask()
    assert (status, told["way"]) == (200, LONG)
    return line


async def test_a_cached_head_takes_the_fast_path_and_nothing_else_differs(at, open_line):
    line = await open_line(at)
    first = await line.ask()
    second = await line.ask()
    other = await (await open_line(at)).ask()
    assert [told[2].pop("way") for told in (first, second, other)] == [LONG, SHORT, SHORT]
    own = {"date", "x-request-id", "traceparent", "content-length"}
    heads = [{k: v for k, v in told[1].items() if k not in own} for told in (first, second, other)]
    assert heads[0] == heads[1] == heads[2]
    assert first[2] == second[2] == other[2] == {"q": "a,b", "agent": "tests"}
    assert heads[1]["cache-control"] == "private"
    assert {name.decode() for name, _ in SECURITY_HEADERS} <= set(heads[1])
    assert len({told[1]["x-request-id"] for told in (first, second, other)}) == 3
    assert len({told[1]["traceparent"] for told in (first, second, other)}) == 3


async def test_another_target_needs_no_other_head(at, open_line):
    line = await known(await open_line(at))
    for target, what in (("/v1/shelf", ""), ("/v1/shelf?q=c:1,d_2", "c:1,d_2")):
        assert (await line.ask(target))[2] == {"q": what, "way": SHORT, "agent": "tests"}


@pytest.mark.parametrize(
    ("how", "way"),
    [
        ({"more": 'If-None-Match: "2"\r\n'}, LONG),
        (
            {"more": "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"},
            LONG,
        ),
        ({"more": "Content-Length: 0\r\n"}, LONG),
        ({"more": "Accept: */*\r\nAccept: a/b\r\n"}, LONG),
        ({"more": "Origin: https://elsewhere.example\r\n"}, LONG),
        ({"more": "Idempotency-Key: 1\r\n"}, LITESTAR),
        ({"target": "/v1/shelf?q=%61"}, LITESTAR),
        ({"target": "/v1/shelf?q=a&q=b", "status": 400}, None),
        ({"target": "/v1/shelf?q=unknown"}, LITESTAR),
        ({"target": "http://localhost/v1/shelf?q=a"}, LONG),
        ({"target": "/v1/shelf?q=limited", "status": 429}, None),
        ({"target": "/v1/nothing", "status": 404}, None),
    ],
)
async def test_what_differs_goes_the_long_way_each_time(at, open_line, how, way):
    line = await known(await open_line(at))
    how = dict(how)
    expected = how.pop("status", 200)
    for _ in range(2):
        status, _, told = await line.ask(how.get("target", TARGET), more=how.get("more", ""))
        assert (status, told.get("way")) == (expected, way), told
    assert "seen on the fast path" not in str(told)
    assert (await line.ask())[2]["way"] == SHORT


async def test_an_older_version_is_not_taken_for_the_known_one(at, open_line):
    line = await known(await open_line(at))
    assert (await line.ask(version="1.0"))[2]["way"] == LONG
    assert await line.reader.read() == b""


async def test_a_connection_that_is_to_be_closed_is_closed(at, open_line):
    for _ in range(2):
        line = await open_line(at)
        assert (await line.ask(more="Connection: close\r\n"))[2]["way"] == LONG
        assert await line.reader.read() == b""


async def test_requests_behind_one_another_are_answered_in_order(at, open_line, app):
    line = await known(await open_line(at))
    line.send("/v1/shelf?q=slow")
    await app.shop.reached.wait()
    for number in range(3):
        line.send(f"/v1/shelf?q={number}")
    app.shop.go_on.set()
    answers = [await line.answer() for _ in range(4)]
    assert [told["q"] for _, _, told in answers] == ["slow", "0", "1", "2"]
    assert (await line.ask())[2]["way"] == SHORT


async def test_a_known_head_in_pieces_is_read_as_ever(at, open_line):
    line = await known(await open_line(at))
    whole = f"GET {TARGET} HTTP/1.1\r\n{line.head}\r\n".encode()
    line.writer.write(whole[:40])
    await line.writer.drain()
    assert (await (await open_line(at)).ask())[2]["way"] == SHORT
    line.writer.write(whole[40:])
    assert (await line.answer())[2]["way"] == LONG


async def test_a_revoked_token_is_refused(at, open_line, postgres, monkeypatch):
    line = await known(await open_line(at))
    assert (await line.ask())[2]["way"] == SHORT
    monkeypatch.setattr(auth, "CACHED_S", 0.0)
    await Tokens(postgres).revoke("tester")
    status, fields, problem = await line.ask()
    assert (status, problem["code"], "www-authenticate" in fields) == (
        401,
        "web.unauthenticated",
        True,
    )


async def test_they_are_counted_alike(at, open_line):
    line = await known(await open_line(at))
    before = _counted()
    for _ in range(3):
        assert (await line.ask())[2]["way"] == SHORT
    assert [now - then for now, then in zip(_counted(), before, strict=True)] == [3, 3]


def _counted():
    """Requests, and those whose time was taken."""
    lines = metrics.own_metrics().decode().splitlines()
    return [
        sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith(name) and "/v1/shelf" in line
        )
        for name in ("web_requests_total{", "web_request_seconds_count{")
    ]


async def test_a_client_that_disconnects_early_does_not_affect_others(at, open_line, app):
    line = await known(await open_line(at))
    line.send("/v1/shelf?q=slow")
    await app.shop.reached.wait()
    line.writer.close()
    app.shop.go_on.set()
    other = await open_line(at)
    assert (await other.ask())[2]["way"] == SHORT


async def test_a_stop_lets_the_answer_come_and_says_that_it_is_the_last(app, serving, open_line):
    async with serving(app) as at:
        line = await known(await open_line(at))
        line.send("/v1/shelf?q=slow")
        await app.shop.reached.wait()
        at.stop.set()
        await wait_true(lambda: _refuses(at))
        app.shop.go_on.set()
        status, fields, told = await line.answer()
        assert (status, fields["connection"], told["way"]) == (200, "close", SHORT)
        assert await line.reader.read() == b""


async def _refuses(at):
    try:
        _, writer = await asyncio.open_connection(at.host, at.port)
    except ConnectionError:
        return True
    writer.close()
    return False


@pytest.mark.slow
async def test_a_stop_does_not_wait_for_ever(make_app, serving, open_line):
    app = make_app(routes=[show_shelf], graceful_stop_s=1)
    async with serving(app) as at:
        line = await known(await open_line(at))
        line.send("/v1/shelf?q=slow")
        await app.shop.reached.wait()
        at.stop.set()
        status, _, problem = await line.answer()
        assert (status, problem["code"]) == (503, "web.stopping")


@pytest.mark.slow
async def test_an_idle_connection_is_closed_after_its_time(make_app, serving, open_line):
    app = make_app(routes=[show_shelf], keep_alive_s=1)
    async with serving(app) as at:
        line = await known(await open_line(at))
        began_s = asyncio.get_running_loop().time()
        assert (await line.ask())[2]["way"] == SHORT
        assert await line.reader.read() == b""
        assert asyncio.get_running_loop().time() - began_s >= 0.99, "counted from the last answer"
