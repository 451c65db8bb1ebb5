"""A transaction that stays open anywhere delays at most what it locked itself.

Beside a report of an hour no vacuum removes dead rows: claims must not read them. Costs are counted
in pages, not in seconds. `test_fenced_workers` has the transactions of handlers.
"""

from __future__ import annotations

import json
from functools import partial

import pytest
from children import stop_in_claim
from tests.kit.forked import start_forked
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, NewJob, Registry, store
from headrace.jobs.leases import LeaseManager
from headrace.jobs.messages import Ack
from headrace.jobs.store.claim_cursor import FIRST_AT, ClaimCursor

pytestmark = pytest.mark.slow
CHURNED, BATCH = 30_000, 100
UNREAD = compile_query(
    "unread",
    "-- Statements that wait for their client to read.\n"
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event = 'ClientWrite'",
)
BEGIN_REPORT = compile_query("begin_report", "-- A snapshot.\nSELECT txid_current()")
EXPLAINED = compile_query(
    "explained",
    "-- A claim, and the pages that it read.\n"
    "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM headrace.claim_ready_v1("
    " :host, :queue, 1, :batch, :priorities::smallint[], :marks_at::timestamptz[],"
    " :marks_id::bigint[], '{}')",
)
POLLED = compile_query(
    "polled",
    "-- A poll, and the pages that it read.\n"
    "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)"
    " SELECT * FROM headrace.work_ahead_v1(:queues::integer[], :from_at, 0)",
)


def service_of(postgres, queue, **settings):
    registry = Registry()
    registry.queue(queue, batch=BATCH)
    return Jobs(postgres, JobsConfig(**settings), registry)


async def open_manager(postgres, queue):
    """The leases of a live host, and the id of the queue."""
    queue_id = (await service_of(postgres, queue).queues.declare())[queue].id
    host_id = await store.leases.add_host(postgres, "test", [queue_id], 60)
    return LeaseManager(postgres, JobsConfig(), host_id), queue_id


