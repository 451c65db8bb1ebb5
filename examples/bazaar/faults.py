"""What those who come to the site note down when something is not right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_KEPT: Final = 20


@dataclass(slots=True)
class Faults:
    """All are counted, the first ones are kept."""

    faults_count: int = 0
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """Remember something that was not right."""
        self.faults_count += 1
        if len(self.faults) < _KEPT:
            self.faults.append(text)
