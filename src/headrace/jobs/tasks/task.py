"""Queues and tasks: the objects that the decorators of an app return.

`payloads` decodes a payload as the type of the handler's argument. A payload carries the version of
its shape. Older payloads go through the task's upgrades, one step per version. Newer payloads are
returned to the queue for newer code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Unpack

import msgspec

from headrace.engines.caller_transaction import Transaction
from headrace.jobs.columns import JobsAlike
from headrace.jobs.errors import InvalidTask, PayloadNewer
from headrace.jobs.handle import Bridge, Group, JobRef, JobService, Origin, View
from headrace.jobs.job_context import JobContext
from headrace.jobs.model import (
    VERSION_LAST,
    NewJob,
)
from headrace.jobs.tasks.options import (
    CONCURRENCY_MAX,
    JobOptions,
    QueueDeclared,
    QueueOptions,
    TaskOptions,
    declared_queue,
    duration_s,
    require_known,
    require_within,
)
from headrace.jobs.tasks.payloads import Fields, Payloads, is_async, option_meant
from headrace.kernel.errors import mismatch

_MISSING: Final = object()
DURATIONS: Final = frozenset({"spread", "timeout", "expires"})
"""Options of many jobs that are durations."""
_CELERY: Final = ("delay", "apply_async")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One handler call, as passed to middleware."""

    task: Task
    queue: str
    jobs: Sequence[JobContext[Any]]
    attempt: int
    """Attempt of the first job, from 1."""


