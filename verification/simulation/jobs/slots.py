"""Agents and slots in the simulation: the product's own code, with processes that are simulated.

`SimulatedAgentPool` is `ForkedWorkerPool` with another fork: a slot is a process of the world that
runs a real `SlotRunner`, and its socket is a channel with latency. There are no zygote, no
pidfds, no control groups and no lock file: their places are taken here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

from headrace.engines.postgres import Postgres
from headrace.jobs.agent import capacity
from headrace.jobs.agent.agent import _return_leases
from headrace.jobs.agent.host_lock import KILL_AFTER_S, HostLock, LockRecord
from headrace.jobs.agent.host_loop import HostLoop
from headrace.jobs.agent.queue_state import TaskFacts
from headrace.jobs.agent.slot_statements import SlotStatements
from headrace.jobs.agent.worker_pool import ForkedWorkerPool
from headrace.jobs.agent.worker_process import WorkerProcess
from headrace.jobs.agent.worker_proxy import WorkerProxy
from headrace.jobs.agent.zygote_client import ZygoteClient
from headrace.jobs.messages import FromSlot, Left, Stop, ToSlot
from headrace.jobs.model import JobsConfig
from headrace.jobs.service import Jobs
from headrace.jobs.slots.process import ORPHANED_GRACE_S
from headrace.jobs.slots.runner import SlotRunner
from headrace.jobs.slots.status_board import StatusBoard, StatusCell
from headrace.jobs.worker import declared_ids
from headrace.kernel.ipc import MessageConnection
from verification.simulation.loop import CURRENT, Process
from verification.simulation.postgres_client import SimulatedPostgres
from verification.simulation.world import World

SOCKET_S: Final = 0.0001
"""Latency between an agent and its slots."""
EXIT_S: Final = 0.001
"""From the death of a process to the signal of its pidfd."""
LOCK_POLL_S: Final = 0.1
HOST_FACTS: Final = {(capacity, "cores"): lambda: 2}
"""In place of the control groups of the real machine, which a seed does not fix."""
OpenJobs = Callable[[], tuple[SimulatedPostgres, Jobs]]
"""The service of a new process."""


class SlotLink:
    """Both ends of the socket between an agent and one slot."""

    def __init__(self, world: World, agent: Process) -> None:
        self.agent = agent
        self.slot: Process | None = None
        self.in_slot: Callable[[ToSlot], None] = lambda _message: None
        self.in_agent: Callable[[FromSlot], None] = lambda _message: None
        self.on_orphaned: Callable[[], None] = lambda: None
        self.on_exit: Callable[[], None] = lambda: None
        self.has_left = False
        self._world = world
        self._is_closed = False

    def send(self, message: ToSlot) -> None:
        """The agent sends a message; a dead slot drops it."""
        if self.slot is not None:
            self._world.in_process(self.slot, SOCKET_S, self._to_slot, message)

    def close(self) -> None:
        """The agent closes its end."""
        self._is_closed = True

    def send_to_agent(self, message: FromSlot) -> None:
        """The slot sends a message."""
        self.has_left = self.has_left or isinstance(message, Left)
        self._world.in_process(self.agent, SOCKET_S, self._to_agent, message)

    def _to_slot(self, message: ToSlot) -> None:
        self.in_slot(message)

    def _to_agent(self, message: FromSlot) -> None:
        if not self._is_closed:
            self.in_agent(message)


class SlotMain:
    """A slot's process: what `slots.process` does, without the operating system's part."""

    def __init__(
        self, world: World, name: str, link: SlotLink, cell: StatusCell, open_jobs: OpenJobs
    ) -> None:
        self._world, self._name, self._link = world, name, link
        self._cell, self._open_jobs = cell, open_jobs
        self._stopping: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run until the slot has left."""
        _, jobs = self._open_jobs()
        self._left = asyncio.Event()
        self._runner = SlotRunner(
            jobs.registry, send=self._send, config=jobs.config, status=self._cell
        )
        self._link.in_slot, self._link.on_orphaned = self._receive, self._orphaned
        jobs.use_agent(self._runner.agent)
        await self._runner.start()
        if not self._link.agent.is_alive:
            self._orphaned()
        await self._left.wait()
        self._world.kill(self._name)

    def _receive(self, message: ToSlot) -> None:
        if isinstance(message, Stop):
            self._stop(message.grace_s)
        self._runner.receive(message)

    def _send(self, message: FromSlot) -> None:
        self._link.send_to_agent(message)
        if isinstance(message, Left):
            self._left.set()

    def _orphaned(self) -> None:
        self._runner.agent.close()
        self._stop(ORPHANED_GRACE_S)

    def _stop(self, grace_s: float) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._runner.stop(grace_s))


class SimulatedWorkerProcess(WorkerProcess):
    """A slot's process as its agent sees it; signals reach a process of the world."""

    __slots__ = ("kill_process",)
    kill_process: Callable[[], None]

    def kill(self, why: str, *, is_overtime: bool = False, is_blameless: bool = False) -> None:
        """See `WorkerProcess`."""
        if self.why_killed:
            return
        self.why_killed = why
        self.is_overtime = is_overtime
        self.is_blameless = is_blameless
        self.kill_process()


class _NoZygote:
    """In place of the zygote: forks are made by the pool itself."""

    pid = None
    on_forked: Any = None
    on_exited: Any = None


@dataclass(slots=True)
class HostFiles:
    """What of a host survives its agent: the record in its lock file, its board, its slots."""

    record: LockRecord = field(default_factory=LockRecord)
    board: StatusBoard = field(default_factory=StatusBoard.make)
    slots: dict[str, SlotLink] = field(default_factory=dict)
    """The links of all slots that may live, by the names of their processes."""


