"""The dispatcher on a real database, with slots whose work the test ends."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
from tests.kit.waiting import wait_true

from headrace.jobs import NewJob, store
from headrace.jobs.agent import worker_proxy
from headrace.jobs.agent.crash_attribution import started_jobs
from headrace.jobs.agent.dispatcher import Dispatcher
from headrace.jobs.agent.queue_state import QueueState, TaskFacts
from headrace.jobs.agent.worker_proxy import InFlightLease, WorkerProxy
from headrace.jobs.leases import LeaseManager
from headrace.jobs.messages import Ack, Ready, Spend, Work
from headrace.jobs.outcomes import DONE
from headrace.jobs.slots.status_board import SlotStatus

NOTHING = SlotStatus(None, 0, 0.0, 0.0, 0.0)


class HeldChannel:
    """A slot's channel that keeps work until the test ends it."""

    def __init__(self):
        self.works = []
        self.given = []
        self.answers = []

    def send(self, message):
        if isinstance(message, Work):
            self.works.append(message)
            self.given.append(message.queue)
        else:
            self.answers.append(message)


class Host:
    """A dispatcher over the queues of this test, and its slots."""

    def __init__(self, dispatcher, queues, leases):
        self.dispatcher = dispatcher
        self.queues = queues
        self.leases = leases

    def worker(self, bound=None):
        """Add a slot that is ready for work."""
        worker = WorkerProxy(HeldChannel(), bound=self.queues[bound] if bound else None)
        self.dispatcher.add(worker)
        self.dispatcher.receive(worker, Ready(1))
        return worker

    async def wait_given(self, worker, count=1):
        """Wait until the slot has `count` works. Return them."""
        await wait_true(lambda: len(worker.channel.works) >= count)
        return worker.channel.works

    def finish(self, worker, *, run_s=0.001):
        """End the oldest work of a slot: all jobs done."""
        work = worker.channel.works.pop(0)
        ack = Ack(lease_id=work.lease_id, calls=1, run_s=run_s)
        self.dispatcher.receive(worker, ack)
        return work


@pytest.fixture
def open_host(postgres, jobs, registry, config):
    """`open_host(queue={options})`: a running dispatcher with one queue per option."""

    @asynccontextmanager
    async def opened(poll_s=0.05, **queues):
        for name, options in queues.items():

            @registry.task(name, **options)
            async def never_called(job=None): ...

        rows = await jobs.queues.declare()
        queues = {t.queue: QueueState(TaskFacts.of(t), rows[t.queue].id) for t in registry}
        for queue in queues.values():
            queue.allowance = None
        ids = [queue.queue_id for queue in queues.values()]
        host_id = await store.leases.add_host(postgres, "test", ids, 60)
        leases = LeaseManager(postgres, config, host_id)
        dispatcher = Dispatcher(leases, list(queues.values()), lambda: poll_s)
        running = asyncio.create_task(dispatcher.run())
        try:
            yield Host(dispatcher, queues, leases)
            assert not running.done()
        finally:
            await dispatcher.end_claims()
            await dispatcher.abort()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await leases.flush()

    return opened


async def fill(jobs, queue, count, **options):
    """Enqueue jobs. Return their ids."""
    return await jobs.enqueue_many(
        [NewJob(queue=queue, payload={}, **options) for _ in range(count)]
    )


async def test_a_bound_slot_serves_its_queue_alone(open_host, jobs, sql):
    async with open_host(a={"batch": 2}, b={"batch": 2}) as host:
        await fill(jobs, "a", 2)
        worker = host.worker(bound="b")
        ids = await fill(jobs, "b", 2)
        [work] = await host.wait_given(worker)
        assert (work.queue, list(work.ids)) == ("b", ids)
        host.finish(worker)
        await host.leases.flush()
        assert worker.channel.given == ["b"]
        assert await _counts(sql, ready=2, leased=0)


async def test_floating_slots_go_to_the_most_important_queue_first(open_host, jobs):
    async with open_host(
        low={"batch": 1, "importance": 8},
        high={"batch": 1, "importance": 2},
        mid={"batch": 1, "importance": 5},
    ) as host:
        for queue in ("low", "mid", "high"):
            await fill(jobs, queue, 1)
        worker = host.worker()
        for _ in range(3):
            await host.wait_given(worker)
            host.finish(worker)
        assert worker.channel.given == ["high", "mid", "low"]