class Queue:
    """A queue without a handler. `Registry.queue` connects it to an app."""

    version: int = 1

    def __init__(self, queue: str, **options: Unpack[QueueOptions]) -> None:
        require_known(f"queue {queue!r}", options, QueueOptions)
        self.declared: QueueDeclared = declared_queue(queue, options)
        self.queue = queue
        self.limiter = self.declared.limiter
        self.jobs: Callable[[], JobService] | None = None
        self.bridge: Callable[[], Bridge] | None = None

    @property
    def sync(self) -> View:
        """The same methods for sync code: `task.sync.enqueue(...)`.

        Raises: InvalidTask.
        """
        if self.bridge is None:
            raise InvalidTask(
                f"task {self.queue!r} belongs to no app yet: declare it with @app.task"
            )
        return View(self.bridge(), self)

    def job(
        self,
        payload: Any = _MISSING,
        /,
        *others: Any,
        at: datetime | None = None,
        after_s: float | None = None,
        priority: int = 5,
        unique: str | None = None,
        lane: str | None = None,
        spread: str | None = None,
        retries: int | None = None,
        timeout: str | None = None,
        expires: str | None = None,
        unique_for: str | None = None,
        chain: str | None = None,
        **fields: Any,
    ) -> NewJob:
        """A job of this queue, not enqueued yet.

        Give the payload, or its fields by name. `unique` is a key that only one unfinished job of
        the queue has; `unique_for` keeps the key for that time from now, also after the end of the
        job. The other options are those of `enqueue_many`. A job for a group's `on_done` may leave
        out the field `group`, which is added then. Raises: InvalidTask if the arguments do not fit.
        """
        if others:
            raise InvalidTask(self._positional_error((payload, *others)))
        if payload is _MISSING:
            payload = fields
        elif fields:
            named = ", ".join(f"{name!r}{option_meant(name)}" for name in sorted(fields))
            raise InvalidTask(
                f"task {self.queue!r}: give the payload or its fields {named}, not both"
            )
        self._require_fit(payload)
        return NewJob(
            queue=self.queue,
            payload=payload,
            at=at,
            after_s=after_s,
            priority=priority,
            unique=unique,
            lane=lane,
            spread_s=self._duration_s("spread", spread),
            version=self.version,
            retries=retries,
            timeout_s=self._duration_s("timeout", timeout),
            expires_s=self._duration_s("expires", expires),
            unique_for_s=self._duration_s("unique_for", unique_for),
            chain=chain,
        )

    async def enqueue(
        self,
        payload: Any = _MISSING,
        /,
        *others: Any,
        tx: Transaction | None = None,
        group: Group | None = None,
        **options: Any,
    ) -> JobRef:
        """Enqueue one job with the options of `job`, inside `tx` and in `group` if given.

        Return its id, with methods; or the id of the unfinished job that has its unique key.
        Raises: InvalidTask, InvalidJob, PayloadTooLarge, GroupClosed.
        """
        if others:
            raise InvalidTask(self._positional_error((payload, *others)))
        job = self.job(**options) if payload is _MISSING else self.job(payload, **options)
        self._require_whole(job.payload)
        jobs = self.service()
        job_id = (await jobs.enqueue_many([job], tx=tx, group=group))[0]
        return JobRef.of(job_id, self._origin(jobs))

    async def enqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        tx: Transaction | None = None,
        group: Group | None = None,
        **options: Unpack[JobOptions],
    ) -> list[JobRef]:
        """Enqueue a job per payload in one round trip, all with `options`.

        A payload may be a job, `task.job(...)`, with options of its own. Raises: InvalidTask.
        """
        new = self._jobs_of(payloads, options)
        jobs = self.service()
        ids = await jobs.enqueue_many(new, tx=tx, group=group)
        origin = self._origin(jobs)
        return [JobRef.of(job_id, origin) for job_id in ids]

    def service(self) -> JobService:
        """The service that its jobs go to. Raises: InvalidTask if it belongs to no app."""
        if self.jobs is None:
            raise InvalidTask(
                f"task {self.queue!r} belongs to no app yet: declare it with @app.task"
            )
        return self.jobs()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Name the replacement for methods of Celery. Raises: AttributeError."""
            if name in _CELERY:
                raise AttributeError(
                    f"task {self.queue!r} has no {name}: write `await task.enqueue(field=value)`,"
                    " in sync code `task.sync.enqueue(field=value)`; see docs/from-celery.md"
                )
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _jobs_of(self, payloads: Iterable[Any], options: JobOptions) -> Sequence[NewJob]:
        """A job per payload, all with `options`; jobs are passed through."""
        self._require_common(options)
        shared: dict[str, Any] = {**options}
        for name in DURATIONS & shared.keys():
            shared[f"{name}_s"] = self._duration_s(name, shared.pop(name))
        common = NewJob(queue=self.queue, version=self.version, **shared)
        try:
            given = list(payloads)
        except TypeError as error:
            expected = mismatch("a list of payloads", payloads)
            raise InvalidTask(f"task {self.queue!r}: enqueue_many: {expected}") from error
        if any(issubclass(kind, NewJob) for kind in set(map(type, given))):
            return [self._job_of(payload, common, options) for payload in given]
        # Fields fit or not by their names alone: check each combination of names once.
        for payload in {tuple(p) if type(p) is dict else type(p): p for p in given}.values():
            self._require_fit(payload)
            self._require_whole(payload)
        return JobsAlike(common, given)

    def _job_of(self, payload: Any, common: NewJob, options: JobOptions) -> NewJob:
        """The job of one payload, or the payload itself if it is a job."""
        if not isinstance(payload, NewJob):
            self._require_fit(payload)
            self._require_whole(payload)
            return msgspec.structs.replace(common, payload=payload)
        if options:
            raise InvalidTask(
                f"task {self.queue!r}: a job has its own options: give {sorted(options)} to its"
                " task.job(...)"
            )
        self._require_whole(payload.payload)
        return payload

    def _require_common(self, options: JobOptions) -> None:
        other = sorted(options.keys() - JobOptions.__annotations__.keys())
        if other:
            raise InvalidTask(
                f"task {self.queue!r}: enqueue_many takes {sorted(JobOptions.__annotations__)} for"
                f" all its jobs, not {other}: give it jobs, such as"
                " task.job(payload, unique=...) for each"
            )

    def _positional_error(self, given: Sequence[Any]) -> str:
        """The error text for positional payloads."""
        return (
            f"task {self.queue!r}: {len(given)} payloads where one is taken: for many jobs use"
            " enqueue_many([...])"
        )

    def _origin(self, jobs: JobService) -> Origin:
        return Origin(jobs, self.declared.keep_result, self.bridge)

    def _require_fit(self, payload: Any) -> None:
        """Check the payload's fields. A queue without code accepts any."""

    def _require_whole(self, payload: Any) -> None:
        """Check the fields of a job that is no group callback."""

    def _duration_s(self, name: str, value: str | None) -> float | None:
        return None if value is None else duration_s(self.queue, name, value)


