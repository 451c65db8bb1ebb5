"""The scenario `fetch`: two agents download the photos of three sellers' catalogues.

Agents, slots, schedulers and clients are processes; sellers' hosts, the name server, the object
store and PostgreSQL are models. Each process has the product's `Fetch` of its own. Clients upload
whole catalogues and single items, and poll for results.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from tests.kit.checkers import Finding

from headrace.engines.blobs import Blobs
from headrace.engines.postgres import Postgres
from headrace.fetch import FetchConfig, SentItem, curl, dns
from headrace.fetch.service import Fetch
from headrace.fetch.service.sellers import LinkSigning
from headrace.jobs import JobsConfig, Registry
from headrace.jobs.fleet.scheduler import Scheduler
from headrace.jobs.service import Jobs
from headrace.kernel.errors import HeadraceError
from verification.simulation.faults import Fault, FaultKind, process_kinds, stall_kinds
from verification.simulation.fetch.client import SimulatedPycurl, simulated_aiodns
from verification.simulation.fetch.ledger import FetchLedger
from verification.simulation.fetch.model import add_fetch
from verification.simulation.fetch.sellers import MOODS, Sellers
from verification.simulation.jobs.checks import JobsChecks
from verification.simulation.jobs.model import add_jobs
from verification.simulation.jobs.slots import HOST_FACTS, SimulatedAgent
from verification.simulation.loop import CURRENT
from verification.simulation.media_model import SLOW_MAX_S, SimulatedBlobs, StoreModel
from verification.simulation.postgres import PostgresModel
from verification.simulation.postgres_client import SimulatedPostgres
from verification.simulation.run import SETTLE_MAX_S
from verification.simulation.world import World

AGENTS: Final = ("agent-0", "agent-1")
SLOTS: Final = 5
SCHEDULERS: Final = ("scheduler-0", "scheduler-1")
CUSTOMERS: Final = {"c0": (6, 10.0, 4), "c1": (4, 6.0, 2), "c2": (30, 60.0, 8)}
"""Requests, their window, and connections."""
CLASSES: Final = (1.0, 3.0, 8.0)
LASTS_MAX_S: Final = 60.0
GAPS_S: Final = (6.0, 15.0, 40.0)
UPLOAD_GAPS_S: Final = (10.0, 30.0)
"""Mean times between two uploads of a client."""
ITEMS_MAX: Final = 12
PAGE: Final = 50
REQUESTS_PER_PHOTO: Final = 4.0
"""Starts of a lane for each waiting photo within which a backlog must end: retries, redirects, and
requests that hung or left late need more than one. In `fetch-stalls --seed 1795954917`, whose
clients upload more than the rates permit, the backlog ended within 2.5."""
State: TypeAlias = dict[str, tuple[str, tuple[str, ...]]]
"""Name and photos by item."""


class FetchScenario:
    """See `run.Scenario`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gap_s = world.stream("gap").choice(GAPS_S)
        self.model = PostgresModel(world)
        jobs = add_jobs(self.model)
        self.tables = add_fetch(self.model, jobs)
        self.sellers = Sellers(world)
        self.store = StoreModel(world)
        self.ledger = FetchLedger(world, self.tables, self.sellers, self.store)
        self.jobs_checks = JobsChecks(world, jobs)
        self.chance = world.stream("clients")
        self._config, self._jobs_config = _configs(world.stream("config"))
        self._states: dict[str, list[State]] = {name: [{}] for name in CUSTOMERS}
        """What the items of each customer may be now."""
        self._poller: Fetch | None = None
        self._agents: list[SimulatedAgent] = []
        self._gap_s = world.stream("uploads").choice(UPLOAD_GAPS_S)
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-simulation-")
        self._numbers = iter(range(10**9))
        self._is_quiet = False
        world.replaced.update(
            {
                (curl, "pycurl"): SimulatedPycurl(self.sellers),
                (dns, "aiodns"): simulated_aiodns(self.sellers),
                **HOST_FACTS,
            }
        )

    # Faults

    def fault_kinds(self) -> Sequence[FaultKind]:
        """See `run.Scenario`."""
        slots = [f"{agent}.{n}" for agent in AGENTS for n in range(SLOTS)]
        clients = [f"client-{name}" for name in CUSTOMERS]
        kinds = process_kinds([*AGENTS, *slots, *SCHEDULERS, *clients], lasts_max_s=LASTS_MAX_S)
        kinds += [
            *self._stalls(slots),
            FaultKind("kill", lambda world, fault: world.kill(fault.target), slots, 0.0, 3.0),
            FaultKind("stop", self._stop, AGENTS),
            FaultKind("crash", self._crash, ["postgres"], 0.0, 0.5),
            FaultKind("freeze", lambda world, _: world.pause("postgres"), ["postgres"], 40.0, 0.5),
            FaultKind("failover", self._fail_over, ["postgres"], 0.0, 0.25),
            FaultKind("dns_down", self._dns_down, ["dns"], 30.0, 0.5),
            FaultKind("store_down", self._store_down, ["store"], LASTS_MAX_S),
            FaultKind("store_slow", self._store_slow, ["store"], LASTS_MAX_S),
            FaultKind("store_lossy", self._store_lossy, ["store"], LASTS_MAX_S),
        ]
        hosts, lasts_s = list(self.sellers.hosts), 2 * LASTS_MAX_S
        kinds += [FaultKind(f"host_{mood}", self._mood, hosts, lasts_s, 0.7) for mood in MOODS]
        return [self._noted(kind) for kind in kinds]

    def _stalls(self, _slots: Sequence[str]) -> Sequence[FaultKind]:
        return ()

    def _noted(self, kind: FaultKind) -> FaultKind:
        """The same kind, which records the begin of its faults."""

        def act(world: World, fault: Fault) -> Any:
            self.ledger.note_disturbed(fault.target)
            return kind.act(world, fault)

        return FaultKind(kind.name, act, kind.targets, kind.lasts_max_s, kind.weight)

    def _stop(self, world: World, fault: Fault) -> None:
        process = world.processes.get(fault.target)
        for agent in self._agents:
            if agent.name == fault.target and agent.stop is not None and process is not None:
                world.in_process(process, 0.0, agent.stop.set)

    def _crash(self, _world: World, fault: Fault) -> None:
        self.model.crash(down_s=0.5 + 10 * fault.strength)

    def _fail_over(self, _world: World, fault: Fault) -> None:
        """To a synchronous standby: no commit is lost."""
        self.model.crash(down_s=5 + 30 * fault.strength)

    def _dns_down(self, _world: World, _fault: Fault) -> Any:
        self.sellers.is_dns_down = True
        return lambda: setattr(self.sellers, "is_dns_down", False)

    def _store_down(self, _world: World, _fault: Fault) -> Any:
        self.store.is_down = True
        return lambda: setattr(self.store, "is_down", False)

    def _store_slow(self, _world: World, fault: Fault) -> Any:
        self.store.slow_s = SLOW_MAX_S * fault.strength**2
        return lambda: setattr(self.store, "slow_s", 0.0)

    def _store_lossy(self, _world: World, fault: Fault) -> Any:
        self.store.lost_share = fault.strength
        return lambda: setattr(self.store, "lost_share", 0.0)

    def _mood(self, _world: World, fault: Fault) -> Any:
        host = self.sellers.hosts[fault.target]
        host.mood = fault.name.removeprefix("host_")
        return lambda: setattr(host, "mood", None)

    # Processes

    async def begin(self) -> None:
        """See `run.Scenario`."""
        _, _, self._poller = self._open()
        for name, (starts_max, window_s, connections) in CUSTOMERS.items():
            await self._poller.customers.set(
                name, starts_max=starts_max, window_s=window_s, connections=connections
            )
        for name in AGENTS:
            agent = SimulatedAgent(
                self.world,
                name,
                self._jobs_config,
                slots_max=SLOTS,
                open_jobs=self._open_jobs,
            )
            self._agents.append(agent)
            self.world.start(name, agent.run)
        for name in SCHEDULERS:
            self.world.start(name, self._schedule)
        for name in CUSTOMERS:
            self.world.start(f"client-{name}", self._upload)

    def _open(self) -> tuple[SimulatedPostgres, Jobs, Fetch]:
        """The services of a new process."""
        simulated = SimulatedPostgres(self.model)
        postgres, registry = cast(Postgres, simulated), Registry()
        jobs = Jobs(postgres, self._jobs_config, registry)
        blobs: Any = SimulatedBlobs(self.store)
        signing = LinkSigning(cast(Any, None))
        fetch = Fetch(postgres, cast(Blobs, blobs), jobs, self._config, link_signing=signing)
        registry.add_room(fetch.register)
        return simulated, jobs, fetch

    def _open_jobs(self) -> tuple[SimulatedPostgres, Jobs]:
        postgres, jobs, _ = self._open()
        return postgres, jobs

    async def _schedule(self) -> None:
        postgres, jobs = self._open_jobs()
        name = CURRENT.get().name
        await Scheduler(cast(Postgres, postgres), jobs, name=name).run(asyncio.Event())

    # Clients

    async def _upload(self) -> None:
        """The client of one customer: uploads one after another."""
        _, _, fetch = self._open()
        customer = CURRENT.get().name.removeprefix("client-")
        chance = self.chance
        while not self._is_quiet:
            if chance.random() < 0.6:
                await self._send_catalogue(fetch, customer, chance)
            else:
                await self._send_items(fetch, customer, chance)
            await asyncio.sleep(chance.expovariate(1 / self._gap_s))
        await asyncio.Event().wait()

    async def _send_catalogue(self, fetch: Fetch, customer: str, chance: random.Random) -> None:
        state = dict(chance.choice(self._states[customer]))
        for _ in range(chance.randint(0, 4)):
            self._change(state, customer, chance)
        rows = [
            {"id": item, "name": name, "photos": list(photos)}
            for item, (name, photos) in state.items()
        ]
        if not rows:
            return
        path = Path(self._folder.name) / f"{next(self._numbers)}.json"
        path.write_text(json.dumps(rows))
        self._note_sent(customer, state)
        with suppress(HeadraceError):
            run = await fetch.run_catalogue(path, customer)
            if run.state in ("applied", "done"):
                self._states[customer] = [state]
            self.world.trace("catalogue", customer, run.run, run.state)

    async def _send_items(self, fetch: Fetch, customer: str, chance: random.Random) -> None:
        change: dict[str, Any] = {}
        items = []
        for item in chance.sample(_items_of(customer), chance.randint(1, 3)):
            if chance.random() < 0.15:
                change[item] = None
                items.append(SentItem(customer=customer, item=item, gone=True))
            else:
                name, photos = change[item] = self._content(customer, chance)
                fields: Any = {"name": name}
                items.append(
                    SentItem(customer=customer, item=item, photos=list(photos), fields=fields)
                )
        before = self._states[customer]
        after = [_changed(state, change) for state in before]
        self._states[customer] = [*before, *(state for state in after if state not in before)]
        with suppress(HeadraceError):
            [run] = await fetch.send_items(items)
            self._states[customer] = after
            self.world.trace("items", customer, run.run, run.state)

    def _note_sent(self, customer: str, state: State) -> None:
        if state not in self._states[customer]:
            self._states[customer] = [*self._states[customer], state]

    def _change(self, state: State, customer: str, chance: random.Random) -> None:
        """Add, change or remove an item, or replace a photo behind its link."""
        item = chance.choice(_items_of(customer))
        kind = chance.choice(("put", "put", "put", "remove", "replace"))
        if kind == "put":
            state[item] = self._content(customer, chance)
        elif kind == "remove" and len(state) > 1:
            state.pop(item, None)
        elif item in state and state[item][1]:
            url = chance.choice(state[item][1])
            host, _, path = url.removeprefix("https://").partition("/")
            self.sellers.hosts[host].change(f"/{path}")

    def _content(self, customer: str, chance: random.Random) -> tuple[str, tuple[str, ...]]:
        photos = [self._photo(customer, chance) for _ in range(chance.randint(0, 4))]
        return f"item {chance.randint(1, 3)}", tuple(dict.fromkeys(photos))

    def _photo(self, customer: str, chance: random.Random) -> str:
        host = chance.choice(list(self.sellers.hosts))
        kind = chance.choices(("", "-missing", "-page"), (20, 1, 1))[0]
        return f"https://{host}/{customer}/{chance.randint(1, 30)}{kind}.png"

    async def _poll(self) -> None:
        """Read all results behind the last one that was received."""
        after = self.ledger.polled[-1][0] if self.ledger.polled else 0
        assert self._poller is not None, "opened by begin"
        with suppress(HeadraceError):
            while rows := await self._poller.items.results(after=after, results_max=PAGE):
                self.ledger.polled += [(r.seq, r.customer, r.id, r.version) for r in rows]
                after = rows[-1].seq

    # The run

    async def work(self, until_s: float) -> None:
        """See `run.Scenario`."""
        while self.world.now_s < until_s:
            await asyncio.sleep(min(1.0, max(0.0, until_s - self.world.now_s)))
            await self._look()

    async def _look(self) -> None:
        world, ledger = self.world, self.ledger
        ledger.note_disturbed(*(name for name in world.processes if world.is_disturbed(name)))
        if not self.model.is_up:
            ledger.note_disturbed("postgres")
        if self.sellers.is_dns_down:
            ledger.note_disturbed("dns")
        self.jobs_checks.look()
        await self._poll()

    @property
    def settle_max_s(self) -> float:
        """See `run.Scenario`: the rates of customers delay the photos that wait now."""
        runs, waiting = self.tables.run, Counter[str]()
        for need in self.tables.need.values():
            run = runs.get(need.run_id) if need.outcome is None else None
            if run is not None:
                waiting[run.customer] += 1
        times_s = [
            waiting[name] * REQUESTS_PER_PHOTO * window_s / starts_max
            for name, (starts_max, window_s, _) in CUSTOMERS.items()
        ]
        return SETTLE_MAX_S + max(times_s)

    async def is_settled(self) -> bool:
        """See `run.Scenario`."""
        self._is_quiet = True
        await self._look()
        jobs = self.tables.jobs
        queues = dict(jobs.queue_by_name.items())
        photos = {key for name, key in queues.items() if name.startswith("fetch.")}
        crons = {queues.get(f"fetch.{name}") for name in ("deadlines", "links", "duplicates")}
        waiting = [job for job in jobs.ready.values() if job.queue in photos - crons]
        is_open = any(run.state == "applied" for run in self.tables.run.values())
        return not waiting and not is_open and not len(jobs.laned) and not len(jobs.lease)

    def findings(self) -> list[Finding]:
        """See `run.Scenario`."""
        for customer, states in self._states.items():
            self.ledger.check_items(customer, states)
        self._folder.cleanup()
        return [*self.ledger.findings(), *self.jobs_checks.seen()]


