"""Tasks: the user's handlers by queue, and how a payload finds its way into a handler's arguments.

A handler with `batch` takes one `Batch[P]`; one without takes either the payload as its one argument
(`async def h(photo: Photo)`, where Photo is a Struct, a dataclass or a dict) or the payload's fields as
arguments (`async def h(to: str, text: str)`). Payloads are decoded by msgspec against these types, so a
handler never sees a shape it did not ask for.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from penstock.engines.postgres import Tx
from penstock.jobs.errors import InvalidTask
from penstock.jobs.handling import Batch, JobInHand
from penstock.jobs.model import JOBS_PER_CALL_MAX, NewJob
from penstock.kernel.config import parse_duration_s
from penstock.kernel.ids import USER_ID

if TYPE_CHECKING:
    from penstock.jobs.service import Jobs

_MISSING: Final = object()
TIMEOUT_S_MAX: Final = 7 * 86_400.0
RETRIES_MAX: Final = 1_000
CONCURRENCY_MAX: Final = 10_000
F = TypeVar("F", bound=Callable[..., Any])


class Task:
    """A handler and how it is run. Immutable once made; `Registry.add` makes it able to enqueue."""

    def __init__(
        self,
        *,
        queue: str,
        handler: Callable[..., Any],
        batch: int | None = None,
        timeout: str = "2h",
        retries: int = 5,
        concurrency: int = 1,
        limiter: str | None = None,
        payload: Any = None,
    ) -> None:
        self.queue = queue
        self.handler = handler
        self.batch = batch
        self.retries = retries
        self.concurrency = concurrency
        self.limiter = limiter or queue
        self.jobs: Callable[[], Jobs] | None = None
        self.timeout_s = _require_valid(self, timeout)
        self.takes_fields = False
        self.takes_job = False
        self.payload_type = _payload_type(self, payload)
        self._decoder = msgspec.json.Decoder(self.payload_type)
        self.is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object with an async __call__
        )

    @property
    def jobs_max(self) -> int:
        """Jobs of one handler call."""
        return self.batch or 1

    def decode(self, payload: bytes) -> Any:
        """The payload as the handler's type; no payload is no fields. Raises: ValueError."""
        is_empty = self.takes_fields and payload == b"null"
        return self._decoder.decode(b"{}" if is_empty else payload)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the handler itself, as if it were not a task."""
        return self.handler(*arguments, **named)

    def job(
        self,
        payload: Any = _MISSING,
        /,
        *,
        at: datetime | None = None,
        after_s: float | None = None,
        priority: int = 5,
        unique: str | None = None,
        lane: str | None = None,
        **fields: Any,
    ) -> NewJob:
        """A job of this task, not enqueued yet. Raises: InvalidTask where the arguments do not fit."""
        if payload is _MISSING:
            payload = fields
        elif fields:
            raise InvalidTask(
                f"task {self.queue!r}: give the payload or its fields {sorted(fields)}, not both"
            )
        if self.takes_fields and isinstance(payload, dict):
            try:
                inspect.signature(self.handler).bind(**payload)
            except TypeError as error:
                raise InvalidTask(
                    f"task {self.queue!r}: its handler takes other fields: {error}"
                ) from error
        return NewJob(
            queue=self.queue,
            payload=payload,
            at=at,
            after_s=after_s,
            priority=priority,
            unique=unique,
            lane=lane,
        )

    async def enqueue(
        self, payload: Any = _MISSING, /, *, tx: Tx | None = None, **options: Any
    ) -> int:
        """Enqueue one job, in the caller's transaction if `tx` is given; return its id.

        Options: `at`, `after_s`, `priority`, `unique`, `lane`; other names are fields of the payload.
        """
        job = self.job(**options) if payload is _MISSING else self.job(payload, **options)
        return await self._service().enqueue(job, tx=tx)

    async def enqueue_many(
        self, payloads: typing.Iterable[Any], *, tx: Tx | None = None
    ) -> list[int]:
        """Enqueue a job for each payload in one round trip."""
        jobs = [
            payload if isinstance(payload, NewJob) else self.job(payload) for payload in payloads
        ]
        return await self._service().enqueue_many(jobs, tx=tx)

    def _service(self) -> Jobs:
        if self.jobs is None:
            raise InvalidTask(
                f"task {self.queue!r} belongs to no app yet: declare it with @app.task"
            )
        return self.jobs()


class Registry:
    """The tasks of an app by queue."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._provider: Callable[[], Jobs] | None = None

    def bind(self, provider: Callable[[], Jobs]) -> None:
        """Say where the tasks' `enqueue` finds the service; called when a job is first enqueued."""
        self._provider = provider

    def task(
        self,
        queue: str,
        *,
        batch: int | None = None,
        timeout: str = "2h",
        retries: int = 5,
        concurrency: int = 1,
        limiter: str | None = None,
        payload: Any = None,
    ) -> Callable[[Callable[..., Any]], Task]:
        """Decorate a handler, sync or async. `concurrency`: calls at once in a worker."""

        def declare(handler: Callable[..., Any]) -> Task:
            task = Task(
                queue=queue,
                handler=handler,
                batch=batch,
                timeout=timeout,
                retries=retries,
                concurrency=concurrency,
                limiter=limiter,
                payload=payload,
            )
            self.add(task)
            return task

        return declare

    def add(self, task: Task) -> None:
        """Take in a task made by hand. Raises: InvalidTask where its queue has one."""
        if task.queue in self._tasks:
            raise InvalidTask(
                f"queue {task.queue!r} has a task already: give each task its own queue"
            )
        task.jobs = self._service
        self._tasks[task.queue] = task

    def get(self, queue: str) -> Task | None:
        """The task of `queue`."""
        return self._tasks.get(queue)

    def __iter__(self) -> Iterator[Task]:
        return iter(list(self._tasks.values()))

    def __len__(self) -> int:
        return len(self._tasks)

    def _service(self) -> Jobs:
        if self._provider is None:
            raise InvalidTask("these tasks are bound to no app: call Registry.bind first")
        return self._provider()


