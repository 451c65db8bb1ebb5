"""HTTP and the command line: bad input, texts, idempotency, and errors that name a remedy."""

from __future__ import annotations

import gzip
import json
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import msgspec
import pytest
from click.testing import CliRunner
from origin import Answer
from room import HEAD, LIMITS

from headrace.fetch.cli.catalogues import finish_run
from headrace.fetch.cli.items import list_results
from headrace.fetch.cli.text import (
    describe_run,
    duration,
    progress_line,
    sources_table,
    webhooks_table,
)
from headrace.fetch.errors import InvalidRate, RunRefused, RunUnfinished
from headrace.fetch.model import Customer, RunState, SampledPhoto, Source, Webhook, parse_rate
from headrace.fetch.sampling import expected_s
from headrace.fetch.store.runs import pace_of
from headrace.web.tokens import Tokens

CATALOGUE = b"id,name,price,photos\na,A,5,\nb,B,five,\n"
CATALOGUES = "customers/shop/catalogues"
CARS = {"fields": {"year": {"type": "integer", "least": 1900, "required": True}}}
ITEM = {"customer": "shop", "item": "a"}
BAD = tomllib.loads(Path(__file__).with_name("bad_requests.toml").read_text())
TOO_MANY = [{**ITEM, "item": f"i{n}"} for n in range(1001)]


async def test_bad_input_has_its_status_and_code_and_no_effect(client, shop):
    async def send(method: str, path: str, body=None):
        options = {} if body is None else {"json": body}
        if isinstance(body, dict) and "text" in body:
            options = {"content": body["text"].encode()}
        return await client.request(method, f"/v1/fetch/{path}", **options)

    for method, path, status, code, *body in [
        *BAD["requests"],
        ["POST", "items", 422, "", TOO_MANY],
    ]:
        answer = await send(method, path, *body)
        at = (method, path, str(body)[:200])
        assert answer.status_code == status, (at, answer.text)
        assert answer.headers["content-type"].startswith("application/problem+json"), at
        problem = answer.json()
        assert problem["detail"], at
        assert code in ("", problem["code"]), (at, answer.text)
    states = {run.state for run in await shop.fetch.runs.newest()}
    assert states <= {RunState.REFUSED}
    for everything in (
        shop.fetch.schemas.all(),
        shop.fetch.mappings.all(),
        shop.fetch.sources.all(),
    ):
        assert await everything == []
    assert await shop.jobs.crons.all() == []
    [customer] = await shop.fetch.customers.all()
    assert (customer.customer, customer.hold_share, customer.hold_items) == ("shop", None, None)
    object.__setattr__(shop.fetch.config, "catalogue_max_bytes", 1000)
    answer = await send("POST", CATALOGUES, {"text": "x" * 5000})
    assert (answer.status_code, answer.json()["code"]) == (413, "fetch.catalogue_too_large")
    assert (await send("POST", CATALOGUES, {"text": CATALOGUE.decode()})).status_code == 202
    assert (await send("POST", "items", [{**ITEM, "item": "a\u200bb"}])).json()["runs"][0][
        "invalid"
    ]


async def test_a_call_without_a_token_or_scope_is_refused(client, postgres):
    reader = await Tokens(postgres).create("reader", ("fetch:read",))
    for token, status in (("", 401), (f"Bearer {reader.text}", 403)):
        headers = {"Authorization": token}
        answer = await client.post(f"/v1/fetch/{CATALOGUES}", content=CATALOGUE, headers=headers)
        assert answer.status_code == status


async def test_a_key_makes_a_call_once(client, shop):
    for path, options in ((CATALOGUES, {"content": CATALOGUE}), ("items", {"json": [ITEM]})):
        key = {"Idempotency-Key": path[:4]}
        answers = [await client.post(f"/v1/fetch/{path}", headers=key, **options) for _ in range(2)]
        first, again = answers
        assert (first.status_code, again.status_code) == (202, 202), first.text
        assert first.json() == again.json()
        assert again.headers["idempotency-replayed"] == "true"
    key = {"Idempotency-Key": CATALOGUES[:4]}
    other = await client.post(f"/v1/fetch/{CATALOGUES}", content=CATALOGUE + b"c", headers=key)
    assert other.json()["code"] == "web.idempotency_mismatch"
    assert len(await shop.fetch.runs.newest("shop")) == 2


