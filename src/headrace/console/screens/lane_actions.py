"""Actions on limiters, lanes and crons."""

from __future__ import annotations

from typing import Any, Final

from headrace.console.actions import Action, Done, Field
from headrace.console.model import PREFIX
from headrace.console.views import ViewContext
from headrace.jobs.crons import NewCron
from headrace.jobs.model import WEIGHT_MAX, WINDOW_S_MAX
from headrace.jobs.validation import LIMIT_MAX

WINDOW_S_MIN: Final = 0.001
"""Shortest window that the service accepts."""
LIMITER: Final = Field("limiter", "Limiter", kind="fixed")
LANE: Final = Field("lane", "Lane", kind="fixed")
LIMITS: Final = (
    Field(
        "starts_max",
        "Starts per window",
        kind="number",
        required=False,
        hint="Empty: no limit.",
        numbers=(1, LIMIT_MAX),
    ),
    Field(
        "window_s",
        "Window in seconds",
        kind="decimal",
        required=False,
        numbers=(WINDOW_S_MIN, int(WINDOW_S_MAX)),
    ),
    Field(
        "concurrency",
        "Jobs at once",
        kind="number",
        required=False,
        hint="Empty: no limit.",
        numbers=(1, LIMIT_MAX),
    ),
)
RATE: Final = "[--rate {starts_max}/{window_s}s] [--concurrency {concurrency}]"


def _limits(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values.get(name) for name in ("starts_max", "window_s", "concurrency")}


def _lane_body(values: dict[str, Any]) -> dict[str, Any]:
    weight = values.get("weight")
    return {
        **_limits(values),
        "weight": 1 if weight is None else weight,
        "paused": bool(values.get("paused")),
    }


def _limiter_body(values: dict[str, Any]) -> dict[str, Any]:
    slack_s = values.get("slack_s")
    return {**_limits(values), **({} if slack_s is None else {"slack_s": slack_s})}


async def _remove_limiter(context: ViewContext, name: str) -> Done:
    await context.jobs.lanes.remove_limiter(name)
    return Done(f"limiter {name} is removed", f"{PREFIX}/jobs/lanes")


LANE_PATH: Final = "/v1/limiters/{limiter}/lanes/{lane}"
LANE_ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        name="jobs.set_lane",
        title="Set lane limits",
        what="Sets all limits of lane {lane} of limiter {limiter}. The lane no longer follows its"
        " limiter.",
        command=f"headrace lanes set {{limiter}} {{lane}} {RATE} [--weight {{weight}}] [--paused"
        " ?paused]",
        http=f"PUT {LANE_PATH}",
        body=_lane_body,
        fields=(
            LIMITER,
            Field("lane", "Lane"),
            *LIMITS,
            Field(
                "weight",
                "Weight",
                kind="number",
                required=False,
                hint=f"Share of the starts relative to other lanes, 1 to {WEIGHT_MAX}; default 1.",
                numbers=(1, WEIGHT_MAX),
            ),
            Field("paused", "Paused", kind="check", required=False),
        ),
        run=lambda context, given: context.jobs.lanes.set(
            given["limiter"], given["lane"], **_lane_body(given), create=False
        ),
        done="lane {lane} has new limits",
    ),
    Action(
        name="jobs.pause_lane",
        title="Pause lane",
        what="Starts no further jobs of lane {lane}. Running jobs continue; its limits stay.",
        command="headrace lanes pause {limiter} {lane}",
        http=f"POST {LANE_PATH}/pause",
        fields=(LIMITER, LANE),
        run=lambda context, given: context.jobs.lanes.pause(given["limiter"], given["lane"]),
        done="lane {lane} is paused",
    ),
    Action(
        name="jobs.resume_lane",
        title="Resume lane",
        what="Starts jobs of lane {lane} again, within its limits.",
        command="headrace lanes resume {limiter} {lane}",
        http=f"POST {LANE_PATH}/resume",
        fields=(LIMITER, LANE),
        run=lambda context, given: context.jobs.lanes.resume(given["limiter"], given["lane"]),
        done="lane {lane} is resumed",
    ),
    Action(
        name="jobs.reset_lane",
        title="Reset lane",
        what="Removes limits, pause and weight of lane {lane}. It follows limiter {limiter} again.",
        command="headrace lanes reset {limiter} {lane}",
        http=f"DELETE {LANE_PATH}",
        fields=(LIMITER, LANE),
        run=lambda context, given: context.jobs.lanes.reset(given["limiter"], given["lane"]),
        done="lane {lane} follows limiter {limiter} again",
    ),
    Action(
        name="jobs.set_limiter",
        title="Set default limits",
        what="Sets the limits of all lanes of limiter {limiter} that have none of their own. Limits"
        " declared in code no longer apply.",
        command=f"headrace lanes limiter {{limiter}} {RATE} [--slack {{slack_s}}s]"
        " [--unlimited !starts_max,concurrency,slack_s]",
        http="PUT /v1/limiters/{limiter}",
        body=_limiter_body,
        fields=(
            LIMITER,
            *LIMITS,
            Field(
                "slack_s",
                "Slack in seconds",
                kind="decimal",
                required=False,
                hint="A job starts at most this long after a host has leased it; default 0.25.",
            ),
        ),
        run=lambda context, given: context.jobs.lanes.set_limiter(
            given["limiter"], **_limiter_body(given)
        ),
        done="limiter {limiter} has new limits, which apply to its lanes",
    ),
    Action(
        name="jobs.reset_limiter",
        title="Restore declared limits",
        what="Removes the overrides of limiter {limiter}. The limits declared in code apply again.",
        command="headrace lanes limiter {limiter} --as-declared",
        http="POST /v1/limiters/{limiter}/reset",
        fields=(LIMITER,),
        run=lambda context, given: context.jobs.lanes.reset_limiter(given["limiter"]),
        done="limiter {limiter} has its declared limits again",
    ),
    Action(
        name="jobs.remove_limiter",
        title="Remove limiter",
        what="Removes limiter {limiter} with its lanes. It must have no queue, no jobs and no"
        " limits declared in code.",
        command="headrace lanes rm-limiter {limiter}",
        http="DELETE /v1/limiters/{limiter}",
        fields=(LIMITER,),
        run=lambda context, given: _remove_limiter(context, given["limiter"]),
        is_danger=True,
    ),
)


