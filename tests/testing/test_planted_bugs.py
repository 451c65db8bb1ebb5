"""Each checker can fail: it reports a client with one planted bug, and no correct client."""

from __future__ import annotations

import pytest
from tests.kit.chaos import ChaosProxy
from tests.kit.checkers import (
    counted_twice,
    doubled,
    lost,
    over_concurrency,
    over_limit,
    overlapping,
)
from tests.kit.history import Recorder, read_history
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, JobState, LeaseLost, NewJob, Registry
from headrace.jobs.model import TakenOutcome

EXPIRE = compile_query(
    "expire",
    "-- Who holds a lease falls silent.\n"
    "UPDATE headrace.host SET expires_at = now()"
    " WHERE id = (SELECT host FROM headrace.job_lease WHERE id = :lease)",
)
FORGET_STARTS = compile_query(
    "forget_starts",
    "-- The bug: a lane without its log.\n"
    "WITH l AS (UPDATE headrace.lane SET at = '{}', n = '{}', free_at = '-infinity')"
    " UPDATE headrace.lane_queue SET ready_at = now() WHERE waiting > 0",
)
FORGET_RUNNING = compile_query(
    "forget_running",
    "-- The bug: a lane that does not count who runs.\n"
    "WITH l AS (UPDATE headrace.lane SET inflight = 0)"
    " UPDATE headrace.lane_queue SET ready_at = now() WHERE waiting > 0",
)
MAKE_EFFECTS = compile_query("make", "-- A table of effects.\nCREATE TABLE effect (job bigint)")
ADD_EFFECT = compile_query("add", "-- One effect.\nINSERT INTO effect VALUES (:job)")
ADD_EFFECT_ONCE = compile_query(
    "add_once",
    "-- One effect a job.\n"
    "INSERT INTO effect SELECT :job WHERE NOT EXISTS (SELECT FROM effect WHERE job = :job)",
)
ALL_EFFECTS = compile_query("all", "-- Every effect.\nSELECT job FROM effect")
HONEST_AND_BROKEN = pytest.mark.parametrize("is_broken", [False, True], ids=["honest", "broken"])


class Client:
    """Takes jobs, runs and acks them step by step, so that a test can do any of it wrong."""

    def __init__(self, postgres, jobs, folder):
        self.postgres = postgres
        self.jobs = jobs
        self.folder = folder / "history"
        self.recorder = Recorder(self.folder)

    @property
    def history(self):
        return read_history(self.folder)

    async def enqueue(self, count, **options):
        """Ids of acknowledged jobs."""
        with self.recorder.asking("enqueue") as asked:
            ids = await self.jobs.enqueue_many([NewJob(queue="mail", **options)] * count)
            asked.ok(job=ids)
        return ids

    async def take(self, jobs_max=1):
        """One batch under a lease; None: there is none."""
        taken = await self.jobs.takes.take("mail", jobs_max)
        return taken if taken.jobs else None

    def run(self, taken):
        jobs, lanes = [job.id for job in taken.jobs], [job.lane for job in taken.jobs]
        return self.recorder.running("mail", job=jobs, lane=lanes, lease=taken.lease_id)

    async def ack(self, taken):
        done = TakenOutcome()
        await self.jobs.takes.ack(taken.lease_id, {job.id: done for job in taken.jobs})

    async def lose(self, taken):
        """The lease expires and its jobs are returned."""
        await self.postgres.run(EXPIRE, lease=taken.lease_id)
        await self.jobs.sweep()


@pytest.fixture
def client(postgres, tmp_path):
    registry = Registry()

    @registry.task("mail")
    async def mail(job: dict | None): ...

    client = Client(postgres, Jobs(postgres, JobsConfig(), registry), tmp_path)
    yield client
    client.recorder.close()


@HONEST_AND_BROKEN
async def test_lost_names_the_job_of_a_worker_that_acks_before_it_runs(client, is_broken):
    ids = await client.enqueue(3)
    has_died = False
    while (taken := await client.take()) is not None:
        if is_broken:
            await client.ack(taken)
        if taken.jobs[0].id == ids[1] and not has_died:
            has_died = True
            await client.lose(taken)
            continue
        with client.run(taken):
            pass
        if not is_broken:
            await client.ack(taken)
    states = {job: (await client.jobs.job(job)).state for job in ids}
    stored = {job for job, state in states.items() if state is not JobState.GONE}
    found = lost(client.history, stored=stored)
    assert [f.subject for f in found] == (ids[1:2] if is_broken else [])


