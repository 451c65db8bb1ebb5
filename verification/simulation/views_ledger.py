"""What clients of views sent and received, and how far a total may be from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from tests.kit.checkers import Finding

Kind: TypeAlias = tuple[str, int]
"""An entity and a class."""
QUIET_S: Final = 300.0
"""After a loss of data totals may be read lower for this time."""


@dataclass(slots=True, eq=False)
class Call:
    """Views that a client sent: counted (True), not counted (False), or unknown (None)."""

    views: Counter[Kind]
    has_event: bool = False
    is_counted: bool | None = None
    is_over: bool = False
    """The client will not send it again."""


class Ledger:
    """All calls of a run, the losses that faults permit, and the totals that were read."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._open: dict[Call, None] = {}
        self._acknowledged: Counter[Kind] = Counter()
        self._unknown: Counter[Kind] = Counter()
        self._lost: Counter[Kind] = Counter()
        self._twice: Counter[Kind] = Counter()
        self._seen: dict[str, int] = {}
        self._quiet_until_s = 0.0

    def begin(self, views: Counter[Kind], *, has_event: bool = False) -> Call:
        """A call is sent."""
        call = Call(views, has_event)
        self._open[call] = None
        return call

    def end(self, call: Call, *, is_counted: bool | None) -> None:
        """A call has its final result."""
        del self._open[call]
        if is_counted:
            self._acknowledged += call.views
        elif is_counted is None:
            self._unknown += call.views

    def note_loss(self, before: Counter[Kind], after: Counter[Kind], *, now_s: float) -> None:
        """An engine lost data: what it had before may be missing, and open events count again."""
        self._lost += before - after
        for call in self._open:
            if call.has_event:
                self._twice += call.views
        self.forget_reads(now_s)

    def forget_reads(self, now_s: float) -> None:
        """Totals may be read lower for a while."""
        self._seen.clear()
        self._quiet_until_s = now_s + QUIET_S

    # Reads

    def floors(self) -> dict[str, int]:
        """The highest totals of reads that have ended, at the begin of another read."""
        return dict(self._seen)

    def note_read(
        self, entity: str, total: int, floors: Mapping[str, int], *, now_s: float
    ) -> None:
        """A total was read that is not marked as stale."""
        most = self.most((entity, 0))
        if total > most:
            text = f"a read returned {total}, and at most {most} views were sent"
            self.findings.append(Finding("too_high", entity, text))
        if now_s < self._quiet_until_s:
            return
        if total < floors.get(entity, 0):
            text = f"a read at {now_s:.3f} s returned {total} after {floors.get(entity, 0)}"
            self.findings.append(Finding("went_down", entity, text))
        self._seen[entity] = max(total, self._seen.get(entity, 0))

    # Totals

    def least(self, kind: Kind) -> int:
        """The lowest right total."""
        return self._acknowledged[kind] - self._lost[kind]

    def most(self, kind: Kind) -> int:
        """The highest right total."""
        still_open = sum(call.views[kind] for call in self._open)
        return self._acknowledged[kind] + self._unknown[kind] + still_open + self._twice[kind]

    def check(self, totals: Mapping[Kind, int]) -> list[Finding]:
        """Compare stored totals."""
        found = []
        kinds = self._acknowledged.keys() | self._unknown.keys() | totals.keys()
        for kind in sorted(kinds):
            least, most, total = self.least(kind), self.most(kind), totals.get(kind, 0)
            if not least <= total <= most:
                fault = "lost" if total < least else "counted_twice"
                found.append(
                    Finding(fault, kind, f"the total is {total}, expected {least} to {most}")
                )
        return found
