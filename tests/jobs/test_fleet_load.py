"""How loaded queues are: sums over minutes, and what they mean."""

from __future__ import annotations

import pytest
from tests.kit.queue_counts import add_counts

from headrace.jobs.fleet.state import QueueLoad


def load(**figures):
    nothing = dict.fromkeys(("done", "failed", "retried", "lost", "calls", "claimed"), 0)
    times = dict.fromkeys(("run_s", "wait_s", "wait_max_s", "slot_s"), 0.0)
    return QueueLoad(queue="mail", **{**nothing, **times, **figures})


@pytest.mark.parametrize(
    ("figures", "waiting", "ratio"),
    [
        ({"done": 10, "run_s": 30.0, "slot_s": 60.0}, 0, 0.5),
        ({"done": 10, "run_s": 30.0, "slot_s": 60.0}, 20, 1.5),
        ({"slot_s": 60.0}, 0, 0.0),
        ({"slot_s": 60.0}, 1, None),
        ({"done": 10, "run_s": 30.0}, 0, None),
    ],
)
def test_load_is_what_is_wanted_against_what_there_was(figures, waiting, ratio):
    assert load(**figures).ratio(waiting) == ratio


def test_means_are_of_what_ran_and_of_what_was_claimed():
    one = load(done=2, failed=1, retried=1, lost=1, claimed=8, run_s=8.0, wait_s=16.0)
    assert (one.run_mean_s, one.wait_mean_s) == (2.0, 2.0)
    assert (load().run_mean_s, load().wait_mean_s) == (None, None)


async def test_the_span_is_no_longer_than_there_are_minutes_here(jobs, sql):
    await sql("UPDATE headrace.migration SET applied_at = now() - interval '90 s'")
    assert 90 <= (await jobs.fleet.load()).span_s < 300
    await sql("UPDATE headrace.migration SET applied_at = now() + interval '1 s'")
    assert (await jobs.fleet.load()).span_s == 1


async def test_the_last_minutes_are_added_up(jobs, registry, postgres, sql):
    @registry.task("mail")
    async def mail(job: dict | None): ...

    @registry.task("idle")
    async def idle(job: dict | None): ...

    queue_id = (await jobs.queues.declare())["mail"].id
    counts = {"done": 3, "failed": 1, "claimed": 5}
    counts |= {"run_s": 4.0, "wait_s": 5.0, "wait_max_s": 1.5, "slot_s": 60.0}
    await sql("UPDATE headrace.migration SET applied_at = now() - interval '1 d'")
    for age in ("2 min", "4 min", "3 h"):
        await add_counts(postgres, queue_id, **counts)
        await sql(
            f"UPDATE headrace.queue_minute SET minute = minute - interval '{age}'"
            " WHERE minute >= date_trunc('minute', now()) - interval '1 min'"
        )
    found = await jobs.fleet.load()
    assert 300 <= found.span_s < 361
    [one] = found.queues
    assert (one.queue, one.done, one.failed, one.wait_max_s) == ("mail", 6, 2, 1.5)
    assert (one.claimed, one.wait_mean_s) == (10, 1.0)
    assert one.ratio(0) == pytest.approx(8 / 120)
    assert [minute.done for minute in found.minutes] == [3, 3]