async def test_shapes_of_responses(client, shop):
    unset = ("hold_share", "hold_items", "refresh_s", "webhook", "webhook_secret")
    made = await client.put("/v1/fetch/customers/web", json=LIMITS)
    assert made.json() == {"customer": "web", **LIMITS, **dict.fromkeys(unset)}
    shown = await client.get("/v1/fetch/customers/web")
    assert shown.json() == {"customer": "web", **LIMITS, **dict.fromkeys(unset[:3])}
    for rate, expected in (
        ({"rate": "600/m"}, (600, 60.0, 8)),
        ({"rate": "20/5s", "connections": 2}, (20, 5.0, 2)),
        ({"starts_max": 7}, (7, 60.0, 8)),
        ({"starts_max": 7, "window_s": 2}, (7, 2.0, 8)),
    ):
        answer = (await client.put("/v1/fetch/customers/x", json=rate)).json()
        assert (answer["starts_max"], answer["window_s"], answer["connections"]) == expected
    for query, body in (
        ("", CATALOGUE),
        ("", gzip.compress(CATALOGUE)),
        ("?format=ndjson", b'{"id": 1, "name": "A"}'),
        ("?file_name=x&dry_run=true", b'{"id": 1, "name": "A", "url": "https://a.example/1"}'),
    ):
        answer = await client.post(f"/v1/fetch/customers/web/catalogues{query}", content=body)
        assert answer.status_code == 202, answer.text
    empty = await client.get("/v1/fetch/results?after=0")
    assert empty.json() == {"results": [], "next_after": 0}
    document = (await client.get("/openapi.json")).json()
    upload = document["paths"]["/v1/fetch/customers/{customer}/catalogues"]["post"]
    assert upload["requestBody"]["required"]
    assert "text/csv" in upload["requestBody"]["content"]
    for path in ("/v1/fetch/study", "/v1/fetch/runs/{run}/errors"):
        found = document["paths"][path]["get"]["responses"]["200"]["content"]
        assert set(found) == {"application/json", "text/csv"}


async def test_a_webhook_shows_its_secret_once(client, receiver):
    path = "/v1/fetch/customers/shop"
    made = (await client.put(path, json={**LIMITS, "webhook": {"url": receiver.url}})).json()
    assert made["webhook_secret"].startswith("whsec_")
    again = (await client.put(path, json=LIMITS)).json()
    assert (again["webhook"], again["webhook_secret"]) == (receiver.url, None)
    shown = (await client.get(f"{path}/webhook")).json()
    assert not any("secret" in name for name in shown)
    assert (await client.get("/v1/fetch/webhooks?after=shop")).json() == {"webhooks": []}
    removed = await client.put(path, json={**LIMITS, "webhook": None})
    assert removed.json()["webhook"] is None


# Commands


async def test_commands_from_customer_to_confirmed_run(command, shop, tmp_path):
    assert await command("customer", "set", "cli", "--rate", "10/s", "--connections", "3") == (
        0,
        "cli: 10 requests in 1 s, 3 connections",
    )
    file = tmp_path / "c.csv"
    file.write_bytes(CATALOGUE)
    run = ("catalogue", "run", str(file), "--customer", "cli")
    code, text = await command(*run, "--no-wait")
    assert code == 0
    assert "1 new, 0 changed, 0 unchanged, 1 invalid" in text
    done = (await shop.fetch.runs.newest("cli"))[0]
    assert "price" in (await command("catalogue", "errors", str(done.run)))[1]
    assert (await command("run", "show", str(done.run)))[1] == describe_run(done)
    assert "c.csv" in (await command("run", "ls"))[1]
    assert "c.csv" not in (await command("catalogue", "ls"))[1]
    assert (await command(*run, "--wait", "0"))[0] == 0, "nothing changed, so there is no wait"
    file.write_bytes(CATALOGUE.replace(b"a,A,5", b"a,A2,5") + b"n,New,5,\n")
    code, text = await command("catalogue", "diff", str(file), "--customer", "cli")
    assert (code, [line.split() for line in text.splitlines()[-2:]]) == (
        0,
        [["changed", "a:", "name"], ["new", "n"]],
    )
    assert (await shop.fetch.items.get("cli", "a")).fields["name"] == "A"
    assert (await command(*run, "--wait", "0.1"))[0] == "fetch.run_unfinished"
    file.write_bytes(HEAD.encode())
    code, text = await command(*run)
    assert (code, "empty" in text) == ("fetch.run_held", True)
    held = str((await shop.fetch.runs.newest("cli"))[0].run)
    text = (await command("catalogue", "diff", held, "--limit", "1"))[1]
    assert "2 gone, if it is confirmed" in text
    assert f"catalogue diff {held} --after=a" in text
    assert (await command("catalogue", "confirm", held, "--no-wait"))[0] == 0
    assert (await shop.fetch.items.get("cli", "a")).is_gone
    code, text = await command("run", "undo", held, "--no-wait")
    assert (code, "2 new, 0 changed" in text) == (0, True)
    assert "undone by run" in (await command("run", "show", held))[1]
    undo = (await shop.fetch.runs.newest("cli"))[0].run
    listed = [line.split() for line in (await command("run", "ls"))[1].splitlines()]
    assert next(line for line in listed if line[0] == held)[-2:] == [str(undo), "c.csv"]


