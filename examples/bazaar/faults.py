"""What those who come to the site note down when something is not right.

A call that is refused because a server is away breaks no promise: it is counted by outage, apart
from wrong answers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import ClassVar, Final

from examples.bazaar.client import RefusedError

_KEPT: Final = 20
RECOVERY_S: Final = 15.0
"""Who waited for an answer during a fault may note it so long after the recovery."""
OUTAGE_OVER_S: Final = 5.0
"""An outage is over when no call was refused for so long."""
SERVERS: Final = ("PostgreSQL", "Valkey")


@dataclass(slots=True)
class Outage:
    """The calls that were refused while a server was away. Times are of the wall clock."""

    server: str
    began_at: float
    last_at: float
    calls: int = 1

    @property
    def is_over(self) -> bool:
        """Whether calls are answered again."""
        return time.time() - self.last_at > OUTAGE_OVER_S

    @property
    def text(self) -> str:
        """The outage in one short line."""
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        first, last = (
            time.strftime("%H:%M:%S", time.localtime(at)) for at in (self.began_at, self.last_at)
        )
        return f"refused while {self.server} was away: {calls}, {first} to {last}"


@dataclass(slots=True)
class Faults:
    """All are counted, the first ones are kept.

    What is noted while somebody breaks the demo on purpose, on the page `/break`, is expected: it
    is counted apart. Whether anything was lost then is shown by the ledger, not by this.
    """

    broken_until_s: ClassVar[float] = 0.0
    """Until when, on the monotonic clock, faults are caused on purpose."""
    outages: ClassVar[list[Outage]] = []
    """Of all who come to the site: a server is away for all of them."""
    faults_count: int = 0
    expected_count: int = 0
    faults: list[str] = field(default_factory=list)

    @staticmethod
    def expect(for_s: float = RECOVERY_S) -> None:
        """Expect faults for so long."""
        Faults.broken_until_s = max(Faults.broken_until_s, time.monotonic() + for_s)

    @staticmethod
    def is_expected() -> bool:
        """Whether faults are expected now."""
        return time.monotonic() < Faults.broken_until_s

    def note(self, error: Exception, text: str = "") -> None:
        """Remember a failed call: refused while a server was away, or a fault with this text."""
        if not isinstance(error, RefusedError):
            self.fault(text or str(error))
        elif self.is_expected():
            self.expected_count += 1
        else:
            _note_refused(str(error))

    def fault(self, text: str) -> None:
        """Remember something that was not right."""
        if self.is_expected():
            self.expected_count += 1
            return
        self.faults_count += 1
        if len(self.faults) < _KEPT:
            self.faults.append(text)


def _note_refused(text: str) -> None:
    server, now = next((one for one in SERVERS if one in text), "a server"), time.time()
    for outage in Faults.outages:
        if outage.server == server and not outage.is_over:
            outage.calls, outage.last_at = outage.calls + 1, now
            return
    Faults.outages.append(Outage(server, now, now))
