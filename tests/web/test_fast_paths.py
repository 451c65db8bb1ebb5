"""Fast paths and known request heads: the response is the same as on Litestar's path.

`n=%31` and `q=%61` are not plain, so Litestar answers them; a repeated head on a kept connection
takes the shortest path that the server has.
"""

from __future__ import annotations

import asyncio
import gc

import msgspec
import pytest
from small_shop import FAST, LITESTAR
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.kernel import metrics
from headrace.kernel.logs import trace_id
from headrace.web import auth
from headrace.web.guard import SECURITY_HEADERS
from headrace.web.server import describe_api
from headrace.web.tokens import Tokens, make_token

LOOK = "/v1/things/chair/look"
SHELF = "/v1/shelf?q=a,b"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OWN = {"x-request-id", "traceparent", "date", "content-length"}
"""Fields that differ between two equal responses."""


@pytest.mark.parametrize(
    ("path", "more", "way"),
    [
        (LOOK, {}, FAST),
        (f"{LOOK}?n=3", {}, FAST),
        ("/v1/things/ch%61ir/look", {}, LITESTAR),
        ("/v1/things/a%2Fb/look", {}, LITESTAR),
        (f"{LOOK}?n=%33", {}, LITESTAR),
        (LOOK, {"content": b"{}"}, LITESTAR),
        (f"{LOOK}/", {}, LITESTAR),
    ],
)
async def test_plain_requests_take_the_fast_path_and_others_litestars(api, token, path, more, way):
    answer = await api.post(path, headers=token, **more)
    assert (answer.status_code, answer.json()["way"]) == (200, way)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (f"{LOOK}?n=many", 422, "web.invalid_input"),
        (f"{LOOK}?n=-1", 422, "web.invalid_input"),
        (f"{LOOK}?n=1e3", 422, "web.invalid_input"),
        (f"{LOOK}?other=1", 422, "web.invalid_input"),
        (f"{LOOK}?n=1&n=2", 400, "web.parameter_repeated"),
        ("/v1/things//look", 405, "web.method_not_allowed"),
        ("/v1/things/a/b/look", 404, "web.not_found"),
        ("/v1/things/chair", 405, "web.method_not_allowed"),
    ],
)
async def test_requests_without_a_fast_answer_are_refused_by_litestar(
    api, token, path, status, code
):
    answer = await api.post(path, headers=token)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


@pytest.mark.parametrize(
    "case",
    [
        ("limited", "writer", 429),
        ("broken", "writer", 500),
        ("chair", "nobody", 401),
        ("chair", "wrong", 401),
        ("chair", "reader", 403),
        ("chair", "with key", 422),
    ],
)
async def test_errors_are_equal_on_both_paths(api, token, new_token, case, capfd):
    name, kind, status = case
    headers = {
        "writer": token,
        "nobody": {},
        "wrong": {"authorization": "Bearer hrt_x"},
        "reader": {"authorization": f"Bearer {await new_token('jobs:read')}"},
        "with key": {**token, "idempotency-key": "8e03978e"},
    }[kind]
    reported = []
    for query in ("n=1", "n=%31"):
        answer = await api.post(f"/v1/things/{name}/look?{query}", headers=headers)
        assert answer.status_code == status
        problem = answer.json()
        assert problem.pop("request_id") == answer.headers["x-request-id"]
        assert "secret inside" not in answer.text
        reported.append((problem, {k: v for k, v in answer.headers.items() if k not in OWN}))
    assert reported[0] == reported[1]
    capfd.readouterr()


async def test_an_answered_request_is_freed_without_the_collector(api, token):
    """Requests that waited for it held up all others for tens of milliseconds."""
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for path in (LOOK, "/v1/things/ch%61ir/look") * 10:
            assert (await api.post(path, headers=token)).status_code == 200
        cycles = [one for one in gc.get_objects() if type(one).__name__ == "Exchange"]
        assert len(cycles) <= 2, f"{before} objects before"
    finally:
        gc.enable()