async def test_wrong_words_end_with_our_error(command, tmp_path):
    missing = str(tmp_path / "none")
    bad = tmp_path / "bad"
    bad.write_text('[{"customer": "shop"}]')
    for code, *words in BAD["commands"]:
        typed = [word.format(bad=bad, missing=missing) for word in words]
        assert (await command(*typed))[0] == code, words
    for content in (b"= =", b"{", b"fields = 5", "\N{SNOWMAN}".encode(), b"\xff\xff"):
        bad.write_bytes(content)
        for kind in ("schema", "mapping"):
            assert (await command(kind, "set", "x", str(bad)))[0] == f"fetch.invalid_{kind}"


async def test_texts_of_commands(command, shop, receiver, tmp_path):
    """What a person reads; the values are compared by the scenario."""
    link = "http://x.example/1.jpg"
    sent = tmp_path / "items.json"
    sent.write_text(json.dumps([{**ITEM, "photos": [link], "fields": {"name": "A"}}]))
    schema, mapping = tmp_path / "s.toml", tmp_path / "m.toml"
    schema.write_text('[fields.year]\ntype = "integer"\nleast = 1900\nrequired = true\n')
    mapping.write_text('format = "xml"\nrows = "a/b"\nid = ["@id", "code"]\n')
    refused = f"  photo {link}: refused:port"
    for words, text in (
        (("webhook", "ls"), "no webhooks"),
        (("customer", "set", "shop", "--webhook", receiver.url), "secret: whsec_"),
        (("webhook", "show", "shop"), receiver.url),
        (("webhook", "test", "shop"), "accepted, in"),
        (("webhook", "replay", "shop"), "0 results of shop"),
        (("customer", "ls"), "\nshop  "),
        (("webhook", "ls"), "\nshop  "),
        (("item", "send", str(sent)), "1 row of items: 1 new"),
        (("item", "show", "shop", "a"), f"a of shop: version 1, run 1\n  name: A\n{refused}"),
        (("schema", "set", "Used Cars", str(schema)), "Used Cars"),
        (("schema", "ls"), "\nUsed Cars  kept          year (integer, required)"),
        (("schema", "show", "used cars"), '"least": 1900'),
        (("mapping", "set", "feed", str(mapping)), "feed: xml, rows at a/b, id from @id or code"),
        (("mapping", "ls"), "\nfeed     xml     a/b      @id or code"),
        (("photo", shop.origin.url("/photo/1")), "a jpg of 64 x 48 pixels"),
        (("why", shop.origin.url("/photo/1")), "no run has requested it"),
        (("why", "http://u@example.com/"), "refused:userinfo"),
        (("why", "http://10.0.0.1/x.jpg"), "fetch.allow_networks"),
    ):
        code, found = await command(*words)
        assert (code, text in found) == (0, True), found
    assert (await shop.fetch.customers.get("shop")).connections == 50, "limits stay as they are"
    receiver.planned.append((500, {}))
    assert (await command("webhook", "test", "shop"))[0] == 1
    for url, text in (
        ("http://169.254.169.254/x", "refused:forbidden_address"),
        ("http://10.0.0.1/x", "fetch.allow_networks"),
        ("http://example.com:8081/x", "fetch.allow_ports"),
        ("ftp://example.com/x", "must start with http:// or https://"),
    ):
        code, found = await command("photo", url)
        assert (code, text in found) == (2, True), found


