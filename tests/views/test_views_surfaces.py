"""One life of views, told alike by Python, HTTP and the command line.

`views_scenario.toml`, step by step.
"""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from views_surfaces import SURFACES, Refused, client_of, surface_on

from headrace.testing import drain
from headrace.views import cli
from headrace.web.tokens import Tokens

STEPS = tomllib.loads(Path(__file__).with_name("views_scenario.toml").read_text())["step"]
PEOPLE = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"}


def filled(value, names):
    """`value` with `names` in their places."""
    if isinstance(value, dict):
        return {key: filled(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, names) for one in value]
    return names.get(value, value) if isinstance(value, str) else value


def without_any(answer, expected):
    """The answer with `<any>` wherever that is expected."""
    if expected == "<any>":
        return "<any>" if answer is not None else None
    if isinstance(expected, dict) and isinstance(answer, dict):
        return {key: without_any(one, expected.get(key)) for key, one in answer.items()}
    if isinstance(expected, list) and isinstance(answer, list) and len(answer) == len(expected):
        return [without_any(one, part) for one, part in zip(answer, expected, strict=True)]
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
async def test_every_way_in_tells_the_same_life(name, engines, views, flusher, jobs):
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    names = {
        "$this_hour": (hour - timedelta(hours=1)).isoformat(),
        "$next_hour": (hour + timedelta(hours=2)).isoformat(),
    }

    async def meanwhile(what):
        if what == "flush":
            await flusher.run_once()
            await flusher.write_uniques()
        else:
            await drain(SimpleNamespace(jobs=jobs, engines=engines))

    async with surface_on(name, engines, views) as surface:
        for step in STEPS:
            given = filled(step.get("with", {}), names)
            try:
                if step["do"] in {"flush", "work"}:
                    await meanwhile(step["do"])
                elif "refused" in step:
                    with pytest.raises(Refused) as raised:
                        await surface.do(step["do"], given)
                    assert raised.value.told == step["refused"]
                else:
                    answer = await surface.do(step["do"], given)
                    assert without_any(answer, step["gives"]) == step["gives"]
            except (Exception, pytest.fail.Exception) as error:
                error.add_note(f"{name}, step {step['name']!r}")
                raise


async def test_hot_and_plain_answers_are_the_same(engines, views):
    async with client_of(engines, views) as client:
        for path in (
            "/v1/views/items/ad:1?class=human&n=2",
            "/v1/views/items/ad%3A1?class=human&n=2",
        ):
            answer = await client.post(path)
            assert answer.status_code == 200, answer.text
        assert answer.json() == {"id": "ad:1", "total": 4}
        fast, slow = [
            await client.get(f"/v1/views?ids={ids}") for ids in ("ad:1,ad:2", "ad%3A1,ad:2")
        ]
        assert fast.json() == [{"id": "ad:1", "total": 4}, {"id": "ad:2", "total": 0}]
        assert (fast.content, fast.headers["etag"]) == (slow.content, slow.headers["etag"])
        alike = (
            "content-type",
            "cache-control",
            "x-content-type-options",
            "content-security-policy",
        )
        assert [fast.headers[name] for name in alike] == [slow.headers[name] for name in alike]


