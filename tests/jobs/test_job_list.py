"""Lists of jobs in every state.

Pages by id, filters, bounded searches, and plans that read no table whole.
"""

from __future__ import annotations

import pytest
from lease_steps import claim_one, live_manager, settle

from headrace.jobs import NewJob
from headrace.jobs.errors import InvalidFilter, QueueUnknown
from headrace.jobs.model import JobFilter
from headrace.jobs.outcomes import Outcome
from headrace.jobs.service import bulk


@pytest.fixture
async def queue_ids(jobs, registry):
    """Queues `mail` and `post`; `post` keeps done jobs."""

    @registry.task("mail")
    async def mail(job: dict | None): ...

    @registry.task("post", keep_done="1h", keep_result=True)
    async def post(job: dict | None): ...

    rows = await jobs.queues.declare()
    return {name: rows[name].id for name in ("mail", "post")}


@pytest.fixture
async def of_each_state(jobs, queue_ids, postgres, config):
    """One job in each state by its name, of queue `post`."""
    desk = await live_manager(postgres, config, queue_ids.values())
    ids = {}
    for state, word in {"done": "done", "failed": "fail", "quarantined": "quarantined"}.items():
        ids[state] = await jobs.enqueue(NewJob(queue="post"))
        claim = await claim_one(desk, queue_ids["post"])
        await settle(desk, claim, Outcome(word, None, f"was {state}, 100%", result=b'{"n":1}'))
    ids["leased"] = await jobs.enqueue(NewJob(queue="post", priority=0))
    await claim_one(desk, queue_ids["post"])
    ids["scheduled"] = await jobs.enqueue(NewJob(queue="post", after_s=60, lane="x"))
    ids["cancelled"] = await jobs.enqueue(NewJob(queue="post", lane="x"))
    await jobs.cancel(ids["cancelled"])
    ids["ready"] = await jobs.enqueue(NewJob(queue="post", payload={"big": True}))
    return ids


def ids_of(page):
    return [job.id for job in page.jobs]


async def test_every_state_is_listed_where_it_is(jobs, of_each_state):
    for state, job_id in of_each_state.items():
        page = await jobs.find(queue="post", state=state)
        assert [(job.id, job.state.value) for job in page.jobs] == [(job_id, state)]
        assert page.next_before is None
    page = await jobs.find()
    assert ids_of(page) == sorted(of_each_state.values(), reverse=True)
    assert {job.state.value for job in page.jobs} == set(of_each_state)
    assert ids_of(await jobs.find(queue="post")) == ids_of(page)
    assert (await jobs.find(queue="mail")).jobs == []
    assert all(job.payload is None for job in page.jobs)
    leased = await jobs.job(of_each_state["leased"])
    [listed] = (await jobs.find(state="leased")).jobs
    assert (listed.host, listed.lease_id, listed.priority) == ("test", leased.lease_id, 0)


async def test_a_done_job_that_is_kept_shows_its_result(jobs, of_each_state):
    done = await jobs.job(of_each_state["done"])
    assert (done.state.value, done.result, done.payload) == ("done", {"n": 1}, None)
    assert (await jobs.job(of_each_state["failed"])).error == "was failed, 100%"


async def test_a_leased_job_shows_its_progress(jobs, of_each_state, sql):
    job_id = of_each_state["leased"]
    assert (await jobs.job(job_id)).progress is None
    [listed] = (await jobs.find(state="leased")).jobs
    values = f"{job_id}, 0.25, 'a quarter', {listed.lease_id}"
    await sql(
        f"INSERT INTO headrace.job_progress (job_id, ratio, text, lease_id) VALUES ({values})"
    )
    progress = (await jobs.job(job_id)).progress
    assert (progress.ratio, progress.text) == (0.25, "a quarter")


async def test_text_is_found_in_errors_alone(jobs, of_each_state):
    assert ids_of(await jobs.find(q="WAS FAILED")) == [of_each_state["failed"]]
    # Not a pattern: percent and underscore are characters.
    assert ids_of(await jobs.find(q="%")) == sorted(
        [of_each_state["failed"], of_each_state["quarantined"]], reverse=True
    )
    assert ids_of(await jobs.find(q="f_iled")) == []
    assert ids_of(await jobs.find(q="100%", state="quarantined", queue="post")) == [
        of_each_state["quarantined"]
    ]


