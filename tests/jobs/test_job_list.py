"""Lists of jobs and bulk actions: filters, pages, bounded searches and steps; removed queues.

Lists read no table whole.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from lease_steps import FAIL, claim_lane_jobs, claim_one, settle

from headrace.jobs import Jobs, NewJob, Registry, store
from headrace.jobs.cli.jobs import first_line
from headrace.jobs.errors import InvalidFilter, InvalidJob, LimiterInUse, LimiterUnknown, QueueInUse
from headrace.jobs.model import JobFilter
from headrace.jobs.outcomes import Outcome
from headrace.jobs.service import bulk


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (None, ""),
        ("cannot store a\n  more", "cannot store a"),
        ("x" * 100, "x" * 80 + " ..."),
        (
            "the payload does not fit the task: the field `text` is missing; its handler takes: a",
            "the payload does not fit the task: the field `text` is missing ...",
        ),
        ("one of many words " * 9, "one of many words " * 4 + "one of ..."),
    ],
)
def test_a_long_error_ends_after_a_clause_or_a_word(error, shown):
    assert first_line(error) == shown


@pytest.fixture
async def queue_ids(declare):
    """Queues `mail` and `post`; `post` keeps done jobs."""
    post = {"keep_done": "1h", "keep_result": True}
    return await declare(mail={"limiter": "lim", "lane": "optional"}, post=post)


@pytest.fixture
async def of_each_state(jobs, queue_ids, manager):
    """One job of queue `post` in each state, by state."""
    ids = {}
    for state, kind in {"done": "done", "failed": "fail", "quarantined": "quarantined"}.items():
        ids[state] = await jobs.enqueue(NewJob(queue="post"))
        claim = await claim_one(manager, queue_ids["post"])
        await settle(manager, claim, Outcome(kind, None, f"was {state}, 100%", result=b'{"n":1}'))
    ids["leased"] = await jobs.enqueue(NewJob(queue="post", priority=0))
    await claim_one(manager, queue_ids["post"])
    ids["scheduled"] = await jobs.enqueue(NewJob(queue="post", after_s=60, lane="x"))
    ids["cancelled"] = await jobs.enqueue(NewJob(queue="post", lane="x"))
    await jobs.cancel(ids["cancelled"])
    ids["ready"] = await jobs.enqueue(NewJob(queue="post", payload={"big": True}))
    return ids


def ids_of(page):
    return [job.id for job in page.jobs]


async def test_every_state_is_listed_and_shown(jobs, of_each_state, sql):
    for state, job_id in of_each_state.items():
        page = await jobs.find(queue="post", state=state)
        assert [(job.id, job.state.value) for job in page.jobs] == [(job_id, state)]
        assert page.next_cursor is None
    page = await jobs.find()
    assert ids_of(page) == sorted(of_each_state.values(), reverse=True)
    assert {job.state.value for job in page.jobs} == set(of_each_state)
    assert ids_of(await jobs.find(queue="post")) == ids_of(page)
    assert (await jobs.find(queue="mail")).jobs == []
    assert all(job.payload is None for job in page.jobs)
    leased = await jobs.job(of_each_state["leased"])
    [listed] = (await jobs.find(state="leased")).jobs
    assert (listed.host, listed.lease_id, listed.priority) == ("test", leased.lease_id, 0)
    done = await jobs.job(of_each_state["done"])
    assert (done.state.value, done.result, done.payload) == ("done", {"n": 1}, None)
    assert (leased.progress, listed.progress) == (None, None)
    values = f"{leased.id}, 0.25, 'a quarter', {listed.lease_id}"
    await sql(
        f"INSERT INTO headrace.job_progress (job_id, ratio, text, lease_id) VALUES ({values})"
    )
    progress = (await jobs.job(leased.id)).progress
    assert (progress.ratio, progress.text) == (0.25, "a quarter")


async def test_jobs_of_a_time_are_listed_and_changed(jobs, of_each_state, sql):
    failed = of_each_state["failed"]
    await sql(
        f"UPDATE headrace.job_failed SET ended_at = now() - '2 h'::interval WHERE id={failed}"
    )
    now_at = datetime.now(UTC)
    hours = [now_at - timedelta(hours=hours) for hours in (3, 1)]
    assert ids_of(await jobs.find(from_at=hours[0], to_at=hours[1])) == [failed]
    late = ids_of(await jobs.find(from_at=hours[1]))
    assert late == sorted({*of_each_state.values()} - {failed}, reverse=True)
    assert ids_of(await jobs.find(from_at=hours[1], to_at=now_at - timedelta(minutes=30))) == []
    old = JobFilter(state="failed", from_at=hours[0], to_at=hours[1])
    assert (await jobs.bulk("retry", old)).changed == 1
    assert (await jobs.job(failed)).state.value == "ready"
    with pytest.raises(InvalidFilter, match="time zone"):
        await jobs.find(from_at=datetime(2026, 1, 1))  # noqa: DTZ001


async def test_failures_of_a_cause_do_not_become_fewer_with_time(
    jobs, queue_ids, manager, sql, postgres
):
    ids = await jobs.enqueue_many([NewJob(queue="mail")] * 3)
    await settle(manager, await claim_one(manager, queue_ids["mail"], 3), FAIL)
    await jobs.cancel(await jobs.enqueue(NewJob(queue="mail")))
    await sql(
        f"UPDATE headrace.job_failed SET ended_at = ended_at - '2 h'::interval WHERE id < {ids[2]}"
    )
    [found] = await jobs.fleet.failures()
    assert (found.queue, found.cause, found.jobs) == ("mail", "peer", 3), "as the list of the cause"
    assert (found.jobs_is_capped, found.first_at < found.last_at) == (False, True)
    [found] = await store.fleet.recent_failures(postgres, span_s=3600, jobs_max=2)
    assert (found.jobs, found.jobs_is_capped) == (2, True)
    await sql("UPDATE headrace.job_failed SET ended_at = ended_at - '2 h'::interval")
    assert await jobs.fleet.failures() == []


async def test_text_is_searched_in_errors_alone(jobs, of_each_state):
    assert ids_of(await jobs.find(q="WAS FAILED")) == [of_each_state["failed"]]
    # Not a pattern: percent and underscore are characters.
    assert ids_of(await jobs.find(q="%")) == sorted(
        [of_each_state["failed"], of_each_state["quarantined"]], reverse=True
    )
    assert ids_of(await jobs.find(q="f_iled")) == []
    assert ids_of(await jobs.find(q="100%", state="quarantined", queue="post")) == [
        of_each_state["quarantined"]
    ]


async def test_jobs_of_a_lane_are_listed_whatever_their_priority(jobs, queue_ids):
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
        page = await jobs.find(lane="a", cursor=before, jobs_max=1)
        found += ids_of(page)
        before = page.next_cursor
        if before is None:
            break
    assert len(found) == 12


@pytest.mark.slow
async def test_pages_miss_and_repeat_no_job(jobs, queue_ids, monkeypatch):
    ids = await jobs.enqueue_many(
        [
            NewJob(queue="mail", lane="x" if n % 3 == 0 else None, after_s=60 if n % 2 else None)
            for n in range(40)
        ]
    )
    for job_id in ids[::4]:
        await jobs.cancel(job_id)
    filters = ({}, {"queue": "mail"}, {"state": "cancelled"}, {"lane": "x"}, {"state": "ready"})
    for window in (1, 3, 1000):
        monkeypatch.setattr(bulk, "WINDOW_ROWS", window)
        for wanted in filters:
            found, before = [], None
            for _ in range(60):
                page = await jobs.find(**wanted, cursor=before, jobs_max=7)
                found += ids_of(page)
                before = page.next_cursor
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
    while page.next_cursor is not None:
        page = await jobs.find(queue="mail", state="ready", cursor=page.next_cursor)
        found += ids_of(page)
        pages += 1
    assert found == [first]
    assert 3 <= pages <= 4


@pytest.mark.slow
async def test_no_page_reads_a_table_whole(jobs, queue_ids, sql, postgres):
    """PostgreSQL counts its scans, on tables whose statistics state that they are empty."""
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


async def states(jobs, ids):
    return [(await jobs.job(job_id)).state.value for job_id in ids]


async def test_bulk_filters_by_error_age_lane_and_state(
    jobs, queue_ids, manager, sql, broken_invariants
):
    ids = await jobs.enqueue_many([NewJob(queue="mail", payload=n, version=3) for n in range(4)])
    await settle(manager, await claim_one(manager, queue_ids["mail"], 4), FAIL)
    late = await jobs.enqueue(NewJob(queue="mail"))
    await jobs.cancel(late)
    ended = f"UPDATE headrace.job_failed SET ended_at = now() - interval '2 h' WHERE id < {ids[2]}"
    await sql(ended)
    old = JobFilter(queue="mail", older_than_s=3600)
    assert (await jobs.bulk("delete", old, dry_run=True)).matched == 2
    done = await jobs.bulk("retry", JobFilter(ids=[ids[0], ids[3], 10**9]))
    assert (done.matched, done.changed) == (2, 2)
    assert (await jobs.bulk("delete", old)).changed == 1, "a retried job is due since now"
    assert await states(jobs, ids) == ["ready", "gone", "failed", "ready"]
    found = await jobs.bulk("retry", JobFilter(queue="mail", state="failed", q="503"))
    assert (found.matched, found.changed, found.more) == (1, 1, False)
    assert await states(jobs, [ids[2], late]) == ["ready", "cancelled"]
    claim = await claim_one(manager, queue_ids["mail"])
    assert (set(claim.ids), set(claim.attempts)) == ({ids[0], ids[2], ids[3]}, {0})
    assert set(claim.versions) == {3}
    lanes = [NewJob(queue="mail", lane=lane) for lane in "abc" for _ in range(4)]
    await jobs.enqueue_many([*lanes, NewJob(queue="mail", lane="a", after_s=60)])
    await claim_lane_jobs(manager, queue_ids["mail"], 2)
    leased = len((await jobs.find(lane="a", state="leased")).jobs)
    assert (await jobs.bulk("cancel", JobFilter(lane="a"))).changed == 5 - leased
    await jobs.bulk("delete", JobFilter(lane="b", state="ready"))
    assert await broken_invariants() == []
    assert (await jobs.bulk("cancel", JobFilter(ids=[]))).matched == 0


async def test_steps_of_a_bulk_action_are_bounded(jobs, queue_ids, monkeypatch):
    monkeypatch.setattr(bulk, "JOBS_PER_STEP", 10)
    monkeypatch.setattr(bulk, "BULK_S", 0.0)
    await jobs.enqueue_many([NewJob(queue="mail")] * 25)
    first = await jobs.bulk("cancel", JobFilter(queue="mail"))
    assert (first.changed, first.more) == (10, True)
    newer = await jobs.enqueue(NewJob(queue="mail"))
    second = await jobs.bulk("cancel", JobFilter(queue="mail"), cursor=first.next_cursor)
    third = await jobs.bulk("cancel", JobFilter(queue="mail"), cursor=second.next_cursor)
    assert (second.changed, third.changed, third.more) == (10, 5, False)
    assert await states(jobs, [newer]) == ["ready"]


@pytest.mark.slow
async def test_bulk_actions_at_once_beside_a_worker_end_each_job_once(
    jobs, manager, queue_ids, broken_invariants
):
    lanes, queue_id = (None, "a", "b", "c"), queue_ids["mail"]
    given = [NewJob(queue="mail", lane=lanes[n % 4], unique=str(n)) for n in range(1500)]
    ids = await jobs.enqueue_many(given)

    async def claim():
        count = 0
        for _ in range(20):
            one = await claim_one(manager, queue_id, 20) or await claim_lane_jobs(
                manager, queue_id, 20
            )
            if one is not None:
                count += len(one.ids)
                await settle(manager, one, FAIL)
        return count

    some = JobFilter(queue="mail", state="ready")
    *changed, claimed = await asyncio.gather(
        jobs.bulk("cancel", some), jobs.bulk("cancel", some), jobs.bulk("delete", some), claim()
    )
    assert sum(done.changed for done in changed) + claimed == len(ids)
    assert await broken_invariants() == []
    kept = (await jobs.bulk("retry", JobFilter(queue="mail"), dry_run=True)).matched
    assert kept == changed[0].changed + changed[1].changed + claimed
    status = await jobs.queues.get("mail")
    assert (status.ready, status.leased) == (0, 0)


async def test_a_due_job_of_a_lane_can_be_put_off(jobs, queue_ids, broken_invariants):
    """It leaves its lane until it is due again, and the lane's counts stay right."""
    job_id, other = await jobs.enqueue_many([NewJob(queue="mail", payload={}, lane="a")] * 2)
    await jobs.edit(job_id, payload={"n": 2}, after_s=3600)
    await jobs.edit(other, priority=0)
    put_off = await jobs.job(job_id)
    assert (put_off.state, put_off.payload, put_off.lane) == ("scheduled", {"n": 2}, "a")
    assert (await jobs.job(other)).priority == 0
    assert (await jobs.lanes.get("lim", "a")).waiting == 1
    await jobs.edit(job_id, after_s=0)
    await jobs.sweep()
    assert (await jobs.job(job_id)).state == "ready"
    assert (await jobs.lanes.get("lim", "a")).waiting == 2
    assert await broken_invariants() == []


