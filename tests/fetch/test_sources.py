"""A real worker fetches catalogues by URL from a loopback host, on a schedule or once."""

from __future__ import annotations

import gzip

import pytest
from origin import Answer
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.fetch import FetchConfig
from headrace.fetch.errors import CustomerUnknown, SourceUnknown, UnknownFormat, UrlRefused
from headrace.fetch.model import LIMITER, RunState
from headrace.fetch.sources import cron_name, shown_name
from headrace.fetch.sql import SQL
from headrace.jobs.errors import CronUnknown, InvalidCron

HEAD = "id,name,price,photos\n"
TEXT = f"{HEAD}a,A,5,\nb,B,5,\n".encode()
NEVER = "0 0 1 1 *"
pytestmark = pytest.mark.slow


async def add(shop, path="/shop.csv", **options):
    return await shop.fetch.sources.set("shop", url=shop.origin.url(path), cron=NEVER, **options)


async def bring(shop):
    """The source when its file was asked for once more."""
    before = await shop.fetch.sources.get("shop")
    await shop.fetch.sources.bring("shop")

    async def ask():
        found = await shop.fetch.sources.get("shop")
        return found if found.tried_at != before.tried_at else None

    return await wait_true(ask, what="the file asked for")


async def ended(shop, run):
    async def ask():
        found = await shop.fetch.runs.get(run.run)
        waits = (RunState.BRINGING, RunState.READING)
        return found if found.state not in waits else None

    return await wait_true(ask, what=f"run {run.run} read")


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (TEXT, {}),
        (gzip.compress(TEXT), {"Content-Type": "application/gzip"}),
        (gzip.compress(TEXT), {"Content-Encoding": "gzip"}),
    ],
    ids=["plain", "gz file", "gzip body"],
)
async def test_a_file_is_brought_and_run_as_if_it_were_uploaded(shop, body, headers):
    shop.origin.answers["/shop.csv"] = [Answer(200, body, headers)]
    made = await add(shop)
    assert (made.tried_at, made.outcome, made.next_at.month) == (None, None, 1)
    found = await bring(shop)
    assert (found.outcome, found.failures) == ("applied", 0)
    run = await shop.fetch.runs.get(found.run)
    assert (run.new, run.file_name) == (2, shop.origin.url("/shop.csv"))
    assert shop.origin.headers["/shop.csv"]["accept"] == "*/*"
    assert (await shop.jobs.lanes.get(LIMITER, "shop")).starts_live == 1


@pytest.mark.usefixtures("worker")
async def test_a_file_that_did_not_change_asks_only_links_that_are_due(shop):
    text = f"{HEAD}a,A,5,{shop.origin.url('/late.jpg')}\nb,B,5,\n".encode()
    shop.origin.answers["/shop.csv"] = [
        Answer(200, text, {"ETag": '"1"'}),
        Answer(304, headers={"ETag": '"1"'}),
    ]
    shop.origin.answers["/late.jpg"] = [Answer(404)]
    await add(shop)
    first = await bring(shop)
    await shop.wait_done(await shop.fetch.runs.get(first.run))
    again = await bring(shop)
    assert again.outcome == "unchanged"
    assert shop.origin.headers["/shop.csv"]["if-none-match"] == '"1"'
    run = await shop.fetch.runs.get(again.run)
    assert (run.format, run.rows, run.gone) == ("same", 0, 0)
    # It failed in the run before, so it sits out this one and is asked by the next.
    last = await bring(shop)
    await shop.wait_done(await shop.fetch.runs.get(last.run))
    assert shop.origin.requests("/late.jpg") == [404, 404]
    assert shop.origin.requests("/shop.csv") == [200, 304, 304]
    assert not (await shop.fetch.items.get("shop", "b")).is_gone


