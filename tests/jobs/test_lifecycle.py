"""A job's life: enqueue, claim, handler, settle; what each outcome leaves behind."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from tests.kit.waiting import wait_true

from headrace.jobs import (
    Batch,
    Cancel,
    Fail,
    JobContext,
    Jobs,
    JobState,
    NewJob,
    Registry,
    Retry,
    Snooze,
)
from headrace.jobs.errors import JobNotEnded, JobNotWaiting, JobUnknown, KeyTaken
from headrace.jobs.store.jobs import BURST, GAP_S, Notifier, NotifyRate
from headrace.kernel.logs import current_traceparent, new_traceparent


class Photo(msgspec.Struct):
    """A payload with a shape."""

    number: int


async def test_a_job_is_done_and_then_gone(jobs, registry, working):
    seen = []

    @registry.task("mail")
    async def mail(to: str, text: str = "hi"):
        seen.append((to, text))

    job_id = await mail.enqueue(to="ann")
    assert (await jobs.job(job_id)).state is JobState.READY
    async with working():
        await wait_true(lambda: seen)
    assert seen == [("ann", "hi")]
    assert await jobs.job(job_id) == await jobs.job(job_id)
    assert (await jobs.job(job_id)).state is JobState.GONE
    with pytest.raises(JobUnknown):
        await jobs.job(job_id + 1)


async def test_batches_are_typed_and_each_job_has_its_outcome(jobs, registry, working, sql):
    runs: dict[int, int] = {}

    @registry.task("photos", batch=10, retries=1)
    async def handle(batch: Batch[Photo]):
        for job in batch:
            runs[job.payload.number] = runs.get(job.payload.number, 0) + 1
            match job.payload.number:
                case 1:
                    job.fail("unusable")
                case 2:
                    job.retry(after_s=0, why="again")
                case 3 if job.attempt == 1 and runs[3] == 1:
                    job.snooze(0)

    ids = await handle.enqueue_many([Photo(number) for number in range(5)])
    assert ids == sorted(ids)
    async with working():
        await wait_true(lambda: runs.get(2) == 2 and runs.get(3) == 2)
    states = [(await jobs.job(job_id)).state.value for job_id in ids]
    assert states == ["gone", "failed", "failed", "gone", "gone"]
    assert runs == {0: 1, 1: 1, 2: 2, 3: 2, 4: 1}
    failed = await jobs.job(ids[2])
    assert (failed.error, failed.attempt, failed.payload) == ("again", 2, {"number": 2})
    assert await sql("SELECT id FROM headrace.job_lease") == []


@pytest.mark.parametrize(
    ("raised", "runs_expected", "error"),
    [
        (ValueError("broken\0 text"), 3, "ValueError: broken\N{SYMBOL FOR NULL} text"),
        (Retry(after_s=0, why="busy"), 3, "busy"),
        (Fail("no use"), 1, "no use"),
        (SystemExit(3), 3, "SystemExit: 3"),
        (asyncio.CancelledError(), 3, "the handler cancelled itself"),
    ],
)
async def test_what_a_handler_raises(registry, working, raised, runs_expected, error):
    runs = []

    @registry.task("flaky", retries=2)
    async def flaky():
        runs.append(1)
        raise raised

    jobs = flaky.jobs()
    job_id = await flaky.enqueue()
    async with working():
        await wait_true(lambda: _is_ended(jobs, job_id))
    job = await jobs.job(job_id)
    assert (job.state.value, len(runs), job.error) == ("failed", runs_expected, error)
    assert bool(job.traceback) == (error.startswith(("ValueError", "SystemExit")))


async def test_a_snooze_costs_no_attempt(jobs, registry, working):
    attempts = []

    @registry.task("patient", retries=0)
    async def patient(job: dict | None):
        attempts.append(job)
        if len(attempts) < 4:
            raise Snooze(0)

    job_id = await patient.enqueue({"a": 1})
    async with working():
        await wait_true(lambda: len(attempts) == 4)
    assert (await jobs.job(job_id)).state is JobState.GONE


async def test_a_handler_over_its_timeout_is_a_failed_attempt(jobs, registry, working):
    @registry.task("slow", timeout="50ms", retries=0)
    async def slow():
        await asyncio.Event().wait()

    job_id = await slow.enqueue()
    async with working():
        await wait_true(lambda: _is_ended(jobs, job_id))
    assert (await jobs.job(job_id)).error == "it ran over its timeout of 0.05 s"


async def test_sync_handlers_run_beside_each_other(registry, working):
    barrier, seen = threading.Barrier(3, timeout=60), []

    @registry.task("sync", concurrency=3)
    def work(number: int):
        seen.append((barrier.wait(), number))

    async with working():
        await work.enqueue_many([{"number": n} for n in range(3)])
        await wait_true(lambda: len(seen) == 3)


async def test_single_jobs_run_up_to_the_concurrency_and_are_refilled(registry, working, sql):
    running, most, finished = 0, 0, 0
    gate = asyncio.Event()

    @registry.task("many", concurrency=5)
    async def one(number: int):
        nonlocal running, most, finished
        running += 1
        most = max(most, running)
        await gate.wait() if number == 0 else await asyncio.sleep(0)
        running -= 1
        finished += 1

    await one.enqueue_many([{"number": n} for n in range(40)])
    async with working():
        await wait_true(lambda: finished == 39)
        gate.set()
        await wait_true(lambda: finished == 40)
    assert most == 5
    assert await sql("SELECT id FROM headrace.job_lease") == []


async def test_priority_and_time_order_the_jobs(jobs, registry, working):
    order = []

    @registry.task("ordered")
    async def note(name: str):
        order.append(name)

    now = datetime.now(UTC)
    for name, options in {
        "late": {"after_s": 3600},
        "last": {"priority": 9},
        "second": {"at": now - timedelta(hours=1)},
        "first": {"priority": 0},
    }.items():
        await note.enqueue(name=name, **options)
    async with working():
        await wait_true(lambda: len(order) == 3)
    assert order == ["first", "second", "last"]
    status = await jobs.queues.get("ordered")
    assert (status.ready, status.scheduled, status.leased) == (0, 1, 0)


async def test_a_delayed_job_starts_when_it_is_due(registry, working, sql):
    seen = []

    @registry.task("later")
    async def later():
        seen.append(1)

    async with working():
        await later.enqueue(after_s=3600)
        await sql("UPDATE headrace.job_ready SET run_at = now()")
        await wait_true(lambda: seen)


async def test_unique_keys_give_the_unfinished_job(jobs, registry, working):
    @registry.task("unique")
    async def handle():
        pass

    first = await jobs.enqueue_many([NewJob(queue="unique", unique=k) for k in ("a", "b", "a")])
    assert first[0] == first[2] != first[1]
    assert await handle.enqueue(unique="a") == first[0]
    await jobs.cancel(first[1])
    assert await handle.enqueue(unique="b") != first[1]
    async with working():
        await wait_true(lambda: _is_gone(jobs, first[0]))
    again = await handle.enqueue(unique="a")
    assert again != first[0]
    await jobs.cancel(again)
    other = await handle.enqueue(unique="a")
    with pytest.raises(KeyTaken):
        await jobs.retry(again)
    await jobs.cancel(other)
    await jobs.retry(again)
    assert (await jobs.job(again)).state is JobState.READY


async def test_a_job_of_a_rolled_back_transaction_never_was(jobs, registry, postgres):
    @registry.task("tx")
    async def handle():
        pass

    ids = []

    async def fail_after_enqueue():
        async with postgres.transaction() as tx:
            ids.append(await handle.enqueue(tx=tx, unique="k"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_after_enqueue()
    job_id = ids[0]
    assert (await jobs.job(job_id)).state is JobState.GONE
    async with postgres.transaction() as tx:
        kept = await handle.enqueue(tx=tx, unique="k")
    assert (await jobs.job(kept)).state is JobState.READY


async def test_cancel_and_retry_by_hand(jobs, registry):
    @registry.task("steered")
    async def handle():
        pass

    job_id = await handle.enqueue()
    with pytest.raises(JobNotEnded):
        await jobs.retry(job_id)
    await jobs.cancel(job_id)
    assert (await jobs.job(job_id)).state is JobState.CANCELLED
    with pytest.raises(JobNotWaiting):
        await jobs.cancel(job_id)
    assert [job.id for job in (await jobs.find(queue="steered")).jobs] == [job_id]
    await jobs.retry(job_id)
    assert (await jobs.job(job_id)).state is JobState.READY
    with pytest.raises(JobUnknown):
        await jobs.cancel(10**15)


async def test_a_paused_queue_hands_out_nothing(jobs, registry, working):
    seen = []

    @registry.task("stoppable")
    async def handle(number: int):
        seen.append(number)

    async with working() as worker:
        await jobs.queues.pause("stoppable")
        job_id = await handle.enqueue(number=1)
        await wait_true(lambda: worker.statistics()["leases_held"] == 0)
        assert (await jobs.why(job_id)).reason == "queue_paused"
        assert seen == []
        await jobs.queues.resume("stoppable")
        await wait_true(lambda: seen)


async def test_a_payload_of_another_app_that_does_not_fit_fails_without_its_neighbours(
    jobs, registry, working, postgres
):
    seen = []

    @registry.task("typed", batch=10, retries=0)
    async def handle(batch: Batch[Photo]):
        seen.extend(job.payload.number for job in batch)

    await jobs.queues.declare()
    elsewhere = Jobs(postgres, jobs.config, Registry())
    bad, good = await elsewhere.enqueue_many(
        [NewJob(queue="typed", payload=p) for p in ({"number": "x"}, {"number": 7})]
    )
    async with working():
        await wait_true(lambda: _is_ended(jobs, bad))
    assert seen == [7]
    assert (await jobs.job(bad)).error.startswith("the payload does not fit the task")
    assert (await jobs.job(good)).state is JobState.GONE


async def test_a_bad_job_of_a_batch_fails_alone(jobs, registry, working, sql):
    """Its neighbours are done at the first claim; it alone spends attempts."""
    calls = []

    @registry.task("poisoned", batch=20, retries=1)
    async def handle(batch: Batch[Photo]):
        calls.append(batch.payloads)
        if Photo(13) in batch.payloads:
            raise ValueError("bad photo")

    ids = await handle.enqueue_many([Photo(number) for number in range(20)])
    async with working():
        await wait_true(lambda: _is_ended(jobs, ids[13]))
        await wait_true(lambda: _is_gone(jobs, ids[19]))
    bad = await jobs.job(ids[13])
    assert (bad.attempt, bad.error) == (2, "ValueError: bad photo")
    states = {(await jobs.job(job_id)).state.value for job_id in ids if job_id != ids[13]}
    assert states == {"gone"}
    assert len(calls) == 10, "1 for all, 2 each for 10, 5, 2 and 1 of them, 1 for the retry"
    assert await sql("SELECT id FROM headrace.job_lease") == []


async def test_a_job_is_sent_on_to_another_queue(jobs, registry, working):
    seen = []

    @registry.task("first", retries=0)
    async def first(job: JobContext[dict]):
        job.send_to("second")

    @registry.task("second", version=2, upgrade={1: lambda old: old | {"upgraded": True}})
    async def second(job: JobContext[dict]):
        seen.append((job.id, job.payload))

    job_id = await first.enqueue({"a": 1}, unique="k")
    async with working():
        await wait_true(lambda: seen)
        await wait_true(lambda: _is_gone(jobs, job_id))
    assert seen == [(job_id, {"a": 1, "upgraded": True})]


async def test_a_cancelled_job_is_no_failure(jobs, registry, working):
    @registry.task("unwanted")
    async def handle(job: dict | None):
        raise Cancel("nobody wants it")

    job_id = await handle.enqueue({})
    async with working():
        await wait_true(lambda: _is_cancelled(jobs, job_id))
    assert (await jobs.job(job_id)).error == "nobody wants it"


async def test_the_trace_goes_on_in_the_handler(registry, working):
    seen = []

    @registry.task("traced")
    async def handle():
        seen.append(current_traceparent.get())

    parent = new_traceparent()
    token = current_traceparent.set(parent)
    await handle.enqueue()
    current_traceparent.reset(token)
    async with working():
        await wait_true(lambda: seen)
    assert seen[0][3:35] == parent[3:35]


async def test_a_stopping_worker_returns_what_it_cannot_finish(jobs, registry, working, sql):
    started = asyncio.Event()

    @registry.task("endless")
    async def endless():
        started.set()
        await asyncio.Event().wait()

    job_id = await endless.enqueue()
    async with working(changed_config(jobs, grace_s=0.05)):
        await asyncio.wait_for(started.wait(), 60)
        assert (await jobs.job(job_id)).state is JobState.LEASED
    job = await jobs.job(job_id)
    assert (job.state, job.attempt, job.losses) == (JobState.READY, 0, 0)
    assert await sql("SELECT id FROM headrace.host") == []


async def test_an_idle_worker_is_woken_by_an_enqueue(registry, working, jobs):
    seen = asyncio.Event()

    @registry.task("woken")
    async def handle():
        seen.set()

    async with working(changed_config(jobs, poll_s=600.0)) as worker:
        await wait_true(lambda: worker.is_listening)
        await handle.enqueue()
        await asyncio.wait_for(seen.wait(), 60)


def changed_config(jobs, **changes):
    """The service's settings with some of them changed."""
    return dataclasses.replace(jobs.config, **changes)


