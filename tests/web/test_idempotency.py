"""A request with an `Idempotency-Key` runs once, and its repeats get the same response."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from litestar import Request, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody
from small_shop import ROUTES, NewThings, Shop

from headrace.engines.sql import compile_query
from headrace.kernel.errors import LimitExceeded
from headrace.kernel.routes import Idempotency
from headrace.web.server import KEY_CHARACTERS_MAX

PARTS = {"scope": "jobs:write", "idempotent": True}
MAKE_TABLE = "CREATE TABLE IF NOT EXISTS orders (id bigserial PRIMARY KEY, things int)"
ADD_ORDER = compile_query(
    "add_order", "-- An effect.\nINSERT INTO orders (things) VALUES (:things) RETURNING id"
)


@post("/v1/orders", operation_id="addOrder", opt=PARTS, status_code=202)
async def add_order(
    idempotency: NamedDependency[Idempotency],
    shop: NamedDependency[Shop],
    data: JSONBody[NewThings],
    note: FromQuery[str] = "",
) -> dict[str, int]:
    """Write an order; the payload selects what else happens."""

    async def order(tx) -> dict[str, int]:
        number = await (tx or shop.postgres).value(ADD_ORDER, things=len(data.things))
        if data.payload == "wait":
            shop.reached.set()
            await shop.go_on.wait()
        if data.payload == "refuse" or shop.refused_next:
            shop.refused_next = False
            raise LimitExceeded("too many orders: wait", retry_after_s=1)
        if data.payload == "break":
            raise RuntimeError("secret inside")
        return {"order": number}

    return await idempotency.run(order)


@post("/v1/other-orders", operation_id="addOtherOrder", opt=PARTS, status_code=202)
async def add_other_order(
    idempotency: NamedDependency[Idempotency], shop: NamedDependency[Shop], request: Request
) -> dict[str, int]:
    """Another route, without a body."""

    async def order(tx) -> dict[str, int]:
        return {"order": await (tx or shop.postgres).value(ADD_ORDER, things=0)}

    return await idempotency.run(order)


@pytest.fixture(scope="module")
async def shop(shared_postgres, make_app, serving):
    """A server whose routes write orders."""
    await shared_postgres.run(compile_query("make", f"-- A table.\n{MAKE_TABLE}"))
    app = make_app(routes=[*ROUTES, add_order, add_other_order], idempotency_kept_s=3600.0)
    app.shop.postgres, app.shop.refused_next = shared_postgres, False
    async with serving(app) as at:
        yield SimpleNamespace(app=app, at=at)


@pytest.fixture
async def sql(shared_postgres, shop):
    """Run any statement; the tables are empty at the start of a test."""

    async def run(text):
        return await shared_postgres.all(compile_query("test", f"-- A statement.\n{text}"))

    await run("TRUNCATE orders, headrace.idempotency_key")
    shop.app.shop.reached.clear()
    shop.app.shop.go_on.clear()
    return run


@pytest.fixture
async def api(shop, sql):
    """A client of that server, without a token."""
    async with httpx.AsyncClient(
        base_url=f"http://{shop.at.host}:{shop.at.port}", verify=False, timeout=60
    ) as client:
        yield client


@pytest.fixture
def app(shop):
    """The application."""
    return shop.app


@pytest.fixture
def orders(sql):
    """`await orders()`: the number of effects."""

    async def count():
        return len(await sql("SELECT id FROM orders"))

    return count


@pytest.fixture
def keys(sql):
    """`await keys()`: the stored keys."""

    async def kept():
        return [row["key"] for row in await sql("SELECT key FROM headrace.idempotency_key")]

    return kept


@pytest.fixture
def send(api, token):
    """`await send("key", payload=..., things=...)`: one order."""

    async def order(key, *, payload=None, things=1, path="/v1/orders", headers=token):
        body = {"things": [{"url": "a"}] * things, "payload": payload}
        if key is not None:
            headers = {**headers, "idempotency-key": key}
        return await api.post(path, json=body, headers=headers)

    return order


def code_of(answer):
    return answer.status_code, answer.json()["code"]


async def test_the_same_request_is_done_once_and_answered_alike(send, orders):
    first = await send("8e03978e")
    again = await send("8e03978e")
    assert first.status_code == again.status_code == 202
    assert first.content == again.content
    assert first.headers["content-type"] == again.headers["content-type"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert first.headers["x-request-id"] != again.headers["x-request-id"]
    assert await orders() == 1
    assert (await send("another")).json() != first.json()


async def test_without_a_key_each_request_counts(send, orders, keys):
    assert (await send(None)).json() != (await send(None)).json()
    assert (await orders(), await keys()) == (2, [])


@pytest.mark.parametrize(
    "other",
    [{"things": 2}, {"payload": "x"}, {"path": "/v1/other-orders"}, {"path": "/v1/orders?note=1"}],
    ids=["body", "payload", "route", "query"],
)
async def test_a_key_of_another_request_is_refused(send, orders, other):
    first = await send("k")
    refused = await send("k", **other)
    assert code_of(refused) == (422, "web.idempotency_mismatch")
    assert "use a new key" in refused.json()["detail"]
    assert (await send("k")).json() == first.json()
    assert await orders() == 1


async def test_callers_do_not_see_each_others_keys(send, orders, new_token):
    other = {"authorization": f"Bearer {await new_token('jobs:write')}"}
    mine = await send("k")
    theirs = await send("k", headers=other, things=2)
    assert theirs.status_code == 202
    assert theirs.json() != mine.json()
    assert (await send("k", headers=other, things=2)).json() == theirs.json()
    assert await orders() == 2


async def test_a_repeat_waits_for_the_first_and_gets_its_response(app, send, orders):
    first = asyncio.create_task(send("k", payload="wait"))
    await app.shop.reached.wait()
    second = asyncio.create_task(send("k", payload="wait"))
    other = await send("other")
    assert other.status_code == 202, "a key at work holds up nobody else"
    app.shop.go_on.set()
    assert (await first).json() == (await second).json()
    assert (await second).headers["idempotency-replayed"] == "true"
    assert await orders() == 2


@pytest.mark.slow
async def test_a_key_in_flight_is_a_conflict_that_can_be_retried(app, send, orders):
    first = asyncio.create_task(send("k", payload="wait"))
    await app.shop.reached.wait()
    async with asyncio.timeout(60):
        second = await send("k", payload="wait")
    assert code_of(second) == (409, "web.idempotency_in_flight")
    assert (second.headers["retry-after"], second.json()["retryable"]) == ("1", True)
    app.shop.go_on.set()
    assert (await first).json() == (await send("k", payload="wait")).json()
    assert await orders() == 1


@pytest.mark.slow
async def test_a_slow_effect_is_not_reported_as_a_key_in_flight(
    send, shared_postgres, orders, keys
):
    async with shared_postgres.transaction() as tx:
        await tx.run(compile_query("lock", "-- In the way.\nLOCK TABLE orders"))
        answer = await send("k")
        assert code_of(answer) == (503, "postgres.busy")
    assert (await orders(), await keys()) == (0, [])
    assert (await send("k")).status_code == 202


@pytest.mark.parametrize(
    ("payload", "status"), [("refuse", 429), ("break", 500)], ids=["refused", "failed"]
)
async def test_what_was_refused_left_nothing_and_keeps_no_key(send, orders, keys, payload, status):
    assert (await send("k", payload=payload)).status_code == status
    assert (await orders(), await keys()) == (0, [])
    corrected = await send("k")
    assert (corrected.status_code, "idempotency-replayed" in corrected.headers) == (202, False)


async def test_who_waited_for_a_refused_one_is_done(app, send, orders):
    first = asyncio.create_task(send("k", payload="wait"))
    await app.shop.reached.wait()
    second = asyncio.create_task(send("k", payload="wait"))
    app.shop.refused_next = True
    app.shop.go_on.set()
    assert sorted([(await first).status_code, (await second).status_code]) == [202, 429]
    assert await orders() == 1


async def test_what_the_door_refuses_keeps_no_key(api, token, send, keys):
    headers = {**token, "idempotency-key": "k"}
    assert (await api.post("/v1/orders", headers=headers, json={"no": 1})).status_code == 422
    assert (await api.post("/v1/orders", headers=headers, content=b"{}")).status_code == 415
    unknown = {"idempotency-key": "k", "authorization": "Bearer nobody"}
    assert (await api.post("/v1/orders", headers=unknown, json={})).status_code == 401
    assert await keys() == []
    assert (await send("k")).status_code == 202


BAD_KEYS = {
    "empty": b"",
    "long": b"x" * (KEY_CHARACTERS_MAX + 1),
    "tab": b"a\tb",
    "latin": "ключ".encode(),
}


@pytest.mark.parametrize("name", BAD_KEYS)
async def test_keys_of_a_wrong_shape(api, token, send, orders, name):
    headers = [(b"authorization", token["authorization"].encode())]
    body = {"things": []}
    answer = await api.post(
        "/v1/orders", headers=[*headers, (b"idempotency-key", BAD_KEYS[name])], json=body
    )
    assert code_of(answer) == (422, "web.idempotency_key_invalid")
    assert "1 to 128 printable ASCII" in answer.json()["detail"]
    assert await orders() == 0
    assert (await send("good")).status_code == 202


@pytest.mark.parametrize("key", ["x", "~" * KEY_CHARACTERS_MAX, '"a b, c=d; \\"'])
async def test_keys_of_every_good_shape(send, orders, key):
    assert (await send(key)).json() == (await send(key)).json()
    assert await orders() == 1


async def test_a_route_that_keeps_none_refuses_and_does_nothing(api, token):
    headers = {**token, "idempotency-key": "k"}
    for path, body in (("/v1/things", {"things": []}), ("/v1/uploads", None)):
        answer = await api.post(path, headers=headers, json=body)
        assert code_of(answer) == (422, "web.idempotency_unsupported"), path
    assert (await api.get("/v1/things/7", headers=headers)).status_code == 200


async def test_keys_are_forgotten_after_their_time(send, orders, keys, sql):
    first = await send("k")
    await sql("UPDATE headrace.idempotency_key SET created_at = now() - interval '59 minutes'")
    assert (await send("k")).json() == first.json()
    await sql("UPDATE headrace.idempotency_key SET created_at = now() - interval '61 minutes'")
    later = await send("k", things=3)
    assert (later.status_code, "idempotency-replayed" in later.headers) == (202, False)
    assert (await orders(), await keys()) == (2, ["k"])


async def test_old_keys_are_swept_by_those_who_come(send, keys, sql):
    await sql(
        "INSERT INTO headrace.idempotency_key (caller, key, sha256, created_at)"
        " SELECT 1, 'old ' || n, sha256('x'), now() - interval '2 hours' FROM generate_series(1,"
        " 30) n"
    )
    await send("a")
    assert len(await keys()) == 11
    await send("b")
    assert sorted(await keys()) == ["a", "b"]


async def test_a_lost_response_is_returned_to_the_repeat(app, shop, api, token, orders):
    body = json.dumps({"things": [], "payload": "wait"}).encode()
    headers = {**token, "idempotency-key": "k", "content-type": "application/json"}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    request = f"POST /v1/orders HTTP/1.1\r\nhost: {shop.at.host}\r\n{head}"
    request += f"content-length: {len(body)}\r\n\r\n"
    _, writer = await asyncio.open_connection(shop.at.host, shop.at.port)
    writer.write(request.encode() + body)
    await app.shop.reached.wait()
    writer.close()
    app.shop.go_on.set()
    answer = await api.post("/v1/orders", content=body, headers=headers)
    assert answer.status_code == 202
    assert await orders() == 1


async def test_a_key_is_valid_in_every_process_of_the_api(app, api, make_app, serve, token):
    other = make_app(routes=[add_order])
    vars(other.shop).update(vars(app.shop))
    headers, body = {**token, "idempotency-key": "k"}, {"things": []}
    async with serve(other) as two:
        answers: list[httpx.Response] = await asyncio.gather(
            *(one.post("/v1/orders", headers=headers, json=body) for one in (api, two) * 3)
        )
    assert len({answer.content for answer in answers}) == 1
    assert {answer.status_code for answer in answers} == {202}
