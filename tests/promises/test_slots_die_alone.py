"""A slot that dies costs its own jobs a run, at once, and nobody else anything.

Real agents with forked slots, killed from outside, by their handlers and for hanging.
"""

from __future__ import annotations

import os
import signal

import pytest
from slots_host import slot_pids, title_of
from tests.kit.processes import is_alive
from tests.kit.waiting import wait_true

from headrace.jobs import JobState

pytestmark = pytest.mark.slow


async def test_jobs_of_a_killed_slot_are_ready_at_once_and_its_neighbours_go_on(host):
    ids = await host.enqueue("held", [{}] * 10)
    # So that nothing comes back because the host is taken for dead.
    agent = host.start(JOBS_LEASE="5m")
    await wait_true(lambda: len(host.noted("started")) == 10)
    doomed, other = sorted({pid for _, pid in host.noted("started")})
    lost = {job_id for job_id, pid in host.noted("started") if pid == doomed}
    os.kill(doomed, signal.SIGKILL)
    # What was lost comes back one by one.
    await wait_true(lambda: len(host.noted("started")) > 10)
    again, heir = host.noted("started")[10]
    assert again in lost
    assert heir not in (doomed, other)
    host.let_go()
    await wait_true(lambda: host.effects() == ids)
    assert len(host.noted("started")) == 15, "the neighbour's jobs ran once"
    await wait_true(lambda: _is_idle(host, "held"))
    [died] = agent.events("slot_died")
    assert (died["pid"], died["why"], died["jobs"]) == (doomed, "SIGKILL", 5)


@pytest.mark.parametrize("queue", ["poison", "side_by_side"])
async def test_a_job_that_kills_its_process_is_quarantined_and_its_neighbours_are_done(host, queue):
    payloads = [{"dies": number == 3} for number in range(20)]
    ids = await host.enqueue(queue, payloads)
    host.start()
    await wait_true(lambda: _is_state(host, ids[3], JobState.QUARANTINED))
    good = [job_id for job_id in ids if job_id != ids[3]]
    await wait_true(lambda: set(host.effects()) == set(good))
    assert await wait_true(lambda: _is_idle(host, queue, failed=1))
    assert [job_id for job_id, _ in host.noted("dies")] == [ids[3]] * 3
    assert (await host.jobs.job(ids[3])).losses == 3


@pytest.mark.parametrize("queue", ["hangs", pytest.param("blocks", marks=pytest.mark.soak)])
async def test_a_slot_that_hangs_in_c_code_past_its_timeout_is_killed(host, queue):
    [job_id] = await host.enqueue(queue, [{}])
    agent = host.start()
    await wait_true(lambda: _is_state(host, job_id, JobState.FAILED))
    job = await host.jobs.job(job_id)
    assert "ran over its timeout of 0.5 s" in job.error
    assert (job.attempt, job.losses) == (2, 0), "a run over its timeout is a failed run, no loss"
    assert len({pid for _, pid in host.noted("started")}) == 2
    assert len(agent.events("slot_died")) == 2


async def test_children_that_a_handler_leaves_hold_up_nothing(host):
    await host.enqueue("forks", [{}] * 5)
    agent = host.start()
    await wait_true(lambda: len(host.noted("started")) == 5)
    os.kill(host.noted("started")[0][1], signal.SIGKILL)
    await wait_true(lambda: len(host.noted("started")) > 5, deadline_s=15)
    agent.signal(signal.SIGKILL)
    agent.wait_exit()
    heir = host.start()
    await wait_true(lambda: heir.events("former_leases_returned"))
    assert heir.events("former_slots_not_gone") == []


@pytest.mark.parametrize(
    ("queue", "payload"), [("splits", {}), ("splits_async", {}), ("splits_async", {"awaits": True})]
)
async def test_a_child_that_returns_from_its_handler_ends_and_settles_nothing(host, queue, payload):
    ids = await host.enqueue(queue, [payload] * 20)
    agent = host.start()
    await wait_true(lambda: host.effects() == ids)
    await wait_true(lambda: _is_idle(host, queue))
    await wait_true(lambda: len(host.noted("child")) == 20)
    children = {pid for _, pid in host.noted("child")}
    await wait_true(lambda: not any(map(is_alive, children)))
    assert not children & {pid for _, pid in host.noted("after")}
    assert agent.events("slot_died") == []


async def test_what_a_handler_left_running_ends_with_its_slot(host):
    [job_id] = await host.enqueue("leaves", [{"hangs": True}])
    agent = host.start()
    await wait_true(lambda: len(host.noted("child")) == 2)
    assert all(is_alive(pid) for _, pid in host.noted("child"))
    await wait_true(lambda: _is_state(host, job_id, JobState.FAILED))
    await wait_true(lambda: not any(is_alive(pid) for _, pid in host.noted("child")))
    [died] = agent.events("slot_died")
    assert "ran over its timeout" in died["why"]


async def test_a_slot_without_file_descriptors_leaves_its_neighbours_to_another(host):
    [job_id] = await host.enqueue("starves", [{}])
    agent = host.start(JOBS_FLOATS="1")
    await wait_true(lambda: _is_state(host, job_id, JobState.FAILED))
    ids = await host.enqueue("quick", [{}] * 50)
    await wait_true(lambda: host.effects() == ids)
    assert not {pid for _, pid in host.noted("effect")} & {pid for _, pid in host.noted("started")}
    [recycled] = agent.events("slot_recycled")
    assert "Too many open files" in recycled["why"]
    assert agent.events("slot_died") == []
    assert agent.events("handler_raised") == [
        event for event in agent.events("handler_raised") if event["queue"] == "starves"
    ], "no neighbour failed"


async def test_slots_say_in_the_process_list_what_they_work(host):
    await host.enqueue("held", [{}])
    agent = host.start()
    await wait_true(lambda: len(host.noted("started")) == 1)
    titles = [title_of(pid) for pid in slot_pids(agent)]
    assert any(title.endswith(": held") for title in titles), titles
    host.let_go()
    await wait_true(lambda: {title_of(pid)[-6:] for pid in slot_pids(agent)} == {": idle"})


async def test_a_slot_that_grew_is_replaced_between_its_jobs(host):
    ids = await host.enqueue("grows", [{"bytes": 4 * 2**20}] * 10)
    agent = host.start(JOBS_SLOT_PRIVATE_MAX="32MiB", JOBS_FLOATS="1")
    await wait_true(lambda: host.effects() == ids)
    # It measures itself after a batch, every few seconds.
    await wait_true(lambda: _has_heir(host))
    assert agent.events("slot_recycled")
    assert agent.events("slot_died") == []


async def _has_heir(host):
    """Whether a second process works; one more job is given for it."""
    await host.enqueue("grows", [{}])
    return len({pid for _, pid in host.noted("effect")}) > 1


async def _is_idle(host, queue, *, failed=0):
    return await host.left(queue) == (0, 0, failed)


async def _is_state(host, job_id, state):
    return (await host.jobs.job(job_id)).state is state