def test_the_lists_of_sources_and_webhooks_have_state_reason_and_next_time():
    at = datetime(2026, 11, 29, 8, 30, 5, tzinfo=UTC)
    source = Source(
        customer="shop",
        url="http://x.example/a.csv",
        cron="0 * * * *",
        tz="UTC",
        format=None,
        mapping=None,
        next_at=at,
        tried_at=at,
        outcome="failed:http_404",
        text="the host responded 404",
        run=7,
        failures=3,
    )
    new = msgspec.structs.replace(
        source, next_at=None, tried_at=None, outcome=None, text=None, run=None
    )
    head, failed, unused = sources_table([source, new]).splitlines()
    assert head.split("  ")[0] == "customer"
    ran = "2026-11-29 08:30:05  2026-11-29 08:30:05  failed:http_404  7    3"
    assert failed == f"shop      0 * * * * UTC  {ran}         {source.url}  {source.text}"
    assert unused.split()[-4:] == ["-", "-", "3", source.url]
    webhook = Webhook(
        customer="shop",
        url="http://x.example/hook",
        taken_seq=12_345,
        waiting=4,
        failures=2,
        failing_since=at,
        next_at=at + timedelta(minutes=1),
        last_at=at,
        last_status=500,
        last_error="status 500",
        disabled_at=None,
        old_until=None,
        created_at=at,
    )
    off = msgspec.structs.replace(webhook, disabled_at=at, next_at=None, last_error="status 410")
    rows = [line.split() for line in webhooks_table([webhook, off]).splitlines()[1:]]
    times = ["2026-11-29", "08:30:05", "2", "2026-11-29", "08:31:05"]
    rest = ["12345", "4", webhook.url, "status"]
    assert rows[0] == ["shop", "failing", *times, *rest, "500"]
    assert rows[1] == ["shop", "disabled", *times[:3], "-", *rest, "410"]


async def test_a_verbose_download_shows_each_request(origin, command):
    origin.answers["/a"] = [Answer(302, headers={"Location": "/photo/b"})]
    origin.answers["/silent"] = [Answer(raw=b"")]
    code, shown = await command("photo", origin.url("/a"), "--verbose")
    assert code == 0
    assert "status 302, connected in" in shown
    assert "status 200, kept connection" in shown
    assert "status" not in (await command("photo", origin.url("/photo/c")))[1]
    shown = (await command("photo", origin.url("/silent"), "--verbose"))[1]
    assert ("no byte received" in shown, "first byte" in shown) == (True, False)
    url = origin.url("/photo/d")
    await origin.close()
    code, shown = await command("photo", url, "--verbose")
    assert (code, "first byte" in shown) == (1, False)
    assert "no response, no connection, no request was sent" in shown


async def test_an_error_names_its_remedy(client):
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


# Progress, pace and dry runs


async def test_an_unfinished_run_names_what_it_waits_for(shop):
    terminal = SimpleNamespace(show=lambda *_: None)
    for photos, words in (("", "to be published"), (shop.urls("/photo/1"), "for their photo")):
        run = await shop.run(f"{HEAD}a,A{photos},5,{photos}\n")
        with pytest.raises(RunUnfinished, match=f"1 item waits {words}"):
            finish_run(terminal, run, may_be_unfinished=False)


async def test_a_refused_run_ends_its_command_with_an_error(shop):
    run = await shop.run(f"{HEAD}a,A,5,\n")
    refused = msgspec.structs.replace(run, state=RunState.REFUSED, reason="failed:http_404")
    terminal = SimpleNamespace(show=lambda *_: None)
    with pytest.raises(RunRefused, match="http_404") as raised:
        finish_run(terminal, refused, may_be_unfinished=False)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("words", [["--cursor", "5"], ["--newest", "--after", "5"]])
def test_options_of_results_that_do_not_go_together_are_refused(words):
    ran = CliRunner().invoke(list_results, words, obj=None)
    assert ran.exit_code == 2


@pytest.mark.slow
async def test_a_dry_run_samples_photos_within_the_rate(client, command, shop):
    links = shop.urls(*(f"/photo/{n}" for n in range(25)))
    text = f"{HEAD}a,A,5,{links}\nb,B,5,{shop.urls('/none.jpg')}\n"
    path = f"/v1/fetch/{CATALOGUES}?dry_run=true"
    run = (await client.post(path, content=text.encode())).json()
    assert (run["state"], run["photos_pending"]) == ("dry", 26)
    assert len(run["sample"]["photos"]) == 20
    assert shop.origin.statuses()[200] >= 19
    assert run["sample"]["expected_s"] >= 0
    # One token for each request; a request that is late on a busy machine costs a second one.
    assert 20 <= (await shop.jobs.lanes.get("fetch", "shop")).starts_live <= 40
    file = shop.folder / "dry.csv"
    file.write_text(text)
    code, found = await command("catalogue", "run", str(file), "--customer", "shop", "--dry-run")
    assert code == 0
    assert "sample of 20 photos:" in found
    assert "expected time of the real run: about" in found
    await shop.fetch.customers.set("shop", starts_max=2, window_s=86_400, connections=1)
    dry = await shop.run(
        f"{HEAD}a,A,5,{shop.urls(*(f'/photo/{n}' for n in range(5)))}\n", is_dry_run=True
    )
    assert (len(dry.sample.photos), dry.sample.expected_s) == (0, 5 * 86_400 / 2)


