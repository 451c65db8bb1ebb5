"""Steps of workflows as values: what is recorded, what replay checks, and limits. No I/O.

A workflow calls its steps in the same order in every run. `Replay` numbers the calls and compares
each with the step recorded under its number, so that changed code is found before it acts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from headrace.jobs.errors import InvalidStep, Nondeterministic, WorkflowUnknown
from headrace.jobs.model import AT_AWAY_S_MAX, JobState, NewJob
from headrace.jobs.validation import NAME, is_name, is_number, is_row_id
from headrace.kernel.errors import mismatch
from headrace.kernel.routes import PAYLOAD_BYTES_MAX
from headrace.kernel.storable import NUL, find_unstorable

JOBS_PER_STEP_MAX: Final = 5_000
STEPS_MAX: Final = 10_000
"""Steps of one workflow: each run reads all of them."""


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step as a run reads it."""

    number: int
    name: str
    kind: str
    state: str
    failures: int = 0
    wait_s: float | None = None
    """Seconds until its time when the run began."""
    error: str | None = None
    result: bytes | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a workflow as shown: `kind` is step, sleep, event or jobs."""

    number: int
    name: str
    kind: str
    state: str
    """`done`, `failed` or `waiting`."""
    failures: int
    begun_at: datetime
    """When its record was first written: of a step that succeeded at once, its end."""
    ended_at: datetime | None
    wake_at: datetime | None
    """End of a sleep, timeout of an event, or next attempt."""
    waits_for: str | None
    jobs: list[int]
    """Jobs that it started."""
    error: str | None
    result: Any


class WorkflowRun(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow with its steps. `id` is the id of its job."""

    id: int
    workflow: str
    version: int | None
    """None: it has not begun."""
    state: JobState
    begun_at: datetime | None
    ended_at: datetime | None
    error: str | None
    payload: Any
    result: Any
    waits_for: str | None
    steps: list[Step]


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a member of a group ended. `result` is set if its task keeps results."""

    job_id: int
    state: str
    error: str | None
    result: Any


class Replay:
    """The order of the steps of one run, compared with the recorded ones."""

    def __init__(self, recorded: Mapping[int, RecordedStep]) -> None:
        self._recorded = recorded
        self._names: dict[str, int] = {}
        self.calls = 0
        """Steps called in this run."""

    def next(self, name: str, kind: str) -> tuple[int, RecordedStep | None]:
        """The number of this call, and its record. Raises: InvalidStep, Nondeterministic."""
        if not is_name(name):
            raise InvalidStep(f"a step's name: {mismatch(NAME, name)}")
        if name in self._names:
            raise InvalidStep(
                f"step {name!r} is called twice in one workflow: give each call its own name, such"
                f" as f'{name} {{n}}'"
            )
        if self.calls >= STEPS_MAX:
            raise InvalidStep(
                f"step {name!r}: a workflow has at most {STEPS_MAX} steps: start further workflows"
                " as its jobs"
            )
        self.calls += 1
        self._names[name] = self.calls
        known = self._recorded.get(self.calls)
        if known is not None and (known.name, known.kind) != (name, kind):
            raise Nondeterministic(
                f"step {self.calls} was recorded as {known.kind} {known.name!r} and is now {kind}"
                f" {name!r}: {_ADVICE}"
            )
        if known is None and (former := self._number_of(name)) is not None:
            raise Nondeterministic(
                f"step {name!r} was recorded as number {former} and is now number {self.calls}:"
                f" {_ADVICE}"
            )
        return self.calls, known

    def require_all(self) -> None:
        """Refuse a run that ends before its recorded steps. Raises: Nondeterministic."""
        left = [step for number, step in self._recorded.items() if number > self.calls]
        if left:
            raise Nondeterministic(
                f"the workflow ended after {self.calls} steps, but step {left[0].number}"
                f" {left[0].name!r} is recorded: {_ADVICE}"
            )

    def _number_of(self, name: str) -> int | None:
        numbers = (number for number, step in self._recorded.items() if step.name == name)
        return next(numbers, None)


_ADVICE: Final = (
    "a workflow must call the same steps in the same order; keep changed code as a new version,"
    " restore the old one, then retry the job"
)


def parse_workflow_id(text: str) -> int:
    """Parse the id of a workflow in a path. Raises: WorkflowUnknown."""
    if re.fullmatch(r"[0-9]{1,19}", text) is None or not is_row_id(int(text)):
        raise WorkflowUnknown(text)
    return int(text)


def seconds_until(name: str, until: float | datetime) -> float:
    """Seconds of a sleep given as a duration or a moment. Raises: InvalidStep."""
    if isinstance(until, datetime) and until.utcoffset() is not None:
        until = max(0.0, (until - datetime.now(UTC)).total_seconds())
    return require_seconds(f"step {name!r}", until)


def require_seconds(subject: str, wait_s: Any) -> float:
    """Check a duration. Raises: InvalidStep."""
    if not is_number(wait_s, 0, AT_AWAY_S_MAX) or not math.isfinite(wait_s):
        text = mismatch(f"seconds from 0 to {AT_AWAY_S_MAX:.0f}", wait_s)
        raise InvalidStep(f"{subject}: {text}, or a moment with its time zone within a year")
    return float(wait_s)


def require_event(name: Any, key: Any) -> tuple[str, str]:
    """Check the name and key of an event. Raises: InvalidStep."""
    key = str(key) if isinstance(key, int) else key
    for what, value in (("name", name), ("key", key)):
        if not is_name(value):
            raise InvalidStep(f"an event's {what}: {mismatch(NAME, value)}")
    return name, key


def encode_event(payload: Any) -> bytes:
    """The payload of an event as JSON. Raises: InvalidStep."""
    try:
        encoded = msgspec.json.encode(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidStep(f"the event's payload: expected what JSON can hold: {error}") from error
    if len(encoded) > PAYLOAD_BYTES_MAX:
        raise InvalidStep(f"the event's payload: {len(encoded)} bytes, at most {PAYLOAD_BYTES_MAX}")
    if NUL in encoded or (b"null" in encoded and payload is not None):
        problems = find_unstorable(msgspec.to_builtins(payload), "/payload")
        InvalidStep.require_none(problems, "an event")
    return encoded


def require_jobs(name: str, jobs: Sequence[NewJob]) -> None:
    """Refuse other values than jobs without a unique key. Raises: InvalidStep."""
    if not 1 <= len(jobs) <= JOBS_PER_STEP_MAX:
        raise InvalidStep(f"step {name!r}: expected 1 to {JOBS_PER_STEP_MAX} jobs, got {len(jobs)}")
    for job in jobs:
        if not isinstance(job, NewJob):
            raise InvalidStep(
                f"step {name!r}: expected jobs such as task.job(...), got a {type(job).__name__}"
            )
        if job.unique is not None:
            raise InvalidStep(
                f"step {name!r}: its jobs take no unique key, since the job that has the key may"
                f" not be the workflow's: leave out unique={job.unique[:40]!r}"
            )