async def test_a_wrong_change_says_that_nothing_was_changed(jobs, queue_ids):
    job_id = await jobs.enqueue(NewJob(queue="mail", payload={}))
    for changes, text in (
        ({"priority": 99}, "nothing was changed: /priority: expected"),
        ({"payload": {"a": float("nan")}}, "nothing was changed: /payload/a: expected a finite"),
        ({"payload": object()}, "nothing was changed: /payload: expected what JSON can hold"),
        ({}, "nothing was changed: name what to change"),
    ):
        with pytest.raises(InvalidJob, match=text):
            await jobs.edit(job_id, **changes)


async def test_a_queue_that_is_used_stays_and_a_late_job_brings_it_back(
    postgres, jobs, registry, config
):
    registry.task("mail")(lambda: None)
    registry.limiter("smtp", rate="1/s")
    await jobs.queues.declare()
    await jobs.queues.create("mial")
    with pytest.raises(QueueInUse, match="a task of this app"):
        await jobs.queues.remove("mail")
    with pytest.raises(LimiterInUse, match="code that declares its limits"):
        await jobs.lanes.remove_limiter("smtp")
    with pytest.raises(
        LimiterUnknown, match=r"did you mean smtp\? .*: list them with `"
    ) as unknown:
        await jobs.lanes.remove_limiter("smpt")
    assert "set it" not in unknown.value.text
    other = Jobs(postgres, config, Registry())
    await other.enqueue(NewJob(queue="mial"))
    with pytest.raises(QueueInUse, match="waiting jobs"):
        await jobs.queues.remove("mial")
    await jobs.bulk("delete", JobFilter(queue="mial"))
    await jobs.queues.set("mial", importance=9, paused=True)
    await jobs.queues.remove("mial")
    assert [status.queue for status in await jobs.queues.all()] == ["mail"]
    job_id = await other.enqueue(NewJob(queue="mial"))
    await jobs.sweep()
    status = await jobs.queues.get("mial")
    assert (status.ready, status.paused, status.overridden) == (1, False, {})
    assert [job.id for job in (await jobs.takes.take("mial")).jobs] == [job_id]