async def test_waiting_calls_use_no_floating_slot_while_their_own_has_room(open_host, jobs):
    async with open_host(hanging={"concurrency": 8}, quick={"batch": 10}) as host:
        own, floating = host.worker("hanging"), host.worker()
        await fill(jobs, "hanging", 3)
        host.dispatcher.wake_all()
        await wait_true(lambda: own.jobs_open == 3)
        await fill(jobs, "quick", 1)
        host.dispatcher.wake_all()
        await host.wait_given(floating)
        assert floating.channel.given == ["quick"]
        host.finish(floating)
        await fill(jobs, "hanging", 6)
        host.dispatcher.wake_all()
        await wait_true(lambda: own.jobs_open + floating.jobs_open == 9)
        assert floating.jobs_open


async def test_equally_important_queues_share_the_floating_slots(open_host, jobs):
    async with open_host(a={"batch": 1}, b={"batch": 1}, c={"batch": 1}) as host:
        for queue in ("a", "b", "c"):
            await fill(jobs, queue, 10)
        workers = [host.worker() for _ in range(6)]
        for worker in workers:
            await host.wait_given(worker)
        given = sorted(worker.channel.given[0] for worker in workers)
        assert given == ["a", "a", "b", "b", "c", "c"]


async def test_a_floating_slot_stays_until_its_queue_is_empty(open_host, jobs):
    async with open_host(a={"batch": 1}, b={"batch": 1}) as host:
        await fill(jobs, "a", 3)
        worker = host.worker()
        await host.wait_given(worker)
        await fill(jobs, "b", 3)
        host.dispatcher.wake_all()
        for _ in range(6):
            await host.wait_given(worker)
            host.finish(worker)
        assert worker.channel.given == ["a"] * 3 + ["b"] * 3


async def test_no_queue_keeps_a_floating_slot_forever(open_host, jobs, monkeypatch):
    """Also a less important queue: every 8th choice begins with it."""
    monkeypatch.setattr(worker_proxy, "QUEUE_SHARE_S", 0.0)
    async with open_host(
        high={"batch": 1, "importance": 0}, low={"batch": 1, "importance": 9}
    ) as host:
        await fill(jobs, "high", 200)
        await fill(jobs, "low", 5)
        worker = host.worker()
        for _ in range(60):
            await host.wait_given(worker)
            host.finish(worker)
        assert 2 <= worker.channel.given.count("low") <= 20


async def test_a_claim_serves_many_slots_and_each_gets_a_batch_of_its_own(open_host, jobs):
    async with open_host(a={"batch": 3}) as host:
        ids = await fill(jobs, "a", 12)
        workers = [host.worker(bound="a") for _ in range(4)]
        for worker in workers:
            await host.wait_given(worker)
        works = [work for worker in workers for work in worker.channel.works]
        assert sorted(job_id for work in works for job_id in work.ids) == ids
        assert {len(work.ids) for work in works} == {3}
        assert len({work.lease_id for work in works}) == 4


async def test_single_jobs_are_refilled_as_they_end(open_host, jobs):
    async with open_host(a={"concurrency": 4}) as host:
        ids = await fill(jobs, "a", 7)
        worker = host.worker(bound="a")
        await wait_true(lambda: worker.jobs_open == 4)
        first = worker.channel.works[0]
        host.dispatcher.receive(worker, Ack(lease_id=first.lease_id, outcomes={ids[0]: DONE}))
        await wait_true(lambda: len(worker.channel.works) > 1)
        assert list(worker.channel.works[1].ids) == ids[4:5]
        assert worker.jobs_open == 4


async def test_quick_batches_are_claimed_in_advance_and_returned_if_no_slot_is_free(
    open_host, jobs, sql
):
    async with open_host(a={"batch": 2}) as host:
        await fill(jobs, "a", 20)
        worker = host.worker(bound="a")
        await host.wait_given(worker)
        assert not host.queues["a"].prefetched, "the run time is unknown"
        host.finish(worker)
        await wait_true(lambda: host.queues["a"].prefetched)
        await host.wait_given(worker)
        await wait_true(lambda: not host.queues["a"].prefetched)
        await wait_true(lambda: _counts(sql, ready=16, leased=2))
        assert host.queues["a"].prefetch_max == 0, "until calls end quickly again"
        host.finish(worker, run_s=0.5)
        await host.wait_given(worker)
        await wait_true(lambda: _counts(sql, ready=14, leased=2))
        assert not host.queues["a"].prefetched, "slow batches are not claimed in advance"
        counts = host.queues["a"].take_counts()
        assert (counts.ended, counts.calls) == (4, 2)
        assert host.queues["a"].take_counts() is None


@pytest.mark.parametrize(
    ("call_s", "ahead"),
    [
        (math.inf, 0),
        (1.0, 0),
        (0.11, 0),
        (0.09, 1),
        (0.021, 1),
        (0.005, 4),
        (0.0001, 10),
        (0.0, 10),
    ],
)
def test_the_quicker_the_calls_the_more_is_claimed_in_advance(call_s, ahead):
    assert QueueState(facts_of(batch=10), 1, call_s=call_s).prefetch_max == ahead
    assert QueueState(facts_of(batch=None), 1, call_s=call_s).prefetch_max == 0