@pytest.mark.parametrize("ids", ["ad:1,ad:2", "ad%3A1,ad:2"], ids=["fast", "plain"])
async def test_a_list_that_did_not_change_is_not_sent_again(engines, views, ids):
    await views.hits(["ad:1", "ad:2"])
    async with client_of(engines, views) as client:
        first = await client.get(f"/v1/views?ids={ids}")
        etag = first.headers["etag"]
        for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            again = await client.get(f"/v1/views?ids={ids}", headers={"if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == etag
        await views.hit("ad:2")
        changed = await client.get(f"/v1/views?ids={ids}", headers={"if-none-match": etag})
        assert changed.status_code == 200
        assert changed.headers["etag"] != etag
        assert changed.headers["cache-control"] == "private, no-cache"


async def test_the_pixel_counts_and_nobody_keeps_it(engines, views):
    async with client_of(engines, views) as client:
        path = "/v1/views/items/ad:1/pixel"
        answer = await client.get(path, headers=PEOPLE)
        assert answer.content[:6] == b"GIF89a"
        assert len(answer.content) == 43
        assert answer.headers["content-type"] == "image/gif"
        assert answer.headers["cache-control"] == "no-store"
        answer = await client.head(path, headers=PEOPLE)
        assert answer.status_code == 200
        await client.get(path, headers={"user-agent": "Googlebot/2.1"})
    assert [one.total for one in await views.totals(["ad:1"])] == [1]


@pytest.mark.parametrize("path", ["ad:1", "ad%3A1"], ids=["fast", "plain"])
async def test_what_looks_like_a_bot_is_counted_apart(engines, views, flusher, path):
    async with client_of(engines, views) as client:
        for agent in (PEOPLE["user-agent"], "Googlebot/2.1", "curl/8", ""):
            await client.post(f"/v1/views/items/{path}", headers={"user-agent": agent})
        body = ["ad:1", {"id": "ad:1", "class": "staff"}]
        await client.post("/v1/views", headers={"user-agent": "Googlebot/2.1"}, json=body)
    await flusher.run_once()
    [told] = await views.totals(["ad:1"], fields=("total", "classes"))
    assert told.classes == {"human": 1, "bot": 4, "staff": 1}


async def test_pages_count_with_a_publishable_key(engines, views):
    key = (await Tokens(engines.postgres).create("site", ("views:hit",), publishable=True)).text
    page = {**PEOPLE, "origin": "https://shop.example"}
    async with client_of(engines, views) as client:
        client.headers.pop("authorization")
        answer = await client.post(f"/v1/views/items/ad:1?k={key}", headers=page)
        assert (answer.status_code, answer.json()) == (200, {"id": "ad:1", "total": 1})
        assert answer.headers["access-control-allow-origin"] == "*"
        answer = await client.get(f"/v1/views/items/ad:1/pixel?k={key}", headers=PEOPLE)
        assert answer.status_code == 200
        beacon = {**page, "content-type": "text/plain;charset=UTF-8"}
        answer = await client.post(f"/v1/views?k={key}", headers=beacon, content=b'["ad:1","ad:2"]')
        assert [one["total"] for one in answer.json()] == [3, 1]
        for path in (f"/v1/views/items/ad:1?n=2&k={key}", f"/v1/views/items/ad%3A1?n=2&k={key}"):
            answer = await client.post(path, headers=page)
            assert (answer.status_code, answer.json()["code"]) == (422, "views.invalid_hit")
        answer = await client.post(f"/v1/views?k={key}", headers=page, json=[{"id": "a", "n": 9}])
        assert answer.status_code == 422
        for method, path in (
            ("GET", f"/v1/views?ids=ad:1&k={key}"),
            ("DELETE", f"/v1/views/items/ad:1?k={key}"),
        ):
            answer = await client.request(method, path, headers=PEOPLE)
            assert answer.status_code == 401
    assert [one.total for one in await views.totals(["ad:1"])] == [3]


async def test_a_key_for_pages_is_no_bearer_token(engines, views):
    key = (await Tokens(engines.postgres).create("site", ("views:hit",), publishable=True)).text
    async with client_of(engines, views) as client:
        for path in (
            "/v1/views/items/ad:1",
            "/v1/views/items/ad%3A1",
            f"/v1/views/items/a?k={key}",
        ):
            answer = await client.post(path, headers={"authorization": f"Bearer {key}"})
            assert (answer.status_code, answer.json()["code"]) == (401, "web.unauthenticated")
            assert "?k=" in answer.json()["detail"]
        client.headers.pop("authorization")
        doubled = await client.post(f"/v1/views/items/ad:1?k={key}&k={key}")
        assert doubled.status_code == 401
    assert [one.total for one in await views.totals(["ad:1"])] == [0]


async def test_events_of_pages_are_not_those_of_servers(engines, views):
    """Anybody may send a page's events: no server's hit is lost by them."""
    key = (await Tokens(engines.postgres).create("site", ("views:hit",), publishable=True)).text
    async with client_of(engines, views) as client:
        bearer = {"authorization": client.headers.pop("authorization")}
        path = "/v1/views/items/ad:1"
        for _ in range(2):
            await client.post(f"{path}?event=order-1&k={key}", headers=PEOPLE)
            await client.post(f"/v1/views/items/ad%3A1?event=order-1&k={key}", headers=PEOPLE)
            await client.get(f"{path}/pixel?event=order-1&k={key}", headers=PEOPLE)
            body = [{"id": "ad:1", "event": "order-1"}]
            await client.post(f"/v1/views?k={key}", headers=PEOPLE, json=body)
        answer = await client.post(f"{path}?event=order-1&n=3", headers={**PEOPLE, **bearer})
        assert answer.json()["total"] == 4
        answer = await client.post(f"{path}?event=&k={key}", headers=PEOPLE)
        assert (answer.status_code, answer.json()["code"]) == (422, "views.invalid_hit")


async def test_ids_that_are_given_one_by_one_are_all_read(engines, views):
    await views.hits(["a", "b", "b"])
    async with client_of(engines, views) as client:
        for query in ("ids=a&ids=b,c", "ids=a,b,c", "ids=a%2Cb&ids=c&new=1"):
            told = (await client.get(f"/v1/views?{query}")).json()
            assert [(one["id"], one["total"]) for one in told] == [("a", 1), ("b", 2), ("c", 0)]


async def test_scopes_keep_counting_and_reading_apart(engines, views):
    async with client_of(engines, views, scopes=("views:hit",)) as client:
        assert (await client.post("/v1/views/items/ad:1")).status_code == 200
        for method, path in (
            ("GET", "/v1/views?ids=ad:1"),
            ("GET", "/v1/views/top"),
            ("DELETE", "/v1/views/items/ad:1"),
        ):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()["code"]) == (403, "web.insufficient_scope")


@pytest.mark.parametrize(
    "words",
    [
        ("hit", "a", "--class", "alien"),
        ("series", "a", "--by", "minute"),
        ("top", "--max", "0"),
        ("get",),
        ("reclassify", "a"),
    ],
)
def test_wrong_words_are_told_with_the_usage(words):
    ran = CliRunner().invoke(cli.COMMANDS[0], words)
    assert ran.exit_code == 2
    assert "Usage" in ran.output


def test_a_wrong_moment_is_told_by_its_name():
    ran = CliRunner().invoke(cli.COMMANDS[0], ["series", "a", "--from", "yesterday"])
    assert ran.exception.text.startswith("--from:")
    assert "'yesterday'" in ran.exception.text
    ran = CliRunner().invoke(cli.COMMANDS[0], ["reclassify", "a", "--from", "yesterday"])
    assert ran.exception.text.startswith("--from:")


def test_steps_have_names_of_their_own_and_what_they_need():
    names = [step["name"] for step in STEPS]
    assert len(set(names)) == len(names)
    assert {key for step in STEPS for key in step} <= {"name", "do", "with", "gives", "refused"}
    for step in STEPS:
        assert step["do"] in {"flush", "work"} or ("refused" in step) != ("gives" in step)
