"""Whatever a handler raises or sets, its jobs are settled and the worker continues."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.waiting import wait_true

from headrace.jobs import Batch, Fail, JobContext, Retry, Snooze
from headrace.jobs.model import ERROR_CHARACTERS_MAX, TRACEBACK_CHARACTERS_MAX
from headrace.jobs.outcomes import Outcome, outcome_of


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


def _retry_abc():
    return Retry("abc")


NO_DELAY = "after_s: expected seconds from 0 to 31622400"
FAULTS = {
    "surrogate": (lambda: RuntimeError("bad\ud800"), "RuntimeError: bad?"),
    "mute": (Mute, "Mute: Mute whose text cannot be read (KeyError)"),
    "long": (lambda: ValueError("x" * 100_000), "... " + "x" * ERROR_CHARACTERS_MAX),
    "retry_of_text": (_retry_abc, "TypeError: after_s: expected seconds, got a str"),
    "retry_nan": (lambda: Retry(float("nan")), f"ValueError: {NO_DELAY}, got nan"),
    "snooze_past": (lambda: Snooze(-5), f"ValueError: {NO_DELAY}, got -5"),
    "snooze_endless": (lambda: Snooze(float("inf")), f"ValueError: {NO_DELAY}, got inf"),
    "snooze_for_ages": (lambda: Snooze(1e30), f"ValueError: {NO_DELAY}, got 1e+30"),
    "retry_careless": (Careless, "Careless"),
    "snooze_unspoken": (Unspoken, "Unspoken"),
    "base": (lambda: Odd("odd"), "Odd: odd"),
    "generator_exit": (GeneratorExit, "GeneratorExit: GeneratorExit"),
    "system_exit": (lambda: SystemExit(3), "SystemExit: 3"),
    "keyboard": (KeyboardInterrupt, "KeyboardInterrupt: KeyboardInterrupt"),
    "stop_iteration": (StopIteration, "RuntimeError: coroutine raised StopIteration"),
}


@pytest.mark.parametrize("kind", ["async", "sync", "batch"])
@pytest.mark.parametrize("name", FAULTS)
async def test_any_fault_is_a_failed_attempt(registry, working, sql, name, kind):
    make, error = FAULTS[name]
    runs = []

    if kind == "batch":

        @registry.task("q", retries=1, batch=5)
        async def handle(batch: Batch[dict]):
            runs.append(1)
            raise make()

    elif kind == "sync":

        @registry.task("q", retries=1)
        def handle(job: dict):
            runs.append(1)
            raise make()

    else:

        @registry.task("q", retries=1)
        async def handle(job: dict):
            runs.append(1)
            raise make()

    after = registry.task("after")(_note_after(afterwards := []))
    job_id = await handle.enqueue({})
    async with working():
        await wait_true(lambda: _is_failed(handle.jobs(), job_id))
        await after.enqueue({})
        await wait_true(lambda: afterwards, what="the worker still works")
    assert (await handle.jobs().job(job_id)).error == error
    assert len(runs) == 2
    assert await sql("SELECT id FROM headrace.job_lease") == []


async def test_an_awaited_future_that_raises_generator_exit(registry, working):
    @registry.task("q", retries=0)
    async def handle():
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_exception, GeneratorExit())
        await future

    job_id = await handle.enqueue()
    async with working():
        await wait_true(lambda: _is_failed(handle.jobs(), job_id))


async def test_a_handler_that_cancels_its_own_task(registry, working):
    @registry.task("q", retries=1)
    async def handle(waits: int):
        asyncio.current_task().cancel()
        if waits:
            await asyncio.Event().wait()

    waited, hurried = await handle.enqueue(waits=1), await handle.enqueue(waits=0)
    async with working():
        await wait_true(lambda: _is_failed(handle.jobs(), waited))
        await wait_true(lambda: _is_gone(handle.jobs(), hurried))
    assert (await handle.jobs().job(waited)).error == "the handler cancelled itself"


async def test_words_of_another_type_are_taken_as_text(registry, working, sql):
    given = [ValueError("why"), None, 7, Mute(), "\ud800\0"]
    told = ["why", None, "7", "Mute whose text cannot be read (KeyError)", "?\N{SYMBOL FOR NULL}"]
    runs = []

    @registry.task("q", retries=0, batch=10)
    async def handle(batch: Batch[int]):
        for job in batch:
            runs.append(job.payload)
            kind = job.fail if job.payload % 2 else job.retry
            kind(why=given[job.payload // 2])

    ids = await handle.enqueue_many(list(range(10)))
    jobs = handle.jobs()
    async with working():
        for job_id in ids:
            await wait_true(lambda job_id=job_id: _is_failed(jobs, job_id))
    errors = [(await jobs.job(job_id)).error or None for job_id in ids]
    assert errors == [text for text in told for _ in range(2)]
    assert sorted(runs) == list(range(10))
    assert await sql("SELECT id FROM headrace.job_lease") == []


@pytest.mark.parametrize("batch", [None, 5])
async def test_an_outcome_of_no_meaning_is_a_failed_attempt(registry, working, sql, batch):
    """A handler can assign `outcome` itself, without the methods."""

    def spoil(jobs):
        for job in jobs:
            job.outcome = Outcome("retry", "soon") if job.payload["n"] else "done"

    if batch:

        @registry.task("q", retries=0, batch=batch)
        async def handle(jobs: Batch[dict]):
            spoil(jobs)

    else:

        @registry.task("q", retries=0)
        async def handle(job: JobContext[dict]):
            spoil([job])

    ids = await handle.enqueue_many([{"n": n} for n in range(2)])
    async with working():
        for job_id in ids:
            await wait_true(lambda job_id=job_id: _is_failed(handle.jobs(), job_id))
    assert await sql("SELECT id FROM headrace.job_lease") == []


def test_what_is_said_is_checked_when_it_is_said():
    job = JobContext(1, {}, lease_id=1)
    for send in (Snooze, Retry, job.retry, job.snooze):
        with pytest.raises(TypeError, match="after_s: expected seconds, got a str"):
            send("abc")
    for send in (Snooze, job.snooze):
        with pytest.raises(TypeError, match="NoneType"):
            send(None)
    assert job.outcome is None


def test_texts_of_outcomes_are_bounded():
    outcome = outcome_of(ValueError("x" * 100_000))
    assert len(outcome.error) <= ERROR_CHARACTERS_MAX + 4
    assert len(outcome.traceback) <= TRACEBACK_CHARACTERS_MAX + 4
    assert len(outcome_of(Fail("y" * 100_000)).error) <= ERROR_CHARACTERS_MAX + 4


def _note_after(seen):
    async def after(job: dict):
        seen.append(job)

    return after


async def _is_failed(jobs, job_id):
    return (await jobs.job(job_id)).state.value == "failed"


async def _is_gone(jobs, job_id):
    return (await jobs.job(job_id)).state.value == "gone"
