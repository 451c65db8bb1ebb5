"""The maximum of slots that a queue may have in the whole fleet, as far as this host is concerned.

A slot may begin work of a queue only within the host's allowance, whether the plan bound it to the queue or it
floats. Allowances are rows of the database whose sum per queue never exceeds the queue's maximum, with or without a
scheduler. A host lowers its own number before it reports it, so no other host can receive a slot that still works.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping

from headrace.engines.postgres import Runner
from headrace.jobs import store
from headrace.jobs.agent.lines import Line
from headrace.jobs.agent.seats import Seat
from headrace.jobs.fleet.state import SlotRequest


class Allowances:
    """What one host row may work of each queue; `on_change` is called after each answer."""

    def __init__(
        self,
        lines: Mapping[int, Line],
        seats: Collection[Seat],
        on_change: Callable[[], None],
    ) -> None:
        self.is_due = asyncio.Event()
        """A queue has work and a free slot, and no allowance for it."""
        self._lines = lines
        self._seats = seats
        self._on_change = on_change
        self._calls = 0

    def note_need(self, line: Line) -> None:
        """Request a greater allowance, unless the last answer was a refusal."""
        if line.allowance is not None and not line.is_short:
            self.is_due.set()

    async def renew(self, runner: Runner, host_id: int) -> None:
        """Give up what no slot can use, request what is missing, apply the answer. One call at a time.

        Raises: PostgresDown, PostgresBusy; then this host stays within what it had.
        """
        self._calls += 1
        asked = [self._asked(line, time.monotonic()) for line in self._lines.values()]
        answer = await store.fleet.allow_slots(runner, host_id, self._calls, asked)
        for one in asked:
            line = self._lines[one.queue_id]
            # A queue that the database does not know any more has no answer, and no jobs.
            line.allowance = answer.get(one.queue_id, line.allowance)
            line.is_short = line.allowance is not None and line.allowance < one.wanted
        self._on_change()

    def _asked(self, line: Line, now_s: float) -> SlotRequest:
        used = sum(seat.works(line) for seat in self._seats)
        usable = used + sum(not seat.works(line) and seat.credit(line) > 0 for seat in self._seats)
        kept = used if line.allowance is None else max(used, min(line.allowance, usable))
        if line.allowance is not None:
            line.allowance = min(line.allowance, kept)
        wanted = usable if line.holds_slots(now_s) else kept
        return SlotRequest(queue_id=line.queue_id, used=used, kept=kept, wanted=wanted)
