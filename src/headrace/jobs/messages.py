"""Messages between agent and slot (`kernel.ipc`).

The agent never decodes a payload. Claims, acks and most statements of handlers (`Insert`,
`Statement`) use the agent's connections, so PostgreSQL connections grow with hosts and not with
slots. In `headrace work` the same values pass by plain calls, and handlers use the process's own
connections. Payloads pass as the driver returned them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from headrace.engines.remote import PackedError
from headrace.jobs.columns import JobColumns
from headrace.kernel.errors import HeadraceError, InvalidInput
from headrace.kernel.ipc import message_decoder
from headrace.kernel.metrics import Delta

TEXT_CHARACTERS_MAX: Final = 60_000
"""Of `Broken`, which must fit into one packet."""


class Work(msgspec.Struct, frozen=True, array_like=True, tag="work", kw_only=True):
    """The jobs of one lease to run, as columns."""

    queue: str
    lease_id: int
    ids: Sequence[int]
    payloads: Sequence[bytes]
    attempts: Sequence[int]
    """Failed runs so far."""
    losses: Sequence[int]
    lanes: Sequence[str | None]
    headers: Sequence[str | None]
    """See `headers`."""
    versions: Sequence[int]
    retries: int
    """Of the queue, as its task declares or as an operator set it."""
    start_before_s: float | None = None
    """CLOCK_MONOTONIC: jobs of a lane that have not started by then return unstarted."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Finish running calls within `grace_s`, return the other jobs, send `Left` and exit."""

    grace_s: float


class CancelJob(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel the call of a job: an operator cancelled it."""

    job_id: int


class SpendAnswer(msgspec.Struct, frozen=True, array_like=True, tag="spent"):
    """The answer to `Spend`: seconds to wait before starting; None: refused, nothing was taken."""

    call: int
    wait_s: float | None
    sent_s: float | None = None
    """CLOCK_MONOTONIC when the statement was sent; the wait and the slack count from it."""


class Result(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """The result of `Insert` or `Statement` with the same `call`."""

    call: int
    value: Any


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The error of `Insert` or `Statement` with the same `call`."""

    call: int
    error: PackedError


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The start hooks have run; the slot accepts work."""

    pid: int


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What happens to a job after a run: one of `outcomes.OUTCOME_KINDS`, or `lost`."""

    kind: str
    after_s: float | None = None
    error: str = ""
    traceback: str = ""
    result: bytes | None = None
    """JSON, of a done job whose task keeps results."""
    queue: str | None = None
    """The target queue of a moved job."""


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack", kw_only=True):
    """Outcomes of jobs of a lease, by id. None: every job of the lease is done."""

    lease_id: int
    outcomes: dict[int, Outcome] | None = None
    calls: int = 0
    """Handler calls that ended since the last ack."""
    run_s: float = 0.0
    """Total run time of these calls."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """A job's progress, 0 to 1."""

    job_id: int
    ratio: float
    text: str


class Spend(msgspec.Struct, frozen=True, array_like=True, tag="spend"):
    """Take `starts` tokens out of a lane; `SpendAnswer` with the same `call` answers it."""

    call: int
    queue: str
    lane: str
    starts: int
    wait_max_s: float


class Insert(msgspec.Struct, frozen=True, array_like=True, tag="insert"):
    """Insert jobs that wait for no lock, with others of this host; `Result` has their ids."""

    call: int
    rows: JobColumns
    queue_ids: list[int]
    headers: list[str]
    """One for all jobs, or one per job."""


class Statement(msgspec.Struct, frozen=True, array_like=True, tag="statement"):
    """Run a query of jobs by the driver's `method`."""

    call: int
    method: str
    query: str
    parameters: dict[str, Any]


class Abandon(msgspec.Struct, frozen=True, array_like=True, tag="abandon"):
    """Nobody waits for the result of `call` any more: cancel it."""

    call: int


class Measured(msgspec.Struct, frozen=True, array_like=True, tag="measured"):
    """The growth of the slot's counters since the last report: see `kernel.metrics.Delta`."""

    grown: Sequence[Delta]


class Recycle(msgspec.Struct, frozen=True, array_like=True, tag="recycle"):
    """Request to be replaced after the running work: over the memory limit, or for `why`."""

    private_bytes: int
    why: str = ""


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """No job is left and the stop hooks have run; the process exits now."""


class Declared(msgspec.Struct, frozen=True, array_like=True, tag="declared"):
    """The queues are stored: their ids by name."""

    queues: dict[str, int]


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """The application cannot be imported, or its queues could not be stored."""

    text: str
    exit_code: int
    retryable: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Broken:
        """The message of `error`; of an unexpected one the end of its traceback."""
        if isinstance(error, HeadraceError):
            return cls(f"{error.text} [{error.code}]", error.exit_code, error.retryable)
        text = "".join(traceback.format_exception(error))
        return cls(text[-TEXT_CHARACTERS_MAX:], InvalidInput.exit_code)


DECLARING: Final = -1
"""The slot number of the process that declares the code's queues and exits; it runs no jobs."""
Answer = SpendAnswer | Result | Failure
ToSlot = Work | Stop | CancelJob | Answer
FromSlot = Ready | Ack | Progress | Spend | Insert | Statement | Abandon | Measured | Recycle | Left
decode_to_slot: Final[Callable[[bytes], ToSlot]] = message_decoder(ToSlot)
"""Decode a message to a slot. Raises: ValueError."""
decode_from_slot: Final[Callable[[bytes], FromSlot]] = message_decoder(FromSlot)
"""Decode a message of a slot. Raises: ValueError."""
