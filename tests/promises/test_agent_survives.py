"""What an agent's death, a zygote's death, a stop and a freeze leave behind.

Nothing, and no job twice settled.
"""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from slots_host import slot_pids, zygote_pid
from tests.kit.processes import is_alive, wait_until
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query

pytestmark = pytest.mark.slow
EXPIRE = compile_query("expire", "-- Age hosts.\nUPDATE headrace.host SET expires_at = now()")


async def started(host, count):
    """Wait until so many jobs have started; the pids that run them."""
    await wait_true(lambda: len(host.noted("started")) >= count)
    return sorted({pid for _, pid in host.noted("started")})


async def test_a_killed_agents_slots_are_gone_soon_and_the_next_returns_its_leases_at_once(host):
    ids = await host.enqueue("held", [{}] * 10)
    # So that nothing comes back because the host row expired.
    agent = host.start(JOBS_LEASE="5m")
    await started(host, 10)
    family = agent.family()
    agent.signal(signal.SIGKILL)
    agent.wait_exit()
    heir = host.start(JOBS_LEASE="5m")
    wait_until(lambda: not any(is_alive(pid) for pid in family), what="gone")
    await wait_true(lambda: heir.events("former_leases_returned"))
    [told] = heir.events("former_leases_returned")
    assert told["jobs"] == 10
    host.let_go()
    await wait_true(lambda: host.effects() == ids)


async def test_slots_in_c_code_do_not_outlive_their_agent(host):
    await host.enqueue("hangs", [{}])
    agent = host.start(JOBS_FLOATS="1")
    [pid] = await started(host, 1)
    agent.signal(signal.SIGKILL)
    agent.wait_exit()
    wait_until(lambda: not is_alive(pid), what="the hung slot is gone")


async def test_an_agent_and_its_zygote_killed_leave_a_hung_slot_to_the_heir(host):
    await host.enqueue("hangs", [{}])
    agent = host.start(JOBS_FLOATS="1")
    [pid] = await started(host, 1)
    os.kill(agent.pid, signal.SIGSTOP)
    os.kill(zygote_pid(agent), signal.SIGKILL)
    agent.signal(signal.SIGKILL)
    agent.wait_exit()
    heir = host.start()
    await wait_true(lambda: heir.events("host_registered"))
    assert not is_alive(pid)
    assert [event["pid"] for event in heir.events("former_slot_killed")] == [pid]


@pytest.mark.parametrize("word", ["child", "detached"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_no_process_of_a_handler_outlives_its_agent(host, number, word):
    ids = await host.enqueue("leaves", [{}] * 4)
    agent = host.start()
    await wait_true(lambda: len(host.noted("started")) == len(ids))
    await wait_true(lambda: len(host.noted("child")) == 2 * len(ids))
    left = [*agent.family(), *(pid for _, pid in host.noted(word))]
    assert all(is_alive(pid) for pid in left)
    agent.signal(number)
    agent.wait_exit()
    deadline_s = 3 if number == signal.SIGTERM else 40
    wait_until(lambda: not any(map(is_alive, left)), what="all gone", deadline_s=deadline_s)


async def test_slots_of_a_killed_zygote_take_their_handlers_processes_along(host):
    await host.enqueue("leaves", [{}] * 4)
    agent = host.start()
    await wait_true(lambda: len(host.noted("child")) == 8)
    children = [pid for _, pid in host.noted("child")]
    slots = slot_pids(agent)
    os.kill(zygote_pid(agent), signal.SIGKILL)
    for pid in slots:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, children)), what="gone")


async def test_a_second_agent_of_the_same_name_is_refused(host):
    agent = host.start()
    await wait_true(lambda: agent.events("host_registered"))
    second = host.start()
    assert second.wait_exit() == 5
    assert f"runs already, as process {agent.pid}" in second.err
    third = host.start(name="h2")
    await wait_true(lambda: third.events("host_registered"))


async def test_a_frozen_agent_is_fenced_and_settles_nothing_twice(host):
    ids = await host.enqueue("held", [{}] * 5)
    agent = host.start(JOBS_FLOATS="1", JOBS_HEARTBEAT="200ms")
    [zombie] = await started(host, 5)
    os.kill(agent.pid, signal.SIGSTOP)
    await host.postgres.run(EXPIRE)
    assert (await host.jobs.sweep()).jobs_returned == 5
    heir = host.start(name="h2", JOBS_FLOATS="1")
    # Its slot was not frozen: it ends the batch and says so to an agent that may not record it.
    host.let_go()
    await wait_true(lambda: host.effects() == sorted(ids * 2))
    assert {pid for _, pid in host.noted("effect")} == {zombie, *slot_pids(heir)}
    await wait_true(lambda: _is_idle(host, "held"))
    os.kill(agent.pid, signal.SIGCONT)
    await wait_true(lambda: agent.events("host_lost"))
    await wait_true(lambda: len(agent.events("host_registered")) == 2)
    again = await host.enqueue("held", [{}] * 5)
    await wait_true(lambda: set(again) <= set(host.effects()))
    assert host.effects() == sorted(ids * 2 + again)


