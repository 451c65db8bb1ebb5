"""Options of queues, tasks, limiters and crons: names, bounds and checked values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypedDict, get_type_hints

from headrace.jobs.crons import NewCron, next_moment
from headrace.jobs.errors import InvalidCron, InvalidTask
from headrace.jobs.model import IMPORTANCE_LAST, JOBS_PER_CALL_MAX, WINDOW_S_MAX
from headrace.kernel import config
from headrace.kernel.config import parse_as, parse_duration_s
from headrace.kernel.errors import did_you_mean, mismatch
from headrace.kernel.ids import USER_ID

TIMEOUT_S_MAX: Final = 7 * 86_400.0
RETRIES_MAX: Final = 1_000
CONCURRENCY_MAX: Final = 10_000
SLOTS_MAX: Final = 100_000
KEEP_S_MAX: Final = 366 * 86_400.0
SLACK_S_MAX: Final = 60.0
OWN_OPTIONS: Final = ("unique", "unique_for", "tx")
"""Further options of `enqueue`; a handler must not have fields with these names."""
SLACK: Final = "250ms"
RESULT_KEPT: Final = "1h"
"""Default time for which results are kept."""
CRON_PREFIX: Final = "cron."
WORKFLOW_PREFIX: Final = "workflow."
DECISIONS_MAX: Final = 9
_DECISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


class QueueOptions(TypedDict, total=False):
    """Options of a queue."""

    batch: int | None
    """Jobs per call; None: one."""
    timeout: str
    """Time limit of one call."""
    retries: int
    """Attempts after a first failed one, with growing waits."""
    limiter: str | None
    """The limiter of its lanes; None: a limiter of its own."""
    lane: str
    """`required`: refuse jobs without a lane; `optional`: they are not limited.

    The default is `required` with `limiter`.
    """
    importance: int
    """0 (first) to 9 (last): which queues get slots when slots are scarce."""
    slots: tuple[int, int]
    """Minimum and maximum of its slots (worker processes) on all hosts together."""
    tag: str | None
    """Only agents that were started with `--tag` of this name run its jobs."""
    keep_done: str | None
    """How long done jobs are kept, such as 24h; None: they are deleted."""
    keep_result: bool | str
    """Keep results: as long as `keep_done`, by default an hour; or for this duration."""
    aliases: Sequence[str]
    """Former names, under which older code still reaches it."""
    decisions: Mapping[str, str | None] | Sequence[str]
    """What people decide about its jobs, with the queue that a decided job moves to.

    None, or a list of decisions: the job is done, with the decision as its result.
    """


class JobOptions(TypedDict, total=False):
    """Options that all jobs of one call share."""

    at: datetime | None
    """Time at which they are due."""
    after_s: float | None
    """Seconds after which they are due, instead of `at`."""
    priority: int
    """0 is first, 9 last; the default is 5."""
    lane: str | None
    """A lane of the queue's limiter, whose limits count its jobs."""
    spread: str | None
    """Delay each by a random time up to this duration."""
    retries: int | None
    """Retries that differ from the task's."""
    timeout: str | None
    """Time limit of one call that differs from the task's."""
    expires: str | None
    """Cancel it if it does not start within this time after it is due."""
    chain: str | None
    """Start it when the jobs enqueued before with this chain have ended."""


class TaskOptions(QueueOptions, total=False):
    """Options of a task."""

    concurrency: int
    """Concurrent calls in one slot (worker process)."""
    payload: Any
    """The payload's type, if the handler has no annotation for it."""
    version: int
    """Version of the payload's shape, from 1; stored with each job."""
    upgrade: Mapping[int, Callable[[Any], Any]]
    """By version: the function that converts a payload to the next version."""


