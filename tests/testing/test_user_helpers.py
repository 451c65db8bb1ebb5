"""Helpers of tests: drain and checks of enqueued jobs, and detection of unread task errors."""

from __future__ import annotations

import asyncio
import textwrap
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from tests.kit.processes import HeadraceProcess

from headrace import Headrace
from headrace.engines.endpoints import Endpoints
from headrace.engines.sql import compile_query
from headrace.jobs import Batch, Fail, QueueUnknown, Retry, Snooze
from headrace.testing import assert_enqueued, drain, refute_enqueued

SOON = datetime.now(UTC) + timedelta(hours=1)


@pytest.fixture
async def app(running_engines, database_url, tmp_path):
    """An app on this test's database."""
    app = Headrace(flags={"data.folder": str(tmp_path), "jobs.retry_first_s": "1h"})
    valkey_url = running_engines.endpoints.valkey_url
    app.use_endpoints(Endpoints(database_url, valkey_url, tmp_path.as_uri()))
    yield app
    await app.close()


async def test_drain_runs_what_is_due_and_counts_by_outcome(app):
    runs = []

    @app.task("flaky", retries=1)
    async def flaky(word: str):
        runs.append(word)
        match word:
            case "retry":
                raise ValueError("broken")
            case "fail":
                raise Fail("no use")
            case "snooze":
                raise Snooze(60)
            case "again" if runs.count("again") == 1:
                raise Retry(after_s=0)
            case "twice":
                raise Retry(after_s=0)

    for word in ("good", "retry", "fail", "snooze", "again", "twice"):
        await flaky.enqueue(word=word)
    await flaky.enqueue(word="later", after_s=60)
    assert await drain(app) == {"done": 2, "retry": 3, "fail": 2, "snooze": 1}
    assert "later" not in runs
    await assert_enqueued(app, "flaky", payload={"word": "later"})
    assert await drain(app) == {}


async def test_drain_runs_what_jobs_bring_about_in_every_queue(app):
    seen = []

    @app.task("first")
    def first(depth: int):
        seen.append(f"first {depth}")
        if depth < 3:
            second.sync.enqueue(depth=depth + 1)

    @app.task("second", batch=10)
    async def second(jobs: Batch[dict[str, int]]):
        for job in jobs:
            seen.append(f"second {job.payload['depth']}")
            await first.enqueue(depth=job.payload["depth"] + 1, lane="l")

    await first.enqueue(depth=0)
    assert await drain(app) == {"done": 5}
    assert seen == ["first 0", "second 1", "first 2", "second 3", "first 4"]


async def test_drain_keeps_to_one_queue_to_so_many_and_to_what_was_due(app):
    @app.task("left")
    async def left():
        await left.enqueue()

    @app.task("right", batch=100)
    async def right(jobs: Batch[None]):
        """Nothing to do."""

    await left.enqueue()
    await right.enqueue_many([None] * 25)
    assert await drain(app, "right", jobs_max=10) == {"done": 10}
    assert await drain(app, "right") == {"done": 15}
    assert await drain(app, "left", jobs_max=7) == {"done": 7}
    assert await drain(app, until_empty=False) == {"done": 1}
    with pytest.raises(QueueUnknown):
        await drain(app, "none")


async def test_drain_leaves_alone_what_a_lane_or_a_pause_holds(app):
    @app.task("walk")
    async def walk():
        """One step."""

    await app.jobs.enqueue_many([walk.job(lane="slow") for _ in range(5)])
    await app.jobs.lanes.set("walk", "slow", starts_max=2, window_s=60, concurrency=None)
    assert await drain(app) == {"done": 2}
    await assert_enqueued(app, "walk", lane="slow", count=3)
    await walk.enqueue()
    await app.jobs.queues.pause("walk")
    assert await drain(app) == {}


