"""The declarations of an app: tasks, queues without code, limiters, crons, hooks, middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from headrace.jobs.crons import NewCron
from headrace.jobs.errors import InvalidTask
from headrace.jobs.handle import Bridge, JobService
from headrace.jobs.tasks.options import (
    SLACK,
    LimiterDeclared,
    LimiterOptions,
    QueueDeclared,
    QueueOptions,
    TaskOptions,
    declared_cron,
    declared_limiter,
)
from headrace.jobs.tasks.payloads import is_async
from headrace.jobs.tasks.task import Queue, Task
from headrace.kernel.config import parse_duration_s
from headrace.kernel.errors import require_takes

if TYPE_CHECKING:
    from headrace.jobs.workflow import Workflow

Hook = Callable[[], Awaitable[None] | None]
H = TypeVar("H", bound=Callable[..., Any])


class Registry:
    """The tasks of an app by queue, with its hooks and middleware."""

    def __init__(self) -> None:
        self.limiters: dict[str, LimiterDeclared] = {}
        self.crons: dict[str, NewCron] = {}
        self.start_hooks: list[Hook] = []
        self.stop_hooks: list[Hook] = []
        self.middlewares: list[Callable[..., Any]] = []
        """`async def (call, next)`: wraps every handler call, in the slot's event loop."""
        self.thread_middlewares: list[Callable[..., Any]] = []
        """`def (call, next)`: wraps every call of a sync handler, in its thread."""
        self._tasks: dict[str, Task] = {}
        self._queues: dict[str, Queue] = {}
        self._provider: Callable[[], JobService] | None = None
        self._bridge: Callable[[], Bridge] | None = None
        self._of_rooms: set[tuple[int, str]] = set()

    def add_room(self, register: Callable[[Registry], None]) -> None:
        """Let a room register its tasks, and note them for `drop_rooms`."""
        known = self._names()
        register(self)
        self._of_rooms |= self._names() - known

    def drop_rooms(self) -> None:
        """Remove what rooms declared, so that new rooms can declare it again."""
        for number, name in self._of_rooms:
            self._tables()[number].pop(name, None)
        self._of_rooms.clear()

    def _tables(self) -> tuple[dict[str, Any], ...]:
        return self.limiters, self.crons, self._tasks, self._queues

    def _names(self) -> set[tuple[int, str]]:
        return {(number, name) for number, table in enumerate(self._tables()) for name in table}

    def bind(
        self, provider: Callable[[], JobService], *, sync: Callable[[], Bridge] | None = None
    ) -> None:
        """Set the service that the tasks' `enqueue` uses. It is created at the first enqueue."""
        self._provider = provider
        self._bridge = sync
        for queue in self._queues.values():
            queue.bridge = sync

    def task(
        self, queue: str, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[..., Any]], Task]:
        """Decorate a handler, sync or async, as the code of `queue`. Raises: InvalidTask."""
        if not isinstance(queue, str):
            raise InvalidTask(
                f'a task needs the name of its queue: write @app.task("name"), got {queue!r}'
            )

        def declare(handler: Callable[..., Any]) -> Task:
            task = Task(queue=queue, handler=handler, **options)
            self.add(task)
            return task

        return declare

    def workflow(
        self, name: str, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[..., Any]], Workflow]:
        """Decorate a handler `(ctx, ...)` that is replayed, as the code of workflow `name`.

        Raises: InvalidTask.
        """
        from headrace.jobs.workflow import Workflow

        def declare(handler: Callable[..., Any]) -> Workflow:
            workflow = Workflow(name, handler, **options)
            self.add(workflow)
            return workflow

        return declare

    def add(self, task: Task) -> None:
        """Register a task. Raises: InvalidTask if its queue has one."""
        self._take_in(task)
        self._tasks[task.queue] = task

    def queue(self, name: str, **options: Unpack[QueueOptions]) -> Queue:
        """Declare a queue without a handler: other code or people take its jobs."""
        queue = Queue(name, **options)
        self._take_in(queue)
        return queue

    def limiter(self, name: str, **limits: Unpack[LimiterOptions]) -> LimiterDeclared:
        """Declare the limits of a limiter's lanes without limits of their own."""
        if name in self.limiters:
            raise InvalidTask(f"limiter {name!r} is declared twice: declare it once")
        self.limiters[name] = declared = declared_limiter(name, limits)
        return declared

    def cron(
        self, spec: str, *, tz: str = "UTC", name: str | None = None, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[..., Any]], Task]:
        """Decorate a handler that runs on the schedule `spec`, without a payload.

        Raises: InvalidTask.
        """
        if not isinstance(spec, str):
            raise InvalidTask(
                f'a cron needs its schedule: write @app.cron("0 4 * * *"), got {spec!r}'
            )

        def declare(handler: Callable[..., Any]) -> Task:
            cron = declared_cron(name or str(getattr(handler, "__name__", "")), spec, tz)
            task = Task(queue=cron.queue, handler=handler, **options)
            if task.declared.needs_lane:
                raise InvalidTask(
                    f"cron {cron.name!r}: its jobs have no lane, so limiter {task.limiter!r} would"
                    " not limit them: leave `limiter` out, or add lane='optional'"
                )
            if faults := task.payloads.faults(b"null"):
                found = "; ".join(f"{one.pointer or 'the payload'}: {one.text}" for one in faults)
                raise InvalidTask(
                    f"cron {cron.name!r}: its jobs have no payload, and its handler needs one"
                    f" ({found}): give each parameter a default, or declare a task and add a cron"
                    " with a payload by `headrace crons add NAME SPEC QUEUE PAYLOAD`"
                )
            self.add(task)
            self.crons[cron.name] = cron
            return task

        return declare

    def on_slot_start(self, hook: H) -> H:
        """Call `hook()` in each slot before its first job, to open pools and clients.

        Sync or async. A hook that raises ends the slot.
        """
        require_takes("on_slot_start", hook)
        self.start_hooks.append(hook)
        return hook

    def on_slot_stop(self, hook: H) -> H:
        """Call `hook()` in each slot after its last job, even if another hook raised."""
        require_takes("on_slot_stop", hook)
        self.stop_hooks.append(hook)
        return hook

    def middleware(self, around: H) -> H:
        """Wrap handler calls with `around(call, next)`; the first registered is outermost.

        Async: wraps every call, in the event loop; `await next()` runs the call and returns its
        result. Sync: wraps calls of sync handlers, in their own thread. Exceptions of the handler
        pass through `next`; re-raise outcomes such as `Retry`.
        """
        require_takes("middleware", around, "call", "next")
        (self.middlewares if is_async(around) else self.thread_middlewares).append(around)
        return around

    def get(self, queue: str) -> Task | None:
        """The task of `queue`."""
        return self._tasks.get(queue)

    def find(self, queue: str) -> Queue | None:
        """The queue of that name, with code or without."""
        return self._queues.get(queue)

    def declared(self) -> list[QueueDeclared]:
        """Every queue, with code or without."""
        return [queue.declared for queue in self._queues.values()]

    def slack_s(self, queue: str) -> float:
        """How late after its claim a job of `queue` may start."""
        task = self._queues.get(queue)
        limiter = self.limiters.get(task.limiter) if task is not None else None
        return parse_duration_s(SLACK) if limiter is None else limiter.slack_s

    def __iter__(self) -> Iterator[Task]:
        return iter(list(self._tasks.values()))

    def __len__(self) -> int:
        return len(self._tasks)

    def _take_in(self, queue: Queue) -> None:
        taken = {name for known in self.declared() for name in (known.name, *known.aliases)}
        for name in (queue.queue, *queue.declared.aliases):
            if name in taken:
                raise InvalidTask(
                    f"queue {name!r} has a task already: give each task its own queue"
                )
        queue.jobs = self._service
        queue.bridge = self._bridge
        self._queues[queue.queue] = queue

    def _service(self) -> JobService:
        if self._provider is None:
            raise InvalidTask("these tasks are bound to no app: call Registry.bind first")
        return self._provider()
