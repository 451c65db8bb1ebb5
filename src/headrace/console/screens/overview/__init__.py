"""The overview: the five systems as one picture, what is wrong now, and what people did."""

from __future__ import annotations

from typing import Final

from headrace.console.screens.overview.done import see_audit
from headrace.console.screens.overview.now import see_overview
from headrace.console.seeing import Room, Screen

ROOM: Final = Room(
    name="overview",
    title="Overview",
    key="o",
    screens=(
        Screen(
            path="/",
            title="Overview",
            tab="Now",
            template="overview/now.html",
            scope=None,
            view=see_overview,
        ),
        Screen(
            path="/audit",
            title="What was done here",
            tab="Audit",
            template="overview/audit.html",
            scope="*",
            view=see_audit,
            live=False,
        ),
    ),
)