@HONEST_AND_BROKEN
async def test_counted_twice_names_the_job_whose_effect_was_repeated_after_a_lost_answer(
    client, database_url, is_broken
):
    ids = await client.enqueue(3)
    await client.postgres.run(MAKE_EFFECTS)
    add = ADD_EFFECT if is_broken else ADD_EFFECT_ONCE
    with ChaosProxy(database_url) as proxy:
        behind = Postgres(proxy.url, PostgresConfig())
        loss = proxy.lose_reply(b"INSERT INTO effect")
        while (taken := await client.take()) is not None:
            try:
                await behind.run(add, job=taken.jobs[0].id)
            except PostgresDown:
                await behind.run(add, job=taken.jobs[0].id)
            await client.ack(taken)
        await behind.close()
    assert loss.fired == 1
    rows = [row["job"] for row in await client.postgres.all(ALL_EFFECTS)]
    assert sorted(set(rows)) == ids
    found = counted_twice("effect", rows)
    assert [f.subject for f in found] == (ids[:1] if is_broken else [])


@HONEST_AND_BROKEN
async def test_doubled_names_the_job_whose_refused_ack_was_taken_for_done(client, is_broken):
    [job] = await client.enqueue(1)
    first = await client.take()
    await client.lose(first)
    second = await client.take()
    for taken in (second, first):
        with client.recorder.asking("settle", job=job, lease=taken.lease_id) as asked:
            try:
                await client.ack(taken)
            except LeaseLost:
                (asked.ok if is_broken else asked.fail)()
            else:
                asked.ok()
    found = doubled(client.history, what="settle", by="job", witness="lease")
    assert [f.subject for f in found] == ([job] if is_broken else [])


@pytest.mark.slow
@HONEST_AND_BROKEN
async def test_over_limit_names_the_lane_of_a_limiter_without_its_log(client, is_broken):
    # The broken limiter never waits, so its window may be longer than a busy machine needs.
    window_s = 30 if is_broken else 0.1
    await client.jobs.lanes.set("mail", "a", starts_max=2, window_s=window_s, concurrency=None)
    await client.enqueue(6, lane="a")
    for _ in range(3):
        taken = await wait_true(lambda: client.take(9))
        with client.run(taken):
            pass
        await client.ack(taken)
        if is_broken:
            await client.postgres.run(FORGET_STARTS)
    found = over_limit(client.history, starts_max=2, window_s=window_s)
    assert [f.subject for f in found] == (["a"] if is_broken else [])


@HONEST_AND_BROKEN
async def test_over_concurrency_names_the_lane_that_forgot_who_runs(client, is_broken):
    await client.jobs.lanes.set("mail", "a", starts_max=None, window_s=None, concurrency=2)
    await client.enqueue(4, lane="a")
    taken = await client.take(9)
    assert len(taken.jobs) == 2
    with client.run(taken):
        if is_broken:
            await client.postgres.run(FORGET_RUNNING)
        second = await client.take(9)
        assert (second is not None) == is_broken
        if second is not None:
            with client.run(second):
                pass
    await client.ack(taken)
    found = over_concurrency(client.history, concurrency=2)
    assert [f.subject for f in found] == (["a"] if is_broken else [])


@HONEST_AND_BROKEN
async def test_overlapping_names_the_job_whose_stopped_worker_wakes_and_commits(client, is_broken):
    [job] = await client.enqueue(1)
    await client.postgres.run(MAKE_EFFECTS)
    zombie = await client.take()
    with client.run(zombie):
        await client.lose(zombie)
        heir = await client.take()
        with client.run(heir):
            await _commit(client, heir, is_fenced=True)
        if is_broken:
            await _commit(client, zombie, is_fenced=False)
        else:
            with pytest.raises(LeaseLost):
                await _commit(client, zombie, is_fenced=True)
    found = overlapping(client.history)
    assert [f.subject for f in found] == ([job] if is_broken else [])
    rows = await client.postgres.all(ALL_EFFECTS)
    assert len(rows) == 1 + is_broken


async def _commit(client, taken, *, is_fenced):
    """An effect of the taken job, tied to its lease or not."""
    [job] = taken.jobs
    with client.recorder.asking("effect", job=job.id, lease=taken.lease_id) as asked:
        async with client.postgres.transaction() as tx:
            if is_fenced:
                await client.jobs.lock_lease(tx, taken.lease_id)
            await tx.run(ADD_EFFECT, job=job.id)
        asked.ok()