@pytest.mark.usefixtures("worker")
async def test_the_same_bytes_without_validators_are_not_read_again(shop):
    shop.origin.answers["/shop.csv"] = [Answer(200, TEXT)]
    await add(shop)
    await bring(shop)
    assert (await bring(shop)).outcome == "unchanged"
    assert (await bring(shop)).outcome == "unchanged"
    idle = [run for run in await shop.fetch.runs.newest("shop") if run.format == "same"]
    assert len(idle) == 1, "of runs that had nothing to do the last one is kept"


@pytest.mark.usefixtures("worker")
async def test_validators_are_sent_only_while_they_say_something(shop):
    shop.origin.answers["/shop.csv"] = [Answer(200, TEXT, {"ETag": '"1"'})]
    await add(shop)
    await bring(shop)
    await shop.run(f"{HEAD}a,Uploaded,5,\n")
    found = await bring(shop)
    assert "if-none-match" not in shop.origin.headers["/shop.csv"]
    assert found.outcome == "applied"
    assert (await shop.fetch.items.get("shop", "a")).fields["name"] == "A"
    await bring(shop)
    assert shop.origin.headers["/shop.csv"]["if-none-match"] == '"1"'
    await add(shop, "/shop.csv?v=2")
    shop.origin.answers["/shop.csv?v=2"] = [Answer(200, TEXT)]
    await bring(shop)
    assert "if-none-match" not in shop.origin.headers["/shop.csv?v=2"]


@pytest.mark.usefixtures("worker")
async def test_an_alarming_file_is_held_each_time_until_a_better_one_comes(shop):
    rows = "".join(f"i{n},Item {n},5,\n" for n in range(20))
    shop.origin.answers["/shop.csv"] = [
        Answer(200, (HEAD + rows).encode(), {"ETag": '"1"'}),
        Answer(200, TEXT, {"ETag": '"2"'}),
        Answer(200, TEXT, {"ETag": '"2"'}),
    ]
    await add(shop)
    await bring(shop)
    held = await bring(shop)
    assert held.outcome == "held"
    assert held.text.startswith("shrunk")
    assert (await bring(shop)).outcome == "held"
    assert "if-none-match" not in shop.origin.headers["/shop.csv"]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(404), "failed:http_404"),
        (Answer(200, b"hello\n"), "refused:not_a_catalogue"),
        (Answer(200, f"{HEAD}a,A,5,\n".encode() + b"b,\xff\xff,5,\n"), "refused:catalogue_broken"),
        (Answer(302, headers={"Location": "http://10.0.0.1/x"}), "refused:forbidden_address"),
    ],
)
async def test_what_asking_again_cannot_mend_waits_for_the_schedule(shop, answer, outcome):
    shop.origin.answers["/shop.csv"] = [answer, Answer(200, TEXT)]
    await add(shop)
    failed = await bring(shop)
    assert (failed.outcome, failed.failures) == (outcome, 1)
    assert failed.text
    status = await shop.jobs.queues.get("fetch.catalogue")
    assert status.scheduled == 0
    mended = await bring(shop)
    assert (mended.outcome, mended.failures) == ("applied", 0)


@pytest.mark.usefixtures("worker")
async def test_a_passing_fault_is_tried_again_with_backoff(shop):
    shop.origin.answers["/shop.csv"] = [Answer(503), Answer(200, TEXT)]
    await add(shop)
    failed = await bring(shop)
    assert (failed.outcome, failed.failures) == ("failed:http_503", 1)

    async def scheduled():
        return (await shop.jobs.queues.get("fetch.catalogue")).scheduled == 1

    await wait_true(scheduled, what="another try")
    await due_now(shop)

    async def applied():
        return (await shop.fetch.sources.get("shop")).outcome == "applied"

    await wait_true(applied, what="the second try")


async def due_now(shop):
    """Let jobs that wait for their next try be due."""
    text = "-- Due.\nUPDATE headrace.job_ready SET run_at = now() WHERE run_at > now()"
    await shop.postgres.run(compile_query("due", text))