async def test_jobs_of_lanes_are_claimed_in_advance_only_for_very_quick_calls(open_host, jobs):
    async with open_host(a={"batch": 1}) as host:
        await fill(jobs, "a", 8, lane="x")
        worker = host.worker(bound="a")
        for _ in range(3):
            [work] = await host.wait_given(worker)
            assert work.lanes == ["x"]
            assert work.start_before_s is not None
            assert not host.queues["a"].prefetched
            host.finish(worker, run_s=0.03)
        await host.wait_given(worker)
        host.queues["a"].call_s = 0.001
        host.finish(worker, run_s=0.001)
        await wait_true(lambda: host.queues["a"].prefetched)


async def test_a_job_due_soon_starts_before_the_next_poll(open_host, jobs):
    async with open_host(poll_s=60.0, a={"batch": 1}) as host:
        worker = host.worker(bound="a")
        await wait_true(lambda: host.queues["a"].was_empty)
        await fill(jobs, "a", 1, after_s=0.3)
        host.dispatcher.wake(host.queues["a"].queue_id)
        await wait_true(lambda: worker.channel.works, deadline_s=45)


async def test_lanes_without_work_are_not_claimed_until_the_poll_finds_some(
    open_host, jobs, monkeypatch
):
    """Without notifications: a host's queues share one statement."""
    calls = []
    async with open_host(poll_s=0.01, a={}, b={"batch": 2}) as host:

        def noted(name, call, *args, **options):
            calls.append(name)
            return call(*args, **options)

        for name in ("claim_lanes", "queues_with_work"):
            call = getattr(host.leases, name)
            monkeypatch.setattr(host.leases, name, partial(noted, name, call))
        worker = host.worker()
        queues = host.queues.values()
        await wait_true(lambda: all(queue.lanes_due_s == math.inf for queue in queues))
        calls.clear()
        await wait_true(lambda: calls.count("queues_with_work") > 10)
        assert "claim_lanes" not in calls
        await fill(jobs, "b", 1, lane="x")
        await host.wait_given(worker)
        host.finish(worker)


async def test_a_notification_during_an_empty_claim_is_kept(open_host):
    async with open_host(poll_s=60.0, a={"batch": 1}) as host:
        host.worker(bound="a")
        queue = host.queues["a"]
        await wait_true(lambda: queue.was_empty and not queue.is_claiming)
        before = queue.cursor._claims
        host.dispatcher.wake(queue.queue_id)
        while not queue.is_claiming or queue.may_have_jobs:
            await asyncio.sleep(0)
        host.dispatcher.wake(queue.queue_id)
        await wait_true(lambda: queue.cursor._claims == before + 2)


async def test_jobs_of_a_dead_slot_are_lost_or_returned(open_host, jobs, sql):
    async with open_host(a={"concurrency": 2, "retries": 3}) as host:
        ids = await fill(jobs, "a", 2)
        worker = host.worker(bound="a")
        await wait_true(lambda: worker.jobs_open == 2)
        alone = replace(NOTHING, job_id=ids[0], jobs=1)
        assert host.dispatcher.handle_crash(worker, alone, "it died") == 2
        await host.leases.flush()
        rows = await sql("SELECT id, losses, attempt FROM headrace.job_ready ORDER BY id")
        assert [tuple(row) for row in rows] == [(ids[0], 1, 0), (ids[1], 0, 0)]
        late = Ack(lease_id=worker.channel.works[0].lease_id)
        host.dispatcher.receive(worker, late)
        await host.leases.flush()
        assert await _counts(sql, ready=2, leased=0), "late messages of a dead slot are dropped"
        other = host.worker(bound="a")
        await wait_true(lambda: ids[1] in {i for w in other.channel.works for i in w.ids})
        alone = replace(NOTHING, job_id=ids[1], jobs=1)
        host.dispatcher.handle_crash(other, alone, "over its timeout", is_overtime=True)
        await host.leases.flush()
        rows = await sql(f"SELECT losses, attempt FROM headrace.job_ready WHERE id = {ids[1]}")
        assert [tuple(row) for row in rows] == [(0, 1)], "a timeout is a failed run"


async def test_a_job_that_killed_its_process_twice_gets_a_slot_alone(open_host, jobs, sql):
    async with open_host(a={"concurrency": 10}) as host:
        ids = await fill(jobs, "a", 4)
        await sql(f"UPDATE headrace.job_ready SET losses = 2 WHERE id = {ids[1]}")
        worker = host.worker(bound="a")
        queue = host.queues["a"]
        held = []
        while len({job_id for works in held for job_id in works}) < 4:
            await wait_true(lambda: worker.channel.works and not queue.is_claiming)
            await wait_true(
                lambda: worker.runs_alone or queue.prefetched or not queue.may_have_jobs
            )
            held.append([job_id for work in worker.channel.works for job_id in work.ids])
            while worker.channel.works:
                host.finish(worker)
        assert [ids[1]] in held
        assert not [works for works in held if ids[1] in works and len(works) > 1]


