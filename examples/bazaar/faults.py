"""What those who come to the site note down when something is not right."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import ClassVar, Final

_KEPT: Final = 20
RECOVERY_S: Final = 15.0
"""Who waited for an answer during a fault may note it so long after the recovery."""


@dataclass(slots=True)
class Faults:
    """All are counted, the first ones are kept.

    What is noted while somebody breaks the demo on purpose, on the page `/break`, is expected: it
    is counted apart. Whether anything was lost then is shown by the ledger, not by this.
    """

    broken_until_s: ClassVar[float] = 0.0
    """Until when, on the monotonic clock, faults are caused on purpose."""
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

    def fault(self, text: str) -> None:
        """Remember something that was not right."""
        if self.is_expected():
            self.expected_count += 1
            return
        self.faults_count += 1
        if len(self.faults) < _KEPT:
            self.faults.append(text)
