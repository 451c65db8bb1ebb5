"""Catalogues fetched by URL, on a schedule or once, by a real worker from a loopback host."""

from __future__ import annotations

import gzip

import pytest
from origin import Answer, redirect
from room import HEAD, rows
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.fetch import FetchConfig
from headrace.fetch.errors import CustomerUnknown, SourceUnknown, UnknownFormat, UrlRefused
from headrace.fetch.model import LIMITER, RunState
from headrace.fetch.sources import cron_name, shown_name
from headrace.fetch.sql import SQL
from headrace.jobs.errors import CronUnknown, InvalidCron

TEXT = f"{HEAD}a,A,5,\nb,B,5,\n".encode()
NEVER = "0 0 1 1 *"
pytestmark = pytest.mark.slow


class Source:
    """The source of customer `shop`: `bring` fetches the next of `answers` and waits for it."""

    def __init__(self, shop) -> None:
        self.shop = shop

    async def add(self, path="/shop.csv", **options):
        url = self.shop.origin.url(path)
        return await self.shop.fetch.sources.set("shop", url=url, cron=NEVER, **options)

    async def bring(self, *answers: Answer, path="/shop.csv"):
        if answers:
            self.shop.origin.answers[path] = list(answers)
        before = await self.shop.fetch.sources.get("shop")
        await self.shop.fetch.sources.bring("shop")

        async def is_over():
            found = await self.shop.fetch.sources.get("shop")
            return found if found.tried_at != before.tried_at else None

        return await wait_true(is_over, what="the file is fetched")

    async def once(self, path: str, answer: Answer, **options):
        """The ended run of a file that is fetched once."""
        self.shop.origin.answers[path] = [answer]
        url = self.shop.origin.url(path)
        return await self.ended(await self.shop.fetch.bring_catalogue("shop", url, **options))

    async def ended(self, run):
        async def is_over():
            found = await self.shop.fetch.runs.get(run.run)
            waits = (RunState.BRINGING, RunState.READING)
            return found if found.state not in waits else None

        return await wait_true(is_over, what=f"run {run.run} is read")

    def header(self, name: str, path="/shop.csv") -> str | None:
        """A header of the last request."""
        return self.shop.origin.headers[path].get(name)


@pytest.fixture
async def source(shop):
    """The source, at a time that never comes."""
    source = Source(shop)
    await source.add()
    return source


@pytest.mark.usefixtures("worker")
async def test_a_file_is_fetched_and_run_as_if_it_were_uploaded(shop, source):
    packed = gzip.compress(TEXT)
    found = await source.bring(Answer(200, TEXT))
    assert (found.outcome, found.failures, found.next_at.month) == ("applied", 0, 1)
    run = await shop.fetch.runs.get(found.run)
    assert (run.new, run.file_name) == (2, shop.origin.url("/shop.csv"))
    assert source.header("accept") == "*/*"
    assert (await shop.jobs.lanes.get(LIMITER, "shop")).starts_live == 1
    for number, headers in enumerate(
        ({"Content-Type": "application/gzip"}, {"Content-Encoding": "gzip"})
    ):
        path = f"/packed{number}"
        await source.add(path)
        found = await source.bring(Answer(200, packed, headers), path=path)
        assert found.outcome in ("applied", "done")
        assert (await shop.fetch.runs.get(found.run)).unchanged == 2


@pytest.mark.usefixtures("worker")
async def test_an_unchanged_file_requests_only_links_that_are_due(shop, source):
    text = f"{HEAD}a,A,5,{shop.origin.url('/late.jpg')}\nb,B,5,\n".encode()
    etag = {"ETag": '"1"'}
    shop.origin.answers["/late.jpg"] = [Answer(404)]
    first = await source.bring(Answer(200, text, etag), Answer(304, headers=etag))
    await shop.wait_done(await shop.fetch.runs.get(first.run))
    again = await source.bring()
    assert (again.outcome, source.header("if-none-match")) == ("unchanged", '"1"')
    run = await shop.fetch.runs.get(again.run)
    assert (run.format, run.rows, run.gone) == ("same", 0, 0)
    # The link failed in the run before, so it skips this run.
    last = await source.bring()
    await shop.wait_done(await shop.fetch.runs.get(last.run))
    assert shop.origin.requests("/late.jpg") == [404, 404]
    assert shop.origin.requests("/shop.csv") == [200, 304, 304]
    assert not (await shop.fetch.items.get("shop", "b")).is_gone