async def test_tokens_of_a_slot_are_answered(open_host, jobs):
    async with open_host(a={"batch": 1}) as host:
        await jobs.lanes.set("a", "x", starts_max=2, window_s=60, concurrency=None)
        worker = host.worker(bound="a")
        for call in (1, 2, 3):
            spend = Spend(call=call, queue="a", lane="x", starts=1, wait_max_s=1.0)
            host.dispatcher.receive(worker, spend)
            await wait_true(lambda call=call: len(worker.channel.answers) == call)
        waits = [answer.wait_s for answer in worker.channel.answers]
        assert waits[2] is None
        assert waits[:2] == [pytest.approx(0, abs=0.2)] * 2


async def test_a_drain_stops_claims_and_returns_what_no_slot_has(open_host, jobs, sql):
    async with open_host(a={"batch": 2}) as host:
        await fill(jobs, "a", 20)
        worker = host.worker(bound="a")
        await host.wait_given(worker)
        host.finish(worker)
        await wait_true(lambda: host.queues["a"].prefetched)
        held = len(await host.wait_given(worker))
        await host.dispatcher.end_claims()
        await host.leases.flush()
        assert len(worker.channel.works) == held == 1
        await wait_true(lambda: _counts(sql, ready=16, leased=2))
        host.finish(worker)
        await host.leases.flush()
        assert await _counts(sql, ready=16, leased=0)


def facts_of(*, batch, concurrency=1):
    """Facts of a task."""
    return TaskFacts(
        queue="a",
        batch=batch,
        concurrency=concurrency,
        timeout_s=1,
        limiter="a",
        importance=5,
        is_async=True,
    )


def work_of(lease_id, ids):
    """Work of these jobs."""
    count = len(ids)
    return Work(
        queue="a",
        lease_id=lease_id,
        ids=ids,
        payloads=[b"{}"] * count,
        attempts=[0] * count,
        losses=[0] * count,
        lanes=[None] * count,
        headers=[None] * count,
        versions=[1] * count,
        retries=3,
    )


@pytest.mark.parametrize(
    ("batch", "concurrency", "status", "started"),
    [
        pytest.param(None, 1, (None, 0), set(), id="nothing ran"),
        pytest.param(None, 1, (2, 1), {2}, id="the one that ran"),
        pytest.param(None, 2, (None, 2), {1, 2}, id="two at once: the oldest"),
        pytest.param(None, 9, (None, 3), {1, 2, 3, 4, 5}, id="many at once: any of them"),
        pytest.param(None, 9, (4, 1), {4}, id="many may, one did"),
        pytest.param(5, 1, (None, 5), {1, 2, 3, 4, 5}, id="a batch as a whole"),
        pytest.param(5, 1, (3, 1), {3}, id="one of a bisected batch"),
        pytest.param(None, 9, (77, 1), set(), id="a job of another slot"),
    ],
)
def test_a_crash_is_attributed_to_the_jobs_that_had_started(batch, concurrency, status, started):
    queue = QueueState(facts_of(batch=batch, concurrency=concurrency), 1)
    worker = WorkerProxy(HeldChannel(), queue=queue)
    worker.leases[1] = InFlightLease(1, [1, 2, 3, 4, 5], [0] * 5, retries=3)
    assert started_jobs(worker, replace(NOTHING, job_id=status[0], jobs=status[1])) == started


def test_a_crash_is_not_attributed_to_settled_jobs():
    queue = QueueState(facts_of(batch=5), 1)
    worker = WorkerProxy(HeldChannel())
    worker.accepts_work = True
    work = work_of(1, [1, 2, 3, 4, 5])
    lease = InFlightLease(1, work.ids, work.attempts, retries=work.retries)
    worker.assign(queue, work, lease)
    for ids in ([2, 5], [2]):
        before = lease.open_count
        lease.close(ids)
        worker.release(lease, before - lease.open_count)
    assert worker.jobs_open == 3
    assert started_jobs(worker, replace(NOTHING, jobs=5)) == {1, 3, 4}


async def _counts(sql, *, ready, leased):
    [row] = await sql("""
        SELECT (SELECT count(*) FROM headrace.job_ready) AS ready,
               (SELECT coalesce(sum(cardinality(ids)), 0) FROM headrace.job_lease) AS leased""")
    return (row["ready"], row["leased"]) == (ready, leased)