async def test_sigterm_lets_the_batch_in_hand_end_and_loses_nothing(host):
    ids = await host.enqueue("quick", [{}] * 2_000)
    agent = host.start()
    await wait_true(lambda: len(host.noted("effect")) > 100)
    family = agent.family()
    agent.signal(signal.SIGTERM)
    assert agent.wait_exit() == 0
    assert not any(is_alive(pid) for pid in family)
    done = host.effects()
    assert len(done) == len(set(done)), "what was begun ended and was recorded"
    ready, leased, failed = await host.left("quick")
    assert (ready, leased, failed) == (len(ids) - len(done), 0, 0)
    assert set((await host.losses()).values()) == {0}


async def test_past_the_grace_time_slots_are_killed_and_their_jobs_returned_without_blame(host):
    await host.enqueue("hangs", [{}])
    agent = host.start(JOBS_GRACE="200ms")
    await started(host, 1)
    agent.signal(signal.SIGTERM)
    assert agent.wait_exit() == 0
    assert await host.left("hangs") == (1, 0, 0)
    assert list((await host.losses()).values()) == [0]


async def test_a_killed_zygote_is_replaced_and_its_slots_go_on(host):
    ids = await host.enqueue("held", [{}] * 10)
    agent = host.start()
    slots = await started(host, 10)
    first = zygote_pid(agent)
    os.kill(first, signal.SIGKILL)
    await wait_true(lambda: zygote_pid(agent) not in (None, first))
    assert all(is_alive(pid) for pid in slots)
    host.let_go()
    await wait_true(lambda: host.effects() == ids)
    # One of the orphans dies: the agent reaps it itself, and forks another from the new zygote.
    os.kill(slots[0], signal.SIGKILL)
    await wait_true(lambda: agent.events("slot_died"))
    assert agent.events("slot_died")[0]["why"] == "SIGKILL"
    await wait_true(lambda: len(set(slot_pids(agent)) - set(slots)) == 1)
    await wait_true(lambda: not Path(f"/proc/{slots[0]}").exists())


def test_an_application_that_cannot_be_imported_is_told_with_its_traceback(host):
    (host.folder / "broken_app.py").write_text("import nothing_of_this_name\n")
    agent = host.start(application="broken_app:app")
    assert agent.wait_exit() == 2
    assert "nothing_of_this_name" in agent.err
    assert "broken_app.py" in agent.err


async def test_threads_and_sockets_of_the_imports_are_named(host):
    (host.folder / "careless_app.py").write_text(
        "import socket, threading, time\n"
        "from headrace import Headrace\n"
        "app = Headrace()\n"
        "threading.Thread(target=time.sleep, args=(60,), name='poller', daemon=True).start()\n"
        "opened = socket.create_server(('127.0.0.1', 0))\n"
    )
    agent = host.start(application="careless_app:app")
    await wait_true(lambda: agent.events("imports_left_things_open"))
    [told] = agent.events("imports_left_things_open")
    assert told["threads"] == ["poller"]
    assert len(told["sockets"]) == 1
    assert "127.0.0.1" in told["sockets"][0]


async def test_minutes_count_every_job_of_killed_agents_once(host):
    ids = await host.enqueue("quick", [{}] * 3_000)
    kills = 0
    while (await host.left("quick"))[:2] != (0, 0):
        agent = host.start(JOBS_LOSSES_MAX="100")
        seen = len(host.noted("effect"))
        await wait_true(partial(_went_on, host, seen + 500))
        agent.signal(signal.SIGKILL)
        agent.wait_exit()
        kills += 1
    assert kills >= 3
    # A last agent died with the last job: what it had not yet added up is added up by whoever
    # sweeps.
    await host.jobs.sweep()
    minutes = await host.jobs.queues.minutes("quick")
    assert sum(minute.done for minute in minutes) == len(ids)
    assert sum(minute.failed + minute.retried for minute in minutes) == 0
    lost = sum(minute.lost for minute in minutes)
    assert sum(minute.claimed for minute in minutes) >= len(ids) + lost > len(ids)


@pytest.mark.soak
async def test_a_hundred_slots_start_and_share_the_work(host):
    agent = host.start(JOBS_FLOATS="100", JOBS_SLOTS_PER_CORE="100")
    await wait_true(lambda: len(slot_pids(agent)) == 100)
    ids = await host.enqueue("quick", [{}] * 5_000)
    await wait_true(lambda: len(host.noted("effect")) == len(ids))
    assert host.effects() == ids
    assert len({pid for _, pid in host.noted("effect")}) > 50


@pytest.mark.soak
async def test_an_hour_of_deaths_in_a_minute_loses_and_doubles_nothing(host):
    """A slot is killed every 200 ms while 18,000 jobs are worked: each is settled once."""
    ids = [*await host.enqueue("quick", [{}] * 9_000), *await host.enqueue("quick", [{}] * 9_000)]
    agent = host.start(JOBS_FLOATS="6", JOBS_LOSSES_MAX="50")
    kills = 0
    while (await host.left("quick"))[:2] != (0, 0):
        pids = slot_pids(agent)
        if pids and kills < 60:
            os.kill(pids[kills % len(pids)], signal.SIGKILL)
            kills += 1
        await asyncio.wait([asyncio.create_task(_never())], timeout=0.2)
    assert kills > 20
    assert set(host.effects()) == set(ids)
    assert await host.left("quick") == (0, 0, 0)


async def _never():
    await asyncio.Event().wait()


async def _went_on(host, count):
    return len(host.noted("effect")) >= count or await _is_idle(host, "quick")


async def _is_idle(host, queue):
    return await host.left(queue) == (0, 0, 0)
