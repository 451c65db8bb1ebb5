"""The forked slots of an agent: as many as the plan and the host allow, watched, recycled, ended.

Slots are told apart from their jobs: what a dead slot held is settled by the dispatcher at the slot's exit (its socket's
end may come seconds later, while a child of a handler holds it), and after the last word of its socket was read.
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

from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.agent import capacity, control
from headrace.jobs.agent.board import SLOTS_MAX, Board, Doing
from headrace.jobs.agent.declaring import declared_ids
from headrace.jobs.agent.dispatcher import Dispatcher
from headrace.jobs.agent.forked import ForkedSlot
from headrace.jobs.agent.keeper import ZygoteKeeper
from headrace.jobs.agent.lines import TaskFacts
from headrace.jobs.agent.links import SlotLink
from headrace.jobs.agent.remains import end_group
from headrace.jobs.agent.seats import Seat
from headrace.jobs.agent.succession import Succession
from headrace.jobs.fleet.facts import Planned
from headrace.jobs.model import JobsConfig, agent_slots, slots_ended
from headrace.jobs.slots.messages import FromSlot, Left, Measured, Ready, Recycle
from headrace.kernel.logs import logger
from headrace.kernel.metrics import add_deltas
from headrace.kernel.resilience import Backoff

TICK_S: Final = 0.25
EXIT_TOLD_S: Final = 0.05
"""So long after an exit its socket's last words, or its status, may come."""
KILL_AFTER_S: Final = 1.0
"""What a stopping slot gets beyond its grace time."""
SILENT_WARNED_S: Final = 30.0
RESTARTS: Final = Backoff(0.1, 30.0)
_NOTHING: Final = Doing(None, 0, 0.0, 0.0, 0.0)
_log: Final = logger(__name__)