@pytest.mark.usefixtures("worker")
async def test_validators_are_sent_only_while_they_apply(shop, source):
    for outcome in ("applied", "unchanged", "unchanged"):
        assert (await source.bring(Answer(200, TEXT))).outcome == outcome, "without validators"
    idle = [run for run in await shop.fetch.runs.newest("shop") if run.format == "same"]
    assert len(idle) == 1, "only the last idle run is kept"
    await source.bring(Answer(200, TEXT + b"c,C,5,\n", {"ETag": '"1"'}))
    await shop.run(f"{HEAD}a,Uploaded,5,\n")
    found = await source.bring()
    assert (found.outcome, source.header("if-none-match")) == ("applied", None)
    assert (await shop.fetch.items.get("shop", "a")).fields["name"] == "A"
    await source.bring()
    assert source.header("if-none-match") == '"1"'
    await source.add("/shop.csv?v=2")
    await source.bring(Answer(200, TEXT), path="/shop.csv?v=2")
    assert source.header("if-none-match", "/shop.csv?v=2") is None


@pytest.mark.usefixtures("worker")
async def test_a_held_file_is_held_each_time_and_an_undone_one_is_not_applied_again(shop, source):
    tagged = [{"ETag": f'"{n}"'} for n in range(3)]
    await source.bring(Answer(200, (HEAD + rows(30)).encode(), tagged[0]))
    for _ in range(2):
        held = await source.bring(Answer(200, TEXT, tagged[1]))
        assert (held.outcome, held.text[:6]) == ("held", "shrunk")
    assert source.header("if-none-match") is None
    smaller = Answer(200, (HEAD + rows(20)).encode(), tagged[2])
    bad = await source.bring(smaller)
    await shop.fetch.runs.undo(bad.run)
    assert (await source.bring()).outcome == "unchanged"
    assert not (await shop.fetch.items.get("shop", "i025")).is_gone
    assert (await source.bring(Answer(200, (HEAD + rows(25)).encode()))).outcome == "applied"
    assert (await shop.fetch.items.get("shop", "i025")).is_gone


@pytest.mark.usefixtures("worker")
async def test_a_fault_waits_for_the_schedule_or_for_its_backoff(shop, source):
    cut = f"HTTP/1.1 200 OK\r\nContent-Length: {len(TEXT)}\r\n\r\n".encode() + TEXT[:-9]
    bad_row = f"{HEAD}a,A,5,\n".encode() + b"b,\xff\xff,5,\n"
    inward = redirect("http://10.0.0.1/x")
    for failures, (answer, outcome, is_temporary) in enumerate(
        (
            (Answer(404), "failed:http_404", False),
            (Answer(200, b"hello\n"), "refused:not_a_catalogue", False),
            (Answer(200, bad_row), "refused:catalogue_broken", False),
            (inward, "refused:forbidden_address", False),
            (Answer(raw=cut), "failed:truncated", True),
            (Answer(503), "failed:http_503", True),
        ),
        1,
    ):
        found = await source.bring(answer)
        assert (found.outcome, found.failures) == (outcome, failures)
        assert found.text

        async def waiting(count=int(is_temporary)):
            status = await shop.jobs.queues.get("fetch.catalogue")
            return (status.ready + status.leased, status.scheduled) == (0, count)

        await wait_true(waiting, what=f"the next try of {outcome}")
        assert await shop.count("fetch_item") == 0
        if outcome == "failed:truncated":
            await shop.sql("DELETE FROM #job_ready WHERE run_at > now()")
    shop.origin.answers["/shop.csv"] = [Answer(200, TEXT)]
    await shop.due_now()

    async def is_applied():
        found = await shop.fetch.sources.get("shop")
        return (found.outcome, found.failures) == ("applied", 0)

    await wait_true(is_applied, what="the next try succeeds")


@pytest.mark.usefixtures("worker")
async def test_a_file_is_fetched_once(shop):
    source = Source(shop)
    found = await source.once("/once.csv?key=secret", Answer(200, TEXT))
    assert "secret" not in found.file_name
    assert (found.state, found.new, found.format) == (RunState.APPLIED, 2, "csv")
    for path, answer, words in (
        ("/none.csv", Answer(404), "failed:http_404"),
        ("/bad.csv", Answer(200, b"hello\n"), "first line"),
    ):
        found = await source.once(path, answer)
        assert (found.state, words in found.reason) == (RunState.REFUSED, True)
    text = f"{HEAD}a,A,5,{shop.urls('/photo/1', '/none.jpg')}\n"
    found = await source.once("/dry.csv", Answer(200, text.encode()), is_dry_run=True)
    assert (found.state, found.changed, found.photos_pending) == (RunState.DRY, 1, 2)
    outcomes = {photo.url[-6:]: photo.outcome for photo in found.sample.photos}
    assert outcomes == {"hoto/1": "stored", "ne.jpg": "failed:http_404"}
    with pytest.raises(SourceUnknown):
        await shop.fetch.sources.get("shop")


async def test_a_file_over_the_limit_is_refused(shop, source, process):
    small = FetchConfig(
        allow_networks=("127.0.0.0/8",), allow_ports=(shop.origin.port,), catalogue_max_bytes=1000
    )
    async with process(config=small):
        found = await source.bring(Answer(200, TEXT + b" " * 5000))
    assert found.outcome == "refused:too_large"