@pytest.mark.usefixtures("worker")
async def test_a_file_is_brought_once(shop):
    shop.origin.answers["/once.csv?key=secret"] = [Answer(200, TEXT)]
    run = await shop.fetch.bring_catalogue("shop", shop.origin.url("/once.csv?key=secret"))
    assert run.state is RunState.BRINGING
    assert "secret" not in run.file_name
    found = await ended(shop, run)
    assert (found.state, found.new, found.format) == (RunState.APPLIED, 2, "csv")
    for path, answer, word in (
        ("/none.csv", Answer(404), "failed:http_404"),
        ("/bad.csv", Answer(200, b"hello\n"), "first line"),
    ):
        shop.origin.answers[path] = [answer]
        run = await shop.fetch.bring_catalogue("shop", shop.origin.url(path))
        found = await ended(shop, run)
        assert found.state is RunState.REFUSED
        assert word in found.reason
    with pytest.raises(SourceUnknown):
        await shop.fetch.sources.get("shop")


@pytest.mark.usefixtures("worker")
async def test_a_dry_run_of_a_url_changes_nothing(shop):
    text = f"{HEAD}a,A,5,{shop.origin.url('/photo/1')}|{shop.origin.url('/none.jpg')}\n"
    shop.origin.answers["/once.csv"] = [Answer(200, text.encode())]
    run = await shop.fetch.bring_catalogue("shop", shop.origin.url("/once.csv"), is_dry_run=True)
    found = await ended(shop, run)
    assert (found.state, found.new, found.photos_pending) == (RunState.DRY, 1, 2)
    tried = {photo.url[-6:]: photo.outcome for photo in found.sample.photos}
    assert tried == {"hoto/1": "stored", "ne.jpg": "failed:http_404"}
    assert found.sample.expected_s >= 0
    assert (await shop.fetch.runs.newest("shop"))[0].items_pending == 0


async def test_a_file_over_the_bound_is_refused(shop, process):
    shop.origin.answers["/shop.csv"] = [Answer(200, TEXT + b" " * 5000)]
    await add(shop)
    small = FetchConfig(
        allow_networks=("127.0.0.0/8",), allow_ports=(shop.origin.port,), catalogue_max_bytes=1000
    )
    async with process(config=small):
        assert (await bring(shop)).outcome == "refused:too_large"


async def test_a_file_is_never_brought_twice_at_once(shop, database_url, process):
    shop.origin.answers["/shop.csv"] = [Answer(200, TEXT)]
    await add(shop)
    other = Postgres(database_url, PostgresConfig())
    try:
        async with other.session() as session, process():
            assert await session.value(SQL.try_lock_source, customer="shop")
            once = await shop.fetch.bring_catalogue("shop", shop.origin.url("/shop.csv"))
            await shop.fetch.sources.bring("shop")

            async def waits():
                status = await shop.jobs.queues.get("fetch.catalogue")
                return status.scheduled == 1 and not status.ready + status.leased

            await wait_true(waits, what="the file ordered to wait, the other to be left out")
            assert shop.origin.log == []
        async with process():
            await due_now(shop)
            assert (await ended(shop, once)).new == 2
    finally:
        await other.close()


@pytest.mark.usefixtures("worker")
async def test_a_source_that_was_removed_is_asked_no_more(shop):
    await add(shop)
    await shop.fetch.sources.bring("shop")
    await shop.fetch.sources.remove("shop")
    with pytest.raises(CronUnknown):
        await shop.jobs.crons.get(cron_name("shop"))
    with pytest.raises(SourceUnknown):
        await shop.fetch.sources.remove("shop")
    assert await shop.fetch.sources.all() == []