class ForkedCrew:
    """Implements `core.Crew` with slots forked by a zygote."""

    kind = "agent"

    def __init__(
        self,
        keeper: ZygoteKeeper,
        board: Board,
        succession: Succession,
        config: JobsConfig,
        *,
        name: str,
        tags: Sequence[str] = (),
    ) -> None:
        self.tags = tags
        self._keeper = keeper
        self._board = board
        self._succession = succession
        self._config = config
        self._name = name
        self._slots: dict[int, ForkedSlot] = {}
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
        """Dead slots whose zygote died too before it reaped them."""
        keeper.on_forked = self._on_forked
        keeper.on_exited = self._on_exited

    @property
    def pids(self) -> list[int]:
        """Of the slots that run."""
        return [slot.pid for slot in self._slots.values() if slot.pid]

    async def declare(self) -> Sequence[tuple[TaskFacts, int]]:
        """See `Crew`."""
        loaded = await self._keeper.wait_loaded()
        ids = await declared_ids(self._keeper)
        fit = [facts for facts in loaded.tasks if facts.tag is None or facts.tag in self.tags]
        return [(facts, ids[facts.queue]) for facts in fit]

    async def serve(self, dispatcher: Dispatcher) -> None:
        """See `Crew`."""
        self._dispatcher = dispatcher
        dispatcher.on_message = self._heard
        while True:
            self._changed.clear()
            self._reap_orphans()
            self._watch()
            self._sample()
            await self._keep_number()
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._changed.wait()

    async def drain(self, dispatcher: Dispatcher, /, grace_s: float) -> None:
        """See `Crew`."""
        self._is_ending = True
        for slot in self._slots.values():
            self._ask_to_leave(slot, grace_s)
        if not await self._wait_gone(grace_s + KILL_AFTER_S):
            left = [slot.number for slot in self._slots.values()]
            _log.warning("slots_killed_at_stop", slots=left, jobs=dispatcher.jobs_open)
            await self.cut()

    async def cut(self) -> None:
        """See `Crew`."""
        for slot in self._slots.values():
            slot.kill("its agent stops or lost its host row", is_blameless=True)
        if not await self._wait_gone(KILL_AFTER_S):
            _log.error("slots_not_gone", pids=self.pids)

    async def report(self, postgres: Postgres, host_id: int, dispatcher: Dispatcher) -> None:
        """See `Crew`."""
        if host_id != self._host_id:
            self._host_id = host_id
            self._succession.note_host(host_id)
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
            slots=[self._told(slot, now_s) for slot in self._slots.values()],
        )

    # How many, and whose

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
        """Bind as many seats to each queue as the plan says; idle floating ones first."""
        wanted = dict(self._planned.slots) if self._planned is not None else {}
        staying = [slot for slot in self._slots.values() if not slot.is_leaving]
        for slot in staying:
            queue = slot.seat.bound.facts.queue if slot.seat.bound else None
            if queue is not None and wanted.get(queue, 0) > 0:
                wanted[queue] -= 1
            elif queue is not None:
                dispatcher.bind(slot.seat, None)
        floats = [slot for slot in staying if slot.seat.bound is None and slot.is_ready]
        floats.sort(key=lambda slot: bool(slot.seat.hands))
        for queue, count in wanted.items():
            line = dispatcher.line(queue)
            for _ in range(count if line is not None else 0):
                if not floats:
                    return
                dispatcher.bind(floats.pop(0).seat, line)

    async def _keep_number(self) -> None:
        """Fork what is missing, let go what is too much."""
        staying = [slot for slot in self._slots.values() if not slot.is_leaving]
        for slot in list(self._slots.values()):
            if slot.is_leaving and not slot.seat.hands:
                self._ask_to_leave(slot, self._config.grace_s)
        target = self._target()
        idle_first = sorted(staying, key=lambda s: (bool(s.seat.bound), bool(s.seat.hands)))
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
        link = SlotLink(
            lambda message: self._hear(slot, dispatcher, message),
            lambda: self._on_link_lost(slot),
        )
        slot = ForkedSlot(number, link, Seat(link))
        ours, theirs = socket.socketpair()
        with theirs:
            if not self._keeper.fork(number, theirs):
                ours.close()
                return False
        self._slots[number] = slot
        agent_slots.set(len(self._slots))
        dispatcher.add(slot.seat)
        await link.connect(ours)
        return True

    def _retire(self, slot: ForkedSlot) -> None:
        """Take no more work in it; it leaves when its hands are empty."""
        slot.is_leaving = True
        slot.seat.is_open = False
        slot.seat.bound = None
        self._changed.set()

    def _ask_to_leave(self, slot: ForkedSlot, grace_s: float) -> None:
        slot.is_leaving = True
        slot.seat.is_open = False
        if not slot.was_asked:
            slot.was_asked = True
            slot.link.stop(grace_s)

    # What slots say

    def _hear(self, slot: ForkedSlot, dispatcher: Dispatcher, message: FromSlot) -> None:
        if isinstance(message, Ready):
            slot.is_ready = True
            self._early_deaths = 0
            self._changed.set()
            if slot.pidfd < 0:
                # Its zygote died before it told of it: it is our own child by now.
                with suppress(ProcessLookupError):
                    self._seat_process(slot, message.pid, os.pidfd_open(message.pid))
            if slot.is_leaving:
                return
        dispatcher.heard(slot.seat, message)
        if slot.is_leaving and not slot.seat.hands:
            self._changed.set()

    def _heard(self, seat: Seat, message: FromSlot) -> None:
        if isinstance(message, Measured):
            add_deltas(message.grown)
            return
        slot = next((s for s in self._slots.values() if s.seat is seat), None)
        if slot is None:
            return
        if isinstance(message, Left):
            slot.has_left = True
        elif isinstance(message, Recycle) and not slot.is_leaving:
            _log.info(
                "slot_recycled",
                slot=slot.number,
                private_bytes=message.private_bytes,
                why=message.why,
            )
            self._retire(slot)

    # How they end

    def _on_forked(self, told: control.Forked, pidfd: int) -> None:
        slot = self._slots.get(told.slot)
        if slot is not None and slot.pidfd < 0:
            self._seat_process(slot, told.pid, pidfd)
        else:
            os.close(pidfd)

    def _seat_process(self, slot: ForkedSlot, pid: int, pidfd: int) -> None:
        slot.pid, slot.pidfd = pid, pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit, slot)
        self._succession.note_slots(self.pids)

    def _on_exited(self, told: control.Exited) -> None:
        slot = self._slots.get(told.slot)
        if slot is not None and slot.pid == told.pid:
            slot.status = told.status
            self._on_exit(slot)

    def _on_exit(self, slot: ForkedSlot) -> None:
        """The process is gone; its last words and its status may still be on their way."""
        if slot.is_gone:
            self._bury_if_silent(slot)
            return
        slot.is_gone = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(slot.pidfd)
        if slot.status is None:
            slot.status = slot.reap()
        loop.call_later(EXIT_TOLD_S, self._bury, slot)
        self._bury_if_silent(slot)

    def _on_link_lost(self, slot: ForkedSlot) -> None:
        slot.link_lost = True
        if slot.pidfd < 0 and self._keeper.pid is None:
            self._bury(slot)
        else:
            self._bury_if_silent(slot)

    def _bury_if_silent(self, slot: ForkedSlot) -> None:
        if slot.is_gone and slot.link_lost and slot.status is not None:
            self._bury(slot)

    def _bury(self, slot: ForkedSlot) -> None:
        """Settle what a dead slot held, and forget it."""
        if self._slots.get(slot.number) is not slot:
            return
        del self._slots[slot.number]
        self._pss.pop(slot.number, None)
        slot.link.close()
        if slot.status is None:
            self._unreaped.add(slot.pid)
        if slot.pidfd >= 0:
            os.close(slot.pidfd)
        is_orderly = slot.has_left or slot.is_blameless
        how = "left" if is_orderly else "overtime" if slot.is_overtime else "died"
        slots_ended.labels(how=how).inc()
        agent_slots.set(len(self._slots))
        doing = _NOTHING if is_orderly else self._board.read(slot.number)
        why = slot.why_killed or _told_status(slot.status)
        jobs = 0
        if self._dispatcher is not None:
            jobs = self._dispatcher.lose(
                slot.seat, doing, f"its process died: {why}", is_overtime=slot.is_overtime
            )
        if not is_orderly:
            _log.error("slot_died", slot=slot.number, pid=slot.pid, why=why, jobs=jobs)
            if not slot.is_ready:
                self._early_deaths += 1
                self._fork_after_s = time.monotonic() + RESTARTS.delay_s(self._early_deaths)
        self._succession.note_slots(self.pids)
        self._changed.set()

    async def _wait_gone(self, wait_s: float) -> bool:
        """Whether every slot has gone within `wait_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._slots:
                    self._changed.clear()
                    await self._changed.wait()
        return not self._slots

    def _reap_orphans(self) -> None:
        """Reap what handlers' processes left: where their parents died, this process inherits them."""
        ours = {slot.pid for slot in self._slots.values()} | {self._keeper.pid}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid in ours:
                return
            if found.si_pid in self._unreaped:
                self._unreaped.discard(found.si_pid)
                end_group(found.si_pid)
            os.waitpid(found.si_pid, 0)

    # What is watched

    def _watch(self) -> None:
        """Kill slots whose call outlives its timeout, or whose event loop stands still for too long."""
        now_s = time.monotonic()
        for slot in self._slots.values():
            doing = self._board.read(slot.number)
            if not doing.is_whole:
                continue
            if slot.overtime_s(doing, now_s) > 0:
                slot.kill(
                    f"its call ran over its timeout of {doing.timeout_s:g} s", is_overtime=True
                )
                continue
            line = slot.seat.line
            silent_s = slot.silent_s(doing, now_s)
            if line is None or not line.facts.is_async or silent_s < SILENT_WARNED_S:
                slot.warned_s = 0.0
            elif silent_s > self._config.slot_silent_max_s:
                slot.kill(f"its event loop stood still for {silent_s:.0f} s", is_overtime=True)
            elif slot.warned_s == 0.0:
                slot.warned_s = now_s
                _log.warning(
                    "slot_silent",
                    slot=slot.number,
                    queue=line.facts.queue,
                    silent_s=round(silent_s, 1),
                    advice="its async handler blocks the event loop: make it sync, or await",
                )

    def _sample(self) -> None:
        """Read the memory of one more slot, and conclude how many fit."""
        unread = [n for n in self._slots if n not in self._pss]
        oldest = next(iter(self._pss), None)
        number = unread[0] if unread else oldest
        if number is not None:
            self._pss.pop(number, None)
            slot = self._slots.get(number)
            read = capacity.pss_bytes(slot.pid) if slot is not None and slot.pid else None
            if read is not None:
                self._pss[number] = read
        state = capacity.HostState(
            free_bytes=capacity.free_bytes(),
            pss_bytes=self._pss,
            slots=len(self._slots),
            cores=capacity.cores(),
        )
        self._capacity = capacity.slots_that_fit(
            state,
            reserve_bytes=self._config.memory_reserve_bytes,
            slots_per_core=self._config.slots_per_core,
        )

    def _cpu_pressure(self) -> float:
        used = self._slot_cpu.cores_used(self.pids)
        return capacity.cpu_pressure() if 2 * used >= capacity.cores() else 0.0

    def _told(self, slot: ForkedSlot, now_s: float) -> dict[str, object]:
        doing = self._board.read(slot.number)
        bound = slot.seat.bound
        return {
            "queue": bound.facts.queue if bound is not None else None,
            "pid": slot.pid,
            "busy_s": _busy_s(doing, slot.seat, now_s),
        }


def _busy_s(doing: Doing, seat: Seat, now_s: float) -> float:
    """Slot time of the calls that run; those side by side share it, as they do once they have ended.

    Counted whole, a hundred that hung in a slot with room for 800 looked like a queue in need of slots.
    """
    if not doing.jobs:
        return 0.0
    line = seat.line
    at_once = 1 if line is None or line.facts.batch is not None else line.facts.concurrency
    return max(0.001, round((now_s - doing.started_s) * min(1.0, doing.jobs / at_once), 3))


def _told_status(status: int | None) -> str:
    if status is None:
        return "nothing is known of how"
    if status >= 0:
        return f"exit code {status}"
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