async def _is_ended(jobs, job_id):
    return (await jobs.job(job_id)).state in (JobState.FAILED, JobState.QUARANTINED)


async def _is_gone(jobs, job_id):
    return (await jobs.job(job_id)).state is JobState.GONE


async def _is_cancelled(jobs, job_id):
    return (await jobs.job(job_id)).state is JobState.CANCELLED


async def test_hints_that_are_being_sent_are_waited_for(postgres, jobs, registry):
    registry.task("q")(_nothing)
    queue_id = (await jobs.queues.declare())["q"].id
    hints, before = Notifier(postgres), asyncio.all_tasks()
    hints.notify_later({queue_id})
    [trailing] = asyncio.all_tasks() - before
    while hints._trailing:
        await asyncio.sleep(0)
    assert not trailing.done(), "it left the list, and is on its way"
    await hints.close()
    assert trailing.done()


def test_hints_of_a_queue_go_out_a_few_at_once_and_one_a_gap_in_the_long_run():
    ration, now_s = NotifyRate(), 1_000.0
    for _ in range(BURST):
        assert ration.wait_s(1, now_s) <= 0
        ration.take(1, now_s)
    assert ration.wait_s(1, now_s) == pytest.approx(GAP_S)
    assert ration.wait_s(2, now_s) <= 0, "each queue has its own"
    sent = 0
    for step in range(1, 1_001):
        at_s = now_s + step * GAP_S / 10
        if ration.wait_s(1, at_s) <= 1e-9:
            ration.take(1, at_s)
            sent += 1
    assert sent == 100
    for _ in range(100):
        ration.take(1, at_s)
    assert ration.wait_s(1, at_s) == pytest.approx(GAP_S), "what others tell of it is no debt"
    assert ration.wait_s(1, at_s + BURST * GAP_S) == pytest.approx(-(BURST - 1) * GAP_S)


async def _nothing(job: dict | None):
    """Never called."""
