"""The model of the jobs room returns what PostgreSQL returns, over random sequences of calls.

Each step is one call of `headrace.jobs.store` on both. Moments are moved instead of waited for: the
rows of PostgreSQL become older, and the clock of the model moves.
"""

from __future__ import annotations

import random
import time

import pytest
from verification.simulation.jobs.model import add_jobs
from verification.simulation.postgres import PostgresModel
from verification.simulation.postgres_client import as_driver
from verification.simulation.world import World

from headrace.engines.postgres import Runner
from headrace.engines.sql import compile_query
from headrace.jobs import JobsConfig, NewJob, Registry, store
from headrace.jobs.fleet.state import SlotRequest
from headrace.jobs.messages import Outcome
from headrace.jobs.model import NewGroup
from headrace.jobs.sql import SQL
from headrace.jobs.store.claim_cursor import FIRST_AT, PRIORITIES, LaneCursor
from headrace.jobs.validation import prepare_groups, prepare_jobs

STEPS = 90
TRACE = "00-" + 32 * "1" + "-" + 16 * "1" + "-00"
NONE_MARKED = [(FIRST_AT, 0)] * 10
LANES = ("a", "b")
LIMITS = {"rated": (3, 10.0, None), "counted": (None, None, 2), "both": (20, 10.0, 3)}
OUTCOMES = ("done", "retry", "snooze", "fail", "cancel", "returned", "unstarted", "lost", "moved")
AGED = {
    "job_ready": ("run_at",),
    "lane_job": ("run_at",),
    "host": ("expires_at",),
    "job_lease": ("granted_at",),
    "job_unique": ("kept_until",),
    "job_chain": ("due_at",),
    "lane": ("free_at", "started_at"),
    "lane_queue": ("ready_at",),
    "fleet_plan": ("leads_until",),
}
AGE = [
    *(
        # The year 9999 marks a job that waits in its chain.
        f"UPDATE headrace.{table} SET "
        + ", ".join(
            f"{name} = CASE WHEN {name} < '9999-01-01' THEN {name} - interval '1 s' * AGE"
            f" ELSE {name} END"
            for name in names
        )
        for table, names in AGED.items()
    ),
    *(
        f"UPDATE headrace.{table} SET {name} = ARRAY(SELECT a - interval '1 s' * AGE"
        f" FROM unnest({name}) WITH ORDINALITY AS u(a, o) ORDER BY o)"
        for table, name in (("job_lease", "run_ats"), ("lane", "at"))
    ),
]


class ModelRunner(Runner):
    """Runs statements on the model at once."""

    def __init__(self, seed):
        self.world = World(seed)
        self.model = PostgresModel(self.world)
        self.tables = add_jobs(self.model)
        self._session = self.model.open_session()
        self._at_s = time.monotonic()

    async def call(self, method, query, parameters):
        return as_driver(method, self.model.execute(self._session, query, parameters))

    def follow(self):
        """Let as much time pass as has passed in reality."""
        now_s = time.monotonic()
        self.go_on(now_s - self._at_s + 0.000_01)
        self._at_s = now_s

    def go_on(self, seconds):
        self.world.loop._now_s += seconds


class Pair:
    """PostgreSQL and the model, and which id of one is which of the other."""

    def __init__(self, postgres, sides, seed):
        self.postgres, self.model = postgres, ModelRunner(seed)
        self.chance = random.Random(seed)
        self.ids = {kind: {} for kind in ("job", "lease", "host", "group")}
        self.queues = sides
        self.leases = {}
        """Jobs of every lease that was claimed, by ids of PostgreSQL."""
        self.steps = []

    def map(self, kind, real, model):
        """Two lists of ids are the same."""
        known = self.ids[kind]
        assert len(real) == len(model), (kind, real, model)
        for one, other in zip(real, model, strict=True):
            assert known.setdefault(one, other) == other, (kind, real, model, self.steps)
        assert len(set(known.values())) == len(known)

    def of(self, kind, ids):
        """The ids of the model."""
        return [self.ids[kind][one] for one in ids]

    async def both(self, call, *arguments, **options):
        """The same call on both; arguments that are lists of two differ by side."""
        results = []
        for side, runner in enumerate((self.postgres, self.model)):
            given = {k: v[side] if isinstance(v, Two) else v for k, v in options.items()}
            own = [v[side] if isinstance(v, Two) else v for v in arguments]
            results.append(await call(runner, *own, **given))
        return results


class Two(tuple):
    """A value of PostgreSQL, and that of the model."""

    __slots__ = ()


async def value(runner, query, **parameters):
    return await runner.value(query, **parameters)


async def run(runner, query, **parameters):
    return await runner.run(query, **parameters)