class StallingFetchScenario(FetchScenario):
    """With hosts that freeze whole, and processes that pause between two statements."""

    def _stalls(self, slots: Sequence[str]) -> Sequence[FaultKind]:
        processes = [*AGENTS, *slots, *SCHEDULERS]
        pause, freeze = stall_kinds(self.model, AGENTS, processes, lasts_max_s=LASTS_MAX_S)
        return [replace(freeze, weight=1.0), replace(pause, weight=2.0)]


def _configs(chance: random.Random) -> tuple[FetchConfig, JobsConfig]:
    """Settings of the seed."""
    fetch = FetchConfig(
        classes=CLASSES,
        decode_share=0.0,
        host_connections=chance.choice((2, 3, 8)),
        item_deadline_s=chance.choice((240.0, 21_600.0)),
    )
    lease_s = chance.choice((9.0, 30.0))
    jobs = JobsConfig(
        lease_s=lease_s,
        heartbeat_s=lease_s / 3,
        poll_s=chance.choice((1.0, 5.0, 20.0)),
        plan_every_s=chance.choice((5.0, 20.0)),
        floats=chance.choice((1, 2)),
    )
    return fetch, jobs


def _items_of(customer: str) -> list[str]:
    return [f"{customer}-{n}" for n in range(ITEMS_MAX)]


def _changed(state: State, change: dict[str, Any]) -> State:
    """The items after an upload of some of them."""
    return {item: content for item, content in (state | change).items() if content is not None}
