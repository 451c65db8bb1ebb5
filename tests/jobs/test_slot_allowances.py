"""The maximum slots of a queue in a fleet of 40 hosts: real database, simulated slots."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import pytest
from tests.kit.waiting import wait_true

from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.sql import compile_query
from headrace.jobs import JobState, NewJob, store
from headrace.jobs.agent.assignment import Allowances, Assignment
from headrace.jobs.agent.queue_state import QueueState, TaskFacts
from headrace.jobs.agent.worker_proxy import WorkerProxy
from headrace.jobs.fleet.plan import HostRoom, QueueNeed, plan
from headrace.jobs.outcomes import InFlightLease
from headrace.jobs.sql import SQL

MOSTS = {"one": 1, "few": 5, "many": 30}
HOSTS, FLOATS, STEPS = 40, 4, 1200
AGE = compile_query(
    "age",
    "-- A host row expired :age_s ago.\nUPDATE headrace.host"
    " SET expires_at = now() - :age_s::double precision * interval '1 s' WHERE id = :host",
)
HELD = compile_query(
    "held",
    "-- Slots allowed by queue.\nSELECT queue, sum(a.slots)::integer AS slots"
    " FROM headrace.slot_allowance a JOIN headrace.host h ON h.id = a.host AND h.expires_at > now()"
    " GROUP BY queue",
)


class LateRunner:
    """A broken connection: the statement runs without an answer, now or later."""

    def __init__(self, postgres, *, runs_now):
        self._postgres = postgres
        self._runs_now = runs_now
        self.late = None

    async def all(self, query, **arguments):
        """Raises: PostgresDown."""
        if self._runs_now:
            await self._postgres.all(query, **arguments)
        else:
            self.late = (query, arguments)
        raise PostgresDown("cut")


class SimulatedHost:
    """A host row with an agent's queues, slots and allowances; a call is a lease in a slot."""

    def __init__(self, name, host_id, facts):
        self.name, self.host_id = name, host_id
        self.queues = {queue_id: QueueState(task, queue_id) for task, queue_id in facts}
        self.workers = [WorkerProxy(None, accepts_work=True) for _ in range(FLOATS)]
        self.allowances = Allowances(self.queues, self.workers, lambda: None)
        self.leases = 0

    def start(self, queue):
        """Start a call in every slot that may work the queue."""
        queue.may_have_jobs = True
        for worker in Assignment(self.workers, [queue], time.monotonic()).workers_for(queue):
            self.leases += 1
            worker.queue = queue
            worker.leases[self.leases] = InFlightLease(self.leases, [1], [0], retries=0)
            worker.jobs_open += 1

    def end(self, worker):
        """End the calls in a slot."""
        worker.leases.clear()
        worker.jobs_open = 0

    def running(self, queue_id):
        """Slots in which calls of a queue run."""
        return sum(bool(s.leases) and s.queue.queue_id == queue_id for s in self.workers)

    def bind(self, slots):
        """Follow the plan: bind slots, let the others float."""
        wanted = [
            queue for queue in self.queues.values() for _ in range(slots.get(queue.facts.queue, 0))
        ]
        for worker in self.workers:
            worker.bound = wanted.pop() if wanted else None
        self.workers += [WorkerProxy(None, bound=queue, accepts_work=True) for queue in wanted]


@pytest.fixture
async def facts(jobs, registry):
    """Facts and ids of the queues with a maximum."""
    for name, most in MOSTS.items():

        @registry.task(name, slots=(0, most))
        async def never_called(job=None): ...

    rows = await jobs.queues.declare()
    return [(TaskFacts.of(task), rows[task.queue].id) for task in registry]


@pytest.fixture
def open_host(postgres, facts):
    """`await open_host("h1")`: a host row and its state machine."""

    async def opened(name):
        ids = [queue_id for _, queue_id in facts]
        host_id = await store.leases.add_host(postgres, name, ids, 3600, kind="agent")
        return SimulatedHost(name, host_id, facts)

    return opened


