"""The network loses answers, requests and connections.

No job is lost, none counts twice, all wake up again.
"""

from __future__ import annotations

import time

import pytest
from recorded_fleet import ROLES
from tests.kit.chaos import BLACK_HOLE, PASS, RESET, ChaosProxy, delay
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig, PostgresDown
from headrace.engines.sql import compile_query
from headrace.jobs import NewGroup, NewJob

pytestmark = pytest.mark.slow
LISTEN = b'LISTEN "headrace_jobs"'
EACH_ROLE = pytest.mark.parametrize("role", ROLES)
KEYS = compile_query(
    "keys",
    "-- The keys of waiting jobs.\n"
    "SELECT convert_from(payload, 'UTF8')::jsonb->>'key' AS key FROM headrace.job_ready ORDER BY 1",
)


@pytest.fixture
def proxy(database_url):
    """The network between the database and whoever is given its URL."""
    with ChaosProxy(database_url) as proxy:
        yield proxy


@pytest.fixture
async def behind(proxy, fleet):
    """The service of a client on that network."""
    pool = Postgres(proxy.url, PostgresConfig(connect_timeout_s=1, statement_timeout_s=1))
    yield fleet.jobs_on(pool)
    await pool.close()


def noted(key, **options):
    return NewJob(queue="noted", payload={"key": key}, **options)


@EACH_ROLE
async def test_an_enqueue_of_unknown_outcome_was_done_once_or_not_at_all(
    fleet, proxy, behind, role
):
    losses = {"reply": proxy.lose_reply, "request": proxy.lose_request}
    unknown = {"reply": set(), "request": set()}
    for number in range(20):
        way = ("reply", "request", None)[number % 3]
        key = f"{way}-{number}"
        if way is None:
            await fleet.enqueue([noted(key)], service=behind)
            continue
        losses[way](b"nextval('headrace.job_id')")
        with pytest.raises(PostgresDown):
            await fleet.enqueue([noted(key)], service=behind)
        unknown[way].add(key)
    stored = [row["key"] for row in await fleet.postgres.all(KEYS)]
    assert len(stored) == len(set(stored))
    assert unknown["reply"] <= set(stored)
    assert unknown["request"].isdisjoint(stored)
    fleet.start(role)
    acknowledged = fleet.history.told("ok", "enqueue", "job")
    await wait_true(lambda: fleet.ended(acknowledged))
    await wait_true(lambda: len(fleet.started()) == len(stored))
    assert fleet.findings() == []
    assert set(fleet.started().values()) == {1}


async def test_an_enqueue_with_a_unique_key_is_repeated_until_answered_and_makes_one_job(
    fleet, proxy, behind
):
    for number in range(5):
        loss = proxy.lose_reply(b"headrace.enqueue", times=number % 3)
        job = noted(f"key-{number}", unique=f"key-{number}")
        ids = None
        while ids is None:
            try:
                ids = await fleet.enqueue([job], service=behind)
            except PostgresDown:
                continue
        assert loss.fired == number % 3
    stored = [row["key"] for row in await fleet.postgres.all(KEYS)]
    assert stored == [f"key-{number}" for number in range(5)]
    assert len(set(fleet.history.told("ok", "enqueue", "job"))) == 5


@pytest.mark.parametrize("role", ["work", pytest.param("agent", marks=pytest.mark.soak)])
async def test_a_worker_behind_a_failing_network_loses_and_doubles_nothing(fleet, proxy, role):
    group = await _enqueue_group(fleet, 300)
    fleet.start(role, url=proxy.url)
    await _have_started(fleet, 20)
    proxy.set(RESET)
    await wait_true(lambda: proxy.refused > 5, what="it tries to connect again")
    proxy.set(delay(0.05))
    await _have_started(fleet, 20)
    proxy.set(BLACK_HOLE)
    await wait_true(lambda: _is_given_back(fleet), what="the silent host loses its jobs")
    proxy.set(PASS)
    await wait_true(lambda: _has_called_back(fleet))
    assert _counts(fleet) == {(group, 300, 0, 0)}
    finished = {event.facts["key"] for event in fleet.history.of("end", what="noted")}
    assert finished == {f"{number}" for number in range(300)}
    assert fleet.findings() == []


