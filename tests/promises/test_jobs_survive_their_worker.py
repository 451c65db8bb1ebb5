"""A dead worker loses no job; a worker that was taken for dead records nothing any more.

Real processes, killed and stopped; the host row is aged in SQL instead of waiting 30 s for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from penstock.engines.sql import compile_query
from penstock.jobs import Jobs, JobsConfig, JobState, NewGroup, NewJob, Registry
from penstock.testing.waiting import wait_true

PROGRAM = Path(__file__).with_name("jobs_worker.py")
pytestmark = pytest.mark.slow


@pytest.fixture
def jobs(postgres):
    """The service of a process that only enqueues and looks."""
    registry = Registry()

    @registry.task("held", batch=5)
    async def held(batch): ...

    return Jobs(postgres, JobsConfig(), registry)


@pytest.fixture
def start_worker(database_url, tmp_path):
    """Start worker processes; the ones left are killed at the end."""
    started = []

    def start():
        with (tmp_path / "err.txt").open("a") as err:
            process = subprocess.Popen(
                [sys.executable, PROGRAM, database_url, tmp_path], stderr=err, stdout=err
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(10)


def noted(folder, word, pid=None):
    """Job ids that were noted under `word`, by process `pid`."""
    file = folder / "log.txt"
    rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [int(r[1]) for r in rows if r[0] == word and pid in (None, int(r[2]))]


async def expire_hosts(postgres):
    text = "-- Age them.\nUPDATE penstock.host SET expires_at = now() - interval '1 s'"
    await postgres.run(compile_query("expire", text))


async def all_gone(jobs, ids):
    return {(await jobs.job(job_id)).state for job_id in ids} == {JobState.GONE}


async def test_a_killed_worker_loses_no_job(jobs, postgres, start_worker, tmp_path):
    ids = await jobs.enqueue_many([NewJob(queue="held", payload={"n": n}) for n in range(5)])
    doomed = start_worker()
    await wait_true(lambda: len(noted(tmp_path, "started")) == 5, deadline_s=30)
    os.kill(doomed.pid, signal.SIGKILL)
    doomed.wait(10)
    assert (await jobs.sweep()).jobs_returned == 0, "its host had not expired yet"
    await expire_hosts(postgres)
    assert (await jobs.sweep()).jobs_returned == 5
    (tmp_path / "go").touch()
    heir = start_worker()
    await wait_true(lambda: all_gone(jobs, ids), deadline_s=30)
    assert sorted(noted(tmp_path, "effect", heir.pid)) == ids
    assert noted(tmp_path, "effect", doomed.pid) == []


async def test_a_stopped_worker_is_refused_when_it_wakes(jobs, postgres, start_worker, tmp_path):
    ids = await jobs.enqueue_many([NewJob(queue="held", payload={"n": n}) for n in range(5)])
    zombie = start_worker()
    await wait_true(lambda: len(noted(tmp_path, "started")) == 5, deadline_s=30)
    os.kill(zombie.pid, signal.SIGSTOP)
    await expire_hosts(postgres)
    assert (await jobs.sweep()).jobs_returned == 5
    heir = start_worker()
    # What was lost with a process comes back one by one.
    await wait_true(lambda: noted(tmp_path, "started", heir.pid), deadline_s=30)
    (tmp_path / "go").touch()
    await wait_true(lambda: all_gone(jobs, ids), deadline_s=30)
    os.kill(zombie.pid, signal.SIGCONT)
    err = tmp_path / "err.txt"
    await wait_true(
        lambda: noted(tmp_path, "refused", zombie.pid) or "host_lost" in err.read_text(),
        deadline_s=30,
    )
    assert noted(tmp_path, "effect", zombie.pid) == []
    assert sorted(noted(tmp_path, "effect", heir.pid)) == ids


async def test_workers_killed_at_random_lose_and_double_nothing(
    jobs, postgres, start_worker, tmp_path
):
    """Three kills over 200 jobs: each is settled once, and its group calls back once."""
    (tmp_path / "go").touch()
    jobs.registry.task("told")(_told)
    members = [NewJob(queue="held", payload={"n": n}) for n in range(200)]
    await jobs.enqueue_groups([NewGroup(members=members, on_done=NewJob(queue="told"))])
    for _ in range(3):
        worker = start_worker()
        least = len(noted(tmp_path, "effect")) + 20
        await wait_true(partial(_has_noted, tmp_path, least), deadline_s=30)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait(10)
        await expire_hosts(postgres)
        await wait_true(lambda: _is_swept(jobs), deadline_s=30)
    start_worker()
    await wait_true(lambda: _is_told(jobs), deadline_s=60)
    status = await jobs.queue("held")
    assert (status.ready, status.leased, status.failed) == (0, 0, 0)
    assert set(noted(tmp_path, "effect")) >= set(range(1, 201))


def _has_noted(folder, least):
    return len(noted(folder, "effect")) >= least


async def _told(job: dict) -> None:
    """Never called: nobody works this queue."""


async def _is_swept(jobs):
    await jobs.sweep()
    return (await jobs.queue("held")).leased == 0


async def _is_told(jobs):
    status = await jobs.queue("told")
    return status.ready == 1
