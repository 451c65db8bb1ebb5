"""What can be done to queues and hosts."""

from __future__ import annotations

from typing import Any, Final

from headrace.console.actions import Action, Field
from headrace.console.seeing import Ask
from headrace.jobs.model import AT_AWAY_S_MAX, IMPORTANCE_LAST, PRIORITY_LAST, NewJob
from headrace.jobs.tasks.options import RETRIES_MAX, SLOTS_MAX

WRITE: Final = "jobs:write"
QUEUE: Final = Field(name="queue", label="Queue", kind="fixed")
HOST: Final = Field(name="host", label="Host", kind="fixed")
BOUNDS: Final = ("importance", "slots_min", "slots_max", "retries")


async def pause_queue(ask: Ask, values: dict[str, Any]) -> str:
    """Hand out no more of its jobs."""
    await ask.service("jobs").queues.pause(values["queue"])
    return f"queue {values['queue']} is paused: jobs in hand go on, no other starts"


async def resume_queue(ask: Ask, values: dict[str, Any]) -> str:
    """Hand its jobs out again."""
    await ask.service("jobs").queues.resume(values["queue"])
    return f"queue {values['queue']} goes on"


async def set_queue(ask: Ask, values: dict[str, Any]) -> str:
    """Set what wins over the queue's code; what is left empty is as its code says."""
    changes = {name: values[name] for name in BOUNDS}
    held = await ask.service("jobs").queues.set(values["queue"], **changes)
    return (
        f"queue {held.queue}: importance {held.importance}, {held.slots_min} to {held.slots_max} slots,"
        f" {held.retries} retries"
    )


async def add_job(ask: Ask, values: dict[str, Any]) -> str:
    """Enqueue one job."""
    job = NewJob(
        queue=values["queue"],
        payload=values["payload"],
        priority=5 if values["priority"] is None else values["priority"],
        after_s=values["after_s"],
        lane=values["lane"],
        unique=values["unique"],
    )
    job_id = await ask.service("jobs").enqueue(job)
    return f"job {job_id} is in queue {values['queue']}"


async def drain_host(ask: Ask, values: dict[str, Any]) -> str:
    """Let a host finish what it has."""
    await ask.service("jobs").fleet.drain(values["host"])
    return f"host {values['host']} is draining: it finishes what it has and takes nothing new"


async def undrain_host(ask: Ask, values: dict[str, Any]) -> str:
    """Let a host take part again."""
    await ask.service("jobs").fleet.undrain(values["host"])
    return f"host {values['host']} takes part again"


def _bounds(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values.get(name) for name in BOUNDS}


def _job(values: dict[str, Any]) -> dict[str, Any]:
    given = {name: values.get(name) for name in ("after_s", "priority", "lane", "unique")}
    rest = {name: value for name, value in given.items() if value is not None}
    return {"payload": values.get("payload"), **rest}


ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        name="jobs.pause_queue",
        title="Pause queue",
        scope=WRITE,
        what="Hands out no more jobs of queue {queue}. Those in hand go on; those that wait stay.",
        command="headrace queues pause {queue}",
        method="PUT",
        path="/v1/queues/{queue}",
        body=lambda _: {"paused": True},
        fields=(QUEUE,),
        run=pause_queue,
    ),
    Action(
        name="jobs.resume_queue",
        title="Resume queue",
        scope=WRITE,
        what="Hands out jobs of queue {queue} again.",
        command="headrace queues resume {queue}",
        method="PUT",
        path="/v1/queues/{queue}",
        body=lambda _: {"paused": False},
        fields=(QUEUE,),
        run=resume_queue,
    ),
    Action(
        name="jobs.set_queue",
        title="Set queue",
        scope=WRITE,
        what="Sets what wins over what the code of queue {queue} declares. What stays empty is as the code says.",
        command="headrace queues set {queue} --importance {importance|none} --slots-min {slots_min|none}"
        " --slots-max {slots_max|none} --retries {retries|none}",
        method="PUT",
        path="/v1/queues/{queue}",
        body=_bounds,
        fields=(
            QUEUE,
            Field(
                name="importance",
                label="Importance",
                kind="number",
                required=False,
                hint=f"0 to {IMPORTANCE_LAST}: what the plan gives slots to first.",
                numbers=(0, IMPORTANCE_LAST),
            ),
            *(
                Field(name=name, label=label, kind="number", required=False, numbers=(0, SLOTS_MAX))
                for name, label in (("slots_min", "Fewest slots"), ("slots_max", "Most slots"))
            ),
            Field(
                name="retries",
                label="Retries",
                kind="number",
                required=False,
                hint="How often a job that failed runs again.",
                numbers=(0, RETRIES_MAX),
            ),
        ),
        run=set_queue,
    ),
    Action(
        name="jobs.add_job",
        title="Enqueue job",
        scope=WRITE,
        what="Enqueues one job into queue {queue}.",
        command="headrace jobs add {queue} {payload} [--after {after_s}s] [--priority {priority}]"
        " [--lane {lane}] [--unique {unique}]",
        method="POST",
        path="/v1/queues/{queue}/jobs",
        body=_job,
        fields=(
            QUEUE,
            Field(name="payload", label="Payload, as JSON", kind="json", default="null"),
            Field(
                name="after_s",
                label="Seconds until it is due",
                kind="number",
                required=False,
                numbers=(0, int(AT_AWAY_S_MAX)),
            ),
            Field(
                name="priority",
                label="Priority",
                kind="number",
                required=False,
                hint=f"0 first to {PRIORITY_LAST} last; empty: 5.",
                numbers=(0, PRIORITY_LAST),
            ),
            Field(name="lane", label="Lane", required=False),
            Field(
                name="unique",
                label="Unique key",
                required=False,
                hint="One unfinished job of the queue may have it.",
            ),
        ),
        run=add_job,
    ),
    Action(
        name="jobs.drain_host",
        title="Drain host",
        scope=WRITE,
        what="Host {host} finishes what it has and takes nothing new, until it is started anew or taken back.",
        command="headrace fleet drain {host}",
        method="POST",
        path="/v1/fleet/hosts/{host}/drain",
        fields=(HOST,),
        is_danger=True,
        run=drain_host,
    ),
    Action(
        name="jobs.undrain_host",
        title="Use host again",
        scope=WRITE,
        what="Host {host} takes part again; the plan gives it slots within seconds.",
        command="headrace fleet undrain {host}",
        method="POST",
        path="/v1/fleet/hosts/{host}/undrain",
        fields=(HOST,),
        run=undrain_host,
    ),
)
