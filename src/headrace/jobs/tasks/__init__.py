"""What code declares: tasks (a handler and its queue), queues without code, limiters, crons, hooks.

    task.py      a queue that can be enqueued into, and with a handler a task
    payloads.py  how a payload finds its way into a handler's arguments, old versions of it included
    declared.py  the options as values, checked
    registry.py  everything that an app declares

A handler with `batch` takes one `Batch[P]`; one without takes either the payload as its one argument
(`async def h(photo: Photo)`, where Photo is a Struct, a dataclass or a dict) or the payload's fields as
arguments (`async def h(to: str, text: str)`). Payloads are decoded by msgspec against these types, so a
handler never sees a shape it did not ask for.
"""

from __future__ import annotations

from headrace.jobs.tasks.options import (
    CronDeclared,
    LimiterDeclared,
    LimiterOptions,
    QueueDeclared,
    QueueOptions,
    TaskOptions,
)
from headrace.jobs.tasks.registry import Registry
from headrace.jobs.tasks.task import Call, Queue, Task

__all__ = [
    "Call",
    "CronDeclared",
    "LimiterDeclared",
    "LimiterOptions",
    "Queue",
    "QueueDeclared",
    "QueueOptions",
    "Registry",
    "Task",
    "TaskOptions",
]
