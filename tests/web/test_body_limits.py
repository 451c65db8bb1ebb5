"""Bodies over HTTP: limited before they are read, counted before they are parsed, off the loop."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from small_shop import SEEN_MAX, decoded, may_end

from headrace.web.bodies import (
    DOCUMENT_BYTES_MAX,
    OFF_LOOP_FROM_BYTES,
    PAGE_BODY_BYTES_MAX,
    VALUES_MAX,
)

JSON = {"content-type": "application/json"}
ITEM = "an-id-of-some-length"


@pytest.fixture(autouse=True)
def nothing_decoded():
    """Forget what earlier tests decoded."""
    decoded.clear()
    may_end.clear()


def body_of(count: int, *, ids: str = ITEM) -> bytes:
    """A list of so many items."""
    return json.dumps([{"id": f"{ids}-{number}"} for number in range(count)]).encode()


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({}, b"", 400),
        (JSON, b"{", 400),
        ({"content-type": "application/x-www-form-urlencoded"}, b"things=1", 415),
        ({"content-type": "text/plain"}, b'{"things": []}', 415),
        ({**JSON, "content-encoding": "gzip"}, b"\x1f\x8b", 415),
        ({"content-type": "application/json; charset=utf-8"}, b'{"things": []}', 201),
        (JSON, b'{"things": [{"url": "a"}, {"url": "b"}]}', 201),
    ],
)
async def test_bodies_need_a_json_type_and_syntax(api, token, headers, content, status):
    answer = await api.post("/v1/things", headers={**token, **headers}, content=content)
    assert answer.status_code == status, answer.text


async def test_every_fault_is_reported_with_its_pointer(api, token):
    answer = await api.post("/v1/things", headers=token, json={"things": [{"url": 1}, {}]})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert [fault["pointer"] for fault in problem["errors"]] == ["/things/0/url", "/things/1/url"]
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert (await api.post("/v1/things", content=b"{")).status_code == 401, "the token comes first"


@pytest.mark.parametrize(
    ("path", "framing"),
    [
        ("/v1/seen", "Content-Length: 11000000"),
        ("/v1/seen", "Transfer-Encoding: chunked"),
        ("/v1/ping", "Content-Length: 11000000"),
    ],
)
async def test_a_long_body_with_a_publishable_key_is_refused_unread(at, talk, key, path, framing):
    """The response is 413 after the head, or at 64 KiB of a chunked body."""
    head = (
        f"POST {path}?k={key} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{framing}\r\n\r\n"
    ).encode()
    chunk = b" " * (PAGE_BODY_BYTES_MAX + 1)
    pieces = [b"%x\r\n%b\r\n" % (len(chunk), chunk)] if "chunked" in framing else []
    answer = await talk(at, head, *pieces, wait_s=60)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"web.body_too_large" in answer
    assert str(PAGE_BODY_BYTES_MAX).encode() in answer
    assert not decoded


async def test_a_body_over_its_limit_is_refused_and_the_response_arrives(make_app, serve, token):
    async with serve(make_app(body_max_bytes=1000)) as client:

        async def chunks():
            for _ in range(50):
                yield b"x" * 100_000

        for content in (b"x" * 8_000_000, chunks()):
            answer = await client.post("/v1/things", headers={**token, **JSON}, content=content)
            assert answer.status_code == 413
            assert answer.json()["code"] == "web.body_too_large"
            assert answer.headers["connection"] == "close"
        answer = await client.post("/v1/uploads", headers=token, content=b"x" * 2_000_000)
        assert answer.json() == {"bytes": 2_000_000}


async def test_limits_depend_on_the_token_and_the_route(api, key, secret):
    body = body_of(SEEN_MAX, ids="x" * 100)
    assert len(body) > PAGE_BODY_BYTES_MAX
    answer = await api.post(f"/v1/seen?k={key}", headers=JSON, content=body)
    assert answer.status_code == 413
    answer = await api.post("/v1/seen", headers={**JSON, **secret}, content=body)
    assert (answer.status_code, answer.json()) == (200, {"seen": SEEN_MAX})
    for size, status in ((DOCUMENT_BYTES_MAX - 100, 200), (DOCUMENT_BYTES_MAX, 413)):
        answer = await api.post("/v1/document", headers=secret, json={"a": "x" * size})
        assert answer.status_code == status


def large(shape):
    """A list whose second item has very many values."""
    values = {str(n): n for n in range(VALUES_MAX)} if shape == "keys" else [1] * VALUES_MAX
    return json.dumps([{"id": "a"}, {"id": "b", "more": values}]).encode()


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (body_of(100_000), "tests.too_many_seen", "seen"),
        (large("keys"), "web.body_too_large", "item 1"),
        (large("values"), "web.body_too_large", "item 1"),
    ],
    ids=["items", "keys", "values"],
)
async def test_items_and_values_are_counted_before_any_is_decoded(api, secret, body, code, text):
    answer = await api.post("/v1/seen", headers={**secret, **JSON}, content=body)
    assert (answer.status_code, answer.json()["code"]) == (413, code)
    assert text in answer.json()["detail"]
    assert not decoded


async def test_nested_values_do_not_count_as_items(api, secret):
    nested = json.dumps([{"id": "x" * 100, "more": list(range(30))}] * SEEN_MAX)
    answer = await api.post("/v1/seen", headers={**secret, **JSON}, content=nested)
    assert (answer.status_code, len(decoded)) == (200, SEEN_MAX)


async def test_a_long_body_is_decoded_while_others_are_answered(api, secret):
    headers, here = {**secret, **JSON}, threading.current_thread().name
    assert (await api.post("/v1/seen", headers=headers, content=body_of(3))).status_code == 200
    assert {*decoded} == {here}
    decoded.clear()
    body = json.dumps([{"id": "wait"}, *json.loads(body_of(SEEN_MAX - 1, ids="x" * 100))])
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
    assert (answer.status_code, answer.json()) == (200, {"seen": SEEN_MAX})
    assert here not in decoded


async def test_faults_of_large_bodies_are_reported_as_of_small_ones(api, secret):
    headers = {**secret, **JSON}
    items = [*json.loads(body_of(SEEN_MAX - 2, ids="x" * 100)), {"id": 5}, {"id": "\x00"}]
    answer = await api.post("/v1/seen", headers=headers, content=json.dumps(items))
    assert answer.status_code == 422
    assert [fault["pointer"] for fault in answer.json()["errors"]] == [f"/{SEEN_MAX - 2}/id"]
    answer = await api.post("/v1/seen", headers=headers, content=b'["' + b"x" * 70_000)
    assert (answer.status_code, answer.json()["code"]) == (400, "web.malformed_json")
