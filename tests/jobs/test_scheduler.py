"""The scheduler on a real database: the leader, its plans from reports, and alerts."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import msgspec
import pytest
from tests.kit.queue_counts import add_counts
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import NewJob, store
from headrace.jobs.errors import HostRuns, HostUnknown
from headrace.jobs.fleet.alerts import HOST_CLEAR_AFTER, HOST_RAISE_AFTER, HOST_RULE, QUEUE_RULES
from headrace.jobs.fleet.rates import Rate, Reading
from headrace.jobs.fleet.scheduler import Planner, Scheduler, observation
from headrace.jobs.fleet.state import (
    FleetSnapshot,
    HostSnapshot,
    QueueSnapshot,
    plan_input,
    readings,
)
from headrace.jobs.sql import SQL


@pytest.fixture
def config(config):
    """A period that no test waits for."""
    return dataclasses.replace(config, plan_every_s=60.0, cron_every_s=0.05)


@pytest.fixture
async def queue_ids(jobs, registry, sql):
    """Queues `mail`, which is important and has at least two slots, and `photos`."""

    @registry.task("mail")
    async def mail(job: dict | None): ...

    @registry.task("photos", batch=10)
    async def photos(batch): ...

    found = {name: row.id for name, row in (await jobs.queues.declare()).items()}
    await sql("UPDATE headrace.queue SET importance = 1, slots_min = 2 WHERE name = 'mail'")
    return found


@pytest.fixture
def add_host(postgres, queue_ids, sql):
    """Register a host that reports and does not become silent during the test."""

    async def add(name, *, queues=("mail", "photos"), capacity=10, slots=()):
        ids = [queue_ids[queue] for queue in queues]
        host_id = await store.leases.add_host(postgres, name, ids, 30)
        await store.fleet.report_host(
            postgres, host_id, capacity=capacity, load_per_core=0.1, slots=slots
        )
        await sql("UPDATE headrace.host SET reported_at = now() + interval '1 h'")
        return host_id

    return add


@pytest.fixture
def planner(postgres, jobs):
    """A planner that leads after its first run."""
    return Planner(postgres, jobs, "first")


async def slots_of(postgres, queue):
    found = await store.fleet.slot_map(postgres)
    return {host: there[queue] for host, there in sorted(found.items()) if queue in there}


def warm(planner):
    """Let the planner have looked for 20 s at a fleet that did nothing."""
    now_s = time.monotonic()
    for ago_s in (20.0, 10.0):
        idle = Reading(now_s - ago_s, 0, 0, 0.0)
        planner._rates.observe({"mail": idle, "photos": idle})
    return planner


async def test_the_first_plan_of_all_gives_minimums_and_what_is_active(
    planner, jobs, postgres, add_host
):
    await add_host("a")
    await add_host("b")
    await jobs.enqueue(NewJob(queue="photos"))
    await planner.run_once()
    assert planner.leads
    assert await slots_of(postgres, "mail") == {"a": 1, "b": 1}
    assert sum((await slots_of(postgres, "photos")).values()) == 1
    state = await jobs.fleet.state()
    assert state.plan.version == 1
    assert state.plan.is_led
    assert {decision.code for decision in state.decisions} == {"below_min", "below_need"}
    assert sum(sum(host.planned.values()) for host in state.hosts) == 3


async def test_traffic_gets_the_slots_that_it_needs(planner, postgres, add_host, queue_ids):
    """30 jobs/s of 0.2 s are 6 slots' work, and wish for about 10."""
    await add_host("a", capacity=40)
    await warm(planner).run_once()
    await add_counts(postgres, queue_ids["photos"], done=300, calls=30, run_s=60.0)
    await planner.run_once()
    [count] = (await slots_of(postgres, "photos")).values()
    assert 7 <= count <= 12


