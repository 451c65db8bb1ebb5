"""What code declares: tasks (a handler and its queue), queues without code, limiters, crons, hooks.

    task.py      a queue to enqueue into, and with a handler a task; payloads and their versions
    options.py   the options as checked values
    registry.py  all declarations of an app

A handler with `batch` takes one `Batch[P]`. Without, it takes either the payload as its one
argument (`async def h(photo: Photo)`, where Photo is a Struct, a dataclass or a dict) or the
payload's fields as arguments (`async def h(to: str, text: str)`). msgspec decodes payloads as these
types, so a handler never gets a payload of another shape.
"""

from __future__ import annotations

from headrace.jobs.tasks.options import (
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
    "LimiterDeclared",
    "LimiterOptions",
    "Queue",
    "QueueDeclared",
    "QueueOptions",
    "Registry",
    "Task",
    "TaskOptions",
]
