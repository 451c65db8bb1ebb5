"""Malformed HTTP requests: each is refused by its code, and nothing is counted."""

from __future__ import annotations

import pytest
from tests.views.room_harness import JSON, bodies, paths, require_all_refused
from views_surfaces import client_of

LONG, HUGE = "x" * 129, "9" * 30
ITEM = "/v1/views/items"
SERIES = f"{ITEM}/a/series"
BAD_IDS = (LONG, "a%20b", "a%2Fb", "a,b", "a*5", "a!e", "a=b", "%00", "%ff", "%D0%B6")
BAD_QUERIES = ("n=0", "n=-1", "n=1000001", "viewer=a,b", f"viewer={LONG}", "event=e%3D1")
BAD_NUMBERS = (HUGE, "1.5", "one", "%EF%BC%95%C2%B2", "1e3", "1_000", "%205", "9" * 5_000)
BODIES_REFUSED = (
    *("a", None, {"id": "a"}, [1], [None], [["a"]], [{}], [{"id": 1}]),
    *([{"id": "a", **more}] for more in ({"n": "1"}, {"n": True}, {"n": 1.5}, {"n": 10**30})),
    *([{"id": "a", **more}] for more in ({"traffic": "bot"}, {"class": "alien"}, {"more": 1})),
    ["a\u0000"],
)
MOVE = {"id": "a", "from_at": "x", "to_at": "y", "source": "bot", "target": "human"}
TABLE = {
    "422 views.invalid_hit": [
        *paths("POST", *(f"{ITEM}/{bad}" for bad in BAD_IDS)),
        *paths("POST", *(f"{ITEM}/a?{bad}" for bad in (*BAD_QUERIES, "event=%0A"))),
        *bodies("POST", "/v1/views", [{"id": "a", "n": 0}], [{"id": "a", "n": 10**18}]),
        *bodies("POST", "/v1/views", [""], ["a", "b c"]),
        *paths("GET", *(f"/v1/views?ids={bad}" for bad in ("", "a,,b", "a%20b", LONG))),
        *paths("GET", "/v1/views?ids=a&fields=likes", "/v1/views?ids=a&fields=total,"),
        *paths("GET", f"{ITEM}/a%20b/series", f"{ITEM}/a%20b/pixel"),
        *paths("DELETE", f"{ITEM}/a%20b"),
    ],
    "422 web.invalid_input": [
        *paths("POST", *(f"{ITEM}/a?n={bad}" for bad in BAD_NUMBERS)),
        *paths("POST", f"{ITEM}/a?class=alien", f"{ITEM}/a?class=HUMAN"),
        *bodies("POST", "/v1/views", *BODIES_REFUSED),
        *bodies("POST", "/v1/views/reclassify", {}, MOVE),
        *paths("GET", "/v1/views", f"{SERIES}?by=minute"),
        *paths("GET", *(f"/v1/views/top?{bad}" for bad in ("limit=0", "limit=100000"))),
        *paths("GET", "/v1/views/top?class=alien"),
    ],
    "422 views.invalid_span": [
        *paths("GET", f"{SERIES}?from=yesterday", f"{SERIES}?from=2026-13-01"),
        *paths("GET", f"{SERIES}?by=hour&from=2000-01-01T00:00:00Z"),
        *paths("GET", "/v1/views/top?window=0s", "/v1/views/top?window=-5h"),
    ],
    "404 web.not_found": paths("POST", f"{ITEM}/", f"{ITEM}/a/b", f"{ITEM}/../../etc"),
    "405 web.method_not_allowed": paths("PUT", f"{ITEM}/a"),
    "422 web.idempotency_unsupported": [
        ("POST", f"{ITEM}/a", {"headers": {"idempotency-key": "k"}})
    ],
    "400 web.malformed_json": bodies(
        "POST", "/v1/views", b"", b"[", b"\xff", b'["a"] x', b'[{"id":"a","id":"b"}]'
    ),
    "413 views.too_many_hits": bodies("POST", "/v1/views", ["a"] * 1_001),
    "413 views.too_many_ids": paths("GET", f"/v1/views?ids={'a,' * 1000}a"),
    "414 web.target_too_long": paths("GET", f"/v1/views?ids={'a,' * 4100}a"),
    "415 web.unsupported_media_type": [
        ("POST", "/v1/views", {"content": b'["a"]', "headers": JSON | {"content-type": "a/b"}})
    ],
}


@pytest.mark.slow
async def test_each_is_refused_and_nothing_is_counted(engines, views):
    """One server for all, so that effects of a request show in the next."""
    await views.hit("a", 5)
    total = 5
    async with client_of(engines, views) as client:

        async def counts_as_before(seen):
            nonlocal total
            total += 1
            good = await client.post(f"{ITEM}/a?class=human")
            assert (good.status_code, good.json()) == (200, {"id": "a", "total": total}), seen

        await require_all_refused(client, TABLE, counts_as_before)
    assert total > 75
