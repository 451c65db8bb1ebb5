"""A slot that dies costs its own jobs a run, at once, and no other job anything.

One agent for all tests, with forked slots that are killed from outside, by their handlers and for
hanging.
"""

from __future__ import annotations

import os
import signal

import pytest
from tests.kit.processes import is_alive
from tests.kit.storm.fleet import SLOT_SETTINGS, open_fleet, slot_pids, title_of
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.jobs import JobState

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
async def shared(running_engines, tmp_path_factory):
    """A fleet of one agent. Its lease is long, so no job returns because a host expired."""
    async with running_engines.database() as url:
        postgres = Postgres(url, PostgresConfig())
        folder = tmp_path_factory.mktemp("slots") / "fleet"
        fleet = open_fleet(folder, running_engines, postgres, url, **SLOT_SETTINGS)
        fleet.start(JOBS_LEASE="5m")
        yield fleet
        fleet.end()
        await postgres.close()


class Look:
    """What the shared agent and the handlers of some jobs recorded since the test began."""

    def __init__(self, fleet):
        self.fleet, [self.agent] = fleet, fleet.processes
        self._seen = len(self.agent.events("slot_died"))

    def deaths(self):
        return self.agent.events("slot_died")[self._seen :]

    def noted(self, word, ids):
        """(job, pid) of each step `word` of these jobs."""
        return [(job, pid) for job, pid in self.fleet.noted(word) if job in set(ids)]

    def effects(self, ids):
        return sorted(job for job, _ in self.noted("effect", ids))


@pytest.fixture
def look(shared):
    return Look(shared)


async def has_state(fleet, job, state):
    async def ask():
        return await fleet.state(job) is state

    await wait_true(ask, what=f"{state}")


async def test_jobs_of_a_killed_slot_are_ready_at_once_and_its_neighbors_continue(shared, look):
    ids = await shared.add("held", 10)
    await wait_true(lambda: len(look.noted("started", ids)) == 10)
    doomed, other = sorted({pid for _, pid in look.noted("started", ids)})
    titles = [title_of(pid) for pid in slot_pids(look.agent)]
    assert {title.partition(": ")[2] for title in titles} == {"held"}
    lost = {job for job, pid in look.noted("started", ids) if pid == doomed}
    os.kill(doomed, signal.SIGKILL)
    # Lost jobs return one by one.
    await wait_true(lambda: len(look.noted("started", ids)) > 10)
    again, heir = look.noted("started", ids)[10]
    assert again in lost
    assert heir not in (doomed, other)
    shared.let_go()
    await wait_true(lambda: look.effects(ids) == ids)
    assert len(look.noted("started", ids)) == 15, "the neighbor's jobs ran once"
    await wait_true(lambda: shared.is_idle("held"))
    [death] = look.deaths()
    assert (death["pid"], death["why"], death["jobs"]) == (doomed, "SIGKILL", 5)
    await wait_true(lambda: {title_of(pid)[-6:] for pid in slot_pids(look.agent)} == {": idle"})


@pytest.mark.parametrize("queue", ["poison", "concurrent"])
async def test_a_job_that_kills_its_process_is_quarantined_and_its_neighbors_are_done(
    shared, look, queue
):
    good = await shared.add(queue, 3)
    [killer] = await shared.add(queue, dies=True)
    good += await shared.add(queue, 16)
    await has_state(shared, killer, JobState.QUARANTINED)
    await wait_true(lambda: set(look.effects(good)) == set(good))

    async def is_over():
        return await shared.counts(queue) == (0, 0, 1)

    await wait_true(is_over)
    assert [job for job, _ in look.noted("dies", [killer])] == [killer] * 3
    assert (await shared.jobs.job(killer)).losses == 3