def _require_valid(task: Task, timeout: str) -> float:
    """Check the plain numbers of a task; return its timeout in seconds."""
    if USER_ID.fullmatch(task.queue) is None or USER_ID.fullmatch(task.limiter) is None:
        raise InvalidTask(
            f"task {task.queue!r}: queue and limiter names are 1 to 128 of A-Z a-z 0-9 . _ : @ ~ -"
        )
    try:
        timeout_s = parse_duration_s(timeout)
    except ValueError as error:
        raise InvalidTask(
            f"task {task.queue!r}: timeout: expected {error}, got {timeout!r}"
        ) from error
    for name, value, least, most in (
        ("timeout", timeout_s, 0.001, TIMEOUT_S_MAX),
        ("batch", 1 if task.batch is None else task.batch, 1, JOBS_PER_CALL_MAX),
        ("retries", task.retries, 0, RETRIES_MAX),
        ("concurrency", task.concurrency, 1, CONCURRENCY_MAX),
    ):
        if not least <= value <= most:
            raise InvalidTask(
                f"task {task.queue!r}: {name} {value} is not within {least} and {most}"
            )
    return timeout_s


def _payload_type(task: Task, given: Any) -> Any:
    """The type to decode payloads against; also decides whether fields become arguments."""
    parameters = [
        parameter
        for parameter in inspect.signature(task.handler).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if given is not None and (task.batch or len(parameters) == 1):
        return given
    hints = _hints(task)
    if task.batch:
        hint = hints.get(parameters[0].name) if parameters else None
        is_typed = typing.get_origin(hint) is Batch
        return typing.get_args(hint)[0] if is_typed else Any
    first = hints.get(parameters[0].name) if len(parameters) == 1 else None
    if typing.get_origin(first) is JobInHand:
        task.takes_job = True
        return typing.get_args(first)[0]
    if len(parameters) == 1 and _is_whole_payload(hints.get(parameters[0].name, Any)):
        return hints.get(parameters[0].name, Any)
    task.takes_fields = True
    fields = [
        (p.name, hints.get(p.name, Any))
        if p.default is p.empty
        else (p.name, hints.get(p.name, Any), p.default)
        for p in parameters
    ]
    return msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)


def _hints(task: Task) -> dict[str, Any]:
    handler = task.handler
    try:
        is_plain = inspect.isfunction(handler) or inspect.ismethod(handler)
        return typing.get_type_hints(handler if is_plain else type(handler).__call__)
    except (NameError, TypeError) as error:
        raise InvalidTask(
            f"task {task.queue!r}: the types of its handler cannot be read ({error}): define them"
            " at the top of a module, or pass payload=..."
        ) from error


def _is_whole_payload(hint: Any) -> bool:
    kind = typing.get_origin(hint) or hint
    if not isinstance(kind, type):
        return hint is not Any
    is_record = issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)
    return is_record or issubclass(kind, dict | list | tuple) or typing.is_typeddict(kind)