async def test_head_trace_headers_and_metrics_are_the_same(api, token, root):
    answer = await api.head("/v1/shelf", headers={**token, "traceparent": TRACE})
    assert (answer.status_code, answer.content) == (200, b"")
    assert trace_id(answer.headers["traceparent"]) == trace_id(TRACE)
    assert len(answer.headers["x-request-id"]) == 36
    for name, value in SECURITY_HEADERS:
        if name != b"cache-control":
            assert answer.headers[name.decode()] == value.decode()
    await api.post(LOOK, headers=token)
    lines = (await api.get("/metrics", headers=root)).text.splitlines()
    counted = [line for line in lines if "web_requests_total{" in line]
    assert any('route="/v1/things/{name}/look"' in line and "2xx" in line for line in counted)
    assert any('route="/v1/shelf"' in line for line in counted)


async def test_a_database_that_is_down_is_reported(make_app, serve):
    down = Postgres("postgresql://127.0.0.1:1/x", PostgresConfig(connect_timeout_s=0.5))
    token = {"authorization": f"Bearer {make_token()}"}
    async with serve(make_app(), postgres=down) as client:
        answer = await client.get(SHELF, headers=token)
    assert (answer.status_code, answer.json()["code"]) == (503, "postgres.unavailable")
    assert answer.headers["retry-after"] == "2"


def test_fast_routes_are_described(shared_app):
    operation = describe_api(shared_app)["paths"]["/v1/things/{name}/look"]["post"]
    assert operation["security"] == [{"bearer": ["jobs:write"]}]
    assert {one["name"] for one in operation["parameters"]} == {"name", "n"}


class Line:
    """One kept connection that sends raw heads and reads whole responses."""

    def __init__(self, reader, writer, token):
        self.reader, self.writer = reader, writer
        self.head = (
            f"Host: localhost\r\nUser-Agent: tests\r\nAuthorization: {token['authorization']}\r\n"
        )

    def send(self, target=SHELF, *, more="", version="1.1"):
        self.writer.write(f"GET {target} HTTP/{version}\r\n{self.head}{more}\r\n".encode())

    async def answer(self):
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            fields = dict(line.split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(fields["content-length"]))
        return int(head[0].split()[1]), fields, msgspec.json.decode(body) if body else None

    async def ask(self, *target, **how):
        self.send(*target, **how)
        return await self.answer()


@pytest.fixture
async def open_line(token):
    """`await open_line(at)`: a connection whose head the server has seen."""
    opened = []

    async def connect(at, header=token):
        line = Line(*await asyncio.open_connection(at.host, at.port), header)
        opened.append(line)
        assert (await line.ask())[0] == 200
        return line

    yield connect
    for line in opened:
        line.writer.close()


async def test_repeated_heads_get_equal_responses_on_every_connection(at, open_line):
    one, other = await open_line(at), await open_line(at)
    answers = [await one.ask(), await one.ask(), await other.ask()]
    answers.append(await one.ask(more='If-None-Match: "2"\r\n'))
    heads = [{k: v for k, v in reported[1].items() if k not in OWN} for reported in answers]
    assert all(head == heads[0] for head in heads)
    assert all(reported[2] == {"q": "a,b", "way": FAST, "agent": "tests"} for reported in answers)
    assert heads[0]["cache-control"] == "private"
    assert {name.decode() for name, _ in SECURITY_HEADERS} <= set(heads[0])
    for name in ("x-request-id", "traceparent"):
        assert len({reported[1][name] for reported in answers}) == len(answers)
    for target, what in (("/v1/shelf", ""), ("/v1/shelf?q=c:1,d_2", "c:1,d_2")):
        assert (await one.ask(target))[2] == {"q": what, "way": FAST, "agent": "tests"}


@pytest.mark.parametrize(
    "case",
    [
        (SHELF, 'If-None-Match: "2"\r\n', 200, FAST),
        (SHELF, f"traceparent: {TRACE}\r\n", 200, FAST),
        (SHELF, "Content-Length: 0\r\n", 200, FAST),
        (SHELF, "Accept: */*\r\nAccept: a/b\r\n", 200, LITESTAR),
        (SHELF, "Origin: https://elsewhere.example\r\n", 200, FAST),
        (SHELF, "Idempotency-Key: 1\r\n", 200, LITESTAR),
        (SHELF, "Host: evil.example\r\n", 400, None),
        (SHELF, "Authorization: Bearer hrt_x\r\n", 400, None),
        ("/v1/shelf?q=%61", "", 200, LITESTAR),
        ("/v1/shelf?q=a&q=b", "", 400, None),
        ("/v1/shelf?q=unknown", "", 200, LITESTAR),
        ("http://localhost/v1/shelf?q=a", "", 200, LITESTAR),
        ("http://evil.example/v1/shelf?q=a", "", 400, None),
        ("/v1/shelf?q=limited", "", 429, None),
        ("/v1/nothing", "", 404, None),
    ],
)
async def test_a_request_that_differs_from_a_known_head_is_read_in_full(at, open_line, case):
    target, more, status, way = case
    line = await open_line(at)
    for _ in range(2):
        reported = await line.ask(target, more=more)
        assert (reported[0], reported[2].get("way")) == (status, way), reported
        if reported[1].get("connection") == "close":
            line = await open_line(at)
    assert (await line.ask())[2]["way"] == FAST