class Task(Queue):
    """A handler with its options. `Registry.add` connects it to an app."""

    def __init__(
        self, *, queue: str, handler: Callable[..., Any], **options: Unpack[TaskOptions]
    ) -> None:
        require_known(f"task {queue!r}", options, TaskOptions)
        named: Any = {
            name: value for name, value in options.items() if name in QueueOptions.__annotations__
        }
        super().__init__(queue, **named)
        if self.declared.decisions:
            raise InvalidTask(
                f"task {queue!r}: decisions: people decide jobs of a queue without a handler:"
                f" declare it with app.queue({queue!r}, decisions=...)"
            )
        self.handler = handler
        self.batch = options.get("batch")
        self.retries = self.declared.retries
        self.timeout_s = self.declared.timeout_s
        self.keep_result = self.declared.keep_result
        self.concurrency = options.get("concurrency", 1)
        self.version = options.get("version", 1)
        self._upgrades: Mapping[int, Callable[[Any], Any]] = options.get("upgrade") or {}
        require_within(queue, "concurrency", self.concurrency, (1, CONCURRENCY_MAX))
        require_within(queue, "version", self.version, (1, VERSION_LAST))
        for at in self._upgrades:
            require_within(queue, "a version to upgrade", at, (1, self.version - 1))
        self.payloads = Payloads(
            queue, handler, given=options.get("payload"), is_batch=self.batch is not None
        )
        self.takes_fields = self.payloads.takes_fields
        """Whether the payload's fields are the handler's arguments."""
        self.takes_job = self.payloads.takes_job
        """Whether the handler takes the job context."""
        self._fields = Fields.of(handler) if self.takes_fields else None
        self._group_field = _group_field(handler) if self.takes_fields else None
        self.is_async = is_async(handler)

    def decode(self, payload: bytes, version: int | None = None) -> Any:
        """Decode a payload as the handler's type, upgraded if its version is older.

        Raises: ValueError, PayloadNewer, and errors of an upgrade.
        """
        if version is None or version == self.version:
            return self.payloads.decode(payload)
        if version > self.version:
            raise PayloadNewer(self.queue, version, self.version)
        return self.payloads.upgrade(payload, version, self._upgrades)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the handler directly."""
        return self.handler(*arguments, **named)

    def _positional_error(self, given: Sequence[Any]) -> str:
        if self._fields is None:
            return super()._positional_error(given)
        names = self._fields.signature.parameters
        fields = ", ".join(
            f"{name}={value!r:.40}" for name, value in zip(names, given, strict=False)
        )
        name = getattr(self.handler, "__name__", "task")
        return f"task {self.queue!r}: pass the fields by name: {name}.enqueue({fields})"

    def _require_fit(self, payload: Any) -> None:
        fields = self._fields
        if fields is None:
            return
        if isinstance(payload, dict):
            if self._group_field is not None:
                payload = {self._group_field: None} | payload
            if not fields.fit(payload):
                raise InvalidTask(f"task {self.queue!r}: {fields.misfit(payload)}")
        elif isinstance(payload, str | bytes | int | float | list | tuple):
            raise InvalidTask(self._positional_error((payload,)))

    def _require_whole(self, payload: Any) -> None:
        fields = self._fields
        if self._group_field is None or fields is None or not isinstance(payload, dict):
            return
        if not fields.fit(payload):
            raise InvalidTask(f"task {self.queue!r}: {fields.misfit(payload)}")

    @property
    def fields_text(self) -> str | None:
        """The fields that the handler takes, for errors; None: it takes a payload of its own."""
        return None if self._fields is None else self._fields.text


def _group_field(handler: Callable[..., Any]) -> str | None:
    """`group` if the handler requires such a field."""
    found = inspect.signature(handler).parameters.get("group")
    return "group" if found is not None and found.default is found.empty else None
