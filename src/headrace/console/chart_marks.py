"""Marks of charts: starts, deaths, outages, alerts and changes of the slot plan, by room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Final

from headrace.console.format import format_within
from headrace.jobs.fleet.alerts import HOST_RULE, Alert
from headrace.jobs.fleet.state import Decision
from headrace.kernel.terminal import pluralize
from headrace.web.history import Span
from headrace.web.marks import Mark

MARK_NAMES: Final = {
    "start": "start",
    "deploy": "deploy",
    "restart": "restart",
    "deaths": "process died",
    "outage": "outage",
    "alert": "alert",
    "plan": "slot decision",
}
"""Kinds of marks, by their name in a legend."""
OF_JOBS: Final = ("overview", "jobs")
"""The rooms with charts of queues."""
ROOMS_OF_ROLE: Final[Mapping[str, tuple[str, ...]]] = {
    "agent": (*OF_JOBS, "fetch"),
    "scheduler": OF_JOBS,
    "flusher": ("overview", "views", "feed"),
    "media": ("overview", "media"),
}
"""Rooms whose charts show the starts of a role; those of other and of several roles are in all."""


class BoardMark(Mark, frozen=True, kw_only=True):
    """A mark of a board; its kind is that of `Mark`, or alert or plan."""

    @property
    def name(self) -> str:
        """Name of its kind for people."""
        return MARK_NAMES[self.kind]

    @property
    def when(self) -> str:
        """Its time, as exact as it is recorded."""
        return format_within(self.at, self.within_s)


def is_in_charts(mark: Mark, room: str) -> bool:
    """Whether the charts of a room show a start, a death or an outage.

    A dead slot concerns its queues only: the jobs of other rooms run in another slot.
    """
    if mark.kind == "deaths" and mark.role == "agent":
        return room in OF_JOBS
    return room in ROOMS_OF_ROLE.get(mark.role, (room,))


def alert_marks(alerts: Iterable[Alert], room: str) -> list[BoardMark]:
    """Alerts, where a room has charts of queues; elsewhere those of its own queues."""
    return [
        BoardMark(
            at=alert.raised_at,
            until_at=alert.cleared_at,
            kind="alert",
            text=f"{alert.subject}: {alert.text}",
        )
        for alert in alerts
        if room in OF_JOBS or (alert.rule != HOST_RULE and alert.subject.startswith(f"{room}."))
    ]


def plan_marks(span: Span, decisions: Iterable[Decision]) -> list[BoardMark]:
    """One mark for the changes of the slot plan in each step."""

    def step_of(one: Decision) -> int:
        return span.index(one.at)

    found = []
    inside = [one for one in decisions if span.from_at <= one.at < span.to_at]
    for _, group in groupby(sorted(inside, key=lambda one: one.at), key=step_of):
        changes = list(group)
        moved: dict[str, int] = defaultdict(int)
        for one in changes:
            moved[one.queue] += one.after - one.before
        by_size = sorted(moved.items(), key=lambda pair: -abs(pair[1]))
        texts = [f"{queue} {by:+d}" for queue, by in by_size if by]
        text = f"{pluralize(len(changes), 'slot decision')}: {', '.join(texts[:4]) or 'no change'}"
        found.append(BoardMark(at=changes[0].at, kind="plan", text=text))
    return found
