"""One line of what `headrace doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CHECK_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `state` is ok, warn or fail."""

    subject: str
    state: str
    text: str
    mend: str = ""