@pytest.mark.parametrize(
    ("paced", "paced_s", "pending", "answer"),
    [
        (None, None, 10, (None, None)),
        (10.0, 2.0, 10, (None, None)),
        (0.0, 60.0, 10, (0.0, None)),
        (120.0, 60.0, 30, (2.0, 15.0)),
        (6000.0, 60.0, 30, (100.0, 3.0)),
        (120.0, 60.0, 0, (2.0, 0.0)),
    ],
)
def test_the_pace_of_a_run(paced, paced_s, pending, answer):
    """At most 10 photos a second are expected, the customer's rate."""
    assert pace_of(paced=paced, paced_s=paced_s, pending=pending, rate_per_s=10.0) == answer


def test_the_expected_time_of_a_run_and_how_it_is_written():
    customer = Customer(customer="c", starts_max=600, window_s=60, connections=4)
    quick = [SampledPhoto(url="u", outcome="stored", text="", took_s=0.1)] * 5
    slow = [SampledPhoto(url="u", outcome="stored", text="", took_s=2.0)] * 5
    found = [expected_s(1000, customer, sample) for sample in ([], quick, slow)]
    assert found == [100.0, 100.0, 500.0]
    texts = [duration(s) for s in (0.4, 119, 120, 3600, 7200)]
    assert texts == ["0 s", "119 s", "2 min", "60 min", "2.0 h"]


async def test_a_run_shows_its_pace_and_when_it_will_be_done(shop):
    await shop.fetch.customers.set("shop", starts_max=60, window_s=60, connections=5)
    run = await shop.run(f"{HEAD}a,A,5,{shop.urls(*(f'/photo/{n}' for n in range(30)))}\n")
    assert (run.photos_per_s, run.eta_s) == (None, None)
    await shop.sql("UPDATE #fetch_run SET applied_at = now() - interval '100 s'")
    await shop.sql(
        "INSERT INTO #fetch_pace VALUES (:run, date_trunc('minute', now()) - interval '2 min', 50)",
        run=run.run,
    )
    paced = await shop.fetch.runs.get(run.run)
    assert paced.photos_per_s == pytest.approx(0.5, rel=0.05)
    assert paced.eta_s == pytest.approx(60, rel=0.05)
    assert "photos/s, done in" in progress_line(paced)
    assert "photos/s, done in" in describe_run(paced)


# Schemas and mappings in runs


async def test_a_run_judges_rows_by_their_category_and_reads_by_a_mapping(
    shop, client, command, tmp_path
):
    category = "Home > A/B? & 100% Лампы"
    path = "/v1/fetch/schemas/" + quote(category, safe="")
    assert (await client.put(path, json=CARS)).json()["category"] == category
    head = "id,name,category,year\n"
    text = f"a,A,{category},1850\nb,B,{category.lower()},\nc,C,boats,1850\nd,D,{category},2 000\n"
    run = await shop.run(head + text)
    assert (run.new, run.invalid) == (2, 2)
    assert await shop.problems(run) == [("a", "year", "too_small"), ("b", "year", "missing")]
    texts = [p.text for _, p in await shop.fetch.reports.problems(run.run)]
    assert texts == [
        "the field year is 1850, the minimum is 1900",
        "the field year is missing: fill it in",
    ]
    assert (await shop.fetch.items.get("shop", "d")).fields["year"] == "2000"
    sheet = {"id": "Code", "name": "Caption", "photos": ["Pic 1", "Pic 2"], "others": "drop"}
    assert (await client.put("/v1/fetch/mappings/sheet", json=sheet)).status_code == 200
    table = "Code;Caption;Pic 2;Pic 1;Junk\n" + "".join(
        f"{one};Table;ftp://x/2;ftp://x/1;j\n" for one in ("7", "c", "d")
    )
    run = await shop.run(table, mapping="sheet")
    assert (run.format, run.new) == ("csv", 1)
    item = await shop.fetch.items.get("shop", "7")
    assert (item.fields, [photo.url for photo in item.photos]) == (
        {"name": "Table"},
        ["ftp://x/1", "ftp://x/2"],
    )
    answer = await client.post(f"/v1/fetch/{CATALOGUES}?mapping=sheet", content=table)
    assert answer.json()["unchanged"] == 3
    file = tmp_path / "sheet.csv"
    file.write_text(table)
    words = ("catalogue", "run", str(file), "--customer", "shop", "--no-wait")
    assert "3 unchanged" in (await command(*words, "--mapping", "sheet"))[1]
    assert (await command(*words))[0] == "fetch.not_a_catalogue"