class LimiterOptions(TypedDict, total=False):
    """Options of a limiter, for every lane without limits of its own."""

    rate: str | None
    """Starts per window, such as 600/m or 10/30s."""
    concurrency: int | None
    """Concurrent jobs."""
    slack: str
    """How late after its claim a job may still start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDeclared:
    """A queue as code declares it. Overrides by operators win."""

    name: str
    limiter: str
    batch: int
    retries: int
    timeout_s: float
    importance: int
    slots_min: int
    slots_max: int
    tag: str | None
    keep_done_s: float | None
    keep_result: bool
    aliases: tuple[str, ...]
    needs_lane: bool
    decisions: Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterDeclared:
    """Declared limits of lanes without limits of their own. None: no limit."""

    name: str
    starts_max: int | None
    window_s: float | None
    concurrency: int | None
    slack_s: float


def declared_queue(name: str, options: QueueOptions) -> QueueDeclared:
    """The options of queue `name`, checked. Raises: InvalidTask."""
    limiter, tag = options.get("limiter") or name, options.get("tag")
    aliases, slots = options.get("aliases", ()), options.get("slots", (0, SLOTS_MAX))
    if isinstance(aliases, str):
        raise InvalidTask(f"task {name!r}: aliases: expected a list of names, got {aliases!r}")
    if not isinstance(slots, tuple | list) or len(slots) != 2:
        raise InvalidTask(
            f"task {name!r}: slots: expected the fewest and the most such as (2, 40), got {slots!r}"
        )
    _require_names(name, (name, limiter, *aliases, *([] if tag is None else [tag])))
    batch = options.get("batch")
    slots_min, slots_max = slots
    keep_s, keeps_result = _kept(name, options)
    declared = QueueDeclared(
        name=name,
        limiter=limiter,
        batch=1 if batch is None else batch,
        retries=options.get("retries", 5),
        timeout_s=duration_s(name, "timeout", options.get("timeout", "2h")),
        importance=options.get("importance", 5),
        slots_min=slots_min,
        slots_max=slots_max,
        tag=tag,
        keep_done_s=keep_s,
        keep_result=keeps_result,
        aliases=tuple(aliases),
        needs_lane=_needs_lane(name, options),
        decisions=_decisions(name, options),
    )
    for what, value, least, most in (
        ("timeout", declared.timeout_s, 0.001, TIMEOUT_S_MAX),
        ("batch", declared.batch, 1, JOBS_PER_CALL_MAX),
        ("retries", declared.retries, 0, RETRIES_MAX),
        ("importance", declared.importance, 0, IMPORTANCE_LAST),
        ("the fewest slots", slots_min, 0, SLOTS_MAX),
        ("the most slots", slots_max, slots_min, SLOTS_MAX),
        ("keep_done", declared.keep_done_s or 0.0, 0.0, KEEP_S_MAX),
    ):
        require_within(name, what, value, (least, most))
    return declared


def checked_decisions(given: object, queue: str) -> dict[str, str | None]:
    """The target queue or None by decision of jobs of `queue`. Raises: ValueError."""
    found: dict[Any, Any] = {}
    if isinstance(given, Mapping):
        found = dict(given)
    elif isinstance(given, list | tuple):
        found = {str(decision): None for decision in given}
    is_valid = isinstance(given, Mapping | list | tuple) and len(found) == len(given)
    is_valid = is_valid and len(found) <= DECISIONS_MAX and queue not in found.values()
    targets = [queue for queue in found.values() if queue is not None]
    is_valid = is_valid and all(isinstance(d, str) and _DECISION.fullmatch(d) for d in found)
    if not is_valid or not all(isinstance(q, str) and USER_ID.fullmatch(q) for q in targets):
        raise ValueError(
            f"up to {DECISIONS_MAX} names of 1 to 40 of A-Z a-z 0-9 . _ -, each once, alone or with"
            " the other queue that a decided job moves to"
        )
    return found


def declared_limiter(name: str, options: LimiterOptions) -> LimiterDeclared:
    """A limiter's options, checked. Raises: InvalidTask."""
    require_known(f"limiter {name!r}", options, LimiterOptions)
    _require_names(name, (name,))
    starts_max, window_s = parse_rate(name, options.get("rate"))
    slack_s = duration_s(name, "slack", options.get("slack", SLACK))
    concurrency = options.get("concurrency")
    require_within(name, "slack", slack_s, (0.001, SLACK_S_MAX))
    if concurrency is not None:
        require_within(name, "concurrency", concurrency, (1, 10**9))
    return LimiterDeclared(
        name=name,
        starts_max=starts_max,
        window_s=window_s,
        concurrency=concurrency,
        slack_s=slack_s,
    )