class Fleet:
    """Forty hosts, two schedulers, and failures between them and the database."""

    def __init__(self, postgres, facts, open_host, chance):
        self.postgres, self.facts, self.open_host, self.chance = postgres, facts, open_host, chance
        self.hosts, self.frozen, self.late = [], [], []
        self.leader, self.stale = "s0", None

    async def begin(self):
        """Register all hosts."""
        self.hosts = [await self.open_host(f"h{n}") for n in range(HOSTS)]

    def require_within(self):
        """No queue runs in more slots than its maximum."""
        for task, queue_id in self.facts:
            running = sum(h.running(queue_id) for h in (*self.hosts, *self.frozen))
            assert running <= MOSTS[task.queue], task.queue

    async def work(self):
        """Start calls on some host, then end some calls."""
        host = self.chance.choice(self.hosts)
        host.start(self.chance.choice(list(host.queues.values())))
        self.require_within()
        for host in self.hosts:
            for worker in host.workers:
                if worker.leases and self.chance.random() < 0.1:
                    host.end(worker)

    async def renew(self):
        """Renew the allowances of some host."""
        host = self.chance.choice(self.hosts)
        await host.allowances.renew(self.postgres, host.host_id)

    async def lose_answer(self):
        """Renew, but lose the database's answer."""
        host = self.chance.choice(self.hosts)
        with suppress(PostgresDown):
            await host.allowances.renew(LateRunner(self.postgres, runs_now=True), host.host_id)

    async def delay_call(self):
        """Delay a statement until after others of the same host."""
        host = self.chance.choice(self.hosts)
        runner = LateRunner(self.postgres, runs_now=False)
        with suppress(PostgresDown):
            await host.allowances.renew(runner, host.host_id)
        self.late.append(runner.late)
        if len(self.late) > 5:
            query, arguments = self.late.pop(self.chance.randrange(len(self.late)))
            await self.postgres.all(query, **arguments)

    async def freeze(self):
        """Let a host row expire while its calls still run."""
        host = self.hosts.pop(self.chance.randrange(len(self.hosts)))
        await self.postgres.run(AGE, host=host.host_id, age_s=0)
        self.frozen.append(host)

    async def bury(self):
        """Replace an expired host, whose slots were killed."""
        if self.frozen:
            host = self.frozen.pop(0)
            await self.postgres.run(AGE, host=host.host_id, age_s=6)
            self.hosts.append(await self.open_host(host.name))

    async def plan(self):
        """Write a plan; sometimes another scheduler leads, and the former leader tries again."""
        if self.chance.random() < 0.5:
            await self.postgres.run(SQL.stop_leading, leader=self.leader)
            self.leader = "s1" if self.leader == "s0" else "s0"
        term = await store.fleet.lead_fleet(self.postgres, self.leader, lead_s=60)
        rooms = [HostRoom(name=h.name, capacity=self.chance.randrange(4)) for h in self.hosts]
        needs = [
            QueueNeed(
                queue=task.queue, slots_max=MOSTS[task.queue], active=self.chance.randrange(60)
            )
            for task, _ in self.facts
        ]
        planned = plan(needs, rooms, await store.fleet.slot_map(self.postgres))
        ids = {task.queue: queue_id for task, queue_id in self.facts}
        for name, at in ((self.leader, term), self.stale or ("nobody", 0)):
            await store.fleet.write_plan(
                self.postgres, name, at, slots=planned.slots, queue_ids=ids, moves=[]
            )
        self.stale = (self.leader, term)
        for host in self.hosts:
            if self.chance.random() < 0.7:
                host.bind(planned.slots.get(host.name, {}))


async def test_forty_hosts_stay_within_the_maximum_and_use_all_of_it(postgres, facts, open_host):
    chance = random.Random(13)
    fleet = Fleet(postgres, facts, open_host, chance)
    await fleet.begin()
    steps = {
        "work": 30,
        "renew": 10,
        "lose_answer": 8,
        "delay_call": 8,
        "freeze": 1,
        "bury": 1,
        "plan": 1,
    }
    for step in chance.choices(list(steps), list(steps.values()), k=STEPS):
        await getattr(fleet, step)()
        fleet.require_within()
    while fleet.frozen:
        await fleet.bury()
    for host in (*fleet.hosts, *fleet.hosts, *fleet.hosts):
        for queue in host.queues.values():
            host.start(queue)
            fleet.require_within()
        await host.allowances.renew(postgres, host.host_id)
    held = {row["queue"]: row["slots"] for row in await postgres.all(HELD)}
    for task, queue_id in facts:
        running = sum(h.running(queue_id) for h in fleet.hosts)
        assert (running, held[queue_id]) == (MOSTS[task.queue],) * 2, task.queue