async def test_lanes_are_listed_by_priority_and_place(jobs, queue_ids):
    many = [
        NewJob(queue=queue, lane=lane, priority=priority, after_s=after_s)
        for queue in ("mail", "post")
        for lane in ("a", "b")
        for priority in (0, 5, 9)
        for after_s in (None, 60)
    ]
    ids = await jobs.enqueue_many(many)
    expected = [i for i, job in zip(ids, many, strict=True) if job.lane == "a"]
    assert ids_of(await jobs.find(lane="a")) == expected[::-1]
    expected = [
        i
        for i, job in zip(ids, many, strict=True)
        if (job.lane, job.queue, job.after_s) == ("b", "post", None)
    ]
    assert ids_of(await jobs.find(lane="b", queue="post", state="ready")) == expected[::-1]
    found, before = [], None
    while True:
        page = await jobs.find(lane="a", before=before, jobs_max=1)
        found += ids_of(page)
        before = page.next_before
        if before is None:
            break
    assert len(found) == 12


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3, 1000])
async def test_pages_miss_and_repeat_nothing(jobs, queue_ids, monkeypatch, window, sql):
    monkeypatch.setattr(bulk, "WINDOW_ROWS", window)
    ids = await jobs.enqueue_many(
        [
            NewJob(queue="mail", lane="x" if n % 3 == 0 else None, after_s=60 if n % 2 else None)
            for n in range(40)
        ]
    )
    for job_id in ids[::4]:
        await jobs.cancel(job_id)
    for wanted in (
        {},
        {"queue": "mail"},
        {"state": "cancelled"},
        {"lane": "x"},
        {"state": "ready"},
    ):
        found, before = [], None
        for _ in range(60):
            page = await jobs.find(**wanted, before=before, jobs_max=7)
            found += ids_of(page)
            before = page.next_before
            if before is None:
                break
        assert before is None
        assert found == ids_of(await jobs.find(**wanted, jobs_max=1000)), wanted
    assert ids_of(await jobs.find(jobs_max=1000)) == ids[::-1]


async def test_a_search_that_costs_too_much_is_cut_off(jobs, queue_ids, monkeypatch):
    monkeypatch.setattr(bulk, "WINDOW_ROWS", 2)
    monkeypatch.setattr(bulk, "SEARCH_S", 0.0)
    [first] = await jobs.enqueue_many([NewJob(queue="mail")])
    await jobs.enqueue_many([NewJob(queue="mail", after_s=60)] * 5)
    page = await jobs.find(queue="mail", state="ready")
    assert page.jobs == []
    found, pages = [], 1
    while page.next_before is not None:
        page = await jobs.find(queue="mail", state="ready", before=page.next_before)
        found += ids_of(page)
        pages += 1
    assert found == [first]
    assert 3 <= pages <= 4


@pytest.mark.parametrize(
    ("wanted", "pointer"),
    [
        ({"state": "gone"}, "/state"),
        ({"state": "nothing"}, "/state"),
        ({"state": ""}, "/state"),
        ({"q": ""}, "/q"),
        ({"q": "x" * 201}, "/q"),
        ({"q": "\0"}, "/q"),
        ({"q": "x", "state": "ready"}, "/q"),
        ({"lane": ""}, "/lane"),
        ({"lane": "x" * 129}, "/lane"),
    ],
)
async def test_filters_that_mean_nothing(jobs, queue_ids, wanted, pointer):
    with pytest.raises(InvalidFilter) as raised:
        await jobs.find(**wanted)
    assert raised.value.problems[0].pointer == pointer


async def test_queues_that_are_none(jobs, queue_ids):
    for name in ("nobody", "\0", "\ud800", ""):
        with pytest.raises(QueueUnknown):
            await jobs.find(queue=name)
    assert (await jobs.find(before=-1)).jobs == []
    assert (await jobs.find(before=2**70)).jobs == []
    for jobs_max in (-5, 0, 1001, True, 1.5):
        with pytest.raises(InvalidFilter):
            await jobs.find(jobs_max=jobs_max)


@pytest.mark.slow
async def test_no_page_reads_a_table_whole(jobs, queue_ids, sql, postgres):
    """Counted by PostgreSQL itself, on tables whose statistics say that they are empty."""
    await sql("SELECT pg_stat_force_next_flush()")
    ids = await jobs.enqueue_many([NewJob(queue="mail", after_s=9)] * 3000)
    await jobs.enqueue_many([NewJob(queue="mail", lane="x")] * 1000)
    await jobs.enqueue_many([NewJob(queue="post")])
    await jobs.bulk("cancel", JobFilter(ids=ids[:1000]))
    for wanted in (
        {"queue": "post", "state": "ready"},
        {"queue": "mail", "state": "scheduled"},
        {"queue": "post"},
        {"state": "failed"},
        {"lane": "x", "queue": "mail"},
        {"q": "no such text"},
        {},
    ):
        await jobs.find(**wanted, jobs_max=10)
    await jobs.queues.all()
    await jobs.why(ids[-1])
    await sql("SELECT pg_stat_force_next_flush()")
    scans = await sql(
        "SELECT relname, seq_scan FROM pg_stat_user_tables WHERE seq_scan > 0"
        " AND relname IN ('job_ready', 'lane_job', 'job_failed', 'job_done_rest')"
    )
    assert {row["relname"]: row["seq_scan"] for row in scans} == {}