async def test_a_new_leader_without_a_window_leaves_the_map(
    planner, jobs, postgres, add_host, queue_ids
):
    host_id = await add_host("a", capacity=40)
    await planner.run_once()
    await planner.stop_leading()
    heir = Planner(postgres, jobs, "heir")
    term = await store.fleet.lead_fleet(postgres, "heir", lead_s=300)
    slots = {"a": {"photos": 30}}
    await store.fleet.write_plan(postgres, "heir", term, slots=slots, queue_ids=queue_ids, moves=[])
    await heir.run_once()
    assert await slots_of(postgres, "photos") == {"a": 30}
    await warm(Planner(postgres, jobs, "heir")).run_once()
    assert await slots_of(postgres, "mail") == {"a": 2}, "the minimum, from free slots"
    assert await slots_of(postgres, "photos") == {"a": 30}, "idle surplus stays until it is needed"
    await postgres.run(SQL.remove_host, host=host_id)


async def test_a_standby_takes_over_and_the_old_leader_is_refused(
    planner, jobs, postgres, add_host, sql
):
    await add_host("a")
    heir = Planner(postgres, jobs, "heir")
    await planner.run_once()
    assert await heir.run_once() < jobs.config.plan_every_s / 2, "it looks often"
    assert (planner.leads, heir.leads) == (True, False)
    await sql("UPDATE headrace.fleet_plan SET leads_until = now()")
    await heir.run_once()
    assert heir.leads
    await planner.run_once()
    assert not planner.leads
    head = await store.fleet.find_plan(postgres)
    assert (head.leader, head.term) == ("heir", 2)


async def test_hosts_that_drain_fall_silent_or_change_their_code_lose_slots(
    *, planner, jobs, postgres, add_host, sql, queue_ids
):
    early = Planner(postgres, jobs, "early")
    await early.run_once()
    assert (await store.fleet.find_plan(postgres)).version == 0, "no hosts"
    await early.stop_leading()
    await add_host("a")
    await add_host("b")
    await warm(planner).run_once()
    await jobs.fleet.drain("a")
    await planner.run_once()
    assert await slots_of(postgres, "mail") == {"b": 2}
    await jobs.fleet.undrain("a")
    await planner.run_once()
    assert await slots_of(postgres, "mail") == {"a": 1, "b": 1}
    await sql("UPDATE headrace.host SET reported_at = now() - interval '11 s' WHERE name = 'a'")
    # The reports of the other show that PostgreSQL took writes meanwhile.
    await sql("UPDATE headrace.host SET reports_from = now() - interval '12 s' WHERE name = 'b'")
    await planner.run_once()
    assert await slots_of(postgres, "mail") == {"b": 2}
    codes = {d.code for d in await store.fleet.decisions(postgres, before=None, decisions_max=9)}
    assert "host_gone" in codes
    await sql(f"UPDATE headrace.host SET queues = ARRAY[{queue_ids['photos']}]")
    await planner.run_once()
    assert await slots_of(postgres, "mail") == {}
    [decision] = await store.fleet.decisions(postgres, before=None, decisions_max=1)
    assert (decision.code, decision.before, decision.after) == ("no_code", 2, 0)


async def test_slots_are_only_on_hosts_with_code_and_tag(planner, jobs, postgres, add_host, sql):
    await add_host("a", queues=("photos",))
    await add_host("b")
    await add_host("c")
    await sql("UPDATE headrace.host SET tags = '{gpu}' WHERE name = 'c'")
    await sql("UPDATE headrace.queue SET tag = 'gpu', slots_min = 3 WHERE name = 'photos'")
    await planner.run_once()
    assert await slots_of(postgres, "mail") == {"b": 1, "c": 1}
    assert await slots_of(postgres, "photos") == {"c": 3}


@pytest.mark.slow
async def test_where_waiting_cannot_be_counted_in_time_the_last_count_holds(
    postgres, jobs, config, add_host, queue_ids
):
    hasty = dataclasses.replace(config, plan_every_s=0.4)
    jobs.config = hasty
    planner = Planner(postgres, jobs, "first")
    await add_host("a")
    await jobs.enqueue_many([NewJob(queue="photos") for _ in range(7)])
    await planner.run_once()
    lock = compile_query("lock", "-- Nobody reads it.\nLOCK headrace.job_ready")
    async with postgres.transaction() as tx:
        await tx.run(lock)
        facts = await planner.gather()
    assert {queue.name: queue.waiting for queue in facts.queues} == {"mail": 0, "photos": 7}


