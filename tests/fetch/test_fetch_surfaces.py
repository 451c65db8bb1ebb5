"""HTTP and the command line: equal results, and errors that name bad input and a remedy."""

from __future__ import annotations

import gzip
from urllib.parse import quote

import pytest

from headrace.fetch.cli import describe_run
from headrace.fetch.errors import InvalidRate
from headrace.fetch.i18n import Texts
from headrace.fetch.model import parse_rate
from headrace.fetch.outcomes import OUTCOME_CODES
from headrace.web.tokens import Tokens

CATALOGUE = b"id,name,price,photos\na,A,5,\nb,B,five,\n"


async def test_a_catalogue_through_http(client, shop):
    limits = {"starts_max": 10, "window_s": 1, "connections": 2}
    made = await client.put("/v1/fetch/customers/web", json=limits)
    nowhere = {"webhook": None, "webhook_secret": None}
    own = {"hold_share": None, "hold_items": None, "refresh_s": None}
    assert made.json() == {"customer": "web", **limits, **own, **nowhere}
    shown = (await client.get("/v1/fetch/customers/web")).json()
    assert shown == {"customer": "web", **limits, **own}
    for body in (CATALOGUE, gzip.compress(CATALOGUE)):
        answer = await client.post("/v1/fetch/customers/web/catalogues", content=body)
        assert answer.status_code == 202, answer.text
    run = answer.json()
    assert (run["rows"], run["unchanged"], run["invalid"]) == (2, 1, 1)
    assert (await client.get(f"/v1/fetch/runs/{run['run']}")).json() == run
    problems = (await client.get(f"/v1/fetch/runs/{run['run']}/errors")).json()["problems"]
    assert [(p["item"], p["code"]) for p in problems] == [("b", "invalid_number")]
    item = (await client.get("/v1/fetch/customers/web/item?id=a")).json()
    assert item["fields"] == {"name": "A", "price": "5"}
    results = (await client.get("/v1/fetch/results?after=0")).json()
    assert results == {"results": [], "next_after": 0}
    dry = await client.post("/v1/fetch/customers/web/catalogues?dry_run=true", content=CATALOGUE)
    assert dry.json()["state"] == "dry"


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "code"),
    [
        ("GET", "customers/nobody", {}, 404, "fetch.customer_unknown"),
        (
            "POST",
            "customers/nobody/catalogues",
            {"content": CATALOGUE},
            404,
            "fetch.customer_unknown",
        ),
        ("POST", "customers/shop/catalogues", {"content": b"hello"}, 422, "fetch.not_a_catalogue"),
        ("POST", "customers/shop/catalogues", {"content": b""}, 422, "fetch.not_a_catalogue"),
        (
            "POST",
            "customers/shop/catalogues",
            {"content": b"<!DOCTYPE yml_catalog [<!ENTITY a 'b'>]><yml_catalog/>"},
            422,
            "fetch.catalogue_broken",
        ),
        ("GET", "runs/999999", {}, 404, "fetch.run_unknown"),
        ("GET", "runs/999999/errors", {}, 404, "fetch.run_unknown"),
        ("GET", "runs/99999999999999999999999", {}, 404, "web.not_found"),
        ("POST", "runs/99999999999999999999999/confirm", {}, 404, "web.not_found"),
        ("GET", "customers/%00", {}, 404, None),
        ("GET", "customers/shop/item?id=%00", {}, 404, "fetch.item_unknown"),
        ("GET", "results?customer=%00", {}, 404, "fetch.customer_unknown"),
        ("POST", "runs/999999/confirm", {}, 404, "fetch.run_unknown"),
        ("GET", "customers/shop/item?id=none", {}, 404, "fetch.item_unknown"),
        ("PUT", "customers/a%20b", {"json": {"starts_max": 1}}, 422, "invalid_id"),
        ("PUT", "customers/%2e%2e", {"json": {"starts_max": 1}}, 422, "invalid_id"),
        ("PUT", "customers/%2e", {"json": {"starts_max": 1}}, 422, "invalid_id"),
        ("PUT", "customers/x", {"json": {"starts_max": 0}}, 422, "fetch.invalid_rate"),
        ("PUT", "customers/x", {"json": {"starts_max": "1"}}, 422, None),
        ("PUT", "customers/x", {"json": {"starts_max": 1, "typo": 1}}, 422, None),
        ("PUT", "customers/x", {"json": {}}, 422, "fetch.invalid_rate"),
        ("PUT", "customers/x", {"json": {"rate": "fast"}}, 422, "fetch.invalid_rate"),
        ("PUT", "customers/x", {"json": {"rate": "0/s"}}, 422, "fetch.invalid_rate"),
        (
            "PUT",
            "customers/x",
            {"json": {"rate": "1/s", "starts_max": 1}},
            422,
            "fetch.invalid_rate",
        ),
        ("PUT", "customers/x", {"json": {"rate": "1/s", "window_s": 1}}, 422, "fetch.invalid_rate"),
        ("PUT", "customers/x", {"json": {"window_s": 1}}, 422, "fetch.invalid_rate"),
        ("GET", "results?limit=100000", {}, 422, None),
        ("GET", "results?after=-1", {}, 422, None),
    ],
)
async def test_bad_input_is_answered_with_its_status_and_code(
    client, *, method, path, options, status, code
):
    answer = await client.request(method, f"/v1/fetch/{path}", **options)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")
    problem = answer.json()
    assert problem["detail"]
    assert code is None or problem["code"] == code
    good = await client.post("/v1/fetch/customers/shop/catalogues", content=CATALOGUE)
    assert good.status_code == 202


