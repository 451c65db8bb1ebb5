"""The network loses requests, replies and connections: no job is lost, none is settled twice.

`test_storms` has workers behind a network that delays, drops and resets.
"""

from __future__ import annotations

import time

import pytest
from tests.kit.chaos import BLACK_HOLE, RESET, ChaosProxy
from tests.kit.storm.fleet import ROLES
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.sql import compile_query
from headrace.jobs import NewGroup, NewJob

pytestmark = pytest.mark.slow
LISTEN = b'LISTEN "headrace_jobs"'
KEYS = compile_query(
    "keys",
    "-- The keys of waiting jobs.\n"
    "SELECT convert_from(payload, 'UTF8')::jsonb->>'key' AS key FROM headrace.job_ready ORDER BY 1",
)


@pytest.fixture
def proxy(database_url):
    """The network between the database and clients of this URL."""
    with ChaosProxy(database_url) as proxy:
        yield proxy


async def test_an_enqueue_without_a_reply_is_done_once_or_not_at_all(fleet, proxy):
    """One with a unique key may be repeated until it is answered."""
    pool = Postgres(proxy.url, PostgresConfig(connect_timeout_s=1, statement_timeout_s=1))
    service = fleet.jobs_on(pool)
    losses = {"reply": proxy.lose_reply, "request": proxy.lose_request, "none": None}
    for number in range(9):
        kind = list(losses)[number % 3]
        job = NewJob(queue="noted", payload={"key": f"{kind}-{number}"})
        if losses[kind] is not None:
            losses[kind](b"nextval('headrace.job_id')")
            with pytest.raises(PostgresDown):
                await fleet.enqueue([job], service=service)
        else:
            await fleet.enqueue([job], service=service)
    for number in range(4):
        loss = proxy.lose_reply(b"headrace.enqueue", times=number)
        job = NewJob(queue="noted", payload={"key": f"unique-{number}"}, unique=f"{number}")
        ids = None
        while ids is None:
            try:
                ids = await fleet.enqueue([job], service=service)
            except PostgresDown:
                continue
        assert loss.fired == number
    stored = [row["key"] for row in await fleet.postgres.all(KEYS)]
    replies = [f"none-{n}" for n in (2, 5, 8)] + [f"reply-{n}" for n in (0, 3, 6)]
    assert stored == replies + [f"unique-{n}" for n in range(4)]
    await pool.close()


@pytest.mark.parametrize("role", ROLES)
async def test_lost_replies_and_notifications_delay_a_worker_and_nothing_else(fleet, proxy, role):
    # The reply to a claim is lost: the lease that no worker has is returned.
    claimed = await fleet.add("noted")
    loss = proxy.lose_reply(b"headrace.claim_ready", times=1_000)
    polling = {"JOBS_POLL": "5s", "JOBS_LEASE": "30s"}
    process = fleet.start(role, url=proxy.url, **polling)
    await wait_true(fleet.leased, what="the claim took effect")
    proxy.release(loss)
    assert fleet.started() == {}
    await wait_true(lambda: fleet.ended(claimed))
    assert process.events("unknown_leases_returned")

    # Replies to acks are lost; some acks are part of a claim.
    members = [NewJob(queue="noted", payload={"hold_s": 0.005})] * 40
    [group] = await fleet.jobs.enqueue_groups(
        [NewGroup(members=members, on_done=NewJob(queue="called_back"))]
    )
    await wait_true(lambda: len(fleet.started()) > 5)
    losses = [proxy.lose_reply(b"headrace." + word, times=3) for word in (b"settle", b"claim")]
    await wait_true(lambda: _has_called_back(fleet))
    assert sum(loss.fired for loss in losses) >= 3
    [event] = fleet.history.of("start", what="called_back")
    assert (event.facts["group"], event.facts["done"], event.facts["failed"]) == (group, 40, 0)

    # Notifications are lost: it polls until it learns that their connection was closed.
    for loss in losses:
        proxy.release(loss)
    await wait_true(lambda: proxy.connections(asked=LISTEN))
    assert await _run_in_turn(fleet, 5) < 12, "notifications start each at once"
    proxy.set(BLACK_HOLE, asked=LISTEN)
    await _run_in_turn(fleet, 1)
    assert proxy.connections(asked=LISTEN) == 1, "it has not noticed the loss"
    proxy.set(RESET, asked=LISTEN)
    await wait_true(lambda: proxy.connections(asked=LISTEN))
    assert await _run_in_turn(fleet, 5) < 12, "five polls take at least twelve seconds"
    assert set(fleet.started().values()) == {1}
    assert fleet.findings() == []


async def _run_in_turn(fleet, count):
    """Enqueue each job when the one before is done; return the seconds for all."""
    began_s = time.monotonic()
    for _ in range(count):
        ids = await fleet.add("noted")
        await wait_true(lambda ids=ids: fleet.ended(ids))
    return time.monotonic() - began_s


async def _has_called_back(fleet):
    await fleet.jobs.sweep()
    return fleet.history.of("end", what="called_back")
