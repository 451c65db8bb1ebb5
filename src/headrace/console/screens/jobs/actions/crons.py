"""What can be done to crons."""

from __future__ import annotations

from typing import Any, Final

from headrace.console.actions import Action, Field
from headrace.console.seeing import Ask
from headrace.jobs.crons import NewCron

WRITE: Final = "jobs:write"
CRON: Final = Field(name="name", label="Cron", kind="fixed")


async def add_cron(ask: Ask, values: dict[str, Any]) -> str:
    """Add it."""
    cron = await ask.service("jobs").crons.add(
        NewCron(
            name=values["name"],
            spec=values["spec"],
            queue=values["queue"],
            payload=values["payload"],
            tz=values["tz"] or "UTC",
        )
    )
    return f"cron {cron.name} comes first at {cron.next_at:%Y-%m-%d %H:%M:%S} UTC"


async def run_cron(ask: Ask, values: dict[str, Any]) -> str:
    """Enqueue its job now."""
    job_id = await ask.service("jobs").crons.run(values["name"])
    return f"cron {values['name']} enqueued job {job_id}, besides its moments"


async def pause_cron(ask: Ask, values: dict[str, Any]) -> str:
    """Let it rest."""
    await ask.service("jobs").crons.pause(values["name"])
    return f"cron {values['name']} rests"


async def resume_cron(ask: Ask, values: dict[str, Any]) -> str:
    """Let it come again."""
    cron = await ask.service("jobs").crons.resume(values["name"])
    return f"cron {cron.name} comes again at {cron.next_at:%Y-%m-%d %H:%M:%S} UTC"


async def remove_cron(ask: Ask, values: dict[str, Any]) -> str:
    """Remove it."""
    await ask.service("jobs").crons.remove(values["name"])
    return f"cron {values['name']} is removed"


def _new(values: dict[str, Any]) -> dict[str, Any]:
    given = {name: values.get(name) for name in ("name", "spec", "queue", "tz")}
    rest = {name: value for name, value in given.items() if value is not None}
    return {**rest, "payload": values.get("payload")}


def _simple(
    name: str, title: str, what: str, run: Any, *, call: tuple[str, str], **more: Any
) -> Action:
    verb = name.removesuffix("_cron")
    method, path = call
    return Action(
        name=f"jobs.{name}",
        title=title,
        scope=WRITE,
        what=what,
        command=f"headrace crons {'rm' if verb == 'remove' else verb} {{name}}",
        method=method,
        path=path,
        fields=(CRON,),
        run=run,
        **more,
    )


ONE: Final = "/v1/crons/{name}"
ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        name="jobs.add_cron",
        title="Add cron",
        scope=WRITE,
        what="Adds a cron that enqueues a job at every moment of its five fields.",
        command="headrace crons add {name} {spec} {queue} {payload} [--tz {tz}]",
        method="POST",
        path="/v1/crons",
        body=_new,
        fields=(
            Field(name="name", label="Name"),
            Field(
                name="spec",
                label="Moments",
                hint="Minute, hour, day, month, day of week: 0 4 * * * is every night at four.",
            ),
            Field(name="queue", label="Queue"),
            Field(name="payload", label="Payload, as JSON", kind="json", default="null"),
            Field(
                name="tz",
                label="Time zone",
                required=False,
                hint="Such as Europe/Moscow; empty: UTC.",
            ),
        ),
        run=add_cron,
    ),
    _simple(
        "run_cron",
        "Run now",
        "Enqueues the job of cron {name} now, besides its moments.",
        run_cron,
        call=("POST", f"{ONE}/run"),
    ),
    _simple(
        "pause_cron",
        "Pause cron",
        "Lets cron {name} rest. What it misses is not made up for.",
        pause_cron,
        call=("PUT", ONE),
        body=lambda _: {"paused": True},
    ),
    _simple(
        "resume_cron",
        "Resume cron",
        "Lets cron {name} come again, from its next moment on.",
        resume_cron,
        call=("PUT", ONE),
        body=lambda _: {"paused": False},
    ),
    _simple(
        "remove_cron",
        "Remove cron",
        "Removes cron {name}; one that running code declares cannot be.",
        remove_cron,
        call=("DELETE", ONE),
        is_danger=True,
    ),
)