async def test_a_host_gives_up_before_another_receives(postgres, facts, open_host, sql):
    first, second = await open_host("a"), await open_host("b")
    few = next(queue_id for task, queue_id in facts if task.queue == "few")
    for host in (first, second):
        await host.allowances.renew(postgres, host.host_id)
    assert (first.queues[few].allowance, second.queues[few].allowance) == (4, 1)
    first.start(first.queues[few])
    await sql(f"INSERT INTO headrace.fleet_slot VALUES ('b', {few}, 3)")
    await first.allowances.renew(postgres, first.host_id)
    await second.allowances.renew(postgres, second.host_id)
    assert (first.queues[few].allowance, second.queues[few].allowance) == (2, 1)
    for worker in first.workers[:2]:
        first.end(worker)
    await first.allowances.renew(postgres, first.host_id)
    await second.allowances.renew(postgres, second.host_id)
    assert (first.queues[few].allowance, second.queues[few].allowance) == (2, 3)


@pytest.fixture
async def pair(postgres, facts, open_host):
    """Two hosts with queues `few` and `many`; the first has an allowance of 4 of few's 5 slots."""
    ids = {task.queue: queue_id for task, queue_id in facts}
    first, second = await open_host("a"), await open_host("b")
    await first.allowances.renew(postgres, first.host_id)
    assert first.queues[ids["few"]].allowance == 4
    return first, second, ids["few"], ids["many"]


async def test_a_lost_answer_leaves_a_host_with_what_it_gave_up(postgres, pair):
    first, second, few, many = pair
    first.queues[many].allowance = 2
    first.start(first.queues[many])
    with suppress(PostgresDown):
        await first.allowances.renew(LateRunner(postgres, runs_now=True), first.host_id)
    await second.allowances.renew(postgres, second.host_id)
    assert second.queues[few].allowance == 3
    for worker in first.workers:
        first.end(worker)
    first.start(first.queues[few])
    assert first.running(few) == 2


async def test_a_call_that_arrives_late_takes_nothing_away(postgres, pair):
    first, second, few, many = pair
    first.queues[many].allowance = 2
    first.start(first.queues[many])
    runner = LateRunner(postgres, runs_now=False)
    with suppress(PostgresDown):
        await first.allowances.renew(runner, first.host_id)
    first.queues[few].is_short = False
    for worker in first.workers:
        first.end(worker)
    for slots in (2, 4):
        first.workers[2].accepts_work = first.workers[3].accepts_work = slots == 4
        await first.allowances.renew(postgres, first.host_id)
        assert first.queues[few].allowance == slots
    first.start(first.queues[few])
    query, arguments = runner.late
    await postgres.all(query, **arguments)
    await second.allowances.renew(postgres, second.host_id)
    assert (first.running(few), second.queues[few].allowance) == (4, 1)


async def test_over_a_lowered_maximum_no_slot_gets_a_further_call(postgres, facts, open_host, jobs):
    host = await open_host("a")
    few = next(queue_id for task, queue_id in facts if task.queue == "few")
    queue = host.queues[few]
    await host.allowances.renew(postgres, host.host_id)
    host.start(queue)
    assert host.running(few) == 4
    await jobs.queues.set("few", slots_max=1)
    await host.allowances.renew(postgres, host.host_id)
    for worker in host.workers[1:]:
        host.end(worker)
        host.start(queue)
    assert host.running(few) == 1
    await jobs.queues.set("few", slots_max=0)
    await host.allowances.renew(postgres, host.host_id)
    host.end(host.workers[0])
    host.start(queue)
    assert host.running(few) == 0


async def test_an_idle_maximum_goes_to_the_host_with_a_free_slot(postgres, facts, open_host):
    full, free = await open_host("a"), await open_host("b")
    one, few = (
        next(queue_id for task, queue_id in facts if task.queue == name) for name in ("one", "few")
    )
    await full.allowances.renew(postgres, full.host_id)
    await free.allowances.renew(postgres, free.host_id)
    assert (full.queues[one].allowance, free.queues[one].allowance) == (1, 0)
    full.start(full.queues[few])
    await full.allowances.renew(postgres, full.host_id)
    await free.allowances.renew(postgres, free.host_id)
    assert (full.queues[one].allowance, free.queues[one].allowance) == (0, 1)


async def test_a_worker_in_one_process_keeps_the_maximum(jobs, registry, working):
    started = []

    @registry.task("never", slots=(0, 0))
    async def never(job: dict) -> None:
        started.append(job)

    @registry.task("once", slots=(0, 1))
    async def runs(job: dict) -> None: ...

    await jobs.queues.declare()
    await jobs.enqueue(NewJob(queue="never", payload={}))
    async with working():
        once = await jobs.enqueue(NewJob(queue="once", payload={}))
        await wait_true(lambda: _is_gone(jobs, once))
    assert started == []


async def _is_gone(jobs, job_id):
    return (await jobs.job(job_id)).state is JobState.GONE
