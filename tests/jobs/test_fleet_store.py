"""Stored reports of hosts, plans and their leaders, and the load of queues."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.own_postgres import OwnPostgres
from tests.kit.queue_counts import add_counts
from tests.kit.waiting import wait_true

from headrace.app import PACKAGES
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.postgres_pool import Pool
from headrace.jobs import NewJob, store
from headrace.jobs.fleet.plan import Move
from headrace.jobs.fleet.state import QueueCounts, QueueLoad
from headrace.jobs.model import JobsConfig
from headrace.jobs.service.fleet import Fleet
from headrace.jobs.sql import SQL


@pytest.fixture
async def queue_ids(declare):
    """Two queues: `mail` and `photos`."""
    return await declare(mail={}, photos={})


async def add_host(postgres, name, queue_ids, **report):
    host_id = await store.leases.add_host(postgres, name, list(queue_ids.values()), 30)
    fields = {"capacity": 10, "load_per_core": 0.5, "slots": [], **report}
    assert await store.fleet.report_host(postgres, host_id, **fields)
    return host_id


async def test_a_host_is_seen_as_it_reports_itself(postgres, queue_ids, sql):
    slots = [{"queue": "mail", "pid": 7, "busy_s": 1.5, "more": "x"}, {"queue": None, "pid": 8}]
    host_id = await add_host(postgres, "a", queue_ids, capacity=4, slots=slots)
    [host] = await store.fleet.fleet_hosts(postgres, silent_s=10)
    shown = host.shown
    assert (shown.name, shown.capacity, shown.load_per_core) == ("a", 4, 0.5)
    assert [(slot.queue, slot.busy_s) for slot in shown.slots] == [("mail", 1.5), (None, 0.0)]
    assert host.queue_ids == set(queue_ids.values())
    assert not shown.is_silent
    await sql("UPDATE headrace.host SET reported_at = now() - interval '11 s'")
    [host] = await store.fleet.fleet_hosts(postgres, silent_s=10)
    assert host.shown.is_silent
    await sql("UPDATE headrace.host SET expires_at = now()")
    report = {"capacity": 4, "load_per_core": 0.0, "slots": []}
    assert not await store.fleet.report_host(postgres, host_id, **report)


async def test_silence_is_judged_only_by_time_in_which_postgresql_took_writes(
    postgres, jobs, queue_ids, sql, monkeypatch
):
    async def states():
        return {host.name: host.state for host in (await jobs.fleet.state()).hosts}

    report = {"capacity": 1, "load_per_core": 0.0, "slots": []}
    a, b = [await add_host(postgres, name, queue_ids) for name in ("a", "b")]
    await store.fleet.lead_fleet(postgres, "one", lead_s=7.5)
    # PostgreSQL was away for 40 s: the leases ended, and nobody could report or lead.
    await sql(
        "UPDATE headrace.host SET reported_at = now() - interval '41 s',"
        " reports_from = now() - interval '1 h', expires_at = now() - interval '11 s'"
    )
    await sql(
        "UPDATE headrace.fleet_plan SET led_from = now() - interval '1 h',"
        " leads_until = now() - interval '34 s'"
    )
    with monkeypatch.context() as broken:
        broken.setattr(Pool, "take", _no_answer)
        with pytest.raises(PostgresDown):
            await jobs.fleet.state()
    assert await states() == {"a": "alive", "b": "alive"}, "nobody has written yet"
    # The first write after the outage, by a leader: the silent limit begins.
    await store.fleet.lead_fleet(postgres, "one", lead_s=7.5)
    assert await states() == {"a": "alive", "b": "alive"}
    await sql("UPDATE headrace.host SET expires_at = now() + interval '30 s'")
    assert await store.fleet.report_host(postgres, a, **report)
    assert await states() == {"a": "alive", "b": "alive"}
    # Host a reported for the whole limit, and b did not.
    await sql(f"UPDATE headrace.host SET reports_from = now() - interval '9 s' WHERE id = {a}")
    assert await states() == {"a": "alive", "b": "alive"}
    await sql(f"UPDATE headrace.host SET reports_from = now() - interval '11 s' WHERE id = {a}")
    assert await states() == {"a": "alive", "b": "silent"}
    await sql(f"UPDATE headrace.host SET expires_at = now() WHERE id = {b}")
    assert await states() == {"a": "alive", "b": "lost"}
    assert await store.fleet.report_host(postgres, a, **report)
    assert await states() == {"a": "alive", "b": "lost"}, "a report continues the series"


@pytest.mark.slow
async def test_no_host_is_silent_while_commits_wait_for_a_standby(servers_folder):
    """Each host reports, and its report is not visible: it waits as all commits."""
    server = OwnPostgres(servers_folder / "p", "18")
    await server.make()
    await server.start()
    postgres = Postgres(server.url, PostgresConfig())
    try:
        await apply_migrations(postgres, PACKAGES)
        await add_host(postgres, "a", {})
        fleet = Fleet(postgres, JobsConfig())
        connection = await postgres.connect_unpooled()
        await connection.execute(
            "UPDATE headrace.host SET reported_at = now() - interval '11 s',"
            " reports_from = now() - interval '1 h'"
        )
        assert [host.state for host in (await fleet.state()).hosts] == ["silent"], "none writes"
        await connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'absent'")
        await connection.execute("SELECT pg_reload_conf()")

        async def is_alive():
            return [host.state for host in (await fleet.state()).hosts] == ["alive"]

        await wait_true(is_alive, what="the host is not silent while commits wait")
        await connection.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
        await connection.execute("SELECT pg_reload_conf()")
        connection.terminate()
        assert await is_alive(), "its next report follows"
    finally:
        await postgres.close()
        server.end()


async def _no_answer(*_, **__):
    raise ConnectionRefusedError


async def test_of_a_host_that_started_again_the_newest_row_counts(postgres, queue_ids):
    await add_host(postgres, "a", queue_ids, capacity=4)
    await add_host(postgres, "a", queue_ids, capacity=5)
    hosts = await store.fleet.fleet_hosts(postgres, silent_s=10)
    assert [host.shown.capacity for host in hosts] == [5]


async def test_reports_add_up_in_minutes_and_totals(postgres, queue_ids, sql):
    host_id = await add_host(postgres, "a", queue_ids)
    mail = QueueCounts(queue_id=queue_ids["mail"], ended=4, calls=4, run_s=2.0)
    photos = QueueCounts(queue_id=queue_ids["photos"], ended=7, slot_s=4.0)
    await store.fleet.add_counts(postgres, host_id, [mail, photos])
    await store.fleet.add_counts(postgres, host_id, [mail])
    totals = {queue.name: queue for queue in await store.fleet.fleet_queues(postgres, {})}
    assert (totals["mail"].calls, totals["mail"].run_s, totals["mail"].finished) == (8, 4.0, 0)
    [row] = await sql(
        "SELECT sum(calls) AS calls, sum(slot_s) AS slot_s FROM headrace.queue_minute"
    )
    assert (row["calls"], row["slot_s"]) == (8, 4.0)
    [row] = await sql("SELECT jobs_ended FROM headrace.host")
    assert row["jobs_ended"] == 15


@pytest.mark.slow
async def test_hosts_that_report_at_once_count_each_report_once(postgres, queue_ids):
    async def report(order):
        for _ in range(30):
            counts = [QueueCounts(queue_id=queue_id, calls=1) for queue_id in order]
            await store.fleet.add_counts(postgres, 0, counts)

    ids = list(queue_ids.values())
    await asyncio.gather(*(report(ids[::step]) for step in (1, -1, 1, -1)))
    # Counts that arrive while another call folds are left for the next.
    await postgres.value(SQL.fold_counts, rows_max=1000)
    queues = await store.fleet.fleet_queues(postgres, {})
    assert [queue.calls for queue in queues] == [120, 120]


async def test_waiting_jobs_are_counted_up_to_a_bound(jobs, postgres, queue_ids):
    await jobs.enqueue_many([NewJob(queue="mail", priority=n % 10) for n in range(50)])
    await jobs.enqueue_many([NewJob(queue="photos", after_s=60) for _ in range(5)])
    found = await store.fleet.fleet_waiting(postgres, count_max=1000)
    assert found[queue_ids["mail"]][0] == 50
    assert found[queue_ids["photos"]] == (0, 0.0)
    found = await store.fleet.fleet_waiting(postgres, count_max=20)
    assert found[queue_ids["mail"]][0] == 20
    await jobs.queues.pause("mail")
    assert queue_ids["mail"] not in await store.fleet.fleet_waiting(postgres, count_max=20)


async def test_of_lanes_jobs_that_may_start_are_counted(jobs, postgres, queue_ids, sql):
    """Jobs in the journal are work too: only a claim folds it."""
    await jobs.enqueue_many([NewJob(queue="mail", lane=f"l{n % 2}") for n in range(10)])
    assert (await store.fleet.fleet_waiting(postgres, count_max=99))[queue_ids["mail"]][0] == 10
    await sql("DELETE FROM headrace.lane_event")
    await sql(
        "INSERT INTO headrace.lane (limiter, name, starts_max, window_s, concurrency) VALUES"
        " ('mail', 'l0', 3, 60, NULL), ('mail', 'l1', NULL, NULL, 1),"
        " ('mail', 'l2', NULL, NULL, NULL)"
        " ON CONFLICT (limiter, name) DO UPDATE SET starts_max = excluded.starts_max,"
        " window_s = excluded.window_s, concurrency = excluded.concurrency"
    )
    await sql("DELETE FROM headrace.lane_queue")
    queue = queue_ids["mail"]
    await sql(
        "INSERT INTO headrace.lane_queue (limiter, lane, queue, waiting, ready_at) VALUES"
        f" ('mail', 'l0', {queue}, 5, now()), ('mail', 'l1', {queue}, 5, now()),"
        f" ('mail', 'l2', {queue}, 5, now() + interval '9 s')"
    )
    assert (await store.fleet.fleet_waiting(postgres, count_max=99))[queue][0] == 4


async def test_one_leads_until_its_time_is_over(postgres, sql):
    assert await store.fleet.lead_fleet(postgres, "a", lead_s=300) == 1
    assert await store.fleet.lead_fleet(postgres, "b", lead_s=300) is None
    assert await store.fleet.lead_fleet(postgres, "a", lead_s=300) == 1
    await sql("UPDATE headrace.fleet_plan SET leads_until = now()")
    assert await store.fleet.lead_fleet(postgres, "b", lead_s=300) == 2
    assert await store.fleet.lead_fleet(postgres, "a", lead_s=300) is None
    await postgres.run(SQL.stop_leading, leader="a")
    assert (await store.fleet.find_plan(postgres)).is_led
    await postgres.run(SQL.stop_leading, leader="b")
    assert not (await store.fleet.find_plan(postgres)).is_led


async def test_a_plan_is_announced_and_explained(postgres, queue_ids):
    host_id = await add_host(postgres, "a", queue_ids)
    assert await store.fleet.planned_slots(postgres, "a") is None
    term = await store.fleet.lead_fleet(postgres, "me", lead_s=5)

    async def write(slots, *moves):
        return await store.fleet.write_plan(
            postgres, "me", term, slots=slots, queue_ids=queue_ids, moves=moves
        )

    received: list[str] = []
    listener = await postgres.connect_unpooled()
    await listener.add_listener("headrace_fleet", lambda *message: received.append(message[3]))
    move = Move(queue="mail", host="a", before=0, after=2, code="below_need", why="it needs 2")
    assert await write({"a": {"mail": 2, "photos": 1}}, move) == 1
    assert await write({"a": {"mail": 2, "photos": 1}}) == 1, "nothing changed"
    assert await write({"a": {"mail": 3}}) == 2
    await listener.fetchval("SELECT 1")
    assert received == ["1", "2"]
    await listener.close()
    planned = await store.fleet.planned_slots(postgres, "a")
    assert (planned.version, planned.slots, planned.is_draining) == (2, {"mail": 3}, False)
    assert (await store.fleet.planned_slots(postgres, "new")).slots == {}
    assert await postgres.run(SQL.set_draining, host="a", is_draining=True)
    assert (await store.fleet.planned_slots(postgres, "a")).is_draining
    assert not await postgres.run(SQL.set_draining, host="nobody", is_draining=True)
    [decision] = await store.fleet.decisions(postgres, before=None, decisions_max=10)
    assert (decision.version, decision.host, decision.after) == (1, "a", 2)
    await postgres.run(SQL.remove_host, host=host_id)


async def test_a_leader_that_was_replaced_writes_nothing(postgres, queue_ids, sql):
    old = await store.fleet.lead_fleet(postgres, "old", lead_s=5)
    await sql("UPDATE headrace.fleet_plan SET leads_until = now()")
    new = await store.fleet.lead_fleet(postgres, "new", lead_s=5)
    slots = {"slots": {"a": {"mail": 1}}, "queue_ids": queue_ids, "moves": []}
    assert await store.fleet.write_plan(postgres, "new", new, **slots) == 1
    assert await store.fleet.write_plan(postgres, "old", old, **slots) is None
    assert await store.fleet.write_plan(postgres, "old", new, **slots) is None
    assert await store.fleet.slot_map(postgres) == {"a": {"mail": 1}}


async def test_decisions_are_deleted_after_their_time(postgres, queue_ids, sql):
    term = await store.fleet.lead_fleet(postgres, "me", lead_s=5)
    move = Move(queue="mail", host="a", before=0, after=2, code="below_need", why="it needs 2")
    slots = {"a": {"mail": 2}}
    await store.fleet.write_plan(
        postgres, "me", term, slots=slots, queue_ids=queue_ids, moves=[move, move]
    )
    await sql("UPDATE headrace.fleet_decision SET at = now() - interval '8 d' WHERE id % 2 = 0")
    assert (
        await postgres.value(
            SQL.drop_old, table="fleet_decision", column="at", kept_s=7 * 86400, rows_max=100
        )
        == 1
    )
    assert len(await store.fleet.decisions(postgres, before=None, decisions_max=10)) == 1


def load(**figures):
    nothing = dict.fromkeys(("done", "failed", "retried", "lost", "calls", "claimed"), 0)
    times = dict.fromkeys(("run_s", "wait_s", "wait_max_s", "slot_s"), 0.0)
    return QueueLoad(queue="mail", **{**nothing, **times, **figures})


@pytest.mark.parametrize(
    ("figures", "waiting", "ratio"),
    [
        ({"done": 10, "run_s": 30.0, "slot_s": 60.0}, 0, 0.5),
        ({"done": 10, "run_s": 30.0, "slot_s": 60.0}, 20, 1.5),
        ({"slot_s": 60.0}, 0, 0.0),
        ({"slot_s": 60.0}, 1, None),
        ({"done": 10, "run_s": 30.0}, 0, None),
    ],
)
def test_load_is_the_ratio_of_work_to_slots(figures, waiting, ratio):
    assert load(**figures).ratio(waiting) == ratio


def test_means_of_run_and_wait_times():
    one = load(done=2, failed=1, retried=1, lost=1, claimed=8, run_s=8.0, wait_s=16.0)
    assert (one.run_mean_s, one.wait_mean_s) == (2.0, 2.0)
    assert (load().run_mean_s, load().wait_mean_s) == (None, None)


async def test_the_last_minutes_are_added_up(jobs, queue_ids, postgres, sql):
    queue_id = queue_ids["mail"]
    counts = {"done": 3, "failed": 1, "claimed": 5}
    counts |= {"run_s": 4.0, "wait_s": 5.0, "wait_max_s": 1.5, "slot_s": 60.0}
    await sql("UPDATE headrace.migration SET applied_at = now() - interval '1 d'")
    for age in ("2 min", "4 min", "3 h"):
        await add_counts(postgres, queue_id, **counts)
        await sql(
            f"UPDATE headrace.queue_minute SET minute = minute - interval '{age}'"
            " WHERE minute >= date_trunc('minute', now()) - interval '1 min'"
        )
    found = await jobs.fleet.load()
    assert 300 <= found.span_s < 361
    [one] = found.queues
    assert (one.queue, one.done, one.failed, one.wait_max_s) == ("mail", 6, 2, 1.5)
    assert (one.claimed, one.wait_mean_s) == (10, 1.0)
    assert one.ratio(0) == pytest.approx(8 / 120)
    assert [minute.done for minute in found.minutes] == [3, 3]
    await sql("UPDATE headrace.migration SET applied_at = now() - interval '90 s'")
    assert 90 <= (await jobs.fleet.load()).span_s < 300, "no longer than the statistics exist"
    await sql("UPDATE headrace.migration SET applied_at = now() + interval '1 s'")
    assert (await jobs.fleet.load()).span_s == 1
