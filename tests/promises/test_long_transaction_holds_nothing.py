"""A transaction that stays open, anywhere, holds up at most what it locked itself.

Beside a report of an hour no vacuum takes dead rows away: claims must not read them. A handler's
own transaction must not stop its host's renewals, nor a stopped process that holds locks the jobs
of others. Costs are counted in pages, not in seconds.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from recorded_fleet import LEASE_S, ROLES
from tests.kit.checkers import overlapping
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, JobState, NewJob, Registry, store
from headrace.jobs.leases import LeaseManager
from headrace.jobs.messages import Ack
from headrace.jobs.store.leases import ClaimCursor

pytestmark = pytest.mark.slow
EACH_ROLE = pytest.mark.parametrize("role", ROLES)
UNHURRIED = {"HEADRACE_JOBS_LEASE": "60s", "HEADRACE_JOBS_HEARTBEAT": "20s"}
CHURNED, BATCH = 110_000, 100
PROGRAM = Path(__file__).with_name("stuck_claimer.py")
LARGE = "x" * 60_000
UNREAD = compile_query(
    "unread",
    "-- Statements that wait for their client to read.\n"
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event = 'ClientWrite'",
)
BEGIN_REPORT = compile_query(
    "begin_report", "-- A snapshot with an id of its own.\nSELECT txid_current()"
)
EXPLAINED = compile_query(
    "explained",
    "-- A claim, and the pages it looked at.\n"
    "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM headrace.claim_ready_v1("
    " :host, :queue, 1, :batch, :priorities::smallint[], :marks_at::timestamptz[],"
    " :marks_id::bigint[], '{}')",
)


async def test_claims_read_no_more_beside_a_long_transaction(postgres):
    """110,000 jobs come and go; a claim reads as many pages at the end as at the beginning."""
    desk, [queue_id] = await _desk(postgres, "churn")
    jobs = [NewJob(queue="churn", payload={})] * 10_000
    service = _service(postgres, "churn")
    for _ in range(CHURNED // len(jobs) + 1):
        await service.enqueue_many(jobs)
    scan = ClaimCursor()
    async with postgres.session() as session, postgres.transaction() as report:
        await _pages(session, desk, queue_id, ClaimCursor())
        await report.one(BEGIN_REPORT)
        await _churn(desk, queue_id, scan, 2_000)
        first = await _pages(session, desk, queue_id, scan)
        await _churn(desk, queue_id, scan, CHURNED - 4_000)
        last = await _pages(session, desk, queue_id, scan)
        whole = await _pages(session, desk, queue_id, ClaimCursor())
    assert last <= 1.5 * first, "the dead are passed over"
    assert whole > 3 * last, "they are there, and are read from the beginning"


@EACH_ROLE
async def test_a_handlers_open_transaction_holds_up_no_renewal(fleet, role):
    await fleet.begin_effects()
    [held] = await fleet.enqueue([NewJob(queue="locking", payload={})])
    process = fleet.start(role)
    await wait_true(lambda: fleet.history.of("locked"))
    ends_s = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < ends_s:
        others = await fleet.enqueue([NewJob(queue="noted", payload={})] * 5)
        await wait_true(lambda others=others: fleet.ended(others))
    assert (await fleet.jobs.job(held)).state is JobState.LEASED
    assert process.events("host_lost") == []
    fleet.let_go()
    await wait_true(lambda: fleet.ended([held]))
    assert set(fleet.started().values()) == {1}
    assert await fleet.effects() == [held]
    assert fleet.findings() == []


@EACH_ROLE
async def test_a_stopped_process_delays_only_the_lease_that_it_locked(fleet, role):
    await fleet.begin_effects()
    [held] = await fleet.enqueue([NewJob(queue="locking", payload={})])
    others = await fleet.enqueue([NewJob(queue="gated", payload={})] * 5)
    stopped = fleet.start(role, **UNHURRIED)
    await wait_true(lambda: fleet.history.of("locked") and len(fleet.started()) == 6)
    fleet.signal(stopped, signal.SIGSTOP)
    fleet.note_lost(stopped)
    await fleet.expire_hosts()
    assert (await fleet.jobs.sweep()).jobs_returned == 5
    fleet.let_go()
    fleet.start(role, host="heir", **UNHURRIED)
    await wait_true(lambda: fleet.ended(others))
    assert (await fleet.jobs.job(held)).state is JobState.LEASED
    # With its process its transaction ends.
    fleet.kill(stopped)
    await wait_true(lambda: fleet.ended([held]))
    assert await fleet.effects() == [held, *others]
    assert overlapping(fleet.history) == []
    assert fleet.findings() == []


@EACH_ROLE
async def test_a_transaction_that_adds_to_a_group_holds_up_its_members_alone(fleet, role):
    fleet.start(role, **UNHURRIED)
    async with (
        fleet.jobs.group(on_done=NewJob(queue="told")) as group,
        fleet.postgres.transaction() as tx,
    ):
        member = NewJob(queue="noted", payload={})
        members = await fleet.jobs.enqueue_many([member] * 5, group=group)
        members += await fleet.jobs.enqueue_many([member], group=group, tx=tx)
        await wait_true(lambda: len(fleet.started()) == 5)
        for number in range(3):
            # With a key a job is settled by the statement that settles members.
            other = await fleet.enqueue(
                [NewJob(queue="noted", payload={}, unique=f"{number}-{n}") for n in range(5)]
            )
            await wait_true(lambda other=other: fleet.ended(other))
        assert await fleet.leased() == 5, "their group is locked"
    await wait_true(lambda: fleet.history.of("end", what="told"))
    [told] = fleet.history.of("start", what="told")
    assert told.facts["done"] == len(members)
    assert set(fleet.started().values()) == {1}


async def test_a_held_lane_holds_up_the_return_of_its_own_leases_alone(postgres):
    desk, [queue_id] = await _desk(postgres, "laned")
    service = _service(postgres, "laned")
    for lane in ("a", "b"):
        await service.lanes.set("laned", lane, starts_max=None, window_s=None, concurrency=9)
        await service.enqueue_many([NewJob(queue="laned", lane=lane)] * 2)
        claims = await desk.claim_lanes(queue_id, leases_max=2, batch=1)
        assert len(claims.leases) == 2
    await service.enqueue_many([NewJob(queue="laned")])
    assert (await desk.claim_ready(queue_id, ClaimCursor(), leases_max=1, batch=1)).leases
    await store.leases.expire_host(postgres, desk.host_id)
    async with postgres.transaction() as tx:
        await service.lanes.set("laned", "a", starts_max=None, window_s=None, concurrency=5, tx=tx)
        swept = await service.sweep()
        assert (swept.leases_returned, swept.jobs_returned) == (3, 3)
        # The next one tries one of them alone, and finds new ones all the same.
        assert (await service.sweep()).leases_returned == 0
    returned = [(await service.sweep()).jobs_returned for _ in range(2)]
    assert sum(returned) == 2


async def test_a_host_that_stands_still_before_it_reads_its_claim_holds_nothing(
    postgres, database_url
):
    """An answer over a socket's buffer is sent before the commit.

    What it claimed is locked meanwhile.
    """
    desk, [queue_id] = await _desk(postgres, "laned")
    service = _service(postgres, "laned", lease_s=0.5)
    await service.lanes.set("laned", "a", starts_max=None, window_s=None, concurrency=99)
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAM, database_url, str(desk.host_id), str(queue_id), **pipes
    )
    try:
        assert await process.stdout.readline() == b"ready\n"
        ids = await service.enqueue_many([NewJob(queue="laned", lane="a", payload=LARGE)] * 20)
        process.stdin.write(b"go\n")
        await wait_true(lambda: postgres.value(UNREAD), what="its claim waits for it")
        other, _ = await _desk(postgres, "laned")
        claim = partial(other.claim_lanes, queue_id, leases_max=1, batch=100)
        assert (await claim()).leases == [], "its jobs are hidden"

        async def swept_and_claimed():
            await service.sweep()
            return (await claim()).leases

        [lease] = await wait_true(swept_and_claimed)
        assert sorted(lease.ids) == ids
    finally:
        process.kill()
        await process.wait()


def _service(postgres, queue, **settings):
    registry = Registry()
    registry.queue(queue, batch=BATCH)
    return Jobs(postgres, JobsConfig(**settings), registry)


async def _desk(postgres, *queues):
    """A desk of a host that lives, and the ids of the queues."""
    ids = [(await _service(postgres, queue).queues.declare())[queue].id for queue in queues]
    host_id = await store.leases.add_host(postgres, "test", ids, 60)
    return LeaseManager(postgres, JobsConfig(), host_id), ids


async def _churn(desk, queue_id, scan, jobs):
    """Claim and finish so many jobs, and on until the consumer goes by its marks."""
    left = jobs
    while left > 0 or not _has_marks(scan):
        claims = await desk.claim_ready(queue_id, scan, leases_max=10, batch=BATCH)
        assert claims.leases
        for claim in claims.leases:
            left -= len(claim.ids)
            desk.settle(Ack(lease_id=claim.lease_id))
    await desk.flush()


def _has_marks(scan):
    """Now and then it looks from the beginning, which it spends little of its time on."""
    return any(number for _, number in scan.marks)


async def _pages(session, desk, queue_id, scan):
    """How many pages one claim of a batch looks at."""
    text = await session.value(
        EXPLAINED,
        host=desk.host_id,
        queue=queue_id,
        batch=BATCH,
        priorities=list(range(10)),
        marks_at=[mark[0] for mark in scan.marks],
        marks_id=[mark[1] for mark in scan.marks],
    )
    [told] = json.loads(text)
    plan = told["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
