"""The pages of the fleet: cards and table of one moment, and what they show in an outage."""

from __future__ import annotations

import re

import pytest
from msgspec import structs
from served import app_of, serving, visiting
from tests.kit.chaos import PASS, RESET, ChaosProxy
from tests.kit.queue_counts import add_counts
from tests.kit.waiting import wait_true

from headrace.console.screens.fleet import QueueRow
from headrace.engines.endpoints import Endpoints
from headrace.jobs import NewJob, store
from headrace.jobs.tasks.options import SLOTS_MAX

pytestmark = pytest.mark.slow


async def test_the_fleet_shows_its_last_state_while_postgres_does_not_answer(
    tmp_path, database_url
):
    with ChaosProxy(database_url) as postgres:
        app = app_of(
            tmp_path, Endpoints(postgres.url, f"unix://{tmp_path}/none", "file:///nowhere")
        )
        await app.jobs.queues.create("known-before")
        async with serving(app) as address, visiting(app, address) as at:
            for path in ("/console/jobs", "/console/jobs/hosts"):
                assert "load-error" not in (await at.get(path)).text.partition("<main")[2]
            postgres.set(RESET)
            for path, shown in (("", "known-before"), ("/hosts", "Hosts alive")):
                page = (await at.get(f"/console/jobs{path}")).text
                assert shown in page
                assert "not up to date.</strong> <span>PostgreSQL does not respond" in page
                assert re.search(r"Shown is the state of \d{4}-\d\d-\d\d [\d:]{8} UTC\.", page)
            postgres.set(PASS)

            async def is_back():
                page = (await at.get("/console/jobs")).text
                return "known-before" in page and "not up to date" not in page

            await wait_true(is_back)


async def test_cards_and_table_of_the_fleet_are_of_one_moment(at, monkeypatch):
    postgres = at.app.engines.postgres
    await at.app.jobs.queues.create("one-moment")
    [queue] = await store.queues.find_queues(postgres, ["one-moment"])
    await at.app.jobs.enqueue(NewJob(queue="one-moment"))
    read = store.fleet.fleet_load

    async def run_meanwhile(runner, **given):
        await add_counts(postgres, queue.id, done=60_000)
        return await read(runner, **given)

    monkeypatch.setattr(store.fleet, "fleet_load", run_meanwhile)
    page = (await at.get("/console/jobs?q=one-moment")).text
    assert re.search(r'data-live="rate"[^>]*><strong class="v ">0/s<', page), "none in the table"


async def test_a_due_job_is_waiting_in_every_place(at):
    await at.app.jobs.queues.create("one-word")
    job_id = await at.app.jobs.enqueue(NewJob(queue="one-word"))
    for path in ("jobs?state=ready&queue=one-word", f"jobs/{job_id}"):
        page = (await at.get(f"/console/jobs/{path}")).text.partition("<main")[2]
        assert re.search(r'<span class="chip [a-z]*">waiting</span>', page), path
        assert not re.search(r">\s*ready\s*<", page), path


async def test_slots_are_stated_in_words_with_those_that_float(at):
    app = at.app
    await app.jobs.queues.create("on-floating")
    status = await app.jobs.queues.get("on-floating")
    busy = structs.replace(status, leased=8, is_known=True)
    row = QueueRow(status=busy, load=None)
    assert row.is_on_floating
    assert not QueueRow(status=structs.replace(busy, slots=1), load=None).is_on_floating
    limits = [(0, SLOTS_MAX), (1, SLOTS_MAX), (0, 4)]
    shown = [
        QueueRow(status=structs.replace(busy, slots_min=a, slots_max=b), load=None).slots_limits
        for a, b in limits
    ]
    assert shown == ["any", "at least 1", "0 to 4"]
    page = (await at.get("/console/jobs?q=on-floating")).text
    assert "Assigned slots" in page
    assert '<span class="muted">any</span>' in page


async def test_a_page_of_customers_is_bounded(at):
    for number in range(51):
        name = f"bounded-{number:02d}"
        await at.app.fetch.customers.set(name, starts_max=10, window_s=1.0, connections=1)
    page = (await at.get("/console/fetch/customers?match=bounded-")).text
    assert ("bounded-49" in page, "bounded-50" in page, "Next page" in page) == (True, False, True)
    following = (await at.get("/console/fetch/customers?match=bounded-&after=bounded-49")).text
    assert "bounded-50" in following


async def test_pages_state_how_long_they_keep_lines_and_what_states_mean(at):
    await at.app.jobs.queues.create("never-ran")
    pages = {
        "/console/jobs/jobs": "for 14 d (setting jobs.failed_kept)",
        "/console/jobs/queues/never-ran": "kept for 14 d (setting jobs.failed_kept)",
        "/console/audit": "kept for 400 d (setting web.audit_kept)",
        "/console/jobs": "<b>running</b>, jobs are in progress",
    }
    for path, text in pages.items():
        assert text in (await at.get(path)).text, path


async def test_a_follow_is_the_begin_of_no_other_state(at):
    feed = at.app.feed
    await feed.follows.follow("follower-1", "author-1")
    await feed.posts.post("author-1", "post-1")
    page = (await at.get("/console/feed/why?viewer=follower-1&post=post-1")).text
    assert "neither has muted or blocked the other" in page
    assert '<span class="muted">followed ' in page
