"""A slot's hooks, middlewares around its calls, and payloads of other versions."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest
from one_slot import running_slot

from headrace.jobs import Batch, NewJob, Registry, Retry
from headrace.jobs.errors import PayloadNewer, SlotHookFailed
from headrace.jobs.messages import Ack
from headrace.jobs.model import JobsConfig
from headrace.jobs.slots.runner import SlotRunner


@pytest.fixture
def registry():
    return Registry()


async def run_all(registry, *works):
    """Run works, each as queue and payloads, one by one in a new slot. Return the slot."""
    async with running_slot(registry) as slot:
        for queue, payloads in works:
            await slot.wait_settled(slot.give(payloads, queue=queue, attempts=[2] * len(payloads)))
    return slot


async def test_hooks_run_before_the_first_and_after_the_last_job(registry):
    seen, threads = [], set()

    @registry.on_slot_start
    async def open_pool():
        seen.append("open")

    @registry.on_slot_start
    def prepare_thread():
        threads.add(threading.get_ident())
        seen.append("prepare")

    @registry.on_slot_stop
    def break_something():
        raise ZeroDivisionError

    @registry.on_slot_stop
    async def close_pool():
        await asyncio.sleep(0)
        seen.append("close")

    @registry.task("q")
    def handle(n: int):
        threads.add(threading.get_ident())
        seen.append(n)

    await run_all(registry, ("q", [{"n": 1}, {"n": 2}]))
    assert seen == ["open", "prepare", 1, 2, "close"]
    assert len(threads) == 1, "a sync hook prepares the thread of the handlers"


@pytest.mark.parametrize("raised", [ValueError("no pool"), SystemExit(3)])
async def test_a_start_hook_that_raises_ends_the_slot(registry, raised):
    seen = []

    @registry.on_slot_start
    async def open_pool():
        raise raised

    registry.on_slot_start(lambda: seen.append("next"))
    slot = SlotRunner(registry, send=seen.append, config=JobsConfig())
    with pytest.raises(SlotHookFailed, match=r"start hook '.*open_pool' raised.*"):
        await slot.start()
    assert seen == []


async def test_middlewares_surround_every_call_in_their_order(registry):
    seen = []

    @registry.middleware
    async def outer(call, next):  # noqa: A002 - the name that users read
        seen.append(f"outer {call.queue} {len(call.jobs)} {call.attempt}")
        answer = await next()
        seen.append(f"outer got {answer}")
        return answer

    @registry.middleware
    async def inner(call, next):  # noqa: A002
        seen.append(f"inner {call.jobs[0].payload}".partition("(")[0])
        try:
            return await next()
        finally:
            seen.append("inner left")

    @registry.task("single", keep_result=True)
    async def single(n: int):
        return n + 1

    @registry.task("sync", keep_result=True)
    def sync(job: dict):
        return threading.current_thread() is threading.main_thread()

    @registry.task("batch", batch=5)
    async def batch(jobs: Batch[int]):
        seen.append(list(jobs.payloads))

    slot = await run_all(registry, ("single", [{"n": 1}]), ("sync", [{"n": 1}]), ("batch", [7, 8]))
    assert seen == [
        *("outer single 1 3", "inner Arguments", "inner left", "outer got 2"),
        *("outer sync 1 3", "inner {'n': 1}", "inner left", "outer got False"),
        *("outer batch 2 3", "inner 7", [7, 8], "inner left", "outer got None"),
    ]
    assert [slot.outcomes[job][3] for job in (1, 2, 3)] == [b"2", b"false", None]


async def test_errors_pass_through_middlewares(registry):
    caught = []

    @registry.middleware
    async def watch(call, next):  # noqa: A002
        try:
            return await next()
        except Exception as error:
            caught.append(repr(error))
            raise

    @registry.middleware
    def watch_threads(call, next):  # noqa: A002
        try:
            return next()
        finally:
            caught.append(threading.current_thread().name)

    @registry.task("q")
    def handle(n: int):
        raise Retry(7) if n else ValueError("bad")

    slot = await run_all(registry, ("q", [{"n": 0}, {"n": 1}]))
    assert slot.outcomes[1][2] == "ValueError: bad"
    assert slot.outcomes[2][:2] == ("retry", 7.0)
    assert caught == [
        *("headrace-handler", "ValueError('bad')"),
        *("headrace-handler", "Retry('the handler requested a retry')"),
    ]


async def test_a_middleware_may_replace_the_handler_and_a_sync_one_leaves_async_handlers(registry):
    seen = []
    registry.middleware(lambda call, next_: seen.append(call))

    @registry.middleware
    async def skip(call, next):  # noqa: A002
        if call.jobs[0].payload.n:
            await next()

    @registry.task("q")
    async def handle(n: int):
        seen.append(n)

    slot = await run_all(registry, ("q", [{"n": 0}, {"n": 1}]))
    assert [slot.outcomes[job][0] for job in (1, 2)] == ["done", "done"]
    assert seen == [1]


class Mail(msgspec.Struct):
    """The current version."""

    to: list[str]
    text: str


UPGRADE = {
    1: lambda old: {"to": old["to"].split(","), "body": old["body"]},
    3: lambda old: {"to": old["to"], "text": old["body"]},
}
PAYLOADS = {
    1: {"to": "ann,bob", "body": "hi"},
    2: {"to": ["ann", "bob"], "body": "hi"},
    3: {"to": ["ann", "bob"], "body": "hi"},
    4: {"to": ["ann", "bob"], "text": "hi"},
}
NOW = Mail(["ann", "bob"], "hi")


def declare(registry, kind):
    """Declare a task of version 4. Return it and the payloads that it received."""
    seen = []

    async def batch(batch: Batch[Mail]):
        seen.extend(batch.payloads)

    async def payload(mail: Mail):
        seen.append(mail)

    async def fields(to: list[str], text: str):
        seen.append(Mail(to, text))

    handler = {"batch": batch, "payload": payload, "fields": fields}[kind]
    options = {"batch": 10} if kind == "batch" else {}
    return registry.task("q", version=4, upgrade=UPGRADE, **options)(handler), seen


@pytest.mark.parametrize("kind", ["batch", "payload", "fields"])
async def test_old_payloads_are_upgraded_and_newer_ones_wait_for_newer_code(registry, kind):
    _, seen = declare(registry, kind)
    payloads = [PAYLOADS[version] for version in (1, 2, 3, 4)]
    payloads += [{"body": "hi"}, {"of": "tomorrow"}, {"of": "today"}]
    async with running_slot(registry) as slot:
        kinds = await slot.wait_settled(slot.give(payloads, versions=[1, 2, 3, 4, 1, 5, 4]))
    assert kinds == [*["done"] * 4, "retry", "snooze", "fail"]
    assert slot.outcomes[6][1] == 15.0
    assert seen == [NOW] * 4
    assert len([message for message in slot.said if isinstance(message, Ack)]) <= 7


async def test_jobs_have_the_version_of_their_task(jobs, registry, sql):
    handle, _ = declare(registry, "payload")
    assert handle.decode(msgspec.json.encode(PAYLOADS[1]), 1) == NOW
    with pytest.raises(PayloadNewer, match="version 5, this code supports 4"):
        handle.decode(b"{}", 5)
    await handle.enqueue(NOW)
    await handle.enqueue(NOW, lane="a")
    await jobs.enqueue(NewJob(queue="q", payload=PAYLOADS[1]))
    rows = await sql(
        "SELECT version FROM headrace.job_ready UNION ALL SELECT version FROM headrace.lane_job"
    )
    assert sorted(row["version"] for row in rows) == [1, 4, 4]
