"""A slot's runner: single jobs, lanes, results, stopping; every job is settled exactly once."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time

import pytest
from one_slot import running_slot
from tests.kit.waiting import wait_true

from headrace.jobs import Batch, JobContext, Registry, current_job
from headrace.jobs.errors import LaneExhausted, NoCurrentJob
from headrace.jobs.headers import OwnOptions, with_options
from headrace.jobs.messages import Ack, Progress, SpendAnswer
from headrace.kernel.logs import new_traceparent


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
async def slot(registry):
    async with running_slot(registry) as slot:
        yield slot


async def test_single_jobs_are_refilled_and_their_outcomes_sent_together(registry, slot):
    gate, threads, barrier = asyncio.Event(), set(), threading.Barrier(3)

    @registry.task("q", concurrency=5)
    async def handle(number: int):
        await (gate.wait() if number == 0 else asyncio.sleep(0))

    @registry.task("sync")
    def sync(number: int):
        threads.add(threading.get_ident())

    @registry.task("wide", concurrency=3)
    def wide(number: int):
        barrier.wait(60)

    jobs = slot.give([{"number": n} for n in range(40)])
    await slot.wait_settled(jobs[1:])
    assert slot.runner.jobs_open == 1
    gate.set()
    assert await slot.wait_settled(jobs) == ["done"] * 40
    assert len([message for message in slot.said if isinstance(message, Ack)]) < 10
    await slot.wait_settled(slot.give([{"number": n} for n in range(20)], queue="sync"))
    assert len(threads) == 1
    await slot.wait_settled(slot.give([{"number": n} for n in range(6)], queue="wide"))


async def test_a_thread_past_its_timeout_is_replaced(registry, slot):
    """Only the first job has a short timeout: the others must end whatever delays them."""
    gate, threads = threading.Event(), []

    @registry.task("q")
    def handle(number: int):
        threads.append(threading.get_ident())
        if number == 0:
            gate.wait(60)

    short = with_options(new_traceparent(), OwnOptions(timeout_s=0.02))
    headers = [short, None, None]
    jobs = slot.give([{"number": n} for n in range(3)], headers=headers)
    assert await slot.wait_settled(jobs) == ["retry", "done", "done"]
    await wait_true(lambda: len(threads) == 3, what="the first job has a thread")
    assert len(set(threads)) == 2
    gate.set()


async def test_jobs_of_lanes_past_their_deadline_go_back_unstarted(registry, slot):
    runs = []

    @registry.task("batched", batch=10)
    async def batched(batch: Batch[int]):
        runs.extend(batch)

    @registry.task("single", concurrency=2)
    async def single(n: int):
        runs.append(n)

    @registry.task("sync")
    def sync(n: int):
        runs.append(n)

    late_s = time.monotonic() - 0.01
    for queue, payloads in (
        ("batched", [1, 2]),
        ("single", [{"n": 1}] * 3),
        ("sync", [{"n": 1}] * 2),
    ):
        lanes = ["a"] * len(payloads)
        jobs = slot.give(payloads, queue=queue, lanes=lanes, start_before_s=late_s)
        assert set(await slot.wait_settled(jobs)) == {"unstarted"}
    assert runs == []
    jobs = slot.give([1], queue="batched", lanes=["a"], start_before_s=time.monotonic() + 60)
    assert await slot.wait_settled(jobs) == ["done"]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_handler_spends_further_starts_of_its_lane(registry, slot, is_async):
    if is_async:

        @registry.task("q")
        async def handle(job: JobContext[dict]):
            assert job.lane == "customer"
            await job.lane.spend(2, wait_max_s=5)
            raise (await _caught(job.lane.spend(1, wait_max_s=7)))

    else:

        @registry.task("q")
        def handle(job: JobContext[dict]):
            job.lane.spend_blocking(2, wait_max_s=5)
            job.lane.spend_blocking(1, wait_max_s=7)

    slot.on_spend = lambda spend: SpendAnswer(spend.call, 0.01 if spend.starts == 2 else None)
    deadline_s = time.monotonic() + 60
    jobs = slot.give([{}], lanes=["customer"], start_before_s=deadline_s)
    assert await slot.wait_settled(jobs) == ["snooze"]
    assert slot.outcomes[1][1] == 7.0


async def _caught(spending):
    try:
        await spending
    except LaneExhausted as error:
        return error
    raise AssertionError("it was allowed")


async def test_progress_is_sent_at_a_limited_rate(registry, slot):
    @registry.task("q")
    async def handle():
        for step in range(100):
            current_job().progress(step / 10, f"step {step}")

    await slot.wait_settled(slot.give([{}]))
    sent = [message for message in slot.said if isinstance(message, Progress)]
    assert sent[0] == Progress(1, 0.0, "step 0")
    assert len(sent) < 10


async def test_the_current_job_is_known_to_code_that_is_given_fields(registry, slot):
    seen = []
    own = contextvars.ContextVar("own", default=0)

    @registry.task("q", concurrency=10)
    async def handle(n: int):
        own.set(own.get() + 1)
        await asyncio.sleep(0)
        seen.append((current_job().id, n, own.get()))

    @registry.task("sync")
    def sync(n: int):
        seen.append((current_job().id, n, 1))

    @registry.task("batch", batch=5)
    async def batched(batch: Batch[int]):
        with pytest.raises(NoCurrentJob):
            current_job()

    await slot.wait_settled(slot.give([{"n": n} for n in range(1, 6)]))
    await slot.wait_settled(slot.give([{"n": 6}], queue="sync"))
    assert await slot.wait_settled(slot.give([1], queue="batch")) == ["done"]
    assert seen == [(n, n, 1) for n in range(1, 7)]


async def test_results_are_kept_if_the_task_declares_it(registry, slot):
    @registry.task("kept", keep_result=True)
    async def kept(n: int):
        return {"n": n} if n else {object()}

    @registry.task("plain")
    async def plain(n: int):
        return n

    jobs = slot.give([{"n": 1}, {"n": 0}], queue="kept")
    assert await slot.wait_settled(jobs) == ["done", "fail"]
    assert slot.outcomes[1][3] == b'{"n":1}'
    assert slot.outcomes[2][2].startswith("the result cannot be kept: expected a JSON value")
    (job,) = slot.give([{"n": 1}], queue="plain")
    assert await slot.wait_settled([job]) == ["done"]
    assert slot.outcomes[job][3] is None


async def test_stopping_lets_calls_end_and_returns_the_rest(registry, slot):
    started, gate = asyncio.Event(), asyncio.Event()

    @registry.task("q", concurrency=2)
    async def handle(n: int):
        started.set()
        await gate.wait()

    slot.give([{"n": n} for n in range(5)])
    slot.give([{"n": 1}], lanes=["a"], start_before_s=time.monotonic() + 60)
    await started.wait()
    stopping = asyncio.create_task(slot.runner.stop(10.0))
    await wait_true(lambda: slot.runner.jobs_open == 2)
    slot.give([{"n": 9}])
    gate.set()
    await stopping
    kinds = [slot.outcomes[job][0] for job in range(1, 8)]
    assert kinds == ["done"] * 2 + ["returned"] * 3 + ["unstarted", "returned"]


@pytest.mark.parametrize("kind", ["async", "stubborn", "sync", "batch"])
async def test_stopping_cuts_what_outlives_the_grace_time(registry, slot, kind):
    started, gate = threading.Event(), threading.Event()

    @registry.task("async")
    async def handle(n: int):
        started.set()
        await asyncio.Event().wait()

    @registry.task("stubborn")
    async def stubborn(n: int):
        started.set()
        while not gate.is_set():
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                continue

    @registry.task("sync")
    def sync(n: int):
        started.set()
        gate.wait(60)

    @registry.task("batch", batch=5)
    async def batched(batch: Batch[dict]):
        batch[0].done()
        started.set()
        await asyncio.Event().wait()

    jobs = slot.give([{"n": 1}] * 3, queue=kind)
    await wait_true(started.is_set)
    if kind == "stubborn":
        asyncio.get_running_loop().call_later(0.2, gate.set)
    await slot.runner.stop(0.02)
    gate.set()
    kinds = await slot.wait_settled(jobs)
    first = {"batch": "done", "stubborn": "done"}.get(kind, "returned")
    assert kinds == [first, "returned", "returned"]


async def test_jobs_of_a_queue_without_code_are_returned(slot):
    assert await slot.wait_settled(slot.give([1, 2])) == ["snooze", "snooze"]
    assert slot.outcomes[1][1] == 15.0


async def test_the_status_board_shows_running_calls(registry):
    shown = []

    class StatusBoard:
        def begin(self, job_id, jobs, timeout_s, began_s):
            shown.append((job_id, jobs, timeout_s))

        def beat(self):
            shown.append("beat")

        def end(self):
            shown.append("end")

    gate = asyncio.Event()

    @registry.task("one", timeout="3s")
    async def one(n: int): ...

    @registry.task("many", batch=5, timeout="4s")
    async def many(batch: Batch[int]): ...

    @registry.task("wide", concurrency=2, timeout="5s")
    async def wide(n: int):
        gate.set() if n else await gate.wait()

    async with running_slot(registry, StatusBoard()) as slot:
        await slot.wait_settled(slot.give([{"n": 1}], queue="one"))
        await slot.wait_settled(slot.give([1, 2], queue="many"))
        await slot.wait_settled(slot.give([{"n": 0}, {"n": 1}], queue="wide"))
    assert shown == [
        (1, 1, 3.0),
        "end",
        (-1, 2, 4.0),
        "end",
        (4, 1, 5.0),
        (-1, 2, 5.0),
        "end",
    ]
