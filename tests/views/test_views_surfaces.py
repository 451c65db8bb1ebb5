"""Python, HTTP and commands give the same answers; rules of HTTP alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from tests.views.room_harness import SURFACES, run_scenario
from views_surfaces import GROUP, STEPS, client_of, surface_on

from headrace.testing import drain
from headrace.web.tokens import Tokens

PEOPLE = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"}
PATHS = pytest.mark.parametrize("path", ["ad:1", "ad%3A1"], ids=["fast", "plain"])
ALIKE = ("etag", "content-type", "cache-control", "x-content-type-options")


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
async def test_every_surface_gives_the_same_answers(name, engines, views, flusher, app):
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    names = {
        "$from": (hour - timedelta(hours=1)).isoformat(),
        "$to": (hour + timedelta(hours=2)).isoformat(),
    }

    async def flush():
        await flusher.run_once()
        await flusher.write_uniques()

    def resolve(given):
        return {k: names.get(v, v) if isinstance(v, str) else v for k, v in given.items()}

    meanwhile = {"flush": flush, "work": lambda: drain(app)}
    async with surface_on(name, engines, views) as surface:
        await run_scenario(surface, STEPS, meanwhile=meanwhile, resolve=resolve)


async def test_fast_and_plain_answers_are_the_same(engines, views):
    async with client_of(engines, views) as client:
        for total, name in ((2, "ad:1"), (4, "ad%3A1")):
            answer = await client.post(f"/v1/views/items/{name}?class=human&n=2")
            assert answer.json() == {"id": "ad:1", "total": total}
        fast, plain = [await client.get(f"/v1/views?ids={i},ad:2") for i in ("ad:1", "ad%3A1")]
        assert fast.json() == [{"id": "ad:1", "total": 4}, {"id": "ad:2", "total": 0}]
        assert fast.content == plain.content
        assert [fast.headers[name] for name in ALIKE] == [plain.headers[name] for name in ALIKE]
        await views.hits(["b", "b"])
        for query in ("ids=ad:1&ids=b,c", "ids=ad:1,b,c", "ids=ad:1%2Cb&ids=c"):
            answer = (await client.get(f"/v1/views?{query}")).json()
            assert [(one["id"], one["total"]) for one in answer] == [
                ("ad:1", 4),
                ("b", 2),
                ("c", 0),
            ]


@PATHS
async def test_an_unchanged_list_is_not_sent_again(engines, views, path):
    await views.hits(["ad:1", "ad:2"])
    async with client_of(engines, views) as client:
        url = f"/v1/views?ids={path},ad:2"
        etag = (await client.get(url)).headers["etag"]
        for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            again = await client.get(url, headers={"if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == etag
        await views.hit("ad:2")
        changed = await client.get(url, headers={"if-none-match": etag})
        assert changed.status_code == 200
        assert changed.headers["etag"] != etag
        assert changed.headers["cache-control"] == "private, no-cache"


async def test_the_pixel_counts_and_is_not_cached(engines, views):
    async with client_of(engines, views) as client:
        path = "/v1/views/items/ad:1/pixel"
        answer = await client.get(path, headers=PEOPLE)
        assert (answer.content[:6], len(answer.content)) == (b"GIF89a", 43)
        assert answer.headers["content-type"] == "image/gif"
        assert answer.headers["cache-control"] == "no-store"
        assert (await client.head(path, headers=PEOPLE)).status_code == 200
        await client.get(path, headers={"user-agent": "Googlebot/2.1"})
    assert [one.total for one in await views.totals(["ad:1"])] == [1]


@PATHS
async def test_bots_are_counted_apart_by_their_user_agent(engines, views, flusher, path):
    async with client_of(engines, views) as client:
        for agent in (PEOPLE["user-agent"], "Googlebot/2.1", "curl/8", ""):
            await client.post(f"/v1/views/items/{path}", headers={"user-agent": agent})
        body = ["ad:1", {"id": "ad:1", "class": "staff"}]
        await client.post("/v1/views", headers={"user-agent": "Googlebot/2.1"}, json=body)
    await flusher.run_once()
    [found] = await views.totals(["ad:1"], fields=("total", "classes"))
    assert found.classes == {"human": 1, "bot": 4, "staff": 1}


@pytest.fixture
async def key(engines):
    """A publishable key, as in the source of a page."""
    return (await Tokens(engines.postgres).create("site", ("views:hit",), publishable=True)).text


async def test_a_publishable_key_counts_single_views_and_nothing_else(engines, views, key):
    page = {**PEOPLE, "origin": "https://shop.example"}
    beacon = {**page, "content-type": "text/plain;charset=UTF-8"}
    item = "/v1/views/items/ad:1"
    async with client_of(engines, views) as client:
        bearer = client.headers.pop("authorization")
        answer = await client.post(f"{item}?k={key}", headers=page)
        assert (answer.status_code, answer.json()) == (200, {"id": "ad:1", "total": 1})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert (await client.get(f"{item}/pixel?k={key}", headers=PEOPLE)).status_code == 200
        answer = await client.post(f"/v1/views?k={key}", headers=beacon, content=b'["ad:1","ad:2"]')
        assert [one["total"] for one in answer.json()] == [3, 1]
        many = {"json": [{"id": "a", "n": 9}]}
        for method, path, more, status in (
            ("POST", f"{item}?n=2&k={key}", {}, 422),
            ("POST", f"/v1/views/items/ad%3A1?n=2&k={key}", {}, 422),
            ("POST", f"{item}?event=&k={key}", {}, 422),
            ("POST", f"/v1/views?k={key}", many, 422),
            ("GET", f"/v1/views?ids=ad:1&k={key}", {}, 401),
            ("DELETE", f"{item}?k={key}", {}, 401),
            ("POST", f"{item}?k={key}&k={key}", {}, 401),
        ):
            answer = await client.request(method, path, headers=PEOPLE, **more)
            assert answer.status_code == status, path
            assert status != 422 or answer.json()["code"] == "views.invalid_hit"
        for path in (item, "/v1/views/items/ad%3A1", f"{item}?k={key}"):
            answer = await client.post(path, headers={"authorization": f"Bearer {key}"})
            assert (answer.status_code, answer.json()["code"]) == (401, "web.unauthenticated")
            assert "?k=" in answer.json()["detail"]
        # Anyone may send events with the key of a page: they hide no event of a server.
        for _ in range(2):
            await client.post(f"{item}?event=order-1&k={key}", headers=PEOPLE)
            await client.post(f"/v1/views/items/ad%3A1?event=order-1&k={key}", headers=PEOPLE)
            await client.get(f"{item}/pixel?event=order-1&k={key}", headers=PEOPLE)
            body = [{"id": "ad:1", "event": "order-1"}]
            await client.post(f"/v1/views?k={key}", headers=PEOPLE, json=body)
        server = {**PEOPLE, "authorization": bearer}
        answer = await client.post(f"{item}?event=order-1&n=3", headers=server)
        assert answer.json()["total"] == 7


async def test_scopes_separate_counting_and_reading(engines, views):
    async with client_of(engines, views, scopes=("views:hit",)) as client:
        assert (await client.post("/v1/views/items/ad:1")).status_code == 200
        for method, path in (
            ("GET", "/v1/views?ids=ad:1"),
            ("GET", "/v1/views/top"),
            ("DELETE", "/v1/views/items/ad:1"),
        ):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()["code"]) == (403, "web.insufficient_scope")


def test_invalid_words_of_a_command_are_refused_with_its_usage():
    for line in (
        "hit a --class alien",
        "series a --by minute",
        "top --max 0",
        "get",
        "reclassify a",
    ):
        ran = CliRunner().invoke(GROUP, line.split())
        assert (ran.exit_code, "Usage" in ran.output) == (2, True), line
    for line in ("series a --from yesterday", "reclassify a --from yesterday"):
        ran = CliRunner().invoke(GROUP, line.split())
        assert ran.exception.text.startswith("--from:"), line
        assert "'yesterday'" in ran.exception.text