class SimulatedHostLock:
    """The part of `HostLock` that the agent uses after it was taken."""

    def __init__(self, files: HostFiles) -> None:
        self.former = LockRecord(host_ids=list(files.record.host_ids))
        self._files = files
        files.record = LockRecord()

    def note_host(self, host_id: int) -> None:
        """See `HostLock`."""
        self._files.record.host_ids.append(host_id)

    def note_slots(self, _pids: Sequence[int]) -> None:
        """The world has the slots."""


class SimulatedAgentPool(ForkedWorkerPool):
    """The forked slots of an agent, as processes of the world."""

    def __init__(
        self,
        world: World,
        files: HostFiles,
        host_lock: SimulatedHostLock,
        jobs: Jobs,
        *,
        name: str,
        statements: SlotStatements,
        slots_max: int,
        open_jobs: OpenJobs,
    ) -> None:
        super().__init__(
            cast(ZygoteClient, _NoZygote()),
            files.board,
            cast(HostLock, host_lock),
            jobs.config,
            name=name,
            statements=statements,
        )
        self._world, self._files, self._jobs = world, files, jobs
        self._slots_max, self._open_jobs = slots_max, open_jobs
        self._capacity = slots_max

    async def declare(self) -> Sequence[tuple[TaskFacts, int]]:
        """See `WorkerPool`."""
        ids = await declared_ids(self._jobs)
        return [(TaskFacts.of(task), ids[task.queue]) for task in self._jobs.registry]

    async def _fork(self) -> bool:
        assert self._dispatcher is not None, "serve has begun"
        dispatcher, world = self._dispatcher, self._world
        number = next(n for n in range(self._slots_max + 1) if n not in self._slots)
        self._board.clear(number)
        name = f"{self._name}.{number}"
        former = world.processes.get(name)
        if former is not None and former.is_alive:
            return False
        link = SlotLink(world, CURRENT.get())
        connection = cast(MessageConnection, link)
        slot = SimulatedWorkerProcess(number, connection, WorkerProxy(link))
        slot.kill_process = partial(world.kill, name)
        slot.pid = number + 1
        link.in_agent = lambda message: self._on_slot_message(slot, dispatcher, message)
        link.on_exit = lambda: self._note_exit(slot, link)
        self._files.slots[name] = link
        self._slots[number] = slot
        dispatcher.add(slot.worker)
        main = SlotMain(world, name, link, self._board.cell(number), self._open_jobs)
        link.slot = world.start(name, main.run, is_child=True)
        return True

    def _adopt(self, slot: WorkerProcess, pid: int) -> None:
        """Every slot is watched from its fork on."""

    def _note_exit(self, slot: WorkerProcess, link: SlotLink) -> None:
        slot.exit_status = 0 if link.has_left else -9
        slot.connection_lost = True
        self._on_exit(slot)

    def _reap_orphans(self) -> None:
        """The world has no zombies."""

    def _sample(self) -> None:
        """The number of slots that fit is fixed."""

    def _cpu_pressure(self) -> float:
        return 0.0


class SimulatedAgent:
    """`headrace agent` on one host: lock, return of a former agent's leases, host loop."""

    def __init__(
        self,
        world: World,
        name: str,
        config: JobsConfig,
        *,
        slots_max: int,
        open_jobs: OpenJobs,
    ) -> None:
        self.name = name
        self.stop: asyncio.Event | None = None
        """Stops the running agent in an orderly way."""
        self.host: HostLoop | None = None
        self._world, self._config = world, config
        self._slots_max, self._open_jobs = slots_max, open_jobs
        self._files = HostFiles()
        world.on_death(self._note_death)

    async def run(self) -> None:
        """Run one agent after another, as a supervisor does."""
        while True:
            await self._wait_former()
            lock = SimulatedHostLock(self._files)
            simulated, jobs = self._open_jobs()
            postgres = cast(Postgres, simulated)
            await _return_leases(postgres, jobs, cast(HostLock, lock))
            statements = SlotStatements(postgres)
            pool = SimulatedAgentPool(
                self._world,
                self._files,
                lock,
                jobs,
                name=self.name,
                statements=statements,
                slots_max=self._slots_max,
                open_jobs=self._open_jobs,
            )
            self.stop = asyncio.Event()
            self.host = HostLoop(postgres, self._config, name=self.name, pool=pool)
            await self.host.run(self.stop)
            await statements.close()
            self._files.record = LockRecord()
            await asyncio.sleep(1.0)

    async def _wait_former(self) -> None:
        """Wait until no slot of a former agent lives; kill those that hang."""
        began_s = self._world.now_s
        while alive := [name for name in self._files.slots if self._is_alive(name)]:
            if self._world.now_s - began_s > KILL_AFTER_S:
                for name in alive:
                    self._world.kill(name)
            await asyncio.sleep(LOCK_POLL_S)

    def _is_alive(self, name: str) -> bool:
        process = self._world.processes.get(name)
        return process is not None and process.is_alive

    def _note_death(self, process: Process) -> None:
        if process.name == self.name:
            for link in self._files.slots.values():
                if link.slot is not None and link.agent is process:
                    # A callback, since the slot sets it when it runs.
                    self._world.in_process(link.slot, SOCKET_S, _call_orphaned, link)
            return
        link_of = self._files.slots.get(process.name)
        if link_of is not None and link_of.slot in (process, None):
            del self._files.slots[process.name]
            self._world.in_process(link_of.agent, EXIT_S, link_of.on_exit)


def _call_orphaned(link: SlotLink) -> None:
    link.on_orphaned()
