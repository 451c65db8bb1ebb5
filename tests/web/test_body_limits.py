"""Bodies: limited before they are read, counted before they are parsed, parsed in a thread."""

from __future__ import annotations

import asyncio
import json
import threading

import msgspec
import pytest
from litestar import post
from litestar.params import JSONBody

from headrace.kernel.errors import TooLarge
from headrace.kernel.routes import ItemsMax
from headrace.web.bodies import (
    DOCUMENT_BYTES_MAX,
    OFF_LOOP_FROM_BYTES,
    PAGE_BODY_BYTES_MAX,
    VALUES_MAX,
)
from headrace.web.tokens import Tokens

MANY = 1000
decoded: list[str] = []
"""The thread of each item that was decoded."""
may_end = threading.Event()


class TooManySeen(TooLarge):
    """A list of the tests is too long."""

    code = "tests.too_many_seen"


class Item(msgspec.Struct, frozen=True):
    """An item that shows where it is decoded; the one named `wait` holds its thread up."""

    id: str

    def __post_init__(self) -> None:
        decoded.append(threading.current_thread().name)
        if self.id == "wait":
            may_end.wait(60)


@post(
    "/v1/seen",
    operation_id="seen",
    status_code=200,
    opt={
        "scope": "views:hit",
        "for_pages": True,
        "items_max": ItemsMax(MANY, lambda count: TooManySeen(f"{count} seen")),
    },
)
async def see(data: JSONBody[list[Item]]) -> dict[str, int]:
    """Count what was seen."""
    return {"seen": len(data)}


@post("/v1/ping", operation_id="ping", opt={"scope": "views:hit", "for_pages": True})
async def ping() -> None:
    """A route for pages without a body."""


@post("/v1/document", operation_id="document", status_code=200, opt={"scope": "views:hit"})
async def put_document(data: JSONBody[dict[str, str]]) -> dict[str, int]:
    """Take one document."""
    return {"fields": len(data)}


@pytest.fixture
def app(make_app):
    decoded.clear()
    may_end.clear()
    return make_app(routes=[see, ping, put_document])


@pytest.fixture
async def key(postgres):
    """A publishable key."""
    return (await Tokens(postgres).create("site", ("views:hit",), publishable=True)).text


@pytest.fixture
async def secret(postgres):
    """The header of a secret token."""
    text = (await Tokens(postgres).create("server", ("views:hit",))).text
    return {"authorization": f"Bearer {text}"}


def body_of(count: int, *, ids: str = "an-id-of-some-length") -> bytes:
    """A list of so many items."""
    return json.dumps([{"id": f"{ids}-{number}"} for number in range(count)]).encode()


@pytest.mark.parametrize(
    "asked",
    [
        ("/v1/seen", "Content-Length: 11000000"),
        ("/v1/seen", "Transfer-Encoding: chunked"),
        ("/v1/ping", "Content-Length: 11000000"),
    ],
)
async def test_a_long_body_with_a_publishable_key_is_refused_unread(app, serving, talk, key, asked):
    """The response is 413 after the head, or at 64 KiB of a chunked body."""
    path, framing = asked
    head = (
        f"POST {path}?k={key} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{framing}\r\n\r\n"
    ).encode()
    chunk = b" " * (PAGE_BODY_BYTES_MAX + 1)
    pieces = [head]
    if "chunked" in framing:
        pieces.append(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    async with serving(app) as at:
        answer = await talk(at, *pieces, wait_s=60)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"web.body_too_large" in answer
        assert str(PAGE_BODY_BYTES_MAX).encode() in answer
        healthy = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert b"200 OK" in await talk(at, healthy, wait_s=60)
    assert not decoded


async def test_the_same_body_is_taken_from_a_secret_token(api, key, secret):
    body = body_of(MANY, ids="x" * 100)
    assert len(body) > PAGE_BODY_BYTES_MAX
    headers = {"content-type": "application/json"}
    answer = await api.post(f"/v1/seen?k={key}", headers=headers, content=body)
    assert answer.status_code == 413
    answer = await api.post("/v1/seen", headers={**headers, **secret}, content=body)
    assert (answer.status_code, answer.json()) == (200, {"seen": MANY})


async def test_a_route_for_one_document_takes_no_more_than_one(api, secret):
    for size, status in ((DOCUMENT_BYTES_MAX - 100, 200), (DOCUMENT_BYTES_MAX, 413)):
        answer = await api.post("/v1/document", headers=secret, json={"a": "x" * size})
        assert answer.status_code == status


async def test_items_are_counted_before_any_is_decoded(api, secret):
    answer = await api.post("/v1/seen", headers=secret, content=body_of(100_000))
    assert answer.status_code == 415
    headers = {**secret, "content-type": "application/json"}
    answer = await api.post("/v1/seen", headers=headers, content=body_of(100_000))
    assert answer.status_code == 413, answer.text
    assert answer.json()["code"] == "tests.too_many_seen"
    assert not decoded
    nested = json.dumps([{"id": "x" * 100, "more": list(range(30))}] * MANY)
    answer = await api.post("/v1/seen", headers=headers, content=nested)
    assert (answer.status_code, len(decoded)) == (200, MANY)


@pytest.mark.parametrize("shape", ["keys", "values"])
async def test_one_item_of_very_many_values_is_refused_before_it_is_parsed(api, secret, shape):
    large = {str(n): n for n in range(VALUES_MAX)} if shape == "keys" else [1] * VALUES_MAX
    headers = {**secret, "content-type": "application/json"}
    body = json.dumps([{"id": "a"}, {"id": "b", "more": large}])
    answer = await api.post("/v1/seen", headers=headers, content=body)
    assert (answer.status_code, answer.json()["code"]) == (413, "web.body_too_large")
    assert "item 1" in answer.json()["detail"]
    assert not decoded


async def test_a_long_body_is_decoded_while_others_are_answered(api, secret):
    headers = {**secret, "content-type": "application/json"}
    short = body_of(3)
    assert (await api.post("/v1/seen", headers=headers, content=short)).status_code == 200
    assert {*decoded} == {threading.current_thread().name}
    decoded.clear()
    body = json.dumps([{"id": "wait"}, *json.loads(body_of(MANY - 1, ids="x" * 100))]).encode()
    assert len(body) > OFF_LOOP_FROM_BYTES
    asked = asyncio.create_task(api.post("/v1/seen", headers=headers, content=body))
    try:
        async with asyncio.timeout(60):
            while not decoded:
                await asyncio.sleep(0)
        assert (await api.get("/healthz")).status_code == 200
        assert not asked.done()
    finally:
        may_end.set()
    answer = await asked
    assert (answer.status_code, answer.json()) == (200, {"seen": MANY})
    assert threading.current_thread().name not in decoded


async def test_faults_of_large_and_small_bodies_are_reported_alike(api, secret):
    headers = {**secret, "content-type": "application/json"}
    items = [*json.loads(body_of(MANY - 2, ids="x" * 100)), {"id": 5}, {"id": "\x00"}]
    answer = await api.post("/v1/seen", headers=headers, content=json.dumps(items))
    assert answer.status_code == 422
    assert [fault["pointer"] for fault in answer.json()["errors"]] == [f"/{MANY - 2}/id"]
    answer = await api.post("/v1/seen", headers=headers, content=b'["' + b"x" * 70_000)
    assert (answer.status_code, answer.json()["code"]) == (400, "web.malformed_json")
