"""Batches in a slot: one call for all jobs; a job that raises does not fail its neighbors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import pytest
from one_slot import running_slot

from headrace.jobs import Batch, Cancel, Fail, Registry, Retry, Snooze
from headrace.jobs.messages import Ack, SpendAnswer


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
async def slot(registry):
    async with running_slot(registry) as slot:
        yield slot


async def test_a_batch_that_returns_is_acked_as_a_whole(registry, slot):
    seen = []

    @registry.task("q", batch=100)
    async def handle(batch: Batch[int]):
        seen.extend(batch.payloads)

    jobs = slot.give(list(range(100)))
    assert await slot.wait_settled(jobs) == ["done"] * 100
    assert seen == list(range(100))
    (ack,) = [message for message in slot.said if isinstance(message, Ack)]
    assert (ack.outcomes, ack.calls) == (None, 1)
    assert ack.run_s > 0


async def test_each_job_of_a_batch_has_its_outcome(registry, slot):
    @registry.task("q", batch=10)
    async def handle(batch: Batch[str]):
        assert len(batch) == 7
        assert batch[-1].payload == "silent"
        assert [job.id for job in batch[1:3]] == [2, 3]
        assert batch[0] is batch[-7]
        with pytest.raises(IndexError):
            batch[7]
        batch[0].retry(after_s=3, why="busy")
        batch[1].fail("no use")
        batch[2].snooze(60)
        batch[3].cancel("unwanted")
        batch[4].send_to("other")
        batch[5].done({"n": 1})

    kinds = ["retry", "fail", "snooze", "cancel", "moved", "done", "done"]
    jobs = slot.give(["a", "b", "c", "d", "e", "f", "silent"])
    assert await slot.wait_settled(jobs) == kinds
    assert slot.outcomes[1][1:3] == (3.0, "busy")
    assert slot.outcomes[2][2] == "no use"
    assert slot.outcomes[3][1] == 60.0
    assert slot.outcomes[4][2] == "unwanted"
    assert slot.outcomes[5][4] == "other"
    assert slot.outcomes[6][3] == b'{"n":1}'


@pytest.mark.parametrize("bad", [{3}, {0, 1, 9}, set(range(10))])
async def test_one_bad_job_never_fails_its_neighbors(registry, slot, bad):
    runs = Counter()

    @registry.task("q", batch=10)
    def handle(batch: Batch[int]):
        runs.update(job.payload for job in batch)
        if bad.intersection(job.payload for job in batch):
            raise ValueError("bad")

    jobs = slot.give(list(range(10)), attempts=[5 if n == 3 else 0 for n in range(10)])
    kinds = await slot.wait_settled(jobs)
    bad_kinds = {n: "fail" if n == 3 else "retry" for n in bad}
    assert kinds == [bad_kinds.get(n, "done") for n in range(10)]
    assert max(runs.values()) <= 5
    assert slot.outcomes[min(bad) + 1][2] == "ValueError: bad"


async def test_outcomes_before_an_error_are_kept(registry, slot):
    runs = Counter()

    @registry.task("q", batch=10)
    async def handle(batch: Batch[int]):
        for job in batch:
            runs[job.payload] += 1
            if job.payload == 5:
                raise ValueError("bad")
            job.done()

    kinds = await slot.wait_settled(slot.give(list(range(10))))
    assert kinds == ["done"] * 5 + ["retry"] + ["done"] * 4
    assert [runs[n] for n in range(5)] == [1] * 5
    assert runs[5] <= 5


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(Retry(2.0), "retry"), (Snooze(9), "snooze"), (Fail("no"), "fail"), (Cancel("off"), "cancel")],
)
async def test_a_raised_outcome_is_for_all_jobs_without_one(registry, slot, raised, kind):
    @registry.task("q", batch=10)
    async def handle(batch: Batch[int]):
        batch[0].done()
        raise raised

    assert await slot.wait_settled(slot.give([1, 2, 3])) == ["done", kind, kind]
    assert slot.calls == 1


async def test_a_batch_over_its_timeout_is_bisected(registry, slot):
    @registry.task("q", batch=10, timeout="20ms")
    async def handle(batch: Batch[int]):
        if 2 in batch.payloads:
            await asyncio.Event().wait()

    kinds = await slot.wait_settled(slot.give([0, 1, 2]))
    assert kinds == ["done", "done", "retry"]
    assert slot.outcomes[3][2] == "it ran over its timeout of 0.02 s"


async def test_bisecting_is_bounded_and_always_finds_one(registry, slot):
    """All jobs hang: once one failed and one timeout has passed, the others are snoozed."""

    @registry.task("q", batch=16, timeout="20ms")
    async def handle(batch: Batch[int]):
        await asyncio.Event().wait()

    kinds = await slot.wait_settled(slot.give(list(range(16))))
    assert kinds == ["retry"] + ["snooze"] * 15
    assert slot.calls == 5


async def test_a_sync_batch_over_its_timeout_is_not_run_beside_itself(registry, slot):
    gate = threading.Event()

    @registry.task("q", batch=10, timeout="20ms")
    def handle(batch: Batch[int]):
        gate.wait(60)

    assert await slot.wait_settled(slot.give([1, 2])) == ["retry", "retry"]
    assert slot.calls == 1
    gate.set()


async def test_payloads_that_do_not_fit_fail_alone(registry, slot):
    seen = []

    @registry.task("q", batch=10)
    async def handle(batch: Batch[int]):
        seen.extend(batch.payloads)

    kinds = await slot.wait_settled(slot.give([1, "x", 3]))
    assert kinds == ["done", "fail", "done"]
    assert seen == [1, 3]
    assert slot.outcomes[2][2].startswith("the payload does not fit the task")


async def test_the_error_of_a_payload_names_the_expected_fields(registry, slot):
    @registry.task("q")
    async def handle(to: str, text: str = ""): ...

    assert await slot.wait_settled(slot.give([{"too": "ann"}])) == ["fail"]
    assert slot.outcomes[1][2].endswith("; its handler takes: to, text (optional)")


async def test_bisecting_a_batch_of_lanes_consumes_their_tokens(registry, slot):
    @registry.task("q", batch=10)
    async def handle(batch: Batch[int]):
        if 2 in batch.payloads:
            raise ValueError

    spent = Counter()

    def answer(spend):
        spent[spend.lane] += spend.starts
        return SpendAnswer(spend.call, None if spend.lane == "poor" else 0.0)

    slot.on_spend = answer
    deadline_s = time.monotonic() + 60
    lanes = ["rich", "rich", "rich", "poor"]
    jobs = slot.give([0, 1, 2, 3], lanes=lanes, start_before_s=deadline_s)
    assert await slot.wait_settled(jobs) == ["done", "done", "retry", "retry"]
    assert spent == {"rich": 3, "poor": 1}
    assert slot.outcomes[3][2].startswith("ValueError")
    assert slot.outcomes[4][2].startswith("lane 'poor' cannot start 1 more within")


async def test_a_half_whose_start_expired_does_not_start_late(registry, slot):
    """A start is valid for the limiter's slack; a slot paused for longer returns the jobs."""
    runs = []

    @registry.task("q", batch=10)
    async def handle(batch: Batch[int]):
        runs.append(list(batch.payloads))
        raise ValueError

    stops_s = [0.0, 0.4, 0.0]

    @registry.middleware
    async def stopped(call, next_call):
        threading.Event().wait(stops_s.pop())
        return await next_call()

    deadline_s = time.monotonic() + 60
    jobs = slot.give([0, 1], lanes=["a", "a"], start_before_s=deadline_s)
    kinds = await slot.wait_settled(jobs)
    assert kinds == ["returned", "retry"]
    assert runs == [[0, 1], [1]]


async def test_lanes_that_wait_for_each_other_run_by_themselves(registry, slot):
    runs = []

    @registry.task("q", batch=10)
    async def handle(batch: Batch[int]):
        runs.append(list(batch.payloads))
        if len(batch) == 4:
            raise ValueError

    def answer(spend):
        return SpendAnswer(spend.call, 0.3 if spend.lane == "slow" and len(runs) == 1 else 0.0)

    slot.on_spend = answer
    deadline_s = time.monotonic() + 60
    lanes = ["quick", "slow", "quick", "quick"]
    jobs = slot.give([0, 1, 2, 3], lanes=lanes, start_before_s=deadline_s)
    assert await slot.wait_settled(jobs) == ["done"] * 4
    assert runs == [[0, 1, 2, 3], [1], [0], [2, 3]]
