"""What the routes of views are sent by mistake or on purpose.

Each is refused in its words, nothing is counted, and the next good request works.
"""

from __future__ import annotations

import json

import pytest
from views_surfaces import client_of

LONG = "x" * 129
HUGE = "9" * 30
JSON = {"content-type": "application/json"}


def post(path, code, **more):
    """A row: a POST and the refusal that must come."""
    return "POST", path, more, code


def get(path, code, **more):
    """The same for a GET."""
    return "GET", path, more, code


def body(data, code):
    """A row: a body of many hits."""
    content = data if isinstance(data, bytes) else json.dumps(data).encode()
    return post("/v1/views", code, content=content, headers=JSON)


CORPUS = [
    # One hit.
    post(f"/v1/views/items/{LONG}", "422 views.invalid_hit"),
    post("/v1/views/items/", "404 web.not_found"),
    post("/v1/views/items/a%20b", "422 views.invalid_hit"),
    post("/v1/views/items/a%2Fb", "422 views.invalid_hit"),
    post("/v1/views/items/a,b", "422 views.invalid_hit"),
    post("/v1/views/items/a*5", "422 views.invalid_hit"),
    post("/v1/views/items/a!e", "422 views.invalid_hit"),
    post("/v1/views/items/a=b", "422 views.invalid_hit"),
    post("/v1/views/items/%00", "422 views.invalid_hit"),
    post("/v1/views/items/%ff", "422 views.invalid_hit"),
    post("/v1/views/items/%D0%B6", "422 views.invalid_hit"),
    post("/v1/views/items/a/b", "404 web.not_found"),
    post("/v1/views/items/../../etc", "404 web.not_found"),
    post("/v1/views/items/a?n=0", "422 views.invalid_hit"),
    post("/v1/views/items/a?n=-1", "422 views.invalid_hit"),
    post("/v1/views/items/a?n=1000001", "422 views.invalid_hit"),
    post(f"/v1/views/items/a?n={HUGE}", "422 web.invalid_input"),
    post("/v1/views/items/a?n=1.5", "422 web.invalid_input"),
    post("/v1/views/items/a?n=one", "422 web.invalid_input"),
    post("/v1/views/items/a?n=%EF%BC%95%C2%B2", "422 web.invalid_input"),
    post("/v1/views/items/a?n=1e3", "422 web.invalid_input"),
    post("/v1/views/items/a?n=1_000", "422 web.invalid_input"),
    post("/v1/views/items/a?n=%205", "422 web.invalid_input"),
    post(f"/v1/views/items/a?n={'9' * 5_000}", "422 web.invalid_input"),
    post("/v1/views/items/a?class=alien", "422 web.invalid_input"),
    post("/v1/views/items/a?class=HUMAN", "422 web.invalid_input"),
    post("/v1/views/items/a?viewer=a,b", "422 views.invalid_hit"),
    post(f"/v1/views/items/a?viewer={LONG}", "422 views.invalid_hit"),
    post("/v1/views/items/a?event=e%3D1", "422 views.invalid_hit"),
    post("/v1/views/items/a?event=%0A", "422 views.invalid_hit"),
    post("/v1/views/items/a", "422 web.idempotency_unsupported", headers={"idempotency-key": "k"}),
    ("PUT", "/v1/views/items/a", {}, "405 web.method_not_allowed"),
    # Many.
    body(b"", "400 web.malformed_json"),
    body(b"[", "400 web.malformed_json"),
    body(b"\xff", "400 web.malformed_json"),
    body(b'["a"] x', "400 web.malformed_json"),
    body("a", "422 web.invalid_input"),
    body(None, "422 web.invalid_input"),
    body({"id": "a"}, "422 web.invalid_input"),
    body([1], "422 web.invalid_input"),
    body([None], "422 web.invalid_input"),
    body([["a"]], "422 web.invalid_input"),
    body([{}], "422 web.invalid_input"),
    body([{"id": 1}], "422 web.invalid_input"),
    body([{"id": "a", "n": "1"}], "422 web.invalid_input"),
    body([{"id": "a", "n": True}], "422 web.invalid_input"),
    body([{"id": "a", "n": 1.5}], "422 web.invalid_input"),
    body([{"id": "a", "n": 0}], "422 views.invalid_hit"),
    body([{"id": "a", "n": 10**18}], "422 views.invalid_hit"),
    body([{"id": "a", "n": 10**30}], "422 web.invalid_input"),
    body([{"id": "a", "traffic": "bot"}], "422 web.invalid_input"),
    body([{"id": "a", "class": "alien"}], "422 web.invalid_input"),
    body([{"id": "a", "more": 1}], "422 web.invalid_input"),
    body(b'[{"id":"a","id":"b"}]', "400 web.malformed_json"),
    body([""], "422 views.invalid_hit"),
    body(["a", "b c"], "422 views.invalid_hit"),
    body(["a\u0000"], "422 web.invalid_input"),
    body(["a"] * 1001, "413 views.too_many_hits"),
    post(
        "/v1/views",
        "415 web.unsupported_media_type",
        content=b'["a"]',
        headers={"content-type": "a/b"},
    ),
    # Reads.
    get("/v1/views", "422 web.invalid_input"),
    get("/v1/views?ids=", "422 views.invalid_hit"),
    get("/v1/views?ids=a,,b", "422 views.invalid_hit"),
    get("/v1/views?ids=a%20b", "422 views.invalid_hit"),
    get(f"/v1/views?ids={LONG}", "422 views.invalid_hit"),
    get(f"/v1/views?ids={'a,' * 1000}a", "413 views.too_many_ids"),
    get(f"/v1/views?ids={'a,' * 4100}a", "414 web.target_too_long"),
    get("/v1/views?ids=a&fields=likes", "422 views.unknown_field"),
    get("/v1/views?ids=a&fields=total,", "422 views.unknown_field"),
    get("/v1/views/items/a/series?by=minute", "422 web.invalid_input"),
    get("/v1/views/items/a/series?from=yesterday", "422 web.invalid_input"),
    get("/v1/views/items/a/series?from=2026-01-01T00:00:00", "422 views.invalid_span"),
    get("/v1/views/items/a/series?by=hour&from=2000-01-01T00:00:00Z", "422 views.invalid_span"),
    get("/v1/views/items/a%20b/series", "422 views.invalid_hit"),
    get("/v1/views/items/a%20b/pixel", "422 views.invalid_hit"),
    get("/v1/views/top?window=0s", "422 views.invalid_span"),
    get("/v1/views/top?window=-5h", "422 views.invalid_span"),
    get("/v1/views/top?limit=0", "422 web.invalid_input"),
    get("/v1/views/top?limit=100000", "422 web.invalid_input"),
    get("/v1/views/top?class=alien", "422 web.invalid_input"),
    # Upkeep.
    ("DELETE", "/v1/views/items/a%20b", {}, "422 views.invalid_hit"),
    post("/v1/views/reclassify", "422 web.invalid_input", json={}),
    post(
        "/v1/views/reclassify",
        "422 web.invalid_input",
        json={"id": "a", "from_at": "x", "to_at": "y", "source": "bot", "target": "human"},
    ),
]


@pytest.mark.slow
async def test_each_is_refused_and_nothing_is_counted(engines, views):
    """One server for all: what one of them left behind would show in the next."""
    await views.hit("a", 5)
    async with client_of(engines, views) as client:
        for number, (method, path, more, told) in enumerate(CORPUS):
            answer = await client.request(method, path, **more)
            problem = answer.json()
            seen = f"{method} {path[:80]} {str(more)[:80]}"
            assert f"{answer.status_code} {problem['code']}" == told, seen
            assert answer.headers["content-type"] == "application/problem+json", seen
            assert problem["detail"], seen
            good = await client.post("/v1/views/items/a?class=human")
            assert (good.status_code, good.json()) == (200, {"id": "a", "total": 6 + number}), seen
    assert len(CORPUS) > 70
