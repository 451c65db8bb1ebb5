"""Handlers in slots enqueue and look up through their agent, as if they had own connections."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import asyncpg
import pytest
from slot_app import faults
from tests.kit.processes import HeadraceProcess, descendants, is_alive
from tests.kit.waiting import wait_true

from headrace.jobs import Jobs, JobsConfig, NewJob, Registry
from headrace.jobs.columns import JobColumns
from headrace.jobs.errors import AgentSilent
from headrace.jobs.messages import Abandon, Result, Statement
from headrace.jobs.slots.agent_client import BYTES_MAX, REQUESTS_AT_ONCE, AgentClient
from headrace.jobs.sql import SQL

QUEUES = ("by_async", "by_sync", "faulty", "blocked", "plain", "huge", "endless", "kept")
SLOTS = 24
BACKENDS = (
    "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name = 'headrace' AND pid <> pg_backend_pid()"
)
KEPT = (
    "SELECT r.id, convert_from(r.payload, 'UTF8')::jsonb ->> 'name' AS name"
    " FROM headrace.job_ready r JOIN headrace.queue q ON q.id = r.queue WHERE q.name = 'kept'"
)


@pytest.fixture
def jobs(postgres):
    registry = Registry()
    for queue in QUEUES:
        registry.queue(queue, retries=50 if queue == "endless" else 0)
    return Jobs(postgres, JobsConfig(), registry)


@pytest.fixture
def start(tmp_path, running_engines, database_url):
    """Start agents of `slot_app`; they end with the test."""
    started = []

    def begin(slots):
        env = {
            "HEADRACE_POSTGRES_URL": database_url,
            "HEADRACE_VALKEY_URL": running_engines.endpoints.valkey_url,
            "HEADRACE_JOBS_FLOATS": str(slots),
            "HEADRACE_JOBS_POLL": "200ms",
            "HEADRACE_JOBS_LOSSES_MAX": "50",
            "HEADRACE_POSTGRES_STATEMENT_TIMEOUT": "60s",
            "SLOT_APP_FOLDER": str(tmp_path),
            "PYTHONPATH": str(Path(__file__).parent),
        }
        process = HeadraceProcess(
            ["agent", "slot_app:app", "--name", "h"], folder=tmp_path, env=env
        )
        started.append(process)
        return process

    yield begin
    (tmp_path / "go").touch()
    for process in started:
        process.end()


@pytest.mark.slow
async def test_connections_grow_with_hosts_and_not_with_slots(start, jobs, sql, tmp_path):
    start(SLOTS)
    half = SLOTS // 2
    await jobs.enqueue_many([NewJob(queue="by_async", payload={"n": n}) for n in range(half)])
    await jobs.enqueue_many([NewJob(queue="by_sync", payload={"n": n}) for n in range(half)])
    files = [tmp_path / f"{kind}-{n}.txt" for kind in ("async", "sync") for n in range(half)]
    await wait_true(lambda: all(file.exists() for file in files), what="every handler has called")
    assert len({file.read_text() for file in files}) == SLOTS, "each job has a slot of its own"
    # The agent has at most 13, and this test a few.
    assert (await sql(BACKENDS))[0]["n"] < SLOTS - 6
    assert (await sql("SELECT count(*) AS n FROM headrace.job_failed"))[0]["n"] == half
    counts = await sql(
        "SELECT count(*) FILTER (WHERE payload = '{\"n\":-1}') AS forked, count(*) AS n"
        f" FROM headrace.job_ready WHERE id IN (SELECT id FROM ({KEPT}) AS k)"
    )
    assert (counts[0]["forked"], counts[0]["n"]) == (1, half * (1 + 299 + 1 + 3 + 4) + 1)


@pytest.mark.slow
async def test_errors_arrive_with_class_and_text(start, jobs, sql, tmp_path):
    waiting = await jobs.enqueue(NewJob(queue="kept", payload=0))
    await sql(
        "ALTER TABLE headrace.job_ready ADD CONSTRAINT full_up CHECK (payload <> '13'),"
        " ADD CONSTRAINT divides CHECK (payload <> '14' OR 1 / (length(payload) - 2) = 0)"
    )
    expected = await faults(jobs, waiting)
    names = [text.split()[0].rpartition(".")[2] for text in expected]
    assert names == [
        *("InvalidJob", "PayloadTooLarge", "QueueUnknown", "ConstraintViolated"),
        *("ConstraintViolated", "DivisionByZeroError", "ConstraintViolated"),
        *("JobUnknown", "bool", "JobFailed"),
    ]
    start(1)
    await jobs.enqueue(NewJob(queue="faulty", payload={"waiting": waiting}))
    await wait_true((tmp_path / "faults.txt").exists, what="the handler noted its errors")
    got = (tmp_path / "faults.txt").read_text().splitlines()
    assert got[:8] == expected[:8]
    assert f"JobNotWaiting job {waiting} is cancelled" in got[8]
    assert got[9] == expected[9]


@pytest.mark.slow
async def test_a_slot_that_waits_for_locks_delays_no_other(start, jobs, tmp_path, database_url):
    start(4)
    other = await asyncpg.connect(database_url)
    async with other.transaction():
        holder = await jobs.enqueue(NewJob(queue="kept", payload=0, unique="held"), tx=other)
        await jobs.enqueue(NewJob(queue="blocked", payload={"n": 1}))
        await wait_true((tmp_path / "blocked.txt").exists, what="a handler waits for the key")
        for n in range(3):
            (tmp_path / "plain.txt").unlink(missing_ok=True)
            job = await jobs.enqueue(NewJob(queue="plain", payload={"n": n}))
            await wait_true((tmp_path / "plain.txt").exists, what="another enqueues")
            await wait_true(lambda job=job: _has_ended(jobs, job), what="its ack is recorded")
        await jobs.enqueue(NewJob(queue="huge", payload={"n": 1}))
        await wait_true((tmp_path / "huge.txt").exists, what="a large call")
        assert not (tmp_path / "unblocked.txt").exists()
    await wait_true((tmp_path / "unblocked.txt").exists, what="the key was released")
    assert (tmp_path / "unblocked.txt").read_text() == "1"
    assert holder
    await other.close()


async def _has_ended(jobs, job_id):
    return (await jobs.job(job_id)).state == "gone"


@pytest.mark.slow
async def test_kill_9_of_slots_and_agent_loses_no_acknowledged_enqueue(start, jobs, sql, tmp_path):
    agent = start(4)
    await jobs.enqueue_many([NewJob(queue="endless", payload={"n": n}) for n in range(16)])
    file = tmp_path / "acknowledged"
    for _ in range(2):
        await _more(file)
        for pid in _working(agent, file)[:2]:
            os.kill(pid, signal.SIGKILL)
    await _more(file)
    family = agent.family()
    agent.signal(signal.SIGKILL)
    agent.wait_exit()
    await wait_true(lambda: not any(map(is_alive, family)), what="its slots end")
    start(4)
    await _more(file)
    (tmp_path / "go").touch()
    await wait_true(lambda: _is_idle(sql), what="every handler returned")
    acknowledged = [line.split() for line in file.read_text().splitlines()]
    stored = {row["name"]: row["id"] for row in await sql(KEPT)}
    assert len(acknowledged) >= 800
    assert [name for job_id, name in acknowledged if stored.get(name) != int(job_id)] == []


async def _more(file):
    """Wait until further jobs were acknowledged."""
    least = _lines(file) + 200
    await wait_true(lambda: _lines(file) > least, what="jobs are enqueued")


def _lines(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _working(agent, file):
    """The slots that enqueued last."""
    last = {int(line.split()[1].split("-")[0]) for line in file.read_text().splitlines()[-50:]}
    return sorted(last & set(descendants(agent.pid)))


async def _is_idle(sql):
    rows = await sql(
        "SELECT count(*) AS n FROM headrace.queue q"
        " LEFT JOIN headrace.job_ready r ON r.queue = q.id"
        " LEFT JOIN headrace.job_lease l ON l.queue = q.id"
        " WHERE q.name = 'endless' AND (r.id IS NOT NULL OR l.id IS NOT NULL)"
    )
    return rows[0]["n"] == 0


@pytest.fixture
async def client():
    sent = []
    client = AgentClient(sent.append, lambda _: 1.0)
    client.bind(asyncio.get_running_loop())
    client.sent = sent
    return client


async def _find(client, timeout_s=60.0):
    return await client.call("fetchval", SQL.newest_job, {}, timeout_s=timeout_s)


async def test_requests_are_bounded_and_a_cancelled_one_is_abandoned(client):
    tasks = [asyncio.create_task(_find(client)) for _ in range(3 * REQUESTS_AT_ONCE)]
    await wait_true(lambda: len(client.sent) == REQUESTS_AT_ONCE)
    tasks[0].cancel()
    await wait_true(lambda: len(client.sent) == REQUESTS_AT_ONCE + 2)
    first = client.sent[0]
    assert isinstance(first, Statement)
    assert client.sent[REQUESTS_AT_ONCE] == Abandon(first.call)
    with pytest.raises(AgentSilent):
        await _find(client, timeout_s=0.01)
    client.answer(Result(client.sent[1].call, 7))
    assert await tasks[1] == 7
    client.close()
    answers = await asyncio.gather(*tasks[2:], return_exceptions=True)
    assert {type(answer) for answer in answers} == {AgentSilent}
    with pytest.raises(AgentSilent):
        await _find(client)


def _rows(payload, key=None):
    return JobColumns(queues=["q"], keys=[key], payloads=[payload], size_bytes=len(payload))


async def test_only_small_statements_of_jobs_without_a_transaction_go_to_the_agent(client):
    assert client.takes_insert(_rows(b"1"))
    assert not client.takes_insert(_rows(b"1", key="k"))
    assert not client.takes_insert(_rows(b"1" * (BYTES_MAX + 1)))
    assert client.takes(SQL.enqueue, {"payloads": [b"1"]})
    assert not client.takes(SQL.enqueue, {"payloads": [b"1" * (BYTES_MAX + 1)]})
    assert not client.takes(SQL.list_jobs, {})
    assert not client.takes(SQL.record_steps, {})