@pytest.fixture
async def pair(request, postgres):
    """A fresh database and a fresh model with the same queues, limiters and hosts."""
    registry = Registry()
    for name, (starts_max, window_s, concurrency) in LIMITS.items():
        rate = None if starts_max is None else f"{starts_max}/{window_s:g}s"
        registry.limiter(name, rate=rate, concurrency=concurrency)
        registry.queue(name, limiter=name)
    registry.queue("plain", slots=(0, 3))
    registry.queue("next", retries=0)
    pair = Pair(postgres, None, request.param)
    found = []
    for runner in (postgres, pair.model):
        await store.queues.declare_queues(runner, registry.declared())
        for one in registry.limiters.values():
            await runner.value(
                SQL.set_limiter,
                limiter=one.name,
                starts_max=one.starts_max,
                window_s=one.window_s,
                slack_s=one.slack_s,
                concurrency=one.concurrency,
                is_set=False,
            )
            await runner.value(SQL.spread_limiter, limiter=one.name, after="", lanes_max=500)
        rows = await store.queues.find_queues(runner)
        found.append({row.name: row.id for row in rows})
    pair.queues = found
    pair.registry = registry
    for _ in range(3):
        real, model = await pair.both(
            store.leases.add_host, "h", Two(list(ids.values()) for ids in found), 30.0
        )
        pair.map("host", [real], [model])
    return pair


async def enqueue(pair):
    chance, jobs = pair.chance, []
    for _ in range(chance.randint(1, 4)):
        queue = chance.choice(("plain", "plain", "next", *LIMITS))
        options = {"priority": chance.randint(4, 6)}
        if queue in LIMITS:
            options["lane"] = chance.choice(LANES)
        elif chance.random() < 0.3:
            options["unique"] = chance.choice("xyz")
            options["unique_for_s"] = chance.choice((None, 30.0))
        elif chance.random() < 0.2:
            options["chain"] = chance.choice("cd")
        if chance.random() < 0.3:
            options["after_s"] = 5.0
        jobs.append(NewJob(queue=queue, payload=chance.randint(0, 9), **options))
    rows = prepare_jobs(jobs, pair.registry)
    queue_ids = Two([ids[name] for name in rows.queues] for ids in pair.queues)
    options = {"group_ids": None, "headers": rows.headers(TRACE), "is_hinted": True}
    pair.map("job", *await pair.both(store.jobs.enqueue, rows, queue_ids, **options))


async def add_group(pair):
    count = pair.chance.randint(0, 3)
    members = [NewJob(queue="plain", payload=1) for _ in range(count)]
    group = NewGroup(members=members, on_done=NewJob(queue="next", payload={}))
    callbacks, rows = prepare_groups([group], pair.registry)
    ids = await pair.both(
        store.jobs.add_groups,
        [count],
        callbacks,
        queue_ids=Two([ids["next"]] for ids in pair.queues),
        headers=[TRACE],
    )
    pair.map("group", *ids)
    if count:
        jobs = await pair.both(
            store.jobs.enqueue,
            rows,
            Two([ids["plain"]] * count for ids in pair.queues),
            group_ids=Two([one] * count for [one] in ids),
            headers=[TRACE],
            is_hinted=False,
        )
        pair.map("job", *jobs)


def claimed(pair, results):
    real, model = results
    assert (real.moved, real.is_counted, real.is_full, real.limiter, real.retries) == (
        model.moved,
        model.is_counted,
        model.is_full,
        model.limiter,
        model.retries,
    )
    assert (real.wait_s is None) == (model.wait_s is None)
    if real.wait_s is not None:
        assert real.wait_s == pytest.approx(model.wait_s, abs=0.9)
    assert real.slack_s == model.slack_s
    pair.map("lease", *([one.lease_id for one in side.leases] for side in results))
    for one, other in zip(real.leases, model.leases, strict=True):
        # A callback has an id that no call returned.
        pair.map("job", list(one.ids), list(other.ids))
        for name in ("is_plain", "priorities", "attempts", "losses", "lanes", "payloads"):
            mine, theirs = list_of(getattr(one, name)), list_of(getattr(other, name))
            assert len(mine) == len(theirs)
            if name != "payloads" or b"group" not in b"".join(map(bytes, mine)):
                assert mine == theirs, name
        pair.leases[one.lease_id] = list(one.ids)


def list_of(values):
    return list(values) if isinstance(values, list | tuple) else [values]


def a_host(pair):
    real = pair.chance.choice(list(pair.ids["host"]))
    return Two((real, pair.ids["host"][real]))


async def claim_ready(pair):
    queue = pair.chance.choice(("plain", "next", *LIMITS))
    claimed(
        pair,
        await pair.both(
            store.leases.claim_ready,
            a_host(pair),
            Two(ids[queue] for ids in pair.queues),
            leases_max=pair.chance.randint(1, 3),
            batch=pair.chance.randint(1, 3),
            priorities=PRIORITIES,
            marks=NONE_MARKED,
        ),
    )


