"""Jobs as columns: checked jobs in the form in which one statement inserts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Final

import msgspec

from headrace.jobs.headers import OwnOptions, with_options
from headrace.jobs.model import NewJob


class JobsAlike(Sequence[NewJob]):
    """Jobs that differ only in payload. `job` has their options."""

    def __init__(self, job: NewJob, payloads: Sequence[Any]) -> None:
        self.job = job
        self.payloads = payloads

    def __len__(self) -> int:
        return len(self.payloads)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return JobsAlike(self.job, self.payloads[index])
        return msgspec.structs.replace(self.job, payload=self.payloads[index])


@dataclass(slots=True)
class JobColumns:
    """Checked jobs as columns, in the order of the call, ready for one statement."""

    queues: list[str] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    run_ats: list[datetime | None] = field(default_factory=list)
    delays_s: list[float | None] = field(default_factory=list)
    lanes: list[str | None] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    options: list[OwnOptions] | None = None
    """None: all as their tasks."""
    key_times_s: list[float | None] | None = None
    """How long keys stay taken at least; None: while their jobs are unfinished."""
    chains: list[str | None] | None = None
    size_bytes: int = 0

    def __len__(self) -> int:
        return len(self.queues)

    def part(self, cut: slice) -> JobColumns:
        """Some of the jobs."""
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        del columns["size_bytes"]
        return JobColumns(**{name: column and column[cut] for name, column in columns.items()})

    def headers(self, traceparent: str) -> list[str]:
        """Headers of the jobs: one for all, or one per job."""
        if self.options is None:
            return [traceparent]
        return [with_options(traceparent, options) for options in self.options]

    @classmethod
    def joined(cls, parts: Sequence[JobColumns]) -> JobColumns:
        """The jobs of `parts` in order, which have neither keys nor chains."""
        columns = {
            name: [value for part in parts for value in getattr(part, name)] for name in SHARED
        }
        return cls(**columns, size_bytes=sum(part.size_bytes for part in parts))


SHARED: Final = tuple(one.name for one in fields(JobColumns) if one.default_factory is list)
"""Columns of jobs that share a statement; their headers are written one by one."""
