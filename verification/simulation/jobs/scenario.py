"""The scenario `jobs`: agents, a worker, schedulers and clients in one world, and its faults.

Three agents with one to three slots each, one `headrace work`, two schedulers and three clients.
The clients enqueue in bursts with quiet spans between them. The intervals of the settings come
from the seed, so that runs differ in what happens at the same time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, cast

from tests.kit.checkers import Finding

from headrace.engines.postgres import Postgres
from headrace.jobs import (
    Batch,
    Cancel,
    Fail,
    JobContext,
    JobsConfig,
    NewJob,
    Registry,
    Snooze,
    store,
)
from headrace.jobs.fleet.scheduler import Scheduler
from headrace.jobs.model import NewGroup
from headrace.jobs.service import Jobs
from headrace.jobs.worker import Worker
from headrace.kernel.errors import HeadraceError
from verification.simulation.faults import Fault, FaultKind, process_kinds, stall_kinds
from verification.simulation.jobs.checks import JobsChecks
from verification.simulation.jobs.model import add_jobs
from verification.simulation.jobs.slots import HOST_FACTS, SimulatedAgent
from verification.simulation.loop import CURRENT, Process
from verification.simulation.postgres import PostgresModel
from verification.simulation.postgres_client import SimulatedPostgres
from verification.simulation.run import SETTLE_MAX_S
from verification.simulation.world import World

AGENTS: Final = 3
SLOTS_MAX: Final = 3
SCHEDULERS: Final = 2
CLIENTS: Final = 3
LASTS_MAX_S: Final = 90.0
"""Longer than a lease: a host that is cut off for so long is fenced."""
GAPS_S: Final = (8.0, 20.0, 60.0)
"""Mean times between two faults."""
RATE: Final = (5, 10.0)
"""Starts of a lane, and their window."""
CONCURRENCY: Final = 2
CAPPED_SLOTS: Final = 2
OUTCOMES: Final = ("done",) * 12 + ("raise", "fail", "snooze", "cancel", "enqueue", "progress")
CALLS: Final = (
    *("one", "many", "rated", "counted", "group", "unique", "chain", "capped", "batch", "open"),
    *("cancel", "flood", "flood"),
)


class JobsScenario:
    """See `run.Scenario`."""

    settle_max_s = SETTLE_MAX_S
    quiet_s = 60.0
    """Mean time between two bursts of a client."""
    calls: Sequence[str] = CALLS

    def __init__(self, world: World) -> None:
        self.world = world
        self.gap_s = world.stream("gap").choice(GAPS_S)
        self.model = PostgresModel(world)
        self.tables = add_jobs(self.model)
        self.registry = Registry()
        self.checks = JobsChecks(world, self.tables)
        self.config = _config(world.stream("config"))
        self._chance = world.stream("clients")
        self._services: dict[Process, Jobs] = {}
        self._names: list[str] = []
        self._agents: list[SimulatedAgent] = []
        self._stops: dict[str, asyncio.Event] = {}
        self._is_quiet = False
        _add_tasks(self.registry, self)
        world.replaced.update(HOST_FACTS)
        world.on_death(lambda process: self.checks.forget_process(process.name))

    # Faults

    def fault_kinds(self) -> Sequence[FaultKind]:
        """See `run.Scenario`."""
        agents = [f"agent-{n}" for n in range(AGENTS)]
        schedulers = [f"scheduler-{n}" for n in range(SCHEDULERS)]
        clients = [f"client-{n}" for n in range(CLIENTS)]
        slots = [f"{agent}.{n}" for agent in agents for n in range(SLOTS_MAX)]
        processes = [*agents, *agents, "work", *schedulers, *clients]
        return [
            *process_kinds(processes, lasts_max_s=LASTS_MAX_S),
            FaultKind("kill", lambda world, fault: world.kill(fault.target), slots, 0.0, 2.0),
            FaultKind("pause", lambda world, fault: world.pause(fault.target), slots, LASTS_MAX_S),
            FaultKind("stop", self._stop, [*agents, "work"], 0.0, 1.0),
            FaultKind("crash", self._crash, ["postgres"], 0.0, 0.5),
            FaultKind("freeze", lambda world, _: world.pause("postgres"), ["postgres"], 40.0, 0.5),
            FaultKind("failover", self._fail_over, ["postgres"], 0.0, 0.25),
            *self._stalls(agents, schedulers),
        ]

    def _stalls(self, _agents: Sequence[str], _schedulers: Sequence[str]) -> Sequence[FaultKind]:
        return ()

    def _stop(self, world: World, fault: Fault) -> None:
        """SIGTERM: a host ends in an orderly way and is started again."""
        process = world.processes.get(fault.target)
        stop = self._stops.get(fault.target)
        for agent in self._agents:
            if agent.name == fault.target:
                stop = agent.stop
        if stop is not None and process is not None:
            world.in_process(process, 0.0, stop.set)

    def _crash(self, _world: World, fault: Fault) -> None:
        self.model.crash(down_s=0.5 + 10 * fault.strength)

    def _fail_over(self, _world: World, fault: Fault) -> None:
        """To a synchronous standby: no commit is lost."""
        self.model.crash(down_s=5 + 30 * fault.strength)

    # Processes

    async def begin(self) -> None:
        """See `run.Scenario`."""
        for n in range(AGENTS):
            agent = SimulatedAgent(
                self.world,
                f"agent-{n}",
                self.config,
                slots_max=1 + n % SLOTS_MAX,
                open_jobs=self.open_jobs,
            )
            self._agents.append(agent)
            self.world.start(agent.name, agent.run)
        self.world.start("work", self._work)
        for n in range(SCHEDULERS):
            self.world.start(f"scheduler-{n}", self._schedule)
        for n in range(CLIENTS):
            self.world.start(f"client-{n}", self._call)

    def open_jobs(self) -> tuple[SimulatedPostgres, Jobs]:
        """The service of a new process."""
        postgres = SimulatedPostgres(self.model)
        jobs = Jobs(cast(Postgres, postgres), self.config, self.registry)
        self._services[CURRENT.get()] = jobs
        return postgres, jobs

    def service(self) -> Jobs:
        """The service of the current process."""
        return self._services[CURRENT.get()]

    async def _work(self) -> None:
        while True:
            postgres, jobs = self.open_jobs()
            worker = Worker(cast(Postgres, postgres), jobs, self.config, host_name="work")
            self._stops["work"] = stop = asyncio.Event()
            await worker.run(stop)
            await asyncio.sleep(1.0)

    async def _schedule(self) -> None:
        postgres, jobs = self.open_jobs()
        name = CURRENT.get().name
        await Scheduler(cast(Postgres, postgres), jobs, name=name).run(asyncio.Event())

    async def _call(self) -> None:
        """A client: bursts of calls, and quiet spans between them."""
        _, jobs = self.open_jobs()
        chance = self._chance
        while not self._is_quiet:
            for _ in range(chance.randint(1, 6)):
                with suppress(HeadraceError):
                    await self._call_once(jobs, chance)
                await asyncio.sleep(chance.expovariate(2.0))
            await asyncio.sleep(chance.expovariate(1 / self.quiet_s))
        await asyncio.get_running_loop().create_future()

    async def _call_once(self, jobs: Jobs, chance: random.Random) -> None:
        record = self.world.recorder
        kind = chance.choice(self.calls)
        count = chance.randint(1, 8)
        if kind == "one":
            new = [_job(chance, "plain", after_s=chance.choice((None, 3.0, 90.0)))]
        elif kind in ("rated", "counted"):
            lane = f"{kind}-{chance.randint(0, 2)}"
            new = [_job(chance, kind, lane=lane) for _ in range(count)]
        elif kind == "unique":
            new = [_job(chance, "plain", unique=f"key-{chance.randint(0, 3)}")]
        elif kind == "chain":
            new = [_job(chance, "plain", chain=f"chain-{chance.randint(0, 1)}")]
        elif kind == "group":
            await self._call_group(jobs, chance, count)
            return
        elif kind == "open":
            await self._call_open(jobs, chance, count)
            return
        elif kind == "cancel":
            await self._cancel(jobs, chance)
            return
        elif kind == "flood":
            # Quick jobs: claims carry acks.
            quick = {"do": "done", "s": 0.02}
            new = [NewJob(queue="plain", payload=quick) for _ in range(10 * count)]
        elif kind == "flood_batch":
            # Quick batches are prefetched.
            quick = {"do": "done", "s": 0.005}
            new = [NewJob(queue="batch", payload=quick) for _ in range(10 * count)]
        else:
            queue = "plain" if kind == "many" else kind
            new = [_job(chance, queue, priority=chance.randint(3, 6)) for _ in range(count)]
        with record.asking("enqueue") as asked:
            asked.ok(job=await jobs.enqueue_many(new))

    async def _call_group(self, jobs: Jobs, chance: random.Random, count: int) -> None:
        members = [_job(chance, "plain") for _ in range(count - 1)]
        members.append(_job(chance, "rated", lane="rated-0"))
        group = NewGroup(members=members, on_done=NewJob(queue="callback", payload={}))
        with self.world.recorder.asking("group") as asked:
            asked.ok(group=await jobs.enqueue_groups([group]))

    async def _call_open(self, jobs: Jobs, chance: random.Random, count: int) -> None:
        """A group that is filled while its members run."""
        record = self.world.recorder
        with record.asking("group") as asked:
            async with jobs.group(on_done=NewJob(queue="callback", payload={})) as group:
                for _ in range(count):
                    with record.asking("enqueue") as one:
                        new = [_job(chance, "plain")]
                        one.ok(job=await jobs.enqueue_many(new, group=group))
            asked.ok(group=[group.id])

    async def _cancel(self, jobs: Jobs, chance: random.Random) -> None:
        newest = self.model.last_id("job_id")
        ids = [chance.randint(max(1, newest - 10), max(1, newest))]
        await store.workflows.cancel_tree(jobs._postgres, ids)

    async def handle(self, job: JobContext[dict[str, Any]], queue: str) -> None:
        """The handler of most queues: its payload has its duration and its outcome."""
        with self.checks.running(queue, job):
            await asyncio.sleep(job.payload.get("s", 0.01))
            match job.payload.get("do"):
                case "raise" if job.attempt == 1:
                    raise RuntimeError("the first attempt fails")
                case "snooze" if self.world.now_s % 2 < 1:
                    raise Snooze(2.0)
                case "fail":
                    raise Fail("it always fails")
                case "cancel":
                    raise Cancel("it is not needed")
                case "progress":
                    job.progress(0.5)
                case "enqueue":
                    await self._enqueue_more()

    def batch_s(self, _payloads: Sequence[dict[str, Any]]) -> float:
        """How long the handler of a batch runs."""
        return 0.2

    async def _enqueue_more(self) -> None:
        """A handler enqueues a job."""
        with self.world.recorder.asking("enqueue") as asked:
            new = NewJob(queue="plain", payload={"s": 0.01})
            asked.ok(job=[await self.service().enqueue(new)])

    # The run

    async def work(self, until_s: float) -> None:
        """See `run.Scenario`."""
        while self.world.now_s < until_s:
            await asyncio.sleep(min(5.0, max(0.0, until_s - self.world.now_s)))
            self.checks.look()

    async def is_settled(self) -> bool:
        """See `run.Scenario`."""
        if not self._is_quiet:
            self._is_quiet = True
            self.checks.begin_calm()
        self.checks.look()
        return self.checks.is_settled()

    def findings(self) -> list[Finding]:
        """See `run.Scenario`."""
        return self.checks.findings()


class BusyJobsScenario(JobsScenario):
    """With clients that hardly pause: more happens at the same time, at more cost per hour."""

    quiet_s = 5.0


class StallingJobsScenario(JobsScenario):
    """With hosts that freeze whole, processes that pause between two statements, quick batches."""

    calls = (*CALLS, "flood_batch")

    def batch_s(self, payloads: Sequence[dict[str, Any]]) -> float:
        """As long as its longest job."""
        return float(max(payload["s"] for payload in payloads))

    def _stalls(self, agents: Sequence[str], schedulers: Sequence[str]) -> Sequence[FaultKind]:
        processes = [*agents, "work", *schedulers, *schedulers]
        return stall_kinds(self.model, agents, processes, lasts_max_s=LASTS_MAX_S)


class LateStandbyScenario(JobsScenario):
    """With failovers to a standby that lags: acknowledged commits may be lost."""

    def _fail_over(self, _world: World, fault: Fault) -> None:
        self.model.crash(down_s=5 + 30 * fault.strength, lost_commits=int(50 * fault.strength))


def _config(chance: random.Random) -> JobsConfig:
    """Settings with intervals of the seed; those that promises name are the defaults."""
    return JobsConfig(
        poll_s=chance.choice((1.0, 5.0, 5.0, 20.0, 20.0)),
        plan_every_s=chance.choice((5.0, 20.0)),
        cron_every_s=chance.choice((1.0, 5.0, 15.0)),
        backlog_every_s=chance.choice((15.0, 60.0)),
        floats=chance.choice((1, 2, 3)),
        retry_max_s=60.0,
    )


def _job(chance: random.Random, queue: str, **options: Any) -> NewJob:
    payload = {
        "do": chance.choice(OUTCOMES),
        "s": round(min(30.0, chance.expovariate(1.0)), 3),
    }
    return NewJob(queue=queue, payload=payload, **options)


def _add_tasks(registry: Registry, scenario: JobsScenario) -> None:
    """The tasks of the fleet."""
    checks = scenario.checks
    starts_max, window_s = RATE
    registry.limiter("rated", rate=f"{starts_max}/{window_s:g}s")
    registry.limiter("counted", concurrency=CONCURRENCY)

    @registry.task("plain", concurrency=3, slots=(0, 50))
    async def plain(job: JobContext[dict[str, Any]]) -> None:
        await scenario.handle(job, "plain")

    @registry.task("rated", limiter="rated", concurrency=4)
    async def rated(job: JobContext[dict[str, Any]]) -> None:
        await scenario.handle(job, "rated")

    @registry.task("counted", limiter="counted", concurrency=2)
    async def counted(job: JobContext[dict[str, Any]]) -> None:
        await scenario.handle(job, "counted")

    @registry.task("capped", slots=(1, CAPPED_SLOTS))
    async def capped(job: JobContext[dict[str, Any]]) -> None:
        await scenario.handle(job, "capped")

    @registry.task("batch", batch=5)
    async def batch(batch: Batch[dict[str, Any]]) -> None:
        with checks.running_batch("batch", batch):
            await asyncio.sleep(scenario.batch_s(batch.payloads))
            if any(payload.get("do") == "fail" for payload in batch.payloads):
                raise RuntimeError("a job of the batch fails")

    @registry.task("callback", importance=8)
    async def callback(job: JobContext[dict[str, Any]]) -> None:
        with checks.running("callback", job, group=job.payload["group"]["id"]):
            await asyncio.sleep(0.01)

    @registry.cron("* * * * *", name="minutely")
    async def minutely(job: JobContext[Any]) -> None:
        with checks.running("minutely", job):
            await asyncio.sleep(0.01)