@pytest.mark.parametrize("how", [{"version": "1.0"}, {"more": "Connection: close\r\n"}], ids=str)
async def test_a_connection_that_is_to_be_closed_is_closed(at, open_line, how):
    for _ in range(2):
        line = await open_line(at)
        assert (await line.ask(**how))[0] == 200
        assert await line.reader.read() == b""


async def test_pipelined_and_divided_requests_are_answered_in_order(make_app, serving, open_line):
    app = make_app()
    async with serving(app) as at:
        line = await open_line(at)
        line.send("/v1/shelf?q=slow")
        await app.shop.reached.wait()
        for number in range(3):
            line.send(f"/v1/shelf?q={number}")
        app.shop.go_on.set()
        answers = [await line.answer() for _ in range(4)]
        assert [reported["q"] for _, _, reported in answers] == ["slow", "0", "1", "2"]
        whole = f"GET {SHELF} HTTP/1.1\r\n{line.head}\r\n".encode()
        line.writer.write(whole[:40])
        await line.writer.drain()
        await open_line(at)
        line.writer.write(whole[40:])
        assert (await line.answer())[0] == 200


async def test_a_revoked_token_is_refused_on_a_known_head(at, open_line, shared_postgres):
    tokens = Tokens(shared_postgres)
    made = await tokens.create("known", ("jobs:read",))
    line = await open_line(at, {"authorization": f"Bearer {made.text}"})
    await tokens.revoke("known")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "CACHED_S", 0.0)
        status, fields, problem = await line.ask()
    assert (status, problem["code"]) == (401, "web.unauthenticated")
    assert "www-authenticate" in fields


async def test_repeated_heads_are_counted_alike(at, open_line):
    line = await open_line(at)
    before = _counted()
    for _ in range(3):
        await line.ask()
    assert [now - then for now, then in zip(_counted(), before, strict=True)] == [3, 3]


def _counted():
    """Requests, and requests whose time was measured."""
    lines = metrics.own_metrics().decode().splitlines()
    return [
        sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith(name) and "/v1/shelf" in line
        )
        for name in ("web_requests_total{", "web_request_seconds_count{")
    ]


async def test_a_client_that_disconnects_early_does_not_affect_others(make_app, serving, open_line):
    app = make_app()
    async with serving(app) as at:
        line = await open_line(at)
        line.send("/v1/shelf?q=slow")
        await app.shop.reached.wait()
        line.writer.close()
        app.shop.go_on.set()
        assert (await (await open_line(at)).ask())[0] == 200


async def test_a_stop_sends_the_last_response_and_closes(make_app, serving, open_line):
    app = make_app()
    async with serving(app) as at:
        line = await open_line(at)
        line.send("/v1/shelf?q=slow")
        await app.shop.reached.wait()
        at.stop.set()
        await wait_true(lambda: _refuses(at), what="no new connection is accepted")
        app.shop.go_on.set()
        status, fields, reported = await line.answer()
        assert (status, fields["connection"], reported["q"]) == (200, "close", "slow")
        assert await line.reader.read() == b""


async def _refuses(at):
    try:
        _, writer = await asyncio.open_connection(at.host, at.port)
    except ConnectionError:
        return True
    writer.close()
    return False


async def test_an_idle_connection_is_closed_after_its_time(make_app, serving, open_line):
    async with serving(make_app(keep_alive_s=1)) as at:
        line = await open_line(at)
        began_s = asyncio.get_running_loop().time()
        await line.ask()
        assert await line.reader.read() == b""
        assert asyncio.get_running_loop().time() - began_s >= 0.99, "from the last response on"
