"""What can be done to limiters and lanes."""

from __future__ import annotations

from typing import Any, Final

from headrace.console.actions import Action, Field
from headrace.console.seeing import Ask
from headrace.jobs.model import WEIGHT_MAX, WINDOW_S_MAX
from headrace.jobs.service.lanes import SLACK_S
from headrace.jobs.validation import LIMIT_MAX

WRITE: Final = "jobs:write"
WINDOW_S_MIN: Final = 0.001
"""The shortest that the service takes."""
LIMITER: Final = Field(name="limiter", label="Limiter", kind="fixed")
LANE: Final = Field(name="lane", label="Lane", kind="fixed")
LIMITS: Final = (
    Field(
        name="starts_max",
        label="Starts in a window",
        kind="number",
        required=False,
        hint="Empty: without limit.",
        numbers=(1, LIMIT_MAX),
    ),
    Field(
        name="window_s",
        label="Window in seconds",
        kind="decimal",
        required=False,
        numbers=(WINDOW_S_MIN, int(WINDOW_S_MAX)),
    ),
    Field(
        name="concurrency",
        label="Jobs at once",
        kind="number",
        required=False,
        hint="Empty: without limit.",
        numbers=(1, LIMIT_MAX),
    ),
)
RATE: Final = "[--rate {starts_max}/{window_s}s] [--concurrency {concurrency}]"


async def set_lane(ask: Ask, values: dict[str, Any]) -> str:
    """Set a lane's own limits, live."""
    lanes = ask.service("jobs").lanes
    await lanes.set(
        values["limiter"],
        values["lane"],
        starts_max=values["starts_max"],
        window_s=values["window_s"],
        concurrency=values["concurrency"],
        weight=1 if values["weight"] is None else values["weight"],
        paused=values["paused"],
        create=False,
    )
    return f"lane {values['lane']} has these limits now"


async def pause_lane(ask: Ask, values: dict[str, Any]) -> str:
    """Hand out none of its jobs."""
    await ask.service("jobs").lanes.pause(values["limiter"], values["lane"])
    return f"lane {values['lane']} is paused"


async def resume_lane(ask: Ask, values: dict[str, Any]) -> str:
    """Hand its jobs out again."""
    await ask.service("jobs").lanes.resume(values["limiter"], values["lane"])
    return f"lane {values['lane']} goes on"


async def reset_lane(ask: Ask, values: dict[str, Any]) -> str:
    """Let it follow its limiter."""
    await ask.service("jobs").lanes.reset(values["limiter"], values["lane"])
    return f"lane {values['lane']} follows limiter {values['limiter']} again"


async def set_limiter(ask: Ask, values: dict[str, Any]) -> str:
    """Set the limits of all lanes that have none of their own."""
    slack_s = SLACK_S if values["slack_s"] is None else values["slack_s"]
    await ask.service("jobs").lanes.set_limiter(
        values["limiter"],
        starts_max=values["starts_max"],
        window_s=values["window_s"],
        concurrency=values["concurrency"],
        slack_s=slack_s,
    )
    return f"limiter {values['limiter']} has these limits now; its lanes follow"


async def reset_limiter(ask: Ask, values: dict[str, Any]) -> str:
    """Give it back to its code."""
    await ask.service("jobs").lanes.reset_limiter(values["limiter"])
    return f"limiter {values['limiter']} has the limits again that its code declares"


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


LANE_PATH: Final = "/v1/limiters/{limiter}/lanes/{lane}"
ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        name="jobs.set_lane",
        title="Set lane",
        scope=WRITE,
        what="Sets all limits of lane {lane} of limiter {limiter}, live; it no longer follows its limiter.",
        command=f"headrace lanes set {{limiter}} {{lane}} {RATE} [--weight {{weight}}] [--paused ?paused]",
        method="PUT",
        path=LANE_PATH,
        body=_lane_body,
        fields=(
            LIMITER,
            Field(name="lane", label="Lane"),
            *LIMITS,
            Field(
                name="weight",
                label="Weight",
                kind="number",
                required=False,
                hint=f"Its share against other lanes, 1 to {WEIGHT_MAX}.",
                numbers=(1, WEIGHT_MAX),
            ),
            Field(name="paused", label="Paused", kind="check", required=False),
        ),
        run=set_lane,
    ),
    Action(
        name="jobs.pause_lane",
        title="Pause lane",
        scope=WRITE,
        what="Hands out no more jobs of lane {lane}; those in hand go on. Its limits stay.",
        command="headrace lanes pause {limiter} {lane}",
        method="POST",
        path=f"{LANE_PATH}/pause",
        fields=(LIMITER, LANE),
        run=pause_lane,
    ),
    Action(
        name="jobs.resume_lane",
        title="Resume lane",
        scope=WRITE,
        what="Hands out jobs of lane {lane} again, within its limits.",
        command="headrace lanes resume {limiter} {lane}",
        method="POST",
        path=f"{LANE_PATH}/resume",
        fields=(LIMITER, LANE),
        run=resume_lane,
    ),
    Action(
        name="jobs.reset_lane",
        title="Reset lane",
        scope=WRITE,
        what="Forgets the own limits, pause and weight of lane {lane}: it follows limiter {limiter} again.",
        command="headrace lanes reset {limiter} {lane}",
        method="DELETE",
        path=LANE_PATH,
        fields=(LIMITER, LANE),
        run=reset_lane,
    ),
    Action(
        name="jobs.set_limiter",
        title="Set limiter",
        scope=WRITE,
        what="Sets the limits of all lanes of limiter {limiter} that have none of their own; what code declares no"
        " longer counts.",
        command=f"headrace lanes limiter {{limiter}} {RATE} [--slack {{slack_s}}s]"
        " [--unlimited !starts_max,concurrency,slack_s]",
        method="PUT",
        path="/v1/limiters/{limiter}",
        body=_limiter_body,
        fields=(
            LIMITER,
            *LIMITS,
            Field(
                name="slack_s",
                label="Slack in seconds",
                kind="decimal",
                required=False,
                hint="How long after its claim a job may start; empty: 0.25.",
            ),
        ),
        run=set_limiter,
    ),
    Action(
        name="jobs.reset_limiter",
        title="Reset limiter",
        scope=WRITE,
        what="Forgets the limits that were set of limiter {limiter}; those that code declares hold again, or none.",
        command="headrace lanes limiter {limiter} --as-declared",
        method="DELETE",
        path="/v1/limiters/{limiter}",
        fields=(LIMITER,),
        run=reset_limiter,
    ),
)