async def test_a_file_is_never_fetched_twice_at_once(shop, source, database_url, process):
    shop.origin.answers["/shop.csv"] = [Answer(200, TEXT)]
    other = Postgres(database_url, PostgresConfig())
    async with other.session() as session, process():
        assert await session.value(SQL.try_lock_source, customer="shop", is_supplemental=False)
        once = await shop.fetch.bring_catalogue("shop", shop.origin.url("/shop.csv"))
        await shop.fetch.sources.bring("shop")

        async def is_waiting():
            status = await shop.jobs.queues.get("fetch.catalogue")
            return status.scheduled == 1 and not status.ready + status.leased

        await wait_true(is_waiting, what="one waits, the other is dropped")
        assert shop.origin.log == []
    await other.close()
    async with process():
        await shop.due_now()
        assert (await source.ended(once)).new == 2


async def test_settings_of_a_source(shop):
    """Invalid ones are refused, a changed one keeps its pause, a removed one is not fetched."""
    sources, url = shop.fetch.sources, shop.origin.url("/shop.csv")
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
            await sources.set(given.pop("customer"), **given)
    assert (await sources.all(), await shop.jobs.crons.all()) == ([], [])
    await Source(shop).add()
    await shop.jobs.crons.pause("fetch:shop")
    changed = await sources.set("shop", url=f"{url}?b", cron="*/5 * * * *", tz="Europe/Moscow")
    assert (changed.next_at, await sources.all()) == (None, [changed])
    (cron,) = await shop.jobs.crons.all()
    assert (cron.spec, cron.tz, cron.paused) == ("*/5 * * * *", "Europe/Moscow", True)
    assert cron.payload == {"customer": "shop"}
    await sources.bring("shop")
    await sources.remove("shop")
    with pytest.raises(CronUnknown):
        await shop.jobs.crons.get(cron_name("shop"))
    with pytest.raises(SourceUnknown):
        await sources.remove("shop")
    assert len(cron_name("x" * 128)) <= 128
    assert cron_name("x" * 128) != cron_name("x" * 127 + "y")
    assert shown_name("https://x.example/a.csv?token=1#x") == "https://x.example/a.csv"


@pytest.mark.usefixtures("worker")
async def test_sources_through_http_and_commands(client, command, shop):
    path, url = "/v1/fetch/customers/shop/catalogues", shop.origin.url("/shop.csv.gz")
    shop.origin.answers["/shop.csv.gz"] = [Answer(404), Answer(200, gzip.compress(TEXT))]
    made = (await client.post(path, json={"url": url, "cron": NEVER})).json()
    assert (made["url"], made["cron"]) == (url, NEVER)
    assert (await client.get("/v1/fetch/sources")).json() == {"sources": [made]}
    assert (await client.delete("/v1/fetch/customers/shop/source")).status_code == 204
    add = ("catalogue", "add", url, "--customer", "shop", "--cron", NEVER)
    code, text = await command(*add, "--tz", "Europe/Moscow")
    assert (code, text.partition(", next ")[0]) == (0, f"shop: {url} at '{NEVER}' Europe/Moscow")
    assert (await command(*add, "--format", "pdf"))[0] == "fetch.unknown_format"
    for outcome in ("failed:http_404", "applied"):
        assert (await command("catalogue", "bring", "shop"))[0] == 0

        async def is_listed(outcome=outcome):
            return outcome in (await command("catalogue", "ls"))[1]

        await wait_true(is_listed, what=outcome)
    runs = (await command("run", "ls", "--customer", "shop"))[1].splitlines()
    applied = next(run for run in await shop.fetch.runs.newest("shop") if run.rows)
    times = f"{applied.started_at:%Y-%m-%d %H:%M:%S}".split()
    assert runs[0].split()[:5] == ["run", "customer", "state", "started", "(UTC)"]
    expected = [str(applied.run), "shop", applied.state, *times, "2", "-", applied.file_name]
    assert expected in [line.split() for line in runs]
    assert (await command("catalogue", "rm", "shop"))[0] == 0
    run = ("catalogue", "run", url, "--customer", "shop")
    assert "2 rows of csv: 0 new" in (await command(*run))[1]
    none = (await command("catalogue", "run", shop.origin.url("/none"), "--customer", "shop"))[1]
    assert "refused (failed:http_404: the host responded 404)\n  no file fetched" in none
    key = {"Idempotency-Key": "one"}
    once, again = [await client.post(path, json={"url": url}, headers=key) for _ in range(2)]
    assert (once.json()["state"], again.json()) == ("bringing", once.json())
    run = await shop.fetch.runs.get(once.json()["run"])
    assert (await Source(shop).ended(run)).unchanged == 2
