"""Scopes and shapes that the routes of jobs share."""

from __future__ import annotations

import re
from typing import Final

from headrace.jobs.errors import JobUnknown, LeaseLost

READ: Final = {"scope": "jobs:read"}


WRITE: Final = {"scope": "jobs:write"}


def parse_job_id(text: str) -> int:
    """An id as it is written in paths: digits alone, not all that `int` takes. Raises: JobUnknown."""
    if re.fullmatch(r"[0-9]{1,19}", text) is None:
        raise JobUnknown(text)
    return int(text)


def parse_lease_id(text: str) -> int:
    """The same for a lease. Raises: LeaseLost."""
    if re.fullmatch(r"[0-9]{1,19}", text) is None:
        raise LeaseLost(text)
    return int(text)