async def test_drain_leaves_no_host_behind_and_serves_sync_tests(app, postgres):
    @app.task("mail")
    def mail(to: str):
        """Sent."""

    def work():
        mail.sync.enqueue(to="ann")
        ids = app.sync(assert_enqueued)(app, "mail", payload={"to": "ann"})
        assert len(ids) == 1
        assert app.sync(drain)(app) == {"done": 1}
        app.sync(refute_enqueued)(app, "mail")

    await asyncio.to_thread(work)
    count = compile_query("hosts", "-- Count hosts.\nSELECT count(*) FROM headrace.host")
    assert await postgres.value(count) == 0


async def test_what_is_enqueued_is_found_by_each_of_its_marks(app):
    @app.task("mail")
    async def mail(to: str, text: str = ""):
        """Never run here."""

    first = await mail.enqueue(to="ann", text="hi", at=SOON, priority=1)
    second = await mail.enqueue(to="bob", unique="bob")
    third = await mail.enqueue(to="cid", lane="customer:42")
    assert await assert_enqueued(app, "mail", count=3) == [first, second, third]
    assert await assert_enqueued(app, "mail", payload={"to": "ann"}) == [first]
    assert await assert_enqueued(app, "mail", payload={"to": "ann", "text": "hi"}) == [first]
    assert await assert_enqueued(app, "mail", at=SOON + timedelta(seconds=0.5)) == [first]
    assert await assert_enqueued(app, "mail", priority=1) == [first]
    assert await assert_enqueued(app, "mail", unique="bob") == [second]
    assert await assert_enqueued(app, "mail", lane="customer:42", payload={"to": "cid"}) == [third]
    await refute_enqueued(app, "mail", payload={"to": "ann", "text": "ho"})
    await refute_enqueued(app, "mail", at=SOON + timedelta(seconds=5))
    await refute_enqueued(app, "mail", payload=None)
    await refute_enqueued(app, "other")


async def test_a_miss_lists_what_is_there(app):
    @app.task("mail")
    async def mail(to: str):
        """Never run here."""

    @app.task("other")
    async def other(n: int):
        """Never run here."""

    with pytest.raises(AssertionError, match="nothing waits in 'mail'"):
        await assert_enqueued(app, "mail")
    first = await mail.enqueue(to="ann", lane="l", unique="k", at=SOON)
    await mail.enqueue_many([{"to": "x" * 300}] * 30)
    await other.enqueue(n=1)
    with pytest.raises(AssertionError) as reported:
        await assert_enqueued(app, "mail", payload={"to": "bob"}, lane="l")
    text = str(reported.value)
    assert "expected 1 waiting job with payload={'to': 'bob'}, lane='l', found 0" in text
    moment = SOON.isoformat(timespec="seconds")
    assert f"{first}: {{\"to\":\"ann\"}}, at={moment}, priority=5, lane='l', unique='k'" in text
    assert "and 11 more" in text
    assert "1 in 'other'" in text
    assert len(text) < 8_000
    with pytest.raises(AssertionError, match="expected 0 waiting jobs, found 31"):
        await refute_enqueued(app, "mail")


async def test_a_callers_transaction_shows_what_is_not_committed(app, database_url):
    @app.task("mail")
    async def mail(to: str):
        """Never run here."""

    connection = await asyncpg.connect(database_url)
    async with connection.transaction():
        await mail.enqueue(to="ann", tx=connection)
        await refute_enqueued(app, "mail")
        await assert_enqueued(app, "mail", payload={"to": "ann"}, tx=connection)
    await assert_enqueued(app, "mail")
    await connection.close()


FORGETS = """
import asyncio
from headrace import Headrace
app = Headrace()

async def fail():
    raise ValueError("nobody looks")

async def forget():
    task = asyncio.create_task(fail())
    await asyncio.wait({task})

asyncio.run(forget())
"""


def test_a_process_that_forgot_an_error_fails_its_test(tmp_path):
    (tmp_path / "forgets.py").write_text(textwrap.dedent(FORGETS))
    process = HeadraceProcess(["work", "forgets:app"], folder=tmp_path)
    process.wait_exit()
    with pytest.raises(AssertionError, match="never read"):
        process.end()