async def test_a_cancelled_job_that_does_not_end_is_ended_with_its_slot(shared, look):
    [stubborn] = await shared.add("narrow", hold_s=600)
    await wait_true(lambda: shared.started()[stubborn])
    await shared.jobs.cancel(stubborn, running=True)
    await has_state(shared, stubborn, JobState.CANCELLED)
    assert shared.started()[stubborn] == 1
    assert (await shared.jobs.job(stubborn)).losses == 0
    assert look.deaths() == [], "a slot that was killed for a cancellation is no failure"


@pytest.mark.parametrize(
    "queue", ["hangs", "sleeps", pytest.param("blocks", marks=pytest.mark.soak)]
)
async def test_a_slot_with_a_call_past_its_timeout_is_killed(shared, look, queue):
    [job_id] = await shared.add(queue)
    await has_state(shared, job_id, JobState.FAILED)
    job = await shared.jobs.job(job_id)
    assert "ran over its timeout of 0.5 s" in job.error
    assert (job.attempt, job.losses) == (2, 0), "a run over its timeout is a failed run, no loss"
    assert len({pid for _, pid in look.noted("started", [job_id])}) == 2
    assert len(look.deaths()) == 2


@pytest.mark.parametrize(
    ("queue", "payload"), [("splits", {}), ("splits_async", {}), ("splits_async", {"awaits": True})]
)
async def test_a_child_that_returns_from_its_handler_ends_and_settles_nothing(
    shared, look, queue, payload
):
    ids = await shared.add(queue, 20, **payload)
    await wait_true(lambda: look.effects(ids) == ids)
    await wait_true(lambda: shared.is_idle(queue))
    await wait_true(lambda: len(look.noted("child", ids)) == 20)
    children = {pid for _, pid in look.noted("child", ids)}
    await wait_true(lambda: not any(map(is_alive, children)))
    assert not children & {pid for _, pid in look.noted("after", ids)}
    assert look.deaths() == []


async def test_processes_of_a_handler_end_with_its_slot(shared, look):
    [job] = ids = await shared.add("leaves", hangs=True)
    await wait_true(lambda: len(look.noted("child", ids)) == 2)
    await has_state(shared, job, JobState.FAILED)
    await wait_true(lambda: not any(is_alive(pid) for _, pid in look.noted("child", ids)))
    [death] = look.deaths()
    assert "ran over its timeout" in death["why"]


async def test_children_of_a_handler_delay_no_retry_and_no_next_agent(host):
    await host.add("forks", 5)
    agent = host.start()
    await wait_true(lambda: len(host.noted("started")) == 5)
    os.kill(host.noted("started")[0][1], signal.SIGKILL)
    await wait_true(lambda: len(host.noted("started")) > 5, deadline_s=15)
    agent.signal(signal.SIGKILL)
    agent.wait_exit()
    heir = host.start()
    await wait_true(lambda: heir.events("former_leases_returned"))
    assert heir.events("former_slots_not_gone") == []


async def test_a_slot_without_file_descriptors_or_with_much_memory_is_replaced(host):
    [job] = await host.add("starves")
    agent = host.start(JOBS_FLOATS="1", JOBS_SLOT_PRIVATE_MAX="32MiB")
    await has_state(host, job, JobState.FAILED)
    ids = await host.add("quick", 50)
    await wait_true(lambda: host.effects() == ids)
    assert not {pid for _, pid in host.noted("effect")} & {pid for _, pid in host.noted("started")}
    [recycled] = agent.events("slot_recycled")
    assert "Too many open files" in recycled["why"]
    assert {event["queue"] for event in agent.events("handler_raised")} == {"starves"}

    grown = await host.add("grows", 10, bytes=4 * 2**20)
    await wait_true(lambda: set(grown) <= set(host.effects()))

    async def has_next_slot():
        """It measures itself after a batch, every few seconds."""
        await host.add("grows")
        return len({pid for job, pid in host.noted("effect") if job not in ids}) > 1

    await wait_true(has_next_slot)
    assert len(agent.events("slot_recycled")) >= 2
    assert agent.events("slot_died") == []
