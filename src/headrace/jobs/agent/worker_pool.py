"""The forked slots of an agent: forks, watches, recycles and ends them, within plan and capacity.

The jobs of a dead slot are settled at its exit, once its last messages were read. The end of its
socket is not waited for, because a child process of a handler may hold it open for seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from headrace.engines.children import child_pids, end_group
from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.agent import capacity, zygote_protocol
from headrace.jobs.agent.dispatcher import Dispatcher
from headrace.jobs.agent.host_lock import HostLock
from headrace.jobs.agent.queue_state import TaskFacts
from headrace.jobs.agent.slot_statements import SlotStatements
from headrace.jobs.agent.worker_process import WorkerProcess
from headrace.jobs.agent.worker_proxy import WorkerProxy
from headrace.jobs.agent.zygote_client import ZygoteClient, declared_ids
from headrace.jobs.fleet.state import Planned
from headrace.jobs.messages import (
    Abandon,
    Ack,
    FromSlot,
    Insert,
    Left,
    Measured,
    Ready,
    Recycle,
    Statement,
    Stop,
    decode_from_slot,
)
from headrace.jobs.model import JobsConfig, agent_slots, slots_ended
from headrace.jobs.slots.status_board import SLOTS_MAX, SlotStatus, StatusBoard
from headrace.kernel.ipc import MessageConnection
from headrace.kernel.logs import logger
from headrace.kernel.metrics import add_deltas
from headrace.kernel.resilience import Backoff, wait_event

TICK_S: Final = 0.25
LAST_MESSAGES_S: Final = 0.05
"""How long after an exit the last messages or the exit status may arrive."""
KILL_AFTER_S: Final = 1.0
"""Extra time for a stopping slot after its grace time."""
SILENT_WARNED_S: Final = 30.0
RESTARTS: Final = Backoff(0.1, 30.0)
_IDLE: Final = SlotStatus(None, 0, 0.0, 0.0, 0.0)
_log: Final = logger(__name__)


class ForkedWorkerPool:
    """Implements `WorkerPool` with slots forked by a zygote."""

    kind = "agent"

    def __init__(
        self,
        zygote: ZygoteClient,
        board: StatusBoard,
        host_lock: HostLock,
        config: JobsConfig,
        *,
        name: str,
        statements: SlotStatements,
        tags: Sequence[str] = (),
    ) -> None:
        self.tags = tags
        self._statements = statements
        self._zygote = zygote
        self._board = board
        self._host_lock = host_lock
        self._config = config
        self._name = name
        self._slots: dict[int, WorkerProcess] = {}
        self._dispatcher: Dispatcher | None = None
        self._changed = asyncio.Event()
        self._is_ending = False
        self._early_deaths = 0
        self._fork_after_s = 0.0
        self._planned: Planned | None = None
        self._host_id = 0
        self._capacity = 1
        self._slot_cpu = capacity.SlotCpu()
        self._pss: dict[int, int] = {}
        self._unreaped: set[int] = set()
        """Dead slots whose zygote died before it reaped them."""
        zygote.on_forked = self._on_forked
        zygote.on_exited = self._on_exited

    @property
    def pids(self) -> list[int]:
        """Process ids of the running slots."""
        return [slot.pid for slot in self._slots.values() if slot.pid]

    async def declare(self) -> Sequence[tuple[TaskFacts, int]]:
        """See `WorkerPool`."""
        loaded = await self._zygote.wait_loaded()
        ids = await declared_ids(self._zygote)
        fit = [facts for facts in loaded.tasks if facts.tag is None or facts.tag in self.tags]
        return [(facts, ids[facts.queue]) for facts in fit]

    async def serve(self, dispatcher: Dispatcher) -> None:
        """See `WorkerPool`."""
        self._dispatcher = dispatcher
        while True:
            self._changed.clear()
            self._reap_orphans()
            self._watch()
            self._sample()
            await self._scale()
            await wait_event(self._changed, TICK_S)

    async def drain(self, dispatcher: Dispatcher, /, grace_s: float) -> None:
        """See `WorkerPool`."""
        self._is_ending = True
        for slot in self._slots.values():
            self._request_stop(slot, grace_s)
        if not await self._wait_gone(grace_s + KILL_AFTER_S):
            left = [slot.number for slot in self._slots.values()]
            _log.warning("slots_killed_at_stop", slots=left, jobs=dispatcher.jobs_open)
            await self.abort()

    async def abort(self) -> bool:
        """See `WorkerPool`."""
        for slot in self._slots.values():
            slot.kill("its agent stops or lost its host row", is_blameless=True)
        is_gone = await self._wait_gone(KILL_AFTER_S)
        if not is_gone:
            _log.error("slots_not_gone", pids=self.pids)
        return is_gone

    def kill(self, worker: WorkerProxy, why: str) -> None:
        """See `WorkerPool`."""
        for slot in self._slots.values():
            if slot.worker is worker:
                slot.kill(why, is_blameless=True)

    async def report(self, postgres: Postgres, host_id: int, dispatcher: Dispatcher) -> None:
        """See `WorkerPool`."""
        if host_id != self._host_id:
            self._host_id = host_id
            self._host_lock.note_host(host_id)
        self._planned = await store.fleet.planned_slots(postgres, self._name)
        self._apply_plan(dispatcher)
        self._changed.set()
        now_s = time.monotonic()
        await store.fleet.report_host(
            postgres,
            host_id,
            capacity=max(0, self._capacity - self._floats),
            load_per_core=capacity.load_per_core(),
            cpu_pressure=self._cpu_pressure(),
            slots=[self._slot_report(slot, now_s) for slot in self._slots.values()],
        )

    # How many slots, and their queues

    @property
    def _floats(self) -> int:
        return self._config.floats or 2 * capacity.cores()

    def _target(self) -> int:
        planned = self._planned
        if self._is_ending or (planned is not None and planned.is_draining):
            return 0
        bound = sum(planned.slots.values()) if planned is not None else 0
        return min(bound + self._floats, self._capacity)

    def _apply_plan(self, dispatcher: Dispatcher) -> None:
        """Bind the planned number of slots to each queue, idle floating slots first."""
        wanted = dict(self._planned.slots) if self._planned is not None else {}
        staying = [slot for slot in self._slots.values() if not slot.is_leaving]
        for slot in staying:
            name = slot.worker.bound.facts.queue if slot.worker.bound else None
            if name is not None and wanted.get(name, 0) > 0:
                wanted[name] -= 1
            elif name is not None:
                dispatcher.bind(slot.worker, None)
        floats = [slot for slot in staying if slot.worker.bound is None and slot.is_ready]
        floats.sort(key=lambda slot: bool(slot.worker.leases))
        for name, count in wanted.items():
            queue = dispatcher.queue(name)
            for _ in range(count if queue is not None else 0):
                if not floats:
                    return
                dispatcher.bind(floats.pop(0).worker, queue)

    async def _scale(self) -> None:
        """Fork missing slots and retire surplus ones."""
        staying = [slot for slot in self._slots.values() if not slot.is_leaving]
        for slot in list(self._slots.values()):
            if slot.is_leaving and not slot.worker.leases:
                self._request_stop(slot, self._config.grace_s)
        target = self._target()
        idle_first = sorted(staying, key=lambda s: (bool(s.worker.bound), bool(s.worker.leases)))
        for slot in idle_first[: max(0, len(staying) - target)]:
            self._retire(slot)
        for _ in range(target - len(staying)):
            if time.monotonic() < self._fork_after_s or not await self._fork():
                break
        if self._planned is not None and self._dispatcher is not None:
            self._apply_plan(self._dispatcher)

    async def _fork(self) -> bool:
        assert self._dispatcher is not None, "serve has begun"
        dispatcher = self._dispatcher
        number = next(n for n in range(SLOTS_MAX) if n not in self._slots)
        self._board.clear(number)
        connection = MessageConnection(
            decode_from_slot,
            lambda message: self._on_slot_message(slot, dispatcher, message),
            lambda: self._on_connection_lost(slot),
        )
        slot = WorkerProcess(number, connection, WorkerProxy(connection))
        ours, theirs = socket.socketpair()
        with theirs:
            if not self._zygote.fork(number, theirs):
                ours.close()
                return False
        self._slots[number] = slot
        agent_slots.set(len(self._slots))
        dispatcher.add(slot.worker)
        await connection.connect(ours)
        return True

    def _retire(self, slot: WorkerProcess) -> None:
        """Stop assigning work to a slot; it leaves once its jobs have ended."""
        slot.is_leaving = True
        slot.worker.accepts_work = False
        slot.worker.bound = None
        self._changed.set()

    def _request_stop(self, slot: WorkerProcess, grace_s: float) -> None:
        slot.is_leaving = True
        slot.worker.accepts_work = False
        if not slot.was_stopped:
            slot.was_stopped = True
            slot.connection.send(Stop(grace_s))

    # Messages of slots

    def _on_slot_message(
        self, slot: WorkerProcess, dispatcher: Dispatcher, message: FromSlot
    ) -> None:
        match message:
            case Ack():
                pass
            case Insert() | Statement() | Abandon():
                self._statements.receive(slot.connection, message)
                return
            case Ready():
                self._on_ready(slot, message)
                if slot.is_leaving:
                    return
            case Measured():
                add_deltas(message.grown)
            case Left():
                slot.has_left = True
            case Recycle() if not slot.is_leaving:
                _log.info(
                    "slot_recycled",
                    slot=slot.number,
                    private_bytes=message.private_bytes,
                    why=message.why,
                )
                self._retire(slot)
        dispatcher.receive(slot.worker, message)
        if slot.is_leaving and not slot.worker.leases:
            self._changed.set()

    def _on_ready(self, slot: WorkerProcess, message: Ready) -> None:
        slot.is_ready = True
        self._early_deaths = 0
        self._changed.set()
        if slot.pidfd < 0:
            self._adopt(slot, message.pid)

    # Exits of slots

    def _adopt(self, slot: WorkerProcess, pid: int) -> None:
        """Watch a slot whose zygote died before it reported the fork: it is a child by now."""
        with suppress(ProcessLookupError):
            self._attach_process(slot, pid, os.pidfd_open(pid))

    def _on_forked(self, message: zygote_protocol.Forked, pidfd: int) -> None:
        slot = self._slots.get(message.slot)
        if slot is not None and slot.pidfd < 0:
            self._attach_process(slot, message.pid, pidfd)
        else:
            os.close(pidfd)

    def _attach_process(self, slot: WorkerProcess, pid: int, pidfd: int) -> None:
        slot.pid, slot.pidfd = pid, pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit, slot)
        self._host_lock.note_slots(self.pids)

    def _on_exited(self, message: zygote_protocol.Exited) -> None:
        slot = self._slots.get(message.slot)
        if slot is not None and slot.pid == message.pid:
            slot.exit_status = message.status
            self._on_exit(slot)

    def _on_exit(self, slot: WorkerProcess) -> None:
        """Handle the exit of a process; its last messages and its status may follow."""
        if slot.has_exited:
            self._remove_if_final(slot)
            return
        slot.has_exited = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(slot.pidfd)
        if slot.exit_status is None:
            slot.exit_status = slot.reap()
        self._await_last_messages(slot)
        self._remove_if_final(slot)

    def _await_last_messages(self, slot: WorkerProcess) -> None:
        """Remove the slot soon, for a process of its handlers may keep its socket open."""
        due_s = time.monotonic() + LAST_MESSAGES_S

        def end() -> None:
            # A loop that was blocked meanwhile runs timers before it reads sockets.
            if time.monotonic() > due_s + LAST_MESSAGES_S:
                self._await_last_messages(slot)
            else:
                self._remove(slot)

        asyncio.get_running_loop().call_later(LAST_MESSAGES_S, end)

    def _on_connection_lost(self, slot: WorkerProcess) -> None:
        slot.connection_lost = True
        if slot.pidfd < 0 and self._zygote.pid is None:
            self._remove(slot)
        else:
            self._remove_if_final(slot)

    def _remove_if_final(self, slot: WorkerProcess) -> None:
        if slot.has_exited and slot.connection_lost and slot.exit_status is not None:
            self._remove(slot)

    def _remove(self, slot: WorkerProcess) -> None:
        """Settle the jobs of a dead slot and remove it."""
        if self._slots.get(slot.number) is not slot:
            return
        del self._slots[slot.number]
        self._pss.pop(slot.number, None)
        slot.connection.close()
        self._statements.drop(slot.connection)
        if slot.exit_status is None:
            self._unreaped.add(slot.pid)
        if slot.pidfd >= 0:
            os.close(slot.pidfd)
        is_orderly = slot.has_left or slot.is_blameless
        how = "overtime" if slot.is_overtime else _how_died(slot.exit_status)
        slots_ended.labels(how="left" if is_orderly else how).inc()
        agent_slots.set(len(self._slots))
        status = _IDLE if is_orderly else self._board.read(slot.number)
        why = slot.why_killed or _exit_text(slot.exit_status)
        jobs = 0
        if self._dispatcher is not None:
            jobs = self._dispatcher.handle_crash(
                slot.worker, status, f"its process died: {why}", is_overtime=slot.is_overtime
            )
        if not is_orderly:
            _log.error("slot_died", slot=slot.number, pid=slot.pid, why=why, jobs=jobs)
            if not slot.is_ready:
                self._early_deaths += 1
                self._fork_after_s = time.monotonic() + RESTARTS.delay_s(self._early_deaths)
        self._host_lock.note_slots(self.pids)
        self._changed.set()

    async def _wait_gone(self, wait_s: float) -> bool:
        """Wait until no slot is left. Return False after `wait_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._slots:
                    self._changed.clear()
                    await self._changed.wait()
        return not self._slots

    def _reap_orphans(self) -> None:
        """Reap processes that this process inherited because their parents died."""
        for pid in set(child_pids()) - set(self.pids) - {self._zygote.pid}:
            if pid in self._unreaped:
                self._unreaped.discard(pid)
                end_group(pid)
            os.waitpid(pid, os.WNOHANG)

    # Watching slots and the host

    def _watch(self) -> None:
        """Kill slots with a call over its timeout or an event loop blocked for too long."""
        now_s = time.monotonic()
        for slot in self._slots.values():
            status = self._board.read(slot.number)
            if not status.is_whole:
                continue
            if slot.overtime_s(status, now_s) > 0:
                slot.kill(
                    f"its call ran over its timeout of {status.timeout_s:g} s", is_overtime=True
                )
                continue
            queue = slot.worker.queue
            silent_s = slot.silent_s(status, now_s)
            if queue is None or not queue.facts.is_async or silent_s < SILENT_WARNED_S:
                slot.warned_s = 0.0
            elif silent_s > self._config.slot_silent_max_s:
                slot.kill(f"its event loop was blocked for {silent_s:.0f} s", is_overtime=True)
            elif slot.warned_s == 0.0:
                slot.warned_s = now_s
                _log.warning(
                    "slot_silent",
                    slot=slot.number,
                    queue=queue.facts.queue,
                    silent_s=round(silent_s, 1),
                    advice="an async handler blocks the event loop: make it sync, or await in it",
                )

    def _sample(self) -> None:
        """Measure the memory of one slot, and update how many slots fit."""
        unread = [n for n in self._slots if n not in self._pss]
        oldest = next(iter(self._pss), None)
        number = unread[0] if unread else oldest
        if number is not None:
            self._pss.pop(number, None)
            slot = self._slots.get(number)
            read = capacity.pss_bytes(slot.pid) if slot is not None and slot.pid else None
            if read is not None:
                self._pss[number] = read
        self._capacity = capacity.slots_that_fit(
            capacity.free_bytes(),
            self._pss.values(),
            slots=len(self._slots),
            slots_max=capacity.cores() * self._config.slots_per_core,
            reserve_bytes=self._config.memory_reserve_bytes,
        )

    def _cpu_pressure(self) -> float:
        used = self._slot_cpu.cores_used(self.pids)
        return capacity.cpu_pressure() if 2 * used >= capacity.cores() else 0.0

    def _slot_report(self, slot: WorkerProcess, now_s: float) -> dict[str, object]:
        status = self._board.read(slot.number)
        bound = slot.worker.bound
        return {
            "queue": bound.facts.queue if bound is not None else None,
            "pid": slot.pid,
            "busy_s": _busy_s(status, slot.worker, now_s),
        }


def _busy_s(status: SlotStatus, worker: WorkerProxy, now_s: float) -> float:
    """Slot time of the running calls; concurrent calls share it.

    Otherwise a few hanging calls in a slot with room for many would look like a lack of slots.
    """
    if not status.jobs:
        return 0.0
    queue = worker.queue
    at_once = 1 if queue is None or queue.facts.batch is not None else queue.facts.concurrency
    return max(0.001, round((now_s - status.started_s) * min(1.0, status.jobs / at_once), 3))


def _how_died(status: int | None) -> str:
    """The value of `SLOT_ENDS` of a slot that did not leave."""
    if status is None:
        return "died"
    if status >= 0:
        return "exited"
    return "killed" if status == -signal.SIGKILL else "crashed"


def _exit_text(status: int | None) -> str:
    if status is None:
        return "its exit status is unknown"
    if status >= 0:
        return f"exit code {status}"
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
