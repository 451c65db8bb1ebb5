"""A worker runs jobs from enqueue to settlement, whatever its handlers raise or set."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path

import msgspec
import pytest
from tests.kit.waiting import wait_true

import headrace
from headrace.jobs import Batch, Cancel, Fail, JobContext, JobState, Retry, Snooze
from headrace.jobs.errors import JobFailed, JobUnknown, NoResultKept, ResultGone, ResultLate
from headrace.jobs.model import ERROR_CHARACTERS_MAX, TRACEBACK_CHARACTERS_MAX
from headrace.jobs.outcomes import Outcome, location_of, outcome_of
from headrace.jobs.store.jobs import BURST, GAP_S, Notifier, NotifyRate
from headrace.kernel.logs import current_traceparent, new_traceparent


class Photo(msgspec.Struct):
    """A payload with a shape."""

    number: int


class Mute(Exception):
    """An error whose text cannot be read."""

    def __str__(self) -> str:
        raise KeyError("no text")


class Careless(Retry):
    """A subclass that does not call its base class."""

    def __init__(self) -> None:
        self.after_s = "abc"


class Unspoken(Snooze):
    """A snooze without a delay."""

    def __init__(self) -> None: ...


class Odd(BaseException):
    """A `BaseException` that is no `Exception`."""


UNREADABLE = "Mute whose text cannot be read (KeyError)"
NO_DELAY = "ValueError: after_s: expected seconds from 0 to 31622400"
FAULTS = {
    "nul": (lambda: ValueError("broken\0 text"), "ValueError: broken\N{SYMBOL FOR NULL} text"),
    "surrogate": (lambda: RuntimeError("bad\ud800"), "RuntimeError: bad?"),
    "mute": (Mute, f"Mute: {UNREADABLE}"),
    "long": (lambda: ValueError("x" * 100_000), "... " + "x" * ERROR_CHARACTERS_MAX),
    "retry": (lambda: Retry(after_s=0, why="busy"), "busy"),
    "retry_of_text": (lambda: Retry("abc"), "TypeError: after_s: expected seconds, got a str"),
    "retry_nan": (lambda: Retry(float("nan")), f"{NO_DELAY}, got nan"),
    "snooze_past": (lambda: Snooze(-5), f"{NO_DELAY}, got -5"),
    "snooze_endless": (lambda: Snooze(float("inf")), f"{NO_DELAY}, got inf"),
    "snooze_for_ages": (lambda: Snooze(1e30), f"{NO_DELAY}, got 1e+30"),
    "retry_careless": (Careless, "Careless"),
    "snooze_unspoken": (Unspoken, "Unspoken"),
    "base": (lambda: Odd("odd"), "Odd: odd"),
    "generator_exit": (GeneratorExit, "GeneratorExit: GeneratorExit"),
    "system_exit": (lambda: SystemExit(3), "SystemExit: 3"),
    "keyboard": (KeyboardInterrupt, "KeyboardInterrupt: KeyboardInterrupt"),
    "stop_iteration": (StopIteration, "RuntimeError: coroutine raised StopIteration"),
    "cancelled": (asyncio.CancelledError, "the handler cancelled itself"),
}


def declare_fault(registry, name, kind, runs):
    """A task that always raises the fault, as a coroutine, a function or a batch."""
    make = FAULTS[name][0]
    queue = f"{name}.{kind}"

    async def single(job: dict):
        runs.append(queue)
        raise make()

    def sync(job: dict):
        runs.append(queue)
        raise make()

    async def batch(jobs: Batch[dict]):
        runs.append(queue)
        raise make()

    handler = {"async": single, "sync": sync, "batch": batch}[kind]
    return registry.task(queue, retries=1, batch=5 if kind == "batch" else None)(handler)


@pytest.mark.slow
async def test_any_fault_is_a_failed_attempt(jobs, registry, working, sql, wait_state):
    runs, afterwards = [], []
    kinds = dict.fromkeys(FAULTS, ("async", "sync", "batch"))
    kinds["cancelled"] = ("async",)
    tasks = {
        (name, kind): declare_fault(registry, name, kind, runs)
        for name in FAULTS
        for kind in kinds[name]
    }

    @registry.task("after")
    async def after(job: dict):
        afterwards.append(job)

    ids = {key: await task.enqueue({}) for key, task in tasks.items()}
    async with working():
        for (name, kind), job_id in ids.items():
            job = await wait_state(job_id, "failed")
            assert job.error == FAULTS[name][1], (name, kind)
        await after.enqueue({})
        await wait_true(lambda: afterwards, what="the worker still works")
    assert {queue: runs.count(queue) for queue in runs} == {
        task.queue: 2 for task in tasks.values()
    }
    assert await sql("SELECT id FROM headrace.job_lease") == []


def spoil(job):
    """Set an invalid outcome without the methods."""
    job.outcome = Outcome("retry", "soon") if job.payload["n"] else "done"


async def test_futures_cancellations_and_bad_outcomes_are_failed_attempts(
    registry, working, sql, wait_state
):
    @registry.task("future", retries=0)
    async def future(job: dict):
        awaited = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(awaited.set_exception, GeneratorExit())
        await awaited

    @registry.task("cancelled", retries=1)
    async def cancelled(job: dict):
        asyncio.current_task().cancel()
        if job["waits"]:
            await asyncio.Event().wait()

    @registry.task("spoiled_batch", retries=0, batch=5)
    async def spoiled_batch(jobs: Batch[dict]):
        for job in jobs:
            spoil(job)

    @registry.task("spoiled", retries=0)
    async def spoiled(job: JobContext[dict]):
        spoil(job)

    @registry.task("slow", timeout="50ms", retries=0)
    async def slow(job: dict):
        await asyncio.Event().wait()

    failing = [await future.enqueue({}), await cancelled.enqueue({"waits": True})]
    failing += await spoiled.enqueue_many([{"n": 0}, {"n": 1}])
    failing += await spoiled_batch.enqueue_many([{"n": 0}, {"n": 1}])
    done, late = await cancelled.enqueue({"waits": False}), await slow.enqueue({})
    async with working():
        for job_id in failing:
            await wait_state(job_id, "failed")
        await wait_state(done, "gone")
        assert (await wait_state(late, "failed")).error == "it ran over its timeout of 0.05 s"
    assert await sql("SELECT id FROM headrace.job_lease") == []


async def test_reasons_of_another_type_are_stored_as_text(registry, working, wait_state):
    reasons = [ValueError("why"), None, 7, Mute(), "\ud800\0"]
    texts = ["why", None, "7", UNREADABLE, "?\N{SYMBOL FOR NULL}"]

    @registry.task("q", retries=0, batch=10)
    async def handle(batch: Batch[int]):
        for job in batch:
            method = job.fail if job.payload % 2 else job.retry
            method(why=reasons[job.payload // 2])

    ids = await handle.enqueue_many(list(range(10)))
    async with working():
        errors = [(await wait_state(job_id, "failed")).error or None for job_id in ids]
    assert errors == [text for text in texts for _ in range(2)]


def test_a_traceback_begins_in_the_application_s_own_code():
    names = {}
    ours = Path(headrace.__file__).parent / "jobs" / "slots" / "runner.py"
    exec(compile("def call(handler): handler()", ours, "exec"), names)
    with pytest.raises(ValueError, match="Expecting value") as raised:
        names["call"](lambda: json.loads("not JSON"))
    frames = re.findall(r'File "(.+?)", line', outcome_of(raised.value).traceback)
    assert frames[0] == __file__
    assert frames[-1].endswith("json/decoder.py")
    assert re.fullmatch(r"test_worker.py:\d+", location_of(raised.value))
    names["json"], names["raised"] = json, []
    exec(compile("try: json.loads('')\nexcept ValueError as e: raised += [e]", ours, "exec"), names)
    assert str(ours) in outcome_of(names["raised"][0]).traceback
    assert location_of(names["raised"][0]) == ""


def test_texts_of_outcomes_are_bounded():
    outcome = outcome_of(ValueError("x" * 100_000))
    assert len(outcome.error) <= ERROR_CHARACTERS_MAX + 4
    assert len(outcome.traceback) <= TRACEBACK_CHARACTERS_MAX + 4
    assert len(outcome_of(Fail("y" * 100_000)).error) <= ERROR_CHARACTERS_MAX + 4


async def test_each_job_of_a_batch_has_its_outcome_and_order(jobs, registry, working, wait_state):
    runs, order, passed_on = {}, [], []

    outcomes = {
        1: lambda job: job.fail("unusable"),
        2: lambda job: job.retry(after_s=0, why="again"),
        3: lambda job: runs[3] == 1 and job.snooze(0),
    }

    @registry.task("photos", batch=10, retries=1)
    async def handle(batch: Batch[Photo]):
        for job in batch:
            number = job.payload.number
            runs[number] = runs.get(number, 0) + 1
            outcomes.get(number, lambda _: None)(job)

    @registry.task("ordered")
    async def note(name: str):
        order.append(name)

    @registry.task("first", retries=0)
    async def first(job: JobContext[dict]):
        job.send_to("second")

    @registry.task("second", version=2, upgrade={1: lambda old: old | {"upgraded": True}})
    async def second(job: JobContext[dict]):
        passed_on.append((job.id, job.payload, current_traceparent.get()[3:35]))

    @registry.task("unwanted")
    async def unwanted(job: dict | None):
        raise Cancel("nobody needs it")

    ids = await handle.enqueue_many([Photo(number) for number in range(5)])
    await note.enqueue(name="last", priority=9)
    await note.enqueue(name="first", priority=0)
    token = current_traceparent.set(parent := new_traceparent())
    moved = await first.enqueue({"a": 1}, unique="k")
    current_traceparent.reset(token)
    cancelled = await unwanted.enqueue({})
    async with working():
        for job_id, state in zip(ids, ("gone", "failed", "failed", "gone", "gone"), strict=True):
            await wait_state(job_id, state)
        await wait_state(moved, "gone")
        assert (await wait_state(cancelled, "cancelled")).error == "nobody needs it"
        await wait_true(lambda: len(order) == 2)
    assert runs == {0: 1, 1: 1, 2: 2, 3: 2, 4: 1}
    failed = await jobs.job(ids[2])
    assert (failed.error, failed.attempt, failed.payload) == ("again", 2, {"number": 2})
    assert order == ["first", "last"]
    assert passed_on == [(moved, {"a": 1, "upgraded": True}, parent[3:35])]
    with pytest.raises(JobUnknown):
        await jobs.job(10**9)


async def test_calls_run_at_once_up_to_the_concurrency(registry, working, sql):
    running = most = finished = 0
    gate, barrier, seen = asyncio.Event(), threading.Barrier(3, timeout=60), []

    @registry.task("sync", concurrency=3)
    def work(number: int):
        seen.append((barrier.wait(), number))

    @registry.task("many", concurrency=5)
    async def one(number: int):
        nonlocal running, most, finished
        running += 1
        most = max(most, running)
        await gate.wait() if number == 0 else await asyncio.sleep(0)
        running -= 1
        finished += 1

    await one.enqueue_many([{"number": n} for n in range(40)])
    await work.enqueue_many([{"number": n} for n in range(3)])
    async with working():
        await wait_true(lambda: finished == 39 and len(seen) == 3)
        gate.set()
        await wait_true(lambda: finished == 40)
    assert most == 5
    assert await sql("SELECT id FROM headrace.job_lease") == []


async def test_a_paused_queue_grants_nothing_and_an_enqueue_wakes_an_idle_worker(
    jobs, registry, working
):
    seen = []

    @registry.task("q")
    async def handle(number: int):
        seen.append(number)

    await jobs.queues.declare()
    await jobs.queues.pause("q")
    job_id = await handle.enqueue(number=1)
    async with working(poll_s=600.0) as worker:
        await wait_true(lambda: worker.is_listening)
        assert (await jobs.why(job_id)).reason == "queue_paused"
        assert seen == []
        await jobs.queues.resume("q")
        await wait_true(lambda: seen == [1])
        await handle.enqueue(number=2)
        await wait_true(lambda: seen == [1, 2])


async def test_a_stopping_worker_returns_what_it_cannot_finish(jobs, registry, working, sql):
    started = asyncio.Event()

    @registry.task("endless")
    async def endless():
        started.set()
        await asyncio.Event().wait()

    job_id = await endless.enqueue()
    async with working(grace_s=0.05):
        await asyncio.wait_for(started.wait(), 60)
        assert (await jobs.job(job_id)).state is JobState.LEASED
    job = await jobs.job(job_id)
    assert (job.state, job.attempt, job.losses) == (JobState.READY, 0, 0)
    assert await sql("SELECT id FROM headrace.host") == []


async def test_a_kept_result_is_returned_once_the_job_ended(jobs, registry, working, sql):
    @registry.task("child", keep_result="2h", concurrency=10, retries=0)
    async def child(n: int):
        if n == 3:
            raise ValueError("no")
        return None if n == 0 else {"half": n / 2}

    @registry.task("parent", keep_result=True)
    async def parent(n: int):
        return await (await child.enqueue(n=n)).result(timeout_s=20)

    @registry.task("batch", keep_result=True, batch=10)
    async def batch(given: Batch[int]):
        for job in given:
            job.done(job.payload * 2)

    @registry.task("plain")
    async def plain(): ...

    late = await child.enqueue(n=1, after_s=3600)
    with pytest.raises(TimeoutError):
        await late.result(timeout_s=0)
    with pytest.raises(ResultLate, match="did not end within"):
        await late.result(timeout_s=0.05)
    await late.cancel()
    with pytest.raises(JobFailed, match=f"job {late.id} ended cancelled"):
        await late.result(timeout_s=5)
    gone = await child.enqueue(n=1)
    await sql(f"DELETE FROM headrace.job_ready WHERE id = {gone} RETURNING id")
    with pytest.raises(ResultGone):
        await gone.result(timeout_s=5)
    with pytest.raises(JobUnknown):
        await jobs.result(10**12, timeout_s=5)
    with pytest.raises(NoResultKept):
        await (await plain.enqueue()).result()
    async with working():
        refs = await child.enqueue_many([{"n": n} for n in range(3)])
        results = [await ref.result(timeout_s=20) for ref in refs]
        assert results == [None, {"half": 0.5}, {"half": 1.0}]
        assert await (await parent.enqueue(n=2)).result(timeout_s=20) == {"half": 1.0}
        assert await (await batch.enqueue(21)).result(timeout_s=20) == 42
        with pytest.raises(JobFailed, match="ended failed: ValueError: no"):
            await (await child.enqueue(n=3)).result(timeout_s=20)
    assert await refs[1].result(timeout_s=0) == {"half": 0.5}


async def test_a_notification_in_progress_is_awaited_at_close(postgres, queue_id):
    notifier, before = Notifier(postgres), asyncio.all_tasks()
    notifier.notify_later({queue_id})
    [trailing] = asyncio.all_tasks() - before
    while notifier._trailing:
        await asyncio.sleep(0)
    assert not trailing.done(), "it left the list and is being sent"
    await notifier.close()
    assert trailing.done()


def test_notifications_of_a_queue_are_limited_in_bursts_and_in_the_long_run():
    rate, now_s = NotifyRate(), 1_000.0
    for _ in range(BURST):
        assert rate.wait_s(1, now_s) <= 0
        rate.take(1, now_s)
    assert rate.wait_s(1, now_s) == pytest.approx(GAP_S)
    assert rate.wait_s(2, now_s) <= 0, "each queue has a separate limit"
    sent = 0
    for step in range(1, 1_001):
        at_s = now_s + step * GAP_S / 10
        if rate.wait_s(1, at_s) <= 1e-9:
            rate.take(1, at_s)
            sent += 1
    assert sent == 100
    for _ in range(100):
        rate.take(1, at_s)
    assert rate.wait_s(1, at_s) == pytest.approx(GAP_S), "notifications of others add no debt"
    assert rate.wait_s(1, at_s + BURST * GAP_S) == pytest.approx(-(BURST - 1) * GAP_S)
