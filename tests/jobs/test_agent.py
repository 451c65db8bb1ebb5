"""`headrace agent` in a fleet: it registers, reports its slots, follows the plan and counts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
from tests.kit.processes import HeadraceProcess, descendants, is_alive
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, NewJob, Registry, store
from headrace.jobs.agent.host_lock import HostLock, LockRecord, file_name, start_time
from headrace.jobs.agent.host_loop import HostLoop
from headrace.jobs.errors import AgentRuns
from headrace.jobs.sql import SQL
from headrace.jobs.worker import LocalWorkerPool, declared_ids

APPLICATION = '''
"""Two queues."""
import threading
from headrace import Headrace
from headrace.jobs import Batch

app = Headrace()

@app.task("one", batch=10)
def one(batch: Batch[dict]) -> None:
    threading.Event().wait(0.001)

@app.task("tagged", tag="gpu")
async def tagged(n: int) -> None: ...

@app.task("two", concurrency=5, retries=0)
async def two(n: int) -> None:
    if n < 0:
        raise ValueError("below 0")
'''


HOST = compile_query("host", "-- A host.\nSELECT * FROM headrace.host WHERE name = :name")


@pytest.fixture
def jobs(postgres):
    """The jobs service of a process that runs no jobs."""
    registry = Registry()
    for queue in ("one", "two"):

        @registry.task(queue, retries=0)
        async def never_called(job: dict | None): ...

    return Jobs(postgres, JobsConfig(), registry)


@pytest.fixture
def start(tmp_path, running_engines, database_url):
    """Start agents on this test's database; they end with the test."""
    started = []
    (tmp_path / "two_queues.py").write_text(APPLICATION)

    def begin(*arguments, command="agent", **env):
        process = HeadraceProcess(
            [command, "two_queues:app", *arguments],
            folder=tmp_path,
            env={
                "HEADRACE_POSTGRES_URL": database_url,
                "HEADRACE_VALKEY_URL": running_engines.endpoints.valkey_url,
                "HEADRACE_JOBS_FLOATS": "2",
                **env,
            },
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.end()


async def find_host(postgres, name):
    """The row of a host, once it reported."""
    row = await postgres.one(HOST, name=name)
    return row if row is not None and row["reported_at"] is not None else None


async def _has_capacity(postgres, name):
    row = await find_host(postgres, name)
    return row is not None and row["capacity"] >= 1


async def slots_of(postgres, name):
    """The reported queue of each slot of a host; None for floating slots."""
    row = await find_host(postgres, name)
    return sorted(str(slot["queue"]) for slot in json.loads(row["slots"])) if row else []


@pytest.mark.slow
async def test_it_reports_itself_follows_the_plan_counts_and_drains(
    start, jobs, postgres, tmp_path
):
    agent = start("--name", "h1")
    await wait_true(lambda: find_host(postgres, "h1"))
    assert (await find_host(postgres, "h1"))["kind"] == "agent"
    await wait_true(lambda: _has_capacity(postgres, "h1"))
    await wait_true(lambda: _has_slots(postgres, ["None", "None"]))
    rows = await jobs.queues.declare()
    await _plan(postgres, "h1", {rows["one"].id: 2, rows["two"].id: 1})
    await wait_true(lambda: _has_slots(postgres, ["None", "None", "one", "one", "two"]))
    await _plan(postgres, "h1", {rows["two"].id: 2})
    await wait_true(lambda: _has_slots(postgres, ["None", "None", "two", "two"]))
    await jobs.enqueue_many([NewJob(queue="one", payload={}) for _ in range(25)])
    await jobs.enqueue_many([NewJob(queue="two", payload={"n": n}) for n in (1, -1, 2)])
    await wait_true(lambda: _totals(postgres, {"one": (25, 0), "two": (2, 1)}))
    assert agent.events("slot_died") == []
    await wait_true(lambda: "jobs_run_seconds_count" in _metrics(tmp_path))
    await wait_true(lambda: _counted(tmp_path) >= 3, what="slots' counts arrive")
    await _plan(postgres, "h1", {})
    await postgres.run(SQL.set_draining, host="h1", is_draining=True)
    await wait_true(lambda: _has_slots(postgres, []))
    assert agent.events("slot_died") == []
    await postgres.run(SQL.set_draining, host="h1", is_draining=False)
    await wait_true(lambda: _has_slots(postgres, ["None", "None"]))


@pytest.mark.slow
async def test_several_agents_on_one_machine_are_several_hosts(start, jobs, postgres):
    agents = [start("--name", "h1"), start("--name", "h2:with-a-colon", "--tag", "gpu")]
    for agent, name in zip(agents, ("h1", "h2:with-a-colon"), strict=True):
        await wait_true(lambda name=name: find_host(postgres, name))
        assert agent.events("host_registered")[0]["name"] == name
    queues = [agent.events("host_registered")[0]["queues"] for agent in agents]
    assert ["tagged" in known for known in queues] == [False, True]
    assert (await find_host(postgres, "h2:with-a-colon"))["tags"] == ["gpu"]
    for agent in agents:
        agent.signal(signal.SIGTERM)
        assert agent.wait_exit() == 0
    assert await find_host(postgres, "h1") is None, "it deleted its row"


class OneProcessPool(LocalWorkerPool):
    """An agent's registration without its forked slots."""

    kind = "agent"


@pytest.fixture
def agent_loop(postgres, jobs):
    """Make the loop of an agent h1 that has no lock file in common with others."""

    def make():
        config = JobsConfig(lease_s=3, heartbeat_s=0.2)
        pool = OneProcessPool(jobs, config, lambda: declared_ids(jobs))
        return HostLoop(postgres, config, name="h1", pool=pool)

    return make


async def test_a_second_agent_of_the_name_in_another_folder_is_refused(agent_loop, postgres):
    stop = asyncio.Event()
    first = asyncio.create_task(agent_loop().run(stop))
    await wait_true(lambda: postgres.one(HOST, name="h1"))
    second = await asyncio.gather(agent_loop().run(stop), return_exceptions=True)
    assert isinstance(second[0], AgentRuns)
    assert "in another data folder or on another machine since 20" in second[0].text
    assert not first.done()
    assert len(await postgres.all(HOST, name="h1")) == 1
    stop.set()
    await first


async def test_agents_that_start_at_once_leave_one(agent_loop, postgres):
    stop = asyncio.Event()
    tasks = [asyncio.create_task(agent_loop().run(stop)) for _ in range(4)]
    await wait_true(lambda: sum(task.done() for task in tasks) == 3)
    assert len(await postgres.all(HOST, name="h1")) == 1
    stop.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(type(one).__name__ for one in ended) == ["AgentRuns"] * 3 + ["NoneType"]


async def test_an_agent_takes_the_name_of_a_dead_one_in_another_folder(agent_loop, postgres):
    dead = await store.leases.add_host(postgres, "h1", [], 1, kind="agent")
    stop = asyncio.Event()
    heir = asyncio.create_task(agent_loop().run(stop))
    await wait_true(lambda: _is_another(postgres, dead))
    stop.set()
    await heir


@pytest.mark.slow
async def test_reload_restarts_with_the_changed_code(start, jobs, postgres, tmp_path):
    agent = start("--name", "h1", "--reload")
    await wait_true(lambda: find_host(postgres, "h1"))
    more = APPLICATION + '\n@app.task("three")\nasync def three(n: int) -> None: ...\n'
    (tmp_path / "two_queues.py").write_text(more)
    await wait_true(lambda: len(agent.events("host_registered")) == 2)
    assert "three" in agent.events("host_registered")[1]["queues"]
    family = descendants(agent.pid)
    agent.signal(signal.SIGTERM)
    agent.wait_exit()
    await wait_true(lambda: not any(is_alive(pid) for pid in family))


@pytest.mark.parametrize("name", ["h1", "a b", "../../etc/passwd", "x" * 300, "Ä:1", ".."])
def test_any_host_name_is_a_file_name(name):
    made = file_name(name)
    assert "/" not in made
    assert len(made) < 100
    assert made


async def test_a_lock_that_nobody_holds_is_taken_with_what_was_left(tmp_path):
    first = await HostLock.take(tmp_path, "h1", wait_max_s=1)
    first.note_host(7)
    first.note_slots([os.getpid()])
    os.close(first.descriptor)
    second = await HostLock.take(tmp_path, "h1", wait_max_s=1)
    assert second.former.host_ids == [7]
    assert second.former.slots == [(os.getpid(), start_time(os.getpid()))]
    second.release()
    third = await HostLock.take(tmp_path, "h1", wait_max_s=1)
    assert third.former == LockRecord(), "a release leaves nothing"
    third.release()


async def test_a_lock_file_that_cannot_be_read_is_no_obstacle(tmp_path):
    (tmp_path / "h1.lock").write_bytes(b"\xff not json")
    taken = await HostLock.take(tmp_path, "h1", wait_max_s=1)
    assert taken.former == LockRecord()
    taken.release()


@pytest.mark.slow
async def test_a_new_agent_starts_after_the_lease_time_if_a_former_slot_keeps_the_lock(tmp_path):
    """A child process of a handler holds it, and the file does not record its pid."""
    first = await HostLock.take(tmp_path, "h1", wait_max_s=1)
    child = os.fork()
    if child == 0:
        signal.pause()
    data = b'{"agent":[1,1],"host_ids":[3],"slots":[]}'
    os.pwrite(first.descriptor, data, 0)
    os.ftruncate(first.descriptor, len(data))
    os.close(first.descriptor)
    try:
        heir = await HostLock.take(tmp_path, "h1", wait_max_s=0.2)
        assert heir.former.host_ids == [3]
        with pytest.raises(AgentRuns):
            await _taken_by_another(tmp_path)
        heir.release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


ORPHANED = """
import asyncio, os, sys, threading
from pathlib import Path
from headrace.jobs.agent.host_lock import HostLock

read, write = os.pipe()
if os.fork():
    os.read(read, 1)  # the agent has the lock
    os._exit(0)  # its supervisor is killed
lock = asyncio.run(HostLock.take(Path(sys.argv[1]), "h1", wait_max_s=1))
os.write(write, b".")
threading.Event().wait(1)  # its last job
lock.release()
"""


@pytest.mark.slow
async def test_an_agent_whose_supervisor_was_killed_is_waited_for(tmp_path):
    """Otherwise the next `headrace up` would refuse to start while it ends."""
    subprocess.run([sys.executable, "-c", ORPHANED, str(tmp_path)], check=True)
    taken = await HostLock.take(tmp_path, "h1", wait_max_s=1)
    assert taken.former == LockRecord(), "it ended in order"
    taken.release()


async def _taken_by_another(folder):
    """Take the lock in a process that pretends to be another agent."""
    descriptor = os.open(folder / "h1.lock", os.O_RDWR)
    parent = os.getppid()
    record = f'{{"agent":[{parent},{start_time(parent)}]}}'.encode()
    os.pwrite(descriptor, record, 0)
    os.ftruncate(descriptor, len(record))
    os.close(descriptor)
    await HostLock.take(folder, "h1", wait_max_s=0.2)


async def _is_another(postgres, dead):
    return any(row["id"] != dead for row in await postgres.all(HOST, name="h1"))


async def _plan(postgres, host, slots):
    """Write a plan in place of the scheduler."""
    rows = ", ".join(f"('{host}', {queue}, {count})" for queue, count in slots.items())
    texts = ["DELETE FROM headrace.fleet_slot"]
    if rows:
        texts.append(f"INSERT INTO headrace.fleet_slot (host, queue, slots) VALUES {rows}")
    texts.append("UPDATE headrace.fleet_plan SET version = version + 1, planned_at = now()")
    texts.append("SELECT pg_notify('headrace_fleet', '')")
    for text in texts:
        await postgres.all(compile_query("plan", f"-- The plan.\n{text}"))


async def _has_slots(postgres, queues):
    return await slots_of(postgres, "h1") == queues


async def _totals(postgres, expected):
    query = compile_query(
        "totals",
        "-- Totals.\nSELECT q.name, t.done, t.failed FROM headrace.queue_total t"
        " JOIN headrace.queue q ON q.id = t.queue",
    )
    rows = await postgres.all(query)
    return {row["name"]: (row["done"], row["failed"]) for row in rows} == expected


def _metrics(folder):
    files = (folder / "headrace-data" / "run" / "metrics").glob("agent-*.prom")
    return "".join(file.read_text() for file in files)


def _counted(folder):
    lines = [line.split() for line in _metrics(folder).splitlines()]
    return sum(float(kinds[1]) for kinds in lines if kinds[0] == "jobs_run_seconds_count")
