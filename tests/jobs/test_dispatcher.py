"""Which queue for which slot: on a real store, with slots whose work a test ends itself."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.kit.waiting import wait_true

from headrace.jobs import NewJob, store
from headrace.jobs.agent import seats as seats_module
from headrace.jobs.agent.blame import begun_jobs
from headrace.jobs.agent.board import Doing
from headrace.jobs.agent.dispatcher import Dispatcher
from headrace.jobs.agent.lines import Line, TaskFacts
from headrace.jobs.agent.seats import Hand, Seat
from headrace.jobs.leases import Desk
from headrace.jobs.slots.messages import Ready, Settled, Spend, Work

NOTHING = Doing(None, 0, 0.0, 0.0, 0.0)


class HeldPlace:
    """A slot that keeps its work until the test ends it."""

    def __init__(self):
        self.works = []
        self.given = []
        self.answers = []

    def give(self, work):
        self.works.append(work)
        self.given.append(work.queue)

    def answer(self, answer):
        self.answers.append(answer)

    def stop(self, grace_s): ...


class Floor:
    """A dispatcher over the queues of this test, and its seats."""

    def __init__(self, dispatcher, lines, desk):
        self.dispatcher = dispatcher
        self.lines = lines
        self.desk = desk

    def seat(self, bound=None):
        """One more slot, ready for work."""
        seat = Seat(HeldPlace(), bound=self.lines[bound] if bound else None)
        self.dispatcher.add(seat)
        self.dispatcher.heard(seat, Ready(1))
        return seat

    async def wait_given(self, seat, count=1):
        """Until the seat holds `count` works; they."""
        await wait_true(lambda: len(seat.place.works) >= count)
        return seat.place.works

    def finish(self, seat, *, run_s=0.001):
        """End the oldest work of a seat: all done."""
        work = seat.place.works.pop(0)
        settled = Settled(lease_id=work.lease_id, calls=1, run_s=run_s)
        self.dispatcher.heard(seat, settled)
        return work


@pytest.fixture
def open_floor(postgres, jobs, registry, config):
    """`async with open_floor(queue={options}) as floor`: a dispatcher at work over one queue for each."""

    @asynccontextmanager
    async def opened(poll_s=0.05, **queues):
        for name, options in queues.items():

            @registry.task(name, **options)
            async def never_called(job=None): ...

        rows = await jobs.declare_queues()
        lines = {t.queue: Line(TaskFacts.of(t), rows[t.queue].id) for t in registry}
        for line in lines.values():
            line.allowance = None
        ids = [line.queue_id for line in lines.values()]
        host_id = await store.hosts.add_host(postgres, "test", ids, 60)
        desk = Desk(postgres, config, host_id)
        dispatcher = Dispatcher(desk, list(lines.values()), lambda: poll_s)
        running = asyncio.create_task(dispatcher.run())
        try:
            yield Floor(dispatcher, lines, desk)
            assert not running.done()
        finally:
            await dispatcher.end_claims()
            await dispatcher.cut()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await desk.flush()

    return opened


async def fill(jobs, queue, count, **options):
    """Enqueue jobs; their ids."""
    return await jobs.enqueue_many(
        [NewJob(queue=queue, payload={}, **options) for _ in range(count)]
    )


async def test_a_bound_slot_serves_its_queue_alone(open_floor, jobs, sql):
    async with open_floor(a={"batch": 2}, b={"batch": 2}) as floor:
        await fill(jobs, "a", 2)
        seat = floor.seat(bound="b")
        ids = await fill(jobs, "b", 2)
        [work] = await floor.wait_given(seat)
        assert (work.queue, list(work.ids)) == ("b", ids)
        floor.finish(seat)
        await floor.desk.flush()
        assert seat.place.given == ["b"]
        assert await _counts(sql, ready=2, leased=0)


async def test_floating_slots_go_to_the_most_important_queue_first(open_floor, jobs):
    async with open_floor(
        low={"batch": 1, "importance": 8},
        high={"batch": 1, "importance": 2},
        mid={"batch": 1, "importance": 5},
    ) as floor:
        for queue in ("low", "mid", "high"):
            await fill(jobs, queue, 1)
        seat = floor.seat()
        for _ in range(3):
            await floor.wait_given(seat)
            floor.finish(seat)
        assert seat.place.given == ["high", "mid", "low"]


async def test_calls_that_wait_hold_no_floating_slot_while_their_own_has_plenty(open_floor, jobs):
    async with open_floor(hanging={"concurrency": 8}, quick={"batch": 10}) as floor:
        own, floating = floor.seat("hanging"), floor.seat()
        await fill(jobs, "hanging", 3)
        floor.dispatcher.hint_all()
        await wait_true(lambda: own.jobs_open == 3)
        await fill(jobs, "quick", 1)
        floor.dispatcher.hint_all()
        await floor.wait_given(floating)
        assert floating.place.given == ["quick"]
        floor.finish(floating)
        await fill(jobs, "hanging", 6)
        floor.dispatcher.hint_all()
        await wait_true(lambda: own.jobs_open + floating.jobs_open == 9)
        assert floating.jobs_open


async def test_equally_important_queues_share_the_floating_slots(open_floor, jobs):
    async with open_floor(a={"batch": 1}, b={"batch": 1}, c={"batch": 1}) as floor:
        for queue in ("a", "b", "c"):
            await fill(jobs, queue, 10)
        seats = [floor.seat() for _ in range(6)]
        for seat in seats:
            await floor.wait_given(seat)
        given = sorted(seat.place.given[0] for seat in seats)
        assert given == ["a", "a", "b", "b", "c", "c"]


async def test_a_floating_slot_stays_until_its_queue_is_empty(open_floor, jobs):
    async with open_floor(a={"batch": 1}, b={"batch": 1}) as floor:
        await fill(jobs, "a", 3)
        seat = floor.seat()
        await floor.wait_given(seat)
        await fill(jobs, "b", 3)
        floor.dispatcher.hint_all()
        for _ in range(6):
            await floor.wait_given(seat)
            floor.finish(seat)
        assert seat.place.given == ["a"] * 3 + ["b"] * 3


async def test_no_queue_keeps_a_floating_slot_from_another_for_ever(open_floor, jobs, monkeypatch):
    """Also from a less important one: every 8th choice begins at that end."""
    monkeypatch.setattr(seats_module, "TURN_S", 0.0)
    async with open_floor(
        high={"batch": 1, "importance": 0}, low={"batch": 1, "importance": 9}
    ) as floor:
        await fill(jobs, "high", 200)
        await fill(jobs, "low", 5)
        seat = floor.seat()
        for _ in range(60):
            await floor.wait_given(seat)
            floor.finish(seat)
        assert 2 <= seat.place.given.count("low") <= 20


async def test_a_claim_serves_many_slots_and_each_gets_a_batch_of_its_own(open_floor, jobs):
    async with open_floor(a={"batch": 3}) as floor:
        ids = await fill(jobs, "a", 12)
        seats = [floor.seat(bound="a") for _ in range(4)]
        for seat in seats:
            await floor.wait_given(seat)
        works = [work for seat in seats for work in seat.place.works]
        assert sorted(job_id for work in works for job_id in work.ids) == ids
        assert {len(work.ids) for work in works} == {3}
        assert len({work.lease_id for work in works}) == 4


async def test_single_jobs_are_refilled_as_they_end(open_floor, jobs):
    async with open_floor(a={"concurrency": 4}) as floor:
        ids = await fill(jobs, "a", 7)
        seat = floor.seat(bound="a")
        await wait_true(lambda: seat.jobs_open == 4)
        first = seat.place.works[0]
        outcome = {"words": ["done"], "delays_s": [None], "errors": [""], "tracebacks": [""]}
        floor.dispatcher.heard(seat, Settled(lease_id=first.lease_id, ids=ids[:1], **outcome))
        await wait_true(lambda: len(seat.place.works) > 1)
        assert list(seat.place.works[1].ids) == ids[4:5]
        assert seat.jobs_open == 4


async def test_quick_batches_are_claimed_in_advance_and_given_at_once(open_floor, jobs):
    async with open_floor(a={"batch": 2}) as floor:
        await fill(jobs, "a", 20)
        seat = floor.seat(bound="a")
        await floor.wait_given(seat)
        assert not floor.lines["a"].stock, "nothing is known of how quick it is"
        floor.finish(seat)
        await wait_true(lambda: floor.lines["a"].stock)
        await floor.wait_given(seat)


async def test_what_was_claimed_in_advance_goes_back_where_no_slot_becomes_free(
    open_floor, jobs, sql
):
    async with open_floor(a={"batch": 2}) as floor:
        await fill(jobs, "a", 20)
        seat = floor.seat(bound="a")
        await floor.wait_given(seat)
        floor.finish(seat)
        await wait_true(lambda: floor.lines["a"].stock)
        await floor.wait_given(seat)
        await wait_true(lambda: not floor.lines["a"].stock)
        await wait_true(lambda: _counts(sql, ready=16, leased=2))
        assert floor.lines["a"].batches_ahead == 0, "until calls are seen to end quickly again"


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
    assert Line(facts_of(batch=10), 1, call_s=call_s).batches_ahead == ahead
    assert Line(facts_of(batch=None), 1, call_s=call_s).batches_ahead == 0


async def test_slow_batches_are_not_claimed_in_advance(open_floor, jobs, sql):
    async with open_floor(a={"batch": 2}) as floor:
        await fill(jobs, "a", 20)
        seat = floor.seat(bound="a")
        await floor.wait_given(seat)
        floor.finish(seat, run_s=0.5)
        await floor.wait_given(seat)
        await wait_true(lambda: _counts(sql, ready=16, leased=2))
        assert not floor.lines["a"].stock


async def test_jobs_of_lanes_are_claimed_in_advance_only_for_very_quick_calls(open_floor, jobs):
    async with open_floor(a={"batch": 1}) as floor:
        await fill(jobs, "a", 8, lane="x")
        seat = floor.seat(bound="a")
        for _ in range(3):
            [work] = await floor.wait_given(seat)
            assert work.lanes == ["x"]
            assert work.start_before_s is not None
            assert not floor.lines["a"].stock
            floor.finish(seat, run_s=0.03)
        await floor.wait_given(seat)
        floor.lines["a"].call_s = 0.001
        floor.finish(seat, run_s=0.001)
        await wait_true(lambda: floor.lines["a"].stock)


async def test_plain_jobs_and_jobs_of_lanes_take_turns(open_floor, jobs):
    async with open_floor(a={"batch": 1}) as floor:
        await fill(jobs, "a", 6)
        await fill(jobs, "a", 6, lane="x")
        seat = floor.seat(bound="a")
        lanes = []
        for _ in range(8):
            [work] = await floor.wait_given(seat)
            lanes.append(work.lanes[0])
            floor.finish(seat, run_s=1.0)
        assert 2 <= lanes.count("x") <= 6


async def test_a_job_due_in_a_moment_is_given_then_and_not_at_the_next_poll(open_floor, jobs):
    async with open_floor(poll_s=60.0, a={"batch": 1}) as floor:
        seat = floor.seat(bound="a")
        await wait_true(lambda: floor.lines["a"].was_empty)
        await fill(jobs, "a", 1, after_s=0.3)
        floor.dispatcher.hint(floor.lines["a"].queue_id)
        await wait_true(lambda: seat.place.works, deadline_s=45)


async def test_a_hint_that_comes_while_an_empty_claim_is_under_way_survives_it(open_floor):
    async with open_floor(poll_s=60.0, a={"batch": 1}) as floor:
        floor.seat(bound="a")
        line = floor.lines["a"]
        await wait_true(lambda: line.was_empty and not line.is_claiming)
        before = line.scan._claims
        floor.dispatcher.hint(line.queue_id)
        while not line.is_claiming or line.is_hinted:
            await asyncio.sleep(0)
        floor.dispatcher.hint(line.queue_id)
        await wait_true(lambda: line.scan._claims == before + 2)


async def test_jobs_of_a_dead_slot_are_lost_or_returned(open_floor, jobs, sql):
    async with open_floor(a={"concurrency": 2, "retries": 3}) as floor:
        ids = await fill(jobs, "a", 2)
        seat = floor.seat(bound="a")
        await wait_true(lambda: seat.jobs_open == 2)
        alone = replace(NOTHING, job_id=ids[0], jobs=1)
        assert floor.dispatcher.lose(seat, alone, "it died") == 2
        await floor.desk.flush()
        rows = await sql("SELECT id, losses, attempt FROM headrace.job_ready ORDER BY id")
        assert [tuple(row) for row in rows] == [(ids[0], 1, 0), (ids[1], 0, 0)]
        late = Settled(lease_id=seat.place.works[0].lease_id)
        floor.dispatcher.heard(seat, late)
        await floor.desk.flush()
        assert await _counts(sql, ready=2, leased=0), "the dead say nothing more"


async def test_a_call_over_its_timeout_is_a_failed_run(open_floor, jobs, sql):
    async with open_floor(a={"retries": 3}) as floor:
        [job_id] = await fill(jobs, "a", 1)
        seat = floor.seat(bound="a")
        await floor.wait_given(seat)
        alone = replace(NOTHING, job_id=job_id, jobs=1)
        floor.dispatcher.lose(seat, alone, "over its timeout", is_overtime=True)
        await floor.desk.flush()
        rows = await sql("SELECT losses, attempt FROM headrace.job_ready")
        assert [tuple(row) for row in rows] == [(0, 1)]


async def test_a_job_that_killed_its_process_twice_gets_a_slot_alone(open_floor, jobs, sql):
    async with open_floor(a={"concurrency": 10}) as floor:
        ids = await fill(jobs, "a", 4)
        await sql(f"UPDATE headrace.job_ready SET losses = 2 WHERE id = {ids[1]}")
        seat = floor.seat(bound="a")
        line = floor.lines["a"]
        held = []
        while len({job_id for works in held for job_id in works}) < 4:
            await wait_true(lambda: seat.place.works and not line.is_claiming)
            await wait_true(lambda: seat.is_alone or line.stock or not line.is_hinted)
            held.append([job_id for work in seat.place.works for job_id in work.ids])
            while seat.place.works:
                floor.finish(seat)
        assert [ids[1]] in held
        assert not [works for works in held if ids[1] in works and len(works) > 1]


async def test_what_a_slot_spends_is_answered(open_floor, jobs):
    async with open_floor(a={"batch": 1}) as floor:
        await jobs.set_lane("a", "x", starts_max=2, window_s=60, concurrency=None)
        seat = floor.seat(bound="a")
        for call in (1, 2, 3):
            spend = Spend(call=call, queue="a", lane="x", starts=1, wait_max_s=1.0)
            floor.dispatcher.heard(seat, spend)
            await wait_true(lambda call=call: len(seat.place.answers) == call)
        waits = [answer.wait_s for answer in seat.place.answers]
        assert waits[2] is None
        assert waits[:2] == [pytest.approx(0, abs=0.2)] * 2


async def test_a_drain_claims_no_more_and_gives_back_what_no_slot_has(open_floor, jobs, sql):
    async with open_floor(a={"batch": 2}) as floor:
        await fill(jobs, "a", 20)
        seat = floor.seat(bound="a")
        await floor.wait_given(seat)
        floor.finish(seat)
        await wait_true(lambda: floor.lines["a"].stock)
        held = len(await floor.wait_given(seat))
        await floor.dispatcher.end_claims()
        await floor.desk.flush()
        assert len(seat.place.works) == held == 1
        await wait_true(lambda: _counts(sql, ready=16, leased=2))
        floor.finish(seat)
        await floor.desk.flush()
        assert await _counts(sql, ready=16, leased=0)


async def test_counts_add_up(open_floor, jobs):
    async with open_floor(a={"batch": 5}) as floor:
        await fill(jobs, "a", 10)
        seat = floor.seat(bound="a")
        work = (await floor.wait_given(seat))[0]
        words = ["done", "retry", "fail", "snooze", "done"]
        settled = Settled(
            lease_id=work.lease_id,
            ids=work.ids,
            words=words,
            delays_s=[None, 1.0, None, 1.0, None],
            errors=[""] * 5,
            tracebacks=[""] * 5,
            calls=3,
            run_s=0.5,
        )
        floor.dispatcher.heard(seat, settled)
        seat.place.works.pop(0)
        await floor.wait_given(seat)
        floor.finish(seat)
        counts = floor.lines["a"].take_counts()
        assert (counts.ended, counts.calls) == (8, 4)
        assert floor.lines["a"].take_counts().is_empty


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
        traceparents=[None] * count,
        versions=[1] * count,
        retries=3,
    )


@pytest.mark.parametrize(
    ("batch", "concurrency", "doing", "begun"),
    [
        pytest.param(None, 1, (None, 0), set(), id="nothing ran"),
        pytest.param(None, 1, (2, 1), {2}, id="the one that ran"),
        pytest.param(None, 2, (None, 2), {1, 2}, id="two at once: the oldest"),
        pytest.param(None, 9, (None, 3), {1, 2, 3, 4, 5}, id="many at once: any of them"),
        pytest.param(None, 9, (4, 1), {4}, id="many may, one did"),
        pytest.param(5, 1, (None, 5), {1, 2, 3, 4, 5}, id="a batch as a whole"),
        pytest.param(5, 1, (3, 1), {3}, id="one of a batch that ran apart"),
        pytest.param(None, 9, (77, 1), set(), id="a job that it does not hold"),
    ],
)
def test_who_is_to_blame_for_a_death(batch, concurrency, doing, begun):
    line = Line(facts_of(batch=batch, concurrency=concurrency), 1)
    seat = Seat(HeldPlace(), line=line)
    seat.hands[1] = Hand.of(line, work_of(1, [1, 2, 3, 4, 5]))
    assert begun_jobs(seat, replace(NOTHING, job_id=doing[0], jobs=doing[1])) == begun


def test_what_was_settled_is_nobodys_fault():
    line = Line(facts_of(batch=5), 1)
    seat = Seat(HeldPlace())
    seat.is_open = True
    seat.take(line, work_of(1, [1, 2, 3, 4, 5]))
    seat.note(Settled(lease_id=1, ids=[2, 5], words=["done", "retry"]))
    seat.note(Settled(lease_id=1, ids=[2], words=["done"]))
    assert seat.jobs_open == 3
    assert begun_jobs(seat, replace(NOTHING, jobs=5)) == {1, 3, 4}


async def _counts(sql, *, ready, leased):
    [row] = await sql("""
        SELECT (SELECT count(*) FROM headrace.job_ready) AS ready,
               (SELECT coalesce(sum(cardinality(ids)), 0) FROM headrace.job_lease) AS leased""")
    return (row["ready"], row["leased"]) == (ready, leased)
