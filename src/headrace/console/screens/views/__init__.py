"""Views on the console: the live top, an entity over time, how far the flush is."""

from __future__ import annotations

from typing import Final

from headrace.console.screens.views.actions import ACTIONS
from headrace.console.screens.views.counts import see_entity, see_lag, see_top
from headrace.console.seeing import Room, Screen

READ: Final = "views:read"

ROOM: Final = Room(
    name="views",
    title="Views",
    key="v",
    service="views",
    screens=(
        Screen(path="/views", title="Top", tab="Top", template="views/top.html", scope=READ, view=see_top),
        Screen(
            path="/views/entity", title="Views of an entity", tab="Entity",
            template="views/entity.html", scope=READ, view=see_entity,
        ),
        Screen(path="/views/lag", title="Flush", tab="Flush", template="views/lag.html", scope=READ, view=see_lag),
    ),
    actions=ACTIONS,
)  # fmt: skip