async def claim_lanes(pair):
    queue = pair.chance.choice(list(LIMITS))
    claimed(
        pair,
        await pair.both(
            store.leases.claim_lanes,
            a_host(pair),
            Two(ids[queue] for ids in pair.queues),
            leases_max=pair.chance.randint(1, 3),
            batch=pair.chance.randint(2, 4),
            config=JobsConfig(),
            cursor=LaneCursor(),
        ),
    )


async def settle(pair):
    chance, real, model, whole = pair.chance, {}, {}, []
    if not pair.leases:
        return
    for lease in chance.sample(list(pair.leases), min(2, len(pair.leases))):
        if chance.random() < 0.4:
            whole.append(lease)
            continue
        outcomes = {}
        for job in pair.leases[lease]:
            kind = chance.choice(OUTCOMES)
            delay_s = 5.0 if kind in ("retry", "snooze") else None
            queue = chance.choice(("plain", "nowhere")) if kind == "moved" else None
            if chance.random() < 0.8:
                outcomes[job] = Outcome(kind, delay_s, "why", queue=queue)
        real[lease] = outcomes
        model[pair.ids["lease"][lease]] = {pair.ids["job"][j]: o for j, o in outcomes.items()}
    word = chance.choice(("done", "done", "returned"))
    one, other = await pair.both(
        store.leases.settle,
        jobs=Two((real, model)),
        whole=Two((whole, pair.of("lease", whole))),
        word=word,
        losses_max=3,
    )
    assert pair.of("lease", sorted(one.lost)) == sorted(other.lost)
    assert list(one.busy) == list(other.busy) == []


async def sweep(pair):
    """Expire a host after its report, and return its leases; another one registers."""
    host = a_host(pair)
    report = {"capacity": 1, "load_per_core": 0.5, "slots": []}
    one, other = await pair.both(store.fleet.report_host, host, **report)
    assert one == other
    await pair.both(store.leases.expire_host, host)
    rows = [
        await side.all(SQL.expired_leases, leases_max=100) for side in (pair.postgres, pair.model)
    ]
    real, model = ([row["id"] for row in some] for some in rows)
    assert sorted(pair.of("lease", real)) == sorted(model)
    for lease in real:
        one, other = await pair.both(
            value, SQL.return_lease, lease=Two((lease, pair.ids["lease"][lease])), losses_max=3
        )
        assert one == other
    name, kind = pair.chance.choice((("h", "work"), ("a", "agent"), ("b", "agent")))
    queues = Two(list(ids.values()) for ids in pair.queues)
    new = await pair.both(store.leases.add_host, name, queues, 30.0, kind=kind)
    pair.map("host", *([one] for one in new))


async def age(pair):
    seconds = pair.chance.choice((2.0, 6.0, 13.0))
    for statement in AGE:
        text = statement.replace("AGE", str(seconds))
        await pair.postgres.run(compile_query("age", f"-- Age rows.\n{text}"))
    pair.model.go_on(seconds)
    one, other = await pair.both(value, SQL.move_due, jobs_max=100)
    assert one == other
    for real, model in pair.ids["host"].items():
        one, other = await pair.both(run, SQL.renew_host, host=Two((real, model)), lease_s=30.0)
        assert one == other


async def spend(pair):
    one, other = await pair.both(
        value,
        SQL.spend_of_queue,
        queue=Two(ids["rated"] for ids in pair.queues),
        lane=pair.chance.choice(LANES),
        starts=pair.chance.randint(1, 2),
        wait_max_s=pair.chance.choice((0.0, 60.0)),
    )
    assert (one is None) == (other is None), (one, other)
    if one is not None:
        assert one == pytest.approx(other, abs=0.9)


async def drop_hosts(pair):
    """Delete lost hosts; some are kept for a time."""
    kept_s = pair.chance.choice((0.0, 4.0, 60.0))
    one, other = await pair.both(run, SQL.drop_hosts, lost_kept_s=kept_s)
    assert one == other


async def set_lane(pair):
    name = pair.chance.choice(list(LIMITS))
    await pair.both(
        run,
        SQL.set_lane,
        limiter=name,
        lane=pair.chance.choice(LANES),
        is_own=pair.chance.choice((True, False)),
        starts_max=2,
        window_s=10.0,
        concurrency=pair.chance.choice((None, 1)),
        is_paused=False,
        weight=pair.chance.randint(1, 2),
    )