async def test_limits_are_said_as_a_rate_or_in_parts(client):
    for said, told in (
        ({"rate": "600/m"}, (600, 60.0, 8)),
        ({"rate": "20/5s", "connections": 2}, (20, 5.0, 2)),
        ({"starts_max": 7}, (7, 60.0, 8)),
        ({"starts_max": 7, "window_s": 2}, (7, 2.0, 8)),
    ):
        answer = (await client.put("/v1/fetch/customers/x", json=said)).json()
        assert (answer["starts_max"], answer["window_s"], answer["connections"]) == told


async def test_a_body_over_the_bound_is_refused_and_nothing_is_kept(client, shop):
    object.__setattr__(shop.fetch.config, "catalogue_max_bytes", 1000)
    answer = await client.post("/v1/fetch/customers/shop/catalogues", content=b"x" * 5000)
    assert (answer.status_code, answer.json()["code"]) == (413, "fetch.catalogue_too_large")
    assert await shop.fetch.runs.newest() == []


async def test_a_call_without_a_token_or_scope_is_refused(client, postgres):
    reader = await Tokens(postgres).create("reader", ("fetch:read",))
    path = "/v1/fetch/customers/shop/catalogues"
    none = await client.post(path, content=CATALOGUE, headers={"Authorization": ""})
    weak = await client.post(
        path, content=CATALOGUE, headers={"Authorization": f"Bearer {reader.text}"}
    )
    assert (none.status_code, weak.status_code) == (401, 403)


async def test_commands_from_customer_to_run(command, shop, tmp_path):
    assert await command("customer", "set", "cli", "--rate", "10/s", "--connections", "3") == (
        0,
        "cli: 10 requests in 1 s, 3 connections",
    )
    assert "cli: 10 requests" in (await command("customer", "show"))[1]
    file = tmp_path / "c.csv"
    file.write_bytes(CATALOGUE)
    code, text = await command("catalogue", "run", str(file), "--customer", "cli", "--dry-run")
    assert code == 0
    assert "dry" in text
    code, text = await command("catalogue", "run", str(file), "--customer", "cli", "--no-wait")
    assert code == 0
    assert "1 new, 0 changed, 0 unchanged, 1 invalid" in text
    run = (await shop.fetch.runs.newest("cli"))[0]
    assert "price" in (await command("catalogue", "errors", str(run.run)))[1]
    assert (await command("run", "show", str(run.run)))[1] == describe_run(run)
    assert "c.csv" in (await command("catalogue", "ls"))[1]
    unfinished = await command("catalogue", "run", str(file), "--customer", "cli", "--wait", "0")
    assert unfinished[0] == 0, "nothing changed, so nothing to wait for"
    file.write_bytes(CATALOGUE.replace(b"a,A,5", b"a,A2,5"))
    code, _ = await command("catalogue", "run", str(file), "--customer", "cli", "--wait", "0.1")
    assert code == "fetch.run_unfinished"
    file.write_bytes(b"id,name,price,photos\n")
    code, text = await command("catalogue", "run", str(file), "--customer", "cli")
    assert code == "fetch.run_held"
    assert "empty" in text
    held = (await shop.fetch.runs.newest("cli"))[0]
    assert (await command("catalogue", "confirm", str(held.run), "--no-wait"))[0] == 0
    assert (await shop.fetch.items.get("cli", "a")).is_gone


async def test_commands_about_one_url(command, shop, origin):
    code, text = await command("photo", origin.url("/photo/1"))
    assert code == 0
    assert "a jpg of 64 x 48 pixels" in text
    code, text = await command("photo", "http://169.254.169.254/x")
    assert code == 1
    assert text.startswith("refused:forbidden_address")
    assert "no run has requested it" in (await command("why", origin.url("/photo/1")))[1]
    assert "refused:userinfo" in (await command("why", "http://u@example.com/"))[1]


