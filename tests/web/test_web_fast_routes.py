"""Fast paths give the same responses as Litestar's routes."""

from __future__ import annotations

import gc
from typing import Annotated

import msgspec
import pytest
from litestar import Request, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter
from small_shop import Shop
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.kernel.errors import LimitExceeded
from headrace.kernel.logs import trace_id
from headrace.kernel.routes import FAST_PATH, FastResponse
from headrace.web.guard import SECURITY_HEADERS
from headrace.web.server import describe_api
from headrace.web.tokens import Tokens, make_token

FAST, SLOW = "fast", "litestar"


class Looked(msgspec.Struct):
    """An answer; `way` is for these tests alone."""

    name: str
    n: int
    way: str


def look(name, n, way):
    """What both ways do."""
    if name == "limited":
        raise LimitExceeded("too many calls: wait", retry_after_s=2.4)
    if name == "broken":
        raise RuntimeError("secret inside")
    return Looked(name, n, way)


async def look_fast(_shop, asked):
    n = asked.query.get("n", "1")
    if not asked.query.keys() <= {"n"} or not n.isdecimal():
        return None
    return FastResponse(msgspec.json.encode(look(asked.name, int(n), FAST)))


@post(
    "/v1/things/{name:str}/look",
    operation_id="look",
    status_code=200,
    opt={"scope": "jobs:write", FAST_PATH: look_fast},
)
async def look_at(
    shop: NamedDependency[Shop],
    name: FromPath[str],
    n: Annotated[int, QueryParameter(ge=0)] = 1,
) -> Looked:
    """Look at a thing."""
    return look(name, n, SLOW)


async def all_fast(_shop, asked):
    return FastResponse(b'{"way":"fast"}', 200, ((b"etag", b'"1"'),))


@get("/v1/all", operation_id="all", opt={"scope": "jobs:read", FAST_PATH: all_fast})
async def show_all(request: Request, shop: NamedDependency[Shop]) -> dict[str, str]:
    """Show all things."""
    return {"way": SLOW}


@pytest.fixture
def app(make_app):
    """The application with fast paths."""
    return make_app(routes=[look_at, show_all])


async def test_a_plain_request_takes_the_fast_path(api, token):
    answer = await api.post("/v1/things/chair/look?n=3", headers=token)
    assert (answer.status_code, answer.json()) == (200, {"name": "chair", "n": 3, "way": FAST})
    assert answer.headers["content-type"] == "application/json"
    answer = await api.get("/v1/all", headers=token)
    assert (answer.json(), answer.headers["etag"]) == ({"way": FAST}, '"1"')


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/things/ch%61ir/look", {}),
        ("/v1/things/a%2Fb/look", {}),
        ("/v1/things/chair/look?n=%33", {}),
        ("/v1/things/chair/look?other=1", {}),
        ("/v1/things/chair/look", {"content": b"{}"}),
    ],
)
async def test_what_is_not_plain_is_litestars(api, token, path, more):
    answer = await api.post(path, headers=token, **more)
    assert (answer.status_code, answer.json()["way"]) == (200, SLOW)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/things/chair/look?n=many", 422, "web.invalid_input"),
        ("/v1/things/chair/look?n=-1", 422, "web.invalid_input"),
        ("/v1/things/chair/look?n=1e3", 422, "web.invalid_input"),
        ("/v1/things/chair/look?n=1&n=2", 400, "web.parameter_repeated"),
        ("/v1/things//look", 404, "web.not_found"),
        ("/v1/things/chair/look/", 200, None),
        ("/v1/things/a/b/look", 404, "web.not_found"),
        ("/v1/things/chair", 404, "web.not_found"),
    ],
)
async def test_requests_without_a_fast_answer_go_to_litestar(api, token, path, status, code):
    answer = await api.post(path, headers=token)
    assert (answer.status_code, answer.json().get("code")) == (status, code)


