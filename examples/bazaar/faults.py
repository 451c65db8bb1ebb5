"""What the simulated users note down when something is not right.

A call that is refused because a server is away breaks no promise: it is counted by outage, apart
from wrong answers. Calls of one kind that are refused for REFUSED_MAX_S without one success between
them are wrong.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final

from examples.bazaar.client import RefusedError, ServerFailedError, ServerLeftError

_KEPT: Final = 20
RECOVERY_S: Final = 15.0
"""Who waited for an answer during a fault may note it so long after the recovery."""
OUTAGE_OVER_S: Final = 5.0
"""An outage is over when no call was refused for so long."""
REFUSED_MAX_S: Final = 60.0
"""The client waits as long for a server that accepts no connection."""
CAUSES: Final = {
    "postgres.unavailable": "while PostgreSQL was away",
    "valkey.unavailable": "while Valkey was away",
    "valkey.reply_lost": "while Valkey was away",
    "blobs.unavailable": "while the object store was away",
    "media.store_unavailable": "while the object store was away",
    "engines.not_running": "while the engines were not running",
}
"""What a refusal with this error code shows. Codes of one cause are one outage."""


@dataclass(slots=True)
class Outage:
    """The calls that were refused for one cause. Times are of the wall clock."""

    code: str
    began_at: float
    last_at: float
    calls: int = 1

    @property
    def is_over(self) -> bool:
        """Whether calls are answered again."""
        return time.time() - self.last_at > OUTAGE_OVER_S

    @property
    def cause(self) -> str:
        """What the error code shows."""
        return CAUSES.get(self.code, f"with {self.code}" if self.code else "without an error code")

    @property
    def text(self) -> str:
        """The outage in one short line."""
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        first, last = (
            time.strftime("%H:%M:%S", time.gmtime(at)) for at in (self.began_at, self.last_at)
        )
        return f"refused {self.cause}: {calls}, {first} to {last} UTC"


@dataclass(slots=True)
class Faults:
    """All are counted, the first ones are kept.

    What is noted while somebody breaks the demo on purpose, on the page `/break`, is expected: it
    is counted apart. Whether anything was lost then is shown by the ledger, not by this. Refused
    calls are counted by outage also then: their cause may be another one.
    """

    broken_until_s: ClassVar[float] = 0.0
    """Until when, on the monotonic clock, faults are caused on purpose."""
    outages: ClassVar[list[Outage]] = []
    """Of all simulated users: a server is away for all of them."""
    faults_count: int = 0
    expected_count: int = 0
    """Calls that were cut off or had an error response while that was expected."""
    differing_count: int = 0
    """Answers with another status or other data while that was expected."""
    faults: list[str] = field(default_factory=list)
    refused_since_s: dict[str, float] = field(default_factory=dict)
    """By kind of call, if the last one was refused: since when; infinite: noted as wrong."""

    @staticmethod
    def expect(for_s: float = RECOVERY_S) -> None:
        """Expect faults for so long."""
        Faults.broken_until_s = max(Faults.broken_until_s, time.monotonic() + for_s)

    @staticmethod
    def is_expected() -> bool:
        """Whether faults are expected now."""
        return time.monotonic() < Faults.broken_until_s

    @staticmethod
    def is_calm() -> bool:
        """Whether nothing was broken, and no call refused, within the last RECOVERY_S."""
        last_at = max((one.last_at for one in Faults.outages), default=0.0)
        return not Faults.is_expected() and time.time() - last_at > RECOVERY_S

    @contextlib.contextmanager
    def attempt(self, calls: str) -> Iterator[None]:
        """Note a failure of `calls`, a kind of call such as `reads of feeds`; end its refusals."""
        try:
            yield
        except (RefusedError, ServerLeftError) as error:
            self._note_refused(calls, error)
        except ServerFailedError as error:
            if self.is_expected():
                self.expected_count += 1
            else:
                self.fail(str(error))
        else:
            self.refused_since_s.pop(calls, None)

    def fault(self, text: str) -> None:
        """Remember something that was not right."""
        if self.is_expected():
            self.differing_count += 1
        else:
            self.fail(text)

    def fail(self, text: str) -> None:
        """Remember something that is wrong also while faults are expected."""
        self.faults_count += 1
        if len(self.faults) < _KEPT:
            self.faults.append(text)

    def _note_refused(self, calls: str, error: ServerFailedError) -> None:
        if isinstance(error, RefusedError):
            _count_in_outage(error.code)
        if self.is_expected():
            self.expected_count += not isinstance(error, RefusedError)
            self.refused_since_s.pop(calls, None)
            return
        now_s = time.monotonic()
        if now_s - self.refused_since_s.setdefault(calls, now_s) > REFUSED_MAX_S:
            self.refused_since_s[calls] = math.inf
            self.fault(
                f"{calls} failed for over {REFUSED_MAX_S:.0f} s without one success; the last:"
                f" {error}"
            )


def _count_in_outage(code: str) -> None:
    now = time.time()
    new = Outage(code, now, now)
    for outage in Faults.outages:
        if outage.cause == new.cause and not outage.is_over:
            outage.calls, outage.last_at = outage.calls + 1, now
            return
    Faults.outages.append(new)