async def end_waiting(pair):
    jobs = pair.chance.sample(list(pair.ids["job"]), min(3, len(pair.ids["job"])))
    one, other = await pair.both(value, SQL.end_waiting, ids=Two((jobs, pair.of("job", jobs))))
    assert sorted(pair.of("job", one)) == sorted(other)


async def allow(pair):
    requests = [
        [SlotRequest(queue_id=ids["plain"], used=0, kept=kept, wanted=kept + 1)]
        for kept in [pair.chance.randint(0, 2)]
        for ids in pair.queues
    ]
    pair.calls = getattr(pair, "calls", 0) + 1
    one, other = await pair.both(store.fleet.allow_slots, a_host(pair), pair.calls, Two(requests))
    assert list(one.values()) == list(other.values())


async def lead(pair):
    leader = pair.chance.choice("lm")
    one, other = await pair.both(store.fleet.lead_fleet, leader, lead_s=3.0)
    assert one == other
    written = await pair.both(
        store.fleet.write_plan,
        leader,
        pair.chance.choice((one or 0, 1)),
        slots={"h": {"plain": pair.chance.randint(0, 2)}},
        queue_ids=Two(pair.queues),
        moves=[],
    )
    assert written[0] == written[1]


STEP_KINDS = (
    *(enqueue, enqueue, enqueue, add_group, claim_ready, claim_ready, claim_lanes, claim_lanes),
    *(settle, settle, settle, sweep, age, spend, set_lane, end_waiting, allow, lead),
    drop_hosts,
)
STATE = {
    "ready": "SELECT id, attempt, losses, lane, unique_key, run_at > now() FROM headrace.job_ready",
    "laned": "SELECT id, attempt, losses, lane FROM headrace.lane_job",
    "failed": "SELECT id, state, attempt, losses FROM headrace.job_failed",
    "unique": "SELECT job_id, key, is_done FROM headrace.job_unique",
    "lease": "SELECT id, jobs, cardinality(settled), is_plain, is_counted FROM headrace.job_lease",
    "group": "SELECT id, pending, done, failed, cancelled, quarantined FROM headrace.job_group",
}


def state_of_model(pair):
    t, now = pair.model.tables, pair.model.model.now()
    return {
        "ready": [
            (j.id, j.attempt, j.losses, j.lane, j.unique_key, j.run_at > now)
            for j in t.ready.values()
        ],
        "laned": [(j.id, j.attempt, j.losses, j.lane) for j in t.laned.values()],
        "failed": [(j.id, state, j.attempt, j.losses) for state, j, _ in t.failed.values()],
        "unique": [(row.job_id, key, row.is_done) for (_, key), row in t.unique.items()],
        "lease": [
            (one.id, len(one.jobs), len(one.settled), one.is_plain, one.is_counted)
            for one in t.lease.values()
        ],
        "group": [
            (g.id, g.pending, g.done, g.failed, g.cancelled, g.quarantined)
            for g in t.group.values()
        ],
    }


async def compare(pair):
    """Rows are the same, with ids of both that were returned so far."""
    kinds = {"lease": "lease", "group": "group"}
    model = state_of_model(pair)
    for name, text in STATE.items():
        known = pair.ids[kinds.get(name, "job")]
        rows = await pair.postgres.all(compile_query("state", f"-- Rows.\n{text}"))
        real = [(known.get(row[0]), *row[1:]) for row in map(tuple, rows)]
        mine = [(row[0] if row[0] in known.values() else None, *row[1:]) for row in model[name]]
        assert sorted(real, key=repr) == sorted(mine, key=repr), name
    lanes = await pair.postgres.all(
        compile_query(
            "lanes",
            "-- Lanes.\nSELECT l.limiter, l.name, l.inflight, l.uncounted, w.waiting,"
            " w.ready_at <= now(), w.ready_at = 'infinity' FROM headrace.lane l"
            " JOIN headrace.lane_queue w ON w.limiter = l.limiter AND w.lane = l.name",
        )
    )
    pair.model.follow()
    t, now = pair.model.tables, pair.model.model.now()
    own = []
    for (limiter, lane, _), row in t.lane_queue.items():
        of = t.lane.get((limiter, lane))
        is_never = row.ready_at.year == 9999
        own.append(
            (limiter, lane, of.inflight, of.uncounted, row.waiting, row.ready_at <= now, is_never)
        )
    assert sorted(map(tuple, lanes)) == sorted(own)


@pytest.mark.parametrize("pair", range(4), indirect=True)
async def test_random_sequences_of_calls_have_the_same_results(pair):
    for number in range(STEPS):
        pair.model.follow()
        step = enqueue if number < 3 else pair.chance.choice(STEP_KINDS)
        pair.steps.append(step.__name__)
        await step(pair)
        if number % 5 == 4:
            await compare(pair)
    assert len(pair.ids["lease"]) >= 3