async def test_an_alert_is_raised_and_cleared(postgres, jobs, config, add_host, sql):
    jobs.config = dataclasses.replace(config, alert_oldest_s=60.0)
    planner = Planner(postgres, jobs, "first")
    await add_host("a")
    await jobs.enqueue(NewJob(queue="photos"))
    await sql("UPDATE headrace.job_ready SET run_at = now() - interval '61 s'")
    rule = QUEUE_RULES["oldest_waits"]
    for _ in range(rule.raise_after):
        assert await jobs.fleet.alerts(is_open=True) == []
        await planner.run_once()
    [alert] = await jobs.fleet.alerts(is_open=True)
    assert (alert.rule, alert.subject) == ("oldest_waits", "photos")
    assert "its oldest due job had waited 6" in alert.text
    await sql("DELETE FROM headrace.job_ready")
    for _ in range(rule.clear_after):
        await planner.run_once()
    assert await jobs.fleet.alerts(is_open=True) == []
    assert len(await jobs.fleet.alerts()) == 1


async def test_a_new_leader_reports_a_host_that_was_lost_before_it_led(postgres, jobs, sql):
    host_id = await store.leases.add_host(postgres, "a", [], 30, kind="agent")
    await store.fleet.report_host(postgres, host_id, capacity=1, load_per_core=0.1, slots=[])
    await sql(
        "UPDATE headrace.host SET expires_at = now() - interval '10 s',"
        " reported_at = now() - interval '40 s'"
    )
    await jobs.sweep()
    [host] = (await jobs.fleet.state()).hosts
    assert (host.name, host.state, host.lost_at) == ("a", "lost", host.reported_at)
    planner = Planner(postgres, jobs, "heir")
    await planner.run_once()
    assert not any(host.is_silent for host in (await jobs.fleet.state()).hosts), "too early"
    await sql("UPDATE headrace.fleet_plan SET led_from = now() - interval '11 s'")
    for _ in range(HOST_RAISE_AFTER):
        await planner.run_once()
    [alert] = await jobs.fleet.alerts(is_open=True)
    assert (alert.rule, alert.subject) == (HOST_RULE, "a")
    again = await store.leases.add_host(postgres, "a", [], 30, kind="agent")
    await store.fleet.report_host(postgres, again, capacity=1, load_per_core=0.1, slots=[])
    await jobs.sweep()
    assert [row["id"] for row in await sql("SELECT id FROM headrace.host")] == [again]
    for _ in range(HOST_CLEAR_AFTER):
        await planner.run_once()
    assert await jobs.fleet.alerts(is_open=True) == []


async def test_a_lost_host_is_listed_until_it_is_forgotten(postgres, jobs, sql):
    for name in ("a", "b"):
        host_id = await store.leases.add_host(postgres, name, [], 30, kind="agent")
        await store.fleet.report_host(postgres, host_id, capacity=1, load_per_core=0.1, slots=[])
    with pytest.raises(HostRuns):
        await jobs.fleet.forget("a")
    await sql("UPDATE headrace.host SET expires_at = now() - interval '6 d 23 h'")
    await jobs.sweep()
    await jobs.fleet.forget("a")
    with pytest.raises(HostUnknown):
        await jobs.fleet.forget("a")
    assert [host.name for host in (await jobs.fleet.state()).hosts] == ["b"]
    await sql("UPDATE headrace.host SET expires_at = now() - interval '7 d 1 h'")
    await jobs.sweep()
    assert (await jobs.fleet.state()).hosts == []


