"""Whether payloads fit the tasks that will be given them, as far as this process knows those tasks. No I/O.

A payload that does not fit could never run: it is refused at the door, while its sender still listens.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.jobs.intake import PROBLEMS_MAX, Rows, refuse
from headrace.jobs.tasks import Registry, Task
from headrace.kernel.errors import FieldProblem

COUNTS: Final = b'"group":{"id":1,"done":0,"failed":0,"cancelled":0,"quarantined":0}}'
"""What the payload of a group's callback ends with when it is enqueued."""
UNKNOWN_GROUP: Final = "Object contains unknown field `group`"


def require_fit(rows: Rows, registry: Registry, *, has_group: bool = False) -> None:
    """Refuse payloads that the tasks of `registry` could not decode; with `has_group` as a group's callback.

    A queue without a task here, or another version, is for other code to judge. One call of the decoder a
    job: 0.4 ms for 1,000 jobs of three fields, whose encoding takes 0.8 ms (a machine of 2 cores).
    Raises: InvalidJob.
    """
    problems: list[FieldProblem] = []
    tasks = {queue: registry.get(queue) for queue in set(rows.queues)}
    for index, payload in enumerate(rows.payloads):
        task = tasks[rows.queues[index]]
        if task is None or rows.versions[index] != task.version:
            continue
        misfit = _misfit(task, _with_counts(payload) if has_group else payload)
        if misfit is not None:
            if has_group and misfit == UNKNOWN_GROUP:
                misfit = "the callback gets the field `group`: add the parameter to its handler"
            problems.append(FieldProblem(f"/{index}/payload", "invalid", misfit))
            if len(problems) == PROBLEMS_MAX:
                break
    refuse(problems, "on_done: " if has_group else "")


def _misfit(task: Task, payload: bytes) -> str | None:
    """Why the task could not decode `payload`."""
    try:
        task.payloads.decode(payload)
    except msgspec.ValidationError as error:
        return str(error)
    except Exception:  # noqa: BLE001 - a type's own code, which may only work where handlers run
        return None
    return None


def _with_counts(payload: bytes) -> bytes:
    return payload[:-1] + (b"," if len(payload) > len(b"{}") else b"") + COUNTS
