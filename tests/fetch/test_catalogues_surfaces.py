"""Catalogues through commands and HTTP: sources, dry runs, what changed, how fast a run is."""

from __future__ import annotations

import gzip
from types import SimpleNamespace

import pytest
from origin import Answer
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.fetch.cli.catalogues import finish_run
from headrace.fetch.cli.text import describe_run, duration, progress_line
from headrace.fetch.errors import RunUnfinished
from headrace.fetch.model import Customer, RunState, SampledPhoto
from headrace.fetch.sampling import expected_s
from headrace.fetch.store.runs import pace_of

HEAD = "id,name,price,photos\n"
NEVER = "0 0 1 1 *"


async def run_sql(shop, text: str, **values):
    return await shop.postgres.run(compile_query("test", f"-- Of a test.\n{text}"), **values)


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_sources_through_commands(command, shop):
    url = shop.origin.url("/shop.csv.gz")
    text = f"{HEAD}a,A,5,\nb,B,5,\n".encode()
    shop.origin.answers["/shop.csv.gz"] = [Answer(404), Answer(200, gzip.compress(text))]
    add = ("catalogue", "add", url, "--customer", "shop", "--cron", NEVER)
    code, told = await command(*add, "--tz", "Europe/Moscow")
    assert code == 0
    assert told.startswith(f"shop: {url} at '{NEVER}' Europe/Moscow, next ")
    assert (await command(*add, "--format", "pdf"))[0] == "fetch.unknown_format"
    for outcome in ("failed:http_404", "applied"):
        code, told = await command("catalogue", "bring", "shop")
        assert code == 0, told

        async def is_told(outcome=outcome):
            return outcome in (await command("catalogue", "ls"))[1]

        await wait_true(is_told, what=outcome)
    listed = (await command("catalogue", "ls", "--customer", "shop"))[1]
    assert "2 rows" in listed
    assert (await command("catalogue", "rm", "shop"))[0] == 0
    assert (await command("catalogue", "rm", "shop"))[0] == "fetch.source_unknown"
    assert (await command("catalogue", "bring", "shop"))[0] == "fetch.source_unknown"


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_url_is_run_like_a_file(command, shop):
    shop.origin.answers["/once.csv"] = [Answer(200, f"{HEAD}a,A,5,\n".encode())]
    url = shop.origin.url("/once.csv")
    code, told = await command("catalogue", "run", url, "--customer", "shop")
    assert code == 0, told
    assert "1 rows of csv: 1 new" in told
    none = shop.origin.url("/none.csv")
    told = (await command("catalogue", "run", none, "--customer", "shop"))[1]
    assert "refused (failed:http_404: the host responded 404)\n  no file fetched" in told
    refused = await command("catalogue", "run", "http://10.0.0.1/x", "--customer", "shop")
    assert refused[0] == "fetch.url_refused"


async def test_what_an_unfinished_run_waits_for_is_said(shop):
    terminal = SimpleNamespace(show=lambda *_: None)
    for photos, words in (
        ("", "to be published"),
        (shop.origin.url("/photo/1"), "for their photo"),
    ):
        run = await shop.run(f"{HEAD}a,A{photos},5,{photos}\n")
        with pytest.raises(RunUnfinished, match=f"1 items wait {words}"):
            finish_run(terminal, run, may_be_unfinished=False)


async def test_what_a_file_would_change_and_a_run_changed(command, shop):
    file = shop.folder / "new.csv"
    await shop.run(f"{HEAD}a,A,5,\nb,B,5,\nc,C,5,\n")
    file.write_text(f"{HEAD}a,A2,6,\nb,B,5,\nd,D,5,\n")
    code, told = await command("catalogue", "diff", str(file), "--customer", "shop")
    assert code == 0
    assert "1 new, 1 changed, 1 unchanged" in told
    assert [line.split() for line in told.splitlines()[-3:]] == [
        ["changed", "a:", "name,", "price"],
        ["gone", "c"],
        ["new", "d"],
    ]
    assert (await shop.fetch.items.get("shop", "a")).fields["name"] == "A"
    run = await shop.run(file.read_text())
    code, told = await command("catalogue", "diff", str(run.run), "--limit", "2")
    assert f"catalogue diff {run.run} --after=c" in told
    code, told = await command("catalogue", "diff", str(run.run), "--after", "c")
    assert told.splitlines()[-1].split() == ["new", "d"]
    assert (await command("catalogue", "diff", str(file)))[0] == "fetch.invalid_source"
    assert (await command("catalogue", "diff", "999999"))[0] == "fetch.run_unknown"


