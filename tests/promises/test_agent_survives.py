"""What the death, stop or freeze of an agent or its zygote leaves behind: no process, no loss."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.kit.processes import is_alive, wait_until
from tests.kit.storm.fleet import slot_pids, zygote_pid
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.slow


async def started(host, count):
    """Wait until so many jobs started; return the pids that run them."""
    await wait_true(lambda: len(host.noted("started")) >= count, what="jobs started")
    return sorted({pid for _, pid in host.noted("started")})


async def test_the_next_agent_returns_the_leases_of_a_killed_one_at_once(host):
    ids = await host.add("held", 10)
    # So that nothing returns because the host row expired.
    agent = host.start(JOBS_LEASE="5m")
    await started(host, 10)
    family = agent.family()
    agent.signal(signal.SIGKILL)
    agent.wait_exit()
    heir = host.start(JOBS_LEASE="5m")
    wait_until(lambda: not any(map(is_alive, family)), what="all ended")
    await wait_true(lambda: heir.events("former_leases_returned"))
    [event] = heir.events("former_leases_returned")
    assert event["jobs"] == 10
    host.let_go()
    await wait_true(lambda: host.effects() == ids)


async def test_slots_in_c_code_do_not_outlive_their_agent(host):
    await host.add("hangs")
    agent = host.start(JOBS_FLOATS="1")
    [pid] = await started(host, 1)
    agent.signal(signal.SIGKILL)
    agent.wait_exit()
    wait_until(lambda: not is_alive(pid), what="the hung slot ended")


async def test_a_hung_slot_of_a_killed_agent_and_zygote_is_killed_by_the_next_agent(host):
    await host.add("hangs")
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_no_process_of_a_handler_outlives_its_agent(host, number):
    ids = await host.add("leaves", 4)
    agent = host.start()
    await started(host, len(ids))
    await wait_true(lambda: len(host.noted("child")) == 2 * len(ids))
    left = [pid for word in ("child", "detached") for _, pid in host.noted(word)]
    left += agent.family()
    assert all(map(is_alive, left))
    agent.signal(number)
    agent.wait_exit()
    deadline_s = 3 if number == signal.SIGTERM else 40
    wait_until(lambda: not any(map(is_alive, left)), what="all ended", deadline_s=deadline_s)


async def test_slots_without_agent_and_zygote_end_all_that_handlers_left(host):
    ids = await host.add("leaves", 4)
    agent = host.start()
    await wait_true(lambda: len(host.noted("child")) == 2 * len(ids))
    left = [pid for word in ("child", "detached") for _, pid in host.noted(word)]
    os.kill(agent.pid, signal.SIGSTOP)
    os.kill(zygote_pid(agent), signal.SIGKILL)
    agent.signal(signal.SIGKILL)
    agent.wait_exit()
    wait_until(lambda: not any(map(is_alive, left)), what="all ended", deadline_s=20)


async def test_slots_of_a_killed_zygote_end_their_handlers_processes(host):
    await host.add("leaves", 4)
    agent = host.start()
    await wait_true(lambda: len(host.noted("child")) == 8)
    children = [pid for _, pid in host.noted("child")]
    slots = slot_pids(agent)
    for pid in (zygote_pid(agent), *slots):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, children)), what="all ended")


async def test_a_second_agent_of_the_same_name_is_refused(host):
    agent = host.start()
    await wait_true(lambda: agent.events("host_registered"))
    second = host.start()
    assert second.wait_exit() == 5
    assert f"runs already, as process {agent.pid}" in second.err


async def test_a_frozen_agent_is_fenced_and_settles_nothing_twice(host):
    ids = await host.add("held", 5)
    agent = host.start(JOBS_FLOATS="1", JOBS_HEARTBEAT="200ms")
    [zombie] = await started(host, 5)
    os.kill(agent.pid, signal.SIGSTOP)
    await host.expire_hosts()
    assert (await host.jobs.sweep()).jobs_returned == 5
    heir = host.start(host="h2", JOBS_FLOATS="1")
    # The slot was not frozen: it ends the batch and reports to an agent that is fenced.
    host.let_go()
    await wait_true(lambda: host.effects() == sorted(ids * 2))
    assert {pid for _, pid in host.noted("effect")} == {zombie, *slot_pids(heir)}
    await wait_true(lambda: host.is_idle("held"))
    os.kill(agent.pid, signal.SIGCONT)
    await wait_true(lambda: agent.events("host_lost"))
    await wait_true(lambda: len(agent.events("host_registered")) == 2)
    again = await host.add("held", 5)
    await wait_true(lambda: set(again) <= set(host.effects()))
    assert host.effects() == sorted(ids * 2 + again)


async def test_sigterm_lets_running_batches_end_and_loses_nothing(host):
    ids = await host.add("quick", 1_000)
    agent = host.start()
    await wait_true(lambda: len(host.noted("effect")) > 100)
    family = agent.family()
    agent.signal(signal.SIGTERM)
    assert agent.wait_exit() == 0
    assert not any(map(is_alive, family))
    done = host.effects()
    assert len(done) == len(set(done)), "each batch that began has ended and was recorded"
    assert await host.counts("quick") == (len(ids) - len(done), 0, 0)
    left = next(job for job in ids if job not in set(done))
    assert (await host.jobs.job(left)).losses == 0


async def test_past_the_grace_time_slots_are_killed_and_their_jobs_returned_without_a_loss(host):
    [job] = await host.add("hangs")
    agent = host.start(JOBS_GRACE="200ms")
    await started(host, 1)
    agent.signal(signal.SIGTERM)
    assert agent.wait_exit() == 0
    assert await host.counts("hangs") == (1, 0, 0)
    assert (await host.jobs.job(job)).losses == 0


async def test_a_killed_zygote_is_replaced_while_its_slots_continue(host):
    ids = await host.add("held", 10)
    agent = host.start()
    slots = await started(host, 10)
    first = zygote_pid(agent)
    os.kill(first, signal.SIGKILL)
    await wait_true(lambda: zygote_pid(agent) not in (None, first))
    assert all(map(is_alive, slots))
    host.let_go()
    await wait_true(lambda: host.effects() == ids)
    # An orphan dies: the agent reaps it itself, and forks another from the new zygote.
    os.kill(slots[0], signal.SIGKILL)
    await wait_true(lambda: agent.events("slot_died"))
    assert agent.events("slot_died")[0]["why"] == "SIGKILL"
    await wait_true(lambda: len(set(slot_pids(agent)) - set(slots)) == 1)
    await wait_true(lambda: not Path(f"/proc/{slots[0]}").exists())


async def test_threads_and_sockets_of_the_imports_are_reported(host):
    (host.folder / "careless_app.py").write_text(
        "import socket, threading, time\n"
        "from headrace import Headrace\n"
        "app = Headrace()\n"
        "threading.Thread(target=time.sleep, args=(60,), name='poller', daemon=True).start()\n"
        "opened = socket.create_server(('127.0.0.1', 0))\n"
    )
    agent = host.start(app="careless_app:app")
    await wait_true(lambda: agent.events("imports_left_things_open"))
    [event] = agent.events("imports_left_things_open")
    assert event["threads"] == ["poller"]
    assert len(event["sockets"]) == 1
    assert "127.0.0.1" in event["sockets"][0]


@pytest.mark.soak
async def test_a_hundred_slots_start_and_share_the_work(host):
    agent = host.start(JOBS_FLOATS="100", JOBS_SLOTS_PER_CORE="100")
    await wait_true(lambda: len(slot_pids(agent)) == 100)
    ids = await host.add("quick", 5_000)
    await wait_true(lambda: len(host.noted("effect")) == len(ids))
    assert host.effects() == ids
    assert len({pid for _, pid in host.noted("effect")}) > 50