async def test_claims_and_polls_read_no_more_beside_a_long_transaction(postgres):
    """Many jobs come and go; a claim reads as many pages at the end as at the beginning."""
    manager, queue_id = await open_manager(postgres, "churn")
    jobs = [NewJob(queue="churn", payload={})] * 10_000
    for _ in range(CHURNED // len(jobs) + 1):
        await service_of(postgres, "churn").enqueue_many(jobs)
    cursor = ClaimCursor()

    async def churn(left):
        """Claim and finish so many jobs, and more until the cursor has marks."""
        while left > 0 or not any(number for _, number in cursor.marks):
            claims = await manager.claim_ready(queue_id, cursor, leases_max=10, batch=BATCH)
            assert claims.leases
            for claim in claims.leases:
                left -= len(claim.ids)
                manager.settle(Ack(lease_id=claim.lease_id))
        await manager.flush()

    async with postgres.session() as session, postgres.transaction() as report:
        pages = partial(pages_of_claim, session, manager.host_id, queue_id)
        await pages(ClaimCursor())
        await report.one(BEGIN_REPORT)
        await churn(2_000)
        first = await pages(cursor)
        await churn(CHURNED - 4_000)
        last, whole = await pages(cursor), await pages(ClaimCursor())
        polled_at = (await manager.queues_with_work([queue_id])).polled_at
        poll, whole_poll = [
            await pages_read(session, POLLED, queues=[queue_id], from_at=from_at)
            for from_at in (polled_at, FIRST_AT)
        ]
    assert last <= 1.5 * first, "dead rows are skipped"
    assert whole > 1.5 * last, "they exist, and a full scan reads them"
    assert 5 * poll < whole_poll


async def pages_of_claim(session, host_id, queue_id, cursor):
    """The number of pages that one claim of a batch reads."""
    return await pages_read(
        session,
        EXPLAINED,
        host=host_id,
        queue=queue_id,
        batch=BATCH,
        priorities=list(range(10)),
        marks_at=[mark[0] for mark in cursor.marks],
        marks_id=[mark[1] for mark in cursor.marks],
    )


async def pages_read(session, query, **parameters):
    """The number of pages that an explained query reads."""
    plan = json.loads(await session.value(query, **parameters))[0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


async def test_a_held_lane_delays_the_return_of_its_own_leases_alone(postgres):
    manager, queue_id = await open_manager(postgres, "laned")
    service = service_of(postgres, "laned")
    for lane in ("a", "b"):
        await service.lanes.set("laned", lane, starts_max=None, window_s=None, concurrency=9)
        await service.enqueue_many([NewJob(queue="laned", lane=lane)] * 2)
        claims = await manager.claim_lanes(queue_id, leases_max=2, batch=1)
        assert len(claims.leases) == 2
    await service.enqueue_many([NewJob(queue="laned")])
    assert (await manager.claim_ready(queue_id, ClaimCursor(), leases_max=1, batch=1)).leases
    await store.leases.expire_host(postgres, manager.host_id)
    async with postgres.transaction() as tx:
        await service.lanes.set("laned", "a", starts_max=None, window_s=None, concurrency=5, tx=tx)
        swept = await service.sweep()
        assert (swept.leases_returned, swept.jobs_returned) == (3, 3)
        # The next sweep tries one of them alone, and still finds new ones.
        assert (await service.sweep()).leases_returned == 0
    returned = [(await service.sweep()).jobs_returned for _ in range(2)]
    assert sum(returned) == 2


async def test_an_open_group_delays_its_members_alone(fleet):
    fleet.start("work", JOBS_LEASE="60s", JOBS_HEARTBEAT="20s")
    async with (
        fleet.jobs.group(on_done=NewJob(queue="called_back")) as group,
        fleet.postgres.transaction() as tx,
    ):
        member = NewJob(queue="noted", payload={})
        members = await fleet.jobs.enqueue_many([member] * 5, group=group)
        members += await fleet.jobs.enqueue_many([member], group=group, tx=tx)
        await wait_true(lambda: len(fleet.started()) == 5)
        for number in range(3):
            # With a key a job is settled by the statement that settles members.
            others = await fleet.enqueue(
                [NewJob(queue="noted", payload={}, unique=f"{number}-{n}") for n in range(5)]
            )
            await wait_true(lambda others=others: fleet.ended(others))
        assert await fleet.leased() == 5, "their group is locked"
    await wait_true(lambda: fleet.history.of("end", what="called_back"))
    [event] = fleet.history.of("start", what="called_back")
    assert event.facts["done"] == len(members)
    assert set(fleet.started().values()) == {1}


async def test_a_host_that_stops_before_it_reads_its_claim_holds_nothing(
    postgres, database_url, tmp_path
):
    """A reply larger than a socket's buffer is sent before the commit, which waits for it."""
    manager, queue_id = await open_manager(postgres, "laned")
    service = service_of(postgres, "laned", lease_s=0.5)
    await service.lanes.set("laned", "a", starts_max=None, window_s=None, concurrency=99)
    files = (tmp_path / "ready", tmp_path / "go")
    process = start_forked(stop_in_claim, database_url, manager.host_id, queue_id, *files)
    try:
        await wait_true(files[0].exists)
        large = NewJob(queue="laned", lane="a", payload="x" * 60_000)
        ids = await service.enqueue_many([large] * 20)
        files[1].touch()
        await wait_true(lambda: postgres.value(UNREAD), what="its claim waits for it")
        other, _ = await open_manager(postgres, "laned")
        claim = partial(other.claim_lanes, queue_id, leases_max=1, batch=100)
        assert (await claim()).leases == [], "its jobs are hidden"

        async def swept_and_claimed():
            await service.sweep()
            return (await claim()).leases

        [lease] = await wait_true(swept_and_claimed)
        assert sorted(lease.ids) == ids
    finally:
        process.kill()
        process.join(60)