@pytest.mark.slow
async def test_a_dry_run_tries_some_photos_within_the_rate(client, command, shop):
    links = "|".join(shop.origin.url(f"/photo/{n}") for n in range(25))
    text = f"{HEAD}a,A,5,{links}\nb,B,5,{shop.origin.url('/none.jpg')}\n"
    dry = await client.post(
        "/v1/fetch/customers/shop/catalogues?dry_run=true", content=text.encode()
    )
    run = dry.json()
    assert (run["state"], run["photos_pending"]) == ("dry", 26)
    assert len(run["sample"]["photos"]) == 20
    assert shop.origin.statuses()[200] >= 19
    assert run["sample"]["expected_s"] >= 0
    lane = await shop.jobs.lanes.get("fetch", "shop")
    assert lane.starts_live == 20
    file = shop.folder / "dry.csv"
    file.write_text(text)
    code, told = await command("catalogue", "run", str(file), "--customer", "shop", "--dry-run")
    assert code == 0
    assert "sample of 20 photos:" in told
    assert "expected time of the real run: about" in told
    assert (await shop.fetch.runs.newest("shop"))[0].state is RunState.DRY
    found = (await client.get("/v1/fetch/runs")).json()["runs"]
    assert [one["state"] for one in found] == ["dry", "dry"]


async def test_a_dry_run_beyond_the_rate_samples_what_it_may(shop):
    await shop.fetch.customers.set("shop", starts_max=2, window_s=86_400, connections=1)
    links = "|".join(shop.origin.url(f"/photo/{n}") for n in range(5))
    dry = await shop.run(f"{HEAD}a,A,5,{links}\n", is_dry_run=True)
    assert len(dry.sample.photos) == 2
    assert dry.sample.expected_s == 5 * 86_400 / 2


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
def test_pace_is_told_where_it_is_known(paced, paced_s, pending, answer):
    """At most 10 photos a second are expected, the customer's rate."""
    assert pace_of(paced=paced, paced_s=paced_s, pending=pending, rate_per_s=10.0) == answer


def test_what_a_dry_run_expects():
    customer = Customer(customer="c", starts_max=600, window_s=60, connections=4)
    quick = [SampledPhoto(url="u", outcome="stored", text="", took_s=0.1)] * 5
    slow = [SampledPhoto(url="u", outcome="stored", text="", took_s=2.0)] * 5
    assert expected_s(1000, customer, []) == 100.0
    assert expected_s(1000, customer, quick) == 100.0
    assert expected_s(1000, customer, slow) == 500.0


def test_durations_are_said_as_people_do():
    assert [duration(s) for s in (0.4, 119, 120, 3600, 7200)] == [
        "0 s",
        "119 s",
        "2 min",
        "60 min",
        "2.0 h",
    ]


async def test_a_run_shows_its_pace_and_when_it_will_be_done(shop):
    await shop.fetch.customers.set("shop", starts_max=60, window_s=60, connections=5)
    links = "|".join(shop.origin.url(f"/photo/{n}") for n in range(30))
    run = await shop.run(f"{HEAD}a,A,5,{links}\n")
    assert (run.photos_per_s, run.eta_s) == (None, None)
    await run_sql(
        shop,
        "UPDATE headrace.fetch_run SET applied_at = now() - interval '100 s' WHERE id = :run",
        run=run.run,
    )
    await run_sql(
        shop,
        "INSERT INTO headrace.fetch_pace"
        " VALUES (:run, date_trunc('minute', now()) - interval '2 min', 50)",
        run=run.run,
    )
    paced = await shop.fetch.runs.get(run.run)
    assert paced.photos_per_s == pytest.approx(0.5, rel=0.05)
    assert paced.eta_s == pytest.approx(60, rel=0.05)
    assert "photos/s, done in" in progress_line(paced)
    assert "photos/s, done in" in describe_run(paced)


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_photos_decided_are_counted_by_minute(shop):
    links = "|".join(shop.origin.url(f"/photo/{n}") for n in range(7))
    run = await shop.run_to_end(f"{HEAD}a,A,5,{links}\n")
    text = "-- Paced.\nSELECT sum(photos)::integer FROM headrace.fetch_pace WHERE run_id = :run"
    assert await shop.postgres.value(compile_query("paced", text), run=run.run) == 7