async def test_wrong_words_end_with_our_error(command, tmp_path):
    assert (await command("customer", "set", "x", "--rate", "fast"))[0] == "fetch.invalid_rate"
    assert (await command("customer", "show", "nobody"))[0] == "fetch.customer_unknown"
    assert (await command("run", "show", "999"))[0] == "fetch.run_unknown"
    missing = await command("catalogue", "run", "/no/such/file", "--customer", "x")
    assert missing[0] == "fetch.invalid_source"


async def test_consumers_through_http_and_commands(client, command, shop):
    await shop.fetch.declare_consumers()
    found = (await client.get("/v1/fetch/consumers")).json()["consumers"]
    name = found[0]["name"]
    assert name.endswith("publish")
    assert name in (await command("consumer", "ls"))[1]
    replayed = await client.post(f"/v1/fetch/consumers/{quote(name)}/replay?customer=shop")
    assert (replayed.status_code, replayed.json()) == (202, {"consumer": name, "items": 0})
    assert "0 items" in (await command("consumer", "replay", name, "--customer", "shop"))[1]
    removed = await client.delete(f"/v1/fetch/consumers/{quote(name)}")
    assert removed.status_code == 204
    assert (await command("consumer", "rm", name))[0] == "fetch.consumer_unknown"
    for method, path in (("DELETE", "nobody"), ("POST", "nobody/replay"), ("DELETE", "%00")):
        answer = await client.request(method, f"/v1/fetch/consumers/{path}")
        assert answer.status_code == 404, answer.text


@pytest.mark.usefixtures("worker")
async def test_photos_that_failed_are_listed_with_the_problems(client, command, shop):
    text = f"id,name,price,photos\na,A,5,{shop.origin.url('/none')}|http://10.0.0.1/x.jpg\n"
    run = await shop.run_to_end(text)
    found = (await client.get(f"/v1/fetch/runs/{run.run}/errors")).json()
    (photo,) = found["photos"]
    assert (photo["item"], photo["outcome"]) == ("a", "failed:http_404")
    assert photo["text"] == "there is no photo at this link (404): correct the link"
    assert "use a public host" in found["problems"][0]["text"]
    path = f"/v1/fetch/runs/{run.run}/errors?photos_after={photo['position']}"
    assert (await client.get(path)).json()["photos"] == []
    code, text = await command("catalogue", "errors", str(run.run))
    assert code == 0
    assert (
        f"{shop.origin.url('/none')}: there is no photo at this link (404): correct the link"
        in text
    )
    told = describe_run(run)
    assert f"2 photos failed or were refused: `headrace fetch catalogue errors {run.run}`" in told
    why = (await command("why", shop.origin.url("/none")))[1]
    assert "requested again" in why
    refused = (await command("why", "http://10.0.0.1/x.jpg"))[1]
    assert "fetch.allow_networks" in refused
    assert "not requested while the URL is refused" in refused


async def test_the_upload_of_a_catalogue_is_described_with_its_body(client):
    document = (await client.get("/openapi.json")).json()
    upload = document["paths"]["/v1/fetch/customers/{customer}/catalogues"]["post"]
    assert upload["requestBody"]["required"]
    assert "text/csv" in upload["requestBody"]["content"]


async def test_what_is_refused_names_its_remedy(client, command):
    unknown = (await client.get("/v1/fetch/customers/nobody")).json()["detail"]
    assert "PUT /v1/fetch/customers/nobody" in unknown
    assert "headrace fetch customer set nobody" in unknown
    assert parse_rate("20/5s") == (20, 5.0)
    assert parse_rate("1/0.5m") == (1, 30.0)
    for wrong in ("20/s5", "20/-1s", "/5s", "20/5"):
        with pytest.raises(InvalidRate, match="20/5s"):
            parse_rate(wrong)
    with pytest.raises(InvalidRate, match="over 0"):
        parse_rate("0/m")
    assert "fetch.allow_networks" in (await command("photo", "http://10.0.0.1/x"))[1]
    assert "fetch.allow_ports" in (await command("photo", "http://example.com:8081/x"))[1]
    assert "shop: " in (await command("customer", "ls"))[1]


def test_every_outcome_is_said_in_words():
    for outcome in (*OUTCOME_CODES, "failed:http_418", "refused:redirect_host", "failed:protocol"):
        words = Texts.load().outcome(outcome)
        assert words.startswith(("the ", "there is"))
        assert "_" not in words.partition("fetch.")[0]
