"""Which queue for which slot: claims for all slots of a host, hands the jobs out, takes the outcomes in.

One claim serves many slots: with 100 slots and one claim for up to 10 of them 360,000 jobs/s were measured, with 4 slots
182,000 (a prototype, 2 cores shared with PostgreSQL). While a claim is under way the slots that end meanwhile gather for the
next, and what they settled rides on it.

Batches of a quick task are claimed in advance, for STOCK_S or one a slot that works it, and wait here rather than in a
slot: they go to whichever slot is free first, and back to the queue if none is within STOCK_KEPT_S. Jobs of lanes are
claimed in advance only where calls are quicker than that, for a grant is good for its slack only.

A hint is cleared BEFORE the claim that it causes: one that comes while an empty claim is under way must survive it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from headrace.jobs.agent.allowances import Allowances
from headrace.jobs.agent.blame import given_back, settled_for_dead
from headrace.jobs.agent.board import Doing
from headrace.jobs.agent.choosing import Moment
from headrace.jobs.agent.lines import STOCK_S, Line, Stocked
from headrace.jobs.agent.seats import Seat
from headrace.jobs.agent.spending import NOTHING, Spending
from headrace.jobs.leases import RECONNECT, Desk
from headrace.jobs.scans import Scan
from headrace.jobs.slots.messages import (
    FromSlot,
    Progress,
    Ready,
    Settled,
    Spend,
    SpendAnswer,
    Work,
)
from headrace.jobs.store.leases import Claims
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import require_not_cancelled

CLAIMS_AT_ONCE: Final = 3
LANE_STARTS_MAX: Final = 50
"""Of calls at once in a slot: more than it begins within their slack would come back unstarted."""
JOBS_PER_CLAIM_MAX: Final = 2_000
LEASES_PER_CLAIM_MAX: Final = 50
STOCK_KEPT_S: Final = 0.25
AGAIN_AFTER_S: Final = 0.02
COMES_BACK: Final = frozenset({"returned", "unstarted", "lost"})
"""Outcomes that make a job ready at the moment for which it was due before."""
RESCAN_AFTER_S: Final = 0.5
LOOK_GAP_S: Final = 0.1
LOOK_LEAST_S: Final = 0.01
CLAIMS_END_S: Final = 2.0
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)


class Dispatcher:
    """Serves the seats of one host row until it is drained or cut off."""

    def __init__(self, desk: Desk, lines: Sequence[Line], poll_s: Callable[[], float]) -> None:
        self._desk = desk
        self._lines = {line.queue_id: line for line in lines}
        self._by_name = {line.facts.queue: line for line in lines}
        self._poll_s = poll_s
        self._seats: dict[Seat, None] = {}
        self._claims: set[asyncio.Task[None]] = set()
        self._asks: set[asyncio.Task[None]] = set()
        self._spending = Spending(desk.spend)
        self._decisions = 0
        self._is_look_due = asyncio.Event()
        self._is_pump_planned = False
        self._is_ending = False
        self._timer: asyncio.TimerHandle | None = None
        self.allowances = Allowances(self._lines, self._seats.keys(), self._plan_pump)
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.jobs_run = 0
        self.on_message: Callable[[Seat, FromSlot], None] = lambda _seat, _message: None
        """Is told what concerns the slot itself: Recycle, Left."""
        desk.on_settled = self._on_settled

    @property
    def lines(self) -> Iterable[Line]:
        """Every queue it serves."""
        return self._lines.values()

    @property
    def seats(self) -> Iterable[Seat]:
        """Every seat it serves."""
        return self._seats

    @property
    def jobs_open(self) -> int:
        """Jobs in the hands of slots."""
        return sum(seat.jobs_open for seat in self._seats)

    def line(self, queue: str) -> Line | None:
        """The queue of that name, where this code knows it."""
        return self._by_name.get(queue)

    def hint(self, queue_id: int) -> None:
        """There may be work in a queue."""
        line = self._lines.get(queue_id)
        if line is not None:
            line.hint()
            self._plan_pump()

    def hint_all(self) -> None:
        """There may be work anywhere."""
        for line in self._lines.values():
            line.hint()
        self._plan_pump()

    def add(self, seat: Seat) -> None:
        """Serve a seat; it is given work once it said Ready."""
        self._seats[seat] = None

    def bind(self, seat: Seat, line: Line | None) -> None:
        """Let a seat serve one queue alone, or float; what it holds it finishes first."""
        seat.bound = line
        self._plan_pump()

    def heard(self, seat: Seat, message: FromSlot) -> None:
        """Take in what a slot says."""
        match message:
            case Settled():
                self._take_in(seat, message)
            case Ready():
                seat.is_open = not self._is_ending
                self._plan_pump()
            case Spend():
                self._ask(self._spend(seat, message))
            case Progress():
                self._desk.note_progress(message)
            case _:
                self.on_message(seat, message)

    def note_slot_time(self, elapsed_s: float) -> None:
        """Count the time since the last call for the queues that slots belong to or work."""
        for seat in self._seats:
            line = seat.bound or (seat.line if seat.hands else None)
            if line is not None:
                line.counts.slot_s += elapsed_s

    def close(self, seat: Seat) -> None:
        """Give a seat no more work; what it holds goes on."""
        seat.is_open = False

    def lose(self, seat: Seat, doing: Doing, why: str, *, is_overtime: bool = False) -> int:
        """A slot has died: settle for it what it cannot any more, see `blame.py`; how many jobs it had."""
        self._seats.pop(seat, None)
        seat.is_open = False
        jobs = seat.jobs_open
        backoff = self._desk.config.backoff
        for hand, settled in settled_for_dead(
            seat, doing, why, is_overtime=is_overtime, backoff=backoff
        ):
            self._settle(hand.line, settled)
        seat.hands.clear()
        seat.jobs_open = 0
        self._plan_pump()
        return jobs

    async def run(self) -> None:
        """Look for work until cancelled. Raises: what a claim met that no retry mends."""
        looking = asyncio.create_task(self._look())
        try:
            await asyncio.wait({looking, self._fault}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (looking, self._fault):
                if ended.done():
                    ended.result()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def end_claims(self) -> None:
        """Claim no more, and give back what no slot has."""
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        if self._claims:
            await asyncio.wait(self._claims, timeout=CLAIMS_END_S)
        await _cancel(self._claims)
        for seat in self._seats:
            seat.is_open = False
        for line in self._lines.values():
            self._return_stock(line)

    async def cut(self) -> None:
        """The host was lost: everything in hand belongs to others now, nothing is settled any more."""
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        await _cancel(self._claims | self._asks)
        for line in self._lines.values():
            line.stock.clear()
        for seat in self._seats:
            seat.is_open = False
            seat.hands.clear()
            seat.jobs_open = 0

    # What comes in

    def _take_in(self, seat: Seat, settled: Settled) -> None:
        hand = seat.note(settled)
        if hand is None:
            return
        line = hand.line
        jobs = len(hand.ids) if settled.ids is None else len(settled.ids)
        if settled.calls:
            line.note_calls(settled.calls, jobs, settled.run_s)
        self.jobs_run += jobs
        self._settle(line, settled, jobs)
        self._plan_pump()

    def _settle(self, line: Line, settled: Settled, jobs: int = 0) -> None:
        if settled.ids is None:
            line.counts.ended += jobs
        else:
            line.counts.note_words(settled.words)
            if not line.is_rescan_planned and not COMES_BACK.isdisjoint(settled.words):
                line.is_rescan_planned = True
                self._ask(self._rescan(line))
        self._desk.settle(settled)

    async def _rescan(self, line: Line) -> None:
        """Claim from the beginning again, once jobs came back that stand behind the scan's marks."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RESCAN_AFTER_S):
                await self._desk.flush()
        line.is_rescan_planned = False
        line.scan = Scan()
        line.hint()
        self._plan_pump()

    def _on_settled(self, limiters: Iterable[str]) -> None:
        """Jobs of lanes were settled: their lanes may have room again, in every queue of the limiter."""
        wanted = set(limiters)
        for line in self._lines.values():
            if line.facts.limiter in wanted:
                line.lanes_due_s = 0.0
        self._plan_pump()

    async def _spend(self, seat: Seat, ask: Spend) -> None:
        line = self._by_name.get(ask.queue)
        granted = NOTHING
        if line is not None:
            granted = await self._spending.ask(
                line.queue_id, ask.lane, starts=ask.starts, wait_max_s=ask.wait_max_s
            )
        seat.place.answer(SpendAnswer(ask.call, granted.wait_s, granted.sent_s))

    def _ask(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._asks.add(task)
        task.add_done_callback(self._asks.discard)

    # What goes out

    def _plan_pump(self) -> None:
        if not self._is_pump_planned and not self._is_ending:
            self._is_pump_planned = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Hand out what is in stock, begin the claims that make sense now, and set the clock for the next."""
        self._is_pump_planned = False
        if self._is_ending:
            return
        now_s = time.monotonic()
        wanting = [line for line in self._lines.values() if line.has_work(now_s)]
        moment = Moment(self._seats, wanting, now_s)
        for line in self._lines.values():
            if line.stock:
                self._empty_stock(line, moment)
        for line in moment.in_order(self._decisions):
            if len(self._claims) >= CLAIMS_AT_ONCE:
                break
            self._try_claim(line, moment)
        self._set_timer(now_s)

    def _try_claim(self, line: Line, moment: Moment) -> None:
        """Begin a claim if a seat has room for what it may bring."""
        now_s = moment.now_s
        is_lanes = line.lanes_due_s <= now_s and (line.is_lanes_turn or not line.is_hinted)
        seats = moment.seats_for(line)
        if len(seats) < len(moment.seats_with_room(line)):
            self.allowances.note_need(line)
        if line.facts.batch is not None:
            batch = line.pace.batch_hint(line.facts.batch)
            leases_max = sum(seat.credit(line) for seat in seats)
            if not is_lanes or line.call_s <= STOCK_S:
                leases_max += moment.batches_in_advance(line, has_room=bool(seats))
        else:
            # Seats with much less room than the roomiest wait for the next claim: one lease a seat.
            most = max((seat.credit(line) for seat in seats), default=0)
            seats = [seat for seat in seats if 2 * seat.credit(line) >= most]
            batch = min((seat.credit(line) for seat in seats), default=1)
            if is_lanes:
                batch = min(batch, LANE_STARTS_MAX)
            leases_max = len(seats)
        leases_max = min(leases_max, LEASES_PER_CLAIM_MAX, max(1, JOBS_PER_CLAIM_MAX // batch))
        if leases_max == 0 or any(stocked.needs_idle for stocked in line.stock):
            return
        self._reserve(line, seats, now_s)
        line.is_lanes_turn = not is_lanes
        task = asyncio.create_task(
            self._claim(line, seats, batch=batch, leases_max=leases_max, is_lanes=is_lanes)
        )
        self._claims.add(task)
        task.add_done_callback(self._claims.discard)

    def _reserve(self, line: Line, seats: list[Seat], now_s: float) -> None:
        line.is_claiming = True
        for seat in seats:
            seat.is_reserved = True
            if seat.line is not line:
                seat.line, seat.line_since_s = line, now_s
        if any(seat.bound is None for seat in seats):
            self._decisions += 1
            line.turn = self._decisions

    async def _claim(
        self, line: Line, seats: list[Seat], *, batch: int, leases_max: int, is_lanes: bool
    ) -> None:
        sent_s = time.monotonic()
        claims = None
        try:
            if is_lanes:
                # A hint that comes meanwhile sets it back to now.
                line.lanes_due_s = sent_s + self._poll_s()
                claims = await self._desk.claim_lanes(
                    line.queue_id, leases_max=leases_max, batch=batch
                )
            else:
                line.is_hinted = False
                claims = await self._desk.claim_ready(
                    line.queue_id, line.scan, leases_max=leases_max, batch=batch
                )
            line.failures = 0
        except HeadraceError as error:
            if not error.retryable:
                self._fail(error)
            self._note_failure(line, error)
        except Exception as error:  # noqa: BLE001 - carried to whoever runs the dispatcher
            self._fail(error)
        finally:
            line.is_claiming = False
            for seat in seats:
                seat.is_reserved = False
                if claims is None and not seat.hands:
                    seat.line = None
        if claims is not None:
            self._hand_out(line, claims, seats, sent_s=sent_s, is_lanes=is_lanes)
        self._plan_pump()

    def _fail(self, error: BaseException) -> None:
        if not self._fault.done():
            self._fault.set_exception(error)

    def _note_failure(self, line: Line, error: HeadraceError) -> None:
        line.failures += 1
        line.hint()
        line.blocked_until_s = time.monotonic() + RECONNECT.delay_s(line.failures)
        _often.warning("claim_failed", queue=line.facts.queue, error=error.text)

    def _hand_out(
        self, line: Line, claims: Claims, seats: list[Seat], *, sent_s: float, is_lanes: bool
    ) -> None:
        now_s = time.monotonic()
        start_before_s = None
        if not is_lanes:
            self._note_ready(line, claims)
        elif claims.leases:
            line.lanes_due_s = 0.0
            start_before_s = sent_s + (claims.slack_s or 0.0)
        elif claims.wait_s is not None:
            due_s = now_s + max(claims.wait_s, AGAIN_AFTER_S)
            line.lanes_due_s = min(line.lanes_due_s, due_s)
        for claim in claims.leases:
            work = claim.as_work(line.facts.queue, claims.retries, start_before_s)
            self._place(line, work, seats, now_s)
        if not line.holds_slots(now_s):
            for seat in seats:
                if not seat.hands and seat.bound is None:
                    seat.line = None

    def _note_ready(self, line: Line, claims: Claims) -> None:
        """Learn from a claim of plain jobs whether there may be more.

        Where it did not see all it may have passed some by behind its marks; empty is the truth.
        """
        if claims.leases and not line.scan.saw_all:
            line.is_hinted = True
        elif not claims.leases and line.was_empty:
            # It may have been told of a job that is due in a moment: ask when.
            self._is_look_due.set()
        line.was_empty = not claims.leases or line.scan.saw_all
        if claims.moved:
            line.lanes_due_s = 0.0

    def _place(self, line: Line, work: Work, seats: Iterable[Seat], now_s: float) -> None:
        """Give `work` to one of `seats` with room, or keep it in stock."""
        at_once = line.facts.batch is None and line.facts.concurrency > 1
        needs_idle = at_once and work.losses[0] >= self._desk.config.losses_max - 1 > 0
        stocked = Stocked(work, now_s, needs_idle)
        if not self._try_give(line, stocked, seats):
            if work.start_before_s is not None and line.call_s > STOCK_S:
                self._settle(line, given_back(work))
            else:
                line.stock.append(stocked)

    def _try_give(self, line: Line, stocked: Stocked, seats: Iterable[Seat]) -> bool:
        best, room = None, 0
        for seat in seats:
            credit = seat.credit(line)
            if credit > room and not (stocked.needs_idle and seat.hands):
                best, room = seat, credit
        if best is None:
            return False
        if best.line is not line:
            best.line_since_s = time.monotonic()
        best.take(line, stocked.work)
        best.is_alone = stocked.needs_idle
        return True

    def _empty_stock(self, line: Line, moment: Moment) -> None:
        """Give what waits to seats that have become free; return it where it waits too long."""
        seats = moment.seats_for(line)
        while line.stock and seats and self._try_give(line, line.stock[0], seats):
            line.stock.popleft()
        if line.stock and moment.now_s - line.stock[0].since_s > STOCK_KEPT_S:
            line.call_s = max(line.call_s, STOCK_KEPT_S)
            if not line.stock[0].needs_idle:
                self._return_stock(line)

    def _return_stock(self, line: Line) -> None:
        while line.stock:
            self._settle(line, given_back(line.stock.popleft().work))

    def _set_timer(self, now_s: float) -> None:
        """Wake for the next lane that comes due, stock that gets old, or claim that may be tried again."""
        due_s = now_s + 60.0
        for line in self._lines.values():
            if line.is_claiming:
                continue
            if line.stock:
                old_s = line.stock[0].since_s + STOCK_KEPT_S + 0.01
                due_s = min(due_s, max(old_s, now_s + AGAIN_AFTER_S))
            if now_s < line.blocked_until_s:
                due_s = min(due_s, line.blocked_until_s)
            elif now_s < line.lanes_due_s:
                due_s = min(due_s, line.lanes_due_s)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self._plan_pump)

    async def _look(self) -> None:
        """The net under the hints: ask now and then which queues have work, or when they will."""
        while True:
            require_not_cancelled()
            wait_s = self._poll_s()
            self._is_look_due.clear()
            try:
                ahead = await self._desk.queues_with_work(list(self._lines))
                for queue_id in ahead.ready:
                    self._lines[queue_id].is_hinted = True
                for queue_id in ahead.laned:
                    self._lines[queue_id].lanes_due_s = 0.0
                self._plan_pump()
                if ahead.next_s is not None:
                    wait_s = min(wait_s, max(ahead.next_s, LOOK_LEAST_S))
            except HeadraceError as error:
                if not error.retryable:
                    raise
                _often.warning("look_failed", error=error.text)
            await asyncio.sleep(min(wait_s, LOOK_GAP_S))
            if wait_s > LOOK_GAP_S:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s - LOOK_GAP_S):
                        await self._is_look_due.wait()


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    left = list(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