CRON: Final = Field("name", "Cron", kind="fixed")


def _new(values: dict[str, Any]) -> dict[str, Any]:
    given = {name: values.get(name) for name in ("name", "spec", "queue", "tz")}
    rest = {name: value for name, value in given.items() if value is not None}
    return {**rest, "payload": values.get("payload")}


ONE: Final = "/v1/crons/{name}"
CRON_ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        name="jobs.add_cron",
        title="Add cron",
        what="Adds a cron that enqueues a job on a schedule.",
        command="headrace crons add {name} {spec} {queue} {payload} [--tz {tz}]",
        http="POST /v1/crons",
        body=_new,
        fields=(
            Field("name", "Name"),
            Field(
                "spec",
                "Schedule",
                hint="Minute, hour, day, month, weekday; 0 4 * * * is every day at 04:00.",
            ),
            Field("queue", "Queue"),
            Field("payload", "Payload, as JSON", kind="json", default="null"),
            Field("tz", "Time zone", required=False, hint="Such as Europe/Moscow; default UTC."),
        ),
        run=lambda context, given: context.jobs.crons.add(NewCron(**_new(given))),
        done="cron {found.name} runs first at {found.next_at:%Y-%m-%d %H:%M:%S} UTC",
    ),
    Action(
        name="jobs.run_cron",
        title="Run now",
        what="Enqueues the job of cron {name} now. Its schedule does not change.",
        command="headrace crons run {name}",
        http=f"POST {ONE}/run",
        fields=(CRON,),
        run=lambda context, given: context.jobs.crons.run(given["name"]),
        done="cron {name} enqueued job {found}",
    ),
    Action(
        name="jobs.pause_cron",
        title="Pause cron",
        what="Pauses cron {name}. Times that pass meanwhile enqueue no job.",
        command="headrace crons pause {name}",
        http=f"PUT {ONE}",
        body=lambda _: {"paused": True},
        fields=(CRON,),
        run=lambda context, given: context.jobs.crons.pause(given["name"]),
        done="cron {name} is paused",
    ),
    Action(
        name="jobs.resume_cron",
        title="Resume cron",
        what="Resumes cron {name} from its next scheduled time.",
        command="headrace crons resume {name}",
        http=f"PUT {ONE}",
        body=lambda _: {"paused": False},
        fields=(CRON,),
        run=lambda context, given: context.jobs.crons.resume(given["name"]),
        done="cron {found.name} runs next at {found.next_at:%Y-%m-%d %H:%M:%S} UTC",
    ),
    Action(
        name="jobs.remove_cron",
        title="Remove cron",
        what="Deletes cron {name}. Crons declared by running code cannot be deleted.",
        command="headrace crons rm {name}",
        http=f"DELETE {ONE}",
        fields=(CRON,),
        run=lambda context, given: context.jobs.crons.remove(given["name"]),
        done="cron {name} is deleted",
        is_danger=True,
    ),
)
