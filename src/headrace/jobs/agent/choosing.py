"""Which slots may take what, as pure decisions over one moment of the dispatcher. No I/O.

A slot is bound to a queue by the plan, or it floats. A floating slot goes to the most important queue that has
work, in turns among equals, stays until it is empty, and after TURN_S goes where another waits. Every
8th choice begins with the least important, so that none starves.

A queue of many calls at once whose own slots have plenty of room gets no floating ones: calls that wait for
somebody else, such as a host that hangs, would hold all of them, and whatever has no slot of its own would
wait with them. It was one of three causes of a p95 of 1.2 s of fetch's items beside hanging hosts, without them 0.28
(`make bench ROOM=fetch ONLY=isolation`, 2 cores, 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.jobs.agent.lines import Line
from headrace.jobs.agent.seats import Seat

LOWEST_FIRST_EVERY: Final = 8


@dataclass(frozen=True, slots=True)
class Moment:
    """All seats, the queues that a claim may bring something of, and the clock."""

    seats: Collection[Seat]
    wanting: Sequence[Line]
    now_s: float

    def in_order(self, decisions: int) -> list[Line]:
        """The most important first, among equals the one that was served longest ago."""
        is_reversed = decisions % LOWEST_FIRST_EVERY == LOWEST_FIRST_EVERY - 1
        sign = -1 if is_reversed else 1
        return sorted(self.wanting, key=lambda line: (sign * line.facts.importance, line.turn))

    def seats_for(self, line: Line) -> list[Seat]:
        """Seats with room for `line` within its allowance."""
        seats = self.seats_with_room(line)
        if line.allowance is None or not seats:
            return seats
        # Over a lowered allowance the surplus gets no further call, so that its slots become free.
        working = [seat for seat in self.seats if seat.works(line)]
        allowed = working[: line.allowance]
        room = line.allowance - len(working)
        if room > 0:
            allowed += [seat for seat in seats if not seat.works(line)][:room]
        return [seat for seat in seats if seat in allowed]

    def seats_with_room(self, line: Line) -> list[Seat]:
        """Seats with room for `line`: its own, floating ones that work it, and its share of idle ones."""
        found, idle = [], []
        for seat in self.seats:
            if seat.credit(line) == 0:
                continue
            if self._is_for(seat, line):
                found.append(seat)
            elif seat.bound is None and not seat.hands and not self._stays_elsewhere(seat):
                idle.append(seat)
        if any(seat.has_plenty(line) for seat in found):
            return found
        equals = [
            other
            for other in self.wanting
            if other.facts.importance == line.facts.importance and not other.is_claiming
        ]
        share = -(-len(idle) // max(1, len(equals)))
        return found + idle[:share]

    def batches_in_advance(self, line: Line, *, has_room: bool) -> int:
        """Leases to claim beyond those that seats have room for.

        Without such a seat no claim is made for less than half of what may be kept, so that one claim
        brings many.
        """
        if line.batches_ahead == 0:
            return 0
        slots = sum(self._is_for(seat, line) for seat in self.seats)
        if line.allowance is not None:
            slots = min(slots, line.allowance)
        wanted = line.batches_ahead * slots
        missing = wanted - len(line.stock)
        return missing if has_room or 2 * missing >= wanted else 0

    def _is_for(self, seat: Seat, line: Line) -> bool:
        is_other_waiting = any(other is not line for other in self.wanting)
        return seat.is_for(line, self.now_s, is_other_waiting=is_other_waiting)

    def _stays_elsewhere(self, seat: Seat) -> bool:
        """Whether an idle floating seat waits for more of the queue that it worked last."""
        line = seat.line
        return line is not None and line.holds_slots(self.now_s) and self._is_for(seat, line)