@EACH_ROLE
async def test_an_ack_whose_answer_was_lost_settles_once(fleet, proxy, role):
    """Acks go alone or ride on claims: both are lost."""
    group = await _enqueue_group(fleet, 40)
    fleet.start(role, url=proxy.url)
    await _have_started(fleet, 5)
    losses = [proxy.lose_reply(b"headrace." + word, times=3) for word in (b"settle", b"claim")]
    await wait_true(lambda: _has_called_back(fleet))
    assert sum(loss.fired for loss in losses) >= 3
    assert _counts(fleet) == {(group, 40, 0, 0)}
    assert set(fleet.started().values()) == {1}
    assert fleet.findings() == []


@EACH_ROLE
async def test_a_claim_whose_answer_was_lost_gives_its_job_back(fleet, proxy, role):
    [job] = await fleet.enqueue([noted("claimed unheard")])
    loss = proxy.lose_reply(b"headrace.claim_ready", times=1_000)
    process = fleet.start(role, url=proxy.url)
    await wait_true(fleet.leased, what="the claim took effect")
    proxy.release(loss)
    assert fleet.started() == {}
    await wait_true(lambda: fleet.ended([job]))
    assert fleet.started() == {job: 1}
    assert process.events("unknown_leases_returned")
    assert fleet.findings() == []


@EACH_ROLE
async def test_jobs_start_by_polling_while_hints_are_lost_and_at_once_after(fleet, proxy, role):
    polling = {"HEADRACE_JOBS_POLL": "5s", "HEADRACE_JOBS_LEASE": "30s"}
    fleet.start(role, url=proxy.url, **polling)
    await wait_true(lambda: proxy.connections(asked=LISTEN))
    assert await _run_in_turn(fleet, 5) < 12, "hints start each at once"
    proxy.set(BLACK_HOLE, asked=LISTEN)
    await _run_in_turn(fleet, 1)
    assert proxy.connections(asked=LISTEN) == 1, "it does not know that its hints are lost"
    proxy.set(RESET, asked=LISTEN)
    await wait_true(lambda: proxy.connections(asked=LISTEN))
    assert await _run_in_turn(fleet, 5) < 12, "five polls take at least twelve seconds"
    assert fleet.findings() == []


async def _run_in_turn(fleet, count):
    """Each job is enqueued when the one before is done; seconds for all."""
    began_s = time.monotonic()
    for number in range(count):
        ids = await fleet.enqueue([noted(f"in turn {number}")])
        await wait_true(lambda ids=ids: fleet.ended(ids))
    return time.monotonic() - began_s


async def _enqueue_group(fleet, count):
    """A group of so many jobs and a callback; its id."""
    members = [
        NewJob(queue="noted", payload={"key": f"{n}", "hold_s": 0.005}) for n in range(count)
    ]
    with fleet.recorder.asking("group", members=count) as asked:
        on_done = NewJob(queue="told")
        [group] = await fleet.jobs.enqueue_groups([NewGroup(members=members, on_done=on_done)])
        asked.ok(group=group)
    return group


def _counts(fleet):
    """What callbacks were told of their groups: once each, if all is well."""
    names = ("group", "done", "failed", "quarantined")
    told = fleet.history.of("start", what="told")
    return {tuple(event.facts[name] for name in names) for event in told}


async def _have_started(fleet, more):
    least = len(fleet.started()) + more
    await wait_true(lambda: len(fleet.started()) >= least)


async def _is_given_back(fleet):
    return (await fleet.jobs.sweep()).leases_returned > 0


async def _has_called_back(fleet):
    await fleet.jobs.sweep()
    return fleet.history.of("end", what="told")
