"""At most the maximum of a queue's slots work on it at once, whether they are bound or float."""

from __future__ import annotations

import pytest
from recorded_fleet import RecordedFleet
from tests.kit.checkers import over_concurrency
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, NewJob, Registry

pytestmark = pytest.mark.slow
READY = compile_query(
    "ready",
    "-- Jobs of a queue that wait.\nSELECT count(*) FROM headrace.job_ready r"
    " JOIN headrace.queue q ON q.id = r.queue WHERE q.name = :queue",
)


class NarrowFleet(RecordedFleet):
    """Agents with four floating slots each, and room to start and kill them."""

    application = "narrow_app:app"

    def jobs_on(self, postgres):
        """See `RecordedFleet`."""
        registry = Registry()
        registry.queue("narrow", slots=(0, 2), retries=50)
        registry.queue("stopped", slots=(0, 0), retries=50)
        registry.queue("free", retries=50)
        return Jobs(postgres, JobsConfig(), registry)

    def agents(self, count: int):
        """So many, ready to work."""
        return [self.start("agent", host=f"h{n}", HEADRACE_JOBS_FLOATS="4") for n in range(count)]

    async def fill(self, queue: str, count: int, *, hold_s: float = 0.0):
        """Enqueue jobs that take `hold_s`; their ids."""
        return await self.enqueue(
            [NewJob(queue=queue, payload={"hold_s": hold_s, "key": None}) for _ in range(count)]
        )


@pytest.fixture
def fleet(tmp_path, running_engines, postgres, database_url):
    """No process yet; those started end with the test."""
    valkey_url = running_engines.endpoints.valkey_url
    fleet = NarrowFleet(
        tmp_path / "fleet", postgres, postgres_url=database_url, valkey_url=valkey_url
    )
    yield fleet
    fleet.end()


async def test_floating_slots_of_all_agents_stay_within_the_maximum(fleet):
    await fleet.jobs.queues.declare()
    ids = await fleet.fill("narrow", 40, hold_s=0.03)
    first, *_ = fleet.agents(3)
    fleet.start("scheduler", HEADRACE_JOBS_PLAN_EVERY="1s")
    await wait_true(lambda: len(fleet.started()) >= 10)
    fleet.kill(first)
    await wait_true(lambda: fleet.ended(ids))
    assert over_concurrency(fleet.history, concurrency=2) == []


async def test_a_maximum_of_none_stops_a_queue(fleet):
    await fleet.jobs.queues.declare()
    await fleet.fill("stopped", 3)
    fleet.agents(1)
    await fleet.jobs.queues.set("narrow", slots_max=0)
    stopped = await fleet.fill("narrow", 3)
    free = await fleet.fill("free", 20, hold_s=0.03)
    await wait_true(lambda: fleet.ended(free))
    assert not fleet.history.of("start", what="stopped")
    assert not fleet.history.of("start", what="narrow")
    assert await fleet.postgres.value(READY, queue="stopped") == 3
    await fleet.jobs.queues.set("narrow", slots_max=1)
    await wait_true(lambda: fleet.ended(stopped))
    assert over_concurrency(fleet.history, lane="narrow", concurrency=1) == []