@pytest.mark.slow
async def test_all_of_it_runs_and_stops(postgres, jobs, registry, add_host, queue_ids):
    await add_host("a")

    @registry.cron("0 0 1 1 *", name="now")
    async def rare(): ...

    scheduler = Scheduler(postgres, jobs, name="here")
    stop = asyncio.Event()
    running = asyncio.create_task(scheduler.run(stop))

    async def has_declared():
        return await jobs.crons.all()

    await wait_true(has_declared)
    await postgres.run(
        compile_query("due", "-- Let it be due.\nUPDATE headrace.cron SET next_at = now()")
    )

    async def has_fired():
        return (await jobs.crons.get("now")).last_job

    async def is_planned():
        return (await store.fleet.find_plan(postgres)).version

    await wait_true(has_fired)
    await wait_true(is_planned)
    stop.set()
    await asyncio.wait_for(running, 60)
    assert not (await store.fleet.find_plan(postgres)).is_led, "another may lead at once"


QUEUE = QueueSnapshot(
    id=1,
    name="mail",
    importance=5,
    slots_min=2,
    slots_max=9,
    batch=1,
    tag=None,
    is_paused=False,
    done=10,
    failed=0,
    retried=0,
    calls=10,
    run_s=5.0,
)


def facts(queue, host, current=None):
    return FleetSnapshot(at_s=1.0, queues=[queue], hosts=[host], current=current or {})


@pytest.fixture
async def host(postgres, add_host):
    """A host with a slot that has run a call for 3 s."""
    await add_host("a", slots=[{"queue": "mail", "busy_s": 3.0}, {"queue": None}])
    [found] = await store.fleet.fleet_hosts(postgres, silent_s=10)
    return HostSnapshot(shown=found.shown, queue_ids=frozenset({1}))


async def test_calls_that_still_run_count_as_time_spent(host):
    first = readings(facts(QUEUE, host), {})
    assert first["mail"].run_s == 8.0
    idle = msgspec.structs.replace(host, shown=msgspec.structs.replace(host.shown, slots=[]))
    second = readings(facts(QUEUE, idle), first)
    assert second["mail"].run_s == 8.0, "the call ended, and its time is not added up yet"
    fresh = msgspec.structs.replace(QUEUE, done=0, run_s=1.0)
    assert readings(facts(fresh, idle), second)["mail"].run_s == 1.0, "totals started from zero"


async def test_queues_of_takers_raise_no_alert(host):
    strange = msgspec.structs.replace(QUEUE, id=9, name="moderation", calls=0)
    assert observation(facts(QUEUE, host), None, {}).queues.keys() == {"mail"}
    assert observation(facts(strange, host), None, {}).queues.keys() == set()
    orphaned = msgspec.structs.replace(strange, calls=1)
    assert observation(facts(orphaned, host), None, {}).queues.keys() == {"moderation"}


async def test_a_paused_queue_needs_no_slot_and_a_maximum_bounds_the_minimum(host):
    paused = msgspec.structs.replace(QUEUE, is_paused=True)
    [need] = plan_input(facts(paused, host), {"mail": Rate(50.0, 1.0)}).needs
    assert (need.slots_min, need.rate_per_s) == (0, 0.0)
    narrow = msgspec.structs.replace(QUEUE, slots_max=1)
    [need] = plan_input(facts(narrow, host), {}).needs
    assert (need.slots_min, need.slots_max) == (1, 1)


async def test_a_host_short_of_cpu_keeps_its_slots_and_gets_those_of_minimums(host):
    pressed = msgspec.structs.replace(
        host, shown=msgspec.structs.replace(host.shown, cpu_pressure=0.9)
    )
    idle = msgspec.structs.replace(QUEUE, slots_min=0)
    rooms = [
        plan_input(facts(queue, seen, {"a": {"mail": bound}}), {}).rooms[0].capacity
        for queue, seen, bound in (
            (QUEUE, host, 0),
            (QUEUE, pressed, 0),
            (QUEUE, pressed, 5),
            (idle, pressed, 0),
        )
    ]
    assert rooms == [10, 2, 5, 0]
