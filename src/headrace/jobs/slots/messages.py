"""What agent and slot say to each other: a 4-byte length, then one msgpack array.

The agent never decodes a payload and the slot never sees the database: PostgreSQL connections grow with hosts, not
with slots. The same values pass by plain calls where both are one process (`headrace work`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.kernel.metrics import Delta


class Work(msgspec.Struct, frozen=True, array_like=True, tag="work", kw_only=True):
    """Jobs of one lease to run, as columns."""

    queue: str
    lease_id: int
    ids: Sequence[int]
    payloads: Sequence[bytes]
    attempts: Sequence[int]
    """Failed runs so far."""
    losses: Sequence[int]
    lanes: Sequence[str | None]
    traceparents: Sequence[str | None]
    versions: Sequence[int]
    retries: int
    """Of the queue: what its task declares, or what a person set."""
    start_before_s: float | None = None
    """CLOCK_MONOTONIC of this machine: a job of a lane that has not started by then goes back unstarted."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Finish the calls in hand within `grace_s`, hand back the rest, say `Left` and end."""

    grace_s: float


class SpendAnswer(msgspec.Struct, frozen=True, array_like=True, tag="spent"):
    """The answer to `Spend`: wait so long, then go ahead; None: refused, nothing was spent."""

    call: int
    wait_s: float | None
    sent_s: float | None = None
    """CLOCK_MONOTONIC of this machine when the lane was asked; the wait and the slack count from it."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The slot's start hooks have run; it takes work."""

    pid: int


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled", kw_only=True):
    """What became of jobs of a lease. `ids` None: all of the lease's are done."""

    lease_id: int
    ids: Sequence[int] | None = None
    words: Sequence[str] = ()
    delays_s: Sequence[float | None] = ()
    errors: Sequence[str] = ()
    tracebacks: Sequence[str] = ()
    results: Sequence[bytes | None] = ()
    """JSON, where the task keeps results; may be left empty."""
    queues: Sequence[str | None] = ()
    """Where `moved` jobs go; may be left empty."""
    calls: int = 0
    """Handler calls that ended, and how long they ran in sum."""
    run_s: float = 0.0


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """How far a job is, 0 to 1."""

    job_id: int
    ratio: float
    text: str


class Spend(msgspec.Struct, frozen=True, array_like=True, tag="spend"):
    """Take `starts` further starts out of a lane; answered by `SpendAnswer` with the same `call`."""

    call: int
    queue: str
    lane: str
    starts: int
    wait_max_s: float


class Measured(msgspec.Struct, frozen=True, array_like=True, tag="measured"):
    """What the slot's counters grew by since the last time: see `kernel.metrics.Delta`."""

    grown: Sequence[Delta]


class Recycle(msgspec.Struct, frozen=True, array_like=True, tag="recycle"):
    """The slot asks to be replaced after the work in hand: its private memory is over its limit, or `why`."""

    private_bytes: int
    why: str = ""


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """Nothing is in hand any more and the stop hooks have run; the process ends now."""


ToSlot = Work | Stop | SpendAnswer
FromSlot = Ready | Settled | Progress | Spend | Measured | Recycle | Left
LENGTH_BYTES: Final = 4
MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
