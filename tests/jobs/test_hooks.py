"""Start and stop hooks of a slot, and middlewares around its handler calls."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest
from tests.kit.waiting import wait_true

from headrace.jobs import Batch, Registry, Retry
from headrace.jobs.errors import SlotHookFailed
from headrace.jobs.messages import Ack, Left, Ready, Work
from headrace.jobs.model import JobsConfig
from headrace.jobs.slots.runner import SlotRunner


@pytest.fixture
def registry():
    return Registry()


def work_of(queue, payloads, lease_id=1):
    jobs = len(payloads)
    return Work(
        queue=queue,
        lease_id=lease_id,
        ids=[lease_id * 100 + n for n in range(jobs)],
        payloads=[msgspec.json.encode(payload) for payload in payloads],
        attempts=[2] * jobs,
        losses=[0] * jobs,
        lanes=[None] * jobs,
        traceparents=[None] * jobs,
        versions=[1] * jobs,
        retries=5,
    )


async def run_all(registry, *works):
    """Run the works one by one in a new slot. Return its acks."""
    said = []
    slot = SlotRunner(registry, send=said.append, config=JobsConfig())
    await slot.start()
    for work in works:
        slot.give(work)
        await wait_true(lambda: slot.jobs_open == 0)
    await slot.stop(5.0)
    assert isinstance(said[0], Ready)
    assert isinstance(said[-1], Left)
    return [message for message in said if isinstance(message, Ack)]


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

    await run_all(registry, work_of("q", [{"n": 1}, {"n": 2}]))
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


async def test_middlewares_are_around_every_call_in_their_order(registry):
    seen = []

    @registry.middleware
    async def outer(call, next):  # noqa: A002 - the name that users read
        seen.append(f"outer {call.queue} {len(call.jobs)} {call.attempt}")
        answer = await next()
        seen.append(f"outer got {answer}")
        return answer

    @registry.middleware
    async def inner(call, next):  # noqa: A002
        seen.append(f"inner {call.jobs[0].payload}")
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

    ack = await run_all(
        registry,
        work_of("single", [{"n": 1}], 1),
        work_of("sync", [{"n": 1}], 2),
        work_of("batch", [7, 8], 3),
    )
    assert seen[1].startswith("inner Arguments(n=1)")
    del seen[1]
    assert seen == [
        "outer single 1 3",
        "inner left",
        "outer got 2",
        "outer sync 1 3",
        "inner {'n': 1}",
        "inner left",
        "outer got False",
        "outer batch 2 3",
        "inner 7",
        [7, 8],
        "inner left",
        "outer got None",
    ]
    assert [one.results for one in ack] == [[b"2"], [b"false"], ()]
    assert ack[2].ids is None


async def test_what_a_handler_raises_passes_through_middlewares(registry):
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

    kinds = {}
    for ack in await run_all(registry, work_of("q", [{"n": 0}, {"n": 1}])):
        kinds |= dict(
            zip(
                ack.ids,
                zip(ack.kinds, ack.delays_s, ack.errors, strict=True),
                strict=True,
            )
        )
    assert kinds[100][2] == "ValueError: bad"
    assert kinds[101][:2] == ("retry", 7.0)
    assert caught == [
        "headrace-handler",
        "ValueError('bad')",
        "headrace-handler",
        "Retry('the handler requested a retry')",
    ]


async def test_sync_middlewares_leave_async_handlers_alone(registry):
    seen = []
    registry.middleware(lambda call, next_: seen.append(call))

    @registry.task("q")
    async def handle(n: int):
        seen.append(n)

    await run_all(registry, work_of("q", [{"n": 1}]))
    assert seen == [1]


async def test_a_middleware_may_answer_for_the_handler(registry):
    @registry.middleware
    async def skip(call, next):  # noqa: A002
        if call.jobs[0].payload.n:
            await next()

    seen = []

    @registry.task("q")
    async def handle(n: int):
        seen.append(n)

    ack = await run_all(registry, work_of("q", [{"n": 0}, {"n": 1}]))
    assert sum(2 if one.ids is None else len(one.ids) for one in ack) == 2
    assert seen == [1]