async def test_what_cannot_be_meant_is_refused_and_nothing_is_kept(shop):
    url = shop.origin.url("/shop.csv")
    for error, changes in (
        (CustomerUnknown, {"customer": "nobody"}),
        (UrlRefused, {"url": "http://10.0.0.1/x.csv"}),
        (UrlRefused, {"url": "file:///etc/passwd"}),
        (InvalidCron, {"cron": "now and then"}),
        (InvalidCron, {"tz": "Mars/Base"}),
        (UnknownFormat, {"format_name": "pdf"}),
    ):
        given = {"customer": "shop", "url": url, "cron": NEVER, **changes}
        with pytest.raises(error):
            await shop.fetch.sources.set(given.pop("customer"), **given)
    assert await shop.fetch.sources.all() == []
    assert await shop.jobs.crons.all() == []


async def test_a_source_is_replaced_with_its_cron(shop):
    await add(shop)
    changed = await shop.fetch.sources.set(
        "shop", url=shop.origin.url("/b.csv"), cron="*/5 * * * *", tz="Europe/Moscow"
    )
    (cron,) = await shop.jobs.crons.all()
    assert (cron.spec, cron.tz, cron.payload) == (
        "*/5 * * * *",
        "Europe/Moscow",
        {"customer": "shop"},
    )
    assert changed.url.endswith("/b.csv")
    assert (await shop.fetch.sources.all()) == [changed]


async def test_a_source_that_rests_goes_on_resting_when_it_is_set_anew(shop):
    await add(shop)
    await shop.jobs.crons.pause("fetch:shop")
    found = await shop.fetch.sources.set(
        "shop", url=shop.origin.url("/b.csv"), cron="*/5 * * * *", tz="UTC"
    )
    assert found.next_at is None
    (cron,) = await shop.jobs.crons.all()
    assert (cron.paused, cron.spec) == (True, "*/5 * * * *")


def test_names_of_crons_and_files_are_bounded():
    assert cron_name("shop") == "fetch:shop"
    assert len(cron_name("x" * 128)) <= 128
    assert cron_name("x" * 128) != cron_name("x" * 127 + "y")
    assert shown_name("https://x.example/a.csv?token=1#x") == "https://x.example/a.csv"


@pytest.mark.usefixtures("worker")
async def test_through_http(client, shop):
    shop.origin.answers["/shop.csv"] = [Answer(200, TEXT)]
    path = "/v1/fetch/customers/shop/catalogues"
    url = shop.origin.url("/shop.csv")
    made = await client.post(path, json={"url": url, "cron": NEVER})
    assert made.status_code == 202, made.text
    assert (made.json()["url"], made.json()["cron"]) == (url, NEVER)
    assert (await client.get("/v1/fetch/sources")).json() == {"sources": [made.json()]}
    key = {"Idempotency-Key": "one"}
    once = await client.post(path, json={"url": url}, headers=key)
    again = await client.post(path, json={"url": url}, headers=key)
    assert once.json()["state"] == "bringing"
    assert again.json() == once.json()
    assert (await ended(shop, await shop.fetch.runs.get(once.json()["run"]))).new == 2
    bad = await client.post(path, json={"url": url, "cron": NEVER, "typo": 1})
    assert (bad.status_code, bad.json()["code"]) == (422, "fetch.invalid_source")
    assert (await client.delete("/v1/fetch/customers/shop/source")).status_code == 204
    gone = await client.get("/v1/fetch/customers/shop/source")
    assert (gone.status_code, gone.json()["code"]) == (404, "fetch.source_unknown")


async def test_an_upload_with_a_key_is_run_once(client, shop):
    path = "/v1/fetch/customers/shop/catalogues"
    key = {"Idempotency-Key": "one"}
    first = await client.post(path, content=TEXT, headers=key)
    again = await client.post(path, content=TEXT, headers=key)
    assert first.status_code == again.status_code == 202, first.text
    assert first.json() == again.json()
    assert first.json()["state"] == "applied"
    other = await client.post(path, content=TEXT + b"c,C,5,\n", headers=key)
    assert other.json()["code"] == "web.idempotency_mismatch"
    assert len(await shop.fetch.runs.newest("shop")) == 1