def declared_cron(name: str, spec: str, tz: str) -> NewCron:
    """A cron's options, checked. Raises: InvalidTask."""
    _require_names(name, (name,))
    try:
        next_moment(spec, tz, datetime.now(UTC))
    except InvalidCron as error:
        raise InvalidTask(f"cron {name!r}: {error.text}") from error
    return NewCron(name=name, spec=spec, tz=tz, queue=CRON_PREFIX + name)


def parse_rate(name: str, text: str | None) -> tuple[int | None, float | None]:
    """Starts and window in seconds of `600/m` or `10/30s`; None: no limits.

    Raises: InvalidTask.
    """
    if text is None:
        return None, None
    starts_max, window_s = parse_as(
        config.parse_rate, f"limiter {name!r}: rate", text.replace(" ", ""), InvalidTask
    )
    require_within(name, "the window of its rate", window_s, (0.001, WINDOW_S_MAX))
    return starts_max, window_s


def require_known(subject: str, options: Mapping[str, Any], kind: type) -> None:
    """Refuse unknown options of `subject`, such as `task 'mail'`. Raises: InvalidTask."""
    known = sorted(get_type_hints(kind))
    unknown = sorted(options.keys() - set(known))
    if unknown:
        texts = [f"no option {option!r}{did_you_mean(option, known)}" for option in unknown]
        raise InvalidTask(f"{subject}: {'; '.join(texts)} (options: {', '.join(known)})")


def require_within(name: str, what: str, value: float, bounds: tuple[float, float]) -> None:
    """Refuse values that are no number within `bounds`; whole bounds need an integer.

    Raises: InvalidTask.
    """
    is_whole = isinstance(bounds[0], int)
    is_fit = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
    if not is_fit:
        expected = "an integer" if is_whole else "a number"
        raise InvalidTask(f"task {name!r}: {what}: {mismatch(expected, value)}")
    if not bounds[0] <= value <= bounds[1]:
        raise InvalidTask(
            f"task {name!r}: {what} {value!r} is not within {bounds[0]} and {bounds[1]}"
        )


def _needs_lane(name: str, options: QueueOptions) -> bool:
    """Whether jobs must have a lane: option `lane`, else whether a limiter is named.

    Raises: InvalidTask.
    """
    lane = options.get("lane")
    if lane not in (None, "required", "optional"):
        raise InvalidTask(
            f"task {name!r}: lane: expected 'required' or 'optional', got {lane!r}; a job's lane is"
            " given to enqueue"
        )
    return lane == "required" or (lane is None and options.get("limiter") is not None)


def _kept(name: str, options: QueueOptions) -> tuple[float | None, bool]:
    """How long done jobs are kept, and whether results are kept."""
    keep_done, keep_result = options.get("keep_done"), options.get("keep_result", False)
    kept_s = [
        duration_s(name, what, text)
        for what, text in (("keep_done", keep_done), ("keep_result", keep_result))
        if isinstance(text, str)
    ]
    if not kept_s and keep_result:
        kept_s = [parse_duration_s(RESULT_KEPT)]
    return max(kept_s, default=None), bool(keep_result)


def _decisions(name: str, options: QueueOptions) -> dict[str, str | None]:
    given = options.get("decisions", {})
    try:
        return checked_decisions(given, name)
    except ValueError as error:
        raise InvalidTask(f"queue {name!r}: decisions: {mismatch(str(error), given)}") from error


def duration_s(name: str, what: str, text: str) -> float:
    """The seconds of an option that is a duration. Raises: InvalidTask."""
    try:
        return parse_duration_s(text)
    except (ValueError, AttributeError) as error:
        raise InvalidTask(
            f"task {name!r}: {what}: expected a duration such as 30s, 10m or 2h, got {text!r}"
        ) from error


def _require_names(owner: str, names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(name, str) or USER_ID.fullmatch(name) is None:
            raise InvalidTask(
                f"task {owner!r}: names such as {name!r} are 1 to 128 of A-Z a-z 0-9 . _ : @ ~ -"
            )