async def test_an_answered_request_is_freed_without_the_collector(api, token):
    """Those that waited for it held up all others for tens of milliseconds."""
    gc.collect()
    gc.disable()
    try:
        for path in ("/v1/things/chair/look", "/v1/things/ch%61ir/look"):
            for _ in range(10):
                assert (await api.post(path, headers=token)).status_code == 200
        left = [each for each in gc.get_objects() if type(each) is RequestResponseCycle]
        assert len(left) <= 2
    finally:
        gc.enable()


async def test_an_unsupported_key_is_refused_on_fast_routes_too(api, token):
    headers = {**token, "idempotency-key": "8e03978e"}
    answer = await api.post("/v1/things/chair/look", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "web.idempotency_unsupported")


@pytest.mark.parametrize("name", ["limited", "broken"])
async def test_errors_are_equal_on_both_paths(api, token, name, capfd):
    answers = [
        await api.post(f"/v1/things/{name}/look?{query}", headers=token)
        for query in ("n=1", "n=%31")
    ]
    told = [answer.json() for answer in answers]
    for answer, problem in zip(answers, told, strict=True):
        assert problem.pop("request_id") == answer.headers["x-request-id"]
        assert "secret inside" not in answer.text
    assert told[0] == told[1]
    assert answers[0].status_code == answers[1].status_code
    different = {"x-request-id", "traceparent", "date"}
    heads = [{k: v for k, v in a.headers.items() if k not in different} for a in answers]
    assert heads[0] == heads[1]
    capfd.readouterr()


async def test_tokens_and_scopes_are_required(api, postgres):
    reader = await Tokens(postgres).create("reader", ("jobs:read",))
    for header, status in ((None, 401), ("Bearer hrt_x", 401), (f"Bearer {reader.text}", 403)):
        headers = {} if header is None else {"authorization": header}
        told = []
        for query in ("n=1", "n=%31"):
            answer = await api.post(f"/v1/things/chair/look?{query}", headers=headers)
            assert answer.status_code == status
            problem = answer.json()
            problem.pop("request_id")
            told.append((problem, answer.headers.get("www-authenticate")))
        assert told[0] == told[1]


async def test_head_trace_headers_and_metrics_are_the_same(api, token, root):
    sent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = await api.head("/v1/all", headers={**token, "traceparent": sent})
    assert (answer.status_code, answer.content) == (200, b"")
    assert trace_id(answer.headers["traceparent"]) == trace_id(sent)
    assert len(answer.headers["x-request-id"]) == 36
    for name, value in SECURITY_HEADERS:
        assert answer.headers[name.decode()] == value.decode()
    await api.post("/v1/things/chair/look", headers=token)
    lines = (await api.get("/metrics", headers=root)).text.splitlines()
    asked = [line for line in lines if "web_requests_total{" in line]
    assert any('route="/v1/things/{name}/look"' in line and "2xx" in line for line in asked)
    assert any('route="/v1/all"' in line for line in asked)


async def test_a_database_that_is_down_is_reported(app, serve):
    app.engines.postgres = Postgres(
        "postgresql://127.0.0.1:1/x", PostgresConfig(connect_timeout_s=0.5)
    )
    token = {"authorization": f"Bearer {make_token()}"}
    async with serve(app) as client:
        answer = await client.get("/v1/all", headers=token)
    assert (answer.status_code, answer.json()["code"]) == (503, "postgres.unavailable")
    assert answer.headers["retry-after"] == "2"


async def test_fast_routes_are_described(app):
    document = describe_api(app)
    operation = document["paths"]["/v1/things/{name}/look"]["post"]
    assert operation["security"] == [{"bearer": ["jobs:write"]}]
    assert {one["name"] for one in operation["parameters"]} == {"name", "n"}


async def test_a_pipelined_second_request_is_answered(serving, app, talk):
    async with serving(app) as at:
        ask = b"GET /v1/all HTTP/1.1\r\nHost: localhost\r\n\r\n"
        told = await talk(at, ask + ask.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert told.count(b" 401 ") == 2
